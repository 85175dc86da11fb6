"""Gemma 4, large and small, against the parity kit: every case in every layout."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlxgen_vision.families import gemma4
from parity_kit import (
    build_input,
    case_names,
    greedy,
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
from vision_qwen.reference_resize import resize as reference_resize

from mlxgen.errors import ModelLoadError, UnsupportedError
from mlxgen.inputs import PreparedMedium

pytestmark = needs_kit

FAMILIES = ("gemma4", "gemma4_e")
PAIRS = [(family, layout) for family in FAMILIES for layout in layouts(family)]
CASES = [(family, layout, name) for family, layout in PAIRS for name in case_names(family)]


@cache
def load(family: str, layout: str) -> gemma4.Gemma4Model:
    loaded = load_model(gemma4.FAMILY, family, layout)
    assert isinstance(loaded, gemma4.Gemma4Model)
    return loaded


@pytest.fixture
def reference_pixels(monkeypatch):
    """Resize as the reference does, to the last rounding."""
    monkeypatch.setattr(gemma4, "resize", reference_resize)


@cache
def reference_media(family: str, name: str) -> list[PreparedMedium]:
    """A case's media, prepared and encoded once for all layouts: the weights are the same."""
    return build_input(load(family, "hf"), load_tokenizer(family, "hf"), load_case(family, name)).media


@pytest.mark.parametrize(("family", "layout", "name"), CASES)
def test_ids_features_logits_and_tokens_equal_the_reference(reference_pixels, family, layout, name):
    case = load_case(family, name)
    model = load(family, layout)
    media = None if name == "mix" or layout == "hf" else reference_media(family, name)
    inputs = build_input(model, load_tokenizer(family, layout), case, media=media)
    assert inputs.token_ids == case.input_ids
    marked = np.flatnonzero(case.arrays["mm_token_type_ids"][0])
    assert [at for span in inputs.spans for at in range(span.start, span.end)] == marked.tolist()
    assert inputs.atomic == (tuple((s.start, s.end) for s in inputs.spans) if family == "gemma4" else ())
    for medium in inputs.media:
        if medium.kind == "image" and name != "mix" and medium is not inputs.media[0]:
            continue  # the first of a kind is stored
        features = np.concatenate([np.array(part["features"]) for part in medium.features])
        stored = case.arrays[f"{medium.kind}_features"]
        assert np.abs(features[: len(stored)] - stored).max() <= 1e-4
    runs = [greedy(model, inputs, chunk_size=size) for size in (16, 2048)]
    for run in runs:
        assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 1e-4
        assert run.tokens == case.tokens
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= 1e-5


@pytest.mark.parametrize(("family", "name"), [(f, n) for f in FAMILIES for n in case_names(f)])
def test_own_pixels_give_the_same_tokens(family, name):
    """Pillow's rounding instead of torchvision's. Eight frames of it move these random weights' near ties."""
    case = load_case(family, name)
    inputs = build_input(load(family, "hub"), load_tokenizer(family, "hub"), case)
    assert inputs.token_ids == case.input_ids
    run = greedy(load(family, "hub"), inputs)
    assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 2e-2
    assert run.tokens[0] == case.tokens[0]
    assert run.tokens == case.tokens or any(medium.kind == "video" for medium in inputs.media)


@pytest.mark.parametrize("name", [name for name in case_names("gemma4") if name != "text"])
def test_own_pixels_are_the_reference_up_to_rounding(monkeypatch, name):
    case = load_case("gemma4", name)
    model = load("gemma4", "hub")
    own = [prepare(model, part).frames for part in case.parts]
    monkeypatch.setattr(gemma4, "resize", reference_resize)
    reference = [prepare(model, part).frames for part in case.parts]
    for ours, theirs in zip(own, reference, strict=True):
        apart = np.abs(np.stack(ours).astype(int) - np.stack(theirs).astype(int))
        assert apart.max() <= 2
        assert (apart > 0).mean() < 0.02


@pytest.mark.parametrize("name", ["img1", "img2", "vid1"])
def test_patches_stand_where_the_reference_has_them(name):
    """Its position ids are padded to the budget; a picture here has exactly its own patches."""
    case = load_case("gemma4", name)
    for number, part in enumerate(case.parts):
        for frame in prepare(load("gemma4", "hf"), part).frames:
            rows, columns = frame.shape[0] // 16, frame.shape[1] // 16
            kind = "video" if name == "vid1" else "image"
            positions = case.arrays[f"{kind}_position_ids"][number]
            grid = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2)
            assert np.array_equal(positions[: len(grid)], grid)
            assert (positions[len(grid) :] == -1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_requests_interleaved_token_by_token_give_what_each_gives_alone(family):
    model = load(family, "hf")
    tokenizer = load_tokenizer(family, "hf")
    inputs = [build_input(model, tokenizer, load_case(family, name)) for name in ("img1", "img2")]
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


def test_text_and_decoding_are_mlx_lms_own_passes_and_make_no_masks(monkeypatch):
    case = load_case("gemma4", "img1")
    model = load("gemma4", "hf")
    inputs = build_input(model, load_tokenizer("gemma4", "hf"), case)
    caches = make_prompt_cache(model.language)
    token = int(mx.argmax(prefill(model, inputs, caches)))
    monkeypatch.setattr(gemma4, "BlockMasks", None)
    monkeypatch.setattr(gemma4, "place", None)
    logits = step(model, token, len(inputs.token_ids), caches, inputs)
    assert logits.shape == (300,)
    ids = mx.array(load_case("gemma4", "text").input_ids)
    ours, theirs = make_prompt_cache(model.language), make_prompt_cache(model.language)
    own = model.forward(ids, cache=ours, start=0, inputs=None)
    assert mx.array_equal(own, model.language(ids[None], cache=theirs))


def _copy(tmp_path, family: str, extra: dict[str, mx.array], *, drop: str = "") -> None:
    source = kit() / family / "hub"
    for file in source.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = {k: v for k, v in mx.load(str(source / "model.safetensors")).items() if not drop or drop not in k}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights | extra)


def test_what_published_checkpoints_have_besides_is_left_out(tmp_path):
    """The audio tower, keys and values of layers that share them, bounds that aren't used."""
    surplus = {
        "model.audio_tower.layers.0.norm_out.weight": mx.zeros((4,)),
        "model.embed_audio.embedding_projection.weight": mx.zeros((4, 4)),
        "model.language_model.layers.3.self_attn.k_proj.weight": mx.zeros((64, 64)),
        "model.language_model.layers.3.self_attn.k_norm.weight": mx.zeros((32,)),
        "model.vision_tower.encoder.layers.0.mlp.up_proj.input_max": mx.array(1.0),
    }
    _copy(tmp_path, "gemma4_e", surplus)
    model = gemma4.FAMILY.load(tmp_path, load_config("gemma4_e", "hub"))
    case = load_case("gemma4_e", "text")
    run = greedy(model, build_input(model, load_tokenizer("gemma4_e", "hub"), case))
    assert run.tokens == case.tokens


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    _copy(tmp_path, "gemma4", {"model.vision_tower.adapter.weight": mx.zeros((2, 2))})
    with pytest.raises(ModelLoadError, match="don't belong"):
        gemma4.FAMILY.load(tmp_path, load_config("gemma4", "hub"))


def test_processor_settings_of_another_model_are_refused(tmp_path):
    _copy(tmp_path, "gemma4", {})
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"patch_size": 14}}')
    with pytest.raises(UnsupportedError, match="3x3 patches of 14"):
        gemma4.FAMILY.load(tmp_path, load_config("gemma4", "hub"))
