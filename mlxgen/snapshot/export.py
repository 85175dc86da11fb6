"""From live caches and media to files: which rows are new, in pieces of bounded size, as bytes the writer may keep."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from mlxgen.cache import StateMark, adapter_of, leaves
from mlxgen.errors import UnsupportedError
from mlxgen.inputs import PreparedMedium
from mlxgen.sequence import Sampled, TokenSequence
from mlxgen.snapshot.store import FileEntry, HostArray

MAX_SEGMENT_BYTES = 64 * 2**20

_DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.bool_: "BOOL",
}

NewFile = tuple[str, dict[str, HostArray], dict[str, Any]]


def to_host(array: mx.array) -> HostArray:
    """An evaluated array that nobody else updates, as bytes; no copy. bfloat16, which NumPy lacks, as its bits."""
    name = _DTYPES.get(array.dtype)
    if name is None:
        raise UnsupportedError(f"arrays of {array.dtype} can't be saved")
    shape = tuple(array.shape)
    view = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return HostArray(name, shape, np.ascontiguousarray(np.asarray(view)))


def from_host(array: HostArray) -> mx.array:
    """The inverse of `to_host`; copies."""
    names = {name: dtype for dtype, name in _DTYPES.items()}
    dtype = names.get(array.dtype)
    if dtype is None:
        raise UnsupportedError(f"arrays of {array.dtype} can't be restored")
    raw = np.frombuffer(array.data, np.uint8) if not isinstance(array.data, np.ndarray) else array.data
    if dtype == mx.bfloat16:
        return mx.array(raw.view(np.uint16).reshape(array.shape)).view(mx.bfloat16)
    return mx.array(raw.view(_NUMPY[array.dtype]).reshape(array.shape))


_NUMPY = {
    "F32": np.float32,
    "F16": np.float16,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "BOOL": np.bool_,
}


@dataclass(frozen=True, slots=True)
class CacheExport:
    """What the snapshot's files hold of the caches: rows up to `position`, for leaves of these kinds."""

    position: int = 0
    leaves: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    pending: Sampled | None = None
    num_ids: int = 0
    passes: tuple[tuple[str, int, int], ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        pending = self.pending
        return {
            "position": self.position,
            "num_ids": self.num_ids,
            "leaves": [{"path": path, "kind": kind, "meta": meta} for path, kind, meta in self.leaves],
            "pending": None if pending is None else [pending.id, pending.logprob, pending.top],
            "passes": [list(entry) for entry in self.passes],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CacheExport:
        pending = data["pending"]
        if pending is not None:
            top = pending[2]
            tops = None if top is None else tuple((int(i), float(v)) for i, v in top)
            pending = Sampled(int(pending[0]), None if pending[1] is None else float(pending[1]), tops)
        return cls(
            position=int(data["position"]),
            num_ids=int(data["num_ids"]),
            leaves=tuple((leaf["path"], leaf["kind"], leaf["meta"]) for leaf in data["leaves"]),
            pending=pending,
            passes=tuple((str(kind), int(start), int(count)) for kind, start, count in data["passes"]),
        )


def export_cache(
    sequence: TokenSequence, before: CacheExport, keep: int
) -> tuple[Iterator[NewFile], CacheExport, bool]:
    """What must be written so that the snapshot holds `sequence` as it is now.

    `before` says what files hold already, `keep` up to which row that is still true. Returns the new files, made one at
    a time as they are asked for (row segments of at most 64 MB for caches that only grow; the whole state of the
    others), the new state, and whether segments start again from row 0 because a cache changed its kind (quantised
    meanwhile).
    """
    sequence.repair()
    entries = [(path, leaf, adapter_of(leaf)) for path, leaf in leaves(sequence.cache)]
    kinds = tuple((path, adapter.kind) for path, _, adapter in entries)
    known = tuple((path, kind) for path, kind, _ in before.leaves)
    restarted = bool(known) and kinds != known
    start = 0 if restarted or not known else min(keep, before.position)
    end = sequence.num_fed
    growing = [(path, leaf, adapter) for path, leaf, adapter in entries if adapter.appends]
    for path, leaf, _ in growing:
        if leaf.offset != end:
            raise UnsupportedError(f"cache {path} holds {leaf.offset} tokens, the ledger {end}: it can't be saved")
    bounded = [(path, leaf, adapter) for path, leaf, adapter in entries if not adapter.appends]
    return (
        itertools.chain(_segments(growing, start, end), _states(bounded, end)),
        CacheExport(
            position=end,
            leaves=tuple((path, adapter.kind, adapter.meta(leaf)) for path, leaf, adapter in entries),
            pending=sequence.ahead,
            num_ids=len(sequence.ids),
            passes=tuple(sequence.passes.entries),
        ),
        restarted,
    )


def unchanged(sequence: TokenSequence, before: CacheExport) -> bool:
    """Whether the files of `before` (all of whose rows still count) hold the caches as they are: nothing was fed."""
    return (
        bool(before.leaves)
        and not sequence.torn
        and sequence.num_fed == before.position
        and tuple(sequence.passes.entries) == before.passes
    )


def with_pending(before: CacheExport, sequence: TokenSequence) -> CacheExport:
    """The same caches, with the pending token there is now."""
    return replace(before, pending=sequence.ahead, num_ids=len(sequence.ids))


def _states(bounded: Sequence[tuple[str, Any, Any]], end: int) -> Iterator[NewFile]:
    state = {f"{path}/{name}": array for path, leaf, adapter in bounded for name, array in adapter.whole(leaf).items()}
    if state:
        mx.eval(list(state.values()))
        yield "state", {name: to_host(array) for name, array in state.items()}, {"position": end}


def _segments(growing: Sequence[tuple[str, Any, Any]], start: int, end: int) -> Iterator[NewFile]:
    if not growing:
        return
    row_bytes = sum(
        array.nbytes // max(array.shape[-2], 1) for _, leaf, adapter in growing for array in adapter.arrays(leaf)
    )
    num_rows = max(1, MAX_SEGMENT_BYTES // max(row_bytes, 1))
    for first in range(start, end, num_rows):
        last = min(first + num_rows, end)
        arrays = {
            f"{path}/{name}": rows
            for path, leaf, adapter in growing
            for name, rows in adapter.rows(leaf, first, last).items()
        }
        mx.eval(list(arrays.values()))
        yield "kv", {name: to_host(rows) for name, rows in arrays.items()}, {"start": first, "end": last}


def export_marks(
    marks: Sequence[StateMark], saved: MutableMapping[int, StateMark]
) -> Iterator[tuple[str, dict[str, HostArray], dict[str, Any]]]:
    """Files for the state marks that aren't in one yet; `saved` has those that are, by position, and is brought up to
    date: what of it isn't among `marks` any more is void."""
    wanted = {mark.position: mark for mark in marks}
    for position in [position for position, mark in saved.items() if wanted.get(position) is not mark]:
        del saved[position]
    for position, mark in wanted.items():
        if position not in saved:
            state = {
                f"{path}/{name}": array
                for path, leaf in mark.leaves.items()
                for name, array in adapter_of(leaf).whole(leaf).items()
            }
            mx.eval(list(state.values()))
            yield "mark", {name: to_host(array) for name, array in state.items()}, {"position": position}
            saved[position] = mark


def marks_to_json(saved: Mapping[int, StateMark]) -> list[dict[str, Any]]:
    """What a manifest says of the state marks in its files."""
    return [
        {
            "position": position,
            "leaves": [
                {"path": path, "kind": adapter_of(leaf).kind, "meta": adapter_of(leaf).meta(leaf)}
                for path, leaf in mark.leaves.items()
            ],
        }
        for position, mark in sorted(saved.items())
    ]


def trim_entries(files: Sequence[FileEntry], keep: int) -> list[FileEntry]:
    """The entries that still count when cache rows from `keep` on are void; one that straddles it keeps its first
    rows."""
    kept: list[FileEntry] = []
    for entry in files:
        if entry.kind != "kv" or entry.meta["end"] <= keep:
            kept.append(entry)
        elif entry.meta["start"] < keep:
            kept.append(replace(entry, meta={**entry.meta, "end": keep}))
    return kept


def export_media(
    media: Sequence[PreparedMedium], saved: MutableMapping[int, tuple[int, int]]
) -> Iterator[tuple[dict[str, HostArray], dict[str, Any]]]:
    """Files for frames and features that aren't in a file yet; `saved` counts both per medium and is brought up to
    date.

    A file holds at least one frame or part, and no more of them than fit `MAX_SEGMENT_BYTES` together.
    """
    for index, medium in enumerate(media):
        frames, parts = saved.get(index, (0, 0))
        for arrays, num_frames, num_parts in _bundles(_new_units(medium, frames, parts)):
            meta = {
                "medium": index,
                "frames": [frames, frames + num_frames],
                "features": [parts, parts + num_parts],
            }
            frames, parts = frames + num_frames, parts + num_parts
            yield arrays, meta
        saved[index] = (frames, parts)


_Unit = tuple[dict[str, HostArray], int, int]  # arrays, how many frames they are, how many parts


def _new_units(medium: PreparedMedium, frames: int, parts: int) -> Iterator[_Unit]:
    for i in range(frames, len(medium.frames)):
        yield {f"frame/{i}": HostArray.from_numpy(np.ascontiguousarray(medium.frames[i]))}, 1, 0
    for part in range(parts, len(medium.features)):
        features = {name: mx.contiguous(value) for name, value in medium.features[part].items()}
        mx.eval(list(features.values()))
        yield {f"feature/{part}/{name}": to_host(value) for name, value in features.items()}, 0, 1


def _bundles(units: Iterator[_Unit]) -> Iterator[_Unit]:
    arrays: dict[str, HostArray] = {}
    num_bytes = num_frames = num_parts = 0
    for own, frames, parts in units:
        own_bytes = sum(array.nbytes for array in own.values())
        if arrays and num_bytes + own_bytes > MAX_SEGMENT_BYTES:
            yield arrays, num_frames, num_parts
            arrays, num_bytes, num_frames, num_parts = {}, 0, 0, 0
        arrays, num_bytes = arrays | own, num_bytes + own_bytes
        num_frames, num_parts = num_frames + frames, num_parts + parts
    if arrays:
        yield arrays, num_frames, num_parts


def media_states(media: Sequence[PreparedMedium]) -> list[dict[str, Any]]:
    """The JSON-able rest of every medium, as copies (a video's geometry grows while the writer has them); arrays are in
    the prep files."""
    return [
        {
            "kind": medium.kind,
            "source_hash": medium.source_hash,
            "source_name": medium.source_name,
            "geometry": copy.deepcopy(medium.geometry),
            "num_frames": medium.num_frames,
            "frames": len(medium.frames),
            "content_hash": medium.content_hash,
            "num_parts": medium.num_parts,
            "parts": len(medium.features),
        }
        for medium in media
    ]


@functools.cache
def environment() -> dict[str, Any]:
    """What wrote this: versions and device. Another one may resume it, with a word that bits may differ."""
    return {
        "versions": {name: version(name) for name in ("mlxgen", "mlx", "mlx-lm")},
        "device": device_name(),
    }


def device_name() -> str:
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or mx.default_device())
