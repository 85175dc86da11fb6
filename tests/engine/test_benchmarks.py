"""The benchmarks' own arithmetic, and that what they look at inside the engine is still there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_profile
from bench_tools import Interval, Ratio, Report, Spent, turn_about


@pytest.mark.parametrize("path", bench_profile.PARTS.values())
def test_what_the_profile_times_exists(path) -> None:
    owner, name = bench_profile.owner_of(path)
    assert callable(getattr(owner, name))


def test_parts_exclude_each_other_and_add_up() -> None:
    watch = bench_profile.Stopwatch()
    clock = iter(range(100))
    inner = watch.around("inner", lambda: next(clock))
    outer = watch.around("outer", lambda: [inner() for _ in range(3)])
    outer()
    assert set(watch.totals) == {"inner", "outer"}
    assert all(value >= 0 for value in watch.totals.values())


def test_an_interval_holds_its_median_and_narrows_with_more_values() -> None:
    few, many = Interval.of([0.9, 1.0, 1.1]), Interval.of([0.9, 1.0, 1.1] * 50)
    assert few.low <= few.median <= few.high
    assert many.median == 1.0
    assert many.high - many.low < few.high - few.low


def test_ratios_are_taken_pair_by_pair() -> None:
    slow, fast = [Spent(2.0, 1.0), Spent(20.0, 10.0)], [Spent(1.0, 1.0), Spent(10.0, 10.0)]
    ratio = Ratio.of(slow, fast)
    assert (ratio.wall.median, ratio.cpu.median) == (2.0, 1.0)


def test_contestants_take_turns_and_the_order_alternates() -> None:
    order: list[str] = []

    def contestant(name: str):
        def run() -> Spent:
            order.append(name)
            return Spent(1.0, 1.0)

        return run

    times = turn_about({"a": contestant("a"), "b": contestant("b")}, 3)
    assert "".join(order) == "abbaab"
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


def test_a_missed_bound_is_the_exit_code(capsys) -> None:
    report = Report("x")
    report.add("one", "1.0", ">= 0.9", kept=True)
    assert report.finish() == 0
    report.add("two", "0.8", ">= 0.9", kept=False)
    assert report.finish() == 1
    assert "MISSED" in capsys.readouterr().out
