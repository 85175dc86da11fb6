"""PaliGemma against the parity kit: every case in every layout."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlxgen_vision.families import paligemma
from parity_kit import (
    build_input,
    case_names,
    greedy,
    layouts,
    load_case,
    load_model,
    load_tokenizer,
    needs_kit,
    prefill,
    step,
)
from vision_qwen.reference_resize import resize as reference_resize

pytestmark = needs_kit

CASES = [(layout, name) for layout in layouts("paligemma") for name in case_names("paligemma")]


@cache
def load(layout: str):
    return load_model(paligemma.FAMILY, "paligemma", layout)


@pytest.fixture
def reference_pixels(monkeypatch):
    """Resize as the reference does, to the last rounding."""
    monkeypatch.setattr(paligemma, "resize", reference_resize)


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_ids_features_logits_and_tokens_equal_the_reference(reference_pixels, layout, name):
    case = load_case("paligemma", name)
    model = load(layout)
    inputs = build_input(model, load_tokenizer("paligemma", layout), case)
    assert inputs.token_ids == case.input_ids
    assert inputs.atomic == ((0, len(case.input_ids)),)
    assert not case.arrays["token_type_ids"].any(), "all of the prompt is prefix"
    features = np.array(inputs.media[0].features[0]["features"])
    assert np.abs(features - case.arrays["image_features"]).max() <= 1e-4
    runs = [greedy(model, inputs, chunk_size=size) for size in (16, 2048)]
    for run in runs:
        assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 1e-4
        assert run.tokens == case.tokens


@pytest.mark.parametrize("name", case_names("paligemma"))
def test_the_last_token_in_a_pass_of_its_own_gives_the_same(reference_pixels, name):
    """As mlxgen's prefill does: everything but the last token, which all others see nevertheless."""
    case = load_case("paligemma", name)
    model = load("hf")
    inputs = build_input(model, load_tokenizer("paligemma", "hf"), case)
    caches = make_prompt_cache(model.language)
    end = len(inputs.token_ids) - 1
    hidden = model.forward(mx.array(inputs.token_ids[:end], mx.uint32), cache=caches, start=0, inputs=inputs)
    assert hidden.shape[1] == end
    assert [cache.offset for cache in caches] == [end, end]
    logits = step(model, inputs.token_ids[-1], end, caches, inputs)
    assert np.abs(np.array(logits) - case.arrays["last_logits"]).max() <= 1e-4
    tokens = []
    for number in range(24):
        tokens.append(int(mx.argmax(logits)))
        logits = step(model, tokens[-1], end + 1 + number, caches, inputs)
    assert tokens == case.tokens


def test_features_of_the_stored_pixels():
    case = load_case("paligemma", "img1")
    *_, last = load("hf").encode_pixels(case.arrays["pixel_values"].transpose(0, 2, 3, 1))
    assert np.abs(np.array(last["features"]) - case.arrays["image_features"]).max() <= 1e-4


@pytest.mark.parametrize("name", case_names("paligemma"))
def test_own_pixels_give_the_same_tokens(name):
    """Pillow's rounding instead of torchvision's: pixels differ by a step here and there."""
    case = load_case("paligemma", name)
    model = load("hub")
    inputs = build_input(model, load_tokenizer("paligemma", "hub"), case)
    run = greedy(model, inputs)
    assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 2e-2
    assert run.tokens == case.tokens


def test_two_requests_interleaved_token_by_token_give_what_each_gives_alone():
    model = load("hf")
    tokenizer = load_tokenizer("paligemma", "hf")
    inputs = [build_input(model, tokenizer, load_case("paligemma", name)) for name in ("img1", "img2")]
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
