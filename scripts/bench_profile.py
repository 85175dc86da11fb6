"""Where a token's microseconds go: the loop's parts, timed one by one on a model that is almost nothing.

The one benchmark that looks inside: it puts a stopwatch around functions of the engine, by name, and takes it off
again. A part's time is its own, without the other parts that it calls.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
from bench_tools import new_folder, prompt, tokens_of

from mlxgen import ReplyOptions, Session, SessionOptions

PARTS = {
    "building the pass's graph (mlx-lm's model code)": "mlxgen.models.model.TextForward.__call__",
    "sampling's graph": "mlxgen.decode.TokenIterator._choose",
    "mx.async_eval: handing the pass to MLX": "mlx.core.async_eval",
    "waiting for the token": "mlxgen.ahead.Ahead.read",
    "iterator: commit": "mlxgen.decode.TokenIterator._finish_commit",
    "iterator: the rest": "mlxgen.decode.TokenIterator.__next__",
    "session: history": "mlxgen.history.History.apply",
    "session: text and stop strings": "mlxgen.textstream.TextStream.feed",
    "session: event": "mlxgen.judge.Judge.judge",
    "autosave: journal record": "mlxgen.persist.Keeper.write",
    "autosave: is it time?": "mlxgen.persist.Keeper.tick",
}
REST = "session: the rest"


class Stopwatch:
    """Exclusive time per part; parts nest."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._inner = [0.0]

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        totals, inner, clock = self.totals, self._inner, time.perf_counter

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            inner.append(0.0)
            began_s = clock()
            try:
                return function(*args, **options)
            finally:
                elapsed_s = clock() - began_s
                totals[name] = totals.get(name, 0.0) + elapsed_s - inner.pop()
                inner[-1] += elapsed_s

        return timed


def owner_of(path: str) -> tuple[Any, str]:
    """The module or class that holds what `path` names, and its name there."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            owner = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:-1]:
            owner = getattr(owner, name)
        return owner, parts[-1]
    raise ModuleNotFoundError(path)


@contextmanager
def timed_parts(watch: Stopwatch) -> Iterator[None]:
    former: list[tuple[Any, str, Any]] = []
    try:
        for name, path in PARTS.items():
            owner, attribute = owner_of(path)
            former.append((owner, attribute, getattr(owner, attribute)))
            setattr(owner, attribute, watch.around(name, former[-1][2]))
        yield
    finally:
        for owner, attribute, function in former:
            setattr(owner, attribute, function)


def profile(loaded: Any, num_tokens: int) -> None:
    """Print the parts of a token of `Session.stream` with autosave: median microseconds, largest first."""
    watch = Stopwatch()
    per_token: list[dict[str, float]] = []
    with Session(loaded, options=SessionOptions(raw=True, prefix_cache=False)) as session, timed_parts(watch):
        session.autosave(new_folder() / "profile.mlxgen")
        limit = num_tokens + 50
        tokens = tokens_of(session.stream(prompt(loaded, 64)[0], reply=ReplyOptions(max_tokens=limit, ignore_eos=True)))
        for _ in range(20):
            next(tokens)
        for _ in range(num_tokens):
            watch.totals.clear()
            began_s = time.perf_counter()
            next(tokens)
            elapsed_s = time.perf_counter() - began_s
            per_token.append({**watch.totals, REST: elapsed_s - sum(watch.totals.values())})
    medians = {name: float(np.median([parts.get(name, 0.0) for parts in per_token])) * 1e6 for name in [*PARTS, REST]}
    total = sum(medians.values())
    print("| a token of Session.stream with autosave, 2-layer toy model | µs | share |")
    print("| --- | --- | --- |")
    for name, value in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"| {name} | {value:.1f} | {value / total:.1%} |")
    print(f"| together | {total:.0f} | |\n", flush=True)
