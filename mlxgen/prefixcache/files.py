"""Blocks and features as the arrays of a file, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlxgen.errors import SnapshotError
from mlxgen.inputs import Features
from mlxgen.prefixcache.block import Block, LeafState
from mlxgen.prefixcache.keys import Chunk
from mlxgen.snapshot import jsontext
from mlxgen.snapshot.export import from_host, to_host
from mlxgen.snapshot.safetensors import HostArray

_META = "meta"  # the one array that isn't a cache's: JSON


def block_to_host(block: Block) -> dict[str, HostArray]:
    """Views of the block's arrays, which never change, and what else it consists of; copies nothing."""
    chunk = block.chunk
    meta = {
        "key": chunk.key,
        "parent": chunk.parent,
        "start": chunk.start,
        "end": chunk.end,
        "leaves": [[state.path, state.kind, state.meta] for state in block.leaves],
    }
    return {_META: _json_array(meta)} | {f"cache/{name}": to_host(array) for name, array in block.arrays.items()}


def block_from(arrays: Mapping[str, HostArray], chunk: Chunk) -> Block:
    """The block of `chunk` in a file. Raises `SnapshotError` for what isn't one, or is another's.

    That its arrays are those of the model at hand is for `Layout.check` to say.
    """
    meta = _json_of(arrays)
    try:
        found = Chunk(meta["key"], meta["parent"], meta["start"], meta["end"])
        states = tuple(LeafState(str(path), str(kind), dict(rest)) for path, kind, rest in meta["leaves"])
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"a block's description is malformed ({error!r})") from error
    if found != chunk:
        raise SnapshotError(f"a block says that it is {found.key}, it was kept as {chunk.key}")
    own = {name.removeprefix("cache/"): from_host(host) for name, host in arrays.items() if name != _META}
    mx.eval(list(own.values()))
    return Block(chunk, states, own)


def features_to_host(features: Features, content_hash: str, part: int) -> dict[str, HostArray]:
    """Views of one part's features, and whose they are."""
    contiguous = {name: mx.contiguous(array) for name, array in features.items()}
    mx.eval(list(contiguous.values()))
    hosts = {f"feature/{name}": to_host(array) for name, array in contiguous.items()}
    return {_META: _json_array({"content_hash": content_hash, "part": part})} | hosts


def features_from(arrays: Mapping[str, HostArray], content_hash: str, part: int) -> Features:
    """The inverse. Raises `SnapshotError` for what isn't the features of this part."""
    if _json_of(arrays) != {"content_hash": content_hash, "part": part}:
        raise SnapshotError(f"a file of features isn't of part {part} of {content_hash}")
    found = {name.removeprefix("feature/"): from_host(host) for name, host in arrays.items() if name != _META}
    if "features" not in found or any(0 in array.shape for array in found.values()):
        raise SnapshotError("a file of features has none")
    mx.eval(list(found.values()))
    return found


def _json_array(value: Any) -> HostArray:
    return HostArray.from_numpy(np.frombuffer(json.dumps(value).encode(), np.uint8))


def _json_of(arrays: Mapping[str, HostArray]) -> dict[str, Any]:
    host = arrays.get(_META)
    if host is None or host.dtype != "U8":
        raise SnapshotError("it has no description")
    try:
        value = jsontext.decode(bytes(host.raw()), tags=False, unique_keys=True)
    except jsontext.JsonTextError as error:
        raise SnapshotError(f"its description isn't JSON: {error}") from error
    if not isinstance(value, dict):
        raise SnapshotError("its description isn't an object")
    return value
