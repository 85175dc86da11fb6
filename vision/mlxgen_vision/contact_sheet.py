"""Small copies of pictures in a grid with captions, to see at a glance what a model was shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from mlxgen.errors import InvalidValueError
from mlxgen_vision.image import resize
from mlxgen_vision.pixels import Rgb

_GAP: Final = 8
_CAPTION_HEIGHT: Final = 16
_MAX_COLUMNS: Final = 8


def contact_sheet(images: Sequence[Rgb], captions: Sequence[str], *, cell: int = 160) -> Image.Image:
    """An RGB picture with every uint8 (h, w, 3) image scaled into a square of `cell` pixels, its caption below.

    Images keep their order (row by row) and aspect ratio and are never enlarged; a caption too long for its cell ends
    in an ellipsis. Raises `InvalidValueError` for no images, a different number of captions, or a cell under 16 pixels.
    """
    if not images or len(images) != len(captions):
        raise InvalidValueError(
            f"{len(images)} images and {len(captions)} captions; give at least one, and as many of each"
        )
    if cell < 16:
        raise InvalidValueError(f"cell is {cell}; it must be at least 16 pixels")
    columns = min(_MAX_COLUMNS, math.ceil(math.sqrt(len(images))))
    rows = math.ceil(len(images) / columns)
    across, down = cell + _GAP, cell + _CAPTION_HEIGHT + _GAP
    sheet = Image.new("RGB", (columns * across + _GAP, rows * down + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()
    for n, (rgb, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = _GAP + n % columns * across, _GAP + n // columns * down
        height, width = rgb.shape[:2]
        scale = min(1.0, cell / max(height, width))
        small = resize(rgb, (max(1, round(height * scale)), max(1, round(width * scale))), "bicubic")
        sheet.paste(Image.fromarray(small), (left + (cell - small.shape[1]) // 2, top + (cell - small.shape[0]) // 2))
        draw.text((left, top + cell + 2), _fitted(draw, caption, cell, font), fill="black", font=font)
    return sheet


def _fitted(
    draw: ImageDraw.ImageDraw, caption: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont
) -> str:
    line = " ".join(caption.split())
    if draw.textlength(line, font=font) <= width:
        return line
    while line and draw.textlength(line + "...", font=font) > width:
        line = line[:-1]
    return line + "..."
