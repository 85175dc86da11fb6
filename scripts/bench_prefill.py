"""Prefill speed against `mlx_lm.generate.generate_step`: same model object, step size and kind of cache.

Timed is everything from the prompt's ids until all but the last of them are in the cache (the last is fed by the first
decode step); of a session, from the event that says that the prompt is laid out: before it, the text was tokenised,
which `generate_step` doesn't do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from bench_tools import Ratio, Report, Spent, machine, median_s, model, parser, prompt, turn_about
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlxgen import (
    DecodeOptions,
    PrefillProgress,
    ReplyOptions,
    Session,
    SessionOptions,
    Token,
    TokenIterator,
    prefix_cache,
)

BOUND = 0.97


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    num_tokens: int
    step_size: int
    rounds: int


CASES = (
    Case("toy, 2000 tokens in steps of 64", "toy", 2000, 64, 60),
    Case("8 layers, 600 tokens in steps of 128", "middle", 600, 128, 30),
    Case("SmolLM2, 100 tokens in one step", "smollm2", 100, 2048, 16),
)


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    report = Report("prefill speed / mlx-lm's")
    for case in CASES:
        measure(case, report, max(3, case.rounds // (8 if arguments.quick else 1)))
    print(f"{machine()}\n")
    return report.finish()


def measure(case: Case, report: Report, rounds: int) -> None:
    loaded = model(case.model)
    text, ids = prompt(loaded, case.num_tokens)
    firsts: set[int] = set()

    def timed(run: Callable[[], tuple[int, Spent]]) -> Callable[[], Spent]:
        def once() -> Spent:
            first, spent = run()
            firsts.add(first)
            return spent

        once()  # not counted: the first time, buffers are allocated that are reused later
        return once

    def mlx_lm() -> tuple[int, Spent]:
        marks: list[Spent] = []
        began = Spent.until_now()

        def progress(done: int, total: int) -> None:
            if done == total - 1:
                marks.append(began.since())

        cache = make_prompt_cache(loaded.module)
        steps = generate_step(
            mx.array(ids),
            loaded.module,
            max_tokens=1,
            prompt_cache=cache,
            prefill_step_size=case.step_size,
            prompt_progress_callback=progress,
        )
        first, _ = next(steps)
        # It has a step in flight that nobody will wait for; the next contestant mustn't pay for it.
        mx.synchronize(generation_stream)
        return first, marks[0]

    def iterator() -> tuple[int, Spent]:
        began = Spent.until_now()
        found = TokenIterator.from_prompt(loaded, ids, options=DecodeOptions(max_tokens=1), step_size=case.step_size)
        for _ in found.prefill():
            pass
        spent = began.since()
        return next(found).id, spent

    def session() -> tuple[int, Spent]:
        options = SessionOptions(raw=True, prefill_step_size=case.step_size)
        prefix_cache(loaded).clear()  # what is kept of a prompt is part of the time, what is known of it isn't
        began = spent = Spent.until_now()
        for event in Session(loaded, options=options).stream(text, reply=ReplyOptions(max_tokens=1, ignore_eos=True)):
            if isinstance(event, PrefillProgress) and event.done == 0:
                began = Spent.until_now()
            elif isinstance(event, PrefillProgress) and event.done == event.total - 1:
                spent = began.since()
            elif isinstance(event, Token):
                return event.id, spent
        raise RuntimeError("no token came")

    runs = {"mlx-lm": mlx_lm, "TokenIterator": iterator, "Session.stream": session}
    times = turn_about({name: timed(run) for name, run in runs.items()}, rounds)
    if len(firsts) != 1:
        raise RuntimeError(f"{case.name}: the contestants disagree on the first token: {firsts}")
    for name in ("TokenIterator", "Session.stream"):
        ratio = Ratio.of(times["mlx-lm"], times[name])
        report.add(f"{case.name}: {name}", str(ratio), f"low end >= {BOUND}", kept=ratio.wall.low >= BOUND)
    speeds = {name: (len(ids) - 1) / median_s(values) for name, values in times.items()}
    report.add(f"{case.name}: tokens/s", ", ".join(f"{name} {value:.0f}" for name, value in speeds.items()))


if __name__ == "__main__":
    sys.exit(main())
