"""Safetensors files, read strictly and written deterministically, without a copy of the data in either direction.

The format (huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header `{name: {"dtype",
"shape", "data_offsets": [begin, end]}}`, then the data. The reader works on bytes that are already in memory, so what
was hashed is what is parsed, and accepts nothing that could make a consumer read outside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlxgen.errors import InvalidValueError
from mlxgen.snapshot import jsontext

MAX_HEADER_BYTES: Final = 100_000_000
MAX_DIM: Final = 2**31 - 1
"""MLX keeps each dimension in 32 bits."""
MAX_ELEMENTS: Final = 2**40
"""Of a shape with its zeros taken as ones: an empty array with absurd other dimensions overflows strides elsewhere."""
MAX_NDIM: Final = 32

_DTYPES: Final[dict[str, tuple[int, str]]] = {
    "BF16": (2, "<u2"),
    "F16": (2, "<f2"),
    "F32": (4, "<f4"),
    "F64": (8, "<f8"),
    "I8": (1, "|i1"),
    "I16": (2, "<i2"),
    "I32": (4, "<i4"),
    "I64": (8, "<i8"),
    "U8": (1, "|u1"),
    "U16": (2, "<u2"),
    "U32": (4, "<u4"),
    "U64": (8, "<u8"),
    "BOOL": (1, "|b1"),
}


class SafetensorsError(ValueError):
    """Bytes that aren't a well-formed safetensors file. Callers turn it into an error that names the file."""


@dataclass(frozen=True, eq=False)
class HostArray:
    """An array outside MLX: a safetensors dtype name, a shape, and its bytes, little-endian and C-contiguous.

    `data` is a buffer of exactly shape x itemsize bytes: raw bytes, or a NumPy array of the matching dtype (bfloat16,
    which NumPy lacks, travels as uint16 bits). What `read` returns are read-only views into one buffer.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes | NDArray[Any]

    @classmethod
    def from_numpy(cls, array: NDArray[Any], dtype: str | None = None) -> HostArray:
        """Wrap a C-contiguous array, without a copy; `dtype="BF16"` for one that holds bfloat16 bits as uint16."""
        if dtype is None:
            native = array.dtype.newbyteorder("<")
            names = [name for name, (_, code) in _DTYPES.items() if name != "BF16" and np.dtype(code) == native]
            if not names:
                raise InvalidValueError(f"NumPy dtype {array.dtype} has no safetensors name; convert it first")
            dtype = names[0]
        made = cls(dtype, tuple(array.shape), array)
        made.raw()
        return made

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _itemsize(self.dtype)

    def numpy(self) -> NDArray[Any]:
        """The array as NumPy, without a copy (BF16 as uint16 bits)."""
        code = _DTYPES[self.dtype][1] if self.dtype in _DTYPES else "|u1"
        return np.frombuffer(self.raw(), dtype=code).reshape(self.shape)

    def raw(self) -> memoryview:
        """The bytes, flat, without a copy. Raises `InvalidValueError` when dtype, shape and buffer don't agree."""
        _check_shape(self.shape, InvalidValueError)
        expected = self.nbytes
        if isinstance(self.data, np.ndarray):
            code = np.dtype(_DTYPES[self.dtype][1])
            if self.data.dtype not in (code, np.dtype(np.uint8)):
                raise InvalidValueError(
                    f"{self.dtype} data in a NumPy array of {self.data.dtype}; it takes {code} or raw uint8"
                )
            if not self.data.flags.c_contiguous:
                raise InvalidValueError("a NumPy array that isn't C-contiguous; pass np.ascontiguousarray(...) of it")
            flat = self.data.reshape(-1).view(np.uint8).data
        else:
            view = memoryview(self.data)
            if not view.c_contiguous:
                raise InvalidValueError("a buffer that isn't C-contiguous; pass bytes(...) of it")
            flat = view.cast("B") if view.nbytes else memoryview(b"")
        if flat.nbytes != expected:
            raise InvalidValueError(
                f"{self.dtype} of shape {self.shape} takes {expected} bytes, the buffer has {flat.nbytes}"
            )
        return flat


def _itemsize(dtype: str) -> int:
    if dtype not in _DTYPES:
        raise InvalidValueError(f"dtype {dtype!r} can't be stored; use one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype][0]


def _check_shape(shape: Any, error: type[ValueError]) -> None:
    if len(shape) > MAX_NDIM:
        raise error(f"{len(shape)} dimensions, the limit is {MAX_NDIM}")
    elements = 1
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= MAX_DIM:
            raise error(f"a dimension of {dim!r}; dimensions are whole numbers from 0 to {MAX_DIM}")
        elements *= max(dim, 1)
        if elements > MAX_ELEMENTS:
            raise error(f"the shape {list(shape)} has over {MAX_ELEMENTS} elements")


def encode(arrays: Mapping[str, HostArray]) -> Iterator[memoryview | bytes]:
    """The pieces of the file, in order: the header, then each array's own buffer. Equal arrays give equal bytes.

    Sorted by descending itemsize, then name, which keeps every array aligned to its itemsize; the header is padded with
    spaces to a multiple of 8. Everything is checked before the first piece is given.
    """
    for name in arrays:
        if not isinstance(name, str) or name == "__metadata__":
            raise InvalidValueError(f"{name!r} can't name an array; use another string")
    buffers = {name: array.raw() for name, array in arrays.items()}
    order = sorted(arrays, key=lambda name: (-_itemsize(arrays[name].dtype), name))
    header: dict[str, Any] = {}
    offset = 0
    for name in order:
        array, end = arrays[name], offset + buffers[name].nbytes
        header[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidValueError(
            f"{len(arrays)} arrays need a header of {len(text)} bytes, the limit is {MAX_HEADER_BYTES}"
        )
    return iter([len(text).to_bytes(8, "little") + text, *(buffers[name] for name in order)])


def decode(data: memoryview) -> dict[str, HostArray]:
    """The arrays of a whole file held in memory, as views into `data`. Raises `SafetensorsError`.

    Beyond the format's own rules: every byte after the header belongs to exactly one array, no key occurs twice, a
    BOOL is 0 or 1, and shapes stay within what MLX can hold.
    """
    total = len(data)
    if total < 8:
        raise SafetensorsError(f"{total} bytes are too few for a header")
    num_header = int.from_bytes(data[:8], "little")
    if num_header > MAX_HEADER_BYTES or num_header > total - 8:
        raise SafetensorsError(f"a header of {num_header} bytes in a file of {total} (limit {MAX_HEADER_BYTES})")
    text = bytes(data[8 : 8 + num_header])
    if text[:1] != b"{":
        raise SafetensorsError("the header doesn't start with '{'")
    try:
        header = jsontext.decode(text.rstrip(b" "), tags=False, unique_keys=True)
    except jsontext.JsonTextError as exc:
        raise SafetensorsError(f"the header isn't strict JSON: {exc}") from exc
    body = data[8 + num_header :]
    found: list[tuple[int, int, str, HostArray]] = []
    for name, info in header.items():
        if name == "__metadata__":
            if not isinstance(info, dict) or not all(isinstance(value, str) for value in info.values()):
                raise SafetensorsError("__metadata__ isn't an object of strings")
            continue
        try:
            found.append(_array(name, info, body))
        except SafetensorsError as exc:
            raise SafetensorsError(f"array {name!r}: {exc}") from exc
    position = 0
    for begin, end, name, _ in sorted(found, key=lambda item: item[:3]):
        if begin != position:
            raise SafetensorsError(f"array {name!r} begins at {begin}, the one before it ends at {position}")
        position = end
    if position != len(body):
        raise SafetensorsError(f"the arrays end at {position} of {len(body)} bytes")
    return {name: array for _, _, name, array in found}


def _array(name: str, info: Any, body: memoryview) -> tuple[int, int, str, HostArray]:
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise SafetensorsError("its entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise SafetensorsError(f"unknown dtype {dtype!r}")
    if not isinstance(shape, list):
        raise SafetensorsError(f"shape {shape!r} isn't a list")
    _check_shape(shape, SafetensorsError)
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(offset) is not int for offset in offsets):
        raise SafetensorsError(f"data_offsets {offsets!r} aren't two whole numbers")
    begin, end = offsets
    if not 0 <= begin <= end <= len(body):
        raise SafetensorsError(f"data_offsets {offsets} outside the {len(body)} bytes of data")
    needed = math.prod(shape) * _DTYPES[dtype][0]
    if end - begin != needed:
        raise SafetensorsError(f"{dtype} of shape {shape} takes {needed} bytes, data_offsets give {end - begin}")
    data = body[begin:end]
    if dtype == "BOOL" and needed and int(np.frombuffer(data, np.uint8).max()) > 1:
        raise SafetensorsError("a BOOL that is neither 0 nor 1")
    return begin, end, name, HostArray(dtype, tuple(shape), data)
