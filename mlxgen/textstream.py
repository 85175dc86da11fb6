"""A reply's text as it is shown: detokenizer and stop matcher in one value that can be rebuilt from the ids."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from mlxgen.detokenizer import Detokenizer
from mlxgen.errors import InvalidValueError
from mlxgen.stop import StopMatcher

# (number of tokens before it, what happened, more about it); see `TextStream.rebuild`.
Mark = tuple[int, str, Any]


@dataclass(frozen=True, slots=True)
class TextStep:
    """`text` may be shown now; `stop_hit` is the stop string that ended the reply, or None."""

    text: str
    stop_hit: str | None


@dataclass(frozen=True, slots=True)
class TextHit:
    """A stop condition found in the text: `char_index` is where its match begins, `token_index` in which token."""

    kind: Literal["string", "regex"]
    value: str
    token_index: int
    char_index: int


class TextStream:
    """The text state of one reply. Owned by that reply, used by one thread.

    What survives a stop is not this object but what it is a function of: the tokenizer, the stop strings, the ids, and
    the marks; `rebuild` makes an identical stream of those. `carried` is text that was let go of after the last token,
    so that no token has carried it to the user yet.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = (), *, located: bool = False) -> None:
        """With `located`, or stop strings, it is known which token brought which text (see `hit`)."""
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stop_strings)
        self._shown: list[str] = []
        self._num_tokens = 0
        self._num_chars = 0
        self._ends: list[int] | None = [] if located or stop_strings else None  # characters after each token
        self.carried = ""
        self._healed = ""  # what the reply begins with only because healing took it off the prompt's end

    @classmethod
    def rebuild(
        cls, tokenizer: Any, stop_strings: Sequence[str], tokens: Iterable[int], marks: Sequence[Mark] = ()
    ) -> Self:
        """The stream after these tokens, with everything that was done to it done again where it was done.

        `marks`, in their order: "flush", "release" and "stops" (the list of stop strings from there on) are calls of
        the methods of that name; "silent" says that the token before it was skipped; "heal" that the text begins with
        one that was taken off the prompt with its tokens: it isn't the reply's; "mend" the same of words put into the
        model's mouth: they are the reply's, and were shown. A mark out of order or past the end
        raises `InvalidValueError`.
        """
        stream = cls(tokenizer, stop_strings, located=any(mark[1] == "stops" and mark[2] for mark in marks))
        stream._replay_all(tokens, marks)
        return stream

    def _replay_all(self, tokens: Iterable[int], marks: Sequence[Mark]) -> None:
        silent = {mark[0] for mark in marks if mark[1] == "silent"}
        waiting = list(reversed(marks))
        self._replay_marks(waiting)
        for token in tokens:
            if self._num_tokens + 1 in silent:
                self.skip()
            else:
                self.feed(token)
            self._replay_marks(waiting)
        if waiting:
            raise InvalidValueError(
                f"text mark {waiting[-1]!r} doesn't fit {self._num_tokens} tokens in order; the journal is damaged"
            )

    def _replay_marks(self, waiting: list[Mark]) -> None:
        while waiting and waiting[-1][0] == self._num_tokens:
            _, kind, detail = waiting.pop()
            self._replay(kind, detail)

    def _replay(self, kind: str, detail: Any) -> None:
        if kind == "flush":
            self.flush()
        elif kind == "release":
            self.release()
        elif kind == "stops":
            self.change_stops(tuple(detail))
        elif kind == "heal":
            self._healed = str(detail["text"])
        elif kind == "mend":
            self.flush()
            self._healed = str(detail["text"])
            self._have_said(self._healed)
        elif kind != "silent":
            raise InvalidValueError(f"text mark {kind!r} is unknown; it was written by a newer mlxgen")

    def skip(self) -> None:
        """Count a token that has no text: the stop token that ended the reply."""
        self._num_tokens += 1
        self.carried = ""
        if self._ends is not None:
            self._ends.append(self._num_chars)

    def feed(self, token: int) -> TextStep:
        """Take in one id. After a stop hit the text is kept back until `release`, and `stop_hit` stays set."""
        piece = self._add(token)
        step = self._matcher.feed(piece)
        self._num_tokens += 1
        self.carried = ""
        if self._ends is not None:
            self._num_chars += len(piece)
            self._ends.append(self._num_chars)
        self._show(step.emit)
        return TextStep(step.emit, step.hit)

    def _add(self, token: int) -> str:
        """The text that became certain with a token, without what belongs to the prompt."""
        piece = self._detokenizer.add(token)
        if self._healed and piece:
            num_chars = min(len(piece), len(self._healed))
            self._healed, piece = self._healed[num_chars:], piece[num_chars:]
        return piece

    def _have_said(self, text: str) -> None:
        """Count as shown what the next tokens will say."""
        self._num_chars += len(text)
        self._show(text)

    def flush(self) -> str:
        """Show half a stop string, for a reply that ends by its length. Half a character stays held back."""
        return self._show(self._matcher.flush())

    def release(self) -> str:
        """Show the stop string that was hit and what follows it, for a reply that goes on; "" if none was.

        What follows may hit again: ask `stop_hit`.
        """
        return self._carry(self._matcher.release())

    def change_stops(self, stop_strings: Sequence[str]) -> str:
        """Match other stop strings from here on; shows what the old ones held back and the new ones don't."""
        held = self._matcher.held
        self._matcher = StopMatcher(stop_strings)
        return self._carry(self._matcher.feed(held).emit)

    def _carry(self, text: str) -> str:
        self.carried += text
        return self._show(text)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text

    @property
    def stop_hit(self) -> str | None:
        return self._matcher.hit

    @property
    def hit(self) -> TextHit | None:
        """The stop condition that was found and not yet released, and where."""
        value = self._matcher.hit
        if value is None:
            return None
        start = self._num_chars - self._matcher.hit_distance
        return TextHit("string", value, self.token_at(start), start)

    def token_at(self, char_index: int) -> int:
        """The index of the token that brought a character; for the text's end, that of the last token."""
        assert self._ends is not None
        return min(bisect_right(self._ends, char_index), max(len(self._ends) - 1, 0))

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
    def num_chars(self) -> int:
        """Complete characters so far, those that are held back included."""
        return len(self.text) + len(self.held)

    @property
    def text(self) -> str:
        """Everything shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""
