"""Masks over the vocabulary: made from ids or bits, put together, applied to logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlxgen.constraints.protocol import Constraint


def banned_mask(vocab_size: int, ids: Iterable[int]) -> mx.array:
    """All ids but these: bool (1, vocab_size), False for `ids` (one outside the vocabulary is banned anyway)."""
    mask = np.ones((1, vocab_size), dtype=np.bool_)
    mask[0, [token for token in ids if 0 <= token < vocab_size]] = False
    return mx.array(mask)


def only_mask(vocab_size: int, ids: Iterable[int]) -> mx.array:
    """These ids and no others: bool (1, vocab_size)."""
    mask = np.zeros((1, vocab_size), dtype=np.bool_)
    mask[0, [token for token in ids if 0 <= token < vocab_size]] = True
    return mx.array(mask)


def mask_of_bits(bits: bytes, vocab_size: int) -> mx.array:
    """The mask of one bit per id, lowest bit first: bool (1, vocab_size), False for ids that have no bit."""
    found = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=min(vocab_size, 8 * len(bits)))
    mask = np.zeros((1, vocab_size), dtype=np.bool_)
    mask[0, : found.size] = found
    return mx.array(mask)


class BanConstraint:
    """Rules out single ids at single places of the reply: `banned` has the ids by the number of tokens before them."""

    def __init__(self, banned: Mapping[int, Sequence[int]], vocab_size: int) -> None:
        self._banned = {position: tuple(ids) for position, ids in banned.items()}
        self._vocab_size = vocab_size

    def allowed(self, reply_ids: Sequence[int], /) -> mx.array | None:
        ids = self._banned.get(len(reply_ids), ())
        return banned_mask(self._vocab_size, ids) if ids else None

    def done(self, reply_ids: Sequence[int], /) -> bool:
        return False


def allowed_by(constraints: Sequence[Constraint], reply_ids: Sequence[int]) -> mx.array | None:
    """What all of the constraints allow to follow; None if all ids may. Raises `GrammarError`."""
    mask: mx.array | None = None
    for constraint in constraints:
        own = constraint.allowed(reply_ids)
        if own is not None:
            mask = own if mask is None else mask & own
    return mask


def is_done(constraints: Sequence[Constraint], reply_ids: Sequence[int]) -> bool:
    """Whether one of the constraints says that the reply is complete. Raises `GrammarError`."""
    return any(constraint.done(reply_ids) for constraint in constraints)


def permits(constraints: Sequence[Constraint], reply_ids: Sequence[int], token: int) -> bool:
    """Whether `token` may follow. Raises `GrammarError` when none may."""
    mask = allowed_by(constraints, reply_ids)
    return mask is None or (token < mask.shape[-1] and bool(mask[0, token].item()))


def masked(logits: mx.array, mask: mx.array) -> mx.array:
    """The logits (1, n) with minus infinity where `mask` is False, or has nothing (a model's padding rows)."""
    missing = logits.shape[-1] - mask.shape[-1]
    if missing > 0:
        mask = mx.concatenate([mask, mx.zeros((1, missing), mx.bool_)], axis=-1)
    return mx.where(mask, logits, -mx.inf)
