"""Grids, words and places of Pixtral's and Mistral 3's pictures; the tower in steps, and against its definition."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from mlxgen_vision.families.mistral3 import MergingProjector
from mlxgen_vision.families.pixtral import GridModel
from mlxgen_vision.processors.pixtral import GridSettings, GridWords
from mlxgen_vision.processors.settings import Normalisation
from mlxgen_vision.towers import pace
from mlxgen_vision.towers.pixtral import PatchMerger, PixtralConfig, PixtralTower, pixtral_weights
from mlxgen_vision.towers.projectors import ProjectorShape
from vision_harness.jobs import model as tiny_model

from mlxgen.errors import InvalidValueError, MediaError, PlaceholderError, UnsupportedError
from mlxgen.inputs import PreparedMedium
from mlxgen.request import ImagePart, MediaOptions, VideoPart
from mlxgen.tokenizer import ChatTokenizer

SIZES = [(10, 10), (1, 1), (128, 128), (129, 128), (163, 101), (70, 100), (8, 120), (300, 8), (1000, 999), (31, 33)]


def settings(token: int = 16, edge: int = 128) -> GridSettings:
    return GridSettings(token, edge, edge, "bicubic", Normalisation())


@pytest.mark.parametrize("token", [16, 28])
@pytest.mark.parametrize("size", SIZES)
def test_grids_equal_transformers(size, token):
    theirs = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    wanted = theirs.get_resize_output_image_size(np.zeros((3, *size)), (128, 128), (token, token), "channels_first")
    rows, columns = settings(token).grid(*size, MediaOptions())
    assert (rows * token, columns * token) == wanted


def test_the_callers_bounds_mean_fewer_tokens():
    own = settings(edge=1024)
    assert own.grid(640, 480, MediaOptions()) == (40, 30)
    assert own.grid(640, 480, MediaOptions(max_image_size=320)) == (20, 15)
    assert own.grid(640, 480, MediaOptions(max_pixels=320 * 240)) == (20, 15)
    assert own.grid(64, 48, MediaOptions(min_pixels=320 * 240)) == (20, 15)


def test_a_picture_that_would_vanish_is_refused():
    with pytest.raises(MediaError, match="2000 × 1 pixels.*128 × 128; crop it"):
        settings().grid(1, 2000, MediaOptions())


def test_words():
    assert GridWords("i", ";", ".").text(2, 3) == "iii;iii."
    assert GridWords().text(1, 1) == "[IMG][IMG_END]"


def test_settings_are_read_in_old_and_new_forms(tmp_path):
    image = {"size": {"longest_edge": 1540}, "resample": 3, "patch_size": {"height": 14, "width": 14}}
    words = {"patch_size": 14, "spatial_merge_size": 2, "image_token": "<i>"}
    old, new, square = (tmp_path / name for name in ("old", "new", "square"))
    for folder in (old, new, square):
        folder.mkdir()
    (old / "preprocessor_config.json").write_text(json.dumps(image))
    (old / "processor_config.json").write_text(json.dumps(words))
    (new / "processor_config.json").write_text(json.dumps({"image_processor": image} | words))
    read = GridSettings.read(old, patch=14, merge=2)
    assert read == GridSettings.read(new, patch=14, merge=2)
    assert (read.token, read.height, read.width) == (28, 1540, 1540)
    assert read.normalisation.mean[0] == 0.48145466
    assert GridWords.read(old) == GridWords("<i>", "[IMG_BREAK]", "[IMG_END]")
    with pytest.raises(UnsupportedError, match="patch_size 14, the model 16"):
        GridSettings.read(old, patch=16, merge=2)
    (square / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 64, "width": 32}}))
    read = GridSettings.read(square, patch=16, merge=1)
    assert read.grid(64, 64, MediaOptions()) == (2, 2)
    (square / "preprocessor_config.json").write_text(json.dumps({"do_resize": False}))
    with pytest.raises(UnsupportedError, match="do_resize false"):
        GridSettings.read(square, patch=16, merge=1)


@pytest.fixture(scope="module")
def model() -> GridModel:
    loaded = tiny_model("mistral3").vision
    assert isinstance(loaded, GridModel)
    return loaded


def finish(model, part) -> PreparedMedium:
    units = model.prepare(part)
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)


def test_a_picture_is_resized_once(model):
    medium = finish(model, ImagePart(noise(60, 90), MediaOptions(max_image_size=45)))
    assert medium.geometry == {"rows": 2, "columns": 3}
    assert medium.frames[0].shape == (32, 48, 3)
    assert (model.num_parts(medium), model.frames_of_part(medium, 0)) == (1, 1)
    *_, last = model.encode(medium, 0)
    assert last["features"].shape == (6, 64)
    with pytest.raises(InvalidValueError, match="max_pixels is 0"):
        next(model.prepare(ImagePart(noise(8, 8), MediaOptions(max_pixels=0))))


def test_no_video(model):
    with pytest.raises(UnsupportedError, match="mistral3 takes pictures only"):
        next(model.prepare(VideoPart("a.mp4")))


def test_a_row_is_a_span(model):
    media = [PreparedMedium("image", source_name=name, geometry={"rows": 2, "columns": 3}) for name in "ab"]
    image, row_end, end = (model.image_token + offset for offset in range(3))
    picture = [image] * 3 + [row_end] + [image] * 3 + [end]
    spans = model.locate([9, *picture, 9, *picture], media)
    found = [(span.start, span.end, span.medium, span.row_start, span.row_end) for span in spans]
    assert found == [(1, 4, 0, 0, 3), (5, 8, 0, 3, 6), (10, 13, 1, 0, 3), (14, 17, 1, 3, 6)]
    assert model.atomic(spans) == ()
    with pytest.raises(PlaceholderError, match="no 3 tokens"):
        model.locate([9, *picture, 9, *picture[1:]], media)
    with pytest.raises(PlaceholderError, match="no medium for it"):
        model.locate([9, *picture, 9, *picture], media[:1])
    with pytest.raises(PlaceholderError, match="2 placeholders"):
        model.expand("[IMG] and [IMG]", media[:1])


def test_a_template_that_looks_for_words_under_content(model):
    """The first one published with Pixtral; what a user types is text there as well."""
    template = "{% for part in messages[0]['content'] %}{{ '[IMG]' if part['type'] == 'image' else part['content'] }}"
    tokenizer = tiny_model("mistral3").tokenizer
    chat = ChatTokenizer(tokenizer)
    typed = "What is [IMG]?"
    content = model.content_for_template([ImagePart("a.png"), typed])
    before, tokenizer.chat_template = tokenizer.chat_template, template + "{% endfor %}"
    try:
        pieces = chat.pieces([{"role": "user", "content": content}], add_generation_prompt=True)
    finally:
        tokenizer.chat_template = before
    assert [(piece.text, piece.plain) for piece in pieces] == [("[IMG]", False), (typed, True)]
    assert model.content_for_template(["a", "b"]) == "ab"


CONFIG = PixtralConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, patch_size=4, hidden_act="silu"
)


@pytest.fixture(scope="module")
def tower() -> PixtralTower:
    mx.random.seed(1)
    made = PixtralTower(CONFIG)
    mx.eval(made.parameters())
    return made


def last_state(x: mx.array, rows: int, columns: int) -> mx.array:
    return x


def test_a_step_is_a_block_on_a_slow_machine(tower, monkeypatch):
    pixels = np.random.default_rng(0).standard_normal((8, 12, 3)).astype(np.float32)
    *_, whole = tower.encode(pixels, last_state)
    monkeypatch.setattr(pace, "STEP_FLOPS", 0.0)
    *before, stepped = tower.encode(pixels, last_state)
    assert before == [None] * 3
    assert mx.array_equal(whole["features"], stepped["features"])


def test_the_tower_is_what_the_paper_says(tower):
    """Against a NumPy transcription: patches, RMS norms, rotation of pairs by rows and columns in turn, gated SiLU."""
    pixels = np.random.default_rng(0).standard_normal((8, 12, 3)).astype(np.float32)
    *_, last = tower.encode(pixels, last_state)

    def norm(x, layer):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * np.array(layer.weight)

    def dense(x, layer):
        return x @ np.array(layer.weight).T

    def rotate(x):
        """Pair f of a head is rotated by theta^(-2f/8) times the row for even f, the column for odd f."""
        x = x.reshape(6, 2, 8)
        out = np.empty_like(x)
        places = [(row, column) for row in range(2) for column in range(3)]
        for number, place in enumerate(places):
            for at, pair in enumerate((0, 2, 1, 3)):
                angle = place[pair % 2] * 10000.0 ** (-2 * pair / 8)
                first, second = x[number, :, at], x[number, :, at + 4]
                out[number, :, at] = first * np.cos(angle) - second * np.sin(angle)
                out[number, :, at + 4] = second * np.cos(angle) + first * np.sin(angle)
        return out.transpose(1, 0, 2)

    patches = pixels.reshape(2, 4, 3, 4, 3).transpose(0, 2, 1, 3, 4).reshape(6, -1)
    x = norm(patches @ np.array(tower.patch_conv.weight).reshape(16, -1).T, tower.ln_pre)
    for block in tower.transformer.layers:
        y, own = norm(x, block.attention_norm), block.attention
        query, key = rotate(dense(y, own.q_proj)), rotate(dense(y, own.k_proj))
        value = dense(y, own.v_proj).reshape(6, 2, 8).transpose(1, 0, 2)
        scores = np.exp(query @ key.transpose(0, 2, 1) / np.sqrt(8))
        y = (scores / scores.sum(-1, keepdims=True)) @ value
        x = x + dense(y.transpose(1, 0, 2).reshape(6, 16), own.o_proj)
        y, own = norm(x, block.ffn_norm), block.feed_forward
        gate = dense(y, own.gate_proj)
        x = x + dense(gate / (1 + np.exp(-gate)) * dense(y, own.up_proj), own.down_proj)
    assert np.abs(np.array(last["features"]) - x).max() < 1e-5


def test_merging_joins_squares_channel_by_channel():
    merger = PatchMerger(2, 2)
    merger.merging_layer.weight = mx.eye(2, 8)
    patches = mx.arange(16).reshape(8, 2).astype(mx.float32)  # 2 rows of 4: patch p has values 2p, 2p + 1
    # Channel 0 of the square's four patches comes first: 0, 2, then 8, 10 of the row below.
    assert merger(patches, 2, 4).tolist() == [[0.0, 2.0], [4.0, 6.0]]
    projector = MergingProjector(ProjectorShape(2, 6, bias=False), 2, 1e-5)
    assert projector.merge(patches, 2, 4).shape == (2, 6)


def test_weights_in_both_orders_become_the_same():
    name = "vision_tower.patch_conv.weight"
    first = mx.random.normal((16, 3, 4, 4))
    made = [
        pixtral_weights({name: weight}, "vision_tower.", CONFIG)[name]
        for weight in (first, first.transpose(0, 2, 3, 1))
    ]
    assert mx.array_equal(*made)


def test_unknown_towers_are_refused():
    assert PixtralConfig.from_dict({}) == PixtralConfig()
    assert PixtralConfig.from_dict({"rope_theta": 500.0}).theta == 500.0
    assert PixtralConfig.from_dict({"rope_parameters": {"rope_type": "axial", "rope_theta": 7.0}}).theta == 7.0
    assert PixtralConfig.from_dict({"patch_size": [14, 14]}).patch_size == 14
    for config, problem in (
        ({"hidden_act": "relu6"}, "hidden_act is 'relu6'"),
        ({"patch_size": [14, 16]}, "patches must be square"),
        ({"hidden_size": 100, "num_attention_heads": 16}, "16 attention heads"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'; Pixtral's is 'axial'"),
    ):
        with pytest.raises(UnsupportedError, match=problem):
            PixtralConfig.from_dict(config)
