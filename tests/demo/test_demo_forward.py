"""The forward pass the demonstration model is trained with is Qwen2.5-VL's, and its prompts are the template's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import demo_data as data
import demo_export
import demo_forward as forward
import demo_start
import train_demo
from demo_encoding import Encoder
from jinja2 import Environment

KIT = os.environ.get("MLXGEN_PARITY")
needs_kit = pytest.mark.skipif(KIT is None, reason="MLXGEN_PARITY is not set: parity was NOT checked")


@pytest.fixture(scope="module")
def kit() -> tuple[forward.Shape, forward.Params, dict, dict]:
    assert KIT is not None
    folder = Path(KIT) / "qwen2_5_vl"
    config = json.loads((folder / "hf" / "config.json").read_text())
    cases = json.loads((Path(KIT) / "reference.json").read_text())["families"]["qwen2_5_vl"]["cases"]
    params = mx.load(str(folder / "hf" / "model.safetensors"))
    return forward.Shape.of(config), params, cases, dict(np.load(folder / "reference.npz"))


@needs_kit
@pytest.mark.parity
@pytest.mark.parametrize("case", ["text", "img1"])
def test_last_logits_are_those_of_the_reference(case: str, kit: tuple) -> None:
    shape, params, cases, arrays = kit
    ids = np.array(cases[case]["input_ids"])
    features, index = None, np.full(len(ids), -1)
    if case == "img1":
        _, grid_h, grid_w = cases[case]["processor_output"]["values"]["image_grid_thw"][0]
        layout = forward.layout_of(shape, grid_h, grid_w)
        features = forward.tower(params, shape, mx.array(arrays["img1/pixel_values"])[None], layout)
        np.testing.assert_allclose(np.array(features[0]), arrays["img1/image_features"], atol=1e-4)
        index[ids == 6] = np.arange((ids == 6).sum())
    positions = mx.array(arrays[f"{case}/position_ids"])[:, None]
    states = forward.hidden(params, shape, mx.array(ids)[None], positions, features, mx.array(index)[None])
    last = np.array(forward.logits(params, states[:, -1]))[0]
    np.testing.assert_allclose(last, arrays[f"{case}/last_logits"], atol=1e-4)


@needs_kit
@pytest.mark.parity
def test_a_grid_that_cuts_windows_is_masked_and_a_whole_one_is_split(kit: tuple) -> None:
    shape = kit[0]
    assert forward.layout_of(shape, 4, 6).mask is not None
    assert forward.layout_of(shape, 12, 8).mask is None


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(demo_start.train_tokenizer(3))


@pytest.mark.parametrize("form", [form for form, *_ in train_demo.FORMS])
def test_training_text_is_what_the_chat_template_renders(form: str, encoder: Encoder) -> None:
    dialogue = data.make_dialogue(np.random.default_rng(11), form, 3)
    messages = []
    for number, turn in enumerate(dialogue.turns):
        media = [{"type": "video" if m.is_clip else "image"} for m in dialogue.media] if number == 0 else []
        messages.append({"role": "user", "content": [*media, {"type": "text", "text": turn.question}]})
        messages.append({"role": "assistant", "content": turn.answer})
    text = "".join(part for part, *_ in encoder.segments(dialogue))
    whole = encoder.tokenizer.encode(text, add_special_tokens=False).ids
    assert encoder.batch([dialogue]).tokens[0].tolist() == whole
    for medium in dialogue.media:
        pad = "<|video_pad|>" if medium.is_clip else "<|image_pad|>"
        text = text.replace(pad * len(medium.labels) * data.PICTURE_TOKENS, pad)
    template = Environment().from_string(demo_export.CHAT_TEMPLATE)
    assert template.render(messages=messages, add_generation_prompt=False) == text


def test_targets_are_the_answers_and_nothing_else(encoder: Encoder) -> None:
    dialogue = data.make_dialogue(np.random.default_rng(12), "picture", 3)
    batch = encoder.batch([dialogue])
    for number, turn in enumerate(dialogue.turns):
        chosen = batch.targets[0][batch.turn_of[0] == number]
        decoded = encoder.tokenizer.decode(chosen.tolist(), skip_special_tokens=False)
        assert decoded == turn.answer + "<|im_end|>"
    assert ((batch.targets >= 0) == (batch.turn_of >= 0)).all()


def test_fast_activations_match_mlx() -> None:
    x = mx.array(np.random.default_rng(0).standard_normal((64, 33)).astype(np.float32) * 6)
    y = mx.array(np.random.default_rng(1).standard_normal((64, 33)).astype(np.float32))
    pairs = [
        (lambda a: forward.softmax(a), lambda a: mx.softmax(a, -1)),
        (lambda a: forward.swiglu(a, y), lambda a: a * mx.sigmoid(a) * y),
        (lambda a: forward.gelu(a), lambda a: a * 0.5 * (1 + mx.erf(a / 2**0.5))),
    ]
    for ours, theirs in pairs:
        np.testing.assert_allclose(np.array(ours(x)), np.array(theirs(x)), atol=2e-5, rtol=1e-4)
        gradients = [mx.grad(lambda a, f=f: (f(a) * y).sum())(x) for f in (ours, theirs)]
        np.testing.assert_allclose(np.array(gradients[0]), np.array(gradients[1]), atol=1e-4, rtol=1e-3)
