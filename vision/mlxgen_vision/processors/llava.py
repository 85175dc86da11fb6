"""LLaVA 1.5's picture rule: the shorter edge scaled to the tower's side and the middle cut out; or padded to a square.

After transformers' `image_processing_llava.py` (and CLIP's before it). Sizes are rounded as there: the longer edge
down, the cut's place down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxgen.errors import MediaError, UnsupportedError
from mlxgen_vision.image import Resample
from mlxgen_vision.limits import DEFAULT_LIMITS
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.settings import Normalisation

Pixels = np.ndarray[Any, Any]
Resize = Callable[[Pixels, tuple[int, int], Resample], Pixels]

IMAGE: Final = "<image>"

# OpenAI CLIP's statistics, which these processors assume where their settings are silent.
_CLIP: Final = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def clip_normalisation(settings: Mapping[str, Any]) -> Normalisation:
    given = {key: value for key, value in settings.items() if value is not None}
    return Normalisation.of({**_CLIP, **given})


@dataclass(frozen=True, slots=True)
class SquareSettings:
    """How a picture becomes `side` x `side` pixels.

    `pad`: bars in the mean colour make it a square first. `keep_ratio`: the shorter edge is scaled to `side` and the
    middle cut out; otherwise the picture is stretched.
    """

    side: int
    pad: bool
    keep_ratio: bool
    resample: Resample
    normalisation: Normalisation

    @classmethod
    def read(cls, path: Path, side: int) -> SquareSettings:
        """From any layout; `side` is the tower's. Raises `UnsupportedError` for settings that make other sizes."""
        settings = processor_settings.image_settings(path)
        size = settings.get("size") or {"shortest_edge": side}
        keep_ratio = not isinstance(size, Mapping) or "shortest_edge" in size
        crop = settings.get("do_center_crop", keep_ratio)
        lengths = edges(size) + (edges(settings.get("crop_size") or size) if crop else ())
        if not settings.get("do_resize", True) or (keep_ratio and not crop) or set(lengths) != {side}:
            raise UnsupportedError(
                f"the image processor has size {size}, crop_size {settings.get('crop_size')}, do_resize "
                f"{settings.get('do_resize', True)} and do_center_crop {crop}; the tower takes {side}x{side} pixels: "
                "use the settings published with the model"
            )
        return cls(
            side=side,
            pad=bool(settings.get("do_pad", False)),
            keep_ratio=keep_ratio,
            resample=processor_settings.resample(settings, "bicubic"),
            normalisation=clip_normalisation(settings),
        )


def edges(size: Any) -> tuple[int, ...]:
    """All lengths in a size as processors' settings have it: a number, {"shortest_edge"} or {"height", "width"}."""
    values = list(size.values()) if isinstance(size, Mapping) else [size]
    if not values or not all(isinstance(value, int) and value > 0 for value in values):
        raise UnsupportedError(f"the image processor has the size {size!r}; lengths of 1 pixel or more are needed")
    return tuple(values)


def square_image(rgb: Pixels, settings: SquareSettings, resize: Resize) -> Pixels:
    """The picture as the tower sees it, uint8 (side, side, 3)."""
    side = settings.side
    if settings.pad:
        rgb = pad_to_square(rgb, mean_colour(settings.normalisation.mean))
    if not settings.keep_ratio:
        return resize(rgb, (side, side), settings.resample)
    height, width = rgb.shape[:2]
    longer = side * max(height, width) // min(height, width)
    _check_size(side, longer, "scaling its shorter edge")
    rgb = resize(rgb, (longer, side) if width <= height else (side, longer), settings.resample)
    top, left = (rgb.shape[0] - side) // 2, (rgb.shape[1] - side) // 2
    return np.ascontiguousarray(rgb[top : top + side, left : left + side])


def mean_colour(mean: Sequence[float]) -> tuple[int, int, int]:
    """The colour of the bars around a picture: the mean of what the tower was trained on, rounded down."""
    red, green, blue = (int(value * 255) for value in mean)
    return red, green, blue


def pad_to_square(rgb: Pixels, colour: Sequence[int]) -> Pixels:
    """The picture in the middle of a square of `colour`, as large as its longer edge; an odd bar is wider behind it."""
    height, width = rgb.shape[:2]
    if height == width:
        return rgb
    side = max(height, width)
    _check_size(side, side, "padding it to a square")
    return pad_to(rgb, (side, side), colour)


def pad_to(rgb: Pixels, size: tuple[int, int], colour: Sequence[int]) -> Pixels:
    """The picture in the middle of `size` = (height, width) of `colour`, half pixels towards the top left."""
    padded = np.empty((*size, 3), np.uint8)
    padded[:] = np.asarray(colour, np.uint8)
    top, left = (size[0] - rgb.shape[0]) // 2, (size[1] - rgb.shape[1]) // 2
    padded[top : top + rgb.shape[0], left : left + rgb.shape[1]] = rgb
    return padded


def _check_size(height: int, width: int, what: str) -> None:
    limit = DEFAULT_LIMITS.max_source_pixels
    if height * width > limit:
        raise MediaError(
            f"{what} would take {height * width:,} pixels, more than {limit:,}: the picture is too long for its width; "
            "cut it, or bound its longer side with max_image_size"
        )
