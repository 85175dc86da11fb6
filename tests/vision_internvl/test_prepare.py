"""InternVL's tiles, frames and words; the tower against its definition."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from mlxgen_vision.families import internvl
from mlxgen_vision.families.internvl import InternVLModel
from mlxgen_vision.image import resize
from mlxgen_vision.processors.internvl import (
    FrameSettings,
    SquareSettings,
    TileSettings,
    TileWords,
    middle_frames,
    tile_image,
)
from mlxgen_vision.processors.settings import Normalisation
from mlxgen_vision.processors.tile_grid import TileLimits, closest_grid, cut
from mlxgen_vision.towers.images import Readout, encode_images
from mlxgen_vision.towers.internvl import InternVLConfig, InternVLTower, ShuffleProjector, internvl_weights
from mlxgen_vision.towers.projectors import ProjectorShape
from PIL import Image
from vision_harness.jobs import model as tiny_model

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import PlaceholderError, UnsupportedError
from mlxgen.request import ImagePart, MediaOptions, VideoPart

SIZES = [(10, 10), (1, 1), (70, 100), (163, 101), (8, 300), (300, 8), (64, 64), (200, 300), (31, 90), (100, 33), (5, 4)]
SQUARE = SquareSettings(56, "bicubic", Normalisation())
TILES = TileSettings(SQUARE, TileLimits(1, 6))


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, (*shape, 3), dtype=np.uint8)


@pytest.mark.parametrize(("low", "high"), [(1, 6), (1, 12), (2, 4), (1, 1)])
@pytest.mark.parametrize("size", SIZES)
def test_grids_equal_transformers(size, low, high):
    theirs = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    columns, rows = theirs.get_optimal_tiled_canvas(size, (56, 56), low, high)
    assert closest_grid(size, (56, 56), TileLimits(low, high)) == (rows, columns)


@pytest.mark.parametrize("size", SIZES)
def test_tiles_equal_transformers(size):
    theirs = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    processor = theirs.GotOcr2ImageProcessorPil(
        size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=6, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    rgb = noise(*size)
    made = processor(images=[Image.fromarray(rgb)])
    ours, rows, columns = tile_image(rgb, TILES, resize)
    assert made["num_patches"] == [len(ours)]
    assert len(ours) == rows * columns + (rows * columns > 1)
    pixels = np.array(made["pixel_values"]).transpose(0, 2, 3, 1)
    # Pillow 13 takes the vertical pass first where a picture gets relatively lower; the models were trained without.
    if size[1] >= size[0]:
        assert np.abs(pixels * 127.5 + 127.5 - ours).max() <= 1.01


def test_a_tie_goes_to_more_tiles_while_they_are_half_filled():
    # 1 : 1 has 1x1, 2x2; the latter where the picture has more than half of four tiles' pixels.
    limits = TileLimits(1, 4)
    assert closest_grid((79, 79), (56, 56), limits) == (1, 1)
    assert closest_grid((80, 80), (56, 56), limits) == (2, 2)
    with pytest.raises(UnsupportedError, match="no grid has 5 to 4 tiles"):
        TileLimits(5, 4).grids()


def test_cutting_goes_row_by_row():
    picture = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    tiles = cut(picture, 2, 3)
    assert tiles.shape == (6, 2, 2, 3)
    assert np.array_equal(tiles[4], picture[2:4, 2:4])


def test_the_callers_bounds_mean_fewer_tiles():
    assert TILES.grid(100, 300) == (1, 3)
    assert TILES.limited(MediaOptions()) == TILES
    assert TILES.limited(MediaOptions(max_pixels=2 * 56 * 56)).grid(100, 300) == (1, 2)
    assert TILES.limited(MediaOptions(max_image_size=120)).grid(100, 300) == (1, 2)
    assert TILES.limited(MediaOptions(max_image_size=10)).grid(100, 300) == (1, 1)
    few = TileSettings(SQUARE, TileLimits(3, 6)).limited(MediaOptions(max_pixels=2 * 56 * 56))
    assert few.limits == TileLimits(2, 2)


def test_middle_frames_are_those_of_transformers_sampling():
    # arange(total / count / 2, total, total / count), rounded down
    for total, count in ((90, 8), (8, 8), (7, 3), (300, 32), (33, 32)):
        step = total / count
        assert middle_frames(total, count) == [int(step / 2 + number * step) for number in range(count)]
    assert middle_frames(3, 8) == [0, 1, 2]
    assert middle_frames(5, 1) == [2]


def test_how_many_frames():
    frames = FrameSettings(SQUARE)
    assert len(frames.sampled(90, 30.0, MediaOptions())) == 8  # 3 s
    assert len(frames.sampled(600, 30.0, MediaOptions())) == 20
    assert len(frames.sampled(6000, 30.0, MediaOptions())) == 32
    assert len(frames.sampled(6000, 30.0, MediaOptions(max_frames=64))) == 64
    assert len(frames.sampled(90, 30.0, MediaOptions(fps=1.0))) == 3
    assert len(frames.sampled(90, 30.0, MediaOptions(max_frames=2))) == 2
    assert len(frames.sampled(5, 30.0, MediaOptions())) == 5
    fixed = FrameSettings(SQUARE, num_frames=16)
    assert len(fixed.sampled(6000, 30.0, MediaOptions())) == 16
    assert len(fixed.sampled(300, 30.0, MediaOptions(fps=2.0))) == 20


def test_words():
    words = TileWords(2, "<", "i", ">", "v")
    assert words.run(3) == "<iiiiii>"
    assert words.series(2) == "Frame1: <ii>\nFrame2: <ii>"


def test_settings_are_read_in_old_and_new_forms(tmp_path):
    image = {"size": {"height": 56, "width": 56}, "resample": 3, "max_patches": 6, "crop_to_patches": False}
    video = {"size": {"height": 56, "width": 56}, "num_frames": 40}
    old, new, bare = (tmp_path / name for name in ("old", "new", "bare"))
    for folder in (old, new, bare):
        folder.mkdir()
    (old / "preprocessor_config.json").write_text(json.dumps(image))
    (old / "video_preprocessor_config.json").write_text(json.dumps(video))
    (new / "processor_config.json").write_text(json.dumps({"image_processor": image, "video_processor": video}))
    (old / "tokenizer_config.json").write_text(json.dumps({"start_image_token": {"content": "<b>"}}))
    assert TileSettings.read(old, 56) == TileSettings.read(new, 56)
    assert TileSettings.read(old, 56).limits == TileLimits(1, 6)
    assert FrameSettings.read(old, 56) == FrameSettings.read(new, 56)
    assert (FrameSettings.read(old, 56).num_frames, FrameSettings.read(old, 56).max_frames) == (40, 40)
    assert TileSettings.read(bare, 448).square.normalisation.mean == (0.485, 0.456, 0.406)
    assert TileWords.read(old, 4) == TileWords(4, "<b>", "<IMG_CONTEXT>", "</img>", "<video>")
    with pytest.raises(UnsupportedError, match="the tower takes 448x448"):
        TileSettings.read(old, 448)


@pytest.fixture(scope="module")
def model() -> InternVLModel:
    loaded = tiny_model("internvl").vision
    assert isinstance(loaded, InternVLModel)
    return loaded


def finish(model, part, partial=None):
    units, count = model.prepare(part, partial=partial), 0
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value, count
        count += 1


def test_a_picture_is_one_unit_with_all_its_tiles(model):
    medium, count = finish(model, ImagePart(noise(40, 90)))
    assert (count, len(medium.frames)) == (1, 1)
    assert medium.geometry == {"rows": 1, "columns": 2, "num_tiles": 3}
    assert medium.frames[0].shape == (3, 32, 32, 3)
    *_, last = model.encode(medium, 0)
    assert last["features"].shape == (12, 64)
    assert model.expand("<IMG_CONTEXT>", [medium]) == "<img>" + "<IMG_CONTEXT>" * 12 + "</img>"


def test_bounds_and_the_tiles_do_not_resample_twice(model, monkeypatch):
    sizes = []

    def counting(rgb, size, resample):
        sizes.append(size)
        return resize(rgb, size, resample)

    monkeypatch.setattr(internvl, "resize", counting)
    medium, _ = finish(model, ImagePart(noise(80, 160), MediaOptions(max_image_size=64, max_pixels=64 * 32)))
    assert sizes == [(32, 64), (32, 32)]
    assert medium.geometry["num_tiles"] == 3


def test_a_video_goes_on_where_it_was_stopped(model):
    part = VideoPart(noise(5, 12, 20), MediaOptions(max_frames=4))
    whole, count = finish(model, part)
    assert (count, whole.geometry) == (4, {"indices": [0, 1, 3, 4]})
    for stopped_at in range(1, 4):
        token = CancelToken()
        units = model.prepare(part, cancel=token)
        for _ in range(stopped_at):
            medium = next(units)
        token.cancel()
        with pytest.raises(Cancelled):
            next(units)
        resumed, rest = finish(model, part, partial=medium)
        assert rest == 4 - stopped_at
        assert resumed.content_hash == whole.content_hash


def test_an_animation_is_sampled_like_a_video(model, tmp_path):
    path = tmp_path / "a.gif"
    first, *others = (Image.fromarray(frame).quantize() for frame in noise(12, 16, 16))
    first.save(path, save_all=True, append_images=others, duration=250, loop=0)
    assert finish(model, VideoPart(path))[0].geometry == {"indices": [0, 2, 3, 5, 6, 8, 9, 11]}
    assert finish(model, VideoPart(path, MediaOptions(max_frames=2)))[0].geometry == {"indices": [3, 9]}


def test_placeholders_and_media_must_match(model):
    picture, _ = finish(model, ImagePart(noise(16, 16)))
    video, _ = finish(model, VideoPart(noise(2, 12, 20)))
    with pytest.raises(PlaceholderError, match="placeholder 1 is <video>"):
        model.expand("<video><IMG_CONTEXT>", [picture, video])
    run = [model.image_token] * 4
    spans = model.locate([1, *run, 2, *run, 2, *run, 3], [picture, video])
    assert [(span.medium, span.row_start) for span in spans] == [(0, 0), (1, 0), (1, 4)]
    with pytest.raises(PlaceholderError, match="no 4 tokens"):
        model.locate([1, *run, 2, *run, 2, *run[1:], 3], [picture, video])


CONFIGS = {
    "layer norms": InternVLConfig(16, 24, 2, 2, image_size=16, patch_size=4, attention_bias=True),
    "RMS norms, on queries and keys too": InternVLConfig(
        16, 24, 2, 2, image_size=16, patch_size=4, norm_type="rms_norm", use_qk_norm=True
    ),
    "a norm at the end, no positions": InternVLConfig(
        *(16, 24, 2, 2), image_size=16, patch_size=4, use_mean_pooling=False, use_absolute_position_embeddings=False
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tower_is_what_the_definition_says(name):
    """Against a NumPy transcription: class token, positions, pre-norm blocks with scaled branches."""
    config = CONFIGS[name]
    mx.random.seed(4)
    tower = InternVLTower(config)
    tower.update({"embeddings": {"cls_token": mx.random.normal((1, 1, 16))}})
    if config.use_absolute_position_embeddings:
        tower.embeddings.position_embeddings = mx.random.normal((1, 17, 16))
    for block in tower.encoder.layer:
        block.lambda_1, block.lambda_2 = mx.random.normal((16,)), mx.random.normal((16,))
        block.layernorm_before.weight = 1 + 0.3 * mx.random.normal((16,))
    mx.eval(tower.parameters())
    tiles = np.random.default_rng(0).standard_normal((2, 16, 16, 3)).astype(np.float32)
    *_, last = encode_images(tower, tiles, Readout(lambda hidden: hidden))

    def norm(x, layer):
        if "bias" in layer:
            centred = x - x.mean(-1, keepdims=True)
            return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * np.array(layer.weight) + np.array(layer.bias)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.array(layer.weight)

    def dense(x, layer):
        return x @ np.array(layer.weight).T + (np.array(layer.bias) if "bias" in layer else 0.0)

    patches = tiles.reshape(2, 4, 4, 4, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 16, -1)
    projection = tower.embeddings.patch_embeddings.projection
    x = patches @ np.array(projection.weight).reshape(16, -1).T + np.array(projection.bias)
    x = np.concatenate([np.repeat(np.array(tower.embeddings.cls_token), 2, axis=0), x], axis=1)
    if config.use_absolute_position_embeddings:
        x = x + np.array(tower.embeddings.position_embeddings)
    for block in tower.encoder.layer:
        y, own = norm(x, block.layernorm_before), block.attention
        query, key, value = dense(y, own.q_proj), dense(y, own.k_proj), dense(y, own.v_proj)
        if config.use_qk_norm:
            query, key = norm(query, own.q_norm), norm(key, own.k_norm)
        query, key, value = (z.reshape(2, 17, 2, 8).transpose(0, 2, 1, 3) for z in (query, key, value))
        scores = np.exp(query @ key.transpose(0, 1, 3, 2) / np.sqrt(8))
        y = ((scores / scores.sum(-1, keepdims=True)) @ value).transpose(0, 2, 1, 3).reshape(2, 17, 16)
        x = x + np.array(block.lambda_1) * dense(y, own.projection_layer)
        y = dense(norm(x, block.layernorm_after), block.mlp.fc1)
        y = np.array(mx.array(y) * (1 + mx.erf(mx.array(y) / np.sqrt(2))) / 2)
        x = x + np.array(block.lambda_2) * dense(y, block.mlp.fc2)
    if not config.use_mean_pooling:
        x = norm(x, tower.layernorm)
    assert np.abs(np.array(last["features"]).reshape(2, 17, 16) - x).max() < 2e-5


def test_the_projector_norms_what_it_merged():
    projector = ShuffleProjector(ProjectorShape(32, 6), 2)
    assert projector.layer_norm.weight.shape == (32,)
    assert projector(mx.random.normal((3, 16, 8))).shape == (3, 4, 6)


def test_weights_of_both_orders_become_the_same_and_the_mask_token_is_dropped():
    config = CONFIGS["layer norms"]
    first = mx.random.normal((16, 3, 4, 4))
    name = "v.embeddings.patch_embeddings.projection.weight"
    made = [
        internvl_weights({name: weight, "v.embeddings.mask_token": mx.zeros((1, 1, 16))}, "v.", config)
        for weight in (first, first.transpose(0, 2, 3, 1))
    ]
    assert set(made[0]) == {name}
    assert mx.array_equal(made[0][name], made[1][name])


def test_unknown_towers_are_refused():
    assert InternVLConfig.from_dict({"image_size": [448, 448], "patch_size": 14}) == InternVLConfig()
    for config, problem in (
        ({"image_size": [448, 336]}, "the tower takes squares"),
        ({"norm_type": "batch_norm"}, "norm_type 'batch_norm'"),
        ({"hidden_act": "relu6"}, "hidden_act is 'relu6'"),
        ({"hidden_size": 100, "num_attention_heads": 16}, "16 attention heads"),
    ):
        with pytest.raises(UnsupportedError, match=problem):
            InternVLConfig.from_dict(config)
