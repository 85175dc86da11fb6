"""The prefill plan: where a prompt is cut into chunks. A pure function, so that every run cuts at the same places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxgen.errors import InvalidValueError

DEFAULT_STEP_SIZE = 2048
MIN_STEP_SIZE = 16


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Chunk ends for feeding tokens `[start, end)`; recorded, so a resumed run takes over the rest as it is."""

    start: int
    end: int
    step_size: int
    ends: tuple[int, ...]

    def after(self, position: int) -> tuple[int, ...]:
        """The chunk ends still to come when `position` tokens have been fed."""
        return tuple(end for end in self.ends if end > position)


def plan_prefill(
    start: int, end: int, step_size: int, atomic: Sequence[tuple[int, int]] = (), cuts: Sequence[int] = ()
) -> PrefillPlan:
    """Cut `[start, end)` at the absolute multiples of `step_size` and at `cuts`, never inside a range of `atomic`.

    The grid is absolute, not relative to `start`: a prompt that was cancelled after two chunks and is asked again, or
    one that begins with a cached prefix, then gets the chunks a cold run gets. A cut that would fall into an atomic
    range moves to the range's start, or, where the chunk would then be empty, to its end (such a chunk is longer than
    `step_size`).
    """
    if step_size < 1:
        raise InvalidValueError(f"prefill_step_size is {step_size}; give at least 1 (512 to 4096 is usual)")
    ends: list[int] = []
    position = start
    while position < end:
        cut = min((position // step_size + 1) * step_size, end, *(own for own in cuts if own > position))
        for first, last in atomic:
            if first < cut < last:
                cut = first if first > position else min(last, end)
        ends.append(cut)
        position = cut
    return PrefillPlan(start, end, step_size, tuple(ends))


def step_size_for_latency(num_tokens: int, seconds: float, max_stop_latency_s: float, step_size: int) -> int:
    """The largest power of two of tokens that takes at most the wanted time at the measured rate.

    Attention makes later chunks slower than the one measured, hence only two thirds of the target. Bounded
    below by `MIN_STEP_SIZE` (smaller chunks waste most of the machine) and above by `step_size`.
    """
    wanted = num_tokens / max(seconds, 1e-9) * max_stop_latency_s * 2 / 3
    size = MIN_STEP_SIZE
    while size * 2 <= min(wanted, step_size):
        size *= 2
    return size
