"""The pictures the embedded demonstration model knows: coloured shapes on a light card, and clips of one moving shape.

Pure functions of their arguments: the same shapes give the same pixels, so the demo, the tests and the training script
can all name a picture by the list of its shapes. Nothing here draws random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from PIL import Image, ImageDraw

from mlxgen.errors import InvalidValueError

__all__ = [
    "CANVAS",
    "COLOURS",
    "DIRECTIONS",
    "EXAMPLES",
    "KINDS",
    "QUADRANTS",
    "Shape",
    "draw_clip",
    "draw_scene",
    "example_clip",
    "example_picture",
]

CANVAS: Final = 112
"""Side of the coordinate system in pixels: the only picture size the demonstration model was trained on."""

KINDS: Final = ("circle", "square", "triangle", "star")
COLOURS: Final[dict[str, tuple[int, int, int]]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 205, 40),
    "purple": (150, 50, 180),
    "black": (25, 25, 25),
}
QUADRANTS: Final[dict[str, tuple[int, int]]] = {
    "top left": (28, 28),
    "top right": (84, 28),
    "bottom left": (28, 84),
    "bottom right": (84, 84),
}
"""Centre (x, y) of each quarter of the canvas, in reading order."""

DIRECTIONS: Final[dict[str, tuple[int, int]]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

_SUPERSAMPLING: Final = 3  # draw larger, then average: smooth edges without a font or vector library


@dataclass(frozen=True, slots=True)
class Shape:
    """One filled shape: kind, colour name, centre (x, y) and radius in canvas pixels (112 to a side).

    `rgb` overrides the colour's standard RGB value (0..255 each); the name then only says what to call it.
    Raises `InvalidValueError` for an unknown kind or colour, or a radius that is not positive.
    """

    kind: str
    colour: str
    x: float
    y: float
    radius: float = 18.0
    rgb: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidValueError(f"unknown shape {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.colour not in COLOURS:
            raise InvalidValueError(f"unknown colour {self.colour!r}: choose one of {', '.join(COLOURS)}")
        if not self.radius > 0:
            raise InvalidValueError(f"radius {self.radius} is not positive: give pixels on a {CANVAS}-pixel canvas")


def draw_scene(
    shapes: Sequence[Shape], *, size: int = CANVAS, background: tuple[int, int, int] = (250, 250, 250)
) -> Image.Image:
    """Draws the shapes, later ones over earlier ones, as an RGB picture of `size` x `size` pixels.

    Coordinates scale with `size`. Raises `InvalidValueError` when `size` is not between 8 and 4096.
    """
    if not 8 <= size <= 4096:
        raise InvalidValueError(f"picture size {size} is outside 8..4096 pixels: choose one within")
    scale = size * _SUPERSAMPLING / CANVAS
    picture = Image.new("RGB", (size * _SUPERSAMPLING,) * 2, background)
    pen = ImageDraw.Draw(picture)
    for shape in shapes:
        fill = shape.rgb if shape.rgb is not None else COLOURS[shape.colour]
        x, y, radius = shape.x * scale, shape.y * scale, shape.radius * scale
        if shape.kind == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        elif shape.kind == "square":
            half = radius * 0.9
            pen.rectangle((x - half, y - half, x + half, y + half), fill=fill)
        elif shape.kind == "triangle":
            pen.polygon(_corners(x, y + radius * 0.15, (radius * 1.15,) * 3), fill=fill)
        else:
            pen.polygon(_corners(x, y, (radius * 1.15, radius * 0.5) * 5), fill=fill)
    return picture.reduce(_SUPERSAMPLING)


def draw_clip(
    shape: Shape,
    direction: str | None,
    *,
    num_frames: int = 4,
    step: float = 10.0,
    size: int = CANVAS,
    background: tuple[int, int, int] = (250, 250, 250),
) -> list[Image.Image]:
    """Draws `num_frames` frames of `shape` moving `step` canvas pixels per frame, or resting when `direction` is None.

    `shape` is where it is in the first frame. Raises `InvalidValueError` for an unknown direction or when there is no
    frame to draw.
    """
    if direction is not None and direction not in DIRECTIONS:
        raise InvalidValueError(f"unknown direction {direction!r}: choose one of {', '.join(DIRECTIONS)}, or None")
    if num_frames < 1:
        raise InvalidValueError(f"{num_frames} frames asked for: a clip needs at least 1")
    dx, dy = DIRECTIONS[direction] if direction is not None else (0, 0)
    return [
        draw_scene(
            [replace(shape, x=shape.x + dx * step * index, y=shape.y + dy * step * index)],
            size=size,
            background=background,
        )
        for index in range(num_frames)
    ]


def _corners(x: float, y: float, radii: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of a polygon around (x, y), clockwise from straight up, at the given distances."""
    angles = (2 * math.pi * index / len(radii) for index in range(len(radii)))
    return [(x + r * math.sin(a), y - r * math.cos(a)) for r, a in zip(radii, angles, strict=True)]


def _at(kind: str, colour: str, quadrant: str, radius: float = 18.0) -> Shape:
    x, y = QUADRANTS[quadrant]
    return Shape(kind, colour, x, y, radius)


EXAMPLES: Final[dict[str, tuple[Shape, ...]]] = {
    "one": (_at("star", "blue", "top right", 21.0),),
    "two": (_at("circle", "red", "top left"), _at("square", "green", "bottom right")),
    "three": (
        _at("triangle", "purple", "top left"),
        _at("circle", "yellow", "top right"),
        _at("square", "black", "bottom left"),
    ),
    "four": (
        _at("circle", "blue", "top left"),
        _at("circle", "red", "top right"),
        _at("star", "yellow", "bottom left"),
        _at("triangle", "green", "bottom right"),
    ),
}
"""Ready scenes by name, for the demo and for tests."""


def example_picture(name: str, *, size: int = CANVAS) -> Image.Image:
    """Draws the scene `EXAMPLES[name]`. Raises `InvalidValueError` for an unknown name."""
    if name not in EXAMPLES:
        raise InvalidValueError(f"no example picture {name!r}: choose one of {', '.join(EXAMPLES)}")
    return draw_scene(EXAMPLES[name], size=size)


def example_clip(direction: str = "right") -> list[Image.Image]:
    """Draws four frames of a red circle crossing the canvas; play or sample them at 2 frames per second.

    Raises `InvalidValueError` for an unknown direction.
    """
    dx, dy = DIRECTIONS.get(direction, (0, 0))  # draw_clip names the choices when it is none of them
    middle = CANVAS / 2
    return draw_clip(Shape("circle", "red", middle - dx * 24, middle - dy * 24, 18.0), direction, step=16.0)
