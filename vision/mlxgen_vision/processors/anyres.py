"""LLaVA-NeXT's picture rule: one view of the whole, and tiles of a larger one on the grid that suits the picture best.

After transformers' `image_processing_llava_next.py` and `processing_llava_next.py`, which follow LLaVA-NeXT's own
`mm_utils.py` (`select_best_resolution`, `resize_and_pad_image`, `divide_to_patches`). The larger view keeps the
picture's ratio and is padded with black; rows and columns of patches that saw nothing but padding are left out again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxgen.errors import UnsupportedError
from mlxgen_vision.image import Resample
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.llava import Pixels, Resize, clip_normalisation, edges, pad_to
from mlxgen_vision.processors.settings import Normalisation

Size = tuple[int, int]

_BLACK: Final = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class AnyResSettings:
    """`side` of every view in pixels; `grids` are the sizes (height, width) a picture may be scaled into."""

    side: int
    grids: tuple[Size, ...]
    resample: Resample
    normalisation: Normalisation

    @classmethod
    def read(cls, path: Path, config: Mapping[str, Any], side: int, default: Sequence[Size]) -> AnyResSettings:
        """From any layout; `side` is the tower's, `default` the grids of a folder that names none.

        Raises `UnsupportedError` for settings that make views of other sizes, or grids that aren't whole tiles.
        """
        settings = processor_settings.image_settings(path)
        lengths = edges(settings.get("size") or side) + edges(settings.get("crop_size") or side)
        if not settings.get("do_resize", True) or set(lengths) != {side}:
            raise UnsupportedError(
                f"the image processor has size {settings.get('size')}, crop_size {settings.get('crop_size')} and "
                f"do_resize {settings.get('do_resize', True)}; the tower takes {side}x{side} pixels: use the settings "
                "published with the model"
            )
        given = settings.get("image_grid_pinpoints") or config.get("image_grid_pinpoints") or default
        grids = tuple((int(height), int(width)) for height, width in given)
        if any(height < side or width < side or height % side or width % side for height, width in grids):
            raise UnsupportedError(
                f"image_grid_pinpoints are {sorted(grids)}, not all whole tiles of {side}x{side}; use the settings "
                "published with the model"
            )
        return cls(
            side=side,
            grids=grids,
            resample=processor_settings.resample(settings, "bicubic"),
            normalisation=clip_normalisation(settings),
        )

    def grid(self, size: Size) -> Size:
        """How many (rows, columns) of tiles a picture of this size is cut into."""
        height, width = best_grid(size, self.grids)
        return height // self.side, width // self.side


def best_grid(size: Size, grids: Sequence[Size]) -> Size:
    """Of `grids` the one in which most of the picture's own pixels survive, and least is left over; then the first."""
    height, width = size

    def suits(grid: Size) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, used - grid[0] * grid[1]

    return max(grids, key=suits)


def fitted_size(size: Size, grid: Size) -> Size:
    """(height, width) of the picture scaled into `grid` with its ratio kept: one side fills it, the other is rounded
    up."""
    across, down = grid[1] / size[1], grid[0] / size[0]
    if across < down:
        return min(math.ceil(size[0] * across), grid[0]), grid[1]
    return grid[0], min(math.ceil(size[1] * down), grid[1])


def views(rgb: Pixels, settings: AnyResSettings, resize: Resize) -> Pixels:
    """The whole picture, stretched, and then its tiles row by row: uint8 (1 + tiles, side, side, 3)."""
    side = settings.side
    size = (rgb.shape[0], rgb.shape[1])
    rows, columns = settings.grid(size)
    grid = (rows * side, columns * side)
    large = pad_to(resize(rgb, fitted_size(size, grid), settings.resample), grid, _BLACK)
    tiles = large.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
    return np.concatenate([resize(rgb, (side, side), settings.resample)[None], tiles])


@dataclass(frozen=True, slots=True)
class Window:
    """The patches of the larger view that saw the picture: rows `[top, bottom)` and columns `[left, right)`."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def rows(self) -> int:
        return self.bottom - self.top

    @property
    def columns(self) -> int:
        return self.right - self.left

    def cut(self, view: Any) -> Any:
        """What the window leaves of an array (rows, columns, ...)."""
        return view[self.top : self.bottom, self.left : self.right]


def unpadded(size: Size, rows: int, columns: int) -> Window:
    """The window of a picture of `size` (height, width) in `rows` by `columns` patches.

    Both bars are taken to be as wide as the narrower, in whole patches rounded down; so a patch half in a bar stays.
    """
    height, width = size
    if width / height > columns / rows:
        bar = (rows - _floor(height * (columns / width))) // 2
        return Window(bar, rows - bar, 0, columns)
    bar = (columns - _floor(width * (rows / height))) // 2
    return Window(0, rows, bar, columns - bar)


def _floor(value: float) -> int:
    """Rounded down, but not for what only floating-point noise keeps below a whole number."""
    return int(round(value, 7))
