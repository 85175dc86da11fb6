"""What is particular to the LLaVA families: forms of pictures, layers of towers, checkpoints under one name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlxgen_vision.families import llava, llava_next, llava_onevision
from mlxgen_vision.families.llava_vision import TowerOutput, build_vision
from vision_harness import tiny_vlm
from vision_harness.jobs import image, model, new_session, options, reply, sources

from mlxgen.errors import ModelLoadError, PlaceholderError, UnsupportedError
from mlxgen.inputs import PreparedMedium
from mlxgen.models import load
from mlxgen.request import VideoPart
from mlxgen.session import Session


@pytest.fixture
def folder(tmp_path):
    return sources(tmp_path / "media")


def copy_of(family: str, path, **changes):
    """The family's tiny checkpoint with other entries in its config.json; returns the config."""
    shutil.copytree(tiny_vlm.folder(family), path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return config


def lengths(session) -> list[int]:
    return [span.end - span.start for span in session.state.sequence.inputs.spans]


def test_a_second_picture_makes_both_padded_and_going_back_makes_the_first_tiled_again(folder):
    session = new_session("llava_onevision")
    vision = session.model.vision
    session.send([image(folder, "A"), "What?"], reply=reply())
    (medium,) = session.state.media
    tiled = vision.num_tiled_rows(medium.geometry)
    assert lengths(session) == [tiled]
    assert tiled > vision.num_padded_rows
    first = [token.id for token in session.state.history.reply.tokens]
    session.send([image(folder, "B"), "And this?"], reply=reply())
    assert lengths(session) == [vision.num_padded_rows] * 2
    spans = session.state.sequence.inputs.spans
    assert [(span.row_start, span.row_end) for span in spans] == [(0, vision.num_padded_rows)] * 2
    session.undo()
    session.undo()
    session.send([image(folder, "A"), "What?"], reply=reply())
    assert lengths(session) == [tiled]
    assert [token.id for token in session.state.history.reply.tokens] == first


def test_a_video_does_not_make_a_picture_one_of_several(folder):
    session = new_session("llava_onevision")
    session.send([VideoPart(folder / "V"), image(folder, "A"), "What?"], reply=reply())
    vision, media = session.model.vision, session.state.media
    assert lengths(session) == [4 * 2 * 2 + 1, vision.num_tiled_rows(media[1].geometry)]


def test_raw_turns_decide_for_themselves(folder):
    session = Session(model("llava_onevision"), options=replace(options("llava_onevision"), raw=True))
    vision = session.model.vision
    session.send(["<image>What?", image(folder, "A")], reply=reply())
    session.send(["<image>And <image>?", image(folder, "B"), image(folder, "C")], reply=reply())
    tiled = vision.num_tiled_rows(session.state.media[0].geometry)
    assert lengths(session) == [tiled, vision.num_padded_rows, vision.num_padded_rows]
    assert session.state.sequence.inputs.spans[0].row_start == vision.num_padded_rows


def test_pictures_may_touch():
    whole = model("llava_next").vision
    sizes = [(60, 90), (90, 60)]
    media = [
        PreparedMedium("image", geometry={"size": list(size), "grid": list(whole.settings.grid(size))})
        for size in sizes
    ]
    ids = [7] + [whole.image_token] * sum(whole.num_rows(medium.geometry) for medium in media)
    first, second = whole.locate(ids, media)
    assert (first.start, first.end, second.end) == (1, second.start, len(ids))
    with pytest.raises(PlaceholderError):
        whole.locate([*ids, whole.image_token], media)
    with pytest.raises(PlaceholderError):
        whole.locate(ids[:-1], media)


@pytest.mark.parametrize(("family", "module"), [("llava", llava), ("llava_next", llava_next)])
def test_videos_are_refused_with_a_remedy(family, module, folder):
    with pytest.raises(UnsupportedError, match="give frames of the video as pictures"):
        next(model(family).vision.prepare(VideoPart(folder / "V")))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (23, 1)),
        ({"vision_feature_layer": [-1], "vision_feature_select_strategy": "full"}, (24, 0)),
        ({"vision_feature_layer": 0, "vision_feature_select_strategy": None}, (0, 1)),
    ],
)
def test_the_layer_and_its_rows_are_read_from_the_config(config, expected):
    output = TowerOutput.of(config, 24)
    assert (output.num_layers, output.skip) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"vision_feature_layer": [-2, -5]},
        {"vision_feature_layer": 25},
        {"vision_feature_layer": -26},
        {"vision_feature_layer": "last"},
        {"vision_feature_select_strategy": "cls"},
    ],
)
def test_layers_there_are_not_are_refused(config):
    with pytest.raises(UnsupportedError, match="vision_feature"):
        TowerOutput.of(config, 24)


def test_only_the_layers_that_are_read_are_run():
    config = tiny_vlm.config_of("llava")
    vision = build_vision(config, 64)
    pixels = np.random.default_rng(0).standard_normal((1, 24, 24, 3)).astype(np.float32)
    *_, last = vision.encode(pixels)
    vision.vision_tower.encoder.layers[-1].mlp.fc1.weight *= mx.nan
    vision.vision_tower.post_layernorm.weight *= mx.nan
    *_, again = vision.encode(pixels)
    assert mx.array_equal(last["features"], again["features"])


def test_towers_and_text_models_mlxgen_does_not_have_are_refused(tmp_path):
    config = copy_of("llava", tmp_path, vision_config={"model_type": "dinov2"})
    with pytest.raises(UnsupportedError, match="dinov2"):
        llava.FAMILY.load(tmp_path, config)
    config = copy_of("llava", tmp_path, text_config={"model_type": "gpt2"})
    with pytest.raises(UnsupportedError, match="gpt2"):
        llava.FAMILY.load(tmp_path, config)


def test_a_class_token_among_the_patches_cannot_be_tiled(tmp_path):
    config = copy_of("llava_next", tmp_path, vision_feature_select_strategy="full")
    with pytest.raises(UnsupportedError, match="10 rows for 3x3 patches"):
        llava_next.FAMILY.load(tmp_path, config)


def test_a_siglip_tower_under_llava(tmp_path):
    """As llava-interleave: SigLIP, Qwen2, all patches."""
    source = json.loads((tiny_vlm.folder("llava_onevision") / "config.json").read_text())
    config = copy_of("llava_onevision", tmp_path, **(source | {"model_type": "llava"}))
    weights = mx.load(str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelLoadError, match="image_newline"):
        llava.FAMILY.load(tmp_path, config)
    weights.pop("image_newline")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": {"size": {"height": 24, "width": 24}}})
    )
    assert llava.FAMILY.load(tmp_path, config).vision.num_rows == 9


def test_what_onevision_leaves_out_of_its_config(tmp_path):
    config = copy_of("llava_onevision", tmp_path)
    for key in ("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio", "video_token_index"):
        config.pop(key)
    loaded = llava_onevision.FAMILY.load(tmp_path, config)
    assert (loaded.vision.num_rows, loaded.settings.max_tiles, loaded.tokens["video"]) == (9, 9, 151647)


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision", "paligemma"])
def test_quantised_weights_of_every_part_equal_the_same_dequantised(family, tmp_path, folder):
    """As converters leave them: every layer whose width allows it in 8 bits, tables of positions included."""
    source = tiny_vlm.folder(family)
    packed, plain = {}, {}
    for name, weight in mx.load(str(source / "model.safetensors")).items():
        packed[name] = plain[name] = weight
        if weight.ndim == 2 and weight.shape[-1] % 32 == 0:
            stem = name.removesuffix(".weight")
            parts = mx.quantize(weight, group_size=32, bits=8)
            packed |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
            plain[name] = mx.dequantize(*parts, group_size=32, bits=8)
    for stem in ("vision_tower.embeddings.position_embedding", "multi_modal_projector", "language_model.model.layers"):
        assert any(name.startswith(stem) and name.endswith(".scales") for name in packed)
    values = []
    for name, weights in (("packed", packed), ("plain", plain)):
        shutil.copytree(source, tmp_path / name)
        mx.save_safetensors(str(tmp_path / name / "model.safetensors"), weights)
        session = Session(load(str(tmp_path / name)), options=options(family))
        session.send([image(folder, "A"), image(folder, "B"), "What?"], reply=reply())
        values.append([(token.id, token.logprob) for token in session.state.history.reply.tokens])
    assert [token for token, _ in values[0]] == [token for token, _ in values[1]]
    assert [value for _, value in values[0]] == pytest.approx([value for _, value in values[1]], abs=1e-3)
