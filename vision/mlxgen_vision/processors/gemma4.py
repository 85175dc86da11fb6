"""Gemma 4's picture and video rule: any shape, scaled (up or down) to as many tokens as the budget allows.

After transformers' `image_processing_gemma4.py`, `video_processing_gemma4.py` and `processing_gemma4.py`. A token is a
square of `pool` × `pool` patches; heights and widths are whole tokens, so no picture is ever padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxgen.errors import InvalidValueError, UnsupportedError
from mlxgen.request import MediaOptions
from mlxgen_vision.image import Resample
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.settings import Normalisation


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """How a picture or a video's frame is scaled: to at most `max_tokens` tokens of `pool` × `pool` patches."""

    patch: int
    pool: int
    max_tokens: int
    resample: Resample
    normalisation: Normalisation

    @classmethod
    def of(cls, settings: Mapping[str, Any], max_tokens: int) -> TokenBudget:
        """From the processor's settings. `max_tokens` is for those that name none."""
        if not settings.get("do_resize", True):
            raise UnsupportedError(
                "the processor has do_resize false; Gemma 4's pictures must be whole tokens: use the settings "
                "published with the model"
            )
        return cls(
            patch=int(settings.get("patch_size") or 16),
            pool=int(settings.get("pooling_kernel_size") or 3),
            max_tokens=int(settings.get("max_soft_tokens") or max_tokens),
            resample=processor_settings.resample(settings, "bicubic"),
            normalisation=Normalisation.of({"image_mean": 0.0, "image_std": 1.0} | dict(settings)),
        )

    @property
    def side(self) -> int:
        """A token's height and width in pixels."""
        return self.patch * self.pool

    def tokens(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of a scaled picture."""
        return height // self.side, width // self.side

    def size(self, height: int, width: int, options: MediaOptions) -> tuple[int, int]:
        """The (height, width) a picture of this size is scaled to, the aspect ratio kept as whole tokens allow.

        A small picture grows to fill the budget, so `options.min_pixels` has nothing to do. `max_pixels` lowers the
        budget; `max_image_size` bounds the longer side. Raises `InvalidValueError` if they leave no whole token.
        """
        side, longest = self.side, options.max_image_size
        budget = self.max_tokens * side**2
        if options.max_pixels is not None:
            budget = min(budget, options.max_pixels)
        scale = math.sqrt(budget / (height * width))
        if longest is not None:
            scale = min(scale, longest / max(height, width))
        rows, columns = math.floor(scale * height / side), math.floor(scale * width / side)
        if not rows and not columns:
            raise InvalidValueError(
                f"max_pixels {options.max_pixels} and max_image_size {options.max_image_size} leave less than one "
                f"token of {side}x{side} pixels; raise them"
            )
        most = min(budget // side**2, self.max_tokens if longest is None else longest // side)
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        if not rows or not columns:
            raise InvalidValueError(
                f"max_pixels {options.max_pixels} leaves less than one token of {side}x{side} pixels; raise it"
            )
        return rows * side, columns * side


@dataclass(frozen=True, slots=True)
class FrameSettings:
    """How a video becomes frames: `num_frames` evenly spread ones, each scaled by `budget`."""

    budget: TokenBudget
    num_frames: int

    def sample(self, num_frames: int, native_fps: float, options: MediaOptions) -> list[int]:
        """Which frames of a video file the model looks at; all of one that has fewer than asked for.

        `options.fps` takes the place of the model's own number, `options.max_frames` bounds either.
        """
        wanted = self.num_frames
        if options.fps is not None:
            wanted = max(1, int(num_frames / native_fps * options.fps))
        return evenly(num_frames, min(wanted, options.max_frames or wanted))


def evenly(num_frames: int, wanted: int) -> list[int]:
    """`wanted` of `num_frames` frames, the first among them, or all if there are fewer."""
    wanted = min(wanted, num_frames)
    return [index * num_frames // wanted for index in range(wanted)]


def read_settings(path: Path) -> tuple[TokenBudget, FrameSettings]:
    """A folder's settings for pictures and for videos; the defaults are those of transformers' processors."""
    video = processor_settings.video_settings(path)
    return (
        TokenBudget.of(processor_settings.image_settings(path), 280),
        FrameSettings(TokenBudget.of(video, 70), int(video.get("num_frames") or 32)),
    )


@dataclass(frozen=True, slots=True)
class MediaWords:
    """The token strings around and inside a picture or frame."""

    begin: str
    end: str
    image: str
    video: str

    @classmethod
    def read(cls, path: Path) -> MediaWords:
        """As the tokenizer's settings name them."""
        return cls(
            begin=processor_settings.special_word(path, "boi_token", "<|image>"),
            end=processor_settings.special_word(path, "eoi_token", "<image|>"),
            image=processor_settings.special_word(path, "image_token", "<|image|>"),
            video="<|video|>",  # no setting of the published tokenizers names it; transformers has it in its processor
        )

    def picture(self, num_tokens: int) -> str:
        """What `image`, the template's placeholder, becomes."""
        return f"{self.begin}{self.image * num_tokens}{self.end}"

    def frames(self, times_s: Sequence[float], num_tokens: int) -> str:
        """What `video` becomes: each frame with its minute and second."""
        return " ".join(
            f"{int(time // 60):02d}:{int(time % 60):02d} {self.begin}{self.video * num_tokens}{self.end}"
            for time in times_s
        )
