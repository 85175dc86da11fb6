"""The towers' parts by themselves: windows, steps, positions. The whole is compared in test_parity."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlxgen_vision.towers import blocks, pace
from mlxgen_vision.towers.blocks import block_flops, pad_heads
from mlxgen_vision.towers.qwen2_5_vl import Qwen25VLTower, Qwen25VLVisionConfig, window_members
from mlxgen_vision.towers.qwen3_vl import Qwen3VLTower, Qwen3VLVisionConfig, resampling_taps
from mlxgen_vision.towers.qwen_vit import Windows, attend, patch_coordinates

from mlxgen.cancellation import Cancelled, CancelToken


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


GROUPS = {
    (8, 8): ((4, 16),),
    (4, 8): ((2, 16),),
    (6, 10): ((2, 16), (3, 8), (1, 4)),
    (2, 2): ((1, 4),),
    (2, 12): ((3, 8),),
}


@pytest.mark.parametrize("grid", GROUPS)
def test_windowed_attention_is_full_attention_under_a_mask(grid):
    coordinates = patch_coordinates(*grid, 2)
    query, key, value = (random(len(coordinates), 2, 8, seed=seed) for seed in range(3))
    windows = Windows.of(window_members(coordinates, 4))
    same = (coordinates[:, None] // 4 == coordinates[None] // 4).all(axis=-1)
    heads = [x.transpose(1, 0, 2)[None] for x in (query, key, value)]
    masked = mx.fast.scaled_dot_product_attention(*heads, scale=8**-0.5, mask=mx.array(same))
    listed = (x[mx.array(windows.order)] for x in (query, key, value))
    wanted = masked[0].transpose(1, 0, 2)[mx.array(windows.order)]
    assert mx.abs(attend(*listed, windows).reshape(-1, 2, 8) - wanted).max() <= 1e-5
    assert sorted(windows.order.tolist()) == list(range(len(coordinates)))
    assert sum(count * length for count, length in windows.groups) == len(coordinates)
    assert windows.groups == GROUPS[grid]


@pytest.mark.parametrize("width", [8, 64, 72, 80, 96, 128, 160])
def test_wider_heads_change_nothing(width):
    heads = [random(1, 2, 5, width, seed=seed) for seed in range(3)]
    plain = mx.fast.scaled_dot_product_attention(*heads, scale=width**-0.5)
    padded = mx.fast.scaled_dot_product_attention(*(pad_heads(x) for x in heads), scale=width**-0.5)
    assert padded.shape[-1] in (64, 80, 128, 160)
    assert mx.abs(padded[..., :width] - plain).max() <= 1e-6
    assert mx.abs(padded[..., width:]).sum() == 0


def test_positions_are_resampled_with_aligned_corners():
    coordinates = patch_coordinates(4, 6, 2)
    indices, weights = resampling_taps(coordinates, (4, 6), 12)
    table = np.arange(144.0).reshape(12, 12) ** 1.5
    for (row, column), taps, shares in zip(coordinates, indices, weights, strict=True):
        y, x = row * 11 / 3, column * 11 / 5
        by_rows = [np.interp(x, np.arange(12), table[r]) for r in range(12)]
        assert np.isclose((table.reshape(-1)[taps] * shares).sum(), np.interp(y, np.arange(12), by_rows), rtol=1e-5)
    one, shares = resampling_taps(np.array([[0, 0]]), (1, 1), 12)
    assert one[0, shares[0] > 0].tolist() == [0]


def test_the_next_step_is_what_the_machine_does_in_a_tenth_of_a_second():
    own = pace.Pace()
    assert not own.fits(1.0), "the first step is one block"
    own.took(1e9, 0.01)
    assert own.fits(6.9e9)
    assert not own.fits(7.1e9)
    own.took(1e12, 0.1)  # faster than any step may be long
    assert own.fits(pace.STEP_FLOPS)
    assert not own.fits(1.01 * pace.STEP_FLOPS)


@pytest.mark.parametrize(
    ("num_patches", "flops_per_s", "longest"), [(256, 1e11, 1), (256, 2e12, 9), (1024, 1e12, 1), (16384, 2e13, 1)]
)
def test_no_step_takes_longer_than_a_tenth_of_a_second_or_one_block(num_patches, flops_per_s, longest, monkeypatch):
    """Qwen2.5-VL's tower, 32 blocks of width 1280, on machines of several speeds, with a clock that work moves."""
    costs = [
        block_flops(num_patches, 1280, 3 * 1280 * 3420, num_patches if number in (7, 15, 23, 31) else 64)
        for number in range(32)
    ]
    clock, done, steps = [0.0], [0], [0]

    def block(number, hidden):
        clock[0] += costs[number] / flops_per_s
        done[0] += 1
        return hidden, {}

    monkeypatch.setattr(blocks.time, "perf_counter", lambda: clock[0])
    hidden = mx.zeros((1, 1))
    start_s, start_block = 0.0, 0
    for _ in blocks.run_blocks(hidden, costs, block, lambda x: x):
        num_blocks, took_s = done[0] - start_block, clock[0] - start_s
        assert num_blocks <= 1 or took_s <= 0.1
        start_s, start_block = clock[0], done[0]
        steps.append(num_blocks)
    assert done[0] == 32
    assert max(steps) == longest


@pytest.fixture
def tower():
    config = Qwen3VLVisionConfig(4, 16, 2, 32, 24, 16, deepstack=(0, 2), patch_size=4)
    return Qwen3VLTower(config)


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(pace, "STEP_FLOPS", 0.0)


def test_the_features_dont_depend_on_where_the_steps_are_cut(tower, monkeypatch):
    patches = np.random.default_rng(0).normal(size=(24, 96)).astype(np.float32)
    *_, whole = tower.encode(patches, 4, 6)
    monkeypatch.setattr(pace, "STEP_FLOPS", 0.0)
    *steps, cut = tower.encode(patches, 4, 6)
    assert steps == [None] * 6  # four blocks, and two mergers for deepstack
    assert set(cut) == set(whole) == {"features", "deepstack_0", "deepstack_1"}
    for name in whole:
        assert mx.array_equal(cut[name], whole[name])
        assert whole[name].shape == (6, 24)


def test_a_stop_between_two_steps_runs_no_more_blocks(tower, small_steps):
    runs: list[int] = []
    blocks = tower.blocks
    tower.blocks = [_Counting(block, number, runs) for number, block in enumerate(blocks)]
    cancel = CancelToken()
    patches = np.zeros((24, 96), np.float32)
    steps = tower.encode(patches, 4, 6)
    for _ in range(3):  # a block, what branches off it, a block
        assert next(steps) is None
    cancel.cancel()
    with pytest.raises(Cancelled):
        cancel.checkpoint()
    steps.close()
    assert runs == [0, 1]


class _Counting:
    def __init__(self, block, number, runs):
        self.block, self.number, self.runs = block, number, runs

    def __call__(self, *args):
        self.runs.append(self.number)
        return self.block(*args)


def test_full_attention_blocks_see_further_than_a_window():
    def reach(full: tuple[int, ...]) -> int:
        mx.random.seed(0)
        config = Qwen25VLVisionConfig(1, 16, 2, 32, 24, window_size=8, full_attention=full, patch_size=2, merge_size=2)
        tower = Qwen25VLTower(config)
        patches = np.random.default_rng(0).normal(size=(64, 24)).astype(np.float32)
        changed = patches.copy()
        changed[0] += 1.0
        (*_, before), (*_, after) = tower.encode(patches, 8, 8), tower.encode(changed, 8, 8)
        return int((mx.abs(after["features"] - before["features"]).max(axis=1) > 1e-6).sum().item())

    assert reach(()) == 4  # a window of 8 pixels is 4 patches, 2 tokens, each way
    assert reach((0,)) == 16
