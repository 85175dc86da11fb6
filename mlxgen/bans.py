"""Banned strings: found where they are complete, and where the text's end may still become one."""

from __future__ import annotations

from collections.abc import Sequence

from mlxgen.strings import Beginnings, checked_strings


class BanList:
    """The strings a reply may not say. Immutable; every answer is a function of the text alone.

    Comparison is by code points: upper and lower case differ, and nothing is normalised. Raises `InvalidValueError`
    for an empty string, one of more than 4096 characters, or more than 256 of them.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = checked_strings(strings, "banned")
        self._beginnings = Beginnings(self.strings)
        # Whether one may begin in the middle of a token, with a character that the token has only the first bytes of.
        self.begin_in_bytes = any(char > "\x7f" for char in self._beginnings.first_chars)

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
        return self._beginnings.first(text)
