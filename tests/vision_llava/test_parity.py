"""The LLaVA families against the parity kit: every case in every layout."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlxgen_vision.families import llava, llava_next, llava_onevision
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

MODULES = {"llava": llava, "llava_next": llava_next, "llava_onevision": llava_onevision}
CASES = [(family, layout, name) for family in MODULES for layout in layouts(family) for name in case_names(family)]


@cache
def load(family: str, layout: str):
    return load_model(MODULES[family].FAMILY, family, layout)


@pytest.fixture
def reference_pixels(monkeypatch):
    """Resize as the reference does, to the last rounding."""
    for module in MODULES.values():
        monkeypatch.setattr(module, "resize", reference_resize)


def rows(inputs, kind: str) -> np.ndarray:
    """What the language model gets for the first medium of a kind."""
    number = next(number for number, medium in enumerate(inputs.media) if medium.kind == kind)
    (span,) = (span for span in inputs.spans if span.medium == number)
    features = mx.concatenate([part["features"] for part in inputs.media[number].features])
    return np.array(features[span.row_start : span.row_end])


@pytest.mark.parametrize(("family", "layout", "name"), CASES)
def test_ids_features_logits_and_tokens_equal_the_reference(reference_pixels, family, layout, name):
    case = load_case(family, name)
    model = load(family, layout)
    inputs = build_input(model, load_tokenizer(family, layout), case)
    assert inputs.token_ids == case.input_ids
    assert inputs.atomic == ()
    for kind in ("image", "video"):
        assert (f"{kind}_features" in case.arrays) == any(medium.kind == kind for medium in inputs.media)
        if f"{kind}_features" in case.arrays:
            stored = case.arrays[f"{kind}_features"]
            assert np.abs(rows(inputs, kind)[: len(stored)] - stored).max() <= 1e-4
    runs = [greedy(model, inputs, chunk_size=size) for size in (16, 2048)]
    for run in runs:
        assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 1e-4
        assert run.tokens == case.tokens
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= 1e-5


@pytest.mark.parametrize(("family", "name"), [(f, n) for f in MODULES for n in case_names(f) if n != "text"])
def test_own_pixels_give_the_same_tokens(family, name):
    """Pillow's rounding instead of torchvision's: pixels differ by a step here and there."""
    case = load_case(family, name)
    model = load(family, "hub")
    inputs = build_input(model, load_tokenizer(family, "hub"), case)
    assert inputs.token_ids == case.input_ids
    run = greedy(model, inputs)
    assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 2e-2
    assert run.tokens == case.tokens


@pytest.mark.parametrize("family", MODULES)
def test_features_of_the_stored_pixels(family):
    case = load_case(family, "img1")
    model = load(family, "hf")
    pixels = case.arrays["pixel_values"].reshape(-1, *case.arrays["pixel_values"].shape[-3:]).transpose(0, 2, 3, 1)
    if family == "llava":
        *_, last = model.encode_pixels(pixels)
    else:
        image = build_input(model, load_tokenizer(family, "hf"), case).media[0]
        *_, last = model.encode_views(pixels, image.geometry)
    assert np.abs(np.array(last["features"]) - case.arrays["image_features"]).max() <= 1e-4


def test_two_requests_interleaved_token_by_token_give_what_each_gives_alone():
    model = load("llava", "hf")
    tokenizer = load_tokenizer("llava", "hf")
    inputs = [build_input(model, tokenizer, load_case("llava", name)) for name in ("img1", "img2")]
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
