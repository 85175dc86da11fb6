"""Kill -9 `mlxgen generate` with pictures and a video at random moments, resume, compare with a run in peace.

As `chaos_kill.py`, with tiny vision-language models of every family. Beside text, tokens and log-probabilities this
checks that a kill costs little: of the pictures that were finished (their `input` event was printed) at most one is
prepared again per kill, and a source whose preparation is on the disk isn't needed any more: when the last process is
started, the files of all media but those being worked on are gone. Prints `N of N runs byte-identical`; exits with 1
on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from chaos_kill import Different, Launcher, Process, Reference, Trial, read_journal

ROOT = Path(__file__).resolve().parent.parent

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "smolvlm", "idefics3", "gemma3")
FAMILIES = (*FAMILIES, "internvl", "mistral3", "pixtral")
WITHOUT_VIDEO = ("idefics3", "gemma3", "mistral3", "pixtral")
MAX_TOKENS = 60
NUM_PICTURES = 3
_MAKE = """
import sys, pathlib
from vision_harness import jobs, tiny_vlm
from PIL import Image
root = pathlib.Path(sys.argv[1])
for family in sys.argv[3:]:
    tiny_vlm.write(root / family, family)
jobs.sources(root / "media")
(root / "media" / "many").mkdir()
for number in range(int(sys.argv[2])):
    Image.fromarray(jobs.pixels(60, 90, 100 + number)).save(root / "media" / "many" / f"{number:03}.png")
"""


def prepared_media(snapshot: Path) -> list[bool]:
    """Which media the newest generation on the disk holds completely prepared."""
    manifests = sorted(snapshot.glob("manifest-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    if not manifests:
        return []
    media = json.loads(manifests[-1].read_bytes())["body"]["media"]
    return [bool(medium["content_hash"]) and medium["frames"] == medium["num_frames"] for medium in media]


class VisionTrial(Trial):
    """One run; `sources` are the files of its media in the order of the command, its own copies."""

    def __init__(
        self, launcher: Launcher, folder: Path, command: list[str], reference: Reference, seed: str, sources: list[Path]
    ) -> None:
        super().__init__(launcher, folder, command, reference, seed)
        self._sources = sources
        self._units: Counter[tuple[str, str, int]] = Counter()
        self.num_removed = 0
        self.num_in_media = 0  # kills while pictures or frames were prepared or encoded

    def _first(self, cold: bool) -> bool:
        self._units.clear()
        try:
            return super()._first(cold)
        except Different as difference:
            # Killed in the very moment the folder was made: nobody was told of it, and it says that it is empty.
            if "given up before its run began" in str(difference):
                return False
            raise

    def _take(self, process: Process) -> None:
        super()._take(process)
        for event in process.events:
            if event["event"] == "input":
                self._units[(event["kind"], event["phase"], event["index"])] += 1
        if process.killed and process.started:
            self.num_in_media += process.events[-1]["event"] in ("started", "input")
            for source, prepared in zip(self._sources, prepared_media(self._snapshot), strict=False):
                if prepared and source.exists():
                    shutil.rmtree(source) if source.is_dir() else source.unlink()
                    self.num_removed += 1

    def _compare(self, last: Process) -> None:
        super()._compare(last)
        again = {unit: count - 1 for unit, count in self._units.items() if unit[:2] == ("image", "prepare")}
        if sum(again.values()) > len(self.kills):
            raise Different(f"pictures were prepared again, {again}, after kills in {self.kills}")


def arguments_of(family: str, media: Path, num_pictures: int) -> tuple[list[str], list[Path]]:
    """Flags for the media of a run, and their files."""
    many = sorted((media / "many").iterdir())
    sources = many if num_pictures > NUM_PICTURES else [media / f"{name}.png" for name in "ABC"]
    flags = [part for source in sources for part in ("--image", str(source))]
    if family not in WITHOUT_VIDEO:
        sources = [*sources, media / "V"]
        flags += ["--video", str(media / "V"), "--fps", "2"]
    return flags, sources


def command_of(model: Path, media_flags: list[str], family: str) -> list[str]:
    size = "128" if family in ("smolvlm", "idefics3") else "24"
    flags = ["--prompt", "What is there?", "--max-tokens", str(MAX_TOKENS), "--ignore-eos", "--logprobs"]
    return ["generate", "--model", str(model), *media_flags, *flags, "--prefill-step-size", size, "--json"]


def peace(launcher: Launcher, command: list[str], snapshot: Path) -> Reference:
    process = launcher.run([*command, "--snapshot", str(snapshot)], None, cold=False)
    finished = process.finished
    if process.status != 0 or finished is None:
        raise RuntimeError(f"it can't run even in peace: {process.errors.strip()}")
    tokens = {event["index"]: event for event in process.events if event["event"] == "token"}
    counts = Counter(event["event"] for event in process.events)
    return Reference(
        finished["text"], finished["finish_reason"], tokens, read_journal(snapshot), counts, process.seconds
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill mlxgen with pictures at random moments, resume, compare.")
    parser.add_argument("--runs", type=int, default=14, metavar="N")
    parser.add_argument("--seed", type=int, default=None, metavar="S", help="default: a new one, printed")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="repeatable; default: all in turn")
    parser.add_argument("--pictures", type=int, default=NUM_PICTURES, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="a line for every run")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    families = arguments.family or list(FAMILIES)
    print(f"seed {seed}", flush=True)
    began_s = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="mlxgen-chaos-vision-"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    make = [sys.executable, "-c", _MAKE, str(root), str(arguments.pictures), *families]
    subprocess.run(make, check=True, env=environment)
    launcher = Launcher(root, forking=sys.platform == "linux")
    references: dict[str, Reference] = {}
    kills: Counter[str] = Counter()
    num_equal = num_removed = num_in_media = 0
    try:
        for number in range(arguments.runs):
            family = families[number % len(families)]
            media = root / "media"
            if family not in references:
                flags, _ = arguments_of(family, media, arguments.pictures)
                command = command_of(root / family, flags, family)
                references[family] = peace(launcher, command, root / f"{family}.mlxgen")
            folder = root / f"run-{number}"
            own = Path(shutil.copytree(media, folder / "media"))
            flags, sources = arguments_of(family, own, arguments.pictures)
            command = command_of(root / family, flags, family)
            trial = VisionTrial(launcher, folder, command, references[family], f"{seed}/{number}", sources)
            try:
                trial.run(cold_share=0.0)
            except Different as difference:
                print(f"DIFFERENT  run {number} ({family}, kills: {trial.kills}, in {folder}): {difference}")
                return 1
            kills.update(trial.kills)
            num_equal, num_removed = num_equal + 1, num_removed + trial.num_removed
            num_in_media += trial.num_in_media
            shutil.rmtree(folder)
            if arguments.verbose:
                print(f"run {number + 1}: {family}, kills: {', '.join(trial.kills)}", flush=True)
    finally:
        launcher.close()
    shutil.rmtree(root)
    where = ", ".join(f"{name} {count}" for name, count in sorted(kills.items()))
    print(f"kills after the start, by where they hit: {where}; {num_in_media} of them among pictures and frames")
    print(f"sources that were gone at the resume: {num_removed}")
    print(f"{num_equal} of {arguments.runs} runs byte-identical ({time.monotonic() - began_s:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
