"""What the engine needs of a cache, whatever its kind: evaluate, measure, export, restore, trim.

A model's cache is a list with one entry per layer; an entry may be a `CacheList` of several. The *leaves* are the
caches that hold arrays. Two families of leaves exist: those whose rows are only ever appended (`AppendAdapter`;
exported as row ranges, so saving costs what is new), and those that are bounded and change in place (`WholeAdapter`;
rings and recurrent states, exported whole in their physical layout, because a ring reloaded in temporal order is no
longer bit-identical).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import cache as kinds

from mlxgen.errors import SnapshotError, UnsupportedError

_GROWTH_ROWS = 256  # mlx-lm's caches grow by so many rows

Meta = dict[str, Any]
Arrays = dict[str, mx.array]


class CacheAdapter(Protocol):
    """The operations on one kind of leaf. Stateless; `leaf` is mlx-lm's own cache object."""

    kind: str
    appends: bool

    def meta(self, leaf: Any) -> Meta:
        """The JSON-able rest of the state: offsets, capacities, ring index, array shapes and dtypes."""
        ...

    def arrays(self, leaf: Any) -> list[mx.array]:
        """Every live array, for `mx.eval`."""
        ...

    def rows(self, leaf: Any, start: int, end: int) -> Arrays:
        """Contiguous copies of rows `[start, end)` (append kinds), lazily."""
        ...

    def whole(self, leaf: Any) -> Arrays:
        """Contiguous copies of the entire physical state (whole kinds), lazily."""
        ...

    def allocate(self, leaf: Any, meta: Meta) -> None:
        """Give an empty leaf the capacity and offset of `meta` (append kinds); rows follow by `write_rows`."""
        ...

    def write_rows(self, leaf: Any, start: int, arrays: Arrays) -> None: ...

    def join(self, leaf: Any, pieces: Sequence[Arrays], num_rows: int) -> None:
        """Give a leaf rows in pieces (append kinds), all at once."""
        ...

    def restore(self, leaf: Any, meta: Meta, arrays: Arrays) -> None:
        """Give an empty leaf the whole state (whole kinds)."""
        ...

    def can_trim(self, leaf: Any, num_tokens: int) -> bool: ...

    def trim(self, leaf: Any, num_tokens: int) -> None: ...


def _copied(array: mx.array) -> mx.array:
    # `mx.contiguous` returns the very same buffer for an array that is contiguous already, and a live reference to it
    # would force a copy of the whole cache at the next in-place update. `mx.array` always makes a new, contiguous one.
    return mx.array(array)


def _dtype_name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _dtype(name: str) -> mx.Dtype:
    dtype = getattr(mx, name, None)
    if not isinstance(dtype, mx.Dtype):
        raise SnapshotError(f"unknown cache dtype {name!r} in the snapshot; it was written by a newer mlxgen")
    return dtype


class AppendAdapter:
    """`KVCache`, `ConcatenateKVCache` and `QuantizedKVCache`: rows `[0, offset)` in buffers of some capacity."""

    appends = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def _parts(self, leaf: Any) -> Arrays:
        if leaf.keys is None:
            return {}
        if isinstance(leaf.keys, mx.array):
            return {"k": leaf.keys, "v": leaf.values}
        parts = {f"k{i}": part for i, part in enumerate(leaf.keys)}
        return parts | {f"v{i}": part for i, part in enumerate(leaf.values)}

    def meta(self, leaf: Any) -> Meta:
        parts = self._parts(leaf)
        meta: Meta = {
            "offset": int(leaf.offset),
            "arrays": {name: [_dtype_name(part), list(part.shape)] for name, part in parts.items()},
        }
        if self.kind == "quantized":
            meta |= {"group_size": leaf.group_size, "bits": leaf.bits}
        return meta

    def arrays(self, leaf: Any) -> list[mx.array]:
        return list(self._parts(leaf).values())

    def rows(self, leaf: Any, start: int, end: int) -> Arrays:
        return {name: _copied(part[..., start:end, :]) for name, part in self._parts(leaf).items()}

    def whole(self, leaf: Any) -> Arrays:
        raise AssertionError("append kinds are exported by rows")

    def allocate(self, leaf: Any, meta: Meta) -> None:
        parts = {name: mx.zeros(shape, _dtype(dtype)) for name, (dtype, shape) in meta["arrays"].items()}
        mx.eval(list(parts.values()))
        leaf.offset = int(meta["offset"])
        if not parts:
            return
        if self.kind == "quantized":
            leaf.keys = tuple(parts[f"k{i}"] for i in range(3))
            leaf.values = tuple(parts[f"v{i}"] for i in range(3))
            leaf.group_size, leaf.bits = int(meta["group_size"]), int(meta["bits"])
        else:
            leaf.keys, leaf.values = parts["k"], parts["v"]

    def write_rows(self, leaf: Any, start: int, arrays: Arrays) -> None:
        parts = self._parts(leaf)
        for name, rows in arrays.items():
            parts[name][..., start : start + rows.shape[-2], :] = rows
        # Evaluated at once: the update is done in place and the segment's own arrays can go.
        mx.eval(list(parts.values()))

    def join(self, leaf: Any, pieces: Sequence[Arrays], num_rows: int) -> None:
        """Give a leaf these rows, one piece behind the other, lazily; each is copied once. It gets room for `num_rows`
        (`ConcatenateKVCache` never has room)."""
        parts = {name: [piece[name] for piece in pieces] for name in pieces[-1]}
        end = sum(rows.shape[-2] for rows in next(iter(parts.values()), ()))
        if self.kind != "concatenate" and num_rows > end:
            for rows in parts.values():
                shape = list(rows[0].shape)
                shape[-2] = num_rows - end
                rows.append(mx.zeros(shape, rows[0].dtype))
        # Arrays of the leaf's own, also where there is nothing to join: it goes on to change them.
        joined = {
            n: mx.concatenate(rows, axis=-2) if len(rows) > 1 else copy.copy(rows[0]) for n, rows in parts.items()
        }
        leaf.offset = end
        if self.kind == "quantized":
            leaf.keys = tuple(joined[f"k{i}"] for i in range(3))
            leaf.values = tuple(joined[f"v{i}"] for i in range(3))
        elif joined:
            leaf.keys, leaf.values = joined["k"], joined["v"]

    def restore(self, leaf: Any, meta: Meta, arrays: Arrays) -> None:
        raise AssertionError("append kinds are restored by rows")

    def can_trim(self, leaf: Any, num_tokens: int) -> bool:
        return bool(num_tokens <= leaf.offset)

    def trim(self, leaf: Any, num_tokens: int) -> None:
        leaf.trim(num_tokens)
        if self.kind == "concatenate" and num_tokens:
            # It has no capacity: what is behind `offset` would come back with the next update.
            leaf.keys, leaf.values = leaf.keys[..., : leaf.offset, :], leaf.values[..., : leaf.offset, :]


class WholeAdapter:
    """Anything whose `state` is bounded: rings, chunked caches, recurrent and convolution states."""

    appends = False

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def _flat(self, leaf: Any) -> list[tuple[str, Any]]:
        return list(_flatten(leaf.state))

    def meta(self, leaf: Any) -> Meta:
        return {
            "state": _skeleton(leaf.state),
            "arrays": {
                name: [_dtype_name(value), list(value.shape)]
                for name, value in self._flat(leaf)
                if isinstance(value, mx.array)
            },
        }

    def arrays(self, leaf: Any) -> list[mx.array]:
        return [value for _, value in self._flat(leaf) if isinstance(value, mx.array)]

    def rows(self, leaf: Any, start: int, end: int) -> Arrays:
        raise AssertionError("whole kinds are exported whole")

    def whole(self, leaf: Any) -> Arrays:
        return {name: _copied(value) for name, value in self._flat(leaf) if isinstance(value, mx.array)}

    def allocate(self, leaf: Any, meta: Meta) -> None:
        raise AssertionError("whole kinds are restored whole")

    def write_rows(self, leaf: Any, start: int, arrays: Arrays) -> None:
        raise AssertionError("whole kinds are restored whole")

    def join(self, leaf: Any, pieces: Sequence[Arrays], num_rows: int) -> None:
        raise AssertionError("whole kinds are restored whole")

    def restore(self, leaf: Any, meta: Meta, arrays: Arrays) -> None:
        if set(arrays) != set(meta["arrays"]):
            raise SnapshotError(f"the snapshot's {self.kind} cache lacks arrays; resume from an older snapshot")
        leaf.state = _rebuild(meta["state"], "", arrays)

    def can_trim(self, leaf: Any, num_tokens: int) -> bool:
        if num_tokens == 0:
            return True
        if isinstance(leaf, kinds.RotatingKVCache):
            # Once the ring has wrapped, the rows that an earlier position needs are overwritten.
            return bool(leaf.is_trimmable()) and num_tokens <= leaf.offset
        if isinstance(leaf, kinds.ChunkedKVCache):
            # Rows from the start of the target position's own chunk must still be there.
            target = leaf.offset - num_tokens
            chunk_start = (target // leaf.chunk_size) * leaf.chunk_size
            return bool(target >= 0 and (leaf.start_position == 0 or leaf.start_position <= chunk_start))
        return False

    def trim(self, leaf: Any, num_tokens: int) -> None:
        if num_tokens:
            leaf.trim(num_tokens)


def _flatten(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _flatten(value, f"{path}.{index}" if path else str(index))
    else:
        yield path, state


def _skeleton(state: Any) -> Any:
    """The state with every array replaced by a mark: JSON that `_rebuild` can fill again."""
    if isinstance(state, mx.array):
        return {"array": True}
    if isinstance(state, list | tuple):
        return [_skeleton(value) for value in state]
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise UnsupportedError(f"a cache state of type {type(state).__name__} can't be saved")


def _rebuild(skeleton: Any, path: str, arrays: Arrays) -> Any:
    if isinstance(skeleton, dict):
        return arrays[path]
    if isinstance(skeleton, list):
        return [_rebuild(value, f"{path}.{i}" if path else str(i), arrays) for i, value in enumerate(skeleton)]
    return skeleton


_APPEND = {kinds.KVCache: "kv", kinds.ConcatenateKVCache: "concatenate", kinds.QuantizedKVCache: "quantized"}
_WHOLE = {kinds.RotatingKVCache: "rotating", kinds.ArraysCache: "arrays", kinds.ChunkedKVCache: "chunked"}
_ADAPTERS: dict[type, CacheAdapter] = {cls: AppendAdapter(kind) for cls, kind in _APPEND.items()} | {
    cls: WholeAdapter(kind) for cls, kind in _WHOLE.items()
}


def adapter_of(leaf: Any) -> CacheAdapter:
    """The adapter for a leaf. A class mlxgen doesn't know is exported whole through its `state` (mlx-lm's contract).

    The kind written to a file is only ever compared with that of a freshly made cache, never used to find a class.
    """
    found = _ADAPTERS.get(type(leaf))
    if found is None:
        if not hasattr(type(leaf), "state"):
            raise UnsupportedError(
                f"the cache {type(leaf).__name__} has no state to save; mlxgen can't drive this model"
            )
        found = _ADAPTERS[type(leaf)] = WholeAdapter(f"state/{type(leaf).__name__}")
    return found


def leaves(cache: Sequence[Any]) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, layer by layer; the path is "3" or, inside a `CacheList`, "3.1"."""
    return [leaf for index, entry in enumerate(cache) for leaf in _leaves_of(str(index), entry)]


def _leaves_of(path: str, entry: Any) -> Iterator[tuple[str, Any]]:
    # No closure that calls itself: such a cycle would keep the arrays until the garbage collector comes.
    if isinstance(entry, kinds.CacheList):
        for index, child in enumerate(entry.caches):
            yield from _leaves_of(f"{path}.{index}", child)
    elif entry is not None:
        yield path, entry


def map_leaves(cache: list[Any], convert: Callable[[str, Any], Any]) -> None:
    """Put `convert(path, leaf)` in the place of every leaf, in this list; entries that don't change stay the same."""
    cache[:] = [_mapped(str(index), entry, convert) for index, entry in enumerate(cache)]


def _mapped(path: str, entry: Any, convert: Callable[[str, Any], Any]) -> Any:
    if entry is None or not isinstance(entry, kinds.CacheList):
        return entry if entry is None else convert(path, entry)
    children = [_mapped(f"{path}.{index}", child, convert) for index, child in enumerate(entry.caches)]
    if all(new is old for new, old in zip(children, entry.caches, strict=True)):
        return entry
    return kinds.CacheList(*children)


def can_trim(cache: Sequence[Any], num_tokens: int) -> bool:
    """Whether *every* layer can give up its last `num_tokens` tokens exactly."""
    return all(adapter_of(leaf).can_trim(leaf, num_tokens) for _, leaf in leaves(cache))


def trim(cache: Sequence[Any], num_tokens: int) -> None:
    """Take the last `num_tokens` tokens out of every layer; only after `can_trim` said yes."""
    for _, leaf in leaves(cache):
        adapter_of(leaf).trim(leaf, num_tokens)


def fork(cache: Sequence[Any]) -> list[Any]:
    """Caches that hold the same and can go another way: the arrays are shared until one of the two writes.

    MLX copies an array that somebody else holds before it changes it in place, so the first token after a fork costs
    one copy of what it writes to, on either side but not on both. Copies nothing and evaluates nothing by itself.
    """
    return [fork_entry(entry) for entry in cache]


def fork_entry(entry: Any) -> Any:
    """The same for one layer's cache, or for one leaf."""
    if entry is None:
        return None
    twin = copy.copy(entry)
    for name, value in vars(entry).items():
        setattr(twin, name, _shared(value))
    return twin


def _shared(value: Any) -> Any:
    # An update in place changes the array *object*: each side needs its own, on the same memory.
    if isinstance(value, mx.array):
        return copy.copy(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_shared, value))
    return fork_entry(value) if hasattr(type(value), "state") else value


def room_for(num_tokens: int) -> int:
    """How many rows a cache has that grew to `num_tokens` tokens."""
    return -(-num_tokens // _GROWTH_ROWS) * _GROWTH_ROWS
