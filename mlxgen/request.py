"""What a caller asks for: messages with text, pictures and video in them, and the options of a reply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# Anything a picture or a video can come from: a path, bytes, a binary file, a PIL image, a NumPy array, for a video
# also a folder or a sequence of frames. Strings are a path, a data URI, base64, or (only where allowed) an http(s) URL.
MediaSource = Any


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Limits and sampling of one picture or video; None means the model's own default.

    Pixels are counted after orientation and before the model's resize rule; `max_image_size` bounds the longer side.
    `fps` is the sampling rate of a video file, or, for a folder or list of frames, how many a second they stand for.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    max_image_size: int | None = None
    fps: float | None = None
    max_frames: int | None = None
    allow_urls: bool = False


@dataclass(frozen=True, slots=True)
class ImagePart:
    source: MediaSource
    options: MediaOptions = field(default_factory=MediaOptions)


@dataclass(frozen=True, slots=True)
class VideoPart:
    source: MediaSource
    options: MediaOptions = field(default_factory=MediaOptions)


MediaPart = ImagePart | VideoPart
Part = str | ImagePart | VideoPart
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `parts` keeps text and media in the order the model shall read them."""

    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def media(self) -> tuple[MediaPart, ...]:
        return tuple(part for part in self.parts if not isinstance(part, str))
