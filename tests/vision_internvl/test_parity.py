"""InternVL with both of its text models against the parity kit: every case in every layout."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlxgen_vision.families import internvl
from parity_kit import (
    build_input,
    case_names,
    greedy,
    image_part,
    kit,
    layouts,
    load_case,
    load_config,
    load_model,
    load_tokenizer,
    needs_kit,
    prefill,
    prepare,
    step,
    video_part,
)
from vision_idefics3.torchvision_resize import resize as reference_resize

from mlxgen.errors import ModelLoadError, UnsupportedError

pytestmark = needs_kit

FAMILIES = ("internvl", "internvl_q2")
CASES = [(family, layout, name) for family in FAMILIES for layout in layouts(family) for name in case_names(family)]
IMAGE = 4


@cache
def load(family: str, layout: str) -> internvl.InternVLModel:
    loaded = load_model(internvl.FAMILY, family, layout)
    assert isinstance(loaded, internvl.InternVLModel)
    return loaded


@pytest.fixture
def reference_pixels(monkeypatch):
    """Resize as the reference does, to the last rounding."""
    monkeypatch.setattr(internvl, "resize", reference_resize)


@pytest.mark.parametrize(("family", "layout", "name"), CASES)
def test_ids_features_logits_and_tokens_equal_the_reference(reference_pixels, family, layout, name):
    case = load_case(family, name)
    model = load(family, layout)
    inputs = build_input(model, load_tokenizer(family, layout), case)
    assert inputs.token_ids == case.input_ids
    assert inputs.atomic == ()
    places = [at for span in inputs.spans for at in range(span.start, span.end)]
    assert places == [at for at, token in enumerate(inputs.token_ids) if token == IMAGE]
    if inputs.media:
        key = "video_features" if name == "vid1" else "image_features"
        features = np.concatenate([np.array(part["features"]) for part in inputs.media[0].features])
        assert features.shape == case.arrays[key].shape
        assert np.abs(features - case.arrays[key]).max() <= 1e-4
    runs = [greedy(model, inputs, chunk_size=size) for size in (16, 2048)]
    for run in runs:
        assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 1e-4
        assert run.tokens == case.tokens
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= 1e-5


@pytest.mark.parametrize(("family", "name"), [(f, n) for f in FAMILIES for n in case_names(f) if n != "text"])
def test_own_pixels_give_the_same_tokens(monkeypatch, family, name):
    """Pillow's rounding instead of torchvision's: pixels differ by a step here and there, logits in the third place."""
    case = load_case(family, name)
    model = load(family, "hub")
    inputs = build_input(model, load_tokenizer(family, "hub"), case)
    run = greedy(model, inputs)
    assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 2e-2
    assert run.tokens == case.tokens
    monkeypatch.setattr(internvl, "resize", reference_resize)
    for part, medium in zip(case.parts, inputs.media, strict=True):
        theirs = prepare(model, part)
        apart = np.abs(np.stack(medium.frames).astype(int) - np.stack(theirs.frames).astype(int))
        assert apart.max() <= 2
        assert (apart > 0).mean() < 0.05


def test_a_videos_frames_are_encoded_each_alone():
    model = load("internvl", "hf")
    medium = prepare(model, video_part("V"))
    assert medium.geometry == {"indices": list(range(8))}
    assert (model.num_parts(medium), model.frames_of_part(medium, 7)) == (8, 1)
    *_, alone = model.encode(medium, 3)
    assert alone["features"].shape == (4, 48)


def test_pictures_and_videos_in_any_order():
    model, tokenizer = load("internvl", "hf"), load_tokenizer("internvl", "hf")
    media = [prepare(model, video_part("V")), prepare(model, image_part("A"))]
    ids = tokenizer.encode(model.expand("Watch <video> then <IMG_CONTEXT>.", media)).ids
    spans = model.locate(ids, media)
    assert [span.medium for span in spans] == [0] * 8 + [1]
    assert [(span.row_start, span.row_end) for span in spans] == [(4 * n, 4 * n + 4) for n in range(8)] + [(0, 28)]


def test_two_requests_interleaved_token_by_token_give_what_each_gives_alone():
    model, tokenizer = load("internvl_q2", "hf"), load_tokenizer("internvl_q2", "hf")
    inputs = [build_input(model, tokenizer, load_case("internvl_q2", name)) for name in ("img1", "vid1")]
    alone = [greedy(model, each, chunk_size=16) for each in inputs]
    caches = [make_prompt_cache(model.language) for _ in inputs]
    logits = [prefill(model, each, held, chunk_size=16) for each, held in zip(inputs, caches, strict=True)]
    tokens: list[list[int]] = [[], []]
    for number in range(24):
        for which in (0, 1):
            tokens[which].append(int(mx.argmax(logits[which])))
            start = len(inputs[which].token_ids) + number
            logits[which] = step(model, tokens[which][-1], start, caches[which], inputs[which])
    assert tokens == [run.tokens for run in alone]


def test_a_quantised_tower_and_projector_equal_their_weights_dequantised(tmp_path):
    """As converters leave them: every layer whose width allows it in 8 bits."""
    source = kit() / "internvl" / "mlx"
    packed, plain = {}, {}
    for name, weight in mx.load(str(source / "model.safetensors")).items():
        packed[name] = plain[name] = weight
        if not name.startswith("language_model.") and weight.ndim == 2 and weight.shape[-1] % 32 == 0:
            stem = name.removesuffix(".weight")
            parts = mx.quantize(weight, group_size=32, bits=8)
            packed |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
            plain[name] = mx.dequantize(*parts, group_size=32, bits=8)
    assert "multi_modal_projector.linear_1.scales" in packed
    assert "vision_tower.encoder.layer.1.attention.projection_layer.scales" in packed
    tiles = np.random.default_rng(0).standard_normal((2, 56, 56, 3)).astype(np.float32)
    features = []
    for folder, weights in ((tmp_path / "packed", packed), (tmp_path / "plain", plain)):
        folder.mkdir()
        for file in source.glob("*.json"):
            if not file.name.startswith("model"):
                (folder / file.name).write_bytes(file.read_bytes())
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        *_, last = internvl.FAMILY.load(folder, load_config("internvl", "mlx")).encode_tiles(tiles)
        features.append(np.array(last["features"]))
    assert np.abs(features[0] - features[1]).max() <= 1e-4
    assert np.abs(features[0]).max() > 0.1


@pytest.mark.parametrize("entries", [{"vision_feature_layer": -2}, {"vision_feature_select_strategy": "full"}])
def test_features_of_another_kind_are_refused(entries):
    with pytest.raises(UnsupportedError, match=next(iter(entries))):
        internvl.FAMILY.load(kit() / "internvl" / "hub", load_config("internvl", "hub") | entries)


def test_settings_of_another_model_are_refused(tmp_path):
    for file in (kit() / "internvl" / "hub").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = load_config("internvl", "hub")
    with pytest.raises(UnsupportedError, match="image_seq_length 4, but the model makes 1 tokens"):
        internvl.FAMILY.load(tmp_path, config | {"downsample_ratio": 0.25})
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 448, "width": 448}}')
    with pytest.raises(UnsupportedError, match="448.*the tower takes 56x56"):
        internvl.FAMILY.load(tmp_path, config)
    with pytest.raises(UnsupportedError, match="model_type 'internlm2'; text models known here are llama"):
        internvl.FAMILY.load(tmp_path, config | {"text_config": {"model_type": "internlm2"}})


@pytest.mark.parametrize("name", ["vision_tower.encoder.layer.2.lambda_1", "model.adapter.weight"])
def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, name):
    for file in (kit() / "internvl" / "hub").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = mx.load(str(kit() / "internvl" / "hub" / "model.safetensors")) | {name: mx.zeros((2,))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    with pytest.raises(ModelLoadError):
        internvl.FAMILY.load(tmp_path, load_config("internvl", "hub"))
