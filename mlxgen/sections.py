"""Thinking sections and tool calls: where a reply's text enters and leaves them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlxgen.events import Section, SectionKind, SectionText
from mlxgen.strings import Beginnings

_NORMAL: Final = "normal"
_THINKING: Final = "reasoning"
_TOOL: Final = "tool"
_KINDS: Final[dict[str, SectionKind]] = {_THINKING: "thinking", _TOOL: "tool_call"}


@dataclass(frozen=True, slots=True)
class Marker:
    """A string that leads from one state to another. `id`: the one token that it is, None if it takes several."""

    text: str
    id: int | None
    to: str


@dataclass(frozen=True, slots=True)
class SectionMarkers:
    """The strings that open and close sections in a model's format: by state, the markers that lead out of it.

    Immutable; a function of the tokenizer. The states and the ways between them are those of mlx-lm's server. A marker
    that is one token of the vocabulary counts only as that token (spelled in other tokens it is text); one that takes
    several tokens is looked for in the text, since a model may cut it in other places than the tokenizer does.
    """

    ways: dict[str, tuple[Marker, ...]]
    initial: str
    think_start_ids: tuple[int, ...]
    think_end_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> SectionMarkers:
        """Those of a `TokenizerWrapper` of mlx-lm; other tokenizers have none."""
        ways: dict[str, list[Marker]] = {}

        def add(state: str, text: str | None, ids: Iterable[int] | None, to: str) -> None:
            if text:
                own = tuple(ids or ())
                ways.setdefault(state, []).append(Marker(text, own[0] if len(own) == 1 else None, to))

        def ids_of(text: str) -> Sequence[int]:
            found: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
            return found

        thinking = bool(getattr(tokenizer, "has_thinking", False))
        own_ways = getattr(tokenizer, "response_transitions", None) or {}
        if thinking:
            add(_NORMAL, tokenizer.think_start, tokenizer.think_start_tokens, _THINKING)
            add(_THINKING, tokenizer.think_end, tokenizer.think_end_tokens, _NORMAL)
        if getattr(tokenizer, "has_tool_calling", False):
            start, start_ids = tokenizer.tool_call_start, tokenizer.tool_call_start_tokens
            # A format with states of its own says itself where calls begin.
            if not any(to == _TOOL for found in own_ways.values() for _, to in found):
                add(_NORMAL, start, start_ids, _TOOL)
            if thinking:
                add(_THINKING, start, start_ids, _TOOL)
            add(_TOOL, tokenizer.tool_call_end, tokenizer.tool_call_end_tokens, _NORMAL)
        for text in getattr(tokenizer, "structural_markers", None) or ():
            add(_NORMAL, text, ids_of(text), _NORMAL)
        for state, found in own_ways.items():
            for text, to in found:
                add(state, text, ids_of(text), to)
        return cls(
            {state: tuple(markers) for state, markers in ways.items()},
            getattr(tokenizer, "response_initial_state", None) or _NORMAL,
            tuple(getattr(tokenizer, "think_start_tokens", None) or ()),
            tuple(getattr(tokenizer, "think_end_tokens", None) or ()),
        )

    @property
    def think_end(self) -> str:
        return next((marker.text for marker in self.ways.get(_THINKING, ()) if marker.to == _NORMAL), "")

    def opened_by(self, prompt: Sequence[int], turn_ends: Iterable[int]) -> bool:
        """Whether a prompt leaves a thinking section open: its last opening stands behind the last closing, and behind
        the last token that ends a turn (an earlier reply may have been stopped while thinking)."""
        if not self.think_start_ids:
            return False
        ends = set(turn_ends)
        for end in range(len(prompt), 0, -1):
            if prompt[end - 1] in ends or _ends_with(prompt, end, self.think_end_ids):
                return False
            if _ends_with(prompt, end, self.think_start_ids):
                return True
        return False


def _ends_with(ids: Sequence[int], end: int, tail: tuple[int, ...]) -> bool:
    start = end - len(tail)
    return start >= 0 and tuple(ids[start:end]) == tail


@dataclass(frozen=True, slots=True)
class ToolText:
    """A tool-call section that was closed with token `index`: what stood in it, still to be parsed."""

    text: str
    index: int


class SectionTracker:
    """Follows one reply through its sections. Owned by the reply's text stream; a function of the tokens it was fed.

    `hold` is where text begins that may become a marker. `num_thinking` counts the tokens that were said while
    thinking, the markers' own not.
    """

    def __init__(self, markers: SectionMarkers, *, opened: bool = False) -> None:
        self._ways = markers.ways
        self._state = _THINKING if opened else markers.initial
        self._longest = {
            state: max((len(marker.text) for marker in ways), default=0) for state, ways in self._ways.items()
        }
        self._spelled = {
            state: Beginnings([marker.text for marker in ways if marker.id is None])
            for state, ways in self._ways.items()
        }
        self._since = 0  # where the text of the current state begins
        self._index = 0  # with which token
        self._parts: list[tuple[SectionKind, int, int]] = []
        self.num_thinking = 0
        self.kind: SectionKind = _KINDS.get(self._state, "answer")
        self.token_kind: SectionKind = self.kind  # of the token fed last
        self.hold: int | None = None

    def opening(self) -> Section | None:
        """The event that says which section is open."""
        return None if self.kind == "answer" else Section(self.kind, True, self._index, self._since)

    def feed(self, token: int, index: int, text: str, start: int) -> list[Section | ToolText]:
        """Token number `index` is `token` and has added `text[start:]`; what begins or ends with it."""
        before, found = self.kind, list[Section | ToolText]()
        position = max(self._since, start - self._longest.get(self._state, 1) + 1)
        fresh = True
        while True:
            marker = self._next(token if fresh else None, text, position, start)
            if marker is None:
                break
            begin, end, way = marker
            if way.id is not None:
                fresh = False
            self._cross(begin, end, way.to, index, text, found)
            position = end
        self.num_thinking += before == self.kind == "thinking" and not found
        # Text between two sections, or a marker, is of the section it touches.
        self.token_kind = self.kind if self.kind != "answer" else before
        spelled = self._spelled.get(self._state)
        self.hold = None if spelled is None else spelled.first(text, self._since)
        return found

    def _next(self, token: int | None, text: str, position: int, start: int) -> tuple[int, int, Marker] | None:
        """The marker that ends first; of those that end together the longest."""
        best: tuple[int, int, Marker] | None = None
        for marker in self._ways.get(self._state, ()):
            if marker.id is None:
                begin = text.find(marker.text, position)
                if begin < 0:
                    continue
                end = begin + len(marker.text)
            elif marker.id == token:
                end = len(text)
                begin = max(start, end - len(marker.text))
            else:
                continue
            if best is None or (end, begin) < (best[1], best[0]):
                best = (begin, end, marker)
        return best

    def _cross(self, begin: int, end: int, to: str, index: int, text: str, found: list[Section | ToolText]) -> None:
        kind, then = self.kind, _KINDS.get(to, "answer")
        self._parts.append((kind, self._since, begin))
        if kind != then:
            if kind != "answer":
                found.append(Section(kind, False, index, begin))
            if kind == "tool_call":
                found.append(ToolText(text[self._since : begin], index))
            if then != "answer":
                found.append(Section(then, True, index, end))
        self._state, self.kind, self._since, self._index = to, then, end, index

    def end(self, index: int, text: str) -> list[Section | ToolText]:
        """Token number `index` is the one that ends the reply: it closes an open tool call (some formats have no other
        end). An open thinking section stays open."""
        found = list[Section | ToolText]()
        self.token_kind = self.kind
        if self.kind == "tool_call":
            self._cross(len(text), len(text), _NORMAL, index, text, found)
        return found

    def texts(self, text: str) -> tuple[SectionText, ...]:
        """What `text`, the reply's or a beginning of it, says in each section; empty ones are left out."""
        result: list[SectionText] = []
        for kind, start, end in [*self._parts, (self.kind, self._since, len(text))]:
            said = text[start : min(end, len(text))]
            if not said:
                continue
            if result and result[-1].kind == kind == "answer":
                result[-1] = SectionText(kind, result[-1].text + said)
            else:
                result.append(SectionText(kind, said))
        return tuple(result)
