from __future__ import annotations

import threading
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from mlxgen.errors import InvalidValueError
from mlxgen.sampling import SamplingParams, build_sampler, step_key
from mlxgen.sampling.keys import step_uniform, step_word

LOGITS = np.array([[2.0, 0.3, 1.7, -1.0, 0.9, 1.8, -3.0, 0.0, 1.2, -0.4, 0.6, -2.0]], dtype=np.float32)


NUM_DRAWS = 4000


def _expected(params: SamplingParams) -> np.ndarray:
    """Probabilities by mlx-lm's own filters, called one after the other; XTC (always applied) by its definition."""
    x = mx.array(LOGITS)
    x = x - mx.logsumexp(x, axis=-1, keepdims=True)
    if 0 < params.top_p < 1:
        x = sample_utils.apply_top_p(x, params.top_p)
    if params.min_p:
        x = sample_utils.apply_min_p(x, params.min_p, params.min_tokens_to_keep)
    if params.xtc_probability:
        probs = np.array(mx.softmax(x, axis=-1))[0]
        above = [token for token in np.argsort(-probs) if probs[token] > params.xtc_threshold]
        kept = np.array(x)
        kept[0, above[:-1]] = -np.inf
        x = mx.array(kept)
    if 0 < params.top_k < LOGITS.shape[1]:
        x = sample_utils.apply_top_k(x, params.top_k)
    return np.array(mx.softmax(x / params.temperature, axis=-1))[0]


def _frequencies(params: SamplingParams, dtype: mx.Dtype = mx.float32) -> np.ndarray:
    """How often each token is drawn, by drawing once for many equal rows."""
    rows = mx.repeat(mx.array(LOGITS).astype(dtype), NUM_DRAWS, axis=0)
    return np.bincount(np.array(build_sampler(params)(rows, 3)), minlength=LOGITS.shape[1]) / NUM_DRAWS


def _close(seen: np.ndarray, expected: np.ndarray, num_draws: int) -> bool:
    """Within 4.5 standard deviations; the draws are fixed by the seed."""
    return bool(np.all(np.abs(seen - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / num_draws) + 1e-9))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.4},
        {"top_p": 0.6},
        {"top_p": 0.05},
        {"top_k": 4},
        {"top_k": 12},
        {"min_p": 0.3},
        {"min_p": 0.9, "min_tokens_to_keep": 3},
        {"top_p": 0.5, "min_p": 0.99, "min_tokens_to_keep": 8},
        {"top_p": 0.7, "top_k": 3},
        {"top_p": 0.4, "top_k": 6, "min_p": 0.2},
        {"top_k": 5, "min_p": 0.95, "min_tokens_to_keep": 7},
        {"top_k": 5, "min_p": 0.95, "min_tokens_to_keep": 2},
        {"xtc_probability": 1.0, "xtc_threshold": 0.12},
        {"xtc_probability": 1.0, "xtc_threshold": 0.1, "top_k": 2, "top_p": 0.95},
        {"xtc_probability": 1.0, "xtc_threshold": 0.1, "top_k": 1},
    ],
    ids=str,
)
def test_distribution_is_that_of_mlx_lms_filters(options: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 0.8, "seed": 11, **options})  # type: ignore[arg-type]
    expected, seen = _expected(params), _frequencies(params)
    assert set(np.flatnonzero(seen)) <= set(np.flatnonzero(expected))
    assert _close(seen, expected, NUM_DRAWS)


def test_xtc_applies_as_often_as_asked_and_spares_special_tokens() -> None:
    params = SamplingParams(temperature=1.0, seed=3, xtc_probability=0.25, xtc_threshold=0.1)
    plain = _expected(SamplingParams(temperature=1.0))
    reduced = _expected(SamplingParams(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.1))
    expected = 0.75 * plain + 0.25 * reduced
    sampler = build_sampler(params)
    draws = np.array(mx.concatenate([sampler(mx.array(LOGITS), step) for step in range(800)]))
    assert _close(np.bincount(draws, minlength=LOGITS.shape[1]) / 800, expected, 800)

    always = SamplingParams(temperature=1.0, seed=3, xtc_probability=1.0, xtc_threshold=0.1)
    sampler = build_sampler(always, xtc_special_tokens=[0])
    seen = Counter(sampler(mx.array(LOGITS), step).item() for step in range(200))
    assert seen[0] > 30
    assert seen[5] == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_greedy_is_argmax_in_every_dtype(dtype: mx.Dtype) -> None:
    logits = mx.array(LOGITS).astype(dtype)
    token = build_sampler(SamplingParams())(logits, 0)
    assert token.shape == (1,)
    assert token.item() == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits_give_the_same_distribution(dtype: mx.Dtype) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.8, seed=11)
    assert np.abs(_frequencies(params, dtype=dtype) - _expected(params)).max() < 0.03


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.9, "top_k": 5, "min_p": 0.01}])
def test_a_shift_of_the_logits_changes_nothing(options: dict[str, float]) -> None:
    """Logits and log-probabilities are both fine: only differences matter."""
    sampler = build_sampler(SamplingParams(temperature=0.7, seed=1, **options))  # type: ignore[arg-type]
    one = [sampler(mx.array(LOGITS), step).item() for step in range(50)]
    other = [sampler(mx.array(LOGITS + 64.0), step).item() for step in range(50)]
    assert one == other


def test_banned_tokens_are_never_drawn() -> None:
    logits = LOGITS.copy()
    logits[0, [0, 2, 5]] = -np.inf
    for options in ({}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1, "top_k": 11}):
        sampler = build_sampler(SamplingParams(temperature=2.0, seed=1, **options))  # type: ignore[arg-type]
        assert not {sampler(mx.array(logits), step).item() for step in range(200)} & {0, 2, 5}


def test_tiny_temperatures_are_finite() -> None:
    sampler = build_sampler(SamplingParams(temperature=1e-6, seed=1))
    assert {sampler(mx.array(LOGITS * 50), step).item() for step in range(50)} == {0}


def test_a_step_depends_on_seed_and_number_only() -> None:
    params = SamplingParams(temperature=1.0, seed=77)
    logits = mx.array(LOGITS)
    forward = [build_sampler(params)(logits, step).item() for step in range(30)]
    sampler = build_sampler(params)
    mx.random.seed(1)
    mx.eval(mx.random.uniform(shape=(3,)))
    backward = [sampler(logits, step).item() for step in reversed(range(30))]
    assert forward == backward[::-1]
    assert forward != [build_sampler(SamplingParams(temperature=1.0, seed=78))(logits, s).item() for s in range(30)]


def test_the_global_generator_is_not_touched() -> None:
    mx.random.seed(4)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(4)
    params = SamplingParams(temperature=1.0, seed=1, top_p=0.9, xtc_probability=0.5)
    mx.eval([build_sampler(params)(mx.array(LOGITS), step) for step in range(5)])
    assert mx.random.uniform(shape=(4,)).tolist() == expected


def test_one_sampler_gives_the_same_in_every_thread() -> None:
    sampler = build_sampler(SamplingParams(temperature=1.0, top_p=0.9, top_k=6, min_p=0.01, seed=5))
    results: list[list[int]] = []

    def run() -> None:
        try:
            logits = mx.array(LOGITS)
            results.append([sampler(logits, step).item() for step in range(40)])
        finally:
            mx.clear_streams()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    here = [sampler(mx.array(LOGITS), step).item() for step in range(40)]
    assert results == [here] * 3


def test_compiled_as_on_a_gpu_the_key_is_not_baked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=6, min_p=0.01, seed=5)
    eager = build_sampler(params)
    monkeypatch.setattr("mlxgen.sampling.sampler.on_gpu", lambda: True)
    compiled, other = build_sampler(params), build_sampler(SamplingParams(temperature=2.0, top_k=6, top_p=0.9, seed=5))
    results: list[list[int]] = []

    def run() -> None:
        try:
            results.append([compiled(mx.array(LOGITS), step).item() for step in range(40)])
        finally:
            mx.clear_streams()

    run_here = [compiled(mx.array(LOGITS), step).item() for step in range(40)]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert run_here == results[0] == [eager(mx.array(LOGITS), step).item() for step in range(40)]
    # Another temperature goes through the same compiled function as an argument.
    assert run_here != [other(mx.array(LOGITS), step).item() for step in range(40)]


def test_temperature_needs_a_seed() -> None:
    with pytest.raises(InvalidValueError, match="with_seed"):
        build_sampler(SamplingParams(temperature=0.5))


def test_keys_are_fixed_for_ever() -> None:
    """These numbers are part of the snapshot format. mix() is SplitMix64's: seed 0 gives its published first output."""
    from mlxgen.sampling.keys import _GOLDEN, _mix

    assert _mix(_GOLDEN) == 0xE220A8397B1DCDAF
    assert step_word(0, 0) == _mix(0xE220A8397B1DCDAF)
    words = {step_word(seed, n, draw) for seed in (0, 1, 2**64 - 1) for n in range(500) for draw in (0, 1)}
    assert len(words) == 3000
    word = step_word(9, 4)
    assert step_key(9, 4).dtype == mx.uint32
    assert step_key(9, 4).tolist() == [word >> 32, word & 0xFFFFFFFF]
    uniform = [step_uniform(1, n, 1) for n in range(2000)]
    assert 0 <= min(uniform) < 0.01
    assert 0.99 < max(uniform) < 1
    assert abs(sum(uniform) / 2000 - 0.5) < 0.03
