"""What blocks of a model look like, so that one from a file is believed only if it could have been made here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxgen.cache import adapter_of, leaves
from mlxgen.cache.build import quantize_empty
from mlxgen.errors import SnapshotError
from mlxgen.prefixcache.block import LeafState
from mlxgen.prefixcache.keys import Chunk
from mlxgen.sequence import TokenSequence
from mlxgen.snapshot.restore import check_bounded


class Layout:
    """Kinds, shapes and dtypes of the caches of one model with certain cache options. Made once; never changes.

    One token goes through the model lazily, into empty caches: that tells shapes and dtypes and computes nothing.
    """

    def __init__(self, sequence: TokenSequence) -> None:
        options = sequence.options
        self._fresh = dict(leaves(sequence.empty_cache()))
        self._filled = _probe(sequence, sequence.empty_cache())
        self._quantized: dict[str, Any] = {}
        if options.kv_bits is not None:
            cache = sequence.empty_cache()
            for path, leaf in leaves(cache):
                if adapter_of(leaf).kind == "kv":
                    quantize_empty(cache, path, options.kv_group_size, options.kv_bits)
            self._quantized = _probe(sequence, cache)

    def check(self, chunk: Chunk, states: tuple[LeafState, ...], arrays: Mapping[str, mx.array]) -> None:
        """Raises `SnapshotError` unless a block of `chunk` may look like that."""
        if [state.path for state in states] != list(self._fresh):
            raise SnapshotError(f"a block has the caches {[state.path for state in states]}: it is of another model")
        expected: set[str] = set()
        for state in states:
            known = self._filled
            if state.kind == "quantized" and adapter_of(self._fresh[state.path]).kind == "kv":
                known = self._quantized
            leaf = known.get(state.path)
            if leaf is None or adapter_of(leaf).kind != state.kind:
                raise SnapshotError(f"cache {state.path} of a block is {state.kind!r}, which this model doesn't make")
            expected |= self._check_arrays(chunk, state, leaf, arrays)
        if expected != set(arrays):
            raise SnapshotError(f"a block has the arrays {sorted(arrays)}, expected {sorted(expected)}")

    def _check_arrays(self, chunk: Chunk, state: LeafState, leaf: Any, arrays: Mapping[str, mx.array]) -> set[str]:
        adapter = adapter_of(leaf)
        specs: dict[str, tuple[str, list[int]]] = adapter.meta(leaf)["arrays"]
        for name, (dtype, shape) in specs.items():
            array = arrays.get(f"{state.path}/{name}")
            if array is None:
                raise SnapshotError(f"a block lacks {state.path}/{name}")
            found = list(array.shape)
            wanted = list(shape)
            if adapter.appends:
                wanted[-2] = chunk.end - chunk.start
            elif adapter.kind != "arrays":  # a ring has as many rows as it needed so far
                wanted[-2] = found[-2] if len(found) > 1 else -1
            if found != wanted or _dtype(array) != dtype or 0 in found:
                raise SnapshotError(
                    f"{state.path}/{name} of a block is {array.dtype} {found}, expected {dtype} {wanted}"
                )
        if not adapter.appends:
            own = {name: arrays[f"{state.path}/{name}"] for name in specs}
            if state.meta.get("arrays") != {name: [_dtype(array), list(array.shape)] for name, array in own.items()}:
                raise SnapshotError(f"what a block says of cache {state.path} isn't what it has")
            built = adapter.meta(leaf)["state"]
            check_bounded((state.path, state.kind), state.meta, built, self._fresh[state.path], chunk.end)
        return {f"{state.path}/{name}" for name in specs}


def _dtype(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _probe(sequence: TokenSequence, cache: list[Any]) -> dict[str, Any]:
    sequence.forward(mx.zeros((1,), dtype=mx.uint32), cache=cache, start=0, inputs=None)
    return dict(leaves(cache))
