"""Mixtures of experts: no kit checkpoint has any, so tiny ones are built here, in every layout."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as mlx_lm_load
from parity_kit import encode, greedy, prepare
from vision_qwen import tiny_qwen
from vision_qwen.conftest import family

from mlxgen.inputs import PreparedInput
from mlxgen.request import ImagePart

TEXT = [5, 17, 99, 3, 42, 64, 8, 71, 30, 2, 88, 19]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")

    def make(kind: str, layout: str):
        path = root / kind / layout
        return path if path.exists() else tiny_qwen.write(path, kind, layout)

    return make


def load(path):
    config = json.loads((path / "config.json").read_text())
    return family("qwen3_5" if "3_5" in config["model_type"] else "qwen3_vl").load(path, config)


def with_picture(model, pixels) -> PreparedInput:
    medium = prepare(model, ImagePart(pixels))
    encode(model, medium)
    count = medium.geometry["grid"][1] * medium.geometry["grid"][2] // 4
    ids = [*TEXT[:4], tiny_qwen.START, *[tiny_qwen.IMAGE] * count, tiny_qwen.END, *TEXT[4:]]
    spans = model.locate(ids, [medium])
    position_ids, delta = model.positions(ids, [medium], spans)
    return PreparedInput(ids, [medium], spans, position_ids, delta)


@pytest.mark.parametrize("kind", tiny_qwen.KINDS)
def test_every_layout_of_the_experts_is_the_same_model(folder, kind, picture):
    models = {layout: load(folder(kind, layout)) for layout in tiny_qwen.LAYOUTS}
    runs = {
        layout: greedy(model, with_picture(model, picture(40, 56)), num_tokens=12) for layout, model in models.items()
    }
    for layout in tiny_qwen.LAYOUTS:
        assert np.abs(runs[layout].last_logits - runs["mlx"].last_logits).max() <= 1e-6, layout
        assert runs[layout].tokens == runs["mlx"].tokens


@pytest.mark.parametrize("kind", tiny_qwen.KINDS)
def test_text_is_bit_for_bit_what_mlx_lm_computes(folder, kind):
    path = folder(kind, "fused_in_out" if kind == "qwen3_vl_moe" else "fused_out_in")
    model = load(path)
    theirs, _ = mlx_lm_load(path, strict=False)  # it doesn't expect the weights of the tower and of `mtp`
    for ids in (TEXT, TEXT[:1]):
        ours, reference = make_prompt_cache(model.language), make_prompt_cache(theirs)
        for start, part in ((0, ids), (len(ids), [7])):
            array = mx.array(part, dtype=mx.uint32)
            logits = model.forward(array, cache=ours, start=start, inputs=None)
            assert mx.array_equal(logits, theirs(array[None], cache=reference))


@pytest.mark.parametrize("kind", tiny_qwen.KINDS)
def test_a_picture_changes_the_output_and_chunks_dont(folder, kind, picture):
    model = load(folder(kind, "mlx"))
    one, other = (with_picture(model, picture(40, 56, seed)) for seed in (0, 1))
    assert one.token_ids == other.token_ids
    runs = [greedy(model, inputs, chunk_size=size) for inputs, size in ((one, 2048), (one, 5), (other, 2048))]
    assert runs[0].tokens == runs[1].tokens
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= 2e-5
    assert np.abs(runs[0].last_logits - runs[2].last_logits).max() >= 1e-2


def test_deepstack_rows_reach_the_layers(folder, picture):
    model = load(folder("qwen3_vl_moe", "mlx"))
    inputs = with_picture(model, picture(40, 56))
    with_rows = greedy(model, inputs, num_tokens=1).last_logits
    for level in (0, 1):
        features = inputs.media[0].features[0]
        kept = features[f"deepstack_{level}"]
        features[f"deepstack_{level}"] = mx.zeros_like(kept)
        assert np.abs(greedy(model, inputs, num_tokens=1).last_logits - with_rows).max() >= 1e-3
        features[f"deepstack_{level}"] = kept


@pytest.mark.parametrize("kind", tiny_qwen.KINDS)
def test_a_quantised_mixture_loads(folder, kind, tmp_path, picture):
    source = folder(kind, "mlx")
    weights = mx.load(str(source / "model.safetensors"))
    packed, plain = {}, {}
    for name, value in weights.items():
        quantise = value.ndim in (2, 3) and value.shape[-1] % 32 == 0 and "conv1d" not in name  # the tower's, too
        if not quantise:
            packed[name] = plain[name] = value
            continue
        bits = 8 if name.endswith("mlp.gate.weight") else 4
        parts = mx.quantize(value, group_size=32, bits=bits)
        stem = name.removesuffix(".weight")
        packed |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
        plain[name] = mx.dequantize(*parts, group_size=32, bits=bits)
    runs = []
    for label, arrays in (("packed", packed), ("plain", plain)):
        path = tmp_path / label
        path.mkdir()
        for file in source.glob("*.json"):
            (path / file.name).write_text(file.read_text())
        mx.save_safetensors(str(path / "model.safetensors"), arrays)
        model = load(path)
        runs.append(greedy(model, with_picture(model, picture(40, 56)), num_tokens=8))
    assert isinstance(load(tmp_path / "packed").language.model.embed_tokens, nn.QuantizedEmbedding)
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= 1e-3
    assert runs[0].tokens == runs[1].tokens
