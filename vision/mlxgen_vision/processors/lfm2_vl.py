"""LFM2-VL's picture rule: the picture whole if it is small enough, otherwise tiles, and the whole picture beside them.

After transformers' `image_processing_lfm2_vl.py` and `processing_lfm2_vl.py`. Heights and widths are multiples of a
token's side, so no picture is ever padded. A tile's label names its row first, then its column; transformers 4.57 had
them exchanged, which its authors fixed as "incorrect positional special tokens" (huggingface/transformers pull request
41755).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxgen.errors import UnsupportedError
from mlxgen.request import MediaOptions
from mlxgen_vision.checkpoint import read_json
from mlxgen_vision.image import Resample, bounded_size
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.settings import Normalisation
from mlxgen_vision.processors.tile_grid import TileLimits, closest_grid, cut

_log = logging.getLogger(__name__)

Pixels = np.ndarray[Any, Any]
Size = tuple[int, int]
Resize = Callable[[Pixels, Size, Resample], Pixels]

# mlx-vlm's own processor: the section it writes has that converter's tile limits, not those of the model.
_CONVERTERS_TYPE: Final = "Lfm2VlNumpyImageProcessor"


@dataclass(frozen=True, slots=True)
class Views:
    """How a picture is shown: `grid` (rows, columns) of tiles, (0, 0) if it isn't cut, and the size of the whole.

    `whole` is the (height, width) of the whole picture in pixels, None where tiles stand alone.
    """

    grid: Size
    whole: Size | None


@dataclass(frozen=True, slots=True)
class ViewSettings:
    """`patch` pixels to a patch, `factor` × `factor` patches to a token; `tile` in pixels; `limits` None never cuts."""

    patch: int
    factor: int
    min_tokens: int
    max_tokens: int
    tile: int
    tolerance: float
    limits: TileLimits | None
    thumbnail: bool
    resample: Resample
    normalisation: Normalisation

    @classmethod
    def read(cls, path: Path) -> ViewSettings:
        """From any layout; the defaults are those of transformers' `Lfm2VlImageProcessor`.

        Raises `UnsupportedError` for tiles that aren't whole tokens, or limits no grid has.
        """
        settings = processor_settings.image_settings(path)
        if settings.get("image_processor_type") == _CONVERTERS_TYPE:
            settings |= read_json(path / "preprocessor_config.json")
        made = cls._of(settings)
        if made.tile % made.side:
            raise UnsupportedError(
                f"the processor's tile_size {made.tile} isn't a multiple of a token's {made.side} pixels; use the "
                "settings published with the model"
            )
        if made.limits is None:
            _log.warning(
                "the processor of %s has do_image_splitting off: pictures are shown in at most %d tokens, large ones "
                "without the detail the models were trained with",
                path,
                made.max_tokens,
            )
        else:
            made.limits.grids()
        return made

    @classmethod
    def _of(cls, settings: Mapping[str, Any]) -> ViewSettings:
        fewest, most = int(settings.get("min_tiles", 2)), int(settings.get("max_tiles", 10))
        split = settings.get("do_image_splitting", True) and not fewest == most == 1
        return cls(
            patch=int(settings.get("encoder_patch_size", 16)),
            factor=int(settings.get("downsample_factor", 2)),
            min_tokens=int(settings.get("min_image_tokens", 64)),
            max_tokens=int(settings.get("max_image_tokens", 256)),
            tile=int(settings.get("tile_size", 512)),
            tolerance=float(settings.get("max_pixels_tolerance", 2.0)),
            limits=TileLimits(fewest, most) if split else None,
            thumbnail=bool(settings.get("use_thumbnail", True)),
            resample=processor_settings.resample(settings, "bilinear"),
            normalisation=Normalisation.of(settings),
        )

    @property
    def side(self) -> int:
        """A token's height and width in pixels."""
        return self.patch * self.factor

    @property
    def tile_tokens(self) -> int:
        return (self.tile // self.side) ** 2

    def tokens(self, size: Size) -> int:
        """How many tokens a view of this size takes."""
        return (size[0] // self.side) * (size[1] // self.side)

    def views(self, original: Size, options: MediaOptions) -> Views:
        """How a picture of this (height, width) is shown, within the caller's bounds."""
        height, width = bounded_size(original, options)
        whole = self._whole(height, width)
        if self.limits is None or not self._is_large(height, width):
            return Views((0, 0), whole)
        grid = closest_grid((height, width), (self.tile, self.tile), self.limits)
        if grid == (1, 1):
            return Views((0, 0), whole)
        return Views(grid, whole if self.thumbnail else None)

    def _is_large(self, height: int, width: int) -> bool:
        rounded = [max(self.patch, _round(length, self.side)) for length in (height, width)]
        return rounded[0] * rounded[1] > self.max_tokens * self.side**2 * self.tolerance

    def _whole(self, height: int, width: int) -> Size:
        """Rounded to whole tokens, and scaled until there are neither too few nor too many."""
        side = self.side
        rows, columns = (max(side, _round(length, side)) for length in (height, width))
        fewest, most = self.min_tokens * side**2, self.max_tokens * side**2
        if rows * columns > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (max(side, math.floor(length / shrink / side) * side) for length in (height, width))
        elif rows * columns < fewest:
            grow = math.sqrt(fewest / (height * width))
            rows, columns = (math.ceil(length * grow / side) * side for length in (height, width))
        return rows, columns

    def canvas(self, rgb: Pixels, views: Views, resize: Resize) -> Pixels:
        """All views of a picture in one, uint8 (height, width, 3): the tiles where they belong, the whole below them.

        Either alone is the canvas itself. Each view is scaled from the picture as it came.
        """
        parts: list[Pixels] = []
        if views.grid != (0, 0):
            parts.append(resize(rgb, (views.grid[0] * self.tile, views.grid[1] * self.tile), self.resample))
        if views.whole is not None:
            parts.append(resize(rgb, views.whole, self.resample))
        width = max(part.shape[1] for part in parts)
        return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]), (0, 0))) for part in parts])

    def groups(self, canvas: Pixels, views: Views) -> list[Pixels]:
        """The views out of a canvas, uint8 (views, height, width, 3) for each size: the tiles, then the whole."""
        height, width = views.grid[0] * self.tile, views.grid[1] * self.tile
        groups = [cut(canvas[:height, :width], *views.grid)] if height else []
        if views.whole is not None:
            groups.append(canvas[None, height : height + views.whole[0], : views.whole[1]])
        return groups


def _round(length: float, side: int) -> int:
    return round(length / side) * side


@dataclass(frozen=True, slots=True)
class ViewWords:
    """The token strings around and inside a picture; `labels` off leaves the image token alone."""

    image: str
    start: str
    end: str
    thumbnail: str
    labels: bool

    @classmethod
    def read(cls, path: Path) -> ViewWords:
        """As tokenizer and processor name them."""
        return cls(
            image=processor_settings.special_word(path, "image_token", "<image>"),
            start=processor_settings.special_word(path, "image_start_token", "<|image_start|>"),
            end=processor_settings.special_word(path, "image_end_token", "<|image_end|>"),
            thumbnail=processor_settings.special_word(path, "image_thumbnail", "<|img_thumbnail|>"),
            labels=bool(read_json(path / "processor_config.json").get("use_image_special_tokens", True)),
        )

    def text(self, views: Views, runs: list[int]) -> str:
        """What `image`, the template's placeholder, becomes; `runs` are the tokens of each view."""
        rows, columns = views.grid
        names = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)]
        if names and views.whole is not None:
            names.append(self.thumbnail)
        shown = [self.image * run for run in runs]
        if not self.labels:
            return "".join(shown)
        named = zip(names or [""], shown, strict=True)
        return self.start + "".join(name + view for name, view in named) + self.end
