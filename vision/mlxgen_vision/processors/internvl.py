"""InternVL's rules: pictures as a grid of square tiles and the whole, videos as a series of squares, and the words.

After transformers' `processing_internvl.py`, `video_processing_internvl.py` and its GOT-OCR2 image processor; the tiles
and the filter are those of OpenGVLab's own code (see `tile_grid`).

Videos: in training a clip gave 8 to 32 frames, one from each of as many equal stretches (OpenGVLab/InternVL,
`internvl_chat/internvl/train/dataset.py`, `get_frame_indices`, and `internvl_chat_finetune.py`). Here it is the middle
one of each stretch, and their number is one a second within these bounds, unless settings or options say otherwise.
Frames are announced as "Frame1: " as in the published model cards and transformers; that training code writes
"Frame-1: ".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxgen.errors import UnsupportedError
from mlxgen.request import MediaOptions
from mlxgen_vision.image import Resample
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.settings import Normalisation
from mlxgen_vision.processors.tile_grid import TileLimits, closest_grid, cut

Pixels = np.ndarray[Any, Any]
Resize = Callable[[Pixels, tuple[int, int], Resample], Pixels]

_MIN_FRAMES: Final = 8
_MAX_FRAMES: Final = 32
_FPS: Final = 1.0
# ImageNet's, which InternViT was trained with; transformers' class would assume CLIP's.
_IMAGENET: Final = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}


@dataclass(frozen=True, slots=True)
class SquareSettings:
    """The square every tile and frame is scaled to, `side` pixels."""

    side: int
    resample: Resample
    normalisation: Normalisation

    @classmethod
    def of(cls, settings: Mapping[str, Any], side: int) -> SquareSettings:
        """From a processor's settings. Raises `UnsupportedError` unless they make what the tower takes, `side`."""
        size = settings.get("size") or {"height": side, "width": side}
        if not settings.get("do_resize", True) or (size.get("height"), size.get("width")) != (side, side):
            raise UnsupportedError(
                f"the processor has size {size} and do_resize {settings.get('do_resize', True)}, the tower takes "
                f"{side}x{side} pixels; use the processor settings published with the model"
            )
        return cls(
            side=side,
            resample=processor_settings.resample(settings, "bicubic"),
            normalisation=Normalisation.of({**_IMAGENET, **settings}),
        )


@dataclass(frozen=True, slots=True)
class TileSettings:
    """How a picture becomes tiles."""

    square: SquareSettings
    limits: TileLimits

    @classmethod
    def read(cls, path: Path, side: int) -> TileSettings:
        """From any layout. Pictures are always tiled, whatever `crop_to_patches` says: so does InternVL's processor."""
        settings = processor_settings.image_settings(path)
        limits = TileLimits(int(settings.get("min_patches") or 1), int(settings.get("max_patches") or 12))
        return cls(SquareSettings.of(settings, side), limits)

    def limited(self, options: MediaOptions) -> TileSettings:
        """With the caller's upper bounds: as many tiles as fit, one at least."""
        side, limits = self.square.side, self.limits
        most, wide = limits.max_tiles, None
        if options.max_pixels is not None:
            most = max(1, min(most, options.max_pixels // side**2))
        if options.max_image_size is not None:
            wide = max(1, options.max_image_size // side)
            most = min(most, wide * wide)
        return replace(self, limits=TileLimits(min(limits.min_tiles, most), most, wide))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles for a picture of this size."""
        return closest_grid((height, width), (self.square.side, self.square.side), self.limits)


def tile_image(rgb: Pixels, settings: TileSettings, resize: Resize) -> tuple[Pixels, int, int]:
    """(tiles, rows, columns): uint8 (rows * columns, side, side, 3), row by row, and the whole picture last where
    there is more than one tile.

    Both are scaled from the picture itself, without regard to its shape.
    """
    side, resample = settings.square.side, settings.square.resample
    rows, columns = settings.grid(rgb.shape[0], rgb.shape[1])
    tiles = cut(resize(rgb, (rows * side, columns * side), resample), rows, columns)
    if len(tiles) > 1:
        tiles = np.concatenate([tiles, resize(rgb, (side, side), resample)[None]])
    return tiles, rows, columns


@dataclass(frozen=True, slots=True)
class FrameSettings:
    """How a video becomes frames: `num_frames` if that is given, otherwise `fps` a second within the two bounds."""

    square: SquareSettings
    num_frames: int | None = None
    fps: float = _FPS
    min_frames: int = _MIN_FRAMES
    max_frames: int = _MAX_FRAMES

    @classmethod
    def read(cls, path: Path, side: int) -> FrameSettings:
        """From any layout; without settings for video, the picture's."""
        settings = processor_settings.image_settings(path) | processor_settings.video_settings(path)
        count, fps = settings.get("num_frames"), settings.get("fps")
        return cls(
            square=SquareSettings.of(settings, side),
            num_frames=int(count) if count else None,
            fps=float(fps or _FPS),
            max_frames=max(_MAX_FRAMES, int(count or 0)),
        )

    def sampled(self, num_frames: int, native_fps: float, options: MediaOptions) -> list[int]:
        """Which frames of a file of `num_frames` at `native_fps` the model looks at.

        The caller's rate stands in for all but the upper bound, which `max_frames` of the options moves.
        """
        if options.fps is not None:
            count = round(num_frames / native_fps * options.fps)
        elif self.num_frames is not None:
            count = self.num_frames
        else:
            count = max(round(num_frames / native_fps * self.fps), self.min_frames)
        return middle_frames(num_frames, min(count, options.max_frames or self.max_frames))


def middle_frames(num_frames: int, count: int) -> list[int]:
    """The middle frame of each of `count` equal stretches (one at least, and no more than there are frames)."""
    count = max(1, min(count, num_frames))
    return [(2 * number + 1) * num_frames // (2 * count) for number in range(count)]


@dataclass(frozen=True, slots=True)
class TileWords:
    """The token strings of pictures and videos, and how many image tokens a tile takes."""

    num_tokens: int
    start: str
    image: str
    end: str
    video: str

    @classmethod
    def read(cls, path: Path, num_tokens: int) -> TileWords:
        """As the folder's `tokenizer_config.json` names them."""

        def word(key: str, usual: str) -> str:
            return processor_settings.special_word(path, key, usual)

        return cls(
            num_tokens,
            start=word("start_image_token", "<img>"),
            image=word("context_image_token", "<IMG_CONTEXT>"),
            end=word("end_image_token", "</img>"),
            video=word("video_token", "<video>"),
        )

    def run(self, num_tiles: int) -> str:
        """What `image` alone, the template's placeholder, becomes."""
        return f"{self.start}{self.image * self.num_tokens * num_tiles}{self.end}"

    def series(self, num_frames: int) -> str:
        """What `video` becomes: a line for each frame."""
        return "\n".join(f"Frame{number}: {self.run(1)}" for number in range(1, num_frames + 1))
