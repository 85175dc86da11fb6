"""Sizes, tiles and words of Idefics3 and SmolVLM, against transformers' own processor and number words."""

from __future__ import annotations

import json

import numpy as np
import pytest
from mlxgen_vision.image import resize
from mlxgen_vision.processors.idefics3 import TilingSettings, image_text, longest_edge_size, tile_image
from mlxgen_vision.processors.settings import Normalisation
from mlxgen_vision.processors.smolvlm import (
    FrameSettings,
    given_frames,
    number_in_words,
    sampled_frames,
    video_text,
)
from PIL import Image

from mlxgen.errors import InvalidValueError, UnsupportedError
from mlxgen.request import MediaOptions

SETTINGS = {"max_image_size": {"longest_edge": 64}, "size": {"longest_edge": 256}}
SIZES = [(10, 10), (1, 1), (70, 100), (163, 101), (8, 300), (300, 8), (64, 64), (257, 256), (31, 90), (100, 33)]


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_tiles_equal_transformers(size, split):
    processor = pytest.importorskip("transformers.models.idefics3.image_processing_pil_idefics3")
    theirs = processor.Idefics3ImageProcessorPil(**SETTINGS, do_image_splitting=split)
    rgb = noise(*size)
    made = theirs(images=[[Image.fromarray(rgb)]], return_row_col_info=True)
    ours = tile_image(rgb, TilingSettings.of(SETTINGS | {"do_image_splitting": split}), resize)
    assert [[ours.rows]] == made["rows"]
    assert [[ours.columns]] == made["cols"]
    pixels = np.array(made["pixel_values"])[0].transpose(0, 2, 3, 1)
    assert pixels.shape == ours.pixels.shape
    # Pillow 13 takes the vertical pass first where a picture gets relatively lower; the models were trained without.
    if size[1] >= size[0]:
        assert np.abs(pixels - TilingSettings.of(SETTINGS).normalisation(ours.pixels)).max() <= 1e-6


def test_longest_edge_sizes():
    assert longest_edge_size(70, 100, 128) == (90, 128)  # 89.6 -> 89 -> even
    assert longest_edge_size(8, 2000, 2048) == (8, 2048)
    assert longest_edge_size(1, 5000, 2048) == (1, 2048)
    assert longest_edge_size(300, 200, 5000) == (4096, 2731)  # by way of 5000 x 3334


def test_the_callers_bounds_mean_fewer_tiles():
    rgb = noise(100, 200)
    settings = TilingSettings.of(SETTINGS)
    assert len(tile_image(rgb, settings, resize).pixels) == 9
    by_edge = settings.limited(MediaOptions(max_image_size=128), 100, 200)
    assert len(tile_image(rgb, by_edge, resize).pixels) == 3
    by_area = settings.limited(MediaOptions(max_pixels=128 * 64), 100, 200)
    assert by_area.longest_edge == 128
    assert settings.limited(MediaOptions(min_pixels=4, max_image_size=5000), 100, 200).longest_edge == 256


def test_text_of_tiles():
    assert image_text(0, 0, 2) == "<fake_token_around_image><global-img><image><image><fake_token_around_image>"
    fake = "<fake_token_around_image>"
    assert image_text(2, 1, 1) == (
        f"{fake}<row_1_col_1><image>\n{fake}<row_2_col_1><image>\n\n{fake}<global-img><image>{fake}"
    )


FRAMES = FrameSettings(64, 64, "lanczos", 1.0, 10, Normalisation())


def test_frames_of_a_short_video_are_spread_over_all_of_it():
    assert sampled_frames(90, 30.0, FRAMES) == [0, 44, 89]
    assert sampled_frames(1, 30.0, FRAMES) == [0]
    assert sampled_frames(5, 1.0, FRAMES) == [0, 1, 2, 3, 4]


def test_a_second_is_left_out_at_both_ends_of_a_long_video():
    indices = sampled_frames(900, 30.0, FRAMES)
    assert (indices[0], indices[-1], len(indices)) == (30, 870, 10)
    assert sampled_frames(360, 30.0, FRAMES)[0] == 0  # 12 s less 2 is not more than 10


def test_the_callers_rate_and_bound():
    assert len(sampled_frames(90, 30.0, FRAMES.limited(MediaOptions(fps=2.0)))) == 6
    assert len(sampled_frames(90, 30.0, FRAMES.limited(MediaOptions(max_frames=2)))) == 2
    assert given_frames(40, None) == list(range(40))
    assert given_frames(5, 3) == [0, 2, 4]


def test_video_text_names_frames_times_and_length():
    text = video_text([0.0, 61.5], 3725.9, 1)
    picture = image_text(0, 0, 1)
    assert text == (
        "You are provided the following series of two frames from a 1:02:05 [H:MM:SS] video.\n"
        f"\nFrame from 00:00:{picture}\nFrame from 01:01:{picture}\n\n"
    )


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "one"),
        (12, "twelve"),
        (20, "twenty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (115, "one hundred and fifteen"),
        (768, "seven hundred and sixty-eight"),
        (1001, "one thousand and one"),
        (1100, "one thousand, one hundred"),
        (12345, "twelve thousand, three hundred and forty-five"),
    ],
)
def test_numbers_in_words_as_num2words_writes_them(number, words):
    assert number_in_words(number) == words


def test_numbers_without_words_are_refused():
    with pytest.raises(InvalidValueError, match="1000000"):
        number_in_words(1_000_000)


def test_settings_are_read_in_old_and_new_forms(tmp_path):
    image = {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}, "resample": 1}
    old = tmp_path / "old"
    old.mkdir()
    sampling = {"fps": 2, "max_frames": 48, "video_size": {"longest_edge": 400}}
    _write(old / "preprocessor_config.json", image | {"video_sampling": sampling})
    new = tmp_path / "new"
    new.mkdir()
    video = image | {"size": {"longest_edge": 400}, "fps": 2, "num_frames": 48}
    _write(new / "processor_config.json", {"image_processor": image, "video_processor": video})
    assert TilingSettings.read(old) == TilingSettings.read(new) == TilingSettings.of(image)
    assert FrameSettings.read(old) == FrameSettings.read(new)
    assert (FrameSettings.read(old).max_frames, FrameSettings.read(old).longest_edge) == (48, 400)
    with pytest.raises(UnsupportedError, match="resample"):
        TilingSettings.of(image | {"resample": 5})


def _write(path, value):
    path.write_text(json.dumps(value))
