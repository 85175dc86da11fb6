"""Feed damaged and hostile pictures to the media input and check that each gives a picture or one MediaError.

    pip download --no-deps --no-binary pillow pillow && tar xf pillow-*.tar.gz
    python scripts/fuzz_media.py pillow-*/Tests/images --mutants 2000

Every file of the folder, and random mutants of them, are loaded in worker processes, as a picture and as a video. A
file breaks the rules if one of the two takes more than --max-seconds of processor time or --max-mbytes, raises anything
but MediaError, doesn't return, or ends the process. Prints a summary; exit code 1 on a violation. Needs Linux's /proc.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import select
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One input: a file, and how to damage it (None: not at all)."""

    path: str
    seed: int | None


@dataclass
class Tally:
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    violations: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[float, str] = (0.0, "")


def mutate(data: bytes, seed: int) -> bytes:
    """Damage bytes in one of several ways; the same seed gives the same mutant."""
    rng = random.Random(seed)
    out = bytearray(data)
    way = rng.randrange(5)
    if way == 0:
        return bytes(out[: rng.randrange(1, max(2, len(out)))])
    if way == 1:
        for _ in range(rng.randrange(1, 20)):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif way == 2:  # headers matter most
        for _ in range(rng.randrange(1, 6)):
            out[rng.randrange(min(len(out), 200))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif way == 3:
        at = rng.randrange(len(out))
        out[at:at] = out[rng.randrange(len(out)) :][: rng.randrange(1, 400)]
    else:
        at = rng.randrange(len(out))
        del out[at : at + rng.randrange(1, 400)]
    return bytes(out)


def work(max_mbytes: int) -> None:
    """The worker: a job a line on stdin, an answer a line on stdout."""
    from mlxgen_vision.image import load_image
    from mlxgen_vision.limits import MediaLimits
    from mlxgen_vision.video import open_video

    from mlxgen.errors import MediaError
    from mlxgen.request import MediaOptions

    warnings.simplefilter("ignore")
    limits = MediaLimits(max_source_pixels=40_000_000)
    load_image(_warm_up(), MediaOptions())
    base = _vm_bytes("VmRSS")
    print(json.dumps({"ready": True}), flush=True)
    # Address space beyond what is mapped now: allocating more raises MemoryError or ends the process; both are seen.
    resource.setrlimit(resource.RLIMIT_AS, (_vm_bytes("VmSize") + 3 * max_mbytes * 1_000_000,) * 2)
    for line in sys.stdin:
        job = json.loads(line)
        data = Path(job["path"]).read_bytes()
        if job["seed"] is not None and data:
            data = mutate(data, job["seed"])
        _reset_peak()
        outcomes = []
        seconds = 0.0
        for kind in ("image", "video"):
            started = time.process_time()
            try:
                if kind == "image":
                    rgb = load_image(data, MediaOptions(), limits=limits).rgb
                    good = rgb.ndim == 3 and rgb.shape[2] == 3 and rgb.size and rgb.dtype == "uint8"
                    outcomes.append("picture" if good else "no picture was returned")
                else:
                    with open_video(data, MediaOptions(), limits=limits) as reader:
                        given = sum(1 for _ in reader.frames(range(min(reader.num_frames, 3))))
                    outcomes.append("video" if given else "a video without frames was returned")
            except MediaError as error:
                outcomes.append("MediaError" if "\n" not in str(error) else f"error of several lines: {error!r}")
            except BaseException as error:
                outcomes.append(f"{kind}: {type(error).__name__}: {error}")
            seconds = max(seconds, time.process_time() - started)
        mbytes = max(0, _vm_bytes("VmHWM") - base) / 1e6
        print(json.dumps({"outcomes": outcomes, "seconds": seconds, "mbytes": mbytes}), flush=True)


def _warm_up() -> object:
    import numpy as np

    return np.zeros((8, 8, 3), np.uint8)


def _vm_bytes(key: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status: this script needs Linux")


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class Worker:
    """One subprocess; started anew after a crash or a hang."""

    def __init__(self, max_mbytes: int) -> None:
        command = [sys.executable, os.path.abspath(__file__), "--worker", "--max-mbytes", str(max_mbytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert json.loads(self._line(60) or "{}").get("ready"), "the worker doesn't start"

    def _line(self, timeout: float) -> str | None:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            return None
        return self.process.stdout.readline()

    def run(self, job: Job, timeout: float) -> dict[str, object] | str:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"path": job.path, "seed": job.seed}) + "\n")
        self.process.stdin.flush()
        line = self._line(timeout)
        if line is None:
            self.stop()
            return f"no answer within {timeout:g} s"
        if not line:
            return f"the process ended with {self.process.wait()}"
        return dict(json.loads(line))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="folder of files, searched with its subfolders")
    parser.add_argument("--mutants", type=int, default=2000, help="number of random mutants (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutants (default 0)")
    parser.add_argument("--max-seconds", type=float, default=1.0)
    parser.add_argument("--max-mbytes", type=int, default=400)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.max_mbytes)
        return 0
    if given.folder is None or not given.folder.is_dir():
        parser.error("give a folder of pictures")
    files = sorted(str(p) for p in given.folder.rglob("*") if p.is_file())
    rng = random.Random(given.seed)
    small = [f for f in files if os.path.getsize(f) < 2_000_000]
    jobs = [Job(f, None) for f in files] + [
        Job(rng.choice(small), rng.randrange(1 << 30)) for _ in range(given.mutants)
    ]
    tally = Tally()
    worker = Worker(given.max_mbytes)
    for job in jobs:
        label = os.path.relpath(job.path, given.folder) + ("" if job.seed is None else f" (mutant {job.seed})")
        answer = worker.run(job, timeout=30)
        if isinstance(answer, str):
            tally.violations.append(f"{label}: {answer}")
            worker = Worker(given.max_mbytes)
            continue
        judge(label, answer, given, tally)
    worker.stop()
    print(f"{len(files)} files, {given.mutants} mutants (seed {given.seed})")
    for outcome, count in tally.outcomes.most_common():
        print(f"  {count:6d} {outcome}")
    print(f"  slowest {tally.slowest[0]:.2f} s ({tally.slowest[1]})")
    print(f"  largest {tally.largest[0]:.0f} MB ({tally.largest[1]})")
    for violation in tally.violations:
        print("VIOLATION", violation)
    print(f"{len(tally.violations)} violations")
    return 1 if tally.violations else 0


def judge(label: str, answer: dict[str, object], given: argparse.Namespace, tally: Tally) -> None:
    outcomes = answer["outcomes"]
    assert isinstance(outcomes, list)
    for outcome in outcomes:
        known = outcome in ("picture", "video", "MediaError")
        tally.outcomes[outcome if known else "violation"] += 1
        if not known:
            tally.violations.append(f"{label}: {outcome}")
    seconds, mbytes = float(str(answer["seconds"])), float(str(answer["mbytes"]))
    tally.slowest = max(tally.slowest, (seconds, label))
    tally.largest = max(tally.largest, (mbytes, label))
    if seconds > given.max_seconds:
        tally.violations.append(f"{label}: {seconds:.2f} s")
    if mbytes > given.max_mbytes:
        tally.violations.append(f"{label}: {mbytes:.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
