"""Three-axis rotation in mlx-lm's models: against a plain computation, and in every kind of cache."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope
from mlxgen_vision.mrope import CacheView, MultiAxisRope, positioned
from parity_kit import encode, greedy, prepare
from vision_qwen import tiny_qwen
from vision_qwen.conftest import family

from mlxgen.errors import UnsupportedError
from mlxgen.inputs import PreparedInput
from mlxgen.request import ImagePart


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    made = {}
    for kind, name in (("qwen3_vl_moe", "qwen3_vl"), ("qwen3_5_moe", "qwen3_5")):
        path = tiny_qwen.write(root / kind, kind, "mlx")
        made[kind] = family(name).load(path, json.loads((path / "config.json").read_text()))
    return made


def with_picture(model, pixels) -> PreparedInput:
    medium = prepare(model, ImagePart(pixels))
    encode(model, medium)
    count = medium.geometry["grid"][1] * medium.geometry["grid"][2] // 4
    ids = [5, 17, 99, tiny_qwen.START, *[tiny_qwen.IMAGE] * count, tiny_qwen.END, 3, 42, 64]
    spans = model.locate(ids, [medium])
    position_ids, delta = model.positions(ids, [medium], spans)
    return PreparedInput(ids, [medium], spans, position_ids, delta)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rotation_is_that_of_each_frequencys_axis(interleaved):
    sections = [4, 2, 2]
    rope = MultiAxisRope(nn.RoPE(16, base=100.0), sections, interleaved=interleaved)
    x = mx.random.normal((1, 2, 5, 20), key=mx.random.key(0))
    positions = np.array([[0, 1, 1, 7, 300], [0, 1, 2, 8, 2], [0, 4, 1, 9, 41]])
    ours = np.array(rope(x, rope.rotation(positions)), dtype=np.float64)
    axes = [0, 1, 2, 0, 1, 2, 0, 0] if interleaved else [0, 0, 0, 0, 1, 1, 2, 2]
    values = np.array(x, dtype=np.float64)
    for token in range(5):
        for i, axis in enumerate(axes):
            angle = positions[axis, token] * 100.0 ** (-i / 8)
            a, b = values[0, :, token, i], values[0, :, token, i + 8]
            assert np.allclose(ours[0, :, token, i], a * np.cos(angle) - b * np.sin(angle), atol=1e-4)
            assert np.allclose(ours[0, :, token, i + 8], b * np.cos(angle) + a * np.sin(angle), atol=1e-4)
    assert np.array_equal(ours[..., 16:], values[..., 16:])


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 4.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_equal_axes_are_plain_rope_under_every_scaling(scaling):
    plain = initialize_rope(16, 1000.0, False, scaling, 256)
    rope = MultiAxisRope(plain, [2, 3, 3], interleaved=False)
    x = mx.random.normal((1, 2, 6, 16), key=mx.random.key(1))
    ours = rope(x, rope.rotation(np.tile(np.arange(40, 46), (3, 1))))
    assert mx.abs(ours - plain(x, offset=40)).max() <= 2e-5
    assert mx.array_equal(rope(x, 40), plain(x, offset=40))


def test_a_length_dependent_scaling_is_refused():
    plain = initialize_rope(16, 1000.0, False, {"type": "dynamic", "factor": 2.0}, 256)
    with pytest.raises(UnsupportedError, match="DynamicNTKScalingRoPE"):
        MultiAxisRope(plain, [2, 3, 3], interleaved=False)


def test_text_gets_the_caches_themselves():
    caches = [KVCache(), ArraysCache(2)]
    rope = MultiAxisRope(nn.RoPE(16), [2, 3, 3], interleaved=False)
    assert all(a is b for a, b in zip(positioned(caches, rope, 5, range(5, 7)), caches, strict=True))
    shifted = positioned(caches, rope, 3, range(5, 7))
    assert isinstance(shifted[0], CacheView)
    assert shifted[0].offset != caches[0].offset == 0
    assert shifted[1] is caches[1]


def test_text_after_a_picture_is_rotated_alike_in_either_form(monkeypatch):
    """By the integer, as the GPU's fused kernel takes it, and by cosines and sines made once for all layers."""
    rope = MultiAxisRope(nn.RoPE(16), [2, 3, 3], interleaved=False)
    x = mx.random.normal((1, 3, 4, 24), key=mx.random.key(0))
    made = rope(x, rope.offset(11, range(90, 94)))
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert rope.offset(11, range(90, 94)) == 11
    assert mx.abs(made - rope(x, 11)).max() <= 1e-5


@pytest.mark.parametrize("chunk_size", [4, 2048])
@pytest.mark.parametrize("kind", tiny_qwen.KINDS)
def test_every_kind_of_cache_works(models, picture, kind, chunk_size):
    model = models[kind]
    inputs = with_picture(model, picture(40, 56))
    reference = greedy(model, inputs, chunk_size=chunk_size, num_tokens=12)

    def caches(make):
        return [make() if isinstance(c, KVCache) else c for c in make_prompt_cache(model.language)]

    roomy = greedy(model, inputs, chunk_size=chunk_size, caches=caches(lambda: RotatingKVCache(512)), num_tokens=12)
    assert np.abs(roomy.last_logits - reference.last_logits).max() <= 1e-5
    assert roomy.tokens == reference.tokens
    packed = greedy(model, inputs, chunk_size=chunk_size, caches=caches(lambda: QuantizedKVCache(32, 8)), num_tokens=12)
    assert 0 < np.abs(packed.last_logits - reference.last_logits).max() <= 0.1
    tight = greedy(model, inputs, chunk_size=chunk_size, caches=caches(lambda: RotatingKVCache(8)), num_tokens=12)
    assert np.isfinite(tight.last_logits).all()
    if chunk_size == 4:  # it has forgotten the picture
        assert np.abs(tight.last_logits - reference.last_logits).max() >= 1e-4


@pytest.mark.parametrize("kind", tiny_qwen.KINDS)
def test_a_run_leaves_nothing_on_the_model(models, picture, kind):
    model = models[kind]

    def state():
        arrays = {name: id(array) for name, array in tree_flatten(model.language.parameters())}
        attributes = {
            f"{path}.{name}": repr(value)
            for path, module in model.language.named_modules()
            for name, value in vars(module).items()
        }
        return arrays, attributes, repr(vars(model.parts.rope))

    before = state()
    greedy(model, with_picture(model, picture(40, 56)), num_tokens=3)
    assert state() == before


@pytest.mark.parametrize("kind", tiny_qwen.KINDS)
def test_after_a_run_the_caches_are_plain(models, picture, kind):
    model = models[kind]
    inputs = with_picture(model, picture(40, 56))
    caches = make_prompt_cache(model.language)
    greedy(model, inputs, chunk_size=5, caches=caches, num_tokens=3)
    for cache in caches:
        if isinstance(cache, KVCache):
            assert type(cache.offset) is int
            assert cache.offset == len(inputs.token_ids) + 2
            assert set(vars(cache)) == {"keys", "values", "offset"}
    mx.eval([cache.state for cache in caches if isinstance(cache, ArraysCache)])
