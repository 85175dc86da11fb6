"""Cutting a picture into equal tiles: the grid whose shape comes closest to the picture's, and the cut itself.

InternVL's `dynamic_preprocess` (OpenGVLab/InternVL, `internvl_chat/internvl/train/dataset.py`) brought the rule up;
transformers has it for GOT-OCR2, InternVL and LFM2-VL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxgen.errors import UnsupportedError

Pixels = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class TileLimits:
    """How many tiles a picture may have, inclusive, and how many of them side by side (None: no bound of its own)."""

    min_tiles: int
    max_tiles: int
    max_side: int | None = None

    def grids(self) -> list[tuple[int, int]]:
        """All (rows, columns) within the limits: fewer tiles first, then fewer columns.

        Raises `UnsupportedError` if there are none.
        """
        side = self.max_tiles if self.max_side is None else min(self.max_side, self.max_tiles)
        found = [
            (rows, columns)
            for columns in range(1, side + 1)
            for rows in range(1, side + 1)
            if self.min_tiles <= rows * columns <= self.max_tiles
        ]
        if not found:
            raise UnsupportedError(
                f"no grid has {self.min_tiles} to {self.max_tiles} tiles, at most {side} side by side; "
                "raise the upper bound or lower the lower one"
            )
        return sorted(found, key=lambda grid: grid[0] * grid[1])


def closest_grid(size: tuple[int, int], tile: tuple[int, int], limits: TileLimits) -> tuple[int, int]:
    """(rows, columns) of the grid whose columns : rows is nearest to the width : height of a picture.

    `size` and `tile` are (height, width) in pixels. Of grids equally near, a larger one is taken while the picture has
    more than half of its pixels. Ratios are compared as floats, because that is how the published rule decides.
    """
    ratio, area = size[1] / size[0], size[0] * size[1]
    best, nearest = (1, 1), float("inf")
    for rows, columns in limits.grids():
        apart = abs(ratio - columns / rows)
        larger = apart == nearest and area > 0.5 * tile[0] * tile[1] * rows * columns
        if apart < nearest or larger:
            best, nearest = (rows, columns), apart
    return best


def cut(rgb: Pixels, rows: int, columns: int) -> Pixels:
    """(rows * height, columns * width, 3) as (rows * columns, height, width, 3), row by row."""
    height, width = rgb.shape[0] // rows, rgb.shape[1] // columns
    tiles = rgb.reshape(rows, height, columns, width, 3).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(rows * columns, height, width, 3)
