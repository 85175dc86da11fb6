"""What autosave costs the decode loop: a session that is autosaved by default against one that isn't, turn about.

Each turn is a window of tokens that is longer than the default distance between two autosaves, so that every one pays
for at least one handover of arrays; the writer thread's work counts too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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

from mlxgen import AutosavePolicy, ReplyOptions, Session, SessionOptions

BOUND = 0.99


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    num_prompt_tokens: int
    rounds: int


CASES = (
    Case("toy, 2 layers", "toy", 64, 40),
    Case("8 layers", "middle", 64, 12),
    Case("SmolLM2", "smollm2", 24, 3),
)


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    report = Report("decode speed with autosave / without")
    for case in CASES[: 2 if arguments.quick else None]:
        measure(case, report, max(2, case.rounds // (8 if arguments.quick else 1)))
    print(f"{machine()}\n")
    return report.finish()


def measure(case: Case, report: Report, rounds: int) -> None:
    loaded = model(case.model)
    text, _ = prompt(loaded, case.num_prompt_tokens)
    window = AutosavePolicy().every_tokens + 16
    reply = ReplyOptions(max_tokens=(rounds + 1) * window, ignore_eos=True)
    sessions = [Session(loaded, options=SessionOptions(raw=True)) for _ in range(2)]
    sessions[1].autosave(new_folder() / "run.mlxgen")
    streams = [tokens_of(session.stream(text, reply=reply)) for session in sessions]
    for stream in streams:
        for _ in range(16):
            next(stream)
    runs = {"without": _window(streams[0], window), "with": _window(streams[1], window)}
    times = turn_about(runs, rounds)
    for session in sessions:
        session.close()
    ratio = Ratio.of(times["without"], times["with"])
    report.add(case.name, str(ratio), f"median >= {BOUND}", kept=ratio.wall.median >= BOUND)
    each = [median_s(times[name]) / window * 1e6 for name in ("without", "with")]
    report.add(f"{case.name}: microseconds a token", f"without {each[0]:.0f}, with {each[1]:.0f}")


def _window(stream: Iterator[object], length: int) -> Callable[[], Spent]:
    def run() -> Spent:
        began = Spent.until_now()
        for _ in range(length):
            next(stream)
        return began.since()

    return run


if __name__ == "__main__":
    sys.exit(main())
