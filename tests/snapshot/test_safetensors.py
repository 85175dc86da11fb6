from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from snapshot.folders import KV, plain

from mlxgen.errors import InvalidValueError
from mlxgen.snapshot.safetensors import MAX_HEADER_BYTES, HostArray, SafetensorsError, decode, encode

ARRAYS = {
    "bf": HostArray("BF16", (2, 3), np.arange(6, dtype=np.uint16).reshape(2, 3)),
    "f2": HostArray.from_numpy(np.arange(3, dtype=np.float16)),
    "f4": HostArray.from_numpy(np.array([np.nan, -0.0, np.inf], np.float32)),
    "f8": HostArray.from_numpy(np.arange(2, dtype=np.float64)),
    "i1": HostArray.from_numpy(np.arange(-3, 2, dtype=np.int8)),
    "i2": HostArray.from_numpy(np.arange(3, dtype=np.int16)),
    "i4": HostArray.from_numpy(np.arange(3, dtype=np.int32)),
    "i8": HostArray.from_numpy(np.array(7, np.int64)),
    "u1": HostArray("U8", (5,), b"abcde"),
    "u2": HostArray.from_numpy(np.arange(3, dtype=np.uint16)),
    "u4": HostArray("U32", (2, 1), memoryview(np.arange(2, dtype=np.uint32).data)),
    "u8": HostArray.from_numpy(np.arange(3, dtype=np.uint64)),
    "bool": HostArray.from_numpy(np.array([[True], [False]])),
    "empty": HostArray("F32", (0, 4), b""),
    "ünïcode \"'\n": HostArray("U8", (1,), b"x"),
}


def joined(arrays: dict[str, HostArray]) -> bytes:
    return b"".join(bytes(piece) for piece in encode(arrays))


def crafted(header: Any, body: bytes = b"") -> memoryview:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + body)


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_dtype_comes_back() -> None:
    back = decode(memoryview(joined(ARRAYS)))
    assert plain(back) == plain(ARRAYS)
    assert back["f4"].numpy().tobytes() == np.array([np.nan, -0.0, np.inf], np.float32).tobytes()
    assert back["bf"].numpy().dtype == np.uint16
    assert back["empty"].numpy().shape == (0, 4)
    assert plain(decode(memoryview(joined(back)))) == plain(ARRAYS)


def test_the_reference_reader_agrees() -> None:
    reference = pytest.importorskip("safetensors.numpy")
    arrays = {name: array for name, array in ARRAYS.items() if name != "bf"}
    back = reference.load(joined(arrays))
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert back[name].tobytes() == bytes(array.raw())


def test_the_reference_writer_is_read() -> None:
    reference = pytest.importorskip("safetensors.numpy")
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, 2], np.int8)}
    back = decode(memoryview(reference.save(values, metadata={"format": "np"})))
    assert {name: array.numpy().tolist() for name, array in back.items()} == {
        name: value.tolist() for name, value in values.items()
    }


def test_equal_arrays_give_equal_bytes_and_aligned_data() -> None:
    data = joined(ARRAYS)
    assert data == joined(dict(reversed(ARRAYS.items())))
    header_bytes = int.from_bytes(data[:8], "little")
    assert header_bytes % 8 == 0
    for info in json.loads(data[8 : 8 + header_bytes]).values():
        itemsize = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4}.get(info["dtype"], 1)
        assert info["data_offsets"][0] % itemsize == 0


def test_arrays_are_streamed_and_read_without_copies() -> None:
    value = np.arange(1000, dtype=np.float32)
    _, piece = encode({"a": HostArray.from_numpy(value)})
    assert np.shares_memory(np.frombuffer(piece, np.float32), value)
    data = np.frombuffer(joined({"a": HostArray.from_numpy(value)}), np.uint8)
    assert np.shares_memory(decode(data.data.toreadonly())["a"].numpy(), data)


@pytest.mark.parametrize(
    "make",
    [
        lambda: HostArray("F32", (3,), b"12345678").raw(),
        lambda: HostArray("F9", (3,), b"123").raw(),
        lambda: HostArray("F32", (2, 2), np.zeros((2, 2), np.float32).T[:1]).raw(),
        lambda: HostArray("F32", (2,), np.zeros(2, np.int32)).raw(),
        lambda: HostArray("U8", (-1,), b"").raw(),
        lambda: HostArray("U8", (True,), b"1").raw(),
        lambda: HostArray("U8", (0, 2**31), b"").raw(),
        lambda: HostArray("U8", (0, 2**21, 2**21), b"").raw(),
        lambda: HostArray("U8", (1,) * 33, b"1").raw(),
        lambda: HostArray("U8", (2,), memoryview(b"abcd")[::2]).raw(),
        lambda: HostArray.from_numpy(np.zeros(2, np.complex64)),
        lambda: HostArray.from_numpy(np.zeros((2, 3)).T),
        lambda: encode({"__metadata__": KV["mask"]}),
    ],
)
def test_arrays_that_do_not_fit_their_description_are_refused(make: Any) -> None:
    with pytest.raises(InvalidValueError):
        make()


BAD_FILES = {
    "nothing": memoryview(b""),
    "seven bytes": memoryview(b"\0" * 7),
    "header longer than the file": memoryview((100).to_bytes(8, "little") + b"{}"),
    "header length of 2^64-1": memoryview(b"\xff" * 8 + b"{}"),
    "no header": memoryview(bytes(8)),
    "header over the cap": memoryview((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}"),
    "not json": crafted(b"{nope}"),
    "leading space": crafted(b" {}"),
    "trailing tab": crafted(b"{}\t\0"),
    "a list": crafted(b"[]"),
    "nested too deep": crafted(b'{"a":' * 100_000),
    "NaN": crafted(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'),
    "duplicate name": crafted(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "unknown dtype": crafted({"a": entry("F7")}, b"1234"),
    "dtype is a number": crafted({"a": entry(7)}, b"1234"),
    "dtype of another size": crafted({"a": entry("F32")}, b"1234"),
    "shape of another size": crafted({"a": entry(shape=(5,))}, b"1234"),
    "negative dimension": crafted({"a": entry(shape=(-2, -2))}, b"1234"),
    "fractional dimension": crafted({"a": entry(shape=(4.0,))}, b"1234"),
    "boolean dimension": crafted({"a": entry(shape=(True, 4))}, b"1234"),
    "product wraps to 4 in 64 bits": crafted({"a": entry(shape=(2**31 - 1, 2**31 - 1, 4, 4, 4))}, b"1234"),
    "product wraps to 0 in 64 bits": crafted({"a": entry(shape=(2**16,) * 4, offsets=(0, 0))}),
    "dimension over 32 bits": crafted({"a": entry(shape=(2**32 + 4,))}, b"1234"),
    "empty with an absurd dimension": crafted({"a": entry(shape=(0, 2**62), offsets=(0, 0))}),
    "too many dimensions": crafted({"a": entry(shape=(1,) * 40 + (4,))}, b"1234"),
    "shape missing": crafted({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, b"1234"),
    "extra key": crafted({"a": entry() | {"more": 1}}, b"1234"),
    "offsets reversed": crafted({"a": entry(offsets=(4, 0))}, b"1234"),
    "offsets negative": crafted({"a": entry(offsets=(-4, 0))}, b"1234"),
    "offsets past the end": crafted({"a": entry(offsets=(1, 5))}, b"1234"),
    "three offsets": crafted({"a": entry(offsets=(0, 2, 4))}, b"1234"),
    "boolean offset": crafted({"a": entry(shape=(1,), offsets=(False, True))}, b"1"),
    "overlap": crafted({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456"),
    "same bytes twice": crafted({"a": entry(), "b": entry()}, b"1234"),
    "gap": crafted({"a": entry(), "b": entry(offsets=(5, 9))}, b"123456789"),
    "gap at the start": crafted({"a": entry(offsets=(1, 5))}, b"12345"),
    "bytes after the last array": crafted({"a": entry()}, b"12345"),
    "bytes and no array": crafted({}, b"1"),
    "metadata of numbers": crafted({"__metadata__": {"a": 1}}),
    "metadata is a list": crafted({"__metadata__": []}),
    "boolean of 2": crafted({"a": entry("BOOL")}, b"\0\1\2\0"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_crafted_file_is_refused(name: str) -> None:
    with pytest.raises(SafetensorsError):
        decode(BAD_FILES[name])


def test_what_the_format_allows_is_read() -> None:
    good = {"b": entry("U8", (0,), (0, 0)), "a": entry(), "c": entry("F32", (), (4, 8)), "__metadata__": {"x": "y"}}
    assert set(decode(crafted(good, b"12345678"))) == {"a", "b", "c"}
    assert decode(crafted(b"{}      ")) == {}


def test_no_truncation_and_no_flipped_header_bit_gets_past() -> None:
    data = joined(KV)
    for length in range(len(data)):
        with pytest.raises(SafetensorsError):
            decode(memoryview(data[:length]))
    num_header = 8 + int.from_bytes(data[:8], "little")
    for position in range(num_header * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        try:
            for array in decode(memoryview(flipped)).values():
                assert array.numpy().nbytes == array.nbytes
        except SafetensorsError:
            pass
