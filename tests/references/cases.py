"""The cases every family is tried on, and the seeded pictures in them.

A case is a prompt in pieces: text, or the name of a picture or video of `PICTURES` and `VIDEOS`. Sizes are chosen so
that every branch of every family's resize rule is taken; they are given in multiples of what the family rounds to,
where that matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

Piece = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Size:
    """A picture's height and width in pixels, or a video's with its number of frames and rate."""

    height: int
    width: int
    frames: int = 1
    fps: float = 1.0


PICTURES: Final[dict[str, Size]] = {
    "plain": Size(100, 130),  # within all budgets, a multiple of nothing
    "exact": Size(224, 448),  # multiples of 28, 32 and 64
    "tall": Size(181, 83),
    "square": Size(128, 128),
    "tiny": Size(5, 7),  # below the least number of pixels
    "dot": Size(1, 1),
    "thin": Size(12, 600),  # its height rounds to zero blocks
    "ribbon": Size(40, 2000),  # beyond the budget, its height less than a block after scaling
    "column": Size(597, 3),  # nearly 200 : 1
    "large": Size(500, 700),  # beyond the budget
    "edge": Size(98, 70),  # halfway between two multiples of 28: rounds to even
}
VIDEOS: Final[dict[str, Size]] = {
    "clip": Size(60, 88, frames=5, fps=3.0),  # an odd number of frames, a fractional interval
    "speck": Size(10, 13, frames=2, fps=1.0),
    "film": Size(150, 210, frames=8, fps=2.0),  # the budget of all frames together binds
    "banner": Size(20, 420, frames=4, fps=0.5),
    "slides": Size(64, 64, frames=11, fps=25.0),  # time stamps that need rounding
}

_ASK: Final = "What is in the picture?"

CASES: Final[dict[str, tuple[Piece, ...]]] = {
    "text": ("The user asks: ", "what is a picture?"),
    "one": (("image", "plain"), _ASK),
    "two": ("Compare ", ("image", "exact"), " and ", ("image", "tall"), ": which is larger?"),
    "adjacent": (("image", "square"), ("image", "edge"), ("image", "plain"), "Three in a row."),
    "tiny": (("image", "tiny"), ("image", "dot"), _ASK),
    "thin": (("image", "thin"), _ASK),
    "ribbon": (("image", "ribbon"), _ASK),
    "column": ("First some text, long enough to be cut by a chunk. ", ("image", "column"), _ASK),
    "large": (_ASK, ("image", "large")),
    "video": (("video", "clip"), "What happens?"),
    "videos": (("video", "speck"), "then ", ("video", "film"), "What happens?"),
    "wide_video": ("What happens? ", ("video", "banner")),
    "fast_video": (("video", "slides"), "What happens?"),
    "mix": (("image", "plain"), "before ", ("video", "clip"), " and ", ("image", "tall"), "after. Describe."),
}


def picture(name: str) -> np.ndarray:
    """uint8 (height, width, 3): coloured squares over fine noise."""
    return _draw(PICTURES[name], f"picture {name}")


def video(name: str) -> np.ndarray:
    """uint8 (frames, height, width, 3); every second frame repeats the one before it, shifted."""
    size = VIDEOS[name]
    frames = [_draw(size, f"video {name} {number // 2}") for number in range(size.frames)]
    return np.stack([np.roll(frame, 3 * number, axis=1) for number, frame in enumerate(frames)])


def _draw(size: Size, seed: str) -> np.ndarray:
    stream = np.random.RandomState(np.frombuffer(seed.encode(), np.uint8).astype(np.uint32))
    side = 9
    coarse = stream.randint(0, 256, (-(-size.height // side), -(-size.width // side), 3))
    squares = coarse.repeat(side, axis=0).repeat(side, axis=1)[: size.height, : size.width]
    noise = stream.randint(-40, 41, (size.height, size.width, 3))
    return np.clip(squares + noise, 0, 255).astype(np.uint8)
