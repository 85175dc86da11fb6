"""How the Qwen families turn pictures and video frames into patches: sizes, normalisation, order.

Sizes are multiples of a merge block's side; a picture keeps its aspect ratio as well as that allows. The rules are
those of Qwen's own `qwen-vl-utils` and of transformers' `Qwen2VLImageProcessor`, `Qwen2VLVideoProcessor` and
`Qwen3VLVideoProcessor`. Where the two differ on a video's size, `qwen-vl-utils` is followed (transformers' option
`cap_pixels_per_frame`, announced there as the future default): a frame gets at most 768 tokens, and all frames share
the video's budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np

from mlxgen.errors import MediaError, UnsupportedError
from mlxgen.request import MediaOptions
from mlxgen_vision.image import Resample, bounded_size
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.settings import Normalisation

Pixels = np.ndarray[Any, Any]
Size = tuple[int, int]

_MAX_RATIO: Final = 200
_FRAME_TOKENS: Final = 768  # qwen-vl-utils' VIDEO_MAX_TOKEN_NUM
_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """Bounds on the pixels of a picture (or of one video frame, see `VideoSettings`), both inclusive."""

    low: int
    high: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], default: PixelBudget) -> PixelBudget:
        """`min_pixels` and `max_pixels` as older files have them, else the two edges of `size` (which mean pixels)."""
        size = settings.get("size")
        size = size if isinstance(size, Mapping) else {}
        low = settings.get("min_pixels") or size.get("shortest_edge") or default.low
        high = settings.get("max_pixels") or size.get("longest_edge") or default.high
        return cls(int(low), int(high))

    def limited(self, options: MediaOptions) -> PixelBudget:
        """With the caller's bounds in place of the model's.

        One bound alone moves the other where it would be beyond it.
        """
        low = options.min_pixels or min(self.low, options.max_pixels or self.low)
        high = options.max_pixels or max(self.high, options.min_pixels or self.high)
        return PixelBudget(low, high)


@dataclass(frozen=True, slots=True)
class PatchSettings:
    """Patches of `patch` × `patch` pixels and `temporal` frames; `merge` × `merge` of them become a token."""

    patch: int
    temporal: int
    merge: int
    normalisation: Normalisation
    resample: Resample

    @property
    def factor(self) -> int:
        """What heights and widths are multiples of, in pixels."""
        return self.patch * self.merge

    def grid(self, size: Size) -> Size:
        """Rows and columns of patches of a resized picture."""
        return size[0] // self.patch, size[1] // self.patch

    def patches(self, frames: Sequence[Pixels]) -> Pixels:
        """One temporal patch as the tower takes it: float32 (rows * columns, 3 * temporal * patch * patch).

        `frames` are uint8 (height, width, 3); if there are fewer than `temporal` the last is repeated. Patches come
        merge block by merge block, values channel first, then time, row, column.
        """
        pixels = np.stack([*frames, *[frames[-1]] * (self.temporal - len(frames))])
        rows, columns = self.grid(cast(Size, frames[0].shape[:2]))
        blocks = pixels.reshape(
            self.temporal,
            rows // self.merge,
            self.merge,
            self.patch,
            columns // self.merge,
            self.merge,
            self.patch,
            3,
        ).transpose(1, 4, 2, 5, 7, 0, 3, 6)
        ordered = np.ascontiguousarray(blocks).reshape(rows * columns, 3, -1)
        # There are only 256 values a channel: looking them up is much faster than computing each, and the same.
        table = self.normalisation(np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 3)))
        values = np.empty(ordered.shape, np.float32)
        for channel in range(3):
            values[:, channel] = table[:, channel][ordered[:, channel]]
        return values.reshape(rows * columns, -1)


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How pictures are resized and cut."""

    patches: PatchSettings
    budget: PixelBudget

    def size(self, original: Size, options: MediaOptions) -> Size:
        """The (height, width) a picture is resized to."""
        return smart_resize(_bounded(original, options), self.patches.factor, self.budget.limited(options))


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """How videos are sampled, resized and cut.

    With `rule` "frame" (Qwen2-VL, Qwen2.5-VL) the budget is a frame's, and all frames together get at most 90 % of
    `max_tokens`. With `rule` "clip" (Qwen3-VL, Qwen3.5) it is the whole clip's, and a frame gets at most `max_tokens`.
    """

    patches: PatchSettings
    budget: PixelBudget
    rule: Literal["frame", "clip"]
    max_tokens: int
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    def size(self, num_frames: int, original: Size, options: MediaOptions) -> Size:
        """The (height, width) every frame of a clip of `num_frames` is resized to. Options are per frame."""
        factor, original = self.patches.factor, _bounded(original, options)
        num_frames = max(num_frames, self.patches.temporal)
        if self.rule == "frame":
            total = int(self.max_tokens * factor * factor * 0.9)
            share = total * self.patches.temporal // num_frames
            high = max(min(self.budget.high, share), int(self.budget.low * 1.05))
            return smart_resize(original, factor, PixelBudget(self.budget.low, high).limited(options))
        share = min(self.max_tokens * factor * factor, self.budget.high // num_frames)
        high = max(share, int(self.budget.low * 1.05))
        low = self.budget.low if options.min_pixels is None else options.min_pixels * num_frames
        high = max(high, options.min_pixels or high) if options.max_pixels is None else options.max_pixels
        return _smart_resize_clip(num_frames, original, self.patches, PixelBudget(min(low, high * num_frames), high))

    def sample(self, num_frames: int, fps: float, options: MediaOptions) -> list[int]:
        """Indices of the frames to take from a file of `num_frames` at `fps`, evenly from the first to the last.

        As many as the wanted rate asks for, at least `min_frames` and at most `max_frames` (the caller's, if given),
        never more than there are; for rule "frame" an even number (qwen-vl-utils' `smart_nframes`).
        """
        most = min(options.max_frames or self.max_frames, num_frames)
        wanted = max(num_frames / fps * (options.fps or self.fps), min(self.min_frames, most))
        count = int(min(wanted, most))
        if self.rule == "frame" and count > self.patches.temporal:
            count -= count % self.patches.temporal
        return spread(num_frames, max(count, 1))


def spread(num_frames: int, count: int) -> list[int]:
    """`count` indices out of `range(num_frames)`, evenly from the first to the last."""
    return [int(index) for index in np.linspace(0, num_frames - 1, count).round()]


def smart_resize(size: Size, factor: int, budget: PixelBudget) -> Size:
    """The nearest (height, width) in multiples of `factor` whose product lies within the budget.

    Raises `MediaError` if one side is over 200 times the other.
    """
    height, width = size
    _check_ratio(size)
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > budget.high:
        beta = math.sqrt(height * width / budget.high)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < budget.low:
        beta = math.sqrt(budget.low / (height * width))
        new_height, new_width = (math.ceil(side * beta / factor) * factor for side in size)
    return new_height, new_width


def _smart_resize_clip(num_frames: int, size: Size, patches: PatchSettings, budget: PixelBudget) -> Size:
    """As `smart_resize`, for a clip: `budget.low` bounds all its pixels, `budget.high` those of a frame."""
    factor = patches.factor
    height, width = size
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_ratio((height, width))
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    pixels = round(num_frames / patches.temporal) * patches.temporal * new_height * new_width
    if pixels > budget.high * num_frames:
        beta = math.sqrt(height * width / budget.high)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif pixels < budget.low:
        beta = math.sqrt(budget.low / (num_frames * height * width))
        new_height, new_width = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return new_height, new_width


def _check_ratio(size: Size) -> None:
    if max(size) > _MAX_RATIO * min(size):
        raise MediaError(
            f"a picture of {size[1]} × {size[0]} pixels has one side over {_MAX_RATIO} times the other; crop it"
        )


def _bounded(original: Size, options: MediaOptions) -> Size:
    """The size `max_image_size` leaves; the bounds on pixels are the resize rule's own and enter there."""
    return bounded_size(original, MediaOptions(max_image_size=options.max_image_size))


def _patch_settings(settings: Mapping[str, Any], patch: int, merge: int, temporal: int) -> PatchSettings:
    for name, value in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", temporal)):
        if settings.get(name, value) != value:
            raise UnsupportedError(
                f"the processor's {name} is {settings[name]!r}, the vision tower's {value}; "
                "use the processor settings published with the model"
            )
    return PatchSettings(
        patch=patch,
        temporal=temporal,
        merge=merge,
        normalisation=Normalisation.of(settings),
        resample=processor_settings.resample(settings, "bicubic"),
    )


@dataclass(frozen=True, slots=True)
class QwenProcessor:
    """A folder's picture and video settings."""

    image: ImageSettings
    video: VideoSettings

    @classmethod
    def read(
        cls, path: Path, rule: Literal["frame", "clip"], *, patch: int, merge: int, temporal: int
    ) -> QwenProcessor:
        """From the folder's processor files, old or new; what they leave out is as published for the family.

        The patch sizes are the tower's: `UnsupportedError` if the files have others.
        """
        block = (patch * merge) ** 2
        defaults: dict[str, Any] = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
        if rule == "frame":
            defaults = {"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD}
        images = defaults | processor_settings.image_settings(path)
        videos = processor_settings.video_settings(path)
        if rule == "frame":
            budget = PixelBudget.of(images, PixelBudget(4 * block, 16384 * block))
            # Without video settings of their own, transformers 4 took the picture's; the frame's cap still holds.
            own = PixelBudget.of(videos or images, PixelBudget(128 * block, _FRAME_TOKENS * block))
            clip = PixelBudget(own.low, own.high if videos else min(own.high, _FRAME_TOKENS * block))
        else:
            budget = PixelBudget.of(images, PixelBudget(64 * block, 16384 * block))
            clip = PixelBudget.of(videos, PixelBudget(4 * block, 24576 * block))
        videos = images | videos
        return cls(
            image=ImageSettings(_patch_settings(images, patch, merge, temporal), budget),
            video=VideoSettings(
                patches=_patch_settings(videos, patch, merge, temporal),
                budget=clip,
                rule=rule,
                max_tokens=int(videos.get("max_video_tokens") or (128000 if rule == "frame" else _FRAME_TOKENS)),
                fps=float(videos.get("fps") or 2.0),
                min_frames=int(videos.get("min_frames") or 4),
                max_frames=int(videos.get("max_frames") or 768),
            ),
        )
