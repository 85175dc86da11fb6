"""A folder of pictures, read in one job that can be killed at any moment and started again with the same command.

Each picture is in the snapshot as soon as it is prepared. The second run opens only those that weren't; the others may
have been moved away meanwhile. So does the reply go on from its last token.

Run it with `python examples/picture_folder.py FOLDER`, kill it, and run it again. (`--model NAME` for another model.)
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import mlxgen

KINDS = (".png", ".jpg", ".jpeg", ".webp")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="shapes-vl")
    parser.add_argument("--prompt", default="Describe the pictures.")
    parser.add_argument("--snapshot", type=Path, help="(default: FOLDER.mlxgen)")
    args = parser.parse_args(arguments)
    snapshot = args.snapshot or args.folder.with_name(f"{args.folder.name}.mlxgen")

    if snapshot.exists():
        session = mlxgen.resume(snapshot)
        print(f"going on with {snapshot}")
    else:
        session = mlxgen.Session(mlxgen.load(args.model))
        paths = sorted(path for path in args.folder.iterdir() if path.suffix.lower() in KINDS)
        session.add([*map(mlxgen.ImagePart, paths), args.prompt])
        session.autosave(snapshot)  # has the whole question from its first moment on
    with session:
        finished = session.last_finished or run(session)
    print("answer:", finished.text)
    usage = finished.usage
    print(f"this run prepared {usage.images_prepared} pictures and generated {usage.generated_tokens} tokens")


def run(session: mlxgen.Session) -> mlxgen.Finished:
    """Go on from wherever the job is: nothing done yet, or in the pictures, the prompt or the reply."""
    events = session.stream() if session.history.reply is None else session.continue_()
    for event in events:
        if isinstance(event, mlxgen.InputProgress) and event.phase == "prepare":
            print(f"prepared {event.index + 1} of {event.total}", flush=True)
    assert isinstance(event, mlxgen.Finished)
    return event


if __name__ == "__main__":
    main()
