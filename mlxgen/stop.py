"""Stop strings: found across token boundaries, never shown, not even in half.

The state is a pure function of the text fed and of where `flush` and `release` were called: how the text was cut into
pieces makes no difference, so a resumed reply matches as the uninterrupted one does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlxgen.strings import Beginnings, checked_strings


@dataclass(frozen=True, slots=True)
class StopStep:
    """`emit` may be shown now; `hit` is the stop string that ended the reply, or None."""

    emit: str
    hit: str | None


class StopMatcher:
    """Holds back what may be the beginning of a stop string. Owned by one reply; cheap to build and to feed again.

    The match that starts first wins; of those that start together, the shortest. While an earlier start may still
    become a match, a later complete one waits for it. Comparison is by code points, without normalisation. Raises
    `InvalidValueError` for an empty string, one of more than 4096 characters, or more than 256 of them.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.stop_strings = checked_strings(stop_strings, "stop")
        shortest_first = sorted(set(stop_strings), key=lambda stop: (len(stop), stop))
        self._complete = re.compile("|".join(map(re.escape, shortest_first))) if shortest_first else None
        self._beginnings = Beginnings(self.stop_strings)
        # Text from the first position that may still begin a match; its first `_num_shown` characters are shown
        # already (after a flush).
        self._buffer = ""
        self._num_shown = 0
        self._hit: str | None = None
        self._hit_start = 0

    @property
    def hit(self) -> str | None:
        """The stop string that was found and not yet released."""
        return self._hit

    @property
    def hit_distance(self) -> int:
        """After a hit: how many characters there are from its beginning to the end of what was fed."""
        return len(self._buffer) - self._hit_start

    @property
    def held(self) -> str:
        """What is held back at the moment, the stop string included if one was hit."""
        return self._buffer[max(self._num_shown, self._hit_start if self._hit else 0) :]

    def feed(self, text: str) -> StopStep:
        """Take in more text. After a hit nothing is emitted, text is kept for `release`, and `hit` stays."""
        self._buffer += text
        if self._hit is not None:
            return StopStep("", self._hit)
        return StopStep(self._scan(), self._hit)

    def flush(self) -> str:
        """What was held back, for a reply that ends by its length.

        A stop string that goes across this point is still found later; what was emitted of it stays emitted. A complete
        stop string that waits for an earlier, longer match is never emitted. After a hit there is nothing to emit.
        """
        if self._hit is not None or self._complete is None:
            return ""
        found = self._complete.search(self._buffer)
        return self._show_up_to(found.start() if found else len(self._buffer))

    def release(self) -> str:
        """After a hit, the stop string and what follows it, for a reply that goes on; "" when there was no hit.

        What follows the stop string is matched like newly fed text: part of it may be held back again, and it may
        contain another hit (see `hit`).
        """
        if self._hit is None:
            return ""
        end = self._hit_start + len(self._hit)
        text = self._show_up_to(end)
        self._buffer = self._buffer[end:]
        # A flush may have shown some of the text behind a stop string; that is shown once.
        self._num_shown = max(0, self._num_shown - end)
        self._hit, self._hit_start = None, 0
        return text + self._scan()

    def _scan(self) -> str:
        """Settle every position up to the first that matches, or may match with more text; return what gets shown."""
        if self._complete is None:
            text, self._buffer = self._buffer, ""
            return text
        partial = self._beginnings.first(self._buffer)
        if partial is None:
            partial = len(self._buffer)
        found = self._complete.search(self._buffer)
        if found is not None and found.start() <= partial:
            text = self._show_up_to(found.start())
            self._hit, self._hit_start = found.group(), found.start()
            return text
        text = self._show_up_to(partial)
        self._buffer = self._buffer[partial:]
        self._num_shown -= partial
        return text

    def _show_up_to(self, end: int) -> str:
        text = self._buffer[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return text
