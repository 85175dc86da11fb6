"""Views, tiles and how many tokens they make: as transformers has it, for sizes on both sides of every rule."""

from __future__ import annotations

import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlxgen_vision.families.llava_onevision import tiled_pictures
from mlxgen_vision.image import resize
from mlxgen_vision.processors.anyres import AnyResSettings, best_grid, unpadded, views
from mlxgen_vision.processors.llava import SquareSettings, pad_to_square, square_image
from mlxgen_vision.processors.llava_onevision import (
    FrameSettings,
    max_tiles,
    picture_views,
    reduced,
    sampled_frames,
    spread,
)
from mlxgen_vision.towers.anyres import large_view, resample, with_line_ends
from PIL import Image

from mlxgen.errors import MediaError, UnsupportedError
from mlxgen.request import MediaOptions

SIZES = [
    (70, 100),
    (163, 101),
    (56, 56),
    (1, 1),
    (5, 7),
    (200, 3),
    (3, 200),
    (111, 112),
    (113, 112),
    (400, 300),
    (57, 300),
]
MORE = [(768, 1024), (2304, 2304), (4000, 3000), (384, 768), (385, 767), (1080, 1920), (1, 500), (500, 1), (337, 1009)]
NEXT = ((56, 112), (112, 56), (112, 112), (168, 56), (56, 168))
NEXT_PUBLISHED = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
ONEVISION = tuple((rows * 56, columns * 56) for rows in (1, 2, 3) for columns in (1, 2, 3))
ONEVISION_PUBLISHED = tuple((rows * 384, columns * 384) for rows in range(1, 7) for columns in range(1, 7))


@pytest.fixture
def one_axis_at_a_time(monkeypatch):
    """Pillow 13 may take the vertical pass first; models were trained with the horizontal one first."""
    real = Image.Image.resize

    def both(self, size, resample=None, *_, **__):
        return real(real(self, (size[0], self.height), resample), size, resample)

    monkeypatch.setattr(Image.Image, "resize", both)


def picture(height: int, width: int) -> np.ndarray:
    noise = np.random.default_rng(height * 10_000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.ascontiguousarray(noise)


def settings_of(folder, image, *, video=None) -> None:
    (folder / "processor_config.json").write_text(
        json.dumps({"image_processor": image, "video_processor": video or {}})
    )


def theirs(name: str, rgb: np.ndarray, **settings) -> np.ndarray:
    """What transformers' Pillow processor makes of one picture: (views, height, width, 3), normalised."""
    module = pytest.importorskip(f"transformers.models.{name}.image_processing_pil_{name}")
    maker = next(value for key, value in vars(module).items() if key.endswith("ImageProcessorPil"))
    made = np.array(maker(**settings)(images=[[Image.fromarray(rgb)]])["pixel_values"][0])
    return made.reshape(-1, *made.shape[-3:]).transpose(0, 2, 3, 1)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_square_pictures_equal_transformers(one_axis_at_a_time, tmp_path, size, pad):
    image = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "do_pad": pad}
    settings_of(tmp_path, image)
    settings = SquareSettings.read(tmp_path, 56)
    ours = square_image(picture(*size), settings, resize)
    assert np.abs(theirs("llava", picture(*size), **image)[0] - settings.normalisation(ours)).max() <= 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_views_equal_transformers(one_axis_at_a_time, tmp_path, size):
    image = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "image_grid_pinpoints": [*NEXT]}
    settings_of(tmp_path, image)
    settings = AnyResSettings.read(tmp_path, {}, 56, ())
    ours = views(picture(*size), settings, resize)
    expected = theirs("llava_next", picture(*size), **image)
    assert ours.shape == expected.shape
    assert np.abs(expected - settings.normalisation(ours)).max() <= 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_both_forms_of_a_picture_equal_transformers(one_axis_at_a_time, tmp_path, size):
    image = {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": [list(grid) for grid in ONEVISION]}
    settings_of(tmp_path, image)
    settings = AnyResSettings.read(tmp_path, {}, 56, ())
    ours = settings.normalisation(picture_views(picture(*size), settings, resize))
    expected = theirs("llava_onevision", picture(*size), **image)
    assert ours[1:].shape == expected.shape
    assert np.abs(expected - ours[1:]).max() <= 1e-5
    module = pytest.importorskip("transformers.models.llava_onevision.image_processing_pil_llava_onevision")
    two = [[Image.fromarray(picture(*size))] * 2]
    padded = np.array(module.LlavaOnevisionImageProcessorPil(**image)(images=two)["pixel_values"][1])
    assert np.abs(padded.transpose(0, 2, 3, 1) - ours[:1]).max() <= 1e-5


@pytest.mark.parametrize("size", [*SIZES, *MORE])
def test_numbers_of_tokens_equal_transformers(size):
    height, width = size
    module = pytest.importorskip("transformers.models.llava_next.processing_llava_next")
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=[list(grid) for grid in NEXT_PUBLISHED]),
        patch_size=14,
        num_additional_image_tokens=1,
    )
    cls = module.LlavaNextProcessor
    processor._get_unpadded_features = lambda *arguments: cls._get_unpadded_features(processor, *arguments)
    expected = cls._get_number_of_features(processor, height, width, 336, 336) - 1  # "default": no class token
    rows, columns = (edge // 14 for edge in best_grid(size, NEXT_PUBLISHED))
    window = unpadded(size, rows, columns)
    assert 576 + window.rows * (window.columns + 1) == expected

    module = pytest.importorskip("transformers.models.llava_onevision.processing_llava_onevision")
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=[list(grid) for grid in ONEVISION_PUBLISHED]),
        num_image_tokens=729,
        vision_aspect_ratio="anyres_max_9",
    )
    cls = module.LlavaOnevisionProcessor
    processor._get_unpadded_features = lambda *arguments: cls._get_unpadded_features(processor, *arguments)
    expected = cls._get_number_of_features(processor, height, width, 384, 384)
    rows, columns = (27 * (edge // 384) for edge in best_grid(size, ONEVISION_PUBLISHED))
    rows, columns = reduced(unpadded(size, rows, columns), 27, 9)
    assert 729 + rows * (columns + 1) == expected


def test_the_larger_view_is_put_together_in_reading_order():
    """Each patch's features are its place in the larger view."""
    side, grid = 3, (2, 3)
    tiles = np.empty((6, 9, 2), np.float32)
    for tile in range(6):
        for patch in range(9):
            tiles[tile, patch] = (tile // 3 * side + patch // side, tile % 3 * side + patch % side)
    window = unpadded((30, 60), 6, 9)
    assert (window.top, window.bottom) == (1, 5)
    view = np.array(window.cut(large_view(mx.array(tiles), grid, side)))
    assert view.tolist() == [[[row, column] for column in range(9)] for row in range(1, 5)]
    ended = np.array(with_line_ends(mx.array(view), mx.array([-1.0, -1.0])))
    assert ended.shape == (4 * 10, 2)
    assert [at for at in range(40) if ended[at, 0] < 0] == [9, 19, 29, 39]


@pytest.mark.parametrize(("old", "new"), [((4, 4), (2, 2)), ((27, 27), (14, 14)), ((7, 12), (5, 3)), ((3, 5), (3, 5))])
def test_resampling_is_bilinear_between_centres(old, new):
    view = np.random.default_rng(1).standard_normal((*old, 3)).astype(np.float32)
    expected = np.empty((*new, 3))
    for row in range(new[0]):
        for column in range(new[1]):
            y = max((row + 0.5) * old[0] / new[0] - 0.5, 0)
            x = max((column + 0.5) * old[1] / new[1] - 0.5, 0)
            top, left = int(y), int(x)
            low, right = min(top + 1, old[0] - 1), min(left + 1, old[1] - 1)
            above = view[top, left] * (1 - (x - left)) + view[top, right] * (x - left)
            below = view[low, left] * (1 - (x - left)) + view[low, right] * (x - left)
            expected[row, column] = above * (1 - (y - top)) + below * (y - top)
    assert np.abs(np.array(resample(mx.array(view), *new)) - expected).max() <= 1e-5


def test_frames_are_one_a_second_or_thirty_two_evenly_spread_ones():
    settings = FrameSettings(56, "bicubic", normalisation=None)
    assert sampled_frames(50, 24.6, settings) == [0, 25]
    assert sampled_frames(32 * 25, 25.0, settings) == [25 * second for second in range(32)]
    assert sampled_frames(32 * 25 + 1, 25.0, settings) == np.linspace(0, 800, 32, dtype=int).tolist()
    assert sampled_frames(3, 0.2, settings) == [0, 1, 2]
    slow = settings.limited(MediaOptions(fps=2.0, max_frames=3))
    assert sampled_frames(40, 10.0, slow) == [0, 19, 39]
    assert spread(4, 9) == [0, 1, 2, 3]


def test_forms_of_pictures_follow_from_the_runs():
    assert tiled_pictures([21], [21], 5) == [True]
    assert tiled_pictures([5], [21], 5) == [False]
    assert tiled_pictures([10, 5], [21, 30, 21], 5) == [False] * 3
    assert tiled_pictures([21, 5, 30], [21, 21, 30], 5) == [True, False, True], "turns of a raw session"
    assert tiled_pictures([20], [20, 20, 20, 20], 5) == [False] * 4
    assert tiled_pictures([20, 5], [20, 20], 5) == [True, False], "four padded ones there are not"
    assert tiled_pictures([6], [21, 21], 5) == [False, False], "nothing fits; the tokens will be counted"


@pytest.mark.parametrize(
    "image",
    [
        {"size": {"height": 224, "width": 224}},
        {"size": {"shortest_edge": 56}, "do_center_crop": False},
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 48, "width": 56}},
        {"size": {"height": 56, "width": 56}, "do_resize": False},
        {"size": {"shortest_edge": "56"}},
    ],
)
def test_square_settings_that_make_other_sizes_are_refused(tmp_path, image):
    settings_of(tmp_path, image)
    with pytest.raises(UnsupportedError, match="image processor has"):
        SquareSettings.read(tmp_path, 56)


@pytest.mark.parametrize(
    "image",
    [{"size": 112}, {"image_grid_pinpoints": [[56, 100]]}, {"image_grid_pinpoints": [[0, 56]]}, {"do_resize": False}],
)
def test_grids_that_do_not_fit_the_tower_are_refused(tmp_path, image):
    settings_of(tmp_path, image)
    with pytest.raises(UnsupportedError, match="published with the model"):
        AnyResSettings.read(tmp_path, {}, 56, ((56, 112),))


def test_settings_are_read_from_any_layout(tmp_path):
    siglip = {"size": {"height": 56, "width": 56}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    settings_of(tmp_path, siglip)
    stretched = SquareSettings.read(tmp_path, 56)
    assert (stretched.keep_ratio, stretched.pad, stretched.normalisation.mean) == (False, False, (0.5, 0.5, 0.5))
    assert FrameSettings.read(tmp_path, 56).normalisation == stretched.normalisation
    (tmp_path / "processor_config.json").unlink()
    assert AnyResSettings.read(tmp_path, {"image_grid_pinpoints": [[112, 56]]}, 56, ()).grids == ((112, 56),)
    assert AnyResSettings.read(tmp_path, {}, 56, ((56, 112),)).grids == ((56, 112),)
    assert SquareSettings.read(tmp_path, 56).keep_ratio, "CLIP's own rule where nothing is said"
    settings_of(tmp_path, {}, video={"size": {"height": 28, "width": 28}})
    with pytest.raises(UnsupportedError, match="video processor"):
        FrameSettings.read(tmp_path, 56)


def test_a_thread_of_a_picture_is_refused_before_it_is_blown_up():
    with pytest.raises(MediaError, match="max_image_size"):
        pad_to_square(np.zeros((1, 20_000, 3), np.uint8), (0, 0, 0))
    settings = SquareSettings(336, False, True, "bicubic", normalisation=None)
    with pytest.raises(MediaError, match="max_image_size"):
        square_image(np.zeros((2_000, 1, 3), np.uint8), settings, resize)


@pytest.mark.parametrize("ratio", ["anyres", "pad", "anyres_max_0", "anyres_max_9x"])
def test_other_aspect_ratios_are_refused(ratio):
    assert max_tiles("anyres_max_9") == 9
    with pytest.raises(UnsupportedError, match="vision_aspect_ratio"):
        max_tiles(ratio)
