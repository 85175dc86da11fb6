"""A model that says which session each of its passes is for, and sessions that say when each of their units begins."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from harness import SETUPS, Outcome, model

from mlxgen.engine import Engine
from mlxgen.events import Event, Finished, Token
from mlxgen.job import Job
from mlxgen.models import Model
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.runs import MAX_UNREAD_EVENTS
from mlxgen.sampling import SamplingParams
from mlxgen.session import Session

PATIENCE_S = 60.0
# More tokens than may be unread: a job of so many doesn't end before its consumer wants it to.
MANY = MAX_UNREAD_EVENTS + 20


@dataclass
class Bench:
    """One model for one test. `passes` are (session, its unit's number), in order; `on_pass` is called in each."""

    setup: str = "llama"
    step_size: int = 32
    passes: list[tuple[str, int]] = field(default_factory=list)
    on_pass: Callable[[], None] | None = None
    current: tuple[str, int] = ("", 0)
    num_units: int = 0

    def __post_init__(self) -> None:
        base = model(SETUPS[self.setup].kind)
        self.model: Model = replace(base, forward=_Forward(self, base.forward))

    def session(self, name: str) -> WatchedSession:
        options = SessionOptions(cache=SETUPS[self.setup].cache, prefill_step_size=self.step_size)
        session = WatchedSession(self.model, options=options)
        session.bench, session.name = self, name
        return session

    def names(self, start: int = 0) -> list[str]:
        """Whose units had passes, one entry per unit."""
        units: dict[int, str] = {unit: name for name, unit in self.passes[start:]}
        return list(units.values())


class _Forward:
    def __init__(self, bench: Bench, inner: Any) -> None:
        self.bench = bench
        self.inner = inner

    def __call__(self, ids, *, cache, start, inputs):
        bench = self.bench
        bench.passes.append(bench.current)
        if bench.on_pass is not None:
            bench.on_pass()
        return self.inner(ids, cache=cache, start=start, inputs=inputs)


class WatchedSession(Session):
    bench: Bench
    name: str

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Event]:
        return self._watched(super().stream(*args, **kwargs))

    def continue_(self, *args: Any, **kwargs: Any) -> Iterator[Event]:
        return self._watched(super().continue_(*args, **kwargs))

    def _watched(self, events: Iterator[Event]) -> Iterator[Event]:
        bench = self.bench
        while True:
            before = bench.current
            bench.num_units += 1
            bench.current = (self.name, bench.num_units)
            try:
                event = next(events)
            except StopIteration:
                return
            finally:
                bench.current = before
            yield event


def prompt(number: int) -> str:
    return ("Sea.", "Why is it?", "Tell me more about the rain.", "And?")[number % 4] + f" {number}"


def reply(number: int, max_tokens: int = 4) -> ReplyOptions:
    """Greedy or sampled with penalties, by number."""
    sampling = SamplingParams()
    if number % 2:
        sampling = SamplingParams(temperature=1.2, top_p=0.95, repetition_penalty=1.2, seed=number)
    return ReplyOptions(max_tokens=max_tokens, ignore_eos=True, logprobs=True, sampling=sampling)


def long() -> ReplyOptions:
    return ReplyOptions(max_tokens=2000, ignore_eos=True)


@functools.cache
def alone(setup: str, number: int, max_tokens: int = 4, step_size: int = 32) -> list[Any]:
    """What session `number` says when nobody else is there."""
    outcome = Outcome()
    bench = Bench(setup, step_size)
    outcome.take(bench.session("alone").stream(prompt(number), reply=reply(number, max_tokens)))
    return outcome.values


def outcome_of(*jobs: Job) -> Outcome:
    """The events of ended jobs, one after another; each must end with the only `Finished` of it."""
    outcome = Outcome()
    for job in jobs:
        events = list(job)
        assert [isinstance(event, Finished) for event in events] == [False] * (len(events) - 1) + [True]
        outcome.take(iter(events))
    return outcome


def until(condition: Callable[[], Any]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def read_until_token(events: Iterator[Event], index: int) -> None:
    for event in events:
        if isinstance(event, Token) and event.index == index:
            return
    raise AssertionError(f"no token {index}")


def blocker(bench: Bench, engine: Engine, priority: int = 9) -> Job:
    """A job that has the thread until it is cancelled; nothing less urgent runs."""
    job = engine.submit(bench.session("blocker"), "Hold on.", priority=priority, reply=long())
    job._run.box.open_wide()
    until(lambda: "blocker" in bench.names())
    return job


def outcome_of_result(job) -> list:
    job.result(60)
    return outcome_of(job).values
