"""Rows of a tiled picture in reading order: the whole, then the larger view line by line, each line with its end."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np


def large_view(tiles: mx.array, grid: tuple[int, int], side: int) -> mx.array:
    """Tiles, (rows * columns, side * side, width), put together: (rows * side, columns * side, width)."""
    rows, columns = grid
    width = tiles.shape[-1]
    whole = tiles.reshape(rows, columns, side, side, width).transpose(0, 2, 1, 3, 4)
    return whole.reshape(rows * side, columns * side, width)


def with_line_ends(view: mx.array, newline: mx.array) -> mx.array:
    """(rows, columns, width) -> (rows * (columns + 1), width), `newline` behind each row."""
    rows, _, width = view.shape
    ends = mx.broadcast_to(newline.astype(view.dtype), (rows, 1, width))
    return mx.concatenate([view, ends], axis=1).reshape(-1, width)


def resample(view: mx.array, rows: int, columns: int) -> mx.array:
    """(height, width, channels) -> (rows, columns, channels), bilinear between the centres of the rows and columns.

    As PyTorch's `interpolate(mode="bilinear", align_corners=False)`: no low-pass filter when it gets smaller. Computed
    in float32, returned in the view's type.
    """
    height, width, channels = view.shape
    down, across = mx.array(_weights(height, rows)), mx.array(_weights(width, columns))
    across_first = across @ view.astype(mx.float32)
    both = down @ across_first.reshape(height, columns * channels)
    return both.reshape(rows, columns, channels).astype(view.dtype)


def _weights(old: int, new: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    matrix = np.zeros((new, old), np.float32)
    for index in range(new):
        place = max((index + 0.5) * (old / new) - 0.5, 0.0)
        first = min(math.floor(place), old - 1)
        share = np.float32(place - first)
        matrix[index, first] += 1 - share
        matrix[index, min(first + 1, old - 1)] += share
    return matrix
