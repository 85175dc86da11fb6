"""Reading a checkpoint's weights: which files, what is in them, under which names, and into which module.

All vision families load through here, so that a folder in any published layout (as transformers saves it today, as it
was published for transformers 4, as the MLX community publishes it, quantised or not) ends in the same modules, or in
one line that says what is wrong with it. Nothing is skipped in silence: a family takes the weights it knows out of the
dictionary with `take`, and `require_empty` refuses whatever is left over.

The safetensors header is checked before MLX sees a file, because `mx.load` crashes the process on a shape whose product
wraps past 64 bits and accepts overlaps, gaps and trailing bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import ModelLoadError, UnsupportedError

Weights = dict[str, mx.array]

_ITEM_BYTES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
}
_MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors format itself
_MAX_DIMENSION: Final = 2**31 - 1  # MLX counts a dimension in a signed 32-bit integer
_EVAL_BYTES: Final = 256 * 1024 * 1024  # how much is read from disk between two checkpoints


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a safetensors header. `start` and `end` are byte offsets after the header, half-open."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file. Raises `ModelLoadError` if it is something else."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} can't be read as JSON ({error}); download the model again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}, not an object; download the model again")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in name order: all `model*.safetensors`.

    Raises `ModelLoadError` if there are none, or if the index names one that isn't there (a download that was stopped).
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        others = sorted(
            path.name for path in folder.glob("*") if path.suffix in {".bin", ".pt", ".pth", ".gguf", ".npz"}
        )
        found = f"; it has {', '.join(others[:3])}, which mlxgen doesn't read" if others else ""
        raise ModelLoadError(f"{folder} has no model*.safetensors file{found}; convert the model to safetensors")
    named = read_json(folder / "model.safetensors.index.json").get("weight_map", {})
    present = {path.name for path in files}
    missing = sorted({str(name) for name in named.values()} - present) if isinstance(named, dict) else []
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} of the weight files its index names, first {missing[0]}; "
            "finish the download, or remove model.safetensors.index.json if it belongs to another conversion"
        )
    return files


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The checked header of a safetensors file: every tensor's type, shape and place.

    Raises `ModelLoadError` unless every type is known, every shape's product (in Python's integers) times the item size
    is the length between the offsets, and the tensors cover the file exactly: no overlap, no gap, no bytes left over.
    """

    def bad(what: str) -> ModelLoadError:
        return ModelLoadError(f"{path} is not a sound safetensors file: {what}; download it again")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            raw = file.read(min(header_bytes, _MAX_HEADER_BYTES))
    except OSError as error:
        raise ModelLoadError(f"{path} can't be read: {error}") from error
    if len(prefix) < 8 or len(raw) < header_bytes:
        raise bad(f"its header claims {header_bytes} bytes, the file has {file_bytes}")
    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise bad(f"its header can't be parsed ({error})") from error
    if not isinstance(header, dict):
        raise bad("its header is no JSON object")
    header.pop("__metadata__", None)
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        info = _tensor_info(entry)
        if info is None:
            raise bad(f"the entry of {name!r} is malformed")
        if info.dtype not in _ITEM_BYTES:
            raise UnsupportedError(
                f"{path} stores {name!r} as {info.dtype}; mlxgen reads {', '.join(_ITEM_BYTES)}: "
                "use the bfloat16 checkpoint or an MLX conversion"
            )
        wanted = math.prod(info.shape) * _ITEM_BYTES[info.dtype]
        if info.end - info.start != wanted or any(size > _MAX_DIMENSION for size in info.shape):
            raise bad(f"{name!r} of shape {info.shape} needs {wanted} bytes and has {info.end - info.start}")
        tensors[name] = info
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            raise bad(f"{name!r} starts at byte {info.start}, the tensor before it ends at {position}")
        position = info.end
    if position != file_bytes - 8 - header_bytes:
        raise bad(f"its tensors end at byte {position} of {file_bytes - 8 - header_bytes}")
    return tensors


def _tensor_info(entry: object) -> TensorInfo | None:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return None
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return None
    numbers = [*shape, *offsets]
    if not isinstance(entry["dtype"], str):
        return None
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        return None
    return TensorInfo(entry["dtype"], tuple(shape), offsets[0], offsets[1])


def read_weights(folder: Path, *, cancel: CancelToken = NEVER) -> Weights:
    """All weights of a folder by name, not read yet: MLX reads an array when it is first evaluated.

    One file's header is one unit. Raises `ModelLoadError` as `weight_files` and `read_header` do, and if two files hold
    a tensor of the same name.
    """
    weights: Weights = {}
    for path in weight_files(folder):
        cancel.checkpoint()
        header = read_header(path)
        twice = sorted(set(header) & set(weights))
        if twice:
            raise ModelLoadError(f"{path} holds {twice[0]!r}, which another weight file holds too; remove one of them")
        if header:
            loaded = mx.load(str(path))
            assert isinstance(loaded, dict)
            weights.update(loaded)
    return weights


def take(weights: Weights, prefixes: Mapping[str, str]) -> Weights:
    """Move the weights under any of `prefixes` out of `weights` and return them, each under its new prefix.

    The longest prefix that fits wins. Raises `ModelLoadError` if two weights get the same name.
    """
    ordered = sorted(prefixes, key=len, reverse=True)
    taken: Weights = {}
    for name in list(weights):
        prefix = next((prefix for prefix in ordered if name.startswith(prefix)), None)
        if prefix is None:
            continue
        renamed = prefixes[prefix] + name[len(prefix) :]
        if renamed in taken:
            raise ModelLoadError(f"the checkpoint holds two weights that both stand for {renamed!r}, one is {name!r}")
        taken[renamed] = weights.pop(name)
    return taken


def require_empty(weights: Mapping[str, mx.array], *, ignore: Sequence[str] = ()) -> None:
    """Raise `ModelLoadError` if weights are left that nobody took, except those whose name contains one of `ignore`."""
    left = sorted(name for name in weights if not any(part in name for part in ignore))
    if left:
        raise ModelLoadError(
            f"{len(left)} weights of the checkpoint have no place in this model, first {left[0]!r}: "
            "it is of another architecture than its config.json says"
        )


def channel_last(weight: mx.array, *, channels: int, kernel: Sequence[int]) -> mx.array:
    """A convolution's weight as MLX wants it, (out, *kernel, channels), from that or from (out, channels, *kernel).

    Raises `ModelLoadError` if it is neither (or could be both).
    """
    first, last = (channels, *kernel), (*kernel, channels)
    shape = tuple(weight.shape[1:])
    if first == last or shape not in (first, last):
        raise ModelLoadError(
            f"a convolution's weight has shape {tuple(weight.shape)}; "
            f"(out, {', '.join(map(str, first))}) or (out, {', '.join(map(str, last))}) was expected"
        )
    return mx.moveaxis(weight, 1, -1) if shape == first else weight


def patch_matrix(weight: mx.array, *, channels: int, kernel: Sequence[int]) -> mx.array:
    """A patch embedding's convolution, whose stride is its kernel, as the matrix (out, channels * prod(kernel)) it is.

    Columns run channel first, then over the kernel, as the processors flatten a patch. Takes both layouts.
    """
    if weight.ndim == 2:
        return weight
    return mx.moveaxis(channel_last(weight, channels=channels, kernel=kernel), -1, 1).reshape(weight.shape[0], -1)


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` for a checkpoint quantised by anything but MLX."""
    for part in (config, config.get("text_config") or {}):
        method = (part.get("quantization_config") or {}).get("quant_method")
        if method is not None:
            raise UnsupportedError(
                f"the checkpoint is quantised with {method!r}; mlxgen reads MLX's own quantisation: "
                "use the unquantised checkpoint or an MLX conversion of it"
            )


def fill(module: nn.Module, weights: Weights, *, what: str, cancel: CancelToken = NEVER) -> None:
    """Give a freshly built module its weights, read them, and leave it ready for inference.

    Layers whose weights are quantised (`.scales` is there) are replaced by their quantised kind; bits, group size and
    mode follow from the arrays themselves, so no table in a config, whose names differ between layouts, is needed.
    Up to 256 MB are read between two checkpoints. `what` names the part in errors ("the vision tower").

    Raises `ModelLoadError` unless the weights are exactly the module's parameters, in name and shape.
    """
    _quantize_like(module, weights)
    expected = dict(tree_flatten(module.parameters()))
    missing, surplus = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    if missing or surplus:
        parts = [f"lacks {len(missing)} weights, first {missing[0]!r}"] if missing else []
        parts += [f"has {len(surplus)} that don't belong, first {surplus[0]!r}"] if surplus else []
        raise ModelLoadError(f"{what} {' and '.join(parts)}; config.json and weights don't match, download both again")
    for name, array in weights.items():
        if tuple(array.shape) != tuple(expected[name].shape):
            raise ModelLoadError(
                f"{what}: {name!r} has shape {tuple(array.shape)}, config.json wants {tuple(expected[name].shape)}; "
                "config.json and weights don't match, download both again"
            )
    module.load_weights(list(weights.items()))
    module.eval()
    _evaluate(weights.values(), cancel)


def _evaluate(arrays: Iterable[mx.array], cancel: CancelToken) -> None:
    group: list[mx.array] = []
    num_bytes = 0
    for array in arrays:
        if group and num_bytes + array.nbytes > _EVAL_BYTES:
            cancel.checkpoint()
            mx.eval(group)
            group, num_bytes = [], 0
        group.append(array)
        num_bytes += array.nbytes
    cancel.checkpoint()
    mx.eval(group)


def _quantize_like(module: nn.Module, weights: Weights) -> None:
    def parameters(path: str, layer: nn.Module) -> dict[str, Any] | bool:
        if f"{path}.scales" not in weights or not hasattr(layer, "to_quantized"):
            return False
        packed, scales = weights.get(f"{path}.weight"), weights[f"{path}.scales"]
        width = layer.weight.shape[-1]
        if packed is None or packed.dtype != mx.uint32 or not scales.shape[-1] or width % scales.shape[-1]:
            raise ModelLoadError(
                f"{path!r} has quantisation scales that don't fit its weight; download the model again"
            )
        group_size, bits = width // scales.shape[-1], packed.shape[-1] * 32 // width
        if f"{path}.biases" in weights:
            mode = "affine"
        else:
            mode = {(32, 4): "mxfp4", (16, 4): "nvfp4", (32, 8): "mxfp8"}.get((group_size, bits), "")
            if not mode:
                raise UnsupportedError(
                    f"{path!r} is quantised with {bits} bits in groups of {group_size} and without biases; "
                    "mlxgen knows MLX's affine, mxfp4, mxfp8 and nvfp4 modes"
                )
        return {"group_size": group_size, "bits": bits, "mode": mode}

    if any(name.endswith(".scales") for name in weights):
        nn.quantize(module, class_predicate=parameters)
