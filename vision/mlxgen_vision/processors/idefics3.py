"""Idefics3's picture rule (SmolVLM uses the same): scale the longest edge, cut into square tiles, add the whole.

Sizes and text after transformers' `image_processing_idefics3.py` and `processing_idefics3.py`. All tiles are full
squares, so the tower never sees padding: the pixel mask transformers passes along is all ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxgen.request import MediaOptions
from mlxgen_vision.image import Resample
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.settings import Normalisation

Pixels = np.ndarray[Any, Any]
Resize = Callable[[Pixels, tuple[int, int], Resample], Pixels]

MAX_EDGE: Final = 4096  # no picture is scaled beyond this, whatever longest_edge says

IMAGE: Final = "<image>"
FAKE: Final = "<fake_token_around_image>"
GLOBAL: Final = "<global-img>"


@dataclass(frozen=True, slots=True)
class TilingSettings:
    """How a picture becomes tiles. Lengths in pixels; `longest_edge` None leaves the picture's own size."""

    tile: int
    longest_edge: int | None
    split: bool
    resample: Resample
    normalisation: Normalisation

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> TilingSettings:
        """From the processor's settings; the defaults are those of transformers' `Idefics3ImageProcessor`."""
        tile = processor_settings.edge(settings, "max_image_size", 364)
        return cls(
            tile=tile,
            longest_edge=processor_settings.edge(settings, "size", 4 * 364)
            if settings.get("do_resize", True)
            else None,
            split=bool(settings.get("do_image_splitting", True)),
            resample=processor_settings.resample(settings, "lanczos"),
            normalisation=Normalisation.of(settings),
        )

    @classmethod
    def read(cls, path: Path) -> TilingSettings:
        return cls.of(processor_settings.image_settings(path))

    def limited(self, options: MediaOptions, height: int, width: int) -> TilingSettings:
        """For a picture of this size, with the caller's upper bounds in place of a larger `longest_edge`.

        Without that, a picture scaled down to the caller's bounds would be blown up again to as many tiles as before.
        """
        bounds = [] if options.max_image_size is None else [options.max_image_size]
        if options.max_pixels is not None:
            bounds.append(max(1, math.isqrt(options.max_pixels * max(height, width) // min(height, width))))
        if self.longest_edge is None or not bounds:
            return self
        return replace(self, longest_edge=min(self.longest_edge, *bounds))


@dataclass(frozen=True, slots=True)
class Tiles:
    """`pixels` uint8 (rows * columns + 1, tile, tile, 3): row by row, the whole picture last.

    A picture that isn't split has one tile, the whole, and 0 rows and columns.
    """

    pixels: Pixels
    rows: int
    columns: int


def longest_edge_size(height: int, width: int, longest_edge: int) -> tuple[int, int]:
    """(height, width) with the longer side at `longest_edge` (small pictures grow), the shorter one rounded up to even.

    Both stay between 1 and `MAX_EDGE`. The shorter side is computed by way of the aspect ratio, in floats, because
    that is how the published processors round.
    """
    ratio = width / height
    if width >= height:
        width, height = longest_edge, int(longest_edge / ratio)
        height += height % 2
    else:
        height, width = longest_edge, int(longest_edge * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    if max(height, width) > MAX_EDGE:
        ratio = width / height
        if width >= height:
            width, height = MAX_EDGE, int(MAX_EDGE / ratio)
        else:
            height, width = MAX_EDGE, int(MAX_EDGE * ratio)
    return max(height, 1), max(width, 1)


def tiled_size(height: int, width: int, tile: int) -> tuple[int, int]:
    """(height, width) rounded up to whole tiles, the longer side first and the shorter one after the aspect ratio."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return max(height, tile), max(width, tile)


def tile_image(rgb: Pixels, settings: TilingSettings, resize: Resize) -> Tiles:
    """Cut an RGB picture, uint8 (height, width, 3), into the model's tiles.

    Each scaling step rounds to uint8, and the whole-picture tile is made from the picture the tiles were cut from.
    """
    if settings.longest_edge is not None:
        rgb = resize(rgb, longest_edge_size(rgb.shape[0], rgb.shape[1], settings.longest_edge), settings.resample)
    tile = settings.tile
    if not settings.split:
        return Tiles(resize(rgb, (tile, tile), settings.resample)[None], 0, 0)
    rgb = resize(rgb, tiled_size(rgb.shape[0], rgb.shape[1], tile), settings.resample)
    rows, columns = rgb.shape[0] // tile, rgb.shape[1] // tile
    if rows == columns == 1:
        return Tiles(rgb[None], 0, 0)
    cut = rgb.reshape(rows, tile, columns, tile, 3).transpose(0, 2, 1, 3, 4).reshape(rows * columns, tile, tile, 3)
    whole = resize(rgb, (tile, tile), settings.resample)
    return Tiles(np.concatenate([cut, whole[None]]), rows, columns)


def image_text(rows: int, columns: int, num_tokens: int) -> str:
    """What `<image>` becomes: every tile with its place, line by line, then the whole picture between two marks."""
    run = IMAGE * num_tokens
    whole = f"{FAKE}{GLOBAL}{run}{FAKE}"
    if rows == 0 and columns == 0:
        return whole
    lines = (
        "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{run}" for column in range(columns)) + "\n"
        for row in range(rows)
    )
    return "".join(lines) + "\n" + whole
