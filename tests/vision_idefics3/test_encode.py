"""The tower in steps: how many, how large, and that stopping between two of them costs nothing but the picture."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlxgen_vision.towers import pace, siglip
from mlxgen_vision.towers.images import Readout, encode_images, images_per_step
from mlxgen_vision.towers.pixel_shuffle import PixelShuffleConnector, pixel_shuffle
from mlxgen_vision.towers.siglip import SiglipConfig, SiglipTower, grid_positions, siglip_weights

from mlxgen.errors import UnsupportedError

CONFIG = SiglipConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=8
)


@pytest.fixture(scope="module")
def tower() -> SiglipTower:
    mx.random.seed(1)
    made = SiglipTower(CONFIG)
    mx.eval(made.parameters())
    return made


@pytest.fixture(scope="module")
def connector() -> PixelShuffleConnector:
    mx.random.seed(2)
    made = PixelShuffleConnector(16, 12, 2)
    mx.eval(made.parameters())
    return made


@pytest.fixture(scope="module")
def tiles() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((5, 32, 32, 3)).astype(np.float32)


def run(tower, connector, tiles) -> tuple[list, mx.array]:
    *before, last = encode_images(tower, tiles, Readout(connector))
    return before, last["features"]


def test_steps_are_counted_and_the_last_one_has_the_features(tower, connector, tiles, monkeypatch):
    _, whole = run(tower, connector, tiles)
    assert whole.shape == (5 * 4, 12)
    monkeypatch.setattr(pace, "STEP_FLOPS", 1.0)
    before, stepped = run(tower, connector, tiles)
    assert before == [None] * (5 * 4 - 1)  # one block of one tile each, and what comes after the blocks
    assert np.abs(np.array(whole - stepped)).max() < 1e-5
    monkeypatch.setattr(pace, "STEP_FLOPS", 4.5 * CONFIG.block_flops(16))
    monkeypatch.setattr(pace, "STEP_S", 0.0)  # a machine so slow that nothing fits a tenth of a second
    before, _ = run(tower, connector, tiles)
    assert before == [None] * (2 * 4 - 1)  # four tiles, then one, a block at a time


def test_every_step_is_evaluated_before_it_is_reported(tower, connector, tiles, monkeypatch):
    """Nothing may pile up lazily until the last step."""
    evaluated: list[int] = []
    real = mx.eval

    def counting(*arrays: object) -> None:
        evaluated.append(len(arrays))
        real(*arrays)

    monkeypatch.setattr(pace, "STEP_FLOPS", 1.0)
    monkeypatch.setattr(mx, "eval", counting)
    for steps, _ in enumerate(encode_images(tower, tiles, Readout(connector)), start=1):
        assert len(evaluated) >= steps


def test_stopping_between_steps_leaves_nothing_behind(tower, connector, tiles, monkeypatch):
    _, whole = run(tower, connector, tiles)
    monkeypatch.setattr(pace, "STEP_FLOPS", 1.0)
    for stop in (1, 4, 14):
        steps = encode_images(tower, tiles, Readout(connector))
        assert [next(steps) for _ in range(stop)] == [None] * stop
        steps.close()
    _, again = run(tower, connector, tiles)
    assert np.abs(np.array(whole - again)).max() < 1e-5


def test_images_go_together_while_a_block_of_them_is_a_tenth_of_a_second():
    gemma3 = SiglipConfig(1152, 4304, 27, 16, image_size=896, patch_size=14)
    assert images_per_step(gemma3, 5, 64 * 64) == 1
    smolvlm = SiglipConfig(768, 3072, 12, 12, image_size=512, patch_size=16)
    for num_tiles in (1, 2, 17):
        images = images_per_step(smolvlm, num_tiles, 32 * 32)
        assert images == min(num_tiles, 5)
        assert images * smolvlm.block_flops(32 * 32) <= pace.STEP_FLOPS


def test_a_part_is_the_same_alone_and_among_others(tower, connector, tiles):
    _, alone = run(tower, connector, tiles)
    for _ in range(2):
        run(tower, connector, tiles[::-1].copy())
        _, among = run(tower, connector, tiles)
        assert mx.array_equal(alone, among)


def test_the_tower_is_what_the_papers_formulas_say(tower, tiles):
    """Against a NumPy transcription: embedding, pre-norm attention, tanh-GELU, final norm."""

    def norm(x, layer):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(centred.var(-1, keepdims=True) + CONFIG.layer_norm_eps)
        return scaled * np.array(layer.weight) + np.array(layer.bias)

    def dense(x, layer):
        return x @ np.array(layer.weight).T + np.array(layer.bias)

    patches = tiles.reshape(5, 4, 8, 4, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(5, 16, -1)
    kernel = np.array(tower.embeddings.patch_embedding.weight).reshape(16, -1)
    x = patches @ kernel.T + np.array(tower.embeddings.patch_embedding.bias)
    x = x + np.array(tower.embeddings.position_embedding.weight)
    for block in tower.encoder.layers:
        y = norm(x, block.layer_norm1)
        q, k, v = (
            dense(y, p).reshape(5, 16, 2, 8).transpose(0, 2, 1, 3)
            for p in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
        )
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(8))
        y = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + dense(y.transpose(0, 2, 1, 3).reshape(5, 16, 16), block.self_attn.out_proj)
        y = dense(norm(x, block.layer_norm2), block.mlp.fc1)
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + dense(y, block.mlp.fc2)
    *_, last = encode_images(tower, tiles, Readout(lambda hidden: hidden))
    assert np.abs(np.array(last["features"]).reshape(5, 16, 16) - norm(x, tower.post_layernorm)).max() < 1e-5
    *_, raw = encode_images(tower, tiles, Readout(lambda hidden: hidden, post_norm=False))
    assert np.abs(np.array(raw["features"]).reshape(5, 16, 16) - x).max() < 1e-5


@pytest.mark.parametrize("head_dim", [8, 72, 96, 128])
def test_padding_heads_for_the_fused_kernels_changes_nothing(head_dim):
    config = SiglipConfig(hidden_size=2 * head_dim, num_attention_heads=2)
    mx.random.seed(head_dim)
    attention = siglip.Attention(config)
    x = mx.random.normal((2, 9, 2 * head_dim))
    q, k, v = (
        p(x).reshape(2, 9, 2, head_dim).transpose(0, 2, 1, 3)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    weights = mx.softmax((q @ k.transpose(0, 1, 3, 2)) * head_dim**-0.5, axis=-1)
    expected = attention.out_proj((weights @ v).transpose(0, 2, 1, 3).reshape(2, 9, -1))
    assert np.abs(np.array(attention(x) - expected)).max() < 1e-5


@pytest.mark.parametrize("side", [8, 26, 27, 32, 70])
def test_a_full_grid_has_the_positions_of_the_table(side):
    assert grid_positions(side, side, side).tolist() == list(range(side * side))


def test_a_part_of_a_grid_is_spread_over_the_table():
    # Fractions 0, 1/3, 2/3 of the height fall into rows 0, 2, 5 of 8; halves of the width into columns 0 and 4.
    assert grid_positions(3, 2, 8).tolist() == [0, 4, 16, 20, 40, 44]


def test_pixel_shuffle_joins_squares_row_by_row():
    patches = mx.arange(16).reshape(1, 16, 1)
    assert pixel_shuffle(patches, 2)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    with pytest.raises(UnsupportedError, match="3 by 3"):
        pixel_shuffle(patches, 3)


def test_weights_of_old_and_converted_checkpoints_become_the_same():
    first = mx.random.normal((16, 3, 8, 8))
    old = {
        "v.embeddings.patch_embedding.weight": first,
        "v.embeddings.position_ids": mx.arange(16),
        "v.head.probe": mx.zeros((1, 1, 16)),
    }
    converted = {"v.embeddings.patch_embedding.weight": first.transpose(0, 2, 3, 1)}
    made = [siglip_weights(weights, "v.", CONFIG) for weights in (old, converted)]
    assert set(made[0]) == set(made[1]) == {"v.embeddings.patch_embedding.weight"}
    assert mx.array_equal(*(weights["v.embeddings.patch_embedding.weight"] for weights in made))


def test_unknown_towers_are_refused():
    with pytest.raises(UnsupportedError, match="hidden_act is .relu6."):
        SiglipConfig.from_dict({"hidden_act": "relu6"})
    with pytest.raises(UnsupportedError, match="attention heads"):
        SiglipConfig.from_dict({"hidden_size": 100, "num_attention_heads": 16})
    assert isinstance(SiglipTower(SiglipConfig.from_dict({"num_hidden_layers": 1})), nn.Module)
