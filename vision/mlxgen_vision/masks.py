"""Attention masks with blocks that look both ways, for chunked prefill into any of mlx-lm's key-value caches.

A picture's tokens see each other in both directions; everything else is causal. Full layers allow `causal OR same
block`, sliding layers `window AND (causal OR same block)`, where the window bounds only how far back a token looks
(Google's gemma_pytorch; transformers as well, since huggingface/transformers pull request 46850). Gemma 4's full layers
are causal throughout. Blocks are never cut between two chunks, so keys of earlier chunks are plain past to every query,
and a chunk without a block needs no mask from here at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from mlxgen.errors import InvalidValueError, UnsupportedError

Block = tuple[int, int]


def blocks_in_chunk(blocks: Sequence[Block], start: int, num_tokens: int) -> tuple[Block, ...]:
    """The half-open blocks that lie in the chunk `[start, start + num_tokens)`.

    Raises `InvalidValueError` when the chunk cuts one: its first half would have been computed without its second.
    """
    end = start + num_tokens
    inside = tuple(block for block in blocks if block[0] < end and block[1] > start)
    for first, last in inside:
        if first < start or last > end:
            raise InvalidValueError(
                f"the chunk [{start}, {end}) cuts the image tokens [{first}, {last}), which attend in both directions; "
                "end chunks where `PreparedInput.atomic` allows it"
            )
    return inside


def key_positions(cache: Any, num_tokens: int) -> np.ndarray[Any, Any]:
    """The token positions of the keys that `cache.update_and_fetch` will return for a chunk of `num_tokens` > 1.

    int32, in the order of the returned rows. A rotating cache puts its ring into temporal order for a chunk, keeps its
    first `keep` rows and the last `max_size - 1` in all, and appends.
    """
    if isinstance(cache, KVCache | QuantizedKVCache):
        return np.arange(cache.offset + num_tokens, dtype=np.int32)
    if isinstance(cache, RotatingKVCache):
        new = np.arange(cache.offset, cache.offset + num_tokens, dtype=np.int32)
        if cache.keys is None:
            return new
        stored = cache.keys.shape[2]
        # A buffer that has grown ahead of its contents is cut to them; a full one is taken whole, wherever it begins.
        held = stored if cache._idx == stored or cache._idx < cache.offset else cache._idx
        past = np.concatenate(
            [np.arange(min(cache.keep, held)), np.arange(cache.offset - held + min(cache.keep, held), cache.offset)]
        )
        surplus = held - cache.max_size + 1
        if surplus > 0:
            past = np.concatenate([past[: cache.keep], past[surplus + cache.keep :]])
        return np.concatenate([past.astype(np.int32), new])
    raise UnsupportedError(
        f"image tokens that attend in both directions can't be prefilled into a {type(cache).__name__}; use KVCache, "
        "QuantizedKVCache or RotatingKVCache"
    )


@dataclass(slots=True)
class BlockMasks:
    """The masks of one chunk, made on demand and shared by the layers whose caches look alike.

    Owned by one forward call and dropped with it.
    """

    start: int
    num_tokens: int
    blocks: tuple[Block, ...]
    _made: dict[tuple[bytes, int | None], mx.array]

    def __init__(self, start: int, num_tokens: int, blocks: Sequence[Block]) -> None:
        self.start = start
        self.num_tokens = num_tokens
        self.blocks = blocks_in_chunk(blocks, start, num_tokens)
        self._made = {}

    def mask(self, cache: Any, window: int | None) -> mx.array | None:
        """Bool (num_tokens, keys), True where the query may look; `window` None for full attention.

        To be asked before the chunk is put into `cache`. A single token looks back only, and a ring doesn't put itself
        in order for it: it gets what the cache itself makes, often None. Raises `InvalidValueError` if the cache hasn't
        been fed exactly the tokens before the chunk.
        """
        if cache.offset != self.start:
            raise InvalidValueError(
                f"the cache holds {cache.offset} tokens, but the chunk starts at {self.start}; "
                "feed a prompt's chunks in order, each once"
            )
        if self.num_tokens == 1:
            single: mx.array | None = cache.make_mask(1, window_size=window, return_array=False)
            return single
        positions = key_positions(cache, self.num_tokens)
        key = (positions.tobytes(), window)
        if key not in self._made:
            self._made[key] = self._make(positions, window)
        return self._made[key]

    def _make(self, positions: np.ndarray[Any, Any], window: int | None) -> mx.array:
        queries = mx.arange(self.start, self.start + self.num_tokens)[:, None]
        keys = mx.array(positions)[None, :]
        allowed = queries >= keys
        for first, last in self.blocks:
            allowed = allowed | (((queries >= first) & (queries < last)) & ((keys >= first) & (keys < last)))
        return allowed if window is None else allowed & (queries < keys + window)


class MaskedCache:
    """One layer's cache during one forward pass, whose mask is that of `masks`; for mlx-lm's models, which ask it.

    Made for a call and dropped after it; the cache itself learns nothing of blocks.
    """

    __slots__ = ("_cache", "_masks")

    def __init__(self, cache: Any, masks: BlockMasks) -> None:
        self._cache = cache
        self._masks = masks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self._masks.mask(self._cache, window_size)
