"""Gemma 3 against the parity kit: every case in every layout."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as mlx_lm_load
from mlxgen_vision.families import gemma3
from parity_kit import (
    build_input,
    case_names,
    greedy,
    kit,
    layouts,
    load_case,
    load_config,
    load_tokenizer,
    needs_kit,
    prefill,
    step,
)
from vision_idefics3.torchvision_resize import resize as reference_resize

pytestmark = needs_kit


@pytest.fixture
def reference_pixels(monkeypatch):
    """Resize as the reference does, to the last rounding."""
    monkeypatch.setattr(gemma3, "resize", reference_resize)


@pytest.mark.parametrize("name", case_names("gemma3"))
@pytest.mark.parametrize("layout", layouts("gemma3"))
def test_ids_features_logits_and_tokens_equal_the_reference(load, reference_pixels, layout, name):
    case = load_case("gemma3", name)
    model = load(layout)
    inputs = build_input(model, load_tokenizer("gemma3", layout), case)
    assert inputs.token_ids == case.input_ids
    if inputs.spans:
        marked = np.flatnonzero(case.arrays.get("token_type_ids", np.zeros((1, 0)))[0])
        assert [at for span in inputs.spans for at in range(span.start, span.end)] == marked.tolist()
        assert inputs.atomic == tuple((span.start, span.end) for span in inputs.spans)
        features = np.array(inputs.media[0].features[0]["features"])
        assert np.abs(features - case.arrays["image_features"]).max() <= 1e-4
    runs = [greedy(model, inputs, chunk_size=size) for size in (16, 2048)]
    for run in runs:
        assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 1e-4
        assert run.tokens == case.tokens
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= 1e-5


def test_features_of_the_stored_pixels(load):
    case = load_case("gemma3", "img1")
    pixels = case.arrays["pixel_values"].transpose(0, 2, 3, 1)
    *_, last = load("hf").encode_pixels(pixels)
    assert np.abs(np.array(last["features"]) - case.arrays["image_features"]).max() <= 1e-4


def test_own_pixels_are_the_reference_up_to_rounding(load):
    case = load_case("gemma3", "img1")
    model = load("hub")
    inputs = build_input(model, load_tokenizer("gemma3", "hub"), case)
    own = model.settings.normalisation(inputs.media[0].frames[0])
    apart = np.abs(own - case.arrays["pixel_values"].transpose(0, 2, 3, 1)) * 127.5
    assert apart.max() < 1.01
    assert (apart > 0.01).mean() < 0.05
    run = greedy(model, inputs)
    assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 1e-3
    assert run.tokens == case.tokens


@pytest.mark.parametrize("name", case_names("gemma3"))
def test_the_quantised_checkpoint_equals_its_own_weights_dequantised(load, tmp_path, name):
    source = kit() / "gemma3" / "mlx-8bit"
    weights = mx.load(str(source / "model.safetensors"))
    plain = {}
    for key, value in weights.items():
        stem = key.removesuffix(".weight")
        if key.endswith(".weight") and f"{stem}.scales" in weights:
            plain[key] = mx.dequantize(
                value, weights[f"{stem}.scales"], weights[f"{stem}.biases"], group_size=32, bits=8
            )
        elif not key.endswith((".scales", ".biases")):
            plain[key] = value
    assert len(plain) < len(weights)
    for file in source.glob("*.json"):
        if file.name not in ("config.json", "model.safetensors.index.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = load_config("gemma3", "mlx-8bit")
    config.pop("quantization")
    config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), plain)
    case = load_case("gemma3", name)
    tokenizer = load_tokenizer("gemma3", "mlx-8bit")
    runs = [
        greedy(model, build_input(model, tokenizer, case))
        for model in (load("mlx-8bit"), gemma3.FAMILY.load(tmp_path, config))
    ]
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= 1e-4
    assert runs[0].tokens == runs[1].tokens


def test_text_is_mlx_lms_own_pass_and_makes_no_masks(load, monkeypatch):
    def no_masks(*arguments: object) -> None:
        raise AssertionError("text needs no mask arrays")

    monkeypatch.setattr(gemma3, "BlockMasks", no_masks)
    case = load_case("gemma3", "text")
    model = load("mlx")
    plain, _ = mlx_lm_load(kit() / "gemma3" / "mlx", model_config={"vocab_size": 296})
    inputs = build_input(model, load_tokenizer("gemma3", "mlx"), case)
    ours, theirs = make_prompt_cache(model.language), plain.make_cache()
    for start, end in ((0, 16), (16, len(inputs.token_ids))):
        ids = mx.array(inputs.token_ids[start:end], dtype=mx.uint32)
        logits = model.forward(ids, cache=ours, start=start, inputs=inputs)
        assert mx.array_equal(logits, plain(ids[None], cache=theirs))


def test_decoding_after_a_picture_makes_no_masks(load, monkeypatch):
    case = load_case("gemma3", "img1")
    model = load("hf")
    inputs = build_input(model, load_tokenizer("gemma3", "hf"), case)
    caches = make_prompt_cache(model.language)
    token = int(mx.argmax(prefill(model, inputs, caches)))
    monkeypatch.setattr(gemma3, "BlockMasks", None)
    assert token == case.tokens[0]
    assert int(mx.argmax(step(model, token, len(inputs.token_ids), caches, inputs))) == case.tokens[1]


def test_two_requests_interleaved_token_by_token_give_what_each_gives_alone(load):
    model = load("hf")
    tokenizer = load_tokenizer("gemma3", "hf")
    cases = [load_case("gemma3", name) for name in ("img1", "img2")]
    inputs = [build_input(model, tokenizer, case) for case in cases]
    alone = [greedy(model, each, chunk_size=16) for each in inputs]
    caches = [make_prompt_cache(model.language) for _ in inputs]
    logits = [prefill(model, each, cache, chunk_size=16) for each, cache in zip(inputs, caches, strict=True)]
    tokens: list[list[int]] = [[], []]
    for number in range(24):
        for which in (0, 1):
            tokens[which].append(int(mx.argmax(logits[which])))
            start = len(inputs[which].token_ids) + number
            logits[which] = step(model, tokens[which][-1], start, caches[which], inputs[which])
    assert tokens == [run.tokens for run in alone]
