"""Finds, in a rendered conversation, which characters came from which message.

Every content is replaced by a marker and the template rendered again; what stands between the markers must then stand
between the contents in the real rendering. Where a template treats a content differently because of what is in it
(Qwen 3 drops the thinking of earlier replies, Llama 3 trims), its part is found by what stands around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from mlxgen.errors import InvalidValueError, TemplateError
from mlxgen.inputs import TemplateText
from mlxgen.template import TemplateRefusal

Conversation = list[dict[str, Any]]
Render = Callable[[Conversation], str]

_BRACKETS: Final = ("\ue0f0\ue0f1", "\uf4a8\uf4a9", "\ue9c2\ue9c3")


@dataclass(frozen=True, slots=True)
class Slot:
    """One text in the conversation: the content of a message, or one text part of it."""

    message: int
    part: int | None
    text: str
    turn_index: int | None  # of a reply, in the caller's messages; None for everybody else's text

    # Where a conversation under way carries the index a message had in the caller's list.
    KEY: ClassVar[str] = "\0index"

    @staticmethod
    def without_keys(messages: Conversation) -> Conversation:
        return [{key: value for key, value in message.items() if key != Slot.KEY} for message in messages]


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `[start, end)` of the rendering that came from one slot; see `ReplyPiece` for the rest."""

    start: int
    end: int
    turn_index: int | None
    rewritten: bool


def locate(messages: Conversation, real: str, render: Render, source: str) -> list[Span]:
    """The spans of all texts in `real`, the rendering of `messages`, in order and without overlap.

    A text that the template leaves out has no span. `source` is the template's own text. Raises `TemplateError` if
    somebody's text can't be told apart from the template's.
    """
    slots = _slots(messages)
    brackets = _choose_brackets([source, real, *(slot.text for slot in slots)])
    mark = re.compile(f"{brackets[0]}([0-9]+){brackets[1]}")

    def marked(numbers: Sequence[int]) -> list[str] | None:
        try:
            text = render(_with_marks(messages, slots, numbers, brackets))
        except TemplateRefusal:
            return None
        return mark.split(text)

    parts = marked(range(len(slots)))
    spans = _match(real, parts, slots) if parts is not None else None
    if spans is not None:
        return spans

    # One of the texts changes what the template does around the others: mark them one at a time.
    found: list[Span] = []
    for number, slot in enumerate(slots):
        parts = marked([number])
        if parts is None:
            found.extend(_search(real, slot))
        elif len(parts) > 1:
            found.extend(_match(real, parts, slots) or [_between(real, parts, slot)])
    return _without_overlap(sorted(found, key=lambda span: (span.start, span.end)))


def _choose_brackets(texts: list[str]) -> str:
    """Two characters that occur nowhere: what stands between them can only be a mark."""
    for pair in _BRACKETS:
        if not any(char in text for char in pair for text in texts):
            return pair
    raise InvalidValueError("the conversation uses all private characters mlxgen needs as marks; remove some")


def _slots(messages: Conversation) -> list[Slot]:
    slots: list[Slot] = []
    for index, message in enumerate(messages):
        content = message["content"]
        turn = message.get(Slot.KEY) if message["role"] == "assistant" else None
        if message["role"] == "assistant" and turn is None:
            continue  # an empty turn that was put in
        if isinstance(content, str):
            slots.append(Slot(index, None, content, turn))
            continue
        texts = [
            number
            for number, part in enumerate(content)
            if isinstance(part.get("text"), str) and not isinstance(part["text"], TemplateText)
        ]
        for number in texts:
            # The ids of a reply can't be divided among several parts.
            slots.append(Slot(index, number, content[number]["text"], turn if len(texts) == 1 else None))
    return slots


def _with_marks(messages: Conversation, slots: list[Slot], numbers: Sequence[int], brackets: str) -> Conversation:
    result = [dict(message) for message in messages]
    for number in numbers:
        slot = slots[number]
        mark = f"{brackets[0]}{number}{brackets[1]}"
        if slot.part is None:
            result[slot.message]["content"] = mark
        else:
            parts = list(result[slot.message]["content"])
            # Some templates look for a part's words under "content"; a family gives them both then.
            keys = [key for key in ("text", "content") if parts[slot.part].get(key) == slot.text]
            parts[slot.part] = {**parts[slot.part], **dict.fromkeys(keys, mark)}
            result[slot.message]["content"] = parts
    return result


def _match(real: str, parts: list[str], slots: list[Slot]) -> list[Span] | None:
    """Spans such that the template's text between the marks (`parts[0::2]`) stands between them in `real` too."""
    if not real.startswith(parts[0]):
        return None
    spans: list[Span] = []
    position = len(parts[0])
    for index in range(1, len(parts), 2):
        slot, literal = slots[int(parts[index])], parts[index + 1]
        is_last = index + 2 == len(parts)
        end, rewritten = _end_of(real, position, slot.text, literal, is_last), False
        if end is None:
            end, rewritten = _end_of_rewritten(real, position, slot, literal, is_last), True
        if end is None:
            return None
        spans.append(Span(position, end, slot.turn_index, rewritten))
        position = end + len(literal)
    return spans if position == len(real) else None


def _end_of(real: str, start: int, text: str, literal: str, is_last: bool) -> int | None:
    """Where `text`, or `text` without white space at its ends, ends if it stands at `start` and `literal` follows."""
    forms = (text, text.strip(), text.lstrip(), text.rstrip(), text.strip("\n"), text.lstrip("\n"), text.rstrip("\n"))
    for form in dict.fromkeys(forms):
        end = start + len(form)
        if real.startswith(form, start) and real.startswith(literal, end):
            if is_last and end + len(literal) != len(real):
                continue
            return end
    return None


def _end_of_rewritten(real: str, start: int, slot: Slot, literal: str, is_last: bool) -> int | None:
    if is_last:
        end = len(real) - len(literal)
        return end if end >= start and real.endswith(literal) else None
    # Somebody's own text may hold an imitation of what follows it, so that only a reply's end may be searched for; and
    # if that was an imitation too, the rest doesn't match.
    if slot.turn_index is None or not literal:
        return None
    end = real.find(literal, start)
    return end if end >= 0 else None


def _between(real: str, parts: list[str], slot: Slot) -> Span:
    """What differs from the rendering with one mark: all but the longest common beginning and end."""
    before, after = parts[0], parts[-1]
    start = _common_length(real, before)
    shared = _common_length(real[start:][::-1], after[::-1])
    return Span(start, len(real) - shared, slot.turn_index, True)


def _common_length(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _search(real: str, slot: Slot) -> list[Span]:
    """Where the template refuses a mark: the text itself, if it is there just once. A reply is then mere text too."""
    text = slot.text.strip()
    if text and real.count(text) == 1:
        start = real.index(text)
        return [Span(start, start + len(text), None, False)]
    if text and slot.turn_index is None:
        raise TemplateError(
            f"the chat template mixes the text of message {slot.message} with its own; shorten or rephrase that message"
        )
    return []


def _without_overlap(spans: list[Span]) -> list[Span]:
    result: list[Span] = []
    for span in spans:
        if result and span.start < result[-1].end:
            # Which of the two an ambiguous character belongs to is open; that it is no template text is certain.
            last = result.pop()
            span = Span(last.start, max(last.end, span.end), None, True)
        result.append(span)
    return result
