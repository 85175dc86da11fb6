"""LFM2-VL's rules by themselves: views and their canvas, the words around them, positions, the text config."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlxgen_vision.families.lfm2_vl import lfm2_arguments
from mlxgen_vision.image import resize
from mlxgen_vision.processors.lfm2_vl import Views, ViewSettings, ViewWords
from mlxgen_vision.processors.settings import Normalisation
from mlxgen_vision.processors.tile_grid import TileLimits
from mlxgen_vision.towers.pixel_shuffle import merge_squares, pixel_shuffle
from mlxgen_vision.towers.siglip2 import resampling_matrix, siglip2_config
from vision_harness.jobs import model

from mlxgen.errors import PlaceholderError, UnsupportedError
from mlxgen.request import ImagePart, MediaOptions, VideoPart

# As published with LFM2-VL.
SETTINGS = ViewSettings(16, 2, 64, 256, 512, 2.0, TileLimits(2, 10), True, "bilinear", Normalisation())
PLAIN = MediaOptions()


# Grids and sizes as `Lfm2VlImageProcessor` of transformers 5.24 gives them.
@pytest.mark.parametrize(
    ("original", "grid", "whole"),
    [
        ((512, 512), (0, 0), (512, 512)),
        ((100, 100), (0, 0), (256, 256)),
        ((64, 1024), (0, 0), (64, 1024)),
        ((720, 720), (0, 0), (512, 512)),
        ((736, 736), (2, 2), (512, 512)),
        ((1080, 1920), (2, 4), (384, 672)),
        ((1920, 1080), (4, 2), (672, 384)),
        ((3000, 500), (6, 1), (1248, 192)),
        ((16, 4000), (0, 0), (32, 4000)),
    ],
)
def test_views(original, grid, whole):
    assert SETTINGS.views(original, PLAIN) == Views(grid, whole)


def test_the_callers_bounds_make_fewer_tiles():
    assert SETTINGS.views((1080, 1920), MediaOptions(max_pixels=500_000)).grid == (0, 0)
    assert SETTINGS.views((1080, 1920), MediaOptions(max_image_size=500)) == Views((0, 0), (288, 512))
    assert SETTINGS.views((1080, 1920), MediaOptions(min_pixels=10**7)).grid == (2, 4)


def test_without_a_whole_or_without_tiles():
    assert replace(SETTINGS, thumbnail=False).views((1080, 1920), PLAIN) == Views((2, 4), None)
    assert replace(SETTINGS, limits=None).views((1080, 1920), PLAIN) == Views((0, 0), (384, 672))
    single = replace(SETTINGS, limits=TileLimits(1, 10))
    assert single.views((800, 800), PLAIN).grid == (2, 2)
    assert single.views((721, 721), PLAIN) == Views((0, 0), (512, 512)), "one tile is the whole picture"


@pytest.mark.parametrize("views", [Views((2, 3), (32, 96)), Views((1, 2), None), Views((0, 0), (32, 64))])
def test_a_canvas_gives_its_views_back(views):
    small = replace(SETTINGS, tile=32)
    rgb = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    groups = small.groups(small.canvas(rgb, views, resize), views)
    wanted = []
    if views.grid != (0, 0):
        rows, columns = views.grid
        large = resize(rgb, (32 * rows, 32 * columns), "bilinear")
        wanted += [
            large[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
            for row in range(rows)
            for column in range(columns)
        ]
    if views.whole:
        wanted.append(resize(rgb, views.whole, "bilinear"))
    assert len(groups) == (views.grid != (0, 0)) + (views.whole is not None)
    shown = [view for group in groups for view in group]
    assert all(np.array_equal(a, b) for a, b in zip(shown, wanted, strict=True))


def test_the_words():
    words = ViewWords("i", "<", ">", "T", labels=True)
    assert words.text(Views((0, 0), (32, 64)), [2]) == "<ii>"
    two = "<|img_row_1_col_1|>i<|img_row_1_col_2|>i"
    assert words.text(Views((1, 2), (32, 96)), [1, 1, 3]) == f"<{two}Tiii>"
    assert words.text(Views((1, 2), None), [1, 1]) == f"<{two}>"
    assert replace(words, labels=False).text(Views((1, 2), (32, 96)), [1, 1, 3]) == "iiiii"


def test_positions_are_resampled_with_aligned_centres():
    assert np.array_equal(resampling_matrix(4, 4), np.eye(4, dtype=np.float32))
    wider = resampling_matrix(8, 4)
    assert np.allclose(wider[:3], [[1, 0, 0, 0], [0.75, 0.25, 0, 0], [0.25, 0.75, 0, 0]])
    fewer = resampling_matrix(2, 4)
    assert np.allclose(fewer, [[3 / 7, 3 / 7, 1 / 7, 0], [0, 1 / 7, 3 / 7, 3 / 7]])
    for length in (1, 3, 7, 31):
        assert np.allclose(resampling_matrix(length, 16).sum(axis=1), 1)


def test_squares_of_any_grid():
    x = mx.arange(2 * 24 * 3).reshape(2, 24, 3)
    merged = np.array(merge_squares(x, 4, 6, 2)).reshape(2, 2, 3, 4, 3)
    grid = np.array(x).reshape(2, 4, 6, 3)
    assert np.array_equal(merged[1, 0, 2], [grid[1, 0, 4], grid[1, 0, 5], grid[1, 1, 4], grid[1, 1, 5]])
    square = mx.arange(16 * 2).reshape(1, 16, 2)
    assert mx.array_equal(merge_squares(square, 4, 4, 2), pixel_shuffle(square, 2))


def test_the_text_config_in_its_forms():
    new = lfm2_arguments({"intermediate_size": 96, "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2})
    assert (new["block_dim"], new["conv_L_cache"]) == (2560, 3)
    assert "full_attn_idxs" not in new
    old = lfm2_arguments({"block_ff_dim": 96, "full_attn_idxs": [1], "num_hidden_layers": 2, "rope_theta": 5.0})
    assert (old["full_attn_idxs"], old["rope_theta"]) == ([1], 5.0)
    assert lfm2_arguments({"num_hidden_layers": 3})["full_attn_idxs"] == [0, 1, 2]


@pytest.mark.parametrize("config", [{"model_type": "lfm2_moe"}, {"rope_parameters": {"rope_type": "yarn"}}])
def test_other_text_models_are_refused(config):
    with pytest.raises(UnsupportedError, match="LFM2-VL's text model here is lfm2"):
        lfm2_arguments(config)


def test_a_position_table_that_is_not_square_is_refused():
    with pytest.raises(UnsupportedError, match="num_patches 200"):
        siglip2_config({"num_patches": 200})


def test_videos_and_wrong_placeholders_are_refused():
    vision = model("lfm2_vl").vision
    with pytest.raises(UnsupportedError, match="takes pictures only"):
        next(vision.prepare(VideoPart(np.zeros((2, 8, 8, 3), np.uint8))))
    medium = next(vision.prepare(ImagePart(np.zeros((60, 90, 3), np.uint8))))
    assert medium.geometry["grid"] != [0, 0]
    with pytest.raises(PlaceholderError, match="0 placeholders"):
        vision.expand("no picture", [medium])
    with pytest.raises(PlaceholderError, match="no 4 tokens"):
        vision.locate([3] * 3, [medium])
