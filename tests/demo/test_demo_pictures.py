"""The demonstration's pictures: deterministic, where they say, and refused when they make no sense."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from mlxgen_vision.demo_pictures import (
    CANVAS,
    COLOURS,
    DIRECTIONS,
    EXAMPLES,
    KINDS,
    QUADRANTS,
    Shape,
    draw_clip,
    draw_scene,
    example_clip,
    example_picture,
)
from PIL import Image

from mlxgen.errors import InvalidValueError


def centre_of_ink(picture: Image.Image) -> tuple[float, float]:
    """Mean (x, y) of the pixels that are not background."""
    ys, xs = np.nonzero((np.asarray(picture).astype(int) - 250).__abs__().sum(-1) > 30)
    return float(xs.mean()), float(ys.mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("quadrant", QUADRANTS)
def test_a_shape_is_drawn_where_and_in_which_colour_it_says(kind: str, colour: str, quadrant: str) -> None:
    x, y = QUADRANTS[quadrant]
    picture = draw_scene([Shape(kind, colour, x, y)])
    assert picture.size == (CANVAS, CANVAS)
    assert picture.mode == "RGB"
    assert picture.getpixel((x, y)) == COLOURS[colour]
    assert centre_of_ink(picture) == pytest.approx((x, y), abs=5)


def test_the_kinds_look_different() -> None:
    pictures = [draw_scene([Shape(kind, "red", 56, 56, 20)]).tobytes() for kind in KINDS]
    assert len(set(pictures)) == len(KINDS)


def test_the_same_shapes_give_the_same_pixels() -> None:
    for name in EXAMPLES:
        assert example_picture(name).tobytes() == example_picture(name).tobytes()
        assert example_picture(name, size=224).size == (224, 224)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_clip_moves_the_way_it_says_and_stays_on_the_canvas(direction: str) -> None:
    dx, dy = DIRECTIONS[direction]
    centres = [centre_of_ink(frame) for frame in example_clip(direction)]
    for (x0, y0), (x1, y1) in pairwise(centres):
        assert (x1 - x0, y1 - y0) == pytest.approx((16 * dx, 16 * dy), abs=0.5)


def test_a_resting_clip_repeats_its_frame() -> None:
    frames = draw_clip(Shape("star", "blue", 50, 50), None, num_frames=3)
    assert len({frame.tobytes() for frame in frames}) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Shape("hexagon", "red", 0, 0), "hexagon"),
        (lambda: Shape("circle", "mauve", 0, 0), "mauve"),
        (lambda: Shape("circle", "red", 0, 0, 0), "radius"),
        (lambda: draw_scene([], size=4), "8..4096"),
        (lambda: example_picture("five"), "five"),
        (lambda: example_clip("north"), "north"),
        (lambda: draw_clip(Shape("circle", "red", 0, 0), "left", num_frames=0), "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: object, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        make()  # type: ignore[operator]
