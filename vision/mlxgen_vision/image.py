"""One picture, from wherever it comes, as upright 8-bit RGB; and the resize whose rounding models were trained with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from PIL import Image

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import InvalidValueError, MediaError
from mlxgen.request import MediaOptions
from mlxgen_vision import animation
from mlxgen_vision.decode import damaged, decode, open_picture, orientation_of
from mlxgen_vision.limits import DEFAULT_LIMITS, MediaLimits, check_size
from mlxgen_vision.pixels import Rgb, orient, rgb_from_array, rgb_from_image
from mlxgen_vision.source import OpenedSource, open_source

Resample = Literal["bicubic", "bilinear", "lanczos", "nearest"]

_FILTERS: Final = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
}


_HEADER_TELLS: Final = ("PNG", "JPEG", "WebP", "BMP", "PPM")
_PNG_TEXTS: Final = (b"eXIf", b"iTXt", b"zTXt", b"Raw profile")  # chunks that may hold an orientation


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """A decoded picture: `rgb` is uint8 (height, width, 3), upright, opaque, within the options' bounds.

    `original_size` is (height, width) after orientation and before those bounds. `note` says what was left out or
    assumed (the other frames of an animation, the range of floating-point pixels), otherwise None.
    """

    rgb: Rgb
    source_hash: str
    name: str
    original_size: tuple[int, int]
    note: str | None = None


def load_image(
    source: Any, options: MediaOptions, *, limits: MediaLimits = DEFAULT_LIMITS, cancel: CancelToken = NEVER
) -> LoadedImage:
    """Open, check, decode and orient one picture, composite it on white, and scale it into the options' bounds.

    EXIF orientation is applied for every source that has it (arrays have none). Of an animation or a file of several
    pages the first is taken, of a PIL image the frame it stands at, and `note` says so. Checkpoints come before
    opening, decoding, each strip of the conversion and the scaling. Raises `MediaError` for whatever can't be used.
    """
    check_options(options)
    opened = open_source(source, kind="image", allow_urls=options.allow_urls, limits=limits, cancel=cancel)
    return load_opened(opened, options, limits=limits, cancel=cancel)


def load_opened(
    opened: OpenedSource, options: MediaOptions, *, limits: MediaLimits = DEFAULT_LIMITS, cancel: CancelToken = NEVER
) -> LoadedImage:
    """`load_image` for a source that is already open."""
    cancel.checkpoint()
    name, data = opened.name, opened.data
    notes: list[str | None] = []
    if isinstance(data, np.ndarray):
        if data.ndim >= 2:
            check_size(data.shape[1], data.shape[0], name, limits)
        rgb = rgb_from_array(data, name, cancel=cancel)
    elif isinstance(data, Image.Image):
        check_size(data.width, data.height, name, limits)
        notes.append(_frame_of_image(data, name))
        rgb = upright(data, name, notes, cancel)
    elif isinstance(data, bytes):
        image, kind = open_picture(data, name, limits)
        notes.append(_first_of_several(data, image, kind))
        cancel.checkpoint()
        decode(image, name, kind, limits)
        rgb = upright(image, name, notes, cancel)
        image.close()
    else:
        raise MediaError(f"{name}: not one picture; give it as a video")
    height, width = rgb.shape[:2]
    target = bounded_size((height, width), options)
    if target != (height, width):
        cancel.checkpoint()
        rgb = resize(rgb, target, "bicubic")
    note = "; ".join(n for n in notes if n) or None
    return LoadedImage(rgb, opened.source_hash, name, (height, width), note)


def announced_size(opened: OpenedSource, *, limits: MediaLimits = DEFAULT_LIMITS) -> tuple[int, int] | None:
    """(height, width) that `load_opened` will give without bounds, from what is known without decoding, or None.

    None where only decoding tells: a GIF's first frame may enlarge it, a PNG's orientation may stand behind its pixels.
    """
    data = opened.data
    if isinstance(data, np.ndarray):
        return (data.shape[0], data.shape[1]) if data.ndim >= 2 else None
    if isinstance(data, bytes):
        image, kind = open_picture(data, opened.name, limits)
        told = kind in _HEADER_TELLS and not (kind == "PNG" and any(mark in data for mark in _PNG_TEXTS))
        orientation = orientation_of(image)[0] if told and kind != "PNG" else 1
        width, height = image.size
        image.close()
        if told:
            return (width, height) if orientation >= 5 else (height, width)
    return None


def check_options(options: MediaOptions) -> None:
    """Raise `InvalidValueError` for options that no picture or video can meet."""
    for name in ("min_pixels", "max_pixels", "max_image_size", "max_frames"):
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InvalidValueError(f"{name} is {value!r}; it must be a whole number of at least 1, or None")
    if options.fps is not None and not (math.isfinite(options.fps) and options.fps > 0):
        raise InvalidValueError(f"fps is {options.fps!r}; it must be more than 0 frames a second, or None")
    low, high = options.min_pixels, options.max_pixels
    if low is not None and high is not None and low > high:
        raise InvalidValueError(f"min_pixels is {low:,}, more than max_pixels {high:,}; exchange or drop one")


def bounded_size(size: tuple[int, int], options: MediaOptions) -> tuple[int, int]:
    """The (height, width) a picture of `size` is scaled to before the model's own rule; the same if it fits already.

    The aspect ratio stays up to rounding down, no side falls below 1. `max_image_size` and `max_pixels` are kept
    exactly; `min_pixels` enlarges as far as those two allow, rounding up.
    """
    height, width = size
    scale = 1.0
    if options.min_pixels is not None and height * width < options.min_pixels:
        scale = math.sqrt(options.min_pixels / (height * width))
    if options.max_pixels is not None:
        scale = min(scale, math.sqrt(options.max_pixels / (height * width)))
    if options.max_image_size is not None:
        scale = min(scale, options.max_image_size / max(height, width))
    if scale == 1.0:
        return size
    toward = math.ceil if scale > 1.0 else math.floor
    new = [max(1, toward(side * scale + (-1e-9 if scale > 1.0 else 1e-9))) for side in size]
    longer = 0 if height >= width else 1
    if options.max_image_size is not None:
        new = [min(side, options.max_image_size) for side in new]
    if options.max_pixels is not None and new[0] * new[1] > options.max_pixels:
        new[longer] = max(1, options.max_pixels // new[1 - longer])
    return new[0], new[1]


def resize(rgb: Rgb, size: tuple[int, int], resample: Resample) -> Rgb:
    """Scale uint8 (h, w, 3) to `size` = (height, width), horizontally first, then vertically, each rounded to uint8.

    This is what Pillow up to 12.3 and torchvision (antialias, uint8) do, and so what models were trained with. Pillow
    13 takes the vertical pass first where the height shrinks more, which moves values by up to 10 steps; hence two
    resizes of one axis each.
    """
    height, width = size
    if height < 1 or width < 1:
        raise InvalidValueError(f"can't resize to {height}x{width} (height x width); both must be at least 1")
    if resample not in _FILTERS:
        raise InvalidValueError(f"resample is {resample!r}; it must be one of {', '.join(_FILTERS)}")
    if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
        raise InvalidValueError(f"resize takes uint8 (height, width, 3), not {rgb.dtype} {rgb.shape}")
    image = Image.fromarray(np.ascontiguousarray(rgb))
    if width != image.width:
        image = image.resize((width, image.height), _FILTERS[resample])
    if height != image.height:
        image = image.resize((width, height), _FILTERS[resample])
    return np.array(image)


def upright(image: Image.Image, name: str, notes: list[str | None], cancel: CancelToken = NEVER) -> Rgb:
    """The current frame of a loaded PIL image as oriented uint8 (height, width, 3); `notes` gets what was assumed."""
    orientation, problem = orientation_of(image)
    cancel.checkpoint()
    rgb, assumption = rgb_from_image(image, name, cancel=cancel)
    notes += [problem, assumption]
    return orient(rgb, orientation)


def _first_of_several(data: bytes, image: Image.Image, kind: str) -> str | None:
    if kind == "TIFF":
        return "the first of several pages (give the file as a video for all)" if _has_pages(image) else None
    count = animation.num_frames(data, kind)
    if count > 1:
        return f"the first of an animation's {count} frames (give it as a video for all)"
    return None


def _frame_of_image(image: Image.Image, name: str) -> str | None:
    try:
        frames, at = getattr(image, "n_frames", 1), image.tell()
    except Exception as error:
        raise damaged(name, image.format or "picture", error) from error
    return f"frame {at} of {frames}; the others are left out (give it as a video for all)" if frames > 1 else None


def _has_pages(image: Image.Image) -> bool:
    return bool(getattr(image, "is_animated", False))
