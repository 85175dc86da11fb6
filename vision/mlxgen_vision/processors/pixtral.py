"""Pixtral's and Mistral 3's picture rule: any shape, scaled down to the longest edge, then stretched to whole tokens.

After transformers' `image_processing_pixtral.py` and `processing_pixtral.py`. Mistral's own `mistral-common` agrees but
for two details: it rounds the scaled sides where transformers rounds them down, and it scales with OpenCV's cubic
filter, which doesn't smooth. Which of both the models saw in training isn't published; here it is as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxgen.errors import MediaError, UnsupportedError
from mlxgen.request import MediaOptions
from mlxgen_vision.checkpoint import read_json
from mlxgen_vision.image import Resample, bounded_size
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.settings import Normalisation

Pixels = np.ndarray[Any, Any]

_LONGEST_EDGE: Final = 1024
_CLIP: Final = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}


@dataclass(frozen=True, slots=True)
class GridSettings:
    """`token` is the side, in pixels, of what becomes one token; a picture's sides are at most `height` and `width`."""

    token: int
    height: int
    width: int
    resample: Resample
    normalisation: Normalisation

    @classmethod
    def read(cls, path: Path, *, patch: int, merge: int) -> GridSettings:
        """From any layout; `patch` and `merge` are the model's.

        Raises `UnsupportedError` if the processor's settings are made for others, or leave pictures as they are.
        """
        promised = read_json(path / "processor_config.json")
        for name, value in (("patch_size", patch), ("spatial_merge_size", merge)):
            if promised.get(name, value) != value:
                raise UnsupportedError(
                    f"processor_config.json has {name} {promised[name]!r}, the model {value}; "
                    "use the processor settings published with the model"
                )
        settings = _CLIP | processor_settings.image_settings(path)
        if not settings.get("do_resize", True):
            raise UnsupportedError(
                "the image processor has do_resize false, but pictures must be resized to whole patches; "
                "use the processor settings published with the model"
            )
        size = settings.get("size")
        if isinstance(size, Mapping) and "longest_edge" not in size and "height" in size and "width" in size:
            height, width = int(size["height"]), int(size["width"])
        else:
            height = width = processor_settings.edge(settings, "size", _LONGEST_EDGE)
        return cls(
            token=patch * merge,
            height=height,
            width=width,
            resample=processor_settings.resample(settings, "bicubic"),
            normalisation=Normalisation.of(settings),
        )

    def grid(self, height: int, width: int, options: MediaOptions) -> tuple[int, int]:
        """Rows and columns of tokens for a picture of this size, within the caller's bounds.

        Raises `MediaError` for a picture so long that its shorter side would vanish.
        """
        bounded_height, bounded_width = bounded_size((height, width), options)
        ratio = max(bounded_height / self.height, bounded_width / self.width)
        sides = [bounded_height, bounded_width]
        if ratio > 1:
            sides = [math.floor(side / ratio) for side in sides]
        if min(sides) < 1:
            raise MediaError(
                f"a picture of {width} × {height} pixels has nothing left of its shorter side when scaled down to "
                f"{self.width} × {self.height}; crop it"
            )
        rows, columns = (math.ceil(side / self.token) for side in sides)
        return rows, columns


@dataclass(frozen=True, slots=True)
class GridWords:
    """The token strings of a picture: one for each token, one after each row, one after the last."""

    image: str = "[IMG]"
    row_end: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"

    @classmethod
    def read(cls, path: Path) -> GridWords:
        """As `processor_config.json` names them."""
        settings, usual = read_json(path / "processor_config.json"), cls()
        return cls(
            image=str(settings.get("image_token") or usual.image),
            row_end=str(settings.get("image_break_token") or usual.row_end),
            end=str(settings.get("image_end_token") or usual.end),
        )

    def text(self, rows: int, columns: int) -> str:
        """What `image` alone, the template's placeholder, becomes."""
        return self.row_end.join([self.image * columns] * rows) + self.end
