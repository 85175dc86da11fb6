"""Token healing: a prompt that ends inside a word goes on as if it had been written in one go.

A model has never seen " Fr" followed by "ance": in its training that is one token. So the last tokens of the prompt are
taken off, and the first ones of the reply must begin with the bytes that were taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxgen.constraints.masks import only_mask
from mlxgen.constraints.vocabulary import TokenBytes, bytes_of_tokens
from mlxgen.detokenizer import Detokenizer
from mlxgen.errors import GrammarError


@dataclass(frozen=True, slots=True)
class Healing:
    """What is taken off a prompt's end: the ids, and their bytes. `text` is what the reply's text begins with because
    of it, and the user has seen already. A function of tokenizer and ids (`healing_of`): only the ids need recording.
    """

    ids: tuple[int, ...] = ()
    removed: bytes = b""
    text: str = ""


def healing_at_end(tokenizer: Any, ids: Sequence[int], *, keep: int = 1) -> Healing:
    """How many ids to take off the end of `ids`, at most all but the first `keep`; an empty `Healing` if none.

    They are as many as their bytes together are the beginning of a longer token. Special tokens, and others that were
    added to the vocabulary as a whole, are never taken off, and nothing before them. Raises `UnsupportedError` for a
    tokenizer that is neither byte-level nor byte-fallback.
    """
    table = bytes_of_tokens(tokenizer)
    start, data = len(ids), b""
    for index in range(len(ids) - 1, max(keep, 0) - 1, -1):
        piece = table.of(ids[index])
        data = piece + data
        if not piece or len(data) >= table.longest:
            break
        # From inside a character on there would be no text to compare.
        if table.has_longer(data) and _is_text(data):
            start = index
    return healing_of(tokenizer, ids[start:])


def healing_of(tokenizer: Any, removed_ids: Sequence[int]) -> Healing:
    """The healing that took these ids off."""
    if not removed_ids:
        return Healing()
    table = bytes_of_tokens(tokenizer)
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.add(token) for token in removed_ids) + detokenizer.pending()
    return Healing(tuple(removed_ids), b"".join(table.of(token) for token in removed_ids), text)


class HealingConstraint:
    """Lets the reply begin with the bytes that were taken off the prompt, in whatever tokens: a `Constraint`.

    While bytes are left, a token may come whose bytes begin with them or are a beginning of them; after that, any.
    `first` is the number of reply ids before the healed place (the reply's own beginning, put into the model's mouth).
    """

    def __init__(self, tokenizer: Any, removed: bytes, vocab_size: int, *, first: int = 0) -> None:
        self._table: TokenBytes = bytes_of_tokens(tokenizer)
        self._removed = removed
        self._vocab_size = vocab_size
        self._first = first

    def allowed(self, reply_ids: Sequence[int], /) -> mx.array | None:
        rest = self._rest(reply_ids)
        if not rest:
            return None
        ids = [*self._table.starting_with(rest), *self._table.beginnings_of(rest)]
        if not any(token < self._vocab_size for token in ids):
            raise GrammarError(
                f"no token can write {rest!r}, which healing took off the prompt; generate without healing"
            )
        return only_mask(self._vocab_size, ids)

    def done(self, reply_ids: Sequence[int], /) -> bool:
        return False

    def _rest(self, reply_ids: Sequence[int]) -> bytes:
        """The removed bytes that the reply hasn't written again yet."""
        rest = self._removed
        for position in range(self._first, len(reply_ids)):
            if not rest:
                break
            piece = self._table.of(reply_ids[position])
            if not piece or not (piece.startswith(rest) or rest.startswith(piece)):
                raise GrammarError(
                    f"token {position} of the reply isn't how {rest!r} goes on, which healing took off the prompt; "
                    "begin a new reply"
                )
            rest = rest[len(piece) :]
        return rest


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
