"""Banned strings: found where they are complete, and where the text's end may still become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mlxgen.errors import InvalidValueError

MAX_BANS: Final = 256
MAX_BAN_CHARS: Final = 4096


class BanList:
    """The strings a reply may not say. Immutable; every answer is a function of the text alone.

    Comparison is by code points: upper and lower case differ, and nothing is normalised. Raises `InvalidValueError`
    for an empty string, one of more than 4096 characters, or more than 256 of them.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if isinstance(strings, str):
            raise InvalidValueError("banned strings are given as one string; give a list of strings")
        if len(strings) > MAX_BANS:
            raise InvalidValueError(f"{len(strings)} banned strings; the limit is {MAX_BANS}, use fewer")
        for banned in strings:
            if not isinstance(banned, str) or not banned:
                raise InvalidValueError(f"banned string {banned!r} is empty or no string; leave it out")
            if len(banned) > MAX_BAN_CHARS:
                raise InvalidValueError(
                    f"a banned string of {len(banned)} characters; the limit is {MAX_BAN_CHARS}, use its beginning"
                )
        self.strings = tuple(strings)
        self._longest = max(map(len, strings), default=0)
        self._first_chars = frozenset(banned[0] for banned in strings)
        # Whether one may begin in the middle of a token, with a character that the token has only the first bytes of.
        self.begin_in_bytes = any(char > "\x7f" for char in self._first_chars)

    def completed(self, text: str, new: int) -> tuple[int, str] | None:
        """(start, string) of the first banned string that is complete with the characters from `new` on; None if none
        is. Of those that start together, the shortest."""
        found = [
            (start, len(banned), banned)
            for banned in self.strings
            if (start := text.find(banned, max(0, new - len(banned) + 1))) >= 0
        ]
        if not found:
            return None
        start, _, banned = min(found)
        return start, banned

    def first_partial(self, text: str) -> int | None:
        """The first position from which the text is a proper beginning of a banned string; None if there is none."""
        size = len(text)
        for start in range(max(0, size - self._longest + 1), size):
            if text[start] in self._first_chars:
                rest = text[start:]
                if any(len(banned) > len(rest) and banned.startswith(rest) for banned in self.strings):
                    return start
        return None
