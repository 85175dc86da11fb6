"""Saving costs what is new, not what there is: `save()` after 64 new tokens, on a short and on a long conversation.

Both sessions are autosaved and take turns; each time a block of tokens is generated and only then the clock starts.
Timed is everything from the reply's last event until the snapshot is on the disk: copying new rows, hashing, writing,
fsync.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

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
    turn_about,
)

from mlxgen import Finished, ReplyOptions, Session, SessionOptions

NUM_NEW = 64
SHORT, LONG = 1000, 16000
BOUND = 0.25


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    report = Report("save() after 64 new tokens")
    measure(report, 6 if arguments.quick else 30)
    print(f"{machine()}\n")
    return report.finish()


def measure(report: Report, rounds: int) -> None:
    sessions = {length: _session(length) for length in (SHORT, LONG)}
    times = turn_about({str(length): _save(session) for length, session in sessions.items()}, rounds)
    for session in sessions.values():
        session.close()
    ratio = Ratio.of(times[str(LONG)], times[str(SHORT)])
    report.add(
        f"toy, 2 layers: time at {LONG} tokens / at {SHORT}",
        str(ratio),
        f"median <= {1 + BOUND}",
        kept=ratio.wall.median <= 1 + BOUND,
    )
    each = [median_s(times[str(length)]) * 1e3 for length in (SHORT, LONG)]
    report.add("toy, 2 layers: ms", f"{each[0]:.1f} at {SHORT}, {each[1]:.1f} at {LONG}")


def _session(num_tokens: int) -> Session:
    """An autosaved session with a prompt of so many tokens in its cache, and saved."""
    session = Session(model("toy"), options=SessionOptions(raw=True, prefill_step_size=512, prefix_cache=False))
    session.autosave(new_folder() / "run.mlxgen")
    session.send(prompt(model("toy"), num_tokens)[0], reply=ReplyOptions(max_tokens=1, ignore_eos=True))
    session.save()
    return session


def _save(session: Session) -> Callable[[], Spent]:
    def run() -> Spent:
        events = session.continue_(reply=ReplyOptions(max_tokens=NUM_NEW, ignore_eos=True))
        # The session saves behind its last event. Until then every pass is settled: waiting for one that is under way,
        # which takes longer behind 16,000 tokens, is no part of a save.
        while not isinstance(next(events), Finished):
            pass
        began = Spent.until_now()
        next(events, None)
        session.save()
        return began.since()

    return run


if __name__ == "__main__":
    sys.exit(main())
