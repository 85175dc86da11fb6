"""The bounds put on media before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from mlxgen.errors import InvalidValueError, MediaError
from mlxgen_vision.fetch import UrlPolicy


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What a source may claim or take. Checked on headers and sizes, so that refusing costs no memory.

    `max_source_pixels` (width times height of a picture or of one video frame) defaults to the count at which Pillow
    refuses: a quarter of 2**30 pixels of 3 bytes, twice. `max_source_bytes` bounds what is read into memory: a picture
    file, an animation, a download. Video files are read as they are decoded and aren't bounded by it.
    """

    max_source_pixels: int = 178_956_970
    max_source_bytes: int = 512 * 1024 * 1024
    url_policy: UrlPolicy = field(default_factory=UrlPolicy)

    def __post_init__(self) -> None:
        for name in ("max_source_pixels", "max_source_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidValueError(f"{name} is {value}; it must be at least 1")


DEFAULT_LIMITS: Final = MediaLimits()


def check_size(width: int, height: int, name: str, limits: MediaLimits) -> None:
    """Raise `MediaError` unless a picture of this claimed size may be decoded."""
    if width < 1 or height < 1:
        raise MediaError(f"{name}: {width}x{height}, a picture without pixels")
    if width * height > limits.max_source_pixels:
        raise MediaError(
            f"{name}: claims {width:,}x{height:,} = {width * height:,} pixels, more than the limit of "
            f"{limits.max_source_pixels:,}; scale it down first, or raise MediaLimits.max_source_pixels if you trust it"
        )
