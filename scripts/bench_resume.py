"""Resuming a long prompt against reading it again, the model being loaded: until the next token is there, turn about.

Also the memory that a resume takes at its highest, above what was there: the cache, and one segment of the snapshot.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from bench_tools import (
    Ratio,
    Report,
    Spent,
    machine,
    median_s,
    model,
    new_folder,
    parser,
    prompt,
    tokens_of,
    turn_about,
)

import mlxgen
from mlxgen import ReplyOptions, ResumeOptions, Session, SessionOptions

NUM_TOKENS = 8000
BOUND = 20.0
REPLY = ReplyOptions(max_tokens=1000, ignore_eos=True)


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    report = Report(f"resuming at {NUM_TOKENS} tokens")
    loaded = model("wide")
    loaded.identify()
    text, ids = prompt(loaded, NUM_TOKENS)
    path = new_folder() / "run.mlxgen"

    def prefill() -> Spent:
        began = Spent.until_now()
        with Session(loaded, options=SessionOptions(raw=True, prefix_cache=False)) as session:
            next(tokens_of(session.stream(text, reply=REPLY)))
            return began.since()

    def resume() -> Spent:
        began = Spent.until_now()
        with mlxgen.resume(path, options=ResumeOptions(model=loaded)) as session:
            next(tokens_of(session.continue_()))
            return began.since()

    with Session(loaded, options=SessionOptions(raw=True, prefix_cache=False)) as session:
        next(tokens_of(session.stream(text, reply=REPLY)))
        session.save(path)
        expected = next(tokens_of(session.continue_()))
    with mlxgen.resume(path, options=ResumeOptions(model=loaded)) as session:
        if next(tokens_of(session.continue_())) != expected:
            raise RuntimeError("the resumed session went on with another token")
    times = turn_about({"prefill": prefill, "resume": resume}, 1 if arguments.quick else 3)
    ratio = Ratio.of(times["prefill"], times["resume"])
    report.add(
        "prefill / resume, to the next token", str(ratio), f"median >= {BOUND:.0f}", kept=ratio.wall.median >= BOUND
    )
    middle = {name: median_s(values) for name, values in times.items()}
    report.add("seconds", f"prefill {middle['prefill']:.2f} ({len(ids)} tokens), resume {middle['resume']:.3f}")
    memory(path, loaded, report)
    print(f"{machine()}\n")
    return report.finish()


def memory(path: Path, loaded: Any, report: Report) -> None:
    segment_bytes = max(file.stat().st_size for file in path.glob("kv-*.safetensors"))
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before_bytes = mx.get_active_memory()
    with mlxgen.resume(path, options=ResumeOptions(model=loaded)) as session:
        peak_bytes = mx.get_peak_memory() - before_bytes
        cache_bytes = sum(array.nbytes for array in session.sequence.arrays())
    limit_bytes = cache_bytes + segment_bytes
    report.add(
        "memory at the highest, MB",
        f"{peak_bytes / 1e6:.1f} (cache {cache_bytes / 1e6:.1f}, largest segment {segment_bytes / 1e6:.1f})",
        f"<= {limit_bytes / 1e6:.1f}",
        kept=peak_bytes <= limit_bytes,
    )


if __name__ == "__main__":
    sys.exit(main())
