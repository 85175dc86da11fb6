"""A schema that any walk through it comes to the end of, and what fits it."""

from __future__ import annotations

from typing import Any

SCHEMA: dict[str, Any] = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["é", "🙂🙂", "the tin"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "count", "kind", "flags"],
    "additionalProperties": False,
}


def fits(value: Any) -> bool:
    return (
        list(value) == ["name", "count", "kind", "flags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["count"]) is int
        and 0 <= value["count"] <= 999
        and value["kind"] in SCHEMA["properties"]["kind"]["enum"]
        and len(value["flags"]) <= 2
        and all(type(flag) is bool for flag in value["flags"])
    )


SHORT: dict[str, Any] = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": ["é", "🙂"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
"""The same, for where every place of it is tried."""
