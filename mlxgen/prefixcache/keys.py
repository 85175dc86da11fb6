"""What a block is known by: everything that its arrays are a function of, hashed, its parent's key included.

So the flat set of keys is the tree: two prompts share the blocks up to where they differ, in a token, in a picture, or
in where a pass ended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from mlxgen.cache import CacheOptions
from mlxgen.inputs import PreparedInput

Key = str
"""64 hex digits (SHA-256)."""

MIN_TOKENS = 16
"""A shorter chunk at a prompt's end isn't worth a block: feeding it costs less than keeping it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill pass, tokens `[start, end)`, by the key of all that led to its end."""

    key: Key
    parent: Key
    start: int
    end: int


def root_key(options: CacheOptions) -> Key:
    """What an empty cache is known by: what of the options decides what passes leave in it.

    The model isn't in it: in memory each has a tree of its own, on the disk a folder.
    """
    said = [options.max_kv_size]
    if options.kv_bits is not None:
        said += [options.kv_bits, options.kv_group_size, options.quantized_kv_start]
    return hashlib.sha256(json.dumps(["mlxgen prefix 1", *said]).encode()).hexdigest()


def chunks(
    root: Key, ids: Sequence[int], inputs: PreparedInput | None, passes: Sequence[tuple[int, int]]
) -> list[Chunk]:
    """The chunks of prefill passes `[start, end)` over `ids` that follow each other from token 0 on."""
    tokens = np.asarray(ids, "<u4")
    found: list[Chunk] = []
    parent = root
    for start, end in passes:
        hasher = hashlib.sha256(f"{parent} {start} {end} {_media_of(inputs, start, end)}\n".encode())
        hasher.update(tokens[start : _end_of_seen(inputs, end)].tobytes())
        if inputs is not None and inputs.position_ids is not None:
            hasher.update(np.ascontiguousarray(inputs.position_ids[:, start:end], "<i4").tobytes())
        key = hasher.hexdigest()
        found.append(Chunk(key, parent, start, end))
        parent = key
    return found


def _end_of_seen(inputs: PreparedInput | None, end: int) -> int:
    """Up to where tokens matter to a pass that ends at `end`: further where that is inside an atomic range, whose
    tokens see each other (a prompt's last token is fed on its own)."""
    atomic = () if inputs is None else inputs.atomic
    return max([end, *(last for first, last in atomic if first < end)])


def _media_of(inputs: PreparedInput | None, start: int, end: int) -> str:
    """What of the media a pass over `[start, end)` sees. A picture counts whole, also where the pass has a part of it:
    what the tokens of that part see came out of the whole picture. So does all that a family says of its spans, and
    what else is in a range that attends in both directions."""
    if inputs is None:
        return ""
    atomic = [pair for pair in inputs.atomic if pair[0] < end and pair[1] > start]
    first, last = min([start, *(pair[0] for pair in atomic)]), max([end, *(pair[1] for pair in atomic)])
    spans = [
        asdict(span) | {"medium": inputs.media[span.medium].content_hash}
        for span in inputs.spans
        if span.start < last and span.end > first
    ]
    # Tokens behind the prompt have positions that count on from it.
    delta = inputs.rope_delta if end > len(inputs.token_ids) else None
    return json.dumps([spans, atomic, delta], sort_keys=True)


def passes_from_zero(entries: Sequence[tuple[str, int, int]], num_fed: int) -> list[tuple[int, int]] | None:
    """The recorded passes as half-open ranges, if all that was fed is whole prefill passes one after another."""
    position = 0
    ranges: list[tuple[int, int]] = []
    for kind, start, count in entries:
        if kind != "prefill" or start != position:
            return None
        position = start + count
        ranges.append((start, position))
    return ranges if position == num_fed else None
