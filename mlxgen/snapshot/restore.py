"""From files back to caches and media, piece by piece: one segment in memory beside the cache it fills.

Nothing reaches MLX unchecked: sizes, hashes and the files' structure are the store's business, here the shapes, dtypes
and ranges are compared with those of freshly made caches of the model at hand.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxgen.cache import StateMark, adapter_of, leaves, trim
from mlxgen.cache.build import quantize_empty
from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import MlxgenError, SnapshotError
from mlxgen.inputs import PreparedMedium
from mlxgen.sequence import TokenSequence
from mlxgen.snapshot.export import CacheExport, from_host
from mlxgen.snapshot.store import FileEntry, HostArray, SnapshotStore

_MAX_CAPACITY_FACTOR = 4


def restore_cache(
    store: SnapshotStore, sequence: TokenSequence, state: CacheExport, *, cancel: CancelToken = NEVER
) -> None:
    """Fill the empty caches of `sequence` from the current generation; one segment is one cancellable unit.

    Raises `SnapshotError` when a file is damaged or doesn't fit the model. The caches are then half filled: empty them.
    """
    manifest = store.manifest
    if manifest is None:
        raise SnapshotError(f"{store.path} has no saved cache")
    try:
        _check_passes(state)
        _prepare_leaves(sequence, state)
        _check_layout(sequence, state, sequence.cache)
        by_path = {path: (leaf, adapter_of(leaf)) for path, leaf in leaves(sequence.cache)}
        metas = {path: meta for path, _, meta in state.leaves}
        _restore_rows(store, manifest.of_kind("kv"), by_path, metas, state.position, cancel)
        _restore_whole(store, manifest.of_kind("state"), by_path, metas, state.position, cancel)
    except MlxgenError:
        raise
    except Exception as error:
        # MLX's own complaints about shapes and dtypes: the header was right, the content belongs to something else.
        raise SnapshotError(f"{store.path}: a saved cache doesn't fit this model ({error})") from error


def _check_passes(state: CacheExport) -> None:
    position = 0
    for kind, start, count in state.passes:
        if kind not in ("prefill", "decode") or start < 0 or start > position or count < 1:
            raise SnapshotError("the snapshot's list of forward passes is malformed; it can't be used")
        position = start + count
    if position < state.position:
        raise SnapshotError("the snapshot's forward passes end before its cache does; it can't be used")


def _prepare_leaves(sequence: TokenSequence, state: CacheExport) -> None:
    fresh = [(path, adapter_of(leaf).kind) for path, leaf in leaves(sequence.cache)]
    saved = [(path, kind) for path, kind, _ in state.leaves]
    if [path for path, _ in fresh] != [path for path, _ in saved]:
        raise SnapshotError(
            f"the snapshot has {len(saved)} layer caches, this model makes {len(fresh)}: it is of another model"
        )
    for (path, kind), (_, saved_kind), (_, _, meta) in zip(fresh, saved, state.leaves, strict=True):
        if kind == saved_kind:
            continue
        if saved_kind != "quantized" or kind != "kv":
            raise SnapshotError(f"cache {path} was saved as {saved_kind!r}, this model makes {kind!r}: another model?")
        quantize_empty(sequence.cache, path, int(meta["group_size"]), int(meta["bits"]))


def _check_layout(sequence: TokenSequence, state: CacheExport, empty: Sequence[Any]) -> None:
    """Compare what the manifest says of caches with what this model really puts into `empty` ones.

    One token goes through the model lazily, into empty caches: that tells shapes and dtypes, and computes nothing.
    """
    probe = copy.deepcopy(list(empty))
    sequence.forward(mx.zeros((1,), dtype=mx.uint32), cache=probe, start=0, inputs=None)
    metas = {path: meta for path, _, meta in state.leaves}
    fresh = dict(leaves(empty))
    for path, filled in leaves(probe):
        if path not in metas:
            continue
        adapter, meta = adapter_of(filled), metas[path]
        expected = adapter.meta(filled)
        if state.position == 0 and not meta["arrays"]:
            expected["arrays"] = {}
        if set(meta["arrays"]) != set(expected["arrays"]):
            raise SnapshotError(f"cache {path} has the arrays {sorted(meta['arrays'])}: it is of another model")
        for name, (dtype, shape) in expected["arrays"].items():
            found_dtype, found_shape = meta["arrays"][name]
            if adapter.kind != "arrays":  # the rows of all other kinds grow
                shape = [*shape[:-2], found_shape[-2] if len(found_shape) > 1 else -1, shape[-1]]
            if found_dtype != dtype or list(found_shape) != shape or not all(type(n) is int and n > 0 for n in shape):
                raise SnapshotError(
                    f"cache {path}/{name} is {found_dtype} {found_shape} in the manifest, this model needs {dtype} "
                    f"{shape}; it can't be used"
                )
        if not adapter.appends:
            _check_whole(path, adapter.kind, meta["state"], _skeleton_of(expected, state), fresh[path], state.position)


def _skeleton_of(meta: Mapping[str, Any], state: CacheExport) -> Any:
    return None if state.position == 0 else meta["state"]


def _check_whole(path: str, kind: str, found: Any, expected: Any, fresh: Any, position: int) -> None:
    if expected is not None and not _same_structure(found, expected):
        raise SnapshotError(f"the state of cache {path} isn't built like that of a {kind!r} cache; it can't be used")
    if position == 0:
        return
    if kind == "rotating":
        _, _, offset, keep, max_size, index = found
        right = offset == position and keep == fresh.keep and max_size == fresh.max_size and index >= 0
        # Until it has wrapped, the ring is written where the next token belongs.
        right = right and (index == offset if offset <= max_size else index > keep)
    elif kind == "chunked":
        _, _, offset, chunk_size, start = found
        right = offset == position and chunk_size == fresh.chunk_size and 0 <= start <= offset
    else:
        return
    if not right:
        raise SnapshotError(f"the state of cache {path} ({found[2:]}) doesn't fit {position} tokens; it can't be used")


def check_bounded(cache: tuple[str, str], meta: Mapping[str, Any], expected: Any, fresh: Any, position: int) -> None:
    """Raise `SnapshotError` unless `meta` can be that of a cache (path, kind) that isn't appended to, after `position`
    tokens: built like `expected`, with an index that lies in its rows. `fresh` is an empty one of this model."""
    _check_whole(*cache, meta["state"], expected, fresh, position)
    _check_rows(*cache, meta, position)


def _same_structure(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(_same_structure, found, expected))
    return type(found) is type(expected)


def _check_rows(path: str, kind: str, meta: Mapping[str, Any], position: int) -> None:
    """A ring's or chunk's index must lie in its rows, and there must be no fewer rows than tokens it has to keep."""
    if kind not in ("rotating", "chunked") or not meta["arrays"]:
        return
    rows = {shape[-2] for _, shape in meta["arrays"].values()}
    scalars = meta["state"][2:]
    needed = scalars[3] if kind == "rotating" else scalars[0] - scalars[2]
    if len(rows) != 1 or not needed <= min(rows) <= _MAX_CAPACITY_FACTOR * (position + 16384):
        raise SnapshotError(f"cache {path} has room for {sorted(rows)} rows but needs {needed}; it can't be used")


def _restore_rows(
    store: SnapshotStore,
    entries: Sequence[FileEntry],
    by_path: dict[str, tuple[Any, Any]],
    metas: dict[str, dict[str, Any]],
    position: int,
    cancel: CancelToken,
) -> None:
    growing = {path: pair for path, pair in by_path.items() if pair[1].appends}
    if not growing:
        return
    for path, (leaf, adapter) in growing.items():
        _check_append_meta(path, metas[path], position)
        adapter.allocate(leaf, metas[path])
    covered = 0
    for entry in entries:
        cancel.checkpoint()
        start, end = int(entry.meta["start"]), int(entry.meta["end"])
        if start != covered or end <= start or end > position:
            raise SnapshotError(f"{store.path}: {entry.name} holds rows {start} to {end}, expected from row {covered}")
        covered = end
        arrays = store.read(entry)
        for path, (leaf, adapter) in growing.items():
            expected = metas[path]["arrays"]
            rows = {name: _rows(arrays, f"{path}/{name}", end - start, spec) for name, spec in expected.items()}
            adapter.write_rows(leaf, start, rows)
    if covered != position and any(meta["arrays"] for path, meta in metas.items() if path in growing):
        raise SnapshotError(f"{store.path}: the cache segments end at row {covered}, not {position}")


def _check_append_meta(path: str, meta: dict[str, Any], position: int) -> None:
    if int(meta["offset"]) != position:
        raise SnapshotError(f"cache {path} ends at token {meta['offset']}, the ledger at {position}; it can't be used")
    for name, (_, shape) in meta["arrays"].items():
        if len(shape) != 4 or any(not isinstance(n, int) or n < 1 for n in shape):
            raise SnapshotError(f"cache {path}/{name} has shape {shape}; it can't be used")
        if not position <= shape[-2] <= _MAX_CAPACITY_FACTOR * (position + 16384):
            raise SnapshotError(f"cache {path}/{name} has room for {shape[-2]} rows but holds {position}")


def _rows(arrays: dict[str, HostArray], name: str, num_rows: int, spec: Any) -> mx.array:
    dtype, shape = spec
    host = arrays.get(name)
    if host is None:
        raise SnapshotError(f"a cache segment lacks {name}; it can't be used")
    array = from_host(host)
    # A segment that a rewind cut holds more rows than count.
    wanted = (*shape[:-2], array.shape[-2] if array.ndim == 4 else -1, shape[-1])
    if tuple(array.shape) != wanted or array.shape[-2] < num_rows or str(array.dtype) != f"mlx.core.{dtype}":
        raise SnapshotError(f"{name} has {array.dtype} {array.shape} in its segment, the manifest says {dtype} {shape}")
    return array[..., :num_rows, :]


def _restore_whole(
    store: SnapshotStore,
    entries: Sequence[FileEntry],
    by_path: dict[str, tuple[Any, Any]],
    metas: dict[str, dict[str, Any]],
    position: int,
    cancel: CancelToken,
) -> None:
    bounded = {path: pair for path, pair in by_path.items() if not pair[1].appends}
    if not bounded:
        return
    arrays: dict[str, HostArray] = {}
    for entry in entries:
        cancel.checkpoint()
        if int(entry.meta["position"]) != position:
            raise SnapshotError(f"{store.path}: {entry.name} is of token {entry.meta['position']}, not {position}")
        arrays |= store.read(entry)
    for path, (leaf, adapter) in bounded.items():
        _check_rows(path, adapter.kind, metas[path], position)
        own: dict[str, mx.array] = {}
        for name, (dtype, shape) in metas[path]["arrays"].items():
            host = arrays.get(f"{path}/{name}")
            if host is None or list(host.shape) != list(shape):
                raise SnapshotError(f"{store.path}: the state of cache {path}/{name} is missing or misshapen")
            own[name] = from_host(host)
            if str(own[name].dtype) != f"mlx.core.{dtype}":
                raise SnapshotError(f"{store.path}: the state of cache {path}/{name} is {own[name].dtype}, not {dtype}")
        adapter.restore(leaf, metas[path], own)
        mx.eval(adapter.arrays(leaf))


def restore_marks(
    store: SnapshotStore, sequence: TokenSequence, saved: Sequence[Mapping[str, Any]], *, cancel: CancelToken = NEVER
) -> list[str]:
    """Give `sequence` the state marks of the current generation. One that can't be used is left out, with a word why:
    marks only make going back quicker."""
    manifest = store.manifest
    entries = {} if manifest is None else {int(entry.meta["position"]): entry for entry in manifest.of_kind("mark")}
    notes: list[str] = []
    for one in saved:
        cancel.checkpoint()
        try:
            position = int(one["position"])
            if not 0 < position <= sequence.num_fed or position not in entries:
                raise SnapshotError(f"{store.path}: there is no mark at token {position}")
            found = tuple((str(leaf["path"]), str(leaf["kind"]), leaf["meta"]) for leaf in one["leaves"])
            restored = _restore_mark(store, sequence, entries[position], CacheExport(position=position, leaves=found))
            sequence.marks.add(restored)
        except Exception as error:
            notes.append(f"a state mark was left out: {error}")
    return notes


def _restore_mark(store: SnapshotStore, sequence: TokenSequence, entry: FileEntry, state: CacheExport) -> StateMark:
    fresh = sequence.empty_cache()
    bounded = {path: leaf for path, leaf in leaves(fresh) if not adapter_of(leaf).appends}
    if [(path, adapter_of(leaf).kind) for path, leaf in bounded.items()] != [(p, kind) for p, kind, _ in state.leaves]:
        raise SnapshotError(f"{entry.name} is of other caches than this model's")
    _check_layout(sequence, state, fresh)
    by_path = {path: (leaf, adapter_of(leaf)) for path, leaf in bounded.items()}
    _restore_whole(store, [entry], by_path, {path: meta for path, _, meta in state.leaves}, state.position, NEVER)
    return StateMark(state.position, bounded, pinned=True)


def restore_media(
    store: SnapshotStore, states: Sequence[dict[str, Any]], *, cancel: CancelToken = NEVER
) -> list[PreparedMedium]:
    """Every medium as far as it was prepared and encoded when the generation was written.

    Raises `SnapshotError` when a file is damaged, or contradicts the rest.
    """
    try:
        return _restore_media(store, states, cancel)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, MlxgenError):
            raise
        raise SnapshotError(f"{store.path}: the list of media is malformed ({error!r}); it can't be used") from error


def _restore_media(store: SnapshotStore, states: Sequence[dict[str, Any]], cancel: CancelToken) -> list[PreparedMedium]:
    media = [
        PreparedMedium(
            kind="image" if state["kind"] == "image" else "video",
            source_hash=str(state["source_hash"]),
            source_name=str(state["source_name"]),
            geometry=dict(state["geometry"]),
            num_frames=None if state["num_frames"] is None else int(state["num_frames"]),
            content_hash=str(state["content_hash"]),
            num_parts=None if state["num_parts"] is None else int(state["num_parts"]),
        )
        for state in states
    ]
    assert store.manifest is not None or not media
    for entry in store.manifest.of_kind("prep") if store.manifest is not None else ():
        cancel.checkpoint()
        _restore_prep(store, entry, media)
    for state, medium in zip(states, media, strict=True):
        if len(medium.frames) != state["frames"] or len(medium.features) != state["parts"]:
            raise SnapshotError(f"{store.path}: prepared frames or features of {medium.source_name!r} are missing")
    return media


def _restore_prep(store: SnapshotStore, entry: FileEntry, media: Sequence[PreparedMedium]) -> None:
    index = int(entry.meta["medium"])
    if not 0 <= index < len(media):
        raise SnapshotError(f"{store.path}: {entry.name} belongs to medium {index} of {len(media)}")
    medium, arrays = media[index], store.read(entry)
    frames, parts = entry.meta["frames"], entry.meta["features"]
    if frames[0] != len(medium.frames) or parts[0] != len(medium.features):
        raise SnapshotError(f"{store.path}: {entry.name} doesn't follow what is there of medium {index}")
    for i in range(*frames):
        host = arrays.get(f"frame/{i}")
        if host is None or host.dtype != "U8" or 0 in host.shape:
            raise SnapshotError(f"{store.path}: {entry.name} lacks frame {i}")
        medium.frames.append(np.array(host.numpy()))
    for part in range(*parts):
        prefix = f"feature/{part}/"
        features = {name.removeprefix(prefix): from_host(a) for name, a in arrays.items() if name.startswith(prefix)}
        if "features" not in features:
            raise SnapshotError(f"{store.path}: {entry.name} lacks the features of part {part}")
        mx.eval(list(features.values()))
        medium.features.append(features)


def cut_cache(sequence: TokenSequence, position: int) -> bool:
    """After a restore: drop the rows behind `position`, which a later rewind made void. False where it can't be
    done."""
    excess = sequence.num_fed - position
    if excess <= 0:
        return True
    if not sequence.can_trim_to(position):
        return sequence.to_mark(position)
    trim(sequence.cache, excess)
    sequence.num_fed = position
    sequence.passes.trim(position)
    return True
