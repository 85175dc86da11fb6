"""One reply from its first event to the exit code: shown, saved, and, if stopped, the command that goes on with it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mlxgen.cli import exitcodes
from mlxgen.cli.console import Console
from mlxgen.cli.output import JsonOutput, Output, TextOutput
from mlxgen.errors import SnapshotError
from mlxgen.events import Event, Finished, Usage
from mlxgen.session import Session


@dataclass(frozen=True, slots=True)
class Resumer:
    """How the run can be gone on with: the snapshot, and what the command that resumes it must say besides."""

    snapshot: Path
    flags: tuple[str, ...] = ()
    command: str = "resume"

    def line(self) -> str:
        """The command, quoted for a shell."""
        return shlex.join([*_program(), *self.command.split(), str(self.snapshot), *self.flags])


def _program() -> list[str]:
    if os.path.basename(sys.argv[0]) == "__main__.py":
        return [sys.executable, "-m", "mlxgen"]
    return ["mlxgen"]


def make_output(console: Console, *, as_json: bool) -> Output:
    return JsonOutput(console) if as_json else TextOutput(console)


def show_run(events: Iterator[Event], output: Output, console: Console, resumer: Resumer) -> Finished:
    """Show all events of a run and wait until it is saved. A second Ctrl-C is told how to go on, and goes up."""
    finished: Finished | None = None
    try:
        for event in events:
            output.event(event)
            if isinstance(event, Finished):
                finished = event
    except (KeyboardInterrupt, SystemExit):
        console.important(f"left at once; go on with: {resumer.line()}")
        raise
    assert finished is not None, "a run ends with Finished, or raises"
    return finished


class Closable(Protocol):
    """A session, or several."""

    def close(self) -> None: ...


@contextmanager
def closing(session: Closable) -> Iterator[None]:
    """Save and let go of the snapshot at the end, but not when somebody wants out at once."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        session.close()
        raise
    else:
        session.close()


def saved(session: Session) -> bool:
    """Whether the snapshot holds everything. After a failed autosave (which was reported) it is tried once more."""
    if session.snapshot_path is None:
        return False
    if not session.warnings:
        return True
    try:
        session.save()
    except SnapshotError:
        return False
    return True


def tell_stopped(finished: Finished, console: Console, resumer: Resumer, position: int) -> None:
    """Say how to go on. Not for a reader who went away: `| head` shall be quiet."""
    if finished.cancel_reason != "disconnect":
        reason = {"deadline": "time is up"}.get(finished.cancel_reason or "", "stopped")
        console.important(f"{reason} after {position} tokens; go on with: {resumer.line()}")


def exit_code(finished: Finished) -> int:
    if finished.finish_reason == "cancelled":
        return exitcodes.of_cancel_reason(finished.cancel_reason)
    return exitcodes.OK


def never_started(reason: str, text: str = "") -> Finished:
    """The last event of a command that was stopped before its run began, while the model was being loaded."""
    return Finished("cancelled", reason, text, Usage())
