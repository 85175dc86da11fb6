"""Puts the features of pictures and videos in the place of their placeholder tokens, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxgen.errors import PlaceholderError
from mlxgen.inputs import Features, PreparedInput


def chunk_features(
    inputs: PreparedInput, start: int, num_tokens: int, *, key: str = "features"
) -> list[tuple[int, int, mx.array]]:
    """The features that fall into the tokens `[start, start + num_tokens)`, in order.

    Each entry is (first, last, rows): `rows`, of shape (last - first, hidden), stand for the half-open range
    `[first, last)`, counted from the chunk's start. Media without features under `key` are passed over.
    Raises `PlaceholderError` if a span asks for rows its medium doesn't have.
    """
    found: list[tuple[int, int, mx.array]] = []
    end = start + num_tokens
    for span in inputs.spans:
        first, last = max(span.start, start), min(span.end, end)
        if first >= last:
            continue
        rows = feature_rows(
            inputs.media[span.medium].features,
            span.row_start + first - span.start,
            span.row_start + last - span.start,
            key=key,
        )
        if rows is not None:
            found.append((first - start, last - start, rows))
    return sorted(found, key=lambda entry: entry[0])


def feature_rows(parts: Sequence[Features], first: int, last: int, *, key: str = "features") -> mx.array | None:
    """Rows `[first, last)` of a medium's features, joined over its parts; None if no part has an array `key`."""
    arrays = [part[key] for part in parts if key in part]
    if not arrays:
        return None
    pieces: list[mx.array] = []
    offset = 0
    for array in arrays:
        low, high = max(first - offset, 0), min(last - offset, array.shape[0])
        if low < high:
            pieces.append(array[low:high])
        offset += array.shape[0]
    if last > offset or first < 0:
        raise PlaceholderError(f"rows [{first}, {last}) of a medium are asked for, it has {offset}")
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)


def place(hidden: mx.array, features: Sequence[tuple[int, int, mx.array]]) -> mx.array:
    """`hidden` (1, num_tokens, size) with the rows of `features` in their places, in `hidden`'s type."""
    pieces: list[mx.array] = []
    done = 0
    for first, last, rows in features:
        if first > done:
            pieces.append(hidden[:, done:first])
        pieces.append(rows[None].astype(hidden.dtype))
        done = last
    if done < hidden.shape[1]:
        pieces.append(hidden[:, done:])
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
