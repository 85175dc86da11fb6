"""What the model really saw, after orientation, resizing and tiling: a contact sheet of prepared frames."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageDraw

from mlxgen.cli.console import printable
from mlxgen.cli.overview import Overview
from mlxgen.errors import MediaError
from mlxgen.snapshot.store import FileEntry, HostArray

_CELL: Final = 192
_CAPTION: Final = 14
_GAP: Final = 8
_MAX_COLUMNS: Final = 8
_MAX_CELLS: Final = 1024


def draw_preview(overview: Overview, target: Path) -> int:
    """Write the sheet (the format by the name's ending) and say how many pictures, frames and tiles are on it.

    One file of the snapshot is in memory at a time. Raises `MediaError` when nothing was prepared yet, there is more
    than fits on a sheet (1024) or it can't be written; `SnapshotError` for damaged files.
    """
    cells: list[tuple[str, Image.Image]] = []
    for medium, index, array in _frames(overview):
        kind = overview.media[medium].kind
        name = f"{medium + 1} {kind}" + (f" frame {index}" if kind == "video" else "")
        pictures = _pictures(array)
        for tile, pixels in enumerate(pictures):
            caption = name + (f" tile {tile}" if len(pictures) > 1 else "")
            if len(cells) == _MAX_CELLS:
                raise MediaError(
                    f"{overview.path} has more than {_MAX_CELLS} pictures and frames: too many for a sheet"
                )
            # An x: the font that comes with Pillow has no ×.
            cells.append((f"{caption} {pixels.shape[1]} x {pixels.shape[0]}", _thumbnail(pixels)))
    if not cells:
        raise MediaError(f"{overview.path} has no prepared pictures or frames to draw")
    try:
        _sheet(cells).save(target)
    except (OSError, ValueError) as error:
        raise MediaError(f"can't write the preview {target}: {error}; use a name like out.png") from error
    return len(cells)


def prepared_sizes(overview: Overview) -> dict[int, list[tuple[int, ...]]]:
    """Per medium, the shapes of its prepared frames: (height, width, 3), or (tiles, height, width, 3)."""
    shapes: dict[int, list[tuple[int, ...]]] = {}
    for medium, _, array in _frames(overview):
        shapes.setdefault(medium, []).append(tuple(array.shape))
    return shapes


def _frames(overview: Overview) -> Iterator[tuple[int, int, HostArray]]:
    """(medium, frame, pixels) of everything that is prepared and in a file, in order."""
    for entry in sorted((entry for entry in overview.files if entry.kind == "prep"), key=_order):
        arrays = overview.view.read(entry)
        for index in range(*entry.meta["frames"]):
            array = arrays.get(f"frame/{index}")
            if array is not None and array.dtype == "U8":
                yield int(entry.meta["medium"]), index, array


def _order(entry: FileEntry) -> tuple[int, int]:
    return int(entry.meta["medium"]), int(entry.meta["frames"][0])


def _pictures(array: HostArray) -> list[np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]]:
    """The RGB pictures in one prepared unit: one, or one per tile; none if the family keeps something else."""
    shape = tuple(array.shape)
    if len(shape) < 3 or shape[-1] != 3:
        return []
    pixels = np.frombuffer(array.data, np.uint8).reshape((-1, *shape[-3:]))
    return list(pixels)


def _thumbnail(pixels: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]) -> Image.Image:
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    picture.thumbnail((_CELL, _CELL))
    return picture


def _sheet(cells: list[tuple[str, Image.Image]]) -> Image.Image:
    columns = min(_MAX_COLUMNS, math.ceil(math.sqrt(len(cells))))
    rows = math.ceil(len(cells) / columns)
    across, down = _CELL + _GAP, _CELL + _CAPTION + _GAP
    sheet = Image.new("RGB", (columns * across + _GAP, rows * down + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for position, (caption, picture) in enumerate(cells):
        left, top = _GAP + position % columns * across, _GAP + position // columns * down
        sheet.paste(picture, (left + (_CELL - picture.width) // 2, top + (_CELL - picture.height) // 2))
        draw.text((left, top + _CELL + 1), printable(caption, 34), fill="black")
    return sheet
