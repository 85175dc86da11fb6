"""Exact resume, quick stops and cheap snapshots, tried out with a real model on the machine at hand."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.cli.console import Console
from mlxgen.cli.findings import Finding
from mlxgen.cli.overview import look
from mlxgen.errors import MlxgenError
from mlxgen.events import Event, Finished, PrefillProgress, Token, Usage
from mlxgen.models import Model
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.prefixcache import PrefixCacheOptions, prefix_cache
from mlxgen.preparation import raw_ids
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.sampling import SamplingParams
from mlxgen.session import Session

_NUM_PROMPT: Final = 64
_NUM_CHUNKS: Final = 4
_NUM_TOKENS: Final = 12
_EXACT_BUDGET_S: Final = 8.0
"""For the interrupted runs of one kind of sampling; a slow machine tries fewer places."""

_NUM_STOPS: Final = 5
_NUM_NEW: Final = 64
_MEASURE_S: Final = 3.0
_GENERATE_S: Final = 12.0
_SLACK_S: Final = 0.25
"""A stop may take this much longer than the unit in flight before it is called broken: the machine may be busy."""

_WORDS: Final = ("the", "of", "river", "stone", "seven", "light", "under", "old", "12", "and", "305", "green", "north")


@dataclass(slots=True)
class Transcript:
    """What a run produced, to the last bit, and when its events came (seconds of `time.perf_counter`)."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    text: str = ""
    finished: Finished | None = None
    prefill_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    saved_s: float = 0.0

    def add(self, event: Event) -> None:
        now_s = time.perf_counter()
        if isinstance(event, Token):
            self.ids.append(event.id)
            self.logprobs.append(event.logprob)
            self.text += event.text
            self.token_s.append(now_s)
        elif isinstance(event, PrefillProgress):
            # The prompt's last token and the first one of the reply are one unit: its moment is the token's.
            if event.done < event.total:
                self.prefill_s.append(now_s)
        elif isinstance(event, Finished):
            self.finished = event
            self.ended_s = now_s

    def continued_by(self, other: Transcript) -> Transcript:
        return Transcript(self.ids + other.ids, self.logprobs + other.logprobs, self.text + other.text, other.finished)

    def same_as(self, other: Transcript) -> bool:
        mine, others = self.finished, other.finished
        return (
            (self.ids, self.logprobs, self.text) == (other.ids, other.logprobs, other.text)
            and mine is not None
            and others is not None
            and (mine.text, mine.finish_reason) == (others.text, others.finish_reason)
        )


def transcribe(events: Iterator[Event], at: Callable[[Event], None] = lambda event: None) -> Transcript:
    """Run to the end; `at` sees every event after it was noted."""
    transcript = Transcript(began_s=time.perf_counter())
    for event in events:
        transcript.add(event)
        at(event)
    transcript.saved_s = time.perf_counter()
    return transcript


@dataclass(frozen=True, slots=True)
class Bench:
    """A prompt and how it is run. `text` has `num_prompt` tokens and is prefilled in `_NUM_CHUNKS` chunks."""

    model: Model
    text: str
    num_prompt: int
    cancel: CancelToken

    def session(self, *, step_size: int | None = None, cached: bool = False) -> Session:
        size = step_size if step_size is not None else max(1, math.ceil(self.num_prompt / _NUM_CHUNKS))
        # What is to be measured must be computed.
        options = SessionOptions(raw=True, prefill_step_size=size, prefix_cache=cached)
        session = Session(self.model, options=options)
        session.add(self.text)
        return session

    def token(self) -> CancelToken:
        return CancelToken(parent=self.cancel)


def make_bench(model: Model, num_tokens: int, cancel: CancelToken) -> Bench:
    """A prompt of about `num_tokens` tokens of varied words (fewer if the model's context is short)."""
    limit = num_tokens if model.context_length is None else min(num_tokens, max(4, model.context_length // 3))
    chosen = random.Random(5)
    words: list[str] = []
    while True:
        words.append(chosen.choice(_WORDS))
        count = len(raw_ids(model, " ".join(words), ()))
        if count >= limit:
            return Bench(model, " ".join(words), count, cancel)


def prove(model: Model, command: Sequence[str], console: Console, cancel: CancelToken) -> Iterator[Finding]:
    """Try every promise; `command` and a folder make a process that resumes what is in it."""
    bench = make_bench(model, _NUM_PROMPT, cancel)
    with tempfile.TemporaryDirectory(prefix="mlxgen-doctor-") as folder:
        console.bar("exact resume", 0, 1)
        yield from exact_resume(bench, command, Path(folder))
        console.bar("prefix cache", 0, 1)
        yield prefix_hits(bench)
        console.bar("stop latency", 0, 1)
        yield from stop_latency(bench)
        console.bar("snapshot speed", 0, 1)
        yield snapshot_speed(bench, Path(folder) / "speed.mlxgen")


# -- prefix cache ------------------------------------------------------------------------------------------------------


def prefix_hits(bench: Bench) -> Finding:
    """Whether a prompt that was filled in instead of prefilled gives the same tokens and log-probabilities."""
    cache = prefix_cache(bench.model)
    if not cache.enabled:
        cache.configure(PrefixCacheOptions())
    cache.clear()
    for name, reply in _kinds().items():
        cold, filling, warm = (
            transcribe(bench.session(cached=cached).stream(reply=reply, cancel=bench.token()))
            for cached in (False, True, True)
        )
        for one in (cold, filling, warm):
            if one.finished is not None:
                one.finished.raise_if_cancelled()
        if not (cold.same_as(filling) and cold.same_as(warm)):
            detail = f"{name}: a prompt from the prefix cache gives other log-probabilities than a prefilled one"
            return Finding("prefix cache", f"{detail}; --no-prefix-cache does without it", False)
        reused = 0 if warm.finished is None else warm.finished.usage.reused_tokens
        if not reused:
            return Finding("prefix cache", "isn't used (no memory to spare)")
    return Finding("prefix cache", f"{reused} of {bench.num_prompt} tokens filled in, the same to the last bit", True)


# -- exact resume ------------------------------------------------------------------------------------------------------


def _kinds() -> dict[str, ReplyOptions]:
    sampling = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=11)
    return {
        "greedy": ReplyOptions(max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=True),
        "sampled": ReplyOptions(max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=True, sampling=sampling),
    }


def exact_resume(bench: Bench, command: Sequence[str], folder: Path) -> Iterator[Finding]:
    """Stop at several places, resume all of them in a new process, and compare with the run nobody stopped."""
    references: dict[str, Transcript] = {}
    begun: dict[str, Transcript] = {}
    for kind, options in _kinds().items():
        reference = transcribe(bench.session().stream(None, reply=options, cancel=bench.token()))
        bench.cancel.checkpoint()
        references[kind] = reference
        for place in _places(reference.ended_s - reference.began_s):
            name = f"{kind}-{place[0]}-{place[1]}"
            begun[name] = _interrupted(bench, options, folder / f"{name}.mlxgen", place)
            bench.cancel.checkpoint()
    resumed = _resume_elsewhere([*command, str(folder)], folder, bench.cancel)
    for kind, reference in references.items():
        names = [name for name in begun if name.startswith(kind)]
        wrong = [
            name.removeprefix(f"{kind}-")
            for name in names
            if name not in resumed or not begun[name].continued_by(resumed[name]).same_as(reference)
        ]
        again = [name for name in names if name in resumed and _num_fed(begun[name], resumed[name]) > bench.num_prompt]
        places = ", ".join(name.removeprefix(f"{kind}-") for name in names)
        detail = f"stopped at {places}; resumed in a new process; ids, text and log-probabilities are the same"
        if wrong:
            detail = f"not the same after a stop at {', '.join(wrong)} (of {places})"
        elif again:
            detail = f"prompt tokens were fed twice after a stop at {', '.join(again)}"
        yield Finding(f"exact resume, {kind}", detail, not wrong and not again)


def _places(seconds: float) -> list[tuple[str, int]]:
    """Where to stop: (phase, number of events in it). At least one in each phase, more where there is time."""
    wanted: list[tuple[str, int]] = [
        ("prefill", 2),
        ("decode", _NUM_TOKENS // 2),
        ("decode", 1),
        ("prefill", 3),
        ("decode", _NUM_TOKENS - 1),
        ("decode", 3),
    ]
    return wanted[: max(2, min(len(wanted), int(_EXACT_BUDGET_S / max(seconds, 1e-3))))]


def _interrupted(bench: Bench, options: ReplyOptions, path: Path, place: tuple[str, int]) -> Transcript:
    phase, count = place
    token = bench.token()
    seen = {"prefill": 0, "decode": 0}

    def stop(event: Event) -> None:
        seen["prefill"] += isinstance(event, PrefillProgress)
        seen["decode"] += isinstance(event, Token)
        if seen[phase] >= count:
            token.cancel()

    with bench.session() as session:
        session.autosave(path)
        return transcribe(session.stream(None, reply=options, cancel=token), stop)


def _num_fed(first: Transcript, second: Transcript) -> int:
    """Prompt tokens that both processes fed together."""
    runs = (first.finished, second.finished)
    return sum(finished.usage.prefilled_tokens for finished in runs if finished is not None)


def _resume_elsewhere(command: Sequence[str], folder: Path, cancel: CancelToken) -> dict[str, Transcript]:
    """Run the second process (it loads the model again) and read what it wrote, one JSON object per snapshot."""
    report = folder / "resumed.jsonl"
    errors = folder / "errors.txt"
    with open(report, "wb") as output, open(errors, "wb") as error_output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=error_output)
        try:
            while child.poll() is None:
                cancel.checkpoint()
                time.sleep(0.02)
        except BaseException:
            child.kill()
            child.wait()
            raise
    if child.returncode != 0:
        said = errors.read_text(errors="replace").strip().splitlines()
        raise MlxgenError(f"the second process failed with exit code {child.returncode}: {' '.join(said[-3:])}")
    return {
        entry["name"]: Transcript(
            ids=entry["ids"],
            logprobs=entry["logprobs"],
            text=entry["text"],
            finished=_finished(entry["finished"]),
        )
        for entry in map(json.loads, report.read_text().splitlines())
    }


def resume_all(folder: str, model: Model, console: Console, cancel: CancelToken) -> None:
    """What the second process does: go on with every snapshot in the folder, and write down what came of it."""
    for path in sorted(Path(folder).glob("*.mlxgen")):
        with resume(path, options=ResumeOptions(model=model), cancel=cancel) as session:
            transcript = transcribe(session.continue_(cancel=cancel))
        if transcript.finished is None or transcript.finished.finish_reason == "cancelled":
            raise Cancelled(cancel.reason or "requested")
        entry = {
            "name": path.stem,
            "ids": transcript.ids,
            "logprobs": transcript.logprobs,
            "text": transcript.text,
            "finished": {
                "finish_reason": transcript.finished.finish_reason,
                "text": transcript.finished.text,
                "prefilled_tokens": transcript.finished.usage.prefilled_tokens,
            },
        }
        console.write(json.dumps(entry) + "\n")


def _finished(entry: dict[str, Any]) -> Finished:
    usage = Usage(prefilled_tokens=entry["prefilled_tokens"])
    return Finished(entry["finish_reason"], None, entry["text"], usage)


# -- stop latency ------------------------------------------------------------------------------------------------------


def stop_latency(bench: Bench) -> Iterator[Finding]:
    """Cancel from another thread at random moments, as a signal would, and time the last event."""
    options = ReplyOptions(max_tokens=10 * _NUM_TOKENS, ignore_eos=True)
    # A slow machine has seen enough after a few seconds.
    limited = CancelToken.after(_MEASURE_S, parent=bench.cancel)
    whole = transcribe(bench.session().stream(None, reply=options, cancel=limited))
    bench.cancel.checkpoint()
    if len(whole.token_s) < 2:
        yield Finding("stop latency", f"not measured: {len(whole.token_s)} tokens in {_MEASURE_S:.0f} s")
        return
    chunk_s = _longest(whole.prefill_s)
    token_s = _longest(whole.token_s)
    prefill = (0.0, whole.token_s[0] - whole.began_s)
    decode = (whole.token_s[0] - whole.began_s, whole.token_s[-1] - whole.began_s)
    for name, window, unit_s, unit in (
        ("prefill", prefill, max(chunk_s, token_s), "chunk"),
        ("decode", decode, token_s, "token"),
    ):
        yield _latency_in(bench, name, window, unit_s, unit)


def _latency_in(bench: Bench, name: str, window: tuple[float, float], unit_s: float, unit: str) -> Finding:
    chosen = random.Random(7)
    latencies: list[float] = []
    extra = 0
    for _ in range(_NUM_STOPS):
        delay_s = window[0] + (0.1 + 0.8 * chosen.random()) * (window[1] - window[0])
        measured = _stop_after(bench, delay_s)
        bench.cancel.checkpoint()
        if measured is not None:
            latencies.append(measured[0])
            extra = max(extra, measured[1])
    if not latencies:
        return Finding(f"stop in {name}", "too fast to be measured with this model", None)
    median_s, worst_s = statistics.median(latencies), max(latencies)
    holds = extra <= 1 and worst_s <= 1.5 * unit_s + _SLACK_S
    detail = (
        f"median {_ms(median_s)}, worst {_ms(worst_s)} of {len(latencies)}; one {unit} takes up to {_ms(unit_s)}; "
        f"at most {extra} {unit} finished after the request"
    )
    return Finding(f"stop in {name}", detail, holds)


def _stop_after(bench: Bench, delay_s: float) -> tuple[float, int] | None:
    """(seconds from cancel() to the last event, units finished in between), or None if the run was over before."""
    token = bench.token()
    cancelled_s: list[float] = []

    def cancel() -> None:
        token.cancel()
        cancelled_s.append(time.perf_counter())

    options = ReplyOptions(max_tokens=10 * _NUM_TOKENS, ignore_eos=True)
    session = bench.session()
    timer = threading.Timer(delay_s, cancel)
    timer.start()
    try:
        transcript = transcribe(session.stream(None, reply=options, cancel=token))
    finally:
        timer.cancel()
        timer.join()
    if transcript.finished is None or transcript.finished.finish_reason != "cancelled" or not cancelled_s:
        return None
    units = [*transcript.prefill_s, *transcript.token_s]
    return max(0.0, transcript.ended_s - cancelled_s[0]), sum(moment > cancelled_s[0] for moment in units)


def _longest(moments: Sequence[float]) -> float:
    return max((after - before for before, after in itertools.pairwise(moments)), default=0.0)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


# -- snapshots ---------------------------------------------------------------------------------------------------------


def snapshot_speed(bench: Bench, path: Path) -> Finding:
    """Save after new tokens, resume, and go on by one token: how long each takes, and that nothing is fed again."""
    long = make_bench(bench.model, 4 * _NUM_PROMPT, bench.cancel)
    token = CancelToken.after(_GENERATE_S, parent=bench.cancel)
    with long.session(step_size=2048) as session:
        session.autosave(path)
        options = ReplyOptions(max_tokens=_NUM_NEW, ignore_eos=True)
        fresh = transcribe(session.stream(None, reply=options, cancel=token))
        bench.cancel.checkpoint()
        ledger = session.ledger
    save_s = fresh.saved_s - fresh.ended_s
    problems = look(path).view.verify()
    began_s = time.perf_counter()
    with resume(path, options=ResumeOptions(model=bench.model), cancel=bench.cancel) as session:
        resume_s = time.perf_counter() - began_s
        same = session.ledger == ledger
        more = transcribe(session.continue_(reply=ReplyOptions(max_tokens=1), cancel=bench.cancel))
    bench.cancel.checkpoint()
    fed = 0 if more.finished is None else more.finished.usage.prefilled_tokens
    prefill_s = (fresh.token_s[0] if fresh.token_s else fresh.ended_s) - fresh.began_s
    size = look(path).size_bytes
    detail = (
        f"saving after {len(fresh.ids)} new tokens {_ms(save_s)}; resuming {len(ledger)} tokens {_ms(resume_s)}, "
        f"prefilling {long.num_prompt} again would take {_ms(prefill_s)}; {size / 1e6:.1f} MB"
    )
    if problems:
        return Finding("snapshot", f"damaged right after it was written: {problems[0]}", False)
    if fed or not same:
        return Finding("snapshot", f"{fed} prompt tokens were fed again after resuming", False)
    return Finding("snapshot", detail, True)
