"""A loaded model: what all sessions share."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import ModelLoadError, UnsupportedError
from mlxgen.models import config as model_config
from mlxgen.models.fingerprint import FileStamp, Fingerprint, fingerprint_arrays, fingerprint_files

if TYPE_CHECKING:
    from mlxgen.inputs import ForwardPass, PreparedInput, VisionModel


class TextForward:
    """The forward pass of a text model: ids in, logits out, everything of the request in the arguments."""

    __slots__ = ("_module",)

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, ids: mx.array, *, cache: Sequence[Any], start: int, inputs: PreparedInput | None) -> mx.array:
        """Logits (1, n, vocabulary), lazily; `ids` is uint32 (n,). Raises `UnsupportedError` for media."""
        if inputs is not None and inputs.media:
            raise UnsupportedError(
                f"{len(inputs.media)} image(s) or video(s) for a text-only model; load a vision-language model"
            )
        logits: mx.array = self._module(ids[None], cache=list(cache))
        return logits


@dataclass(frozen=True, eq=False)
class Model:
    """A language model with its tokenizer and, for vision-language models, its vision part.

    Immutable after load, and without any state of a request (P6): any number of sessions may share it, on the thread
    that owns it. Unpacks as `model, tokenizer = load(...)`, as with mlx-lm.

    `vocab_size` is the number of token ids the model takes and gives: every id fed must be below it. `context_length`
    counts tokens (None: no limit known). `num_bytes` counts the parameters.
    """

    module: nn.Module
    tokenizer: Any
    config: Mapping[str, Any]
    name: str
    forward: ForwardPass
    vocab_size: int
    context_length: int | None
    eos_token_ids: frozenset[int]
    num_bytes: int
    path: Path | None = None
    adapter_path: Path | None = None
    vision: VisionModel | None = None
    files: Mapping[str, Sequence[Path]] = field(default_factory=dict, repr=False)
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict, repr=False)

    @classmethod
    def from_parts(
        cls,
        module: nn.Module,
        tokenizer: Any,
        *,
        config: Mapping[str, Any] | None = None,
        name: str = "in-memory model",
        vision: VisionModel | None = None,
    ) -> Model:
        """A model from objects the caller made, such as the pair `mlx_lm.load` returns. Its fingerprint hashes arrays.

        `tokenizer` is mlx-lm's `TokenizerWrapper` or a transformers tokenizer (which is wrapped). Without `config`, the
        module's own arguments (`module.args`) are taken.
        """
        known = dict(config) if config is not None else _args_of(module)
        wrapped = wrap_tokenizer(tokenizer, known)
        evaluate_tables(module, vision)
        return cls(
            module=module,
            tokenizer=wrapped,
            config=known,
            name=name,
            forward=vision.forward if vision is not None else TextForward(module),
            vocab_size=vocab_size_of(module, known),
            context_length=model_config.context_length(known),
            eos_token_ids=eos_ids_of(wrapped, known),
            num_bytes=num_bytes_of(module, vision),
            vision=vision,
        )

    def __iter__(self) -> Iterator[Any]:
        yield self.module
        yield self.tokenizer

    @functools.cached_property
    def _identified(self) -> list[Fingerprint]:
        return []

    def identify(self, *, cancel: CancelToken = NEVER) -> Fingerprint:
        """The model's fingerprint; the first call may read all weights (0.6 to 1 GB/s), later ones are free.

        Raises `ModelLoadError` when a file has changed since the model was loaded.
        """
        if not self._identified:
            if self.files:
                found = fingerprint_files(self.files, loaded=self.stamps, cancel=cancel)
            else:
                found = fingerprint_arrays(self.module, self.tokenizer, self.config, cancel=cancel)
            self._identified.append(found)
        return self._identified[0]

    @property
    def fingerprint(self) -> Fingerprint:
        return self.identify()


def wrap_tokenizer(tokenizer: Any, config: Mapping[str, Any]) -> Any:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    return TokenizerWrapper(tokenizer, eos_token_ids=sorted(model_config.eos_token_ids(config)) or None)


def eos_ids_of(tokenizer: Any, config: Mapping[str, Any]) -> frozenset[int]:
    ids = getattr(tokenizer, "eos_token_ids", None)
    return frozenset(ids) if ids else model_config.eos_token_ids(config)


def _args_of(module: nn.Module) -> dict[str, Any]:
    args = getattr(module, "args", None)
    known = dict(vars(args)) if hasattr(args, "__dict__") else {}
    nested = known.get("text_config")
    if nested is not None and not isinstance(nested, Mapping) and hasattr(nested, "__dict__"):
        known["text_config"] = dict(vars(nested))
    return known


_EMBEDDINGS: Final = frozenset(
    (
        *("embed_tokens", "wte", "embeddings", "embedding", "tok_embeddings"),
        *("word_embeddings", "embed_in", "lm_head", "embed_out"),
    )
)


def vocab_size_of(module: nn.Module, config: Mapping[str, Any]) -> int:
    """Rows of the embedding and of the output projection (the fewer, should they differ).

    An id beyond the rows makes MLX read, and write, memory that isn't the model's: this is the limit to check against.
    """
    rows = [
        int(array.shape[0])
        for name, array in tree_flatten(module.parameters())
        if name.endswith(".weight") and name.split(".")[-2] in _EMBEDDINGS and array.ndim == 2
    ]
    if rows:
        return min(rows)
    declared = model_config.text_config(config).get("vocab_size", config.get("vocab_size"))
    if not isinstance(declared, int) or declared < 1:
        raise ModelLoadError(
            f"can't tell the vocabulary of a {type(module).__qualname__}: no embedding matrix found, and its config "
            "has no vocab_size; pass config={'vocab_size': …}"
        )
    return declared


def evaluate_tables(module: nn.Module, vision: VisionModel | None) -> None:
    """Evaluate what modules hold beside their parameters (tables of rotary frequencies).

    An array that is still lazy belongs to the thread that built it; no other thread could evaluate it, so the first
    pass on the model's own thread would fail.
    """
    modules = [module, *(part for part in _attributes(vision) if isinstance(part, nn.Module))]
    mx.eval(
        [
            value
            for top in modules
            for _, part in top.named_modules()
            for held in (part.values(), vars(part).values())
            for value in held
            if isinstance(value, mx.array)
        ]
    )


def num_bytes_of(module: nn.Module, vision: VisionModel | None) -> int:
    modules = [module, *(part for part in _attributes(vision) if isinstance(part, nn.Module))]
    arrays = {id(array): int(array.nbytes) for part in modules for _, array in tree_flatten(part.parameters())}
    return sum(arrays.values())


def _attributes(owner: object) -> list[Any]:
    return list(vars(owner).values()) if hasattr(owner, "__dict__") else []
