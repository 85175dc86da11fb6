"""Kill -9 `mlxgen generate` at random moments, resume (and kill that too, now and then), compare with a run in peace.

A run is one reply of a tiny model, killed at least once after its `started` event: while it reads the prompt, generates
or saves. What counts in the end is equality, byte by byte: the text of the `finished` event, the token ids and their
log-probabilities in the snapshot's journal, and every token event that any of the processes printed. A kill before
`started` must leave no snapshot, or one that resumes. Prints `N of N runs byte-identical`; exits with 1 on any
difference, and keeps the folder of the run that differs.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

MAX_TOKENS = 300
TIMEOUT_S = 300.0
MAX_LATER_KILLS = 3
PROMPT = " ".join(f"It was the {n}th letter of the story, and nobody had answered the first." for n in range(3, 13))
SAMPLED = (
    *("--temp", "1.2", "--top-p", "0.95", "--top-k", "80", "--min-p", "0.001", "--seed", "20"),
    *("--repetition-penalty", "1.15", "--presence-penalty", "0.3", "--frequency-penalty", "0.2"),
    *("--frequency-context-size", "64", "--logit-bias", '{"40": 1.5, "77": -2}'),
    # Their beginnings are common in what these models say, so text is held back all the time.
    *("--stop", " t\u2603", "--stop", "e~~", "--stop", "\ufffdZZ9"),
)
GREEDY = ("--temp", "0")
QUANTIZED = ("--kv-group-size", "32", "--kv-bits")


@dataclass(frozen=True)
class Case:
    """A tiny model with flags: one cache kind, one prefill step size, one way of sampling."""

    name: str
    kind: str
    flags: tuple[str, ...]


def _cases() -> list[Case]:
    caches = {
        "llama": ("llama", ()),
        "ring": ("llama", ("--max-kv-size", "200")),
        "quantized": ("llama", (*QUANTIZED, "8", "--quantized-kv-start", "0")),
        "quantized-later": ("llama", (*QUANTIZED, "4", "--quantized-kv-start", "500")),
        "gemma3-window": ("gemma3", ()),
        "lfm2": ("lfm2", ()),
        "qwen3_5": ("qwen3_5", ()),
        "mamba2": ("mamba2", ()),
        "falcon_h1-list": ("falcon_h1", ()),
        "llama4-chunked": ("llama4", ()),
    }
    steps = (16, 64, 2048, 37)
    return [
        Case(f"{name}/{how}", kind, (*cache, *flags, "--prefill-step-size", str(steps[index % len(steps)])))
        for how, flags in (("greedy", GREEDY), ("sampled", SAMPLED))
        for index, (name, (kind, cache)) in enumerate(caches.items())
    ]


@dataclass(frozen=True)
class Moment:
    """When to kill: `seconds` after the start, or after the `index`-th event of a kind plus `seconds`."""

    seconds: float
    event: str | None = None
    index: int = 0


@dataclass
class Process:
    """One command from start to end: what it printed, and how it ended. `status` is as of `os.waitpid`."""

    events: list[dict[str, Any]] = field(default_factory=list)
    killed: bool = False
    hung: bool = False
    status: int = 0
    errors: str = ""
    seconds: float = 0.0

    @property
    def started(self) -> bool:
        return any(event["event"] == "started" for event in self.events)

    @property
    def finished(self) -> dict[str, Any] | None:
        return next((event for event in self.events if event["event"] == "finished"), None)

    @property
    def phase(self) -> str:
        """Where the kill found it, as far as its output tells."""
        last = self.events[-1]["event"] if self.events else None
        return {None: "load", "started": "prefill", "prefill": "prefill", "token": "decode"}.get(last, "save")


class Launcher:
    """Starts commands: as a child of a `chaos_worker.py`, or cold, as a shell would. One per thread."""

    def __init__(self, folder: Path, *, forking: bool) -> None:
        self._folder = folder
        self._connection: socket.socket | None = None
        if forking:
            self._connection, theirs = socket.socketpair()
            worker = [sys.executable, str(ROOT / "scripts" / "chaos_worker.py"), str(theirs.fileno())]
            self._server = subprocess.Popen(worker, pass_fds=[theirs.fileno()])
            theirs.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._server.wait()

    def run(self, args: list[str], moment: Moment | None, *, cold: bool) -> Process:
        """Run `mlxgen ARGS`, killed at `moment` if it lasts until then."""
        began_s = time.perf_counter()
        read_end, write_end = os.pipe()
        with tempfile.TemporaryFile(dir=self._folder) as errors:
            if cold or self._connection is None:
                command = [sys.executable, "-m", "mlxgen", *args]
                child = subprocess.Popen(command, stdout=write_end, stderr=errors, cwd=self._folder)
                pid = child.pid
            else:
                request = json.dumps({"args": args, "cwd": str(self._folder)}).encode()
                socket.send_fds(self._connection, [request], [write_end, errors.fileno()])
                pid, child = int(self._line()), None
            os.close(write_end)
            process = Process()
            killer = _Killer(pid, child, process)
            timers = [threading.Timer(TIMEOUT_S, killer.hang)]
            if moment is not None and moment.event is None:
                timers.append(threading.Timer(max(0.0, moment.seconds - (time.perf_counter() - began_s)), killer.kill))
            for timer in timers:
                timer.daemon = True
                timer.start()
            with open(read_end, "rb") as output:
                for event in _events(output):
                    process.events.append(event)
                    if moment is not None and _is_at(moment, event, process.events):
                        time.sleep(moment.seconds)
                        killer.kill()
            for timer in timers:
                timer.cancel()
            status = int(self._line()) if child is None else _wait_status(child)
            killer.close()
            # A kill that came after the end has killed nothing.
            process.killed = process.killed and os.WIFSIGNALED(status)
            process.status, process.seconds = status, time.perf_counter() - began_s
            errors.seek(0)
            process.errors = errors.read().decode("utf-8", "replace")
        return process

    def _line(self) -> bytes:
        assert self._connection is not None
        line = b""
        while not line.endswith(b"\n"):
            received = self._connection.recv(1)
            if not received:
                raise RuntimeError("chaos_worker.py has died")
            line += received
        return line


class _Killer:
    """Kills one process at most once; holds it by a descriptor where its number could be another's by then."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None, process: Process) -> None:
        self._child, self._process = child, process
        self._descriptor = -1
        if child is None:
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                pass  # it has ended already

    def kill(self) -> None:
        self._process.killed = True
        if self._child is not None:
            self._child.kill()
        elif self._descriptor >= 0:
            try:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def hang(self) -> None:
        self._process.hung = True
        self.kill()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _wait_status(child: subprocess.Popen[bytes]) -> int:
    code = child.wait()
    return -code if code < 0 else code << 8


def _events(output: Any) -> Iterator[dict[str, Any]]:
    for line in output:
        if line.endswith(b"\n"):  # the last line of a killed process may be half a one
            yield json.loads(line)


def _is_at(moment: Moment, event: dict[str, Any], events: list[dict[str, Any]]) -> bool:
    if moment.event is None or event["event"] != moment.event:
        return False
    return sum(1 for earlier in events if earlier["event"] == moment.event) == moment.index + 1


def read_journal(snapshot: Path) -> list[bytes]:
    """The token records of a snapshot, as they stand in the file: an independent reader of docs/snapshot-format.md."""
    tokens = []
    for line in (snapshot / "journal.log").read_bytes().splitlines():
        crc, _, body = line.partition(b" ")
        if int(crc, 16) != zlib.crc32(body):
            raise ValueError(f"{snapshot}: a journal line fails its check: {line[:80]!r}")
        if body.startswith(b"tok "):
            tokens.append(body)
    return tokens


@dataclass
class Reference:
    """What a run in peace came to."""

    text: str
    finish_reason: str
    tokens: dict[int, dict[str, Any]]
    journal: list[bytes]
    counts: Counter[str]
    seconds: float


class Different(Exception):
    """A run that isn't equal to the one in peace; the message says in what."""


class Trial:
    """One run: the first kill, perhaps others, the last resume, the comparison."""

    def __init__(self, launcher: Launcher, folder: Path, command: list[str], reference: Reference, seed: str) -> None:
        self._launcher = launcher
        self._snapshot = folder / "run.mlxgen"
        self._command = [*command, "--snapshot", str(self._snapshot)]
        self._reference = reference
        self._rng = random.Random(seed)
        self.kills: list[str] = []
        self.num_early = 0
        self._printed: list[dict[str, Any]] = []

    def run(self, cold_share: float) -> None:
        """Raises `Different`."""
        cold = self._rng.random() < cold_share
        while not self._first(cold):
            if self._snapshot.exists():
                shutil.rmtree(self._snapshot)
        resume = ["resume", str(self._snapshot), "--json"]
        for chance in (0.5,) * MAX_LATER_KILLS:
            if self._rng.random() >= chance:
                break
            process = self._launcher.run(resume, self._moment(0.8), cold=cold)
            self._take(process)
            if process.killed:
                self.kills.append(f"resume ({process.phase})")
        last = self._launcher.run(resume, None, cold=cold)
        self._take(last)
        self._compare(last)

    def _moment(self, share: float = 1.1) -> Moment:
        """Any moment of the expected time, or shortly after an event of any kind, so that short phases are hit too."""
        if self._rng.random() < 0.5:
            return Moment(self._rng.uniform(0, share * self._reference.seconds))
        event = self._rng.choice(sorted(self._reference.counts))
        return Moment(self._rng.uniform(0, 0.004), event, self._rng.randrange(self._reference.counts[event]))

    def _first(self, cold: bool) -> bool:
        """Whether the first process was killed after it had started; otherwise checks what there is, to begin again."""
        process = self._launcher.run(self._command, self._moment(), cold=cold)
        if not process.killed:
            self._take(process)
            self._printed.clear()
            return False
        if process.started:
            self._take(process)
            self.kills.append(process.phase)
            return True
        self.num_early += 1
        if (self._snapshot / "journal.log").exists():
            resumed = self._launcher.run(["resume", str(self._snapshot), "--json"], None, cold=cold)
            if resumed.status != 0 or resumed.finished is None:
                raise Different(f"killed before it started, it left what doesn't resume: {resumed.errors.strip()}")
        return False

    def _take(self, process: Process) -> None:
        if process.hung:
            raise Different(f"a process hung for {TIMEOUT_S:.0f} s after {process.events[-1:]}")
        if not process.killed and process.status != 0:
            raise Different(f"a process ended with status {process.status}: {process.errors.strip()}")
        tokens = [event for event in process.events if event["event"] == "token"]
        for event in tokens:
            if event != self._reference.tokens.get(event["index"]):
                raise Different(f"printed {event}, in peace it was {self._reference.tokens.get(event['index'])}")
        self._printed += tokens

    def _compare(self, last: Process) -> None:
        reference, finished = self._reference, last.finished
        if finished is None:
            raise Different("the last process printed no finished event")
        if finished["text"] != reference.text:
            raise Different(f"the text is {finished['text']!r}, in peace it was {reference.text!r}")
        if finished["finish_reason"] != reference.finish_reason:
            raise Different(f"it ended by {finished['finish_reason']}, in peace by {reference.finish_reason}")
        journal = read_journal(self._snapshot)
        if journal != reference.journal:
            at = next((i for i, (a, b) in enumerate(zip(journal, reference.journal, strict=False)) if a != b), -1)
            raise Different(
                f"{len(journal)} token records (in peace {len(reference.journal)}), first difference at {at}"
            )
        unprinted = set(reference.tokens) - {event["index"] for event in self._printed}
        # The record comes before the print: at each kill, one token may have been recorded and not printed.
        if len(unprinted) > len(self.kills):
            raise Different(f"tokens {sorted(unprinted)[:20]} were printed by no process, with {len(self.kills)} kills")


class Chaos:
    """All runs, on a few threads. Owns the launchers, the folders and the counts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._forking = sys.platform == "linux" and arguments.cold < 1.0
        self._folder = Path(tempfile.mkdtemp(prefix="mlxgen-chaos-"))
        self._models = self._make_models()
        self._references: dict[str, Reference] = {}
        self._lock = threading.Lock()
        self.num_equal = 0
        self.num_early = 0
        self.kills: Counter[str] = Counter()
        self.differences: list[str] = []

    def _make_models(self) -> dict[str, Path]:
        """Written by another process: this one stays small, and never imports MLX."""
        if self._arguments.model is not None:
            return {}
        kinds = sorted({case.kind for case in self._cases()})
        code = "import sys, pathlib, tiny\nfor k in sys.argv[2:]: tiny.make(k, pathlib.Path(sys.argv[1], k))"
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
        subprocess.run([sys.executable, "-c", code, str(self._folder), *kinds], check=True, env=environment)
        return {kind: self._folder / kind for kind in kinds}

    def _cases(self) -> list[Case]:
        chosen = [case for case in _cases() if case.name.startswith(self._arguments.case)]
        if self._arguments.model is not None:
            chosen = [case for case in chosen if case.kind == "llama"]
        return chosen

    def _command(self, case: Case) -> list[str]:
        model = self._arguments.model or str(self._models[case.kind])
        flags = ["--prompt", PROMPT, "--max-tokens", str(self._arguments.max_tokens), "--ignore-eos", "--logprobs"]
        return ["generate", "--model", model, *flags, *case.flags, "--json"]

    def run(self) -> bool:
        jobs: queue.SimpleQueue[tuple[int, Case]] = queue.SimpleQueue()
        cases = self._cases()
        order = random.Random(self._arguments.seed)
        shuffled = order.sample(cases, len(cases))
        for number in range(self._arguments.runs):
            jobs.put((number, shuffled[number % len(cases)]))
        threads = [threading.Thread(target=self._work, args=(jobs,)) for _ in range(self._arguments.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.differences:
            shutil.rmtree(self._folder)
        return not self.differences and self.num_equal == self._arguments.runs

    def _work(self, jobs: queue.SimpleQueue[tuple[int, Case]]) -> None:
        launcher = Launcher(self._folder, forking=self._forking)
        try:
            while not self.differences or self._arguments.keep_going:
                try:
                    number, case = jobs.get_nowait()
                except queue.Empty:
                    return
                self._one(launcher, number, case)
        except Exception as error:
            with self._lock:
                self.differences.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            launcher.close()

    def _one(self, launcher: Launcher, number: int, case: Case) -> None:
        folder = self._folder / f"run-{number}"
        folder.mkdir()
        seed = f"{self._arguments.seed}/{number}"
        trial = Trial(launcher, folder, self._command(case), self._reference(launcher, case), seed)
        problem = None
        try:
            trial.run(self._arguments.cold)
        except Different as difference:
            problem = f"run {number} ({case.name}, kills: {trial.kills}, in {folder}): {difference}"
        with self._lock:
            self.num_early += trial.num_early
            self.kills.update(trial.kills)
            if problem is None:
                self.num_equal += 1
                shutil.rmtree(folder)
            else:
                self.differences.append(problem)
                print(f"DIFFERENT  {problem}", flush=True)
            if self._arguments.verbose or (number + 1) % 20 == 0:
                print(f"run {number + 1}: {case.name}, kills: {', '.join(trial.kills)}", flush=True)

    def _reference(self, launcher: Launcher, case: Case) -> Reference:
        with self._lock:
            if case.name in self._references:
                return self._references[case.name]
        snapshot = self._folder / f"peace-{case.name.replace('/', '-')}-{threading.get_ident()}.mlxgen"
        process = launcher.run([*self._command(case), "--snapshot", str(snapshot)], None, cold=False)
        finished = process.finished
        if process.status != 0 or finished is None:
            raise RuntimeError(f"{case.name} can't run even in peace: {process.errors.strip()}")
        tokens = {event["index"]: event for event in process.events if event["event"] == "token"}
        counts = Counter(event["event"] for event in process.events)
        reference = Reference(
            finished["text"], finished["finish_reason"], tokens, read_journal(snapshot), counts, process.seconds
        )
        shutil.rmtree(snapshot)
        with self._lock:
            return self._references.setdefault(case.name, reference)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill mlxgen at random moments, resume, compare.")
    parser.add_argument("--runs", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=None, metavar="S", help="default: a new one, printed")
    parser.add_argument("--model", metavar="DIR", help="a text model of your own instead of the tiny ones")
    parser.add_argument(
        "--case", default="", metavar="PREFIX", help="only cases whose name begins so: llama, ring/greedy"
    )
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N")
    parser.add_argument("--jobs", type=int, default=max(1, min(4, os.cpu_count() or 1)), metavar="N")
    parser.add_argument(
        "--cold", type=float, default=0.1, metavar="SHARE", help="runs whose processes start as from a shell (0.1)"
    )
    parser.add_argument("--keep-going", action="store_true", help="after a difference too")
    parser.add_argument("--verbose", action="store_true", help="a line for every run")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(10**6)
    print(f"seed {arguments.seed}", flush=True)
    began_s = time.monotonic()
    chaos = Chaos(arguments)
    equal = chaos.run()
    where = ", ".join(f"{name} {count}" for name, count in sorted(chaos.kills.items()))
    print(f"kills after the start, by where they hit: {where}; before it: {chaos.num_early}")
    print(f"{chaos.num_equal} of {arguments.runs} runs byte-identical ({time.monotonic() - began_s:.0f} s)")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
