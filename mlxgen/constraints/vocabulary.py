"""What the tokens of a vocabulary are made of: their bytes, and which of them begin with given ones."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from mlxgen.detokenizer import token_bytes, unwrap
from mlxgen.errors import UnsupportedError


class TokenBytes:
    """The bytes of every token that is text. Immutable; one per tokenizer, shared.

    Special tokens, and all others that were added to the vocabulary as a whole, have none here: what they mean isn't
    their spelling.
    """

    def __init__(self, tokenizer: Any) -> None:
        bytes_of = token_bytes(tokenizer)
        if bytes_of is None:
            raise UnsupportedError(
                f"token healing needs a byte-level or byte-fallback tokenizer, and {type(tokenizer).__name__} isn't "
                "one; end the prompt at the end of a word, without healing"
            )
        added = {int(index) for index in getattr(tokenizer, "added_tokens_decoder", None) or ()}
        num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
        self._of = [b"" if token in added else bytes_of(token) or b"" for token in range(num_ids)]
        self._sorted = sorted((data, token) for token, data in enumerate(self._of) if data)
        self.longest = max((len(data) for data in self._of), default=0)

    def of(self, token: int) -> bytes:
        """The bytes of a token; empty for one that isn't text, or isn't known."""
        return self._of[token] if 0 <= token < len(self._of) else b""

    def starting_with(self, start: bytes) -> Iterator[int]:
        """The tokens whose bytes begin with `start`, itself included."""
        for index in range(bisect_left(self._sorted, (start, -1)), len(self._sorted)):
            data, token = self._sorted[index]
            if not data.startswith(start):
                return
            yield token

    def beginnings_of(self, data: bytes) -> Iterator[int]:
        """The tokens whose bytes are a beginning of `data`, shorter than it."""
        for length in range(1, min(len(data), self.longest + 1)):
            piece = data[:length]
            for index in range(bisect_left(self._sorted, (piece, -1)), len(self._sorted)):
                found, token = self._sorted[index]
                if found != piece:
                    break
                yield token

    def has_longer(self, start: bytes) -> bool:
        """Whether a token begins with `start` and goes on."""
        index = bisect_left(self._sorted, (start + b"\0", -1))
        return index < len(self._sorted) and self._sorted[index][0].startswith(start)


_tables: weakref.WeakKeyDictionary[Any, TokenBytes] = weakref.WeakKeyDictionary()


def bytes_of_tokens(tokenizer: Any) -> TokenBytes:
    """The table that belongs to a tokenizer, for as long as it lives; made at its first use (under a second).

    Raises `UnsupportedError` for a tokenizer whose tokens aren't plain strings of bytes.
    """
    tokenizer = unwrap(tokenizer)
    found = _tables.get(tokenizer)
    if found is None:
        found = _tables[tokenizer] = TokenBytes(tokenizer)
    return found
