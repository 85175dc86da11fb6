"""Messages as a caller gives them, checked, and brought into a form that the chat template accepts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mlxgen.errors import InvalidValueError
from mlxgen.spans import Conversation, Render, Slot
from mlxgen.template import TemplateRefusal

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


def checked_text(text: Any, what: str) -> str:
    """`text` if it is a string that can be encoded as UTF-8, else `InvalidValueError`."""
    if not isinstance(text, str):
        raise InvalidValueError(f"{what} is {type(text).__name__}; give a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidValueError(
            f"{what} has the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}, so it isn't "
            "valid text; decode it as UTF-8 first"
        ) from None
    return text


def checked_message(message: Message, index: int) -> dict[str, Any]:
    """A copy that the template may be given; its content a string or a list of dicts."""
    what = f"message {index}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidValueError(f'{what} has no "role"; give {{"role": "user", "content": ...}}')
    checked = {key: value for key, value in message.items() if value is not None}
    content = checked.get("content", "")
    if isinstance(content, str):
        checked["content"] = checked_text(content, what)
        return checked
    if not isinstance(content, (list, tuple)):
        raise InvalidValueError(f"{what} has a content of {type(content).__name__}; give a string or a list of parts")
    parts = []
    for part in content:
        if not isinstance(part, Mapping):
            raise InvalidValueError(f'{what} has a part of {type(part).__name__}; parts are dicts with a "type"')
        if "text" in part:
            checked_text(part["text"], what)
        parts.append(dict(part))
    checked["content"] = parts
    return checked


def accepted(messages: Conversation, render: Render) -> tuple[Conversation, str]:
    """The conversation in the first form the template takes, and its rendering.

    Tried in turn: as it is; an empty assistant turn between two user turns; the system text in front of the first user
    turn; both. Every message carries its index under `Slot.KEY`, for `locate`.
    """
    numbered = [{**message, Slot.KEY: index} for index, message in enumerate(messages)]
    refusal: TemplateRefusal | None = None
    for form in (_unchanged, _alternating, _without_system, _alternating_without_system):
        conversation = form(numbered)
        if conversation is None:
            continue
        try:
            text = render(conversation)
        except TemplateRefusal as error:
            refusal = refusal or error
            continue
        if form is not _unchanged:
            logger.info("the chat template refused the conversation as it is; used it %s", form.__doc__)
        return conversation, text
    assert refusal is not None
    raise refusal


def _unchanged(messages: Conversation) -> Conversation | None:
    """unchanged"""
    return messages


def _alternating(messages: Conversation) -> Conversation | None:
    """with empty assistant turns between user turns"""
    result: Conversation = []
    for message in messages:
        if result and result[-1]["role"] == message["role"] == "user":
            empty: Any = "" if isinstance(message["content"], str) else [{"type": "text", "text": ""}]
            result.append({"role": "assistant", "content": empty})
        result.append(message)
    return result if len(result) > len(messages) else None


def _without_system(messages: Conversation) -> Conversation | None:
    """with the system text in front of the first user turn"""
    systems = [message for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    first = next((index for index, message in enumerate(rest) if message["role"] == "user"), None)
    if not systems or first is None:
        return None
    text = "\n\n".join(filter(None, map(_text_of, systems)))
    lead = text + "\n\n" if text else ""
    user = rest[first]
    content: Any = user["content"]
    content = lead + content if isinstance(content, str) else [{"type": "text", "text": lead}, *content]
    return [*rest[:first], {**user, "content": content}, *rest[first + 1 :]]


def _alternating_without_system(messages: Conversation) -> Conversation | None:
    """with the system text in front of the first user turn and empty assistant turns between user turns"""
    merged = _without_system(messages)
    return None if merged is None else _alternating(merged)


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
