"""From any pixel layout to 8-bit RGB, a strip of rows at a time so that no second full-size picture is needed.

Transparency is composited on white. Values with more than 8 bits are scaled, round(x * 255 / 65535), never clipped. The
range assumed for modes that don't say: "I" (32-bit integers) holds 16-bit values 0..65535, "F" and float arrays hold
0..1; values outside are an error, since guessing would change the picture. 16-bit colour PNGs come from Pillow as the
high byte of each value. Colour profiles are not applied, as in the published models' own preprocessing.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from PIL import Image, ImageCms

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import MediaError

Rgb = np.ndarray[Any, np.dtype[np.uint8]]

_STRIP_PIXELS: Final = 1 << 20
_SIXTEEN_BIT: Final = ("I;16", "I;16L", "I;16B", "I;16N", "I")


def rgb_from_image(image: Image.Image, name: str, *, cancel: CancelToken = NEVER) -> tuple[Rgb, str | None]:
    """A loaded PIL image as uint8 (height, width, 3), and what had to be assumed about it (or None).

    Raises `MediaError` for values outside the assumed range and for modes that aren't pictures.
    """
    width, height = image.size
    out = np.empty((height, width, 3), np.uint8)
    transparent = image.info.get("transparency")
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        cancel.checkpoint()
        bottom = min(height, top + rows)
        strip = image if rows >= height else image.crop((0, top, width, bottom))
        out[top:bottom] = _strip(strip, transparent, name)
    return out, _assumption(image.mode)


def rgb_from_array(array: np.ndarray[Any, Any], name: str, *, cancel: CancelToken = NEVER) -> Rgb:
    """An array of shape (h, w), (h, w, 1), (h, w, 3) or (h, w, 4) as a new uint8 (h, w, 3).

    uint8 is taken as it is, uint16 scaled, bool as black and white, floats as 0..1. A fourth channel is alpha.
    """
    _check_array(array, name)
    height, width = array.shape[:2]
    out = np.empty((height, width, 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        cancel.checkpoint()
        strip = _array_to_uint8(array[top : top + rows], name)
        strip = strip if strip.ndim == 3 else strip[:, :, None]
        out[top : top + rows] = composite_on_white(strip[:, :, :3], strip[:, :, 3]) if strip.shape[2] == 4 else strip
    return out


def orient(rgb: Rgb, orientation: int) -> Rgb:
    """Turn a picture the way its EXIF orientation (1 to 8) says; other values are undefined and leave it as it is."""
    if orientation == 2:
        turned = rgb[:, ::-1]
    elif orientation == 3:
        turned = rgb[::-1, ::-1]
    elif orientation == 4:
        turned = rgb[::-1]
    elif orientation == 5:
        turned = rgb.transpose(1, 0, 2)
    elif orientation == 6:
        turned = np.rot90(rgb, -1)
    elif orientation == 7:
        turned = rgb[::-1, ::-1].transpose(1, 0, 2)
    elif orientation == 8:
        turned = np.rot90(rgb, 1)
    else:
        turned = rgb
    return np.ascontiguousarray(turned)


def _assumption(mode: str) -> str | None:
    if mode == "I":
        return "32-bit integers read as 16-bit values, 0..65535"
    if mode == "F":
        return "floating-point values read as 0..1"
    return None


def _strip(image: Image.Image, transparent: Any, name: str) -> Rgb:
    """One strip of any mode as (rows, width, 3); a single grey channel comes back broadcast."""
    mode = image.mode
    if mode in _SIXTEEN_BIT:
        wide = np.asarray(image)
        if mode == "I" and wide.size and (wide.min() < 0 or wide.max() > 65535):
            raise MediaError(
                f"{name}: 32-bit integer values from {wide.min():,} to {wide.max():,}, outside 0..65535; scale them to "
                "8 or 16 bits and give an array"
            )
        grey = _scale16(wide)
        if isinstance(transparent, int):
            grey[wide == transparent] = 255
        return _broadcast(grey)
    if mode == "F":
        return _broadcast(_unit_to_uint8(np.asarray(image), name))
    if mode in ("L", "1"):
        grey = np.array(image.convert("L"))
        if isinstance(transparent, int):
            grey[grey == transparent] = 255
        return _broadcast(grey)
    if mode == "LAB":
        return np.asarray(_lab_to_rgb(image, name))
    if mode in ("PA", "LA", "La", "RGBA", "RGBa") or (mode == "P" and _palette_has_alpha(image)):
        rgba = np.asarray((image.convert("LA") if mode == "La" else image).convert("RGBA"))
        return composite_on_white(rgba[:, :, :3], rgba[:, :, 3])
    if mode in ("RGB", "RGBX", "P", "CMYK", "YCbCr", "HSV"):
        rgb = np.asarray(image if mode == "RGB" else image.convert("RGB"))
        if mode == "RGB" and isinstance(transparent, tuple):
            return _without_colour(rgb, transparent)
        return rgb
    raise MediaError(f"{name}: pixels of kind {mode!r} can't be converted; save the picture as 8-bit RGB")


def _palette_has_alpha(image: Image.Image) -> bool:
    return "transparency" in image.info or (image.palette is not None and image.palette.mode == "RGBA")


def _without_colour(rgb: Rgb, colour: tuple[int, ...]) -> Rgb:
    """White wherever the picture has the one colour that stands for "transparent"."""
    values = [v >> 8 if max(colour) > 255 else v for v in colour]  # of a 16-bit PNG Pillow keeps the high bytes
    rgb = rgb.copy()
    rgb[(rgb == np.asarray(values, np.uint8)).all(axis=2)] = 255
    return rgb


def _broadcast(grey: Rgb) -> Rgb:
    return np.broadcast_to(grey[:, :, None], (*grey.shape, 3))


def _scale16(wide: np.ndarray[Any, Any]) -> Rgb:
    return ((wide.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)


def _unit_to_uint8(values: np.ndarray[Any, Any], name: str) -> Rgb:
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not (low >= 0.0 and high <= 1.0):  # not true of NaN either
        raise MediaError(
            f"{name}: floating-point values from {low:g} to {high:g}, outside 0..1; scale them (divide 0..255 by 255) "
            "and replace NaN"
        )
    return np.rint(values.astype(np.float64) * 255.0).astype(np.uint8)


def composite_on_white(colour: np.ndarray[Any, Any], alpha: np.ndarray[Any, Any]) -> Rgb:
    """round(colour * alpha + 255 * (1 - alpha)) with alpha of 0..255."""
    weight = alpha.astype(np.uint32)[:, :, None]
    return ((colour * weight + 255 * (255 - weight) + 127) // 255).astype(np.uint8)


def _check_array(array: np.ndarray[Any, Any], name: str) -> None:
    shape = array.shape
    right = "give (height, width), or (height, width, 1, 3 or 4)"
    if len(shape) == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4):
        raise MediaError(f"{name}: looks channel-first; {right}: numpy.moveaxis(x, 0, -1)")
    if len(shape) == 4:
        raise MediaError(f"{name}: four axes aren't one picture; {right}, or the array as a video")
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3, 4)):
        raise MediaError(f"{name}: not the shape of a picture; {right}")
    if 0 in shape:
        raise MediaError(f"{name}: has no pixels")
    if array.dtype.kind not in "fb" and not (array.dtype.kind == "u" and array.dtype.itemsize <= 2):
        raise MediaError(
            f"{name}: values of type {array.dtype} have no known range; give uint8, uint16, bool or 0..1 floats"
        )


def _array_to_uint8(array: np.ndarray[Any, Any], name: str) -> Rgb:
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind == "u":
        return _scale16(array)
    return _unit_to_uint8(array, name)


def _lab_to_rgb(image: Image.Image, name: str) -> Image.Image:
    try:
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    except (ImageCms.PyCMSError, ImportError) as error:
        raise MediaError(
            f"{name}: this Pillow can't convert CIELAB colours ({error}); save the picture as RGB"
        ) from error
    assert converted is not None
    return converted
