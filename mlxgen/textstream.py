"""A reply's text as it is shown: detokenizer and stop matcher in one value that can be rebuilt from the ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxgen.detokenizer import Detokenizer
from mlxgen.errors import InvalidValueError
from mlxgen.stop import StopMatcher

Mark = tuple[int, Literal["flush", "release"]]


@dataclass(frozen=True, slots=True)
class TextStep:
    """`text` may be shown now; `stop_hit` is the stop string that ended the reply, or None."""

    text: str
    stop_hit: str | None


class TextStream:
    """The text state of one reply. Owned by that reply, used by one thread.

    What survives a stop is not this object but what it is a function of: the tokenizer, the stop strings, the ids, and
    the marks (where `flush` or `release` was called); `rebuild` makes an identical stream of those. Stop *tokens* are
    the caller's business: their text would be shown if they were fed.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stop_strings)
        self._shown: list[str] = []
        self._num_tokens = 0

    @classmethod
    def rebuild(
        cls, tokenizer: Any, stop_strings: Sequence[str], tokens: Iterable[int], marks: Sequence[Mark] = ()
    ) -> TextStream:
        """The stream after these tokens, with `flush` or `release` called where it was called the first time.

        `marks` are (number of tokens fed before the call, which call), in the order of the calls. A mark out of order
        or past the end raises `InvalidValueError`.
        """
        stream = cls(tokenizer, stop_strings)
        waiting = list(reversed(marks))
        stream._replay_marks(waiting)
        for token in tokens:
            stream.feed(token)
            stream._replay_marks(waiting)
        if waiting:
            raise InvalidValueError(
                f"text mark {waiting[-1]!r} doesn't fit {stream._num_tokens} tokens in order; the journal is damaged"
            )
        return stream

    def _replay_marks(self, waiting: list[Mark]) -> None:
        while waiting and waiting[-1][0] == self._num_tokens:
            kind = waiting.pop()[1]
            if kind == "flush":
                self.flush()
            elif kind == "release":
                self.release()
            else:
                raise InvalidValueError(f"text mark {kind!r} is unknown; expected 'flush' or 'release'")

    def feed(self, token: int) -> TextStep:
        """Take in one id. After a stop hit the text is kept back until `release`, and `stop_hit` stays set."""
        step = self._matcher.feed(self._detokenizer.add(token))
        self._num_tokens += 1
        self._show(step.emit)
        return TextStep(step.emit, step.hit)

    def flush(self) -> str:
        """Show half a stop string, for a reply that ends by its length. Half a character stays held back."""
        return self._show(self._matcher.flush())

    def release(self) -> str:
        """Show the stop string that was hit and what follows it, for a reply that goes on; "" if none was.

        What follows may hit again: ask `stop_hit`.
        """
        return self._show(self._matcher.release())

    def change_stops(self, stop_strings: Sequence[str]) -> str:
        """Match other stop strings from here on; shows what the old ones held back and the new ones don't."""
        held = self._matcher.held
        self._matcher = StopMatcher(stop_strings)
        return self._show(self._matcher.feed(held).emit)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text

    @property
    def stop_hit(self) -> str | None:
        return self._matcher.hit

    @property
    def held(self) -> str:
        """Complete characters that aren't shown: half a stop string, or after a hit all that was withheld."""
        return self._matcher.held

    @property
    def pending(self) -> str:
        """What an unfinished character would come out as (U+FFFD) if the reply ended for good; usually ""."""
        return self._detokenizer.pending()

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def text(self) -> str:
        """Everything shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""
