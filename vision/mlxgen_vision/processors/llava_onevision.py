"""LLaVA-OneVision's rules: a picture alone, a picture among others, and which frames of a video.

After transformers' `image_processing_llava_onevision.py` and LLaVA-NeXT's training code (`train.py`): a sample's only
picture is tiled (`anyres_max_9`), each of several is padded to a square. Frames: one a second, or 32 evenly spread ones
where that would be more (`process_video_with_decord`, `video_fps` 1, `frames_upbound` 32 in `finetune_ov.sh`); each is
stretched to a square.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlxgen.errors import UnsupportedError
from mlxgen.request import MediaOptions
from mlxgen_vision.image import Resample
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.anyres import AnyResSettings, Size, Window, views
from mlxgen_vision.processors.llava import Pixels, Resize, clip_normalisation, edges, mean_colour, pad_to_square
from mlxgen_vision.processors.settings import Normalisation


@dataclass(frozen=True, slots=True)
class FrameSettings:
    """How a video becomes frames of `side` x `side` pixels: `fps` a second, evenly spread from `max_frames` on."""

    side: int
    resample: Resample
    normalisation: Normalisation
    fps: float = 1.0
    max_frames: int = 32

    @classmethod
    def read(cls, path: Path, side: int) -> FrameSettings:
        """From any layout. Raises `UnsupportedError` for settings that make other sizes than the tower takes."""
        settings = processor_settings.image_settings(path) | processor_settings.video_settings(path)
        if set(edges(settings.get("size") or side)) != {side}:
            raise UnsupportedError(
                f"the video processor has size {settings.get('size')}; the tower takes {side}x{side} pixels: use the "
                "settings published with the model"
            )
        return cls(
            side=side,
            resample=processor_settings.resample(settings, "bicubic"),
            normalisation=clip_normalisation(settings),
            fps=float(settings.get("fps") or 1.0),
            max_frames=int(settings.get("num_frames") or 32),
        )

    def limited(self, options: MediaOptions) -> FrameSettings:
        """With the caller's options in place of the model's."""
        return replace(
            self,
            fps=self.fps if options.fps is None else options.fps,
            max_frames=self.max_frames if options.max_frames is None else options.max_frames,
        )


def sampled_frames(num_frames: int, native_fps: float, settings: FrameSettings) -> list[int]:
    """Which frames of a video of `num_frames` at `native_fps` the model looks at: every so many-th from the first on,
    or evenly spread ones if these are too many."""
    step = max(1, round(native_fps / settings.fps))
    indices = list(range(0, num_frames, step))
    return indices if len(indices) <= settings.max_frames else spread(num_frames, settings.max_frames)


def spread(num_frames: int, count: int) -> list[int]:
    """`count` frames evenly spread, the first and the last among them; all where there are fewer."""
    return [int(index) for index in np.linspace(0, num_frames - 1, min(count, num_frames), dtype=int)]


def picture_views(rgb: Pixels, settings: AnyResSettings, resize: Resize) -> Pixels:
    """Both forms of a picture, uint8 (2 + tiles, side, side, 3): padded to a square, as among others; then the views of
    a picture alone."""
    square = pad_to_square(rgb, mean_colour(settings.normalisation.mean))
    padded = resize(square, (settings.side, settings.side), settings.resample)
    return np.concatenate([padded[None], views(rgb, settings, resize)])


def max_tiles(aspect_ratio: str) -> int:
    """How many tiles' worth of patches a picture has at most, from a `vision_aspect_ratio` like "anyres_max_9"."""
    found = re.fullmatch(r"anyres_max_(\d+)", aspect_ratio)
    if found is None or int(found[1]) < 1:
        raise UnsupportedError(
            f"vision_aspect_ratio is {aspect_ratio!r}; mlxgen knows 'anyres_max_' and a number of tiles"
        )
    return int(found[1])


def reduced(window: Window, side: int, tiles: int) -> Size:
    """(rows, columns) to which the patches of a window are resampled: as many as there are, or about `tiles` times
    side x side where they are over a fifth more."""
    ratio = (window.rows * window.columns / (tiles * side**2)) ** 0.5
    if ratio <= 1.1:
        return window.rows, window.columns
    return int(window.rows // ratio), int(window.columns // ratio)
