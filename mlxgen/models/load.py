"""Loading a model from a folder, the hub, or the built-in name; adapters; everything that can be wrong with them."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import ModelLoadError, UnsupportedError
from mlxgen.inputs import VisionFamily, VisionModel
from mlxgen.models import config as model_config
from mlxgen.models import smollm2
from mlxgen.models.adapter import adapter_folder, apply_adapter
from mlxgen.models.bundled import bundled_models
from mlxgen.models.checkpoint import TensorInfo, checked_tensors, has_vision_weights, weight_files
from mlxgen.models.families import installed_families, text_model_types, vision_families
from mlxgen.models.fingerprint import fingerprint_parts, stamp_files
from mlxgen.models.foreign import foreign_errors
from mlxgen.models.hub import HubRequest, LoadProgress, OnProgress, fetch
from mlxgen.models.memory import check_fits, estimate_weights
from mlxgen.models.model import Model, TextForward, eos_ids_of, evaluate_tables, num_bytes_of, vocab_size_of
from mlxgen.models.suggest import nearby_folder

_log = logging.getLogger(__name__)

_EVAL_BYTES: Final = 256 << 20
_REPO_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load. `revision`: branch, tag or commit on the hub. `offline`: never ask the network.

    `trust_remote_code`: run Python files that come with the model (off: nothing of the folder is run).
    `tokenizer_config`: passed to the tokenizer as mlx-lm does. `check_memory=False` loads a model even if the
    estimate says it won't fit. `dtype` chooses the weights of the built-in model ("float32" or "float16").
    """

    adapter_path: str | os.PathLike[str] | None = None
    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    check_memory: bool = True
    dtype: smollm2.Dtype = "float32"


def load(
    path_or_repo: str | os.PathLike[str],
    *,
    options: LoadOptions = LoadOptions(),
    on_progress: OnProgress | None = None,
    cancel: CancelToken = NEVER,
) -> Model:
    """Load a model from a folder, by its name on the hub (`owner/name`), or the built-in `smollm2`.

    Units between two checkpoints: one downloaded block, one checked file, 256 MB of weights read. A stop raises
    `Cancelled`; downloads go on from there at the next call. Raises `ModelLoadError`, `OutOfMemoryError`. The thread
    that calls this owns the model.
    """
    cancel.checkpoint()
    adapter = adapter_folder(options.adapter_path) if options.adapter_path is not None else None
    folder = _locate(os.fspath(path_or_repo), options, on_progress, cancel)
    config = _checked_config(folder, options)
    tensors = checked_tensors(folder, cancel=cancel)
    family = _choose_family(config, tensors, folder)
    files = fingerprint_parts(folder, weight_files(folder), adapter)
    stamps = stamp_files(files)
    if options.check_memory:
        check_fits(estimate_weights(tensors), what=f"loading {path_or_repo}")
    # What a vision family knows of tokenizers that were published for it; see docs/adding-a-family.md.
    usual: Mapping[str, Any] = getattr(family, "tokenizer_config", {})
    tokenizer = read_tokenizer(folder, config, options, usual=usual)
    cancel.checkpoint()
    vision: VisionModel | None = None
    if family is not None:
        vision = _load_family(family, folder, config, cancel)
    if vision is not None:
        module = vision.language
    else:
        module, config = _build_text_model(folder, options)
    if adapter is not None:
        apply_adapter(module, adapter, cancel=cancel)
    _read_weights(module, str(path_or_repo), on_progress, cancel)
    evaluate_tables(module, vision)
    if stamp_files(files) != stamps:
        raise ModelLoadError(f"files in {folder} changed while it was being loaded; wait until they are written")
    return Model(
        module=module,
        tokenizer=tokenizer,
        config=config,
        name=str(path_or_repo),
        forward=vision.forward if vision is not None else TextForward(module),
        vocab_size=vocab_size_of(module, config),
        context_length=model_config.context_length(config),
        eos_token_ids=eos_ids_of(tokenizer, config),
        num_bytes=num_bytes_of(module, vision),
        path=folder,
        adapter_path=adapter,
        vision=vision,
        files=files,
        stamps=stamps,
    )


def _locate(name: str, options: LoadOptions, on_progress: OnProgress | None, cancel: CancelToken) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"{path} has no config.json{_inside(path)}; give the folder that holds the model's files"
            )
        return path
    if path.exists():
        raise ModelLoadError(f"{path} is a file; give the folder of a model, or a name on the hub (owner/name)")
    if name in bundled_models():
        return bundled_models()[name]
    if name == smollm2.NAME:
        return smollm2.converted_folder(options.dtype, on_progress=on_progress, cancel=cancel)
    looks_like_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or os.sep in name.replace("/", "")
    if looks_like_path or not _REPO_NAME.fullmatch(name):
        raise ModelLoadError(
            f"no folder {name!r}{nearby_folder(path)}; give the folder of a model, or owner/name on the hub"
        )
    request = HubRequest(name, options.revision, options.offline, options.trust_remote_code)
    try:
        return fetch(request, on_progress=on_progress, cancel=cancel)
    except ModelLoadError as error:
        near = nearby_folder(path)
        if near and "did you mean" not in str(error):
            raise ModelLoadError(f"{error}{near}") from error
        raise


def _inside(path: Path) -> str:
    found = sorted(child.parent.name for child in path.glob("*/config.json"))
    return f", but its subfolder {found[0]!r} has one" if found else ""


def _checked_config(folder: Path, options: LoadOptions) -> dict[str, Any]:
    config = model_config.read_config(folder)
    code = config.get("model_file")
    if code is not None and not options.trust_remote_code:
        raise ModelLoadError(
            f"{folder} wants to run its own code ({code!r}) to build the model; pass trust_remote_code=True if you "
            "trust it"
        )
    return config


def _load_family(
    family: VisionFamily, folder: Path, config: Mapping[str, Any], cancel: CancelToken
) -> VisionModel | None:
    """The family's model; None where a fallback family refuses a model that mlx-lm can load without its tower."""
    try:
        with foreign_errors(f"{folder} can't be loaded by the vision family {family.name!r}"):
            return family.load(folder, config, cancel=cancel)
    except UnsupportedError as error:
        if not getattr(family, "fallback", False) or config["model_type"] not in text_model_types():
            raise
        _log.warning("%s: text only", error)
        return None


def _choose_family(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], folder: Path) -> VisionFamily | None:
    """The vision family for a checkpoint that has a tower, or None for mlx-lm's text models."""
    model_type = config["model_type"]
    if config.get("model_file") is not None:
        return None
    pictured = has_vision_weights(tensors)
    known_text = model_type in text_model_types()
    if known_text and not pictured:
        return None
    family = vision_families().get(model_type)
    if family is not None and (pictured or (not known_text and getattr(family, "fallback", False))):
        return family
    if known_text:
        _log.warning("%s has a vision tower, but no vision family for %r is installed: text only", folder, model_type)
        return None
    if family is not None:
        raise ModelLoadError(
            f"{folder} is a {model_type} without the weights of its vision tower; download the complete model"
        )
    raise ModelLoadError(_unknown(model_type, folder))


def _unknown(model_type: str, folder: Path) -> str:
    """The line for a model type that nobody here builds: what is supported, and what could be installed for more."""
    text = text_model_types()
    own = {
        kind: installed.family.name
        for installed in installed_families()
        if not installed.fallback
        for kind in installed.model_types
    }
    matches = difflib.get_close_matches(model_type, sorted({*text, *own}), n=3, cutoff=0.5)
    near = f"; closest: {', '.join(matches)}" if matches else ""
    names = ", ".join(sorted(set(own.values()))) or "none installed"
    more = "".join(
        f"; {advice}"
        for installed in installed_families()
        if installed.fallback and (advice := getattr(installed.family, "advice", ""))
    )
    return (
        f"model type {model_type!r} ({folder}) isn't supported{near}; {len(text)} text types of mlx-lm and {len(own)} "
        f"vision types are (families {names}; see mlxgen families){more}"
    )


def supported_model_types() -> tuple[frozenset[str], frozenset[str]]:
    """(text model types, vision model types) that `load` builds."""
    return text_model_types(), frozenset(vision_families())


def read_tokenizer(
    folder: Path, config: Mapping[str, Any], options: LoadOptions, *, usual: Mapping[str, Any] = {}
) -> Any:
    """mlx-lm's wrapper of the folder's tokenizer. `usual` are settings that win over the folder's own, except for its
    chat template, and that the caller's `tokenizer_config` wins over."""
    from mlx_lm.utils import load_tokenizer

    extra: dict[str, Any] = dict(options.tokenizer_config)
    settings = folder / "tokenizer_config.json"
    known = model_config.read_json_object(settings) if settings.is_file() else {}
    for key in ("chat_template_type", "tool_parser_type"):  # mlx-lm imports a module of this name
        value = known.get(key)
        if value is not None and not (isinstance(value, str) and _PLAIN_NAME.fullmatch(value)):
            raise ModelLoadError(f"{settings}: {key} is {value!r}, not a plain name")
    if not any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
    ):
        has_code = options.trust_remote_code and any(folder.glob("*.tiktoken"))
        if not has_code:
            raise ModelLoadError(f"{folder} has no tokenizer (tokenizer.json or tokenizer.model); download it again")
    older = folder / "chat_template.json"  # processors used to keep the template there
    if "chat_template" not in known and older.is_file() and not (folder / "chat_template.jinja").is_file():
        extra.setdefault("chat_template", model_config.read_json_object(older).get("chat_template"))
    has_template = "chat_template" in known or older.is_file() or (folder / "chat_template.jinja").is_file()
    for key, value in usual.items():
        if key != "chat_template" or not has_template:
            extra.setdefault(key, value)
    # Explicitly False: transformers would ask on the terminal otherwise.
    extra["trust_remote_code"] = options.trust_remote_code
    with foreign_errors(f"the tokenizer in {folder} can't be loaded"):
        ids = sorted(_declared_eos(folder, config))
        return load_tokenizer(folder, extra, eos_token_ids=ids or None)


def _declared_eos(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """generation_config.json wins over config.json, as in transformers and mlx-lm."""
    path = folder / "generation_config.json"
    generation = model_config.read_json_object(path) if path.is_file() else {}
    return model_config.eos_token_ids(generation) or model_config.eos_token_ids(config)


def _build_text_model(folder: Path, options: LoadOptions) -> tuple[Any, dict[str, Any]]:
    from mlx_lm.utils import load_model

    with foreign_errors(f"{folder} can't be loaded"):
        module, config = load_model(folder, lazy=True, trust_remote_code=options.trust_remote_code)
    return module, config


def _read_weights(module: Any, name: str, on_progress: OnProgress | None, cancel: CancelToken) -> None:
    """Evaluate the parameters, which is when MLX reads them, 256 MB between two checkpoints."""
    arrays = [array for _, array in tree_flatten(module.parameters())]
    total = sum(array.nbytes for array in arrays)
    done = 0
    group: list[mx.array] = []
    group_bytes = 0
    for index, array in enumerate(arrays):
        group.append(array)
        group_bytes += array.nbytes
        if group_bytes < _EVAL_BYTES and index + 1 < len(arrays):
            continue
        cancel.checkpoint()
        with foreign_errors(f"the weights of {name} can't be read"):
            mx.eval(group)
        done += group_bytes
        group, group_bytes = [], 0
        if on_progress is not None:
            on_progress(LoadProgress("read", done, total, name))
    cancel.checkpoint()
