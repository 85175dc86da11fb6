"""LFM2-VL against the parity kit: every case in every layout."""

from __future__ import annotations

import json
import logging
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlxgen_vision.families import lfm2_vl
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
)
from vision_idefics3.torchvision_resize import resize as reference_resize

from mlxgen.errors import ModelLoadError, UnsupportedError

pytestmark = needs_kit

CASES = [(layout, name) for layout in layouts("lfm2_vl") for name in case_names("lfm2_vl")]


@cache
def load(layout: str) -> lfm2_vl.Lfm2VLModel:
    loaded = load_model(lfm2_vl.FAMILY, "lfm2_vl", layout)
    assert isinstance(loaded, lfm2_vl.Lfm2VLModel)
    return loaded


@pytest.fixture
def reference_pixels(monkeypatch):
    """Resize as the reference does, to the last rounding."""
    monkeypatch.setattr(lfm2_vl, "resize", reference_resize)


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_ids_features_logits_and_tokens_equal_the_reference(reference_pixels, layout, name):
    case = load_case("lfm2_vl", name)
    model = load(layout)
    inputs = build_input(model, load_tokenizer("lfm2_vl", layout), case)
    assert inputs.token_ids == case.input_ids
    assert inputs.atomic == ()
    places = [at for span in inputs.spans for at in range(span.start, span.end)]
    assert places == [at for at, token in enumerate(inputs.token_ids) if token == 3]
    if inputs.media:
        features = np.array(inputs.media[0].features[0]["features"])
        assert np.abs(features - case.arrays["image_features"]).max() <= 1e-4
        shapes = [
            [part.shape[1] // 16, part.shape[2] // 16]
            for medium in inputs.media
            for group in model.parts.settings.groups(medium.frames[0], lfm2_vl._views(medium))
            for part in np.split(group, len(group))
        ]
        assert shapes == case.grids["spatial_shapes"]
    runs = [greedy(model, inputs, chunk_size=size) for size in (16, 2048)]
    for run in runs:
        assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 1e-4
        assert run.tokens == case.tokens
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= 1e-5


def test_features_of_the_stored_pixels(reference_pixels):
    case = load_case("lfm2_vl", "img1")
    model = load("hf")
    medium = prepare(model, case.parts[0])
    (group,) = model.parts.settings.groups(medium.frames[0], lfm2_vl._views(medium))
    pixels = model.parts.settings.normalisation(group)[0]
    patches = pixels.reshape(4, 16, 6, 16, 3).transpose(0, 2, 1, 3, 4).reshape(24, -1)
    assert np.abs(patches - case.arrays["pixel_values"][0]).max() <= 1e-6
    *_, last = model.encode(medium, 0)
    assert np.abs(np.array(last["features"]) - case.arrays["image_features"]).max() <= 1e-4


@pytest.mark.parametrize("name", case_names("lfm2_vl"))
def test_own_pixels_give_the_same_tokens(name):
    case = load_case("lfm2_vl", name)
    inputs = build_input(load("hub"), load_tokenizer("lfm2_vl", "hub"), case)
    assert inputs.token_ids == case.input_ids
    run = greedy(load("hub"), inputs)
    assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 1e-3
    assert run.tokens == case.tokens


def test_labels_name_the_row_first():
    """transformers 4.57 had rows and columns exchanged, and got other tokens."""
    swapped = load_case("lfm2_vl", "img2", variant="tile_labels_rows_cols_swapped")
    right = load_case("lfm2_vl", "img2")
    model = load("hf")
    media = [prepare(model, part) for part in right.parts]
    assert media[1].geometry["grid"] == [2, 1]
    assert "<|img_row_2_col_1|>" in model.expand(right.prompt, media)
    assert swapped.input_ids != right.input_ids
    assert swapped.tokens != right.tokens


def test_two_requests_interleaved_token_by_token_give_what_each_gives_alone():
    model = load("hf")
    tokenizer = load_tokenizer("lfm2_vl", "hf")
    inputs = [build_input(model, tokenizer, load_case("lfm2_vl", name)) for name in ("img1", "img2")]
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


def test_another_picture_gives_another_answer():
    case = load_case("lfm2_vl", "img1")
    model = load("hf")
    tokenizer = load_tokenizer("lfm2_vl", "hf")
    runs = [greedy(model, build_input(model, tokenizer, case, media=[prepare(model, image_part(n))])) for n in "AB"]
    assert runs[0].tokens == case.tokens
    assert runs[1].tokens != case.tokens


@pytest.fixture
def copy(tmp_path):
    """Copy a layout's folder, with changed settings of the image processor and further weights."""

    def make(layout: str, settings: dict[str, object], extra: dict[str, mx.array] | None = None):
        source = kit() / "lfm2_vl" / layout
        for file in source.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        name = tmp_path / "processor_config.json"
        whole = json.loads(name.read_text()) if name.is_file() else {}
        whole["image_processor"] = whole.get("image_processor", {}) | settings
        name.write_text(json.dumps(whole))
        if extra:
            weights = mx.load(str(source / "model.safetensors")) | extra
            mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
        return lfm2_vl.FAMILY.load(tmp_path, load_config("lfm2_vl", layout))

    return make


def test_a_converters_tile_limits_are_not_the_models(copy):
    """mlx-vlm writes a section with its own limits beside the published settings, and calls it after its own class."""
    limits = load("mlx").parts.settings.limits
    assert limits is not None
    assert limits.max_tiles == 4
    limits = copy("hf", {"max_tiles": 6}).parts.settings.limits
    assert limits is not None
    assert limits.max_tiles == 6, "a section of transformers' is believed"


def test_settings_that_cut_no_tiles_are_said_so(copy, caplog):
    with caplog.at_level(logging.WARNING):
        model = copy("hf", {"do_image_splitting": False})
    assert "do_image_splitting off" in caplog.text
    assert prepare(model, image_part("B")).geometry["grid"] == [0, 0]


def test_tied_copies_and_pooling_heads_are_left_out(copy):
    extra = {"lm_head.weight": mx.zeros((313, 64)), "model.vision_tower.vision_model.head.probe": mx.zeros((1, 1, 32))}
    model = copy("hub", {}, extra)
    case = load_case("lfm2_vl", "text")
    assert greedy(model, build_input(model, load_tokenizer("lfm2_vl", "hub"), case)).tokens == case.tokens


def test_a_checkpoint_of_another_architecture_is_refused(copy):
    with pytest.raises(ModelLoadError, match="no place in this model"):
        copy("hub", {}, {"model.adapter.weight": mx.zeros((2, 2))})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder_patch_size": 14, "tile_size": 56}, "2x2 patches of 14"),
        ({"tile_size": 40}, "tile_size 40 isn't a multiple"),
        ({"min_tiles": 5, "max_tiles": 4}, "no grid has 5 to 4 tiles"),
    ],
)
def test_settings_of_another_model_are_refused(copy, settings, message):
    with pytest.raises(UnsupportedError, match=message):
        copy("hf", settings)
