"""How long a stop takes: `cancel()` in another thread at a random moment, until the `Finished` event.

The unit in flight must end first (nothing can interrupt it); its end is the event that reports it. What the bound of
20 ms is about is the time from there to `Finished`. With `max_stop_latency_s` the whole time is bounded.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from dataclasses import dataclass

from bench_tools import Interval, Report, machine, model, new_folder, parser, prompt

from mlxgen import CancelToken, Finished, PrefillProgress, ReplyOptions, Session, SessionOptions, Token

BOUND_S = 0.020
TARGET_FACTOR = 1.5


@dataclass(frozen=True)
class Stop:
    """One stop. Seconds: `rest` from cancel() to the end of the unit in flight, `tail` from there to `Finished`."""

    rest: float
    tail: float
    num_after: int

    @property
    def whole(self) -> float:
        return self.rest + self.tail


@dataclass(frozen=True)
class Case:
    """Where to stop: after the prompt if `decode`, else while it is read."""

    name: str
    model: str
    num_prompt_tokens: int
    options: SessionOptions
    decode: bool
    autosave: bool = False
    num_stops: int = 30


def _options(step_size: int = 2048, latency_s: float | None = None) -> SessionOptions:
    return SessionOptions(raw=True, prefill_step_size=step_size, max_stop_latency_s=latency_s, prefix_cache=False)


CASES = (
    Case("decode, toy", "toy", 64, _options(), True),
    Case("decode, 8 layers", "middle", 64, _options(), True),
    Case("decode, SmolLM2", "smollm2", 24, _options(), True, num_stops=15),
    Case("decode, 8 layers, autosave", "middle", 64, _options(), True, autosave=True),
    Case("prefill, 8 layers, steps of 256", "middle", 4000, _options(256), False),
    Case("prefill, 8 layers, steps of 256, autosave", "middle", 4000, _options(256), False, autosave=True),
    Case("prefill, SmolLM2, steps of 32", "smollm2", 200, _options(32), False, num_stops=15),
)
TARGETS = (
    Case("prefill, 8 layers", "middle", 4000, _options(latency_s=0.1), False),
    Case("prefill, 8 layers", "middle", 4000, _options(latency_s=0.3), False),
)


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    report = Report("stopping")
    for case in CASES:
        stops = stops_of(case, case.num_stops // (6 if arguments.quick else 1))
        tail = Interval.of([stop.tail * 1e3 for stop in stops])
        whole = sorted(stop.whole * 1e3 for stop in stops)
        bound = f"median <= {BOUND_S * 1e3:.0f} ms"
        report.add(
            f"{case.name}: end of unit to Finished, ms",
            f"{tail.median:.2f} [{tail.low:.2f}, {tail.high:.2f}]",
            bound,
            kept=tail.median <= BOUND_S * 1e3,
        )
        report.add(f"{case.name}: cancel() to Finished, ms", f"median {_middle(whole):.1f}, longest {whole[-1]:.1f}")
        if max(stop.num_after for stop in stops) > 1:
            raise RuntimeError(f"{case.name}: more than the unit in flight was done after cancel()")
    for case in TARGETS:
        stops = stops_of(case, case.num_stops // (6 if arguments.quick else 1))
        whole = sorted(stop.whole for stop in stops)
        target = case.options.max_stop_latency_s or 0.0
        report.add(
            f"{case.name}, max_stop_latency_s={target}: cancel() to Finished, s",
            f"median {_middle(whole):.3f}, longest {whole[-1]:.3f}",
            f"median <= {TARGET_FACTOR * target:.2f} s",
            kept=_middle(whole) <= TARGET_FACTOR * target,
        )
    print(f"{machine()}\n")
    return report.finish()


def _middle(values: list[float]) -> float:
    return values[len(values) // 2]


def stops_of(case: Case, number: int) -> list[Stop]:
    """`number` stops at moments spread over the phase."""
    span_s = _whole_phase(case)
    rng = random.Random(1)
    found: list[Stop] = []
    for _ in range(4 * number):
        stop = one_stop(case, rng.uniform(0.05, 0.85) * span_s)
        if stop is not None:
            found.append(stop)
        if len(found) == number:
            return found
    raise RuntimeError(f"{case.name}: most runs were over before they were stopped")


def _whole_phase(case: Case) -> float:
    """How long the phase lasts when nobody stops it (of decode: some 40 tokens)."""
    began_s = 0.0
    for event in _session(case).stream(prompt(model(case.model), case.num_prompt_tokens)[0], reply=_reply(40)):
        if isinstance(event, Token if case.decode else PrefillProgress) and not began_s:
            began_s = time.perf_counter()
        if not case.decode and isinstance(event, Token):
            break
    return time.perf_counter() - began_s


def _session(case: Case) -> Session:
    return Session(model(case.model), options=case.options)


def _reply(max_tokens: int) -> ReplyOptions:
    return ReplyOptions(max_tokens=max_tokens, ignore_eos=True)


def one_stop(case: Case, delay_s: float) -> Stop | None:
    """Cancel `delay_s` after the phase's first event; None if the phase was over by then."""
    token = CancelToken()
    cancelled_s: list[float] = []

    def cancel() -> None:
        time.sleep(delay_s)
        cancelled_s.append(time.perf_counter())
        token.cancel("requested")

    thread = threading.Thread(target=cancel)
    times: list[float] = []
    finished: Finished | None = None
    with _session(case) as session:
        if case.autosave:
            session.autosave(new_folder() / "run.mlxgen")
        text, _ = prompt(model(case.model), case.num_prompt_tokens)
        for event in session.stream(text, reply=_reply(4000), cancel=token):
            now_s = time.perf_counter()
            if isinstance(event, Finished):
                finished, finished_s = event, now_s
                break
            if isinstance(event, Token if case.decode else PrefillProgress):
                times.append(now_s)
                if len(times) == 1:
                    thread.start()
            elif isinstance(event, Token):
                token.cancel("requested")  # too late: the prompt is done
        thread.join()
    if finished is None or (not case.decode and session.position > 0):
        return None
    after = [at for at in times if at > cancelled_s[0]]
    end_s = after[0] if after else cancelled_s[0]
    return Stop(end_s - cancelled_s[0], finished_s - end_s, len(after))


if __name__ == "__main__":
    sys.exit(main())
