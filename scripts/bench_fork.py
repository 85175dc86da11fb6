"""What a fork at 8,000 tokens costs: at once, at the first token on one side, and what is given back with it."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import mlx.core as mx
from bench_tools import Report, machine, model, parser, prompt

from mlxgen import ReplyOptions, Session, SessionOptions

NUM_TOKENS = 8000
ONE_MORE = ReplyOptions(max_tokens=1, ignore_eos=True)


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    report = Report(f"a fork at {NUM_TOKENS} tokens")
    loaded = model("wide")
    text, _ = prompt(loaded, NUM_TOKENS)
    with Session(loaded, options=SessionOptions(raw=True, prefix_cache=False)) as session:
        session.send(text, reply=ONE_MORE)
        session.sequence.evaluate()
        fork(session, report)
        first_token(session, report, rounds=3 if arguments.quick else 15)
    print(f"{machine()}\n")
    return report.finish()


def fork(session: Any, report: Report) -> None:
    times_s: list[float] = []
    for _ in range(50):
        before_bytes = mx.get_active_memory()
        began_s = time.perf_counter()
        twin = session.fork()
        times_s.append(time.perf_counter() - began_s)
        held_bytes = mx.get_active_memory() - before_bytes
        del twin
    milliseconds = 1000 * statistics.median(times_s)
    report.add("milliseconds", f"{milliseconds:.3f}", "< 1", kept=milliseconds < 1)
    report.add("MB held, until one side goes on", f"{held_bytes / 1e6:.3f}", "< 1", kept=held_bytes < 1e6)


def first_token(session: Any, report: Report, rounds: int) -> None:
    alone_s: list[float] = []
    forked_s: list[float] = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        list(session.continue_(reply=ONE_MORE))
        alone_s.append(time.perf_counter() - began_s)
        before_bytes = mx.get_active_memory()
        twin = session.fork()
        began_s = time.perf_counter()
        list(twin.continue_(reply=ONE_MORE))
        forked_s.append(time.perf_counter() - began_s)
        copied_bytes = mx.get_active_memory() - before_bytes
        del twin
        left_bytes = mx.get_active_memory() - before_bytes
    report.add(
        "first token after it, milliseconds",
        f"{1000 * statistics.median(forked_s):.1f} ({1000 * statistics.median(alone_s):.1f} without a fork)",
    )
    cache_bytes = session.sequence.num_bytes
    report.add("MB held after its first token", f"{copied_bytes / 1e6:.1f} (the caches: {cache_bytes / 1e6:.1f})")
    report.add("MB left when it is dropped", f"{left_bytes / 1e6:.3f}", "< 1", kept=left_bytes < 1e6)


if __name__ == "__main__":
    sys.exit(main())
