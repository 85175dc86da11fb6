"""SmolVLM2's video rule: which frames, at which size, and the words around them.

After transformers' `video_processing_smolvlm.py` and `processing_smolvlm.py`. The filter is Lanczos, as published:
transformers before torchvision 0.27 silently used bicubic for video and said itself that this differs from the original
(huggingface/transformers pull requests 39147 and 46496).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Final

import numpy as np

from mlxgen.errors import InvalidValueError
from mlxgen.request import MediaOptions
from mlxgen_vision.image import Resample
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.idefics3 import (
    MAX_EDGE,
    Pixels,
    Resize,
    image_text,
    longest_edge_size,
)
from mlxgen_vision.processors.settings import Normalisation

VIDEO: Final = "<video>"
SKIPPED_S: Final = 1.0  # left out at each end of a long video: titles and credits


@dataclass(frozen=True, slots=True)
class FrameSettings:
    """How a video becomes frames: at most `max_frames`, `fps` a second, each one square of `tile` pixels."""

    tile: int
    longest_edge: int
    resample: Resample
    fps: float
    max_frames: int
    normalisation: Normalisation

    @classmethod
    def read(cls, path: Path) -> FrameSettings:
        """From any layout. The oldest form keeps its numbers in `video_sampling` of the image processor's settings."""
        image = processor_settings.image_settings(path)
        settings = image | processor_settings.video_settings(path)
        sampling = settings.get("video_sampling") or {}
        merged = settings | {
            key: sampling[old]
            for key, old in (("size", "video_size"), ("fps", "fps"), ("num_frames", "max_frames"))
            if sampling.get(old) is not None
        }
        return cls(
            tile=processor_settings.edge(merged, "max_image_size", 364),
            longest_edge=min(MAX_EDGE, processor_settings.edge(merged, "size", 4 * 364)),
            resample=processor_settings.resample(merged, "lanczos"),
            fps=float(merged.get("fps") or 1.0),
            max_frames=int(merged.get("num_frames") or 64),
            normalisation=Normalisation.of(merged),
        )

    def limited(self, options: MediaOptions) -> FrameSettings:
        """With the caller's options in place of the model's."""
        return replace(
            self,
            fps=self.fps if options.fps is None else options.fps,
            max_frames=self.max_frames if options.max_frames is None else options.max_frames,
        )


def sampled_frames(num_frames: int, native_fps: float, settings: FrameSettings) -> list[int]:
    """Which frames of a video of `num_frames` at `native_fps` the model looks at: evenly spread, each at most once.

    A second is left out at both ends if the video is much longer than what is sampled of it.
    """
    duration = num_frames / native_fps
    wanted = max(1, min(round(settings.fps * duration), settings.max_frames))
    first, last = 0, num_frames - 1
    if duration - 2 * SKIPPED_S > settings.max_frames * settings.fps:
        first = int(SKIPPED_S * native_fps)
        last = min(int(num_frames - SKIPPED_S * native_fps), num_frames - 1)
        if first >= last:
            first, last = 0, num_frames - 1
    return _spread(first, last, wanted)


def given_frames(num_frames: int, max_frames: int | None) -> list[int]:
    """The frames of a folder or list: all that were given, or evenly spread ones where the caller set a bound."""
    return _spread(0, num_frames - 1, num_frames if max_frames is None else min(max_frames, num_frames))


def _spread(first: int, last: int, count: int) -> list[int]:
    return [int(index) for index in np.unique(np.linspace(first, last, count, dtype=int))]


def square_frame(rgb: Pixels, settings: FrameSettings, resize: Resize) -> Pixels:
    """One frame as the tower sees it, uint8 (tile, tile, 3): first its longest edge, then stretched to a square."""
    size = longest_edge_size(rgb.shape[0], rgb.shape[1], settings.longest_edge)
    return resize(resize(rgb, size, settings.resample), (settings.tile, settings.tile), settings.resample)


def video_text(times_s: Sequence[float], duration_s: float, num_tokens: int) -> str:
    """What `<video>` becomes: how many frames of how long a video, then every frame with its time."""
    frames = "".join(
        f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:{image_text(0, 0, num_tokens)}" for time in times_s
    )
    length = timedelta(seconds=int(duration_s))
    return (
        f"You are provided the following series of {number_in_words(len(times_s))} frames from a {length} [H:MM:SS] "
        f"video.\n{frames}\n\n"
    )


_DIGITS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS: Final = (
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number_in_words(number: int) -> str:
    """An English cardinal below a million, worded and punctuated as the `num2words` package does."""
    if not 0 <= number < 1_000_000:
        raise InvalidValueError(f"{number} frames can't be written in words; sample fewer than a million")
    if number < 20:
        return _DIGITS[number] if number < 10 else _TEENS[number - 10]
    if number < 100:
        tens = _TENS[number // 10 - 2]
        return f"{tens}-{_DIGITS[number % 10]}" if number % 10 else tens
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = number % unit
    head = f"{number_in_words(number // unit)} {name}"
    if not rest:
        return head
    return f"{head} and {number_in_words(rest)}" if rest < 100 else f"{head}, {number_in_words(rest)}"
