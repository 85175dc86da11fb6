"""What is in a checkpoint folder's safetensors files, checked strictly before MLX reads a byte of them.

`mx.load` believes a header: a shape whose product wraps past 64 bits loads and then ends the process, and gaps or
overlaps load silently. Here all sizes are Python integers, and every byte of a file must belong to exactly one tensor
(the safetensors format demands that: https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import ModelLoadError

MAX_HEADER_BYTES: Final = 100_000_000
_MAX_DIM: Final = 2**31 - 1  # MLX keeps a dimension in an int32

# Bytes per element of the dtypes MLX reads.
ITEM_SIZES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `dtype` as safetensors names it, and the half-open byte range in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def parse_header(header: bytes, data_bytes: int, *, where: str) -> dict[str, TensorInfo]:
    """Check a safetensors header against the length of the data behind it; raise `ModelLoadError` if it's not exact.

    `header` is the JSON text, `data_bytes` the number of bytes that follow it, `where` names the file in errors.
    """

    def fail(problem: str) -> ModelLoadError:
        return ModelLoadError(f"{where} is not a valid safetensors file: {problem}; download or copy it again")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise fail(f"{twice!r} occurs twice in a header object")
        return entries

    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise fail(f"its header is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise fail(f"its header is a JSON {type(entries).__name__}, not an object")
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, fail) for name, entry in entries.items()}
    position = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != position:
            raise fail(f"tensor {tensor.name!r} starts at byte {tensor.start}, expected {position} (gap or overlap)")
        position = tensor.end
    if position != data_bytes:
        kind = "truncated" if data_bytes < position else "followed by bytes of no tensor"
        raise fail(f"its tensors take {position} bytes but {data_bytes} are there (it is {kind})")
    return tensors


def _tensor(name: str, entry: Any, fail: Any) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise fail(f"the entry of tensor {name!r} lacks dtype, shape or data_offsets, or has more than these")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise fail(f"tensor {name!r} has dtype {dtype!r}, which MLX can't read (it reads {', '.join(ITEM_SIZES)})")
    if not isinstance(shape, list) or not all(type(dim) is int and 0 <= dim <= _MAX_DIM for dim in shape):
        raise fail(f"tensor {name!r} has shape {shape!r}; dimensions are integers from 0 to {_MAX_DIM}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise fail(f"tensor {name!r} has data_offsets {offsets!r}; two integers are needed")
    start, end = offsets
    expected = math.prod(shape) * ITEM_SIZES[dtype]
    if start < 0 or end - start != expected:
        raise fail(f"tensor {name!r} ({dtype}, shape {shape}) takes {expected} bytes, not {start} to {end}")
    return TensorInfo(name, dtype, tuple(shape), start, end)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, by name. Reads the header only; raises `ModelLoadError`."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ModelLoadError(
                    f"{path} is not a valid safetensors file: {size} bytes long, and its header claims {length} "
                    f"(limit {MAX_HEADER_BYTES}); download or copy it again"
                )
            header = file.read(length)
    except OSError as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"can't read {path}: {error.strerror or error}") from error
    return parse_header(header, size - 8 - length, where=str(path))


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder, in name order; raises `ModelLoadError` when there are none or too few.

    `model*.safetensors`, as mlx-lm takes them. With an index file, every shard it names must be there.
    """
    files = sorted(folder.glob("model*.safetensors"))
    missing = sorted(set(_indexed_shards(folder)) - {file.name for file in files})
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} weight file(s) that model.safetensors.index.json names, the first is "
            f"{missing[0]}; download or copy them again"
        )
    if not files:
        others = sorted(path.name for pattern in _FOREIGN_WEIGHTS for path in folder.glob(pattern))
        found = f" (found {', '.join(others[:3])})" if others else ""
        raise ModelLoadError(
            f"{folder} has a config.json but no weights: no model*.safetensors{found}; download the model again, or "
            "convert other formats with `mlx_lm.convert --hf-path <model>`"
        )
    return files


_FOREIGN_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.safetensors")


def _indexed_shards(folder: Path) -> Iterable[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        entries = json.loads(index.read_bytes())["weight_map"].values()
        names = {name for name in entries if isinstance(name, str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{index} is not a usable index ({error}); download or copy it again") from error
    # Names only: a path in an index must not lead out of the folder.
    return [name for name in names if name.startswith("model") and name.endswith(".safetensors") and "/" not in name]


def checked_tensors(folder: Path, *, cancel: CancelToken = NEVER) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint folder, every file's header checked. One checkpoint before each file."""
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        cancel.checkpoint()
        tensors.update(read_header(file))
    return tensors


_VISION_WORDS: Final = (
    "vision",
    "visual",
    "multi_modal_projector",
    "mm_projector",
    "patch_embed",
    "image_newline",
    "connector.",
    "mlp1.",
)


def has_vision_weights(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensor names holds a vision tower (text-only conversions drop it)."""
    return any(word in name for name in names for word in _VISION_WORDS)
