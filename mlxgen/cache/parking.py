"""Parked caches: a fork's own rows without its copy of what it shares with the others.

A fork that was written to holds a whole copy of the caches, since attention reads one contiguous array. Once it rests,
all it needs to keep is what it doesn't share: the rows behind the place where it was forked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxgen.cache.adapter import adapter_of, fork, fork_entry, leaves, map_leaves


@dataclass(frozen=True, slots=True)
class _Rows:
    """An appended-to cache from row `start` on, and what is needed to lay it out again as it was."""

    start: int
    meta: dict[str, Any]
    arrays: dict[str, mx.array]


class Parked:
    """The caches of one fork at rest. Owned by its sequence; `base` is shared by all forks of one place, read only.

    The first `num_shared` rows are those of `base` still: a fork that went back before its place has fewer.
    """

    def __init__(self, cache: Sequence[Any], base: Sequence[Any], num_shared: int) -> None:
        self._base = base
        bases = dict(leaves(base))
        self._rows: dict[str, _Rows] = {}
        self._whole: dict[str, Any] = {}
        for path, leaf in leaves(cache):
            adapter, shared = adapter_of(leaf), bases[path]
            if adapter.appends and type(shared) is type(leaf):
                start = min(num_shared, leaf.offset)
                tail = adapter.rows(leaf, start, leaf.offset) if leaf.offset else {}
                self._rows[path] = _Rows(start, adapter.meta(leaf), tail)
            else:
                self._whole[path] = leaf
        mx.eval([array for rows in self._rows.values() for array in rows.arrays.values()])

    def restore(self) -> list[Any]:
        """The caches as they were. Copies the shared rows once."""
        cache = fork(self._base)
        map_leaves(cache, self._restored)
        return cache

    def _restored(self, path: str, leaf: Any) -> Any:
        if path in self._whole:
            return fork_entry(self._whole[path])
        rows = self._rows[path]
        if not rows.meta["arrays"]:
            return leaf
        adapter = adapter_of(leaf)
        shared = [adapter.rows(leaf, 0, rows.start)] if rows.start else []
        _, shape = next(iter(rows.meta["arrays"].values()))
        adapter.join(leaf, [*shared, rows.arrays], shape[-2])
        mx.eval(adapter.arrays(leaf))
        return leaf
