"""A reply's text with banned strings, stop patterns and sections: what may be shown, what hit, what must be taken back.

Three things look at the same text, and the least of what they let go is shown: the stop strings (`StopMatcher`), the
stop patterns (`RegexStops`), and section markers that take several tokens. Banned strings go before all of them, since
tokens that may still be taken back count for nothing, not even for what they say about the text before them: while the
text's end may become a banned string, nothing more is shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from mlxgen.bans import BanList
from mlxgen.errors import InvalidValueError
from mlxgen.events import Section, SectionKind, SectionText, ToolCall
from mlxgen.sections import SectionMarkers, SectionTracker, ToolText
from mlxgen.stop import StopMatcher
from mlxgen.stop_regex import MAX_SECONDS, RegexStops
from mlxgen.textstream import Mark, TextHit, TextStep, TextStream
from mlxgen.toolcalls import parse_tool_calls

# Searches that were quick enough once are done again when a stream is rebuilt, perhaps on a slower machine.
_PATIENCE = 10


@dataclass(frozen=True, slots=True)
class Steering:
    """What is looked for in a reply's text besides stop strings; the detail of a "steer" mark.

    `opened`: the prompt leaves a thinking section open. `num_lifted`: how many of the ids that were banned at the
    mark's place are allowed again, since the banned strings are others now.
    """

    stop_regex: tuple[str, ...] = ()
    ban: tuple[str, ...] = ()
    sections: bool = False
    opened: bool = False
    num_lifted: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "stop_regex": list(self.stop_regex),
            "ban": list(self.ban),
            "sections": self.sections,
            "opened": self.opened,
            "num_lifted": self.num_lifted,
        }

    @classmethod
    def from_json(cls, data: Any) -> Steering:
        """Raises `InvalidValueError` for what no version of mlxgen writes."""
        try:
            return cls(
                tuple(map(str, data["stop_regex"])),
                tuple(map(str, data["ban"])),
                bool(data["sections"]),
                bool(data["opened"]),
                int(data["num_lifted"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidValueError(f"the text mark {data!r} is malformed; the journal is damaged") from error


@dataclass(frozen=True, slots=True)
class BanHit:
    """`banned` became complete. `index`: the first token that must go for that, and may."""

    banned: str
    index: int


class SteeredText(TextStream):
    """A `TextStream` that knows everything a `Steering` asks for. Owned by its reply, used by one thread; a function of
    the ids and the marks, as `TextStream` is.

    Marks beside that class's: "steer" (another `Steering` from here on), "shown" (so many characters were shown and
    have gone out with tokens, although the tokens that are left wouldn't show them), "close" (not of the text).
    Raises `StopConditionError` where a pattern takes too long; the stream can't be used after that.
    """

    def __init__(
        self, tokenizer: Any, stop_strings: Sequence[str] = (), *, tracker: SectionTracker | None = None
    ) -> None:
        super().__init__(tokenizer, stop_strings, located=True)
        self._parser = getattr(tokenizer, "tool_parser", None)
        self._tracker = tracker
        self._regex = RegexStops(())
        self._bans: BanList | None = None
        self._replaying = False
        # While tokens are replayed: after which of them (as numbers of characters) text may have been shown, and how
        # much at most; how much the patterns let go is only looked up where it matters.
        self._owed: list[tuple[int, int]] = []
        self.steering = Steering()
        self.lifted: tuple[int, int] = (0, 0)  # at this place, so many of the banned ids are allowed again
        self._all = ""
        self._num_shown = 0
        self._num_emitted = 0  # what the stop strings alone would let go
        self._whole: list[bool] = []  # whether the text ended between two characters after each token
        self._certain = [0]  # by number of tokens: how many of them won't be taken back
        self._floor = 0
        self._new: list[Section | ToolText] = []
        self._waiting: list[Section | ToolText] = []
        self._closed_calls: list[ToolText] = []

    @classmethod
    def rebuild(
        cls, tokenizer: Any, stop_strings: Sequence[str], tokens: Iterable[int], marks: Sequence[Mark] = ()
    ) -> Self:
        steers = [Steering.from_json(mark[2]) for mark in marks if mark[1] == "steer"]
        tracked = [steering for steering in steers if steering.sections]
        tracker = SectionTracker(SectionMarkers.of(tokenizer), opened=tracked[-1].opened) if tracked else None
        stream = cls(tokenizer, stop_strings, tracker=tracker)
        stream._replaying = True
        stream._replay_all(tokens, marks)
        stream._pay()
        stream._replaying = False
        stream._regex.seconds = MAX_SECONDS
        stream.ready()
        return stream

    def _replay(self, kind: str, detail: Any) -> None:
        self._pay()
        if kind == "steer":
            self._steer(Steering.from_json(detail))
        elif kind == "shown":
            self._have_shown(int(detail))
        elif kind != "close":
            super()._replay(kind, detail)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def feed(self, token: int) -> TextStep:
        return self._settle(token, self._take(token))

    def judge(self, token: int) -> TextStep | BanHit:
        """Like `feed`, but a token that completes a banned string is said to; the stream must then be rebuilt."""
        start = self._take(token)
        if self._bans is not None and start < len(self._all):
            hit = self._completed(self._bans, start)
            if hit is not None:
                return hit
        return self._settle(token, start)

    def banned_in_held(self, strings: Sequence[str]) -> BanHit | None:
        """The first of these strings that the text which isn't shown yet completes: for strings that weren't banned
        when it was said. None also where no token can be taken back."""
        hit = self._completed(BanList(strings), self._num_shown)
        return hit if hit is not None and hit.index < self._num_tokens else None

    def _completed(self, bans: BanList, new: int) -> BanHit | None:
        found = bans.completed(self._all, new)
        if found is None:
            return None
        return BanHit(found[1], max(self._token_of(found[0]), self._floor, self._first_unshown()))

    def skip(self) -> None:
        super().skip()
        self._whole.append(True)
        self._new = []
        if self._tracker is not None:
            self._found(self._tracker.end(self._num_tokens - 1, self._all))
        self._advance()

    def _take(self, token: int) -> int:
        piece = self._add(token)
        start = len(self._all)
        self._all += piece
        self._num_emitted += len(self._matcher.feed(piece).emit)
        self._num_tokens += 1
        self._num_chars += len(piece)
        assert self._ends is not None
        self._ends.append(self._num_chars)
        self._whole.append(not self._detokenizer.pending())
        self.carried = ""
        self._new = []
        return start

    def _settle(self, token: int, start: int) -> TextStep:
        if self._tracker is not None:
            self._found(self._tracker.feed(token, self._num_tokens - 1, self._all, start))
        if self._regex.patterns and self._regex.hit is None and not self._replaying:
            self._regex.search(self._all)
        return TextStep(self._advance(later=self._replaying), self.stop_hit)

    def _advance(self, *, later: bool = False) -> str:
        """Show what may be shown now, or (`later`) when it is paid; returns what that adds."""
        hit = self._hit_start()
        partial = None if hit is not None else self._first_partial()
        certain = self._num_tokens if partial is None else self._certain[self._token_of(partial)]
        del self._certain[self._num_tokens :]
        self._certain.append(certain)
        if partial is not None:
            return ""
        if hit is not None:  # the reply ends there, whatever might have become of what comes before
            limit = hit
        else:
            marker = self._tracker.hold if self._tracker is not None and self.steering.sections else None
            limit = self._num_emitted if marker is None else min(self._num_emitted, marker)
        if later and self._regex.patterns:
            self._owed.append((len(self._all), limit))
            return ""
        return self._show_up_to(limit if self._regex.hold is None or hit is not None else min(limit, self._regex.hold))

    def _first_partial(self) -> int | None:
        """Where the text's end may become a banned string; an unfinished character may begin one."""
        if self._bans is None:
            return None
        partial = self._bans.first_partial(self._all)
        if partial is None and self._bans.begin_in_bytes and self._whole and not self._whole[-1]:
            return len(self._all)
        return partial

    def _pay(self) -> None:
        """Show what replayed tokens have shown, as far as patterns let it go; see whether one of them has hit.

        Only the last text is always searched. What comes before it matters where it was let go and isn't by now.
        """
        if not self._regex.patterns or not self._replaying:
            return
        owed, self._owed = self._owed, []
        if self._regex.hit is None:
            self._regex.search(self._all)
        now = self._regex.hold if self._hit_start() is None else self._hit_start()
        for num_chars, limit in reversed(owed):
            if limit > self._num_shown:
                hold = now if num_chars == len(self._all) else self._regex.first(self._all[:num_chars])
                self._show_up_to(limit if hold is None else min(limit, hold))
        if self._regex.hit is not None:
            self._advance()

    def _show_up_to(self, end: int) -> str:
        text = self._all[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return text

    def _token_of(self, char_index: int) -> int:
        """The token with which a character begins: the one that has its first byte."""
        assert self._ends is not None
        token = self.token_at(char_index)
        while token > 0 and self._ends[token - 1] == char_index and not self._whole[token - 1]:
            token -= 1
        return token

    def _first_unshown(self) -> int:
        """The first token of which nothing has been shown."""
        assert self._ends is not None
        return 0 if self._num_shown == 0 else bisect_left(self._ends, self._num_shown) + 1

    # -- seams ---------------------------------------------------------------------------------------------------------

    def flush(self) -> str:
        if self._hit_start() is not None:
            return ""
        self._num_emitted += len(self._matcher.flush())
        self._floor = self._num_tokens
        self._certain[-1] = self._num_tokens
        return self._show_up_to(self._num_emitted)

    def release(self) -> str:
        hit = self.hit
        if hit is None:
            return ""
        if hit.kind == "regex":
            self._regex.release(self._all)
        else:
            self._num_emitted += len(self._matcher.release())
        self._floor = self._num_tokens
        return self._carry(self._advance())

    def change_stops(self, stop_strings: Sequence[str]) -> str:
        held = self._matcher.held
        self._matcher = StopMatcher(stop_strings)
        self._num_emitted = len(self._all) - len(held) + len(self._matcher.feed(held).emit)
        return self._carry(self._advance())

    def _steer(self, steering: Steering) -> None:
        if steering.stop_regex != self._regex.patterns:
            seconds = MAX_SECONDS * (_PATIENCE if self._replaying else 1)
            self._regex = RegexStops(steering.stop_regex, self._num_shown, seconds=seconds)
            self._regex.search(self._all)
        self._bans = BanList(steering.ban) if steering.ban else None
        self.steering = steering
        self.lifted = (self._num_tokens, steering.num_lifted)
        self._floor = self._num_tokens
        self._carry(self._advance())

    def _have_shown(self, num_chars: int) -> None:
        if not 0 <= num_chars <= len(self._all):
            raise InvalidValueError(
                f"a text mark says that {num_chars} characters were shown, of {len(self._all)}; the journal is damaged"
            )
        self._num_shown = max(self._num_shown, num_chars)
        self._floor = self._num_tokens
        self.carried = self._all[num_chars : self._num_shown]

    def _have_said(self, text: str) -> None:
        self._all += text
        self._num_chars += len(text)
        self._num_emitted += len(text)
        self._have_shown(len(self._all))

    def _carry(self, text: str) -> str:
        self.carried += text
        return text

    # -- what was found ------------------------------------------------------------------------------------------------

    def _string_start(self) -> int | None:
        return None if self._matcher.hit is None else len(self._all) - self._matcher.hit_distance

    def _hit_start(self) -> int | None:
        string, pattern = self._string_start(), self._regex.hit
        if pattern is None:
            return string
        return pattern.start if string is None else min(string, pattern.start)

    @property
    def hit(self) -> TextHit | None:
        """The stop condition that was found and not yet released; of several the one that begins first."""
        string, pattern = self._string_start(), self._regex.hit
        if pattern is not None and (string is None or pattern.start < string):
            return TextHit("regex", pattern.pattern, self.token_at(pattern.start), pattern.start)
        if string is None:
            return None
        assert self._matcher.hit is not None
        return TextHit("string", self._matcher.hit, self.token_at(string), string)

    @property
    def stop_hit(self) -> str | None:
        hit = self.hit
        return None if hit is None else hit.value

    @property
    def held(self) -> str:
        return self._all[self._num_shown :]

    @property
    def text(self) -> str:
        return self._all[: self._num_shown]

    # -- sections ------------------------------------------------------------------------------------------------------

    def _found(self, events: list[Section | ToolText]) -> None:
        if not self.steering.sections:
            return
        self._new = events
        self._waiting += events
        self._closed_calls += [event for event in events if isinstance(event, ToolText)]

    def ready(self) -> list[Section | ToolText]:
        """What began and ended with tokens that won't be taken back any more, each told once."""
        certain = self._certain[-1]
        ready = [event for event in self._waiting if event.index < certain]
        self._waiting = [event for event in self._waiting if event.index >= certain]
        return ready

    @property
    def opening(self) -> Section | None:
        """The event of the section that is open now."""
        return None if self._tracker is None else self._tracker.opening()

    @property
    def section(self) -> SectionKind | None:
        """The section that the last token is of."""
        return self._tracker.token_kind if self._tracker is not None and self.steering.sections else None

    @property
    def thinking(self) -> bool:
        """Whether a thinking section is open."""
        return self._tracker is not None and self._tracker.kind == "thinking"

    @property
    def num_thinking(self) -> int:
        """How many tokens of the reply were said while thinking."""
        return 0 if self._tracker is None else self._tracker.num_thinking

    @property
    def thinking_ended(self) -> Section | None:
        """The end of a thinking section, if the last token brought it."""
        for event in self._new:
            if isinstance(event, Section) and event.kind == "thinking" and not event.began:
                return event
        return None

    def sections(self) -> tuple[SectionText, ...]:
        """What was shown, by sections."""
        if self._tracker is None or not self.steering.sections:
            return ()
        return self._tracker.texts(self.text)

    def parse(self, call: ToolText, tools: Sequence[Mapping[str, Any]] | None) -> tuple[ToolCall, ...]:
        return parse_tool_calls(call.text, self._parser, index=call.index, tools=tools)

    def tool_calls(self, tools: Sequence[Mapping[str, Any]] | None) -> tuple[ToolCall, ...]:
        """All calls of the reply that are certain."""
        certain = self._certain[-1]
        closed = [call for call in self._closed_calls if call.index < certain]
        return tuple(event for call in closed for event in self.parse(call, tools))
