"""Tool calls: mlx-lm's parser for the model's format, and what it returns as typed events."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxgen.events import ToolCall

ToolParser = Callable[[str, Any], Any]


def parse_tool_calls(
    text: str, parser: ToolParser | None, *, index: int, tools: Sequence[Mapping[str, Any]] | None = None
) -> tuple[ToolCall, ...]:
    """The calls in one tool-call section; `index` is the token that closed it, `tools` what the template was given.

    Never raises for what a model wrote: a section that can't be parsed gives one call with `error`.
    """
    if parser is None:
        return (_failed(text, index, "this model's tokenizer has no tool parser"),)
    try:
        parsed = parser(text, None if tools is None else list(tools))
    except Exception as error:  # a parser meets whatever a model says
        message = " ".join(str(error).split())[:200]
        return (_failed(text, index, f"{type(error).__name__}: {message}"),)
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls:
        return (_failed(text, index, "there is no call in it"),)
    return tuple(_call(call, text, index) for call in calls)


def _call(call: Any, text: str, index: int) -> ToolCall:
    if not isinstance(call, Mapping):
        return _failed(text, index, f"it is a {type(call).__name__}, not an object with a name and arguments")
    name, arguments, own_id = call.get("name"), call.get("arguments", {}), call.get("id")
    if isinstance(arguments, str):  # some formats have them as JSON in a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return _failed(text, index, "its arguments are a string that isn't JSON")
    if not isinstance(name, str) or not name:
        return _failed(text, index, "it has no name")
    if not isinstance(arguments, Mapping):
        return _failed(text, index, f"its arguments are a {type(arguments).__name__}, not an object")
    return ToolCall(name, dict(arguments), index, text, id=own_id if isinstance(own_id, str) else None)


def _failed(text: str, index: int, error: str) -> ToolCall:
    return ToolCall(None, None, index, text, error=error)
