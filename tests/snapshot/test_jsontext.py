from __future__ import annotations

import math
import random
import struct
from typing import Any

import pytest

from mlxgen.errors import InvalidValueError
from mlxgen.snapshot.jsontext import JsonTextError, decode, encode


def test_finite_floats_come_back_bit_for_bit() -> None:
    rng = random.Random(1)
    numbers = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(2000)] + [0.0, -0.0, 5e-324, 1e308, -0.1]
    numbers = [number for number in numbers if math.isfinite(number)]
    back = decode(encode(numbers))
    assert [struct.pack("<d", number) for number in back] == [struct.pack("<d", number) for number in numbers]


def test_numbers_that_are_not_finite_travel_and_stay_valid_json() -> None:
    data = encode({"a": [math.nan, math.inf, (-math.inf, 1)], "b": "$float"})
    assert b"NaN" not in data
    assert b"Infinity" not in data
    back = decode(data)
    assert math.isnan(back["a"][0])
    assert back["a"][1:] == [math.inf, [-math.inf, 1]]
    assert back["b"] == "$float"


@pytest.mark.parametrize("text", ['a"$b', '"$float":', "$", "\ud800", "ümlaut 漢字 \u2028\x85\x00\n", ""])
def test_any_text_comes_back(text: str) -> None:
    data = encode({"text": text})
    assert b"\n" not in data
    assert decode(data) == {"text": text}


def test_text_stays_greppable() -> None:
    assert "Grüße".encode() in encode({"text": "Grüße"})


def _cycle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [{"$float": "nan"}, {"$x": 1}, {"a": [{"$b": 2}]}, object(), {1, 2}, _cycle(), b"x"])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(InvalidValueError, match="JSON"):
        encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"NaN",
        b"[Infinity]",
        b'{"a":1}x',
        b"\xff",
        b"[" * 200_000,
        b"1" * 5000,
        b'{"$float":"1"}',
        b'{"$float":2}',
    ],
)
def test_text_that_is_not_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(JsonTextError):
        decode(data)


def test_a_key_given_twice_is_refused_where_asked() -> None:
    assert decode(b'{"a":1,"a":2}') == {"a": 2}
    for data in (b'{"a":1,"a":2}', b'{"b":[{"a":1,"a":{"$float":"inf"}}]}'):
        with pytest.raises(JsonTextError, match="twice"):
            decode(data, unique_keys=True)
