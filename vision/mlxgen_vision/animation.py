"""How many frames an animation file has and how long each is shown, from its headers, without decoding.

Pillow tells a frame's duration only after decoding it, and the sampling of frames must be planned before.
"""

from __future__ import annotations

from typing import Final

# What browsers do with a frame that asks for no time at all; the formats leave it to the viewer.
DEFAULT_DURATION_S: Final = 0.1


def durations_s(data: bytes, kind: str) -> list[float]:
    """Seconds each frame of a GIF, PNG or WebP file is shown, in order; empty if it isn't an animation.

    A still GIF has one frame. A frame of 0 s counts as 0.1 s. A damaged file gives the frames before the damage.
    """
    if kind == "GIF":
        found = _gif(data)
    elif kind == "PNG":
        found = _png(data)
    elif kind == "WebP":
        found = _webp(data)
    else:
        found = []
    return [seconds or DEFAULT_DURATION_S for seconds in found]


def num_frames(data: bytes, kind: str) -> int:
    """The number of frames `durations_s` finds."""
    return len(durations_s(data, kind))


def _gif(data: bytes) -> list[float]:
    found: list[float] = []
    if len(data) < 13:
        return found
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    delay = 0.0
    while at < len(data):
        block = data[at]
        if block == 0x3B:
            break
        if block == 0x21 and data[at + 1 : at + 3] == b"\xf9\x04":
            delay = int.from_bytes(data[at + 4 : at + 6], "little") / 100
        if block == 0x21:
            at = _skip_sub_blocks(data, at + 2)
        elif block == 0x2C and at + 10 < len(data):
            found.append(delay)
            delay = 0.0
            flags = data[at + 9]
            at = _skip_sub_blocks(data, at + 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0))
        else:
            at += 1  # as lenient as the decoder
    return found


def _skip_sub_blocks(data: bytes, at: int) -> int:
    while at < len(data) and data[at]:
        at += 1 + data[at]
    return at + 1


def _png(data: bytes) -> list[float]:
    found: list[float] = []
    animated = False
    at = 8
    while at + 12 <= len(data):
        length, chunk = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if chunk == b"acTL":
            animated = True
        elif chunk == b"fcTL" and length == 26 and at + 34 <= len(data):
            numerator = int.from_bytes(data[at + 28 : at + 30], "big")
            found.append(numerator / (int.from_bytes(data[at + 30 : at + 32], "big") or 100))
        elif chunk == b"IEND":
            break
        at += 12 + length
    return found if animated else []


def _webp(data: bytes) -> list[float]:
    found: list[float] = []
    at = 12
    while at + 8 <= len(data):
        chunk, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if chunk == b"ANMF" and at + 23 <= len(data):
            found.append(int.from_bytes(data[at + 20 : at + 23], "little") / 1000)
        at += 8 + length + (length & 1)
    return found
