"""Blocks: what one prefill pass added to the caches, and how caches are filled with them again.

A block has the rows of the pass in caches that are appended to, and the whole of those that aren't (rings, recurrent
states) as they were at its end. Its arrays belong to nobody else and never change.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxgen.cache import adapter_of, leaves, room_for
from mlxgen.cache.build import quantize_empty
from mlxgen.prefixcache.keys import Chunk, Key
from mlxgen.sequence import TokenSequence
from mlxgen.streams import generation_stream


@dataclass(frozen=True, slots=True)
class LeafState:
    """One cache at a block's end: its path, its kind, and, unless it is appended to, the rest of its state."""

    path: str
    kind: str
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """`arrays` by "path/name": rows `[start, end)`, or whole states at `end`."""

    chunk: Chunk
    leaves: tuple[LeafState, ...]
    arrays: dict[str, mx.array]

    @property
    def key(self) -> Key:
        return self.chunk.key

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def of(self, path: str) -> dict[str, mx.array]:
        """The arrays of one cache, by their own names."""
        prefix = f"{path}/"
        return {name.removeprefix(prefix): array for name, array in self.arrays.items() if name.startswith(prefix)}


def size_of_block(sequence: TokenSequence, num_tokens: int) -> int:
    """Bytes that a block of the last `num_tokens` tokens of `sequence` will have; nothing is copied."""
    total = 0
    for _, leaf in leaves(sequence.cache):
        adapter = adapter_of(leaf)
        for array in adapter.arrays(leaf):
            total += array.nbytes * num_tokens // array.shape[-2] if adapter.appends else array.nbytes
    return total


def block_of(sequence: TokenSequence, chunk: Chunk) -> Block | None:
    """What the last pass of `sequence`, which was `chunk`, added to its caches: copied and evaluated. None where the
    caches aren't what the ledger says (a model that leaves one of them empty, say)."""
    arrays: dict[str, mx.array] = {}
    states: list[LeafState] = []
    for path, leaf in leaves(sequence.cache):
        adapter = adapter_of(leaf)
        if adapter.appends:
            if leaf.offset != chunk.end:
                return None
            own, meta = adapter.rows(leaf, chunk.start, chunk.end), {}
        else:
            own, meta = adapter.whole(leaf), adapter.meta(leaf)
        arrays |= {f"{path}/{name}": array for name, array in own.items()}
        states.append(LeafState(path, adapter.kind, meta))
    with mx.stream(generation_stream()):
        mx.eval(list(arrays.values()))
    return Block(chunk, tuple(states), arrays)


def filled(sequence: TokenSequence, blocks: Sequence[Block], num_tokens: int) -> list[Any]:
    """New caches that hold what the passes of `blocks` left, bit for bit, with room for `num_tokens` tokens at least.

    Every row is copied once. Where a cache was quantised on the way, the rows from before are quantised now: that is
    done row by row, so it makes no difference when.
    """
    last = blocks[-1]
    cache = sequence.empty_cache()
    kinds = {path: adapter_of(leaf).kind for path, leaf in leaves(cache)}
    for state in last.leaves:
        if state.kind == "quantized" and kinds[state.path] != "quantized":
            quantize_empty(cache, state.path, sequence.options.kv_group_size, sequence.options.kv_bits or 0)
    by_path = dict(leaves(cache))
    num_rows = room_for(max(num_tokens, last.chunk.end + 1))
    with mx.stream(generation_stream()):
        for state in last.leaves:
            leaf = by_path[state.path]
            adapter = adapter_of(leaf)
            if adapter.appends:
                pieces = [_rows_of(block, state, sequence) for block in blocks]
                if pieces[-1]:
                    adapter.join(leaf, pieces, num_rows)
            else:
                # Objects of its own on the block's memory: MLX copies it before anything is written there.
                adapter.restore(leaf, state.meta, {name: copy.copy(a) for name, a in last.of(state.path).items()})
            # One after another: what is copied twice meanwhile is one layer's.
            mx.eval(adapter.arrays(leaf))
    return cache


def _rows_of(block: Block, state: LeafState, sequence: TokenSequence) -> dict[str, mx.array]:
    rows = block.of(state.path)
    if state.kind != "quantized" or "k" not in rows:
        return rows
    quantised: dict[str, mx.array] = {}
    for name in "kv":
        parts = mx.quantize(rows[name], group_size=sequence.options.kv_group_size, bits=sequence.options.kv_bits)
        quantised |= {f"{name}{i}": part for i, part in enumerate(parts)}
    return quantised
