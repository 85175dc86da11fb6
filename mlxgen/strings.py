"""What stop strings, banned strings and section markers share: lists of strings that a text may end in half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mlxgen.errors import InvalidValueError

MAX_STRINGS: Final = 256
MAX_STRING_CHARS: Final = 4096


def checked_strings(strings: Sequence[str], what: str) -> tuple[str, ...]:
    """A user's strings, called `what` ("stop", "banned") in messages.

    Raises `InvalidValueError` for one string in place of a list, an empty one, one of more than 4096 characters, or
    more than 256 of them.
    """
    if isinstance(strings, str):
        raise InvalidValueError(f"{what} strings are given as one string; give a list of strings")
    if len(strings) > MAX_STRINGS:
        raise InvalidValueError(f"{len(strings)} {what} strings; the limit is {MAX_STRINGS}, use fewer")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidValueError(f"{what} string {string!r} is empty or no string; leave it out")
        if len(string) > MAX_STRING_CHARS:
            raise InvalidValueError(
                f"a {what} string of {len(string)} characters; the limit is {MAX_STRING_CHARS}, use its beginning"
            )
    return tuple(strings)


class Beginnings:
    """Finds where a text ends in half of one of `strings`. Immutable."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, strings), default=0)
        self.first_chars = frozenset(string[0] for string in strings)

    def first(self, text: str, start: int = 0) -> int | None:
        """The first position, from `start` on, from which the text is a proper beginning of one of the strings."""
        size = len(text)
        for position in range(max(start, size - self._longest + 1), size):
            if text[position] in self.first_chars:
                rest = text[position:]
                if any(len(string) > len(rest) and string.startswith(rest) for string in self._strings):
                    return position
        return None
