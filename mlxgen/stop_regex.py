"""Stop conditions as regular expressions, with a bound on what they hold back and on the time they take.

The `regex` package is used for its partial matches (what may still become a match is held back) and its time limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import regex

from mlxgen.errors import InvalidValueError, StopConditionError

MAX_PATTERNS: Final = 64
MAX_PATTERN_CHARS: Final = 4096
MAX_MATCH_CHARS: Final = 4096
MAX_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class PatternHit:
    """`[start, end)` of the text matched `pattern`; a match may be empty (a lookbehind)."""

    pattern: str
    start: int
    end: int


class RegexStops:
    """Searches a reply's text as it grows. Owned by one reply's text; what it finds is a function of the texts it was
    given, in order.

    After each token the text there is is searched, its last 4096 characters and not before `start`: the first token
    after which a pattern matches is where the reply ends, and the leftmost match is where its text ends (of several
    patterns that match there, the first in the list). So `$` and `\\b` see the text's end so far as an end, and a
    repetition matches with the fewest tokens that are enough for it. `^` is the start of the reply's text; lookbehinds
    see all of it. `hold` is where text begins that may still become a match; at most 4096 characters are held back,
    what is longer is let go, and can't match any more.

    `search` raises `StopConditionError` naming the pattern that took longer than half a second (of the process's CPU
    time) on one token's search; `seconds` is another limit. The constructor raises `InvalidValueError` for a pattern
    that isn't valid, or that matches the empty text (it would end every reply before it began).
    """

    def __init__(self, patterns: Sequence[str], start: int = 0, *, seconds: float = MAX_SECONDS) -> None:
        if isinstance(patterns, str):
            raise InvalidValueError("stop patterns are given as one string; give a list of strings")
        if len(patterns) > MAX_PATTERNS:
            raise InvalidValueError(f"{len(patterns)} stop patterns; the limit is {MAX_PATTERNS}, join some with |")
        self.patterns = tuple(patterns)
        self._compiled = [_compiled(pattern) for pattern in patterns]
        self._starts = [start] * len(patterns)
        self.seconds = seconds
        self.hit: PatternHit | None = None
        self.hold: int | None = None

    def search(self, text: str) -> None:
        """Look at the whole text so far; sets `hit`, or else `hold` (None: nothing is held back)."""
        self.hit = self.hold = None
        for pattern, found in self._found(text):
            first, end = found.span()
            if not found.partial:
                if self.hit is None or first < self.hit.start:
                    self.hit = PatternHit(pattern, first, end)
            elif self.hold is None or first < self.hold:
                self.hold = first

    def first(self, text: str) -> int | None:
        """Where in an earlier text something matched, or might have become a match; changes nothing here."""
        return min((found.start() for _, found in self._found(text)), default=None)

    def _found(self, text: str) -> Iterator[tuple[str, regex.Match[str]]]:
        for pattern, compiled, start in zip(self.patterns, self._compiled, self._starts, strict=True):
            start = max(start, len(text) - MAX_MATCH_CHARS)
            if start > len(text):
                continue
            try:
                found = compiled.search(text, pos=start, partial=True, timeout=self.seconds, concurrent=True)
            except TimeoutError as error:
                raise StopConditionError(
                    f"the stop pattern {_shown(pattern)} took longer than {self.seconds:g} s to search "
                    f"{len(text) - start} characters; write it without nested repetitions, or go on without it"
                ) from error
            if found is not None:
                yield pattern, found

    def release(self, text: str) -> None:
        """After a hit: go on behind it, with the text there is. That may hit again."""
        hit = self.hit
        if hit is None:
            return
        # An empty match may not be found a second time in its place.
        after = hit.end if hit.end > hit.start else hit.end + 1
        self._starts = [max(start, after) for start in self._starts]
        self.search(text)


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise `InvalidValueError` for what `RegexStops` wouldn't take."""
    RegexStops(patterns)


def _compiled(pattern: str) -> regex.Pattern[str]:
    if not isinstance(pattern, str) or not pattern:
        raise InvalidValueError(f"stop pattern {pattern!r} is empty or no string; leave it out")
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidValueError(f"a stop pattern of {len(pattern)} characters; the limit is {MAX_PATTERN_CHARS}")
    try:
        compiled = regex.compile(pattern)
        empty = compiled.search("", timeout=MAX_SECONDS)
    except (regex.error, TimeoutError, OverflowError, RecursionError, MemoryError) as error:
        raise InvalidValueError(f"stop pattern {_shown(pattern)} isn't a valid regular expression: {error}") from error
    if empty is not None:
        raise InvalidValueError(
            f"stop pattern {_shown(pattern)} matches the empty text, so it would end every reply before it begins; "
            "make it need a character"
        )
    return compiled


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")
