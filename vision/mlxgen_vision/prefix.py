"""Prompts that attend in both directions, pictures and text, before a causal reply: where they are, their passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxgen.inputs import MediaSpan
from mlxgen_vision.masks import Block, BlockMasks


@dataclass(frozen=True, slots=True)
class PrefixSpan(MediaSpan):
    """A medium's tokens, and the half-open range of the prefix they are part of, with the id of its last token.

    The id is here because the pass before that token's own must compute it, and a pass that is run again after going
    back may not know the ids behind it any more.
    """

    prefix: Block = (0, 0)
    last_id: int = -1


def prefix_spans(token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> tuple[MediaSpan, ...]:
    """The spans as parts of their prefixes. `token_ids` has -1 where an earlier reply of the model stands.

    A prefix ends where a reply begins, or with the prompt. The first begins with the prompt, one behind a reply with
    its first picture.
    """
    replies = [position for position, token in enumerate(token_ids) if token < 0]
    made: list[MediaSpan] = []
    start = end = 0
    for span in spans:
        if span.start >= end:
            end = next((position for position in replies if position >= span.end), len(token_ids))
            start = 0 if not replies or span.start < replies[0] else span.start
        made.append(
            PrefixSpan(
                span.start, span.end, span.medium, span.row_start, span.row_end, (start, end), int(token_ids[end - 1])
            )
        )
    return tuple(made)


@dataclass(slots=True)
class PrefixPass:
    """One forward pass over `num_tokens` tokens with prefixes among them. Owned by one call and dropped with it.

    A pass may end before a prefix's last token, as mlxgen's prefills do: that token, `borrowed`, is then computed along
    with the others and its keys and values are not kept. Its own pass computes them again from the same.
    """

    start: int
    num_tokens: int
    blocks: tuple[Block, ...]
    last_ids: dict[int, int]
    borrowed: int | None
    _masks: BlockMasks = field(init=False)

    def __post_init__(self) -> None:
        self._masks = BlockMasks(self.start, self._num_computed, self.blocks)

    @classmethod
    def of(cls, spans: Sequence[MediaSpan], start: int, num_tokens: int) -> PrefixPass | None:
        """The pass over `[start, start + num_tokens)`, or None if it is causal.

        Raises `InvalidValueError` if it cuts a prefix anywhere but before its last token.
        """
        end = start + num_tokens
        prefixes = {span.prefix: span.last_id for span in spans if isinstance(span, PrefixSpan)}
        # The last token of a prefix sees what came before it like any token.
        inside = [block for block in prefixes if block[0] < end and block[1] - 1 > start]
        if not inside:
            return None
        borrowed = next((prefixes[block] for block in inside if block[1] == end + 1), None)
        last_ids = {block[1] - 1: prefixes[block] for block in inside if block[1] <= end}
        return cls(start, num_tokens, tuple(inside), last_ids, borrowed)

    @property
    def _num_computed(self) -> int:
        return self.num_tokens + (self.borrowed is not None)

    def complete(self, ids: mx.array) -> mx.array:
        """The ids to be computed: the prefixes' last ones as they are in the prompt, and the borrowed one behind."""
        pieces: list[mx.array] = []
        done = self.start
        for position, last in sorted(self.last_ids.items()):
            pieces += [ids[done - self.start : position - self.start], mx.array([last], ids.dtype)]
            done = position + 1
        pieces.append(ids[done - self.start :])
        if self.borrowed is not None:
            pieces.append(mx.array([self.borrowed], ids.dtype))
        return mx.concatenate(pieces)

    def mask(self, cache: Any) -> mx.array | None:
        """Which keys each token may look at; see `BlockMasks.mask`. To be asked before `view` is used."""
        return self._masks.mask(cache, None)

    def view(self, cache: Any) -> Any:
        """The cache for a layer of this pass: itself, or one that keeps all but the borrowed token."""
        return cache if self.borrowed is None else _AllButTheLast(cache)


class _AllButTheLast:
    """One layer's cache during one forward pass, which shows the last token to the layer and doesn't keep it.

    Made for a call and dropped after it.
    """

    __slots__ = ("_cache",)

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        kept_keys, kept_values = self._cache.update_and_fetch(keys[..., :-1, :], values[..., :-1, :])
        return (
            mx.concatenate([kept_keys, keys[..., -1:, :]], axis=-2),
            mx.concatenate([kept_values, values[..., -1:, :]], axis=-2),
        )
