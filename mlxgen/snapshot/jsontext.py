"""JSON as the snapshot's text files use it: compact, strict, exact for floats, NaN and infinities included.

JSON has no word for NaN and the infinities, so they travel as `{"$float": "nan"}` (`"inf"`, `"-inf"`). To keep that
unambiguous, an object of the caller may have no key that starts with `$`. Finite floats are written with `repr` and so
come back bit for bit.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn

from mlxgen.errors import InvalidValueError

_UTF8: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")).encode
_ASCII: Final = json.JSONEncoder(ensure_ascii=True, check_circular=False, allow_nan=False, separators=(",", ":")).encode
_NON_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class JsonTextError(ValueError):
    """Text that isn't the strict JSON expected here. Callers turn it into an error that names the file."""


def encode(value: Any) -> bytes:
    """The value as one line of compact UTF-8 JSON. Keys must be strings, and mustn't start with `$`.

    Tuples come back as lists. Text is written as it is, so that `grep` finds it; only a value with lone surrogates is
    written in ASCII escapes. Raises `InvalidValueError` for what JSON can't hold.
    """
    try:
        if type(value) is list and len(value) == 1 and type(value[0]) is int:  # a token: written with every one
            return b"[%d]" % value[0]
        try:
            text = _UTF8(value)
        except ValueError:  # a float that isn't finite
            text = _UTF8(_tagged(value))
        else:
            if '"$' in text:
                _tagged(value)
        try:
            return text.encode()
        except UnicodeEncodeError:
            return _ASCII(_tagged(value)).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidValueError(
            f"a value that JSON can't hold: {exc}; use str, int, float, bool, None, list, dict"
        ) from exc


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise ValueError(f"the key {key!r} (keys are strings that don't start with '$')")
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise JsonTextError(f"{name} isn't JSON")


def _untag(found: dict[str, Any]) -> Any:
    if len(found) == 1 and "$float" in found:
        number = found["$float"]
        if not isinstance(number, str) or number not in _NON_FINITE:
            raise JsonTextError(f"{number!r} isn't one of {sorted(_NON_FINITE)}")
        return _NON_FINITE[number]
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JsonTextError("a key occurs twice in one object")
    return found


def _unique_untag(pairs: list[tuple[str, Any]]) -> Any:
    return _untag(_unique(pairs))


_PLAIN: Final = json.JSONDecoder(parse_constant=_refuse_constant).decode
_TAGGED: Final = json.JSONDecoder(parse_constant=_refuse_constant, object_hook=_untag).decode
_UNIQUE: Final = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique).decode
_UNIQUE_TAGGED: Final = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique_untag).decode


def decode(data: bytes, *, tags: bool = True, unique_keys: bool = False) -> Any:
    """The value of strict UTF-8 JSON; raises `JsonTextError` for anything else, too deep a nesting included.

    `tags` reads `{"$float": …}` as the number it stands for. `unique_keys` refuses an object that has a key twice
    (parsers disagree on which one wins); it is off for text that a checksum covers, where it would cost time.
    """
    try:
        text = str(data, "utf-8")
        tags = tags and "$float" in text
        if unique_keys:
            return _UNIQUE_TAGGED(text) if tags else _UNIQUE(text)
        return _TAGGED(text) if tags else _PLAIN(text)
    except JsonTextError:
        raise
    except (ValueError, RecursionError) as exc:
        raise JsonTextError(str(exc) or "nested too deeply") from exc
