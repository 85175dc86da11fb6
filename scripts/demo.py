"""mlxgen's one idea, shown: a reply is stopped half-way, a new process goes on with it, and the two texts join.

Everything happens in a temporary folder (but for the built-in model, which is converted once into mlxgen's cache
folder). Exits with 1 if the texts don't join.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROMPT = "Tell me about the sea."
STOP_AFTER = 12
LENGTHS = (40, 160, 640)
QUESTION = "Describe the pictures."
MARGIN = "    | "

Event = dict[str, Any]


def main() -> int:
    if sys.argv[1:2] == ["--first-picture"]:
        return stop_after_first_picture(*(Path(argument) for argument in sys.argv[2:]))
    with tempfile.TemporaryDirectory(prefix="mlxgen-demo-") as folder:
        joined = show_text(Path(folder))
        model = bundled_vision_model()
        if model is not None:
            joined = show_pictures(Path(folder), model) and joined
    if joined:
        say('\nYour turn: .venv/bin/mlxgen generate --prompt "Hello" (Ctrl-C stops and saves; it says how to go on)')
    else:
        say("\nNot everything joined: please report this, with the output above.")
    return 0 if joined else 1


# -- text ----------------------------------------------------------------------------------------------------------


def show_text(folder: Path) -> bool:
    """A language model's reply, interrupted by Ctrl-C's signal and resumed on the command line."""
    say(f"A language model (SmolLM2, 135 million parameters) is asked: {PROMPT}")
    for length in LENGTHS:
        say(f"  process 1, which gets a Ctrl-C after {STOP_AFTER} tokens:")
        first = stopped_run(folder / "reply.mlxgen", length)
        if first.process.returncode == 130:
            break
        say("  (the reply was complete before the Ctrl-C arrived; again, with a longer one)")
    second = Run(["resume", str(folder / "reply.mlxgen")])
    say(f"  process 2, resuming where the first stopped ({first.count('token')} tokens):")
    second.finish(shown=True)
    whole = Run(["generate", *text_flags(folder / "whole.mlxgen", length)])
    whole.finish()
    return verdict(
        first.process.returncode == 130
        and first.text + second.text == whole.text == second.last("finished")["text"]
        and first.ids + second.ids == whole.ids
        and second.last("finished")["usage"]["generated_tokens"] == len(second.ids),
        f"joined, they are the text of a run without a stop: all {len(whole.ids)} tokens are equal",
    )


def text_flags(snapshot: Path, length: int) -> list[str]:
    flags = ["--model", "smollm2", "--prompt", PROMPT, "--max-tokens", str(length)]
    return [*flags, "--snapshot", str(snapshot), "--overwrite"]


def stopped_run(snapshot: Path, length: int) -> Run:
    """A run that is sent a Ctrl-C after its first tokens."""
    run = Run(["generate", *text_flags(snapshot, length)])
    for event in run.events(shown=True):
        if event["event"] == "token" and run.count("token") == STOP_AFTER:
            run.process.send_signal(signal.SIGINT)
    run.finish(130, 0)
    return run


# -- pictures ----------------------------------------------------------------------------------------------------------


def bundled_vision_model() -> Path | None:
    spec = find_spec("mlxgen_vision")
    locations = (spec.submodule_search_locations or []) if spec is not None else []
    folders = [Path(location) / "demo_model" for location in locations]
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def show_pictures(folder: Path, model: Path) -> bool:
    """Two pictures: stopped when the first was read, which then is deleted; a new process does the rest."""
    from mlxgen_vision.demo_pictures import example_picture

    say(f"\nA tiny vision model that comes with mlxgen is shown two pictures: {QUESTION}")
    paths = [folder / "red-circle-green-square.png", folder / "blue-star.png"]
    for path, name in zip(paths, ("two", "one"), strict=True):
        example_picture(name).save(path)
    whole = Run(picture_flags(model, folder / "whole-pictures.mlxgen", paths))
    whole.finish()
    snapshot = folder / "pictures.mlxgen"
    first = [sys.executable, __file__, "--first-picture", str(model), str(snapshot), *map(str, paths)]
    done = subprocess.run(first, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the first process failed:\n{done.stderr}")
    paths[0].unlink()
    say("  process 1 reads the first picture and is stopped before the second; then the first is deleted")
    say("  process 2, resuming there, answers:")
    second = Run(["resume", str(snapshot)])
    second.finish(shown=True)
    num_read = second.last("finished")["usage"]["images_prepared"]
    return verdict(
        second.text == whole.text and second.ids == whole.ids and num_read == 1,
        "it is the answer of a run without a stop, and no picture was read twice",
    )


def picture_flags(model: Path, snapshot: Path, paths: list[Path]) -> list[str]:
    flags = ["generate", "--model", str(model), "--snapshot", str(snapshot), "--prompt", QUESTION]
    return [*flags, "--image", *map(str, paths)]


def stop_after_first_picture(model: Path, snapshot: Path, *pictures: Path) -> int:
    """What process 1 does: the same as the command line, but stopped at one certain moment."""
    import mlxgen

    token = mlxgen.CancelToken()
    session = mlxgen.Session(mlxgen.load(model))
    session.autosave(snapshot)
    parts = [mlxgen.ImagePart(str(path)) for path in pictures]
    for event in session.stream([*parts, QUESTION], cancel=token):
        if isinstance(event, mlxgen.InputProgress):
            token.cancel()
    session.close()
    return 0


# -- processes -----------------------------------------------------------------------------------------------------


class Run:
    """One mlxgen command in a process of its own, and the events it has told so far."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "mlxgen", *arguments, "--json", "--quiet"]
        self.seen: list[Event] = []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def events(self, *, shown: bool = False) -> Iterator[Event]:
        """Events as they come; `shown`: the text too, as it comes."""
        assert self.process.stdout is not None
        margin = MARGIN if shown else ""
        for line in self.process.stdout:
            event = json.loads(line)
            self.seen.append(event)
            if shown and event.get("event") == "token":
                print(margin + event["text"].replace("\n", "\n" + MARGIN), end="", flush=True)
                margin = ""
            yield event
        if shown and not margin:
            say("")

    def finish(self, *codes: int, shown: bool = False) -> None:
        """Take the rest of the events and wait; leave the demonstration if it ended in another way than `codes`."""
        for _ in self.events(shown=shown):
            pass
        assert self.process.stderr is not None
        errors = self.process.stderr.read().decode(errors="replace")
        if self.process.wait() not in (codes or (0,)):
            raise SystemExit(f"a process of the demonstration ended with {self.process.returncode}:\n{errors}")

    def count(self, event: str) -> int:
        return sum(1 for seen in self.seen if seen["event"] == event)

    def last(self, event: str) -> Event:
        return next(seen for seen in reversed(self.seen) if seen["event"] == event)

    @property
    def ids(self) -> list[int]:
        return [seen["id"] for seen in self.seen if seen["event"] == "token"]

    @property
    def text(self) -> str:
        return "".join(seen["text"] for seen in self.seen if seen["event"] == "token")


def say(text: str) -> None:
    print(text, flush=True)


def verdict(good: bool, claim: str) -> bool:
    say(f"  ok: {claim}" if good else f"  FAILED. Expected: {claim}")
    return good


if __name__ == "__main__":
    sys.exit(main())
