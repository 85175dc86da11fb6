from __future__ import annotations

import random
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from mlxgen.errors import InvalidValueError
from mlxgen.sampling import SamplingParams, build_penalties

VOCAB_SIZE = 24


def _logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(1, VOCAB_SIZE)).astype(np.float32) * 3


def _mlx_lm(params: SamplingParams, ids: list[int], logits: np.ndarray) -> np.ndarray:
    processors = sample_utils.make_logits_processors(
        dict(params.logit_bias) if params.logit_bias else None,
        params.repetition_penalty,
        params.repetition_context_size,
        params.presence_penalty,
        params.presence_context_size,
        params.frequency_penalty,
        params.frequency_context_size,
    )
    x = mx.array(logits)
    for processor in processors:
        x = processor(mx.array(ids, dtype=mx.uint32), x)
    return np.array(x)


CASES = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=1.3, repetition_context_size=1),
    SamplingParams(presence_penalty=0.8, presence_context_size=5),
    SamplingParams(frequency_penalty=0.4, frequency_context_size=7),
    SamplingParams(frequency_penalty=-0.4, presence_penalty=-0.1),
    SamplingParams(logit_bias={3: 2.5, 7: -10000.0}),
    SamplingParams(
        repetition_penalty=0.8,
        repetition_context_size=4,
        presence_penalty=1.5,
        presence_context_size=6,
        frequency_penalty=0.7,
        frequency_context_size=4,
        logit_bias={0: -1.0, 23: 1.0},
    ),
]


@pytest.mark.parametrize("params", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("num_ids", [0, 1, 3, 30])
def test_values_are_mlx_lms_at_every_step(params: SamplingParams, num_ids: int) -> None:
    rng = random.Random(num_ids)
    ids = [rng.randrange(VOCAB_SIZE // 2) for _ in range(num_ids)]
    state = build_penalties(params, ids, VOCAB_SIZE)
    assert state is not None
    for step in range(12):
        logits = _logits(step)
        np.testing.assert_allclose(
            np.array(state.apply(mx.array(logits))), _mlx_lm(params, ids, logits), rtol=2e-6, atol=2e-6
        )
        token = rng.randrange(VOCAB_SIZE // 2)
        state.advance(mx.array([token], dtype=mx.uint32))
        ids.append(token)


@pytest.mark.parametrize("params", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_rebuilt_is_bit_identical_to_advanced(params: SamplingParams, dtype: mx.Dtype) -> None:
    prompt = [1, 2, 3, 2, 1, 9]
    state = build_penalties(params, prompt, VOCAB_SIZE)
    assert state is not None
    ids = list(prompt)
    for step in range(40):
        logits = mx.array(_logits(step)).astype(dtype)
        fresh = build_penalties(params, ids, VOCAB_SIZE)
        assert fresh is not None
        here = state.apply(logits)
        assert here.dtype == mx.float32
        assert bytes(memoryview(here)) == bytes(memoryview(fresh.apply(logits)))
        # Lazy: the token is the outcome of the very logits it will penalise next.
        token = mx.argmax(here, axis=-1)
        state.advance(token)
        ids.append(int(token.item()))
    state.rebuild(ids[:10])
    fresh = build_penalties(params, ids[:10], VOCAB_SIZE)
    assert fresh is not None
    assert mx.array_equal(state.apply(logits), fresh.apply(logits))


def test_runs_ahead_of_the_host() -> None:
    """Eight steps are built without evaluating any; the result is that of one at a time."""
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, repetition_context_size=3)

    def run(evaluate: bool) -> list[int]:
        state = build_penalties(params, [4, 5], VOCAB_SIZE)
        assert state is not None
        logits, tokens = mx.array(_logits(0)), []
        for _ in range(8):
            token = mx.argmax(state.apply(logits), axis=-1)
            if evaluate:
                mx.eval(token)
            state.advance(token)
            tokens.append(token)
        return [int(token.item()) for token in tokens]

    assert run(True) == run(False)
    assert len(set(run(True))) > 1


def test_logits_are_not_changed_in_place() -> None:
    state = build_penalties(CASES[-1], [1, 2], VOCAB_SIZE)
    assert state is not None
    logits = mx.array(_logits(0))
    mx.eval(state.apply(logits))
    assert np.array_equal(np.array(logits), _logits(0))


def test_nothing_set_means_no_state() -> None:
    assert build_penalties(SamplingParams(temperature=1.0, seed=1), [1, 2], VOCAB_SIZE) is None
    off = SamplingParams(repetition_penalty=0.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias={})
    assert build_penalties(off, [1, 2], VOCAB_SIZE) is None


def test_ids_outside_the_vocabulary_reach_no_array() -> None:
    params = SamplingParams(repetition_penalty=2.0, repetition_context_size=3)
    state = build_penalties(params, [1, 900, 2**40], VOCAB_SIZE)
    assert state is not None
    logits = _logits(1)
    expected = _mlx_lm(params, [1], logits)
    np.testing.assert_allclose(np.array(state.apply(mx.array(logits))), expected, rtol=1e-6)
    for _ in range(3):
        state.advance(mx.array([2], dtype=mx.uint32))
    np.testing.assert_allclose(np.array(state.apply(mx.array(logits))), _mlx_lm(params, [2], logits), rtol=1e-6)
    with pytest.raises(InvalidValueError, match="negative"):
        state.rebuild([1, -1])


def test_compiled_as_on_a_gpu_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = build_penalties(CASES[-1], [1, 2, 3], VOCAB_SIZE)
    monkeypatch.setattr("mlxgen.sampling.penalties.on_gpu", lambda: True)
    compiled = build_penalties(CASES[-1], [1, 2, 3], VOCAB_SIZE)
    assert eager is not None
    assert compiled is not None
    for step in range(6):
        logits = mx.array(_logits(step))
        np.testing.assert_allclose(np.array(compiled.apply(logits)), np.array(eager.apply(logits)), rtol=1e-6)
        for state in (eager, compiled):
            state.advance(mx.array([step], dtype=mx.uint32))


def test_works_in_another_thread() -> None:
    params = CASES[-1]
    outcome: list[bool] = []

    def run() -> None:
        try:
            state = build_penalties(params, [1, 2, 3], VOCAB_SIZE)
            assert state is not None
            for step in range(10):
                state.advance(mx.argmax(state.apply(mx.array(_logits(step))), axis=-1))
            mx.eval(state.apply(mx.array(_logits(0))))
            outcome.append(True)
        finally:
            mx.clear_streams()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert outcome == [True]
