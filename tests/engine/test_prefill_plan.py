from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxgen.errors import InvalidValueError
from mlxgen.prefill import MIN_STEP_SIZE, plan_prefill, step_size_for_latency


def test_cuts_lie_on_an_absolute_grid() -> None:
    assert plan_prefill(0, 10, 4).ends == (4, 8, 10)
    assert plan_prefill(3, 10, 4).ends == (4, 8, 10)
    assert plan_prefill(4, 8, 4).ends == (8,)
    assert plan_prefill(8, 8, 4).ends == ()


def test_atomic_ranges_are_not_cut() -> None:
    assert plan_prefill(0, 12, 4, ((2, 6),)).ends == (2, 6, 8, 12)
    # Longer than a chunk, and beginning where the chunk does: taken whole.
    assert plan_prefill(0, 12, 4, ((0, 7),)).ends == (7, 8, 12)
    assert plan_prefill(0, 12, 4, ((4, 8),)).ends == (4, 8, 12)


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=5).map(
    lambda pairs: [
        (start, end)
        for (start, length), previous in zip(sorted(pairs), [(-100, 0), *sorted(pairs)], strict=False)
        if (end := start + length) and start >= previous[0] + previous[1]
    ]
)


@given(start=st.integers(0, 40), length=st.integers(0, 80), step=st.integers(1, 17), atomic=spans)
def test_a_plan_covers_everything_once_and_resuming_at_any_cut_gives_the_rest(start, length, step, atomic) -> None:
    end = start + length
    atomic = [(a, b) for a, b in atomic if a >= start and b <= end]
    plan = plan_prefill(start, end, step, atomic)
    assert list(plan.ends) == sorted(set(plan.ends))
    assert (plan.ends[-1] if plan.ends else start) == end
    for cut in plan.ends[:-1]:
        assert not any(a < cut < b for a, b in atomic)
        assert plan_prefill(cut, end, step, atomic).ends == plan.after(cut)


def test_step_size_zero_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="prefill_step_size is 0"):
        plan_prefill(0, 1, 0)


def test_the_size_for_a_latency_is_bounded() -> None:
    assert step_size_for_latency(64, 1.0, 0.001, 2048) == MIN_STEP_SIZE
    assert step_size_for_latency(64, 0.001, 10.0, 512) == 512
    assert step_size_for_latency(64, 0.064, 0.3, 2048) == 128  # 1 ms a token: 200 fit, 128 is the power of two
