"""The prefix cache's files under `kill -9`, two processes at once, damage, a full disk and a folder that can't be
written: every answer is the one that is given without a cache, byte by byte.

Commands on a tiny model share one cache folder, in rounds of 25 with a budget each (10 MB, 2 MB, 400 kB). Every run
kills one `mlxgen generate` at a random moment; now and then a second one is running beside it, or a block is damaged
before. Then another command runs in peace and is compared. After every kill the folder must be within 5% of its budget,
what it left half written included, and hold no damaged file under a real name; after the next command that writes, no
temporary file. Prints what was seen, and exits with 1 on the first difference.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

from chaos_kill import Launcher, Moment, Process  # noqa: E402

RUNS_PER_FOLDER = 25
BUDGETS = {"10M": 10 * 2**20, "2M": 2 * 2**20, "400K": 400 * 2**10}
KINDS = ("llama", "lfm2")
_STORY = "It was the {n}th letter of the story, and nobody had answered the one before it."


class Wrong(Exception):
    """Something isn't as promised; the message says what."""


def prompt_of(number: int) -> str:
    """Prompts in families of four that share a long beginning."""
    shared = " ".join(_STORY.format(n=number // 4 * 100 + n) for n in range(12))
    return f"{shared} {' '.join(_STORY.format(n=number * 1000 + n) for n in range(4))}"


@dataclass
class Bench:
    """The commands, what they say without a cache, and what was seen so far. Owned by the main thread."""

    folder: Path
    rng: random.Random
    launchers: list[Launcher]
    num_prompts: int
    kinds: tuple[str, ...]
    said: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    seconds: float = 1.0
    counts: Counter[str] = field(default_factory=Counter)

    def renew(self) -> None:
        """Start the launchers again: commands take their environment from them."""
        for launcher in self.launchers:
            launcher.close()
        self.launchers[:] = [Launcher(self.folder, forking=True) for _ in range(2)]

    def command(self, which: tuple[str, int], *flags: str, name: str = "a") -> list[str]:
        import tiny

        kind, number = which
        snapshot = ("--snapshot", str(self.folder / f"{name}.mlxgen"), "--overwrite")
        size = ("--max-tokens", "8", "--prefill-step-size", "48", "--ignore-eos", "--logprobs", "--json")
        model = ("--model", str(tiny.folder(kind)), "--prompt", prompt_of(number))
        return ["generate", *model, *size, *snapshot, *flags]

    def run(self, which: tuple[str, int], *flags: str, moment: Moment | None = None, name: str = "a") -> Process:
        """One command, compared with what it says without a cache as far as it came."""
        launcher = self.launchers[name == "b"]
        process = launcher.run(self.command(which, *flags, name=name), moment, cold=False)
        if process.hung:
            raise Wrong(f"{which} hung")
        if not process.killed and process.status != 0:
            raise Wrong(f"{which} ended with status {process.status}: {process.errors.strip()}")
        tokens = [(e["index"], e["id"], e["logprob"], e["text"]) for e in process.events if e["event"] == "token"]
        expected = self.said.get(which)
        if expected is None:
            self.said[which] = tokens
        elif tokens != expected[: len(tokens)] or (not process.killed and len(tokens) != len(expected)):
            raise Wrong(f"{which} said {tokens}, without a cache {expected}")
        if process.finished is not None:
            self.counts["tokens reused"] += process.finished["usage"]["reused_tokens"]
            self.counts["tokens prefilled"] += process.finished["usage"]["prefilled_tokens"]
        return process

    def anything(self) -> tuple[str, int]:
        return self.rng.choice(self.kinds), self.rng.randrange(self.num_prompts)

    def moment(self) -> Moment:
        """Any moment of a run, or one while it prefills or generates: then the writer is at work."""
        if self.rng.random() < 0.3:
            return Moment(self.rng.uniform(0, 1.1 * self.seconds))
        event, count = self.rng.choice([("prefill", 14), ("token", 8)])
        return Moment(self.rng.uniform(0, 0.02), event, self.rng.randrange(count))


def prefix_folder() -> Path:
    return Path(os.environ["MLXGEN_CACHE"]) / "prefix"


def look(budget: int, *, temporary: bool, damaged: Collection[Path] = ()) -> int:
    """Check the folder; how many half-written files it has, which may be there only if `temporary`."""
    from mlxgen.errors import SnapshotError
    from mlxgen.prefixcache.disk import read_file, stored_files

    entries = [path for path in prefix_folder().rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in entries)
    if total > 1.05 * budget:
        raise Wrong(f"{total} bytes with a budget of {budget}")
    left = [path for path in entries if path.name.startswith(".tmp-")]
    if left and not temporary:
        raise Wrong(f"temporary files stayed: {left}")
    for file in stored_files(prefix_folder()):
        if file.path not in damaged:
            try:
                read_file(file.path)
            except SnapshotError as error:
                raise Wrong(f"a damaged file has a real name: {error}") from error
    return len(left)


def kills(bench: Bench, num_runs: int) -> None:
    """The main part; see the module."""
    for number in range(num_runs):
        label, budget = list(BUDGETS.items())[number // RUNS_PER_FOLDER % len(BUDGETS)]
        if number % RUNS_PER_FOLDER == 0:
            shutil.rmtree(prefix_folder(), ignore_errors=True)
            os.environ["MLXGEN_PREFIX_CACHE_BUDGET"] = label
            bench.renew()
            damaged: set[Path] = set()
        if bench.rng.random() < 0.3:
            damaged |= damage(bench)
        beside = None
        if bench.rng.random() < 0.3:
            beside = Beside(bench, bench.anything())
        process = bench.run(bench.anything(), moment=bench.moment())
        bench.counts["killed" if process.killed else "ended before the kill"] += 1
        bench.counts[f"killed in {process.phase}"] += process.killed
        if beside is not None:
            beside.join()
            bench.counts["beside another process"] += 1
        bench.counts["half-written files left by kills"] += look(budget, temporary=True, damaged=damaged)
        bench.run(bench.anything())
        look(budget, temporary=False, damaged=damaged)


class Beside:
    """A second command at the same time, in the same folder."""

    def __init__(self, bench: Bench, which: tuple[str, int]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(bench, which))
        self._thread.start()

    def _run(self, bench: Bench, which: tuple[str, int]) -> None:
        try:
            bench.run(which, name="b")
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def damage(bench: Bench) -> set[Path]:
    """Flip a bit of some block, or cut it short."""
    files = sorted(prefix_folder().rglob("block-*"))
    if not files:
        return set()
    path = bench.rng.choice(files)
    data = bytearray(path.read_bytes())
    if bench.rng.random() < 0.5:
        data[bench.rng.randrange(len(data))] ^= 1 << bench.rng.randrange(8)
    else:
        del data[bench.rng.randrange(len(data)) :]
    path.write_bytes(data)
    bench.counts["blocks damaged"] += 1
    return {path}


def full_disk(bench: Bench, small: Path | None) -> None:
    """Answers while nothing more can be written: on a small file system, or else where no file may have over 20 kB."""
    shutil.rmtree(prefix_folder(), ignore_errors=True)
    os.environ["MLXGEN_PREFIX_CACHE_BUDGET"] = "10M"
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    if small is not None:
        prefix_folder().symlink_to(small, target_is_directory=True)
    warned = 0
    try:
        if small is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, former[1]))
        bench.renew()
        for number in range(0, bench.num_prompts, 3):
            process = bench.run((bench.kinds[-1], number))
            warned += process.errors.count("prefix cache isn't kept on the disk")
            if process.errors.count("prefix cache isn't kept") > 1:
                raise Wrong(f"said more than once: {process.errors}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        bench.renew()
    look(10 * 2**20, temporary=False)
    if not warned:
        raise Wrong("nobody said that the disk is full")
    bench.counts["commands on a full disk that said so, once"] += warned
    if small is not None:
        prefix_folder().unlink()


def unwritable(bench: Bench) -> None:
    """A folder that may only be read; and one that can't be made."""
    shutil.rmtree(prefix_folder(), ignore_errors=True)
    kind = bench.kinds[0]
    bench.run((kind, 0))
    folders = [prefix_folder(), *(path for path in prefix_folder().iterdir() if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    try:
        process = bench.run((kind, 1))
        reused = process.finished["usage"]["reused_tokens"] if process.finished else 0
        if not reused:
            raise Wrong("a folder that may be read wasn't")
        as_root = os.geteuid() == 0  # for whom permissions don't count
        if ("prefix cache isn't kept" in process.errors) == as_root:
            raise Wrong(f"a read-only folder: {process.errors}")
    finally:
        for folder in folders:
            folder.chmod(stat.S_IRWXU)
    shutil.rmtree(prefix_folder())
    prefix_folder().write_text("in the way")
    for number in range(2):
        if "prefix cache isn't kept" not in bench.run((kind, number)).errors:
            raise Wrong("nobody said that the folder can't be made")
    prefix_folder().unlink()
    bench.counts["unwritable folders"] += 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=20, help="each is run once without a cache first")
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="tiny models")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small-disk", type=Path, help="an empty folder on a file system of a few MB, to be filled")
    args = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlxgen-chaos-cache-") as name:
        folder = Path(name)
        os.environ["MLXGEN_CACHE"] = str(folder / "cache")
        bench = Bench(folder, random.Random(args.seed), [], args.prompts, tuple(args.kinds))
        bench.renew()
        try:
            for kind in bench.kinds:
                for number in range(args.prompts):
                    bench.seconds = bench.run((kind, number), "--no-prefix-cache").seconds
            bench.counts.clear()
            kills(bench, args.runs)
            full_disk(bench, args.small_disk)
            unwritable(bench)
        except Wrong as problem:
            print(f"WRONG: {problem}")
            return 1
        finally:
            for launcher in bench.launchers:
                launcher.close()
    for what, count in sorted(bench.counts.items()):
        print(f"{what:45} {count}")
    print(f"{args.runs} of {args.runs} runs right, {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
