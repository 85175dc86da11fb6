"""Gemma 3's picture rule: one fixed square, and, where the settings turn it on, crops of long pictures beside it.

After transformers' `image_processing_gemma3.py` and `processing_gemma3.py`. Pan and scan is off as published.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxgen.errors import UnsupportedError
from mlxgen_vision.image import Resample
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.settings import Normalisation

Pixels = np.ndarray[Any, Any]
Resize = Callable[[Pixels, tuple[int, int], Resample], Pixels]


@dataclass(frozen=True, slots=True)
class PanAndScan:
    """When a picture is cut into crops: from `min_ratio` on, at most `max_crops` of at least `min_crop` pixels."""

    min_crop: int = 256
    max_crops: int = 4
    min_ratio: float = 1.2


@dataclass(frozen=True, slots=True)
class SquareSettings:
    """`height` and `width` in pixels, the same for every picture; `pan_and_scan` None means no crops."""

    height: int
    width: int
    resample: Resample
    normalisation: Normalisation
    pan_and_scan: PanAndScan | None

    @classmethod
    def read(cls, path: Path) -> SquareSettings:
        """From any layout; the defaults are those of transformers' `Gemma3ImageProcessor`."""
        settings = processor_settings.image_settings(path)
        size = settings.get("size") or {"height": 224, "width": 224}
        if not settings.get("do_resize", True) or "height" not in size or "width" not in size:
            raise UnsupportedError(
                f"the image processor has size {size} and do_resize {settings.get('do_resize', True)}; Gemma 3 takes "
                "pictures of one height and width: use the settings published with the model"
            )
        usual = PanAndScan()
        crops = PanAndScan(
            min_crop=int(settings.get("pan_and_scan_min_crop_size") or usual.min_crop),
            max_crops=int(settings.get("pan_and_scan_max_num_crops") or usual.max_crops),
            min_ratio=float(settings.get("pan_and_scan_min_ratio_to_activate") or usual.min_ratio),
        )
        return cls(
            height=int(size["height"]),
            width=int(size["width"]),
            resample=processor_settings.resample(settings, "bilinear"),
            normalisation=Normalisation.of(settings),
            pan_and_scan=crops if settings.get("do_pan_and_scan") else None,
        )


def crop_boxes(height: int, width: int, rule: PanAndScan) -> list[tuple[int, int, int, int]]:
    """(top, left, bottom, right) of every crop, half-open, along the longer side; [] for a picture nearly square."""
    longer, shorter = max(height, width), min(height, width)
    if longer / shorter < rule.min_ratio:
        return []
    count = min(math.floor(longer / shorter + 0.5), longer // rule.min_crop)
    count = min(rule.max_crops, max(2, count))
    step = math.ceil(longer / count)
    if min(step, shorter) < rule.min_crop:
        return []
    starts = [step * index for index in range(count)]
    if width >= height:
        return [(0, start, height, min(start + step, width)) for start in starts]
    return [(start, 0, min(start + step, height), width) for start in starts]


def square_images(rgb: Pixels, settings: SquareSettings, resize: Resize) -> Pixels:
    """The picture and then its crops, if any, as uint8 (1 + crops, height, width, 3)."""
    views = [rgb]
    if settings.pan_and_scan is not None:
        boxes = crop_boxes(rgb.shape[0], rgb.shape[1], settings.pan_and_scan)
        views += [rgb[top:bottom, left:right] for top, left, bottom, right in boxes]
    size = (settings.height, settings.width)
    return np.stack([resize(np.ascontiguousarray(view), size, settings.resample) for view in views])


@dataclass(frozen=True, slots=True)
class ImageWords:
    """The token strings around and inside a picture's block."""

    begin: str = "<start_of_image>"
    soft: str = "<image_soft_token>"
    end: str = "<end_of_image>"

    def block(self, num_tokens: int) -> str:
        return f"\n\n{self.begin}{self.soft * num_tokens}{self.end}\n\n"

    def text(self, num_crops: int, num_tokens: int) -> str:
        """What `begin` alone, the template's placeholder, becomes."""
        block = self.block(num_tokens)
        if num_crops == 0:
            return block
        crops = " ".join([block] * num_crops)
        return f"Here is the original image {block} and here are some crops to help you see better {crops}"
