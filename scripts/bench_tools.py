"""What the benchmarks share: turn-about timing, medians with bootstrap intervals, a table, models to run on.

The machine a benchmark runs on is never quiet, so every number is a ratio of two things that took turns in one process,
pair by pair, and every ratio is the median of many, with a 95% interval. Absolute times are for orientation only.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

PROSE = (
    "The lamp at the end of the pier had been out for a week before anybody wrote to the harbour office about it. "
    "Ships came in all the same, a little more slowly, and the keeper of the inn counted them from her window, as her "
    "mother had done. On the eighth night somebody rowed out with a can of oil. "
)


@dataclass(frozen=True)
class Interval:
    """The median of some values, and a bootstrap 95% interval of that median."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        known = np.asarray(values, dtype=np.float64)
        draws = np.random.default_rng(0).integers(0, len(known), (5000, len(known)))
        low, high = np.percentile(np.median(known[draws], axis=1), (2.5, 97.5))
        return cls(float(np.median(known)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Spent:
    """What some work took: seconds on the clock, and seconds of processor time, all threads of the process together.

    The former is what counts, the latter what other people's work on the machine disturbs least.
    """

    wall_s: float
    cpu_s: float

    @classmethod
    def until_now(cls) -> Spent:
        """Both clocks as they stand; only differences mean anything."""
        return cls(time.perf_counter(), time.process_time())

    def since(self) -> Spent:
        """What was spent since these clocks were read."""
        now = Spent.until_now()
        return Spent(now.wall_s - self.wall_s, now.cpu_s - self.cpu_s)


Times = dict[str, list[Spent]]


def turn_about(contestants: Mapping[str, Callable[[], Spent]], rounds: int) -> Times:
    """What each contestant's call returns, `rounds` times; they take turns, every other round in reverse order."""
    results: Times = {name: [] for name in contestants}
    order = list(contestants)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            results[name].append(contestants[name]())
    return results


@dataclass(frozen=True)
class Ratio:
    """How many times as long `slow` took as `fast`, pair by pair, on the clock and in processor time."""

    wall: Interval
    cpu: Interval

    @classmethod
    def of(cls, slow: Sequence[Spent], fast: Sequence[Spent]) -> Ratio:
        pairs = list(zip(slow, fast, strict=True))
        return cls(
            Interval.of([a.wall_s / b.wall_s for a, b in pairs]),
            Interval.of([a.cpu_s / max(b.cpu_s, 1e-9) for a, b in pairs]),
        )

    def __str__(self) -> str:
        return f"{self.wall}; processor time {self.cpu}"


def median_s(times: Sequence[Spent]) -> float:
    """The median on the clock."""
    return Interval.of([spent.wall_s for spent in times]).median


@dataclass
class Report:
    """The rows of one benchmark's table; a row may have a bound that it keeps or misses."""

    title: str
    rows: list[tuple[str, str, str, bool | None]] = field(default_factory=list)

    def add(self, what: str, measured: str, bound: str = "", *, kept: bool | None = None) -> None:
        self.rows.append((what, measured, bound, kept))
        print(f"  {what}: {measured}" + (f"  ({bound})" if bound else ""), file=sys.stderr, flush=True)

    def finish(self) -> int:
        """Print the table (Markdown, aligned); the exit code: 1 if a bound was missed."""
        marks = {None: "", True: "kept", False: "MISSED"}
        cells = [(what, measured, bound, marks[kept]) for what, measured, bound, kept in self.rows]
        header = (self.title, "measured", "bound", "")
        widths = [max(len(row[i]) for row in [header, *cells]) for i in range(4)]
        for row in [header, tuple("-" * width for width in widths), *cells]:
            print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        print(flush=True)
        return 1 if any(kept is False for *_, kept in self.rows) else 0


def machine() -> str:
    """Date, machine and versions, in one line."""
    import mlx.core as mx

    device = str(mx.default_device()).partition("(")[2].partition(",")[0]
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlxgen", "mlx", "mlx-lm"))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{date.today()}, {os.cpu_count()}-core {platform.machine()} {platform.system()}, MLX on {device}, "
        f"Python {platform.python_version()}, {versions}; load average {load}"
    )


def parser(summary: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=summary)
    found.add_argument("--quick", action="store_true", help="fewer rounds: wider intervals, to see that it runs")
    return found


# -- models ------------------------------------------------------------------------------------------------------------


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mlxgen-bench-")


def new_folder() -> Path:
    """A folder of its own, removed at the end."""
    return Path(tempfile.mkdtemp(dir=_folder().name))


SHAPES: dict[str, dict[str, int]] = {
    # Two layers of nothing: what a token costs is the loop around it.
    "toy": {"num_hidden_layers": 2},
    # A few milliseconds a token.
    "middle": {
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    # Wide: slow to feed, and with a cache worth saving.
    "wide": {
        "num_hidden_layers": 2,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
    },
}


@cache
def model(name: str) -> Any:
    """A loaded model: "smollm2", or a seeded float32 llama of one of the `SHAPES`."""
    import mlxgen

    if name == "smollm2":
        return mlxgen.load("smollm2")
    import tiny

    shape = tiny.LlamaShape(max_position_embeddings=1 << 16, **SHAPES[name])
    return mlxgen.load(str(tiny.make_llama(new_folder(), shape)))


def prompt(loaded: Any, num_tokens: int) -> tuple[str, list[int]]:
    """A text of about `num_tokens` tokens, and its ids."""
    tokenizer = loaded.tokenizer
    paragraph = tokenizer.encode(PROSE, add_special_tokens=False)
    text = tokenizer.decode((paragraph * (num_tokens // len(paragraph) + 1))[:num_tokens])
    return text, tokenizer.encode(text, add_special_tokens=False)


def tokens_of(events: Iterator[Any]) -> Iterator[Any]:
    """The token events among a session's events."""
    import mlxgen

    return (event for event in events if isinstance(event, mlxgen.Token))
