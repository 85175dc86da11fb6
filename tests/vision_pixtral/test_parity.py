"""Pixtral and Mistral 3 against the parity kit: every case in every layout."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlxgen_vision.families import llava, mistral3, pixtral
from parity_kit import (
    build_input,
    case_names,
    encode,
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
)
from vision_idefics3.torchvision_resize import resize as reference_resize

from mlxgen.errors import ModelLoadError, UnsupportedError

pytestmark = needs_kit

FAMILIES = ("pixtral", "mistral3")
CASES = [(family, layout, name) for family in FAMILIES for layout in layouts(family) for name in case_names(family)]
IMAGE, ROW_END, END = 3, 4, 5


@cache
def load(family: str, layout: str) -> pixtral.GridModel:
    # As published, a Pixtral is a LLaVA by its model_type; only MLX conversions call it by its name.
    loaders = {"mistral3": mistral3.FAMILY, "pixtral": pixtral.FAMILY if layout == "mlx" else llava.FAMILY}
    loaded = load_model(loaders[family], family, layout)
    assert isinstance(loaded, pixtral.GridModel)
    return loaded


@pytest.fixture
def reference_pixels(monkeypatch):
    """Resize as the reference does, to the last rounding."""
    monkeypatch.setattr(pixtral, "resize", reference_resize)


@pytest.mark.parametrize(("family", "layout", "name"), CASES)
def test_ids_features_logits_and_tokens_equal_the_reference(reference_pixels, family, layout, name):
    case = load_case(family, name)
    model = load(family, layout)
    inputs = build_input(model, load_tokenizer(family, layout), case)
    assert inputs.token_ids == case.input_ids
    places = [at for span in inputs.spans for at in range(span.start, span.end)]
    assert places == [at for at, token in enumerate(inputs.token_ids) if token == IMAGE]
    assert all(inputs.token_ids[span.end] in (ROW_END, END) for span in inputs.spans)
    token = model.settings.token
    sizes = [[medium.geometry["rows"] * token, medium.geometry["columns"] * token] for medium in inputs.media]
    assert sizes == case.grids.get("image_sizes", [])
    if inputs.media:
        features = np.array(inputs.media[0].features[0]["features"])
        assert np.abs(features - case.arrays["image_features"]).max() <= 1e-4
    runs = [greedy(model, inputs, chunk_size=size) for size in (16, 2048)]
    for run in runs:
        assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 1e-4
        assert run.tokens == case.tokens
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_the_stored_pixels(family):
    case = load_case(family, "img1")
    *_, last = load(family, "hf").encode_pixels(case.arrays["pixel_values"][0].transpose(1, 2, 0))
    assert np.abs(np.array(last["features"]) - case.arrays["image_features"]).max() <= 1e-4


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in FAMILIES for name in ("img1", "img2")])
def test_own_pixels_give_the_same_tokens(family, name):
    """Pillow's rounding instead of torchvision's: pixels differ by a step here and there, logits in the third place."""
    case = load_case(family, name)
    model = load(family, "hub")
    run = greedy(model, build_input(model, load_tokenizer(family, "hub"), case))
    assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 2e-2
    assert run.tokens == case.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_own_pixels_are_the_reference_up_to_rounding(family):
    case = load_case(family, "img1")
    model = load(family, "hub")
    own = model.settings.normalisation(prepare(model, case.parts[0]).frames[0])
    stored = case.arrays["pixel_values"][0].transpose(1, 2, 0)
    apart = np.abs(own - stored) * np.asarray(model.settings.normalisation.std) * 255
    assert apart.max() < 2.01
    assert (apart > 0.01).mean() < 0.05


def test_two_requests_interleaved_token_by_token_give_what_each_gives_alone():
    model, tokenizer = load("mistral3", "hf"), load_tokenizer("mistral3", "hf")
    inputs = [build_input(model, tokenizer, load_case("mistral3", name)) for name in ("img1", "img2")]
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


def test_a_picture_of_a_single_token():
    """transformers 5.24 fails on one: its size has no dimension left to split."""
    model = load("mistral3", "hf")
    medium = prepare(model, image_part("A", pixel_bound(1)))
    assert (medium.geometry["rows"], medium.geometry["columns"]) == (1, 1)
    assert model.expand("[IMG]", [medium]) == "[IMG][IMG_END]"
    encode(model, medium)
    assert medium.features[0]["features"].shape == (1, 48)


def pixel_bound(pixels: int):
    from mlxgen.request import MediaOptions

    return MediaOptions(max_pixels=pixels)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_tower_and_projector_equal_their_weights_dequantised(family, tmp_path):
    """As converters leave them: every layer whose width allows it in 8 bits."""
    source = kit() / family / "mlx"
    packed, plain = {}, {}
    for name, weight in mx.load(str(source / "model.safetensors")).items():
        packed[name] = plain[name] = weight
        if not name.startswith("language_model.") and weight.ndim == 2 and weight.shape[-1] % 32 == 0:
            stem = name.removesuffix(".weight")
            parts = mx.quantize(weight, group_size=32, bits=8)
            packed |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
            plain[name] = mx.dequantize(*parts, group_size=32, bits=8)
    assert "multi_modal_projector.linear_1.scales" in packed
    assert "vision_tower.vision_model.transformer.layers.1.feed_forward.down_proj.scales" in packed
    pixels = np.random.default_rng(0).standard_normal((64, 96, 3)).astype(np.float32)
    features = []
    for folder, weights in ((tmp_path / "packed", packed), (tmp_path / "plain", plain)):
        folder.mkdir()
        for file in source.glob("*.json"):
            if not file.name.startswith("model"):
                (folder / file.name).write_bytes(file.read_bytes())
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        loader = {"pixtral": pixtral.FAMILY, "mistral3": mistral3.FAMILY}[family]
        *_, last = loader.load(folder, load_config(family, "mlx")).encode_pixels(pixels)
        features.append(np.array(last["features"]))
    assert np.abs(features[0] - features[1]).max() <= 1e-4
    assert np.abs(features[0]).max() > 0.1


def changed(tmp_path, family, **entries):
    """A copy of the hub checkpoint's folder, and its config with `entries`."""
    for file in (kit() / family / "hub").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return load_config(family, "hub") | entries


def test_contradictions_between_files_are_refused(tmp_path):
    config = changed(tmp_path, "mistral3", spatial_merge_size=4)
    with pytest.raises(UnsupportedError, match="spatial_merge_size 2, the model 4"):
        mistral3.FAMILY.load(tmp_path, config)
    config = changed(tmp_path, "pixtral", vision_feature_layer=-2)
    with pytest.raises(UnsupportedError, match="vision_feature_layer -2"):
        pixtral.FAMILY.load(tmp_path, config)
    config = changed(tmp_path, "pixtral", vision_feature_select_strategy="default")
    with pytest.raises(UnsupportedError, match="'default'.*'full'"):
        pixtral.FAMILY.load(tmp_path, config)


@pytest.mark.parametrize("name", ["vision_tower.transformer.layers.2.ffn_norm.weight", "model.adapter.weight"])
def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, name):
    config = changed(tmp_path, "mistral3")
    weights = mx.load(str(kit() / "mistral3" / "hub" / "model.safetensors")) | {name: mx.zeros((2,))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    with pytest.raises(ModelLoadError):
        mistral3.FAMILY.load(tmp_path, config)
