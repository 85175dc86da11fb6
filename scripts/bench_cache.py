"""The prefix cache: what a warm prompt costs beside a cold one, from memory and from the disk, and what keeping costs.

A warm time to first token is compared with what can't be avoided: one copy of the hit in memory, one decode step, and
making ids of the text (which on a model as small as this one takes as long as the others). Reading blocks is compared
with reading the same files and nothing else, both after the system was told to forget them (where it can be told).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from bench_tools import (
    Interval,
    Ratio,
    Report,
    Spent,
    machine,
    model,
    new_folder,
    parser,
    prompt,
    tokens_of,
    turn_about,
)

from mlxgen import NEVER, PrefixCacheOptions, ReplyOptions, Session, SessionOptions, prefix_cache
from mlxgen.cache import adapter_of, leaves
from mlxgen.prefixcache.cache import Prompt
from mlxgen.preparation import raw_ids

NUM_TOKENS = 8000
RESTART_TOKENS = 4096
NUM_PREFIXES = 1000
REPLY = ReplyOptions(max_tokens=2, ignore_eos=True)
MEMORY = 2**31


def first_token(loaded: Any, text: str, *, cached: bool = True) -> tuple[Spent, int, Session]:
    """Until the first token is there; how many tokens were prefilled for it; and the session, whose reply is over."""
    session = Session(loaded, options=SessionOptions(raw=True, prefix_cache=cached))
    events = session.stream(text, reply=REPLY)
    began = Spent.until_now()
    next(tokens_of(events))
    spent = began.since()
    finished = list(events)[-1]
    return spent, finished.usage.prefilled_tokens, session


def warm(loaded: Any, report: Report, rounds: int) -> None:
    text, ids = prompt(loaded, NUM_TOKENS)
    prefix_cache(loaded).configure(PrefixCacheOptions(MEMORY))
    cold, _, session = first_token(loaded, text)
    copy_s = prefix_cache(loaded).info().copy_s
    share = copy_s / cold.wall_s
    report.add("keeping an 8k prompt, share of its prefill", f"{share:.4f}", "<= 0.02", kept=share <= 0.02)

    def copied() -> Spent:
        began = Spent.until_now()
        arrays = [
            mx.array(part) for _, leaf in leaves(session.sequence.cache) for part in adapter_of(leaf).arrays(leaf)
        ]
        mx.eval(arrays)
        return began.since()

    def stepped() -> Spent:
        """One decode step of a session that goes on, caches at hand."""
        events = session.continue_(reply=ReplyOptions(max_tokens=8, ignore_eos=True))
        tokens = tokens_of(events)
        for _ in range(3):
            next(tokens)
        began = Spent.until_now()
        for _ in range(4):
            next(tokens)
        spent = began.since()
        list(events)
        return Spent(spent.wall_s / 4, spent.cpu_s / 4)

    def filled() -> Spent:
        spent, num_prefilled, _ = first_token(loaded, text)
        if num_prefilled > 1:
            raise RuntimeError(f"{num_prefilled} of {len(ids)} tokens were prefilled again")
        return spent

    def encoded() -> Spent:
        began = Spent.until_now()
        raw_ids(loaded, text, ())
        return began.since()

    times = turn_about({"warm": filled, "copy": copied, "step": stepped, "ids": encoded}, rounds)
    least = together(times["copy"], times["step"], times["ids"])
    ratio = Ratio.of(times["warm"], least)
    report.add(
        "warm first token at 8k / (copy + step + ids)", str(ratio), "median <= 1.2", kept=ratio.wall.median <= 1.2
    )
    ratio = Ratio.of(times["warm"], together(times["copy"], times["step"]))
    report.add("warm first token at 8k / (copy + step)", str(ratio))
    middle = {name: statistics.median(spent.wall_s for spent in spents) for name, spents in times.items()}
    report.add(
        "seconds",
        f"cold {cold.wall_s:.2f}, warm {middle['warm']:.4f}, copy {middle['copy']:.4f}, step {middle['step']:.4f}, "
        f"ids {middle['ids']:.4f}",
    )


def together(*parts: list[Spent]) -> list[Spent]:
    """What things take one after another, round by round."""
    return [Spent(sum(s.wall_s for s in row), sum(s.cpu_s for s in row)) for row in zip(*parts, strict=True)]


def forget(path: Path) -> None:
    """Have the system read the file from the disk the next time."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def restart(loaded: Any, report: Report, rounds: int) -> None:
    """What another process would find: an empty memory, and the files."""
    text, ids = prompt(loaded, RESTART_TOKENS)
    cache, folder = prefix_cache(loaded), new_folder()
    options = PrefixCacheOptions(MEMORY, disk_bytes=2**33, folder=folder, disk_bytes_per_s=2**40)
    cache.configure(options)
    cache.clear()
    cold, _, session = first_token(loaded, text)
    expected = list(session.sequence.ids)
    if not cache.flush(120):
        raise RuntimeError(f"it wasn't written: {cache.warnings}")
    files = sorted(folder.rglob("block-*"))
    num_bytes = sum(path.stat().st_size for path in files)
    room = bytearray(max(path.stat().st_size for path in files))
    chunks = cache.find(session.sequence, Prompt(ids, None, session.options.prefill_step_size))

    def read() -> Spent:
        """Into memory that is there already, as the cheapest way there is."""
        for path in files:
            forget(path)
        began = Spent.until_now()
        for path in files:
            with open(path, "rb", buffering=0) as file:
                file.readinto(room)
        return began.since()

    def blocks() -> Spent:
        """Read, checked, and copied to MLX."""
        cache.clear()
        for path in files:
            forget(path)
        began = Spent.until_now()
        if len(cache._blocks(session.sequence, chunks, NEVER)) != len(files):
            raise RuntimeError("a block couldn't be read")
        return began.since()

    def found() -> Spent:
        cache.clear()
        spent, num_prefilled, again = first_token(loaded, text)
        if num_prefilled > 1 or again.sequence.ids != expected:
            raise RuntimeError(f"{num_prefilled} of {len(ids)} tokens were prefilled again, or other tokens came")
        return spent

    times = turn_about({"disk": found, "read": read, "blocks": blocks}, rounds)
    gain = Interval.of([cold.wall_s / spent.wall_s for spent in times["disk"]])
    report.add("cold / from the disk, first token at 4k", str(gain), "median >= 10", kept=gain.median >= 10)
    share = Interval.of([a.wall_s / b.wall_s for a, b in zip(times["read"], times["blocks"], strict=True)])
    report.add("blocks from the disk, share of its rate", str(share), "median >= 0.7", kept=share.median >= 0.7)
    rate = Interval.of([num_bytes / spent.wall_s / 1e9 for spent in times["read"]])
    report.add("the disk's rate, GB/s", f"{rate} ({num_bytes / 1e6:.0f} MB in {len(files)} files)")
    cache.configure(PrefixCacheOptions(MEMORY))


def lookup(loaded: Any, report: Report) -> None:
    cache = prefix_cache(loaded)
    cache.configure(PrefixCacheOptions(MEMORY))
    cache.clear()
    session = Session(loaded, options=SessionOptions(raw=True))
    sequence = session.sequence
    _, ids = prompt(loaded, NUM_TOKENS)
    for number in range(NUM_PREFIXES):
        sequence.reset()
        sequence.ids = [number // 200 + 5, number % 200 + 5, *ids[:30]]
        sequence.feed(32)
        cache.keep(sequence)
    if cache.info().num_blocks != NUM_PREFIXES:
        raise RuntimeError(f"{cache.info().num_blocks} of {NUM_PREFIXES} prefixes are kept")
    times = []
    for number in range(200):
        asked = Prompt([number // 200 + 5, number % 200 + 5, *ids], None, 2048)
        began_s = time.perf_counter()
        cache.find(sequence, asked)
        times.append((time.perf_counter() - began_s) * 1000)
    found = Interval.of(times)
    report.add(f"lookup of 8k tokens among {NUM_PREFIXES}, ms", str(found), "median <= 1", kept=found.median <= 1)


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    rounds = 3 if arguments.quick else 9
    report = Report("prefix cache")
    loaded = model("wide")
    loaded.identify()
    warm(loaded, report, rounds)
    restart(loaded, report, rounds)
    lookup(model("toy"), report)
    print(f"{machine()}\n")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
