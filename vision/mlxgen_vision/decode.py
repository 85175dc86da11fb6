"""Opening picture bytes with Pillow: an allow-list of formats, sizes checked on the header, one kind of error."""

from __future__ import annotations

import io
import struct
from typing import Any, Final

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from mlxgen.errors import MediaError
from mlxgen_vision.limits import MediaLimits, check_size
from mlxgen_vision.signature import NUM_BYTES, PICTURE_FORMATS, identify

ORIENTATION: Final = 0x0112

# The plugins are called directly: `Image.open` would try others, and applies a process-wide limit of its own.
_PLUGINS: Final[dict[str, Any]] = {
    "PNG": PngImagePlugin.PngImageFile,
    "JPEG": JpegImagePlugin.jpeg_factory,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
}


def picture_format(data: bytes, name: str) -> str:
    """Which of `PICTURE_FORMATS` the bytes are, by content. Raises `MediaError` that says what they are instead."""
    signature = identify(data[:NUM_BYTES])
    if signature.category == "picture":
        return signature.name
    known = ", ".join(PICTURE_FORMATS)
    if signature.category == "video":
        raise MediaError(f"{name}: {signature.name}, not a picture; give it as a video")
    raise MediaError(f"{name}: not a picture: its content is {signature.name}; pictures can be {known}")


def open_picture(data: bytes, name: str, limits: MediaLimits) -> tuple[Image.Image, str]:
    """(an image whose header was read and size checked, its format). Nothing is decoded yet; see `decode`."""
    kind = picture_format(data, name)
    if kind == "HEIC":
        return _open_heic(data, name, limits), kind
    if kind == "WebP":  # its decoder allocates the whole canvas when it is opened
        check_size(*_webp_size(data, name), name, limits)
    try:
        image = _PLUGINS[kind](io.BytesIO(data))
    except Exception as error:
        raise damaged(name, kind, error) from error
    check_size(image.width, image.height, name, limits)
    return image, kind


def decode(image: Image.Image, name: str, kind: str, limits: MediaLimits) -> None:
    """Decode the current frame in place. Raises `MediaError` for a truncated or damaged file."""
    try:
        image.load()
    except Exception as error:
        raise damaged(name, kind, error) from error
    check_size(image.width, image.height, name, limits)  # a GIF's first frame may enlarge the canvas


def orientation_of(image: Image.Image) -> tuple[int, str | None]:
    """(EXIF orientation 1 to 8, 1 without any; what is wrong with the EXIF data or None) of a loaded image."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception as error:
        return 1, f"its EXIF data is damaged ({_detail(error)}): taken as upright"
    return (value, None) if isinstance(value, int) and 1 <= value <= 8 else (1, None)


def damaged(name: str, kind: str, error: BaseException) -> MediaError:
    """The one error for whatever a decoder raises."""
    return MediaError(f"{name}: a truncated or damaged {kind} file ({_detail(error)}); copy or download it again")


def _detail(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:160] if text else type(error).__name__


def _webp_size(data: bytes, name: str) -> tuple[int, int]:
    """Width and height from a WebP header, for all three of its forms."""
    form = data[12:16]
    try:
        if form == b"VP8X":
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        if form == b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        if form == b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
    except struct.error as error:
        raise damaged(name, "WebP", error) from error
    raise damaged(name, "WebP", ValueError("no picture in it"))


def _open_heic(data: bytes, name: str, limits: MediaLimits) -> Image.Image:
    try:
        import pillow_heif
    except ImportError as error:
        raise MediaError(f"{name}: a HEIC picture; to read those: pip install 'mlxgen[heic]'") from error
    try:
        opened = pillow_heif.open_heif(io.BytesIO(data))
        width, height = opened.size
    except Exception as error:
        raise damaged(name, "HEIC", error) from error
    check_size(width, height, name, limits)
    try:
        image: Image.Image = opened.to_pillow()
    except Exception as error:
        raise damaged(name, "HEIC", error) from error
    # The decoder has already turned the picture as the container says; its EXIF orientation must not count again.
    image.info.pop("exif", None)
    image.info.pop("xmp", None)
    return image
