"""`mlxgen resume`: go on with an unfinished reply, from wherever it was stopped or killed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.cli import cached, exitcodes
from mlxgen.cli.console import Console, printable
from mlxgen.cli.output import Output
from mlxgen.cli.overview import Overview, look
from mlxgen.cli.prefixes import keep_prefixes
from mlxgen.cli.recorded import recorded_reply
from mlxgen.cli.run import (
    Resumer,
    closing,
    exit_code,
    make_output,
    never_started,
    saved,
    show_run,
    tell_stopped,
)
from mlxgen.cli.settings import UsageError, changed_options, show_load
from mlxgen.errors import InvalidValueError, SnapshotError
from mlxgen.events import Event, Finished
from mlxgen.models import LoadOptions, Model, load
from mlxgen.options import ReplyOptions
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session


def run(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    """Find the snapshot, repeat a finished reply without loading anything, otherwise load and go on."""
    changes = changed_options(args)
    if args.json and args.from_start:
        raise UsageError("--from-start is for text; with --json the whole text is in the finished event")
    overview = look(cached.newest_interrupted() if args.path is None else args.path)
    if args.path is None:
        turn = overview.last_user_turn
        console.note(f"resuming {overview.path} ({printable(turn.text if turn else '', 40)!r})")
    if not overview.history.session:
        raise SnapshotError(f"{overview.path} was given up before its run began; nothing is in it, remove it")
    output = make_output(console, as_json=args.json)
    resumer = Resumer(overview.path, ("--trust-remote-code",) if args.trust_remote_code else ())
    if overview.phase == "finished" and not changes:
        finished = recorded_reply(overview.history)
        if finished is not None:
            return _repeat(finished, args, overview.path, overview.position, console)
    try:
        session = _open(args, overview, console, cancel)
    except Cancelled as stop:
        return _stopped_while_loading(stop, overview, output, console, resumer)
    with closing(session):
        for note in session.notes:
            console.important(f"note: {note}")
        known = session.last_finished
        if known is not None and not changes:
            return _repeat(known, args, overview.path, session.position, console)
        position, text = session.position, session.reply_text  # before what a stop string withheld is let go
        events = _events(session, changes, cancel)
        if not args.json and not args.from_start and position:
            console.note(f"{position} tokens were there already; what follows is new (--from-start prints all)")
        output.started(overview.path, resumed=True, position=position, text=text, show_text=args.from_start)
        return _go_on(session, events, output, console, resumer)


def _open(args: argparse.Namespace, overview: Overview, console: Console, cancel: CancelToken) -> Session:
    model: Model | None = None
    if args.model is not None or args.trust_remote_code:
        record = overview.history.model
        options = LoadOptions(adapter_path=record.get("adapter"), trust_remote_code=args.trust_remote_code)
        name = args.model or record.get("source") or record["name"]
        model = load(name, options=options, on_progress=show_load(console), cancel=cancel)
    options_ = ResumeOptions(model=model, on_progress=show_load(console))
    session = resume(overview.path, options=options_, cancel=cancel)
    keep_prefixes(session.model, off=args.no_prefix_cache)
    console.clear_bar()
    return session


def _go_on(session: Session, events: Iterator[Event], output: Output, console: Console, resumer: Resumer) -> int:
    finished = show_run(events, output, console, resumer)
    if saved(session):
        output.saved(resumer.snapshot, session.position)
    if finished.finish_reason == "cancelled":
        tell_stopped(finished, console, resumer, session.position)
    return exit_code(finished)


def _events(session: Session, changes: dict[str, Any], cancel: CancelToken) -> Iterator[Event]:
    """What goes on: the open reply, or a first reply to a turn that has none yet."""
    reply = session.history.reply
    if reply is None:
        return session.stream(None, reply=replace(ReplyOptions(), **changes), cancel=cancel)
    if not changes:
        return session.continue_(cancel=cancel)
    if "max_tokens" not in changes:
        left = None if reply.limit is None else reply.limit - len(reply.tokens)
        if left is not None and left <= 0:
            raise InvalidValueError(
                f"the reply has all of its {reply.limit} tokens; give --max-tokens N for N more with the other settings"
            )
        changes = {**changes, "max_tokens": left}
    return session.continue_(reply=replace(session.reply_options(reply), **changes), cancel=cancel)


def _repeat(finished: Finished, args: argparse.Namespace, path: Path, position: int, console: Console) -> int:
    """A finished reply: its last event again, as text the reply itself. Nothing is computed or written."""
    if args.json:
        output = make_output(console, as_json=True)
        output.started(path, resumed=True, position=position, text=finished.text)
        output.event(finished)
    else:
        console.write(finished.text if finished.text.endswith("\n") else f"{finished.text}\n")
        console.note(f"this reply of {position} tokens was complete already (--max-tokens N adds more)")
    return exitcodes.OK


def _stopped_while_loading(
    stop: Cancelled, overview: Overview, output: Output, console: Console, resumer: Resumer
) -> int:
    """Nothing was done and nothing is lost: the snapshot is as it was."""
    known = recorded_reply(overview.history) if overview.position else None
    finished = never_started(stop.reason, "" if known is None else known.text)
    output.event(finished)
    tell_stopped(finished, console, resumer, overview.position)
    return exit_code(finished)
