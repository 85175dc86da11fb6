"""Gemma 4's rules by themselves: sizes, frames, the words around them, the tower's parts, the text config."""

from __future__ import annotations

import logging
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlxgen_vision.processors.gemma4 import FrameSettings, MediaWords, TokenBudget, evenly
from mlxgen_vision.processors.settings import Normalisation
from mlxgen_vision.text_config import gemma4_arguments
from mlxgen_vision.towers.gemma4 import ClippedLinear, Gemma4Tower, Gemma4VisionConfig
from vision_harness.jobs import model

from mlxgen.errors import InvalidValueError, MediaError, PlaceholderError, UnsupportedError
from mlxgen.request import ImagePart, MediaOptions, VideoPart

BUDGET = TokenBudget(16, 3, 280, "bicubic", Normalisation())
PLAIN = MediaOptions()


# Sizes as `get_aspect_ratio_preserving_size` of transformers 5.24 gives them.
@pytest.mark.parametrize(
    ("original", "budget", "wanted"),
    [
        ((1080, 1920), 280, (576, 1056)),
        ((1920, 1080), 280, (1056, 576)),
        ((64, 96), 70, (288, 480)),
        ((48, 48), 1120, (1584, 1584)),
        ((30, 9000), 280, (48, 13440)),
        ((9000, 30), 70, (3360, 48)),
        ((1, 100), 280, (48, 8016)),
    ],
)
def test_pictures_fill_the_budget(original, budget, wanted):
    size = replace(BUDGET, max_tokens=budget).size(*original, PLAIN)
    assert size == wanted
    rows, columns = BUDGET.tokens(*size)
    assert rows * columns <= budget


def test_the_callers_bounds_lower_the_budget():
    small = BUDGET.size(1080, 1920, MediaOptions(max_pixels=100_000))
    assert small[0] * small[1] <= 100_000
    assert small == (192, 384)
    assert max(BUDGET.size(1080, 1920, MediaOptions(max_image_size=400))) == 384
    assert BUDGET.size(1080, 1920, MediaOptions(max_pixels=10**9)) == BUDGET.size(1080, 1920, PLAIN)
    assert BUDGET.size(1080, 1920, MediaOptions(min_pixels=10**9)) == BUDGET.size(1080, 1920, PLAIN)
    assert BUDGET.size(10, 1000, MediaOptions(max_image_size=100)) == (48, 96)
    assert BUDGET.size(1000, 10, MediaOptions(max_pixels=5000)) == (96, 48)


@pytest.mark.parametrize("options", [MediaOptions(max_pixels=2000), MediaOptions(max_image_size=40)])
@pytest.mark.parametrize("original", [(50, 50), (10, 1000), (1000, 10)])
def test_bounds_below_one_token_are_refused(original, options):
    with pytest.raises(InvalidValueError, match="less than one token of 48x48"):
        BUDGET.size(*original, options)


def test_frames_are_spread_evenly():
    settings = FrameSettings(BUDGET, 32)
    assert settings.sample(320, 30.0, PLAIN) == [10 * index for index in range(32)]
    assert settings.sample(100, 30.0, PLAIN) == [index * 100 // 32 for index in range(32)]
    assert settings.sample(8, 30.0, PLAIN) == list(range(8)), "all there are"
    assert settings.sample(300, 30.0, MediaOptions(fps=1)) == [30 * index for index in range(10)]
    assert settings.sample(300, 30.0, MediaOptions(fps=1, max_frames=4)) == [0, 75, 150, 225]
    assert settings.sample(10, 30.0, MediaOptions(fps=0.1)) == [0]
    assert evenly(5, 2) == [0, 2]


def test_frames_have_their_minute_and_second():
    words = MediaWords("<", ">", "i", "v")
    assert words.frames([0.0, 61.9, 3600.0], 2) == "00:00 <vv> 01:01 <vv> 60:00 <vv>"
    assert words.picture(3) == "<iii>"


def test_a_matrix_is_bounded_on_both_sides():
    layer = ClippedLinear(2, 2, clipped=True)
    layer.linear.weight = mx.array([[1.0, 0.0], [0.0, 10.0]])
    layer.input_min, layer.input_max = mx.array(-1.0), mx.array(2.0)
    layer.output_min, layer.output_max = mx.array(-3.0), mx.array(15.0)
    assert layer(mx.array([5.0, -5.0])).tolist() == [2.0, -3.0]
    assert layer(mx.array([-5.0, 5.0])).tolist() == [-1.0, 15.0]
    layer.linear.weight = layer.linear.weight.astype(mx.bfloat16)
    assert layer(mx.array([1.0, 1.0], mx.bfloat16)).dtype == mx.bfloat16
    assert set(layer.parameters()) == {"linear", "input_min", "input_max", "output_min", "output_max"}


def test_pooling_averages_squares_and_standardises_in_float32():
    config = Gemma4VisionConfig(hidden_size=4, pooling_kernel_size=2, position_embedding_size=8, standardize=True)
    tower = Gemma4Tower(config)
    tower.std_bias, tower.std_scale = mx.full((4,), 1.0), mx.full((4,), 0.5)
    patches = mx.arange(4 * 6, dtype=mx.float32).reshape(4, 6)
    pooled = tower.pool(mx.broadcast_to(patches[..., None], (4, 6, 4)).reshape(24, 4), 4, 6)
    squares = np.arange(24.0).reshape(2, 2, 3, 2).mean(axis=(1, 3)).reshape(-1)
    assert np.allclose(np.array(pooled), ((squares * 2 - 1) * 0.5)[:, None])
    big = tower.pool(mx.full((24, 4), 6e4, mx.float16), 4, 6)
    assert big.dtype == mx.float16
    assert mx.isfinite(big).all(), "twice 60,000 is beyond float16, half of it isn't"


def test_what_full_layers_have_of_their_own_comes_in_two_forms():
    kinds = ["sliding_attention", "full_attention"]
    common = {"num_hidden_layers": 2, "layer_types": kinds, "attention_k_eq_v": True, "head_dim": 16}
    once = gemma4_arguments(common | {"global_head_dim": 32, "num_global_key_value_heads": 1})
    listed = gemma4_arguments(common | {"per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}}})
    assert once == listed
    assert gemma4_arguments({})["global_head_dim"] == 512
    assert gemma4_arguments({"num_hidden_layers": 7})["layer_types"][-2:] == ["full_attention"] * 2
    assert gemma4_arguments({"final_logit_softcapping": None})["final_logit_softcapping"] is None
    without = gemma4_arguments(common | {"num_global_key_value_heads": 1, "attention_k_eq_v": False})
    assert "num_global_key_value_heads" not in without


@pytest.mark.parametrize(
    "own", [{"0": {"head_dim": 32}}, {"1": {"num_key_value_heads": 1}}, {"1": {"sliding_window": 9}}]
)
def test_what_mlx_lms_model_cannot_follow_is_refused(own):
    config = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "per_layer_config": own}
    with pytest.raises(UnsupportedError, match="per_layer_config"):
        gemma4_arguments(config)


def test_encoders_and_towers_with_bias_are_refused():
    with pytest.raises(UnsupportedError, match="can't generate"):
        gemma4_arguments({"use_bidirectional_attention": "all"})
    with pytest.raises(UnsupportedError, match="attention_bias True"):
        Gemma4VisionConfig.from_dict({"attention_bias": True})
    with pytest.raises(UnsupportedError, match="hidden_act"):
        Gemma4VisionConfig.from_dict({"hidden_activation": "relu6"})


def prepared(part):
    units = model("gemma4").vision.prepare(part)
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value


def test_frames_without_a_rate_are_said_so(caplog):
    frames = np.zeros((3, 20, 30, 3), np.uint8)
    with caplog.at_level(logging.WARNING):
        medium = prepared(VideoPart(frames))
    assert "no frame rate known" in caplog.text
    assert (medium.geometry["fps"], medium.geometry["indices"]) == (24.0, [0, 1, 2])
    assert prepared(VideoPart(frames, MediaOptions(fps=2, max_frames=2))).geometry["indices"] == [0, 1]


def test_a_picture_too_long_for_the_position_table_is_refused():
    with pytest.raises(MediaError, match="patches long, the tower knows 32"):
        vision = model("gemma4").vision
        budget = replace(vision.parts.image, max_tokens=100)
        vision._size(budget, (10, 2000), PLAIN)


def test_media_and_placeholders_must_match():
    vision = model("gemma4").vision
    picture = prepared(ImagePart(np.zeros((20, 30, 3), np.uint8)))
    with pytest.raises(PlaceholderError, match="placeholder 1 is <|video|>"):
        vision.expand("<|video|>", [picture])
    with pytest.raises(PlaceholderError, match="no 8 tokens"):
        vision.locate([5] * 7, [picture])
    with pytest.raises(PlaceholderError, match="no medium for it"):
        vision.locate([5] * 9, [picture])
