"""Idefics3 and SmolVLM against the parity kit: every case in every layout."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlxgen_vision.families import idefics3, smolvlm
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

FAMILIES = {"idefics3": idefics3.FAMILY, "smolvlm": smolvlm.FAMILY}
PAIRS = [(family, layout) for family in FAMILIES for layout in layouts(family)]
CASES = [(family, layout, name) for family, layout in PAIRS for name in case_names(family)]


@cache
def load(family: str, layout: str) -> idefics3.Idefics3Model:
    loaded = load_model(FAMILIES[family], family, layout)
    assert isinstance(loaded, idefics3.Idefics3Model)
    return loaded


@pytest.fixture
def reference_pixels(monkeypatch):
    """Resize as the reference does, to the last rounding."""
    for module in (idefics3, smolvlm):
        monkeypatch.setattr(module, "resize", reference_resize)


@pytest.mark.parametrize(("family", "layout", "name"), CASES)
def test_ids_features_logits_and_tokens_equal_the_reference(reference_pixels, family, layout, name):
    case = load_case(family, name)
    model = load(family, layout)
    inputs = build_input(model, load_tokenizer(family, layout), case)
    assert inputs.token_ids == case.input_ids
    assert inputs.atomic == ()
    places = [at for span in inputs.spans for at in range(span.start, span.end)]
    assert places == [at for at, token in enumerate(inputs.token_ids) if token == 4]
    if inputs.media:
        mask = case.arrays["pixel_attention_mask"]
        assert mask.all(), "the rule that tiles have no padding"
        assert sum(1 if f.ndim == 3 else len(f) for m in inputs.media for f in m.frames) == mask.shape[1]
        key = "video_features" if name == "vid1" else "image_features"
        features = np.concatenate([np.array(part["features"]) for part in inputs.media[0].features])
        stored = case.arrays[key]
        assert np.abs(features[: len(stored)] - stored).max() <= 1e-4
    runs = [greedy(model, inputs, chunk_size=size) for size in (16, 2048)]
    for run in runs:
        assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 1e-4
        assert run.tokens == case.tokens
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= 1e-5


@pytest.mark.parametrize(("family", "name"), [(f, n) for f in FAMILIES for n in case_names(f)])
def test_own_pixels_give_the_same_tokens(family, name):
    """Pillow's rounding instead of torchvision's: pixels differ by a step here and there, logits in the third place."""
    case = load_case(family, name)
    model = load(family, "hub")
    inputs = build_input(model, load_tokenizer(family, "hub"), case)
    assert inputs.token_ids == case.input_ids
    run = greedy(model, inputs)
    assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 2e-2
    assert run.tokens == case.tokens


@pytest.mark.parametrize(("family", "name"), [(f, n) for f in FAMILIES for n in case_names(f) if n != "text"])
def test_own_pixels_are_the_reference_up_to_rounding(monkeypatch, family, name):
    case = load_case(family, name)
    model = load(family, "hub")
    own = [prepare(model, part).frames for part in case.parts]
    for module in (idefics3, smolvlm):
        monkeypatch.setattr(module, "resize", reference_resize)
    reference = [prepare(model, part).frames for part in case.parts]
    for ours, theirs in zip(own, reference, strict=True):
        apart = np.abs(np.stack(ours).astype(int) - np.stack(theirs).astype(int))
        assert apart.max() <= 2
        assert (apart > 0).mean() < 0.1


def test_two_requests_interleaved_token_by_token_give_what_each_gives_alone():
    model = load("smolvlm", "hf")
    tokenizer = load_tokenizer("smolvlm", "hf")
    inputs = [build_input(model, tokenizer, load_case("smolvlm", name)) for name in ("img1", "vid1")]
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
    case = load_case("idefics3", "img1")
    model = load("idefics3", "hf")
    tokenizer = load_tokenizer("idefics3", "hf")
    runs = [greedy(model, build_input(model, tokenizer, case, media=[prepare(model, image_part(n))])) for n in "AB"]
    assert runs[0].tokens == case.tokens
    assert runs[1].tokens != case.tokens


def test_pictures_and_videos_in_one_prompt():
    """transformers can't; each medium keeps its own features, in the order of the placeholders."""
    model = load("smolvlm", "hf")
    tokenizer = load_tokenizer("smolvlm", "hf")
    picture = load_case("smolvlm", "img1").parts[0]
    video = load_case("smolvlm", "vid1").parts[0]
    media = [prepare(model, video), prepare(model, picture)]
    text = model.expand("Watch <video> then <image>.", media)
    spans = model.locate(tokenizer.encode(text).ids, media)
    assert [span.medium for span in spans] == [0] * 8 + [1] * 5
    assert [span.row_start for span in spans] == [16 * n for n in range(8)] + [16 * n for n in range(5)]


def test_a_quantised_tower_and_connector_equal_their_weights_dequantised(tmp_path):
    """As converters leave them: every layer whose width allows it in 8 bits, the position table included."""
    source = kit() / "smolvlm" / "mlx"
    packed, plain = {}, {}
    for name, weight in mx.load(str(source / "model.safetensors")).items():
        packed[name] = plain[name] = weight
        if name.startswith(("vision_model.", "connector.")) and weight.ndim == 2 and weight.shape[-1] % 32 == 0:
            stem = name.removesuffix(".weight")
            parts = mx.quantize(weight, group_size=32, bits=8)
            packed |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
            plain[name] = mx.dequantize(*parts, group_size=32, bits=8)
    assert "vision_model.embeddings.position_embedding.scales" in packed
    assert "connector.modality_projection.proj.scales" in packed
    tiles = np.random.default_rng(0).standard_normal((2, 64, 64, 3)).astype(np.float32)
    features = []
    for folder, weights in ((tmp_path / "packed", packed), (tmp_path / "plain", plain)):
        folder.mkdir()
        for file in source.glob("*.json"):
            if not file.name.startswith("model"):
                (folder / file.name).write_bytes(file.read_bytes())
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        *_, last = smolvlm.FAMILY.load(folder, load_config("smolvlm", "mlx")).encode_tiles(tiles)
        features.append(np.array(last["features"]))
    assert np.abs(features[0] - features[1]).max() <= 1e-4
    assert np.abs(features[0]).max() > 0.1


@pytest.mark.parametrize("name", ["model.vision_model.encoder.layers.2.mlp.fc1.weight", "model.adapter.weight"])
def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, name):
    source = kit() / "idefics3" / "hub"
    for file in source.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = mx.load(str(source / "model.safetensors")) | {name: mx.zeros((2, 2))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    with pytest.raises(ModelLoadError):
        idefics3.FAMILY.load(tmp_path, load_config("idefics3", "hub"))


def test_processor_settings_of_another_model_are_refused(tmp_path):
    for file in (kit() / "idefics3" / "hub").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "processor_config.json").write_text('{"image_seq_len": 169}')
    with pytest.raises(UnsupportedError, match="image_seq_len 169"):
        idefics3.FAMILY.load(tmp_path, load_config("idefics3", "hub"))
