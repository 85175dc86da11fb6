"""Decode speed against `mlx_lm.generate.generate_step`: same model object, dtype and kind of cache, the same tokens.

Each contestant keeps one generation open, and they take turns at producing a block of tokens, so that whatever else the
machine does falls on all of them. The first two tokens of a block aren't timed: with one pass in flight, they pay for
what happened before the block. `TokenIterator` does what `generate_step` does. `Session.stream` also makes text, events
and a history of it, as `mlx_lm.stream_generate` makes text and responses; with autosave, a journal on the disk too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from bench_profile import profile
from bench_tools import (
    Ratio,
    Report,
    Spent,
    Times,
    machine,
    median_s,
    model,
    new_folder,
    parser,
    prompt,
    tokens_of,
    turn_about,
)
from mlx_lm import stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlxgen import CacheOptions, DecodeOptions, ReplyOptions, Session, SessionOptions, TokenIterator

UNTIMED = 2
BOUND = 0.97
STEP, STREAM = "generate_step", "stream_generate"
ITERATOR, SESSION, SAVED = "TokenIterator", "Session.stream", "Session.stream with autosave"
PAIRS = ((STEP, ITERATOR, True), (STREAM, SESSION, True), (STEP, SESSION, False), (STREAM, SAVED, False))


@dataclass(frozen=True)
class Case:
    """One comparison: a model, a prompt length, how much is timed. Restarted `restarts` times, for the cache's sake."""

    name: str
    model: str
    num_prompt_tokens: int
    max_kv_size: int | None
    block: int
    rounds: int
    restarts: int


CASES = (
    Case("toy, 2 layers", "toy", 64, None, 24, 120, 4),
    Case("toy, wrapped ring of 64", "toy", 80, 64, 24, 120, 4),
    Case("8 layers", "middle", 64, None, 16, 40, 2),
    Case("SmolLM2", "smollm2", 24, None, 8, 14, 1),
    Case("SmolLM2, wrapped ring of 32", "smollm2", 40, 32, 8, 14, 1),
)


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    report = Report("decode speed / mlx-lm's")
    for case in CASES:
        measure(case, report, max(2, case.rounds // (8 if arguments.quick else 1)))
    print(f"{machine()}\n")
    code = report.finish()
    profile(model("toy"), 200 if arguments.quick else 1500)
    return code


def measure(case: Case, report: Report, rounds: int) -> None:
    times: Times = {}
    for _ in range(case.restarts):
        runs, close = start(case)
        seen: dict[str, list[int]] = {name: [] for name in runs}
        blocks = {name: _block(run, seen[name], case.block) for name, run in runs.items()}
        for name, values in turn_about(blocks, max(2, rounds // case.restarts)).items():
            times.setdefault(name, []).extend(values)
        close()
        if any(ids != seen[STEP] for ids in seen.values()):
            raise RuntimeError(f"{case.name}: not all contestants generated the same tokens")
    for theirs, ours, bounded in PAIRS:
        ratio = Ratio.of(times[theirs], times[ours])
        name = f"{case.name}: {ours} / {theirs}"
        if bounded:
            report.add(name, str(ratio), f"low end >= {BOUND}", kept=ratio.wall.low >= BOUND)
        else:
            report.add(name, str(ratio))
    each = {name: median_s(values) / case.block * 1e6 for name, values in times.items()}
    report.add(f"{case.name}: microseconds a token", ", ".join(f"{name} {value:.0f}" for name, value in each.items()))


def start(case: Case) -> tuple[dict[str, Iterator[int]], Callable[[], None]]:
    """The contestants, as iterators of token ids, and how to end them."""
    loaded = model(case.model)
    text, ids = prompt(loaded, case.num_prompt_tokens)
    limit = (UNTIMED + case.block) * (case.rounds + 8)
    cache_options = CacheOptions(max_kv_size=case.max_kv_size)
    sessions = [Session(loaded, options=SessionOptions(cache=cache_options, raw=True)) for _ in range(2)]
    sessions[1].autosave(new_folder() / "run.mlxgen")

    def stream(session: Session) -> Iterator[int]:
        events = session.stream(text, reply=ReplyOptions(max_tokens=limit, ignore_eos=True))
        return (token.id for token in tokens_of(events))

    iterator = TokenIterator.from_prompt(
        loaded, ids, options=DecodeOptions(max_tokens=limit), cache_options=cache_options
    )
    module, theirs = loaded.module, [_mlx_lm_cache(case) for _ in range(2)]
    steps = generate_step(mx.array(ids), module, max_tokens=limit, prompt_cache=theirs[0])
    responses = stream_generate(module, loaded.tokenizer, ids, limit, prompt_cache=theirs[1])
    runs = {
        STEP: (token for token, _ in steps),
        ITERATOR: (sampled.id for sampled in iterator),
        STREAM: (response.token for response in responses),
        SESSION: stream(sessions[0]),
        SAVED: stream(sessions[1]),
    }

    def close() -> None:
        for session in sessions:
            session.close()

    return runs, close


def _mlx_lm_cache(case: Case) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model(case.model).module)
    if case.max_kv_size is not None:
        # mlx-lm itself ignores max_kv_size where a model makes its own cache, as llama does.
        cache = [RotatingKVCache(case.max_kv_size, keep=4) for _ in cache]
    return cache


def _block(run: Iterator[int], seen: list[int], length: int) -> Callable[[], Spent]:
    def block() -> Spent:
        for _ in range(UNTIMED):
            seen.append(next(run))
        began = Spent.until_now()
        ids = [next(run) for _ in range(length)]
        spent = began.since()
        seen.extend(ids)
        return spent

    return block


if __name__ == "__main__":
    sys.exit(main())
