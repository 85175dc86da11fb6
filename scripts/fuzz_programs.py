#!/usr/bin/env python
"""Run random programs of turns, stops, rewinds, forks, edits and resumes, and compare with the replay of their passes.

    scripts/fuzz_programs.py --programs 1000

The suite runs a few of them. A difference prints the seed, which repeats it: --seed N --programs 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "vision"), str(ROOT / "tests")]

from harness import SETUPS, greedy, new_session, sampled  # noqa: E402
from harness.programs import Program, random_step, steered  # noqa: E402
from vision_harness.jobs import image, sources  # noqa: E402
from vision_harness.jobs import new_session as new_vision_session  # noqa: E402
from vision_harness.tiny_vlm import FAMILIES  # noqa: E402

from mlxgen.cache import CacheOptions  # noqa: E402


def program(rng: random.Random, name: str, folder: Path) -> Program:
    """A program's start: a text model of some cache kind, or one that is shown pictures."""
    reply = rng.choice((greedy(5), sampled(5), steered(6)))
    mark_every = rng.choice((4, 8, 64))
    if not name.startswith("pictures/"):
        setup = SETUPS[name]
        return Program(new_session(replace(setup, cache=replace(setup.cache, mark_every=mark_every))), reply, folder)
    family = name.removeprefix("pictures/")
    media = sources(folder / "media")
    prompts = [[image(media, "A"), "What?"], [image(media, "B"), "And ", image(media, "C"), "?"], "No."]
    session = new_vision_session(family, cache=CacheOptions(mark_every=mark_every))
    return Program(session, reply, folder, prompt=prompts.__getitem__)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others count up")
    args = parser.parse_args()
    names, differing, began_s = [*SETUPS, *(f"pictures/{family}" for family in FAMILIES)], 0, time.monotonic()
    for seed in range(args.seed, args.seed + args.programs):
        rng = random.Random(seed)
        name = names[seed % len(names)]
        steps = [random_step(rng) for _ in range(rng.randrange(4, 14))]
        try:
            with tempfile.TemporaryDirectory() as folder:
                program(rng, name, Path(folder)).run(steps)
        except Exception:
            differing += 1
            print(f"seed {seed}, {name}: {steps}")
            traceback.print_exc(limit=-4)
    print(f"{args.programs} programs, {differing} with a difference, {time.monotonic() - began_s:.0f} s")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
