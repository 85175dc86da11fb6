"""Pictures and videos for the tests of the media input, made on the spot."""

from __future__ import annotations

import io
import os
import struct
import zlib
from typing import Any

import av
import numpy as np
from PIL import Image


def pattern(height: int, width: int) -> np.ndarray[Any, Any]:
    """A picture in which no two corners, rows or columns look alike."""
    y, x = np.mgrid[:height, :width]
    return np.stack([(x * 37 + y * 11) % 256, (x * y) % 256, ((x // 3 + y // 2) % 2) * 255], -1).astype(np.uint8)


def quarters(height: int, width: int) -> np.ndarray[Any, Any]:
    """Flat red, green, blue and grey quarters, which survive lossy compression."""
    out = np.zeros((height, width, 3), np.uint8)
    out[: height // 2, : width // 2] = (250, 0, 0)
    out[: height // 2, width // 2 :] = (0, 250, 0)
    out[height // 2 :, : width // 2] = (0, 0, 250)
    out[height // 2 :, width // 2 :] = (128, 128, 128)
    return out


def encoded(image: Image.Image | np.ndarray[Any, Any], kind: str, **options: Any) -> bytes:
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: tuple[bytes, bytes]) -> bytes:
    """A PNG file written by hand, for layouts Pillow can't write and for lies in the header."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = b"".join(chunk(kind, data) for kind, data in extra)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


def video(
    frames: list[np.ndarray[Any, Any]],
    *,
    codec: str = "libx264",
    container: str = "mp4",
    options: dict[str, str] | None = None,
    times: list[int] | None = None,
    rotation: tuple[float, bool, bool] | None = None,
) -> bytes:
    """A video at 30 frames a second; `times` are the frames' time stamps in thirtieths of a second."""
    out = io.BytesIO()
    target = av.open(out, "w", format=container)
    stream: Any = target.add_stream(codec, rate=30, options=options or {})
    stream.height, stream.width = frames[0].shape[:2]
    stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    if rotation is not None:
        stream.set_display_rotation(rotation[0], hflip=rotation[1], vflip=rotation[2])
    for i, rgb in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
        frame.pts = i if times is None else times[i]
        target.mux(stream.encode(frame))
    target.mux(stream.encode())
    target.close()
    return out.getvalue()


def greys(count: int, height: int = 48, width: int = 64) -> list[np.ndarray[Any, Any]]:
    """Frame i is flat grey of 8 * i, so that a frame's mean tells which it is."""
    return [np.full((height, width, 3), 8 * i, np.uint8) for i in range(count)]


def number_of(rgb: np.ndarray[Any, Any]) -> int:
    """Which of the `greys` a decoded frame is."""
    return round(float(rgb.mean()) / 8)


def resident_bytes(key: str = "VmHWM") -> int | None:
    """The process's peak memory (Linux), or None."""
    if not os.path.exists("/proc/self/status"):
        return None
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))
