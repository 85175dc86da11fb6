"""`mlxgen generate`: one prompt, one reply, kept in a snapshot from before prefill on."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.cli import cached
from mlxgen.cli.console import Console
from mlxgen.cli.media import media_parts
from mlxgen.cli.output import Output
from mlxgen.cli.prefixes import keep_prefixes
from mlxgen.cli.run import Resumer, closing, exit_code, make_output, never_started, saved, show_run, tell_stopped
from mlxgen.cli.settings import (
    check_new_snapshot,
    load_model,
    prompt_text,
    reply_options,
    reply_prefix,
    session_options,
)
from mlxgen.errors import SnapshotError
from mlxgen.events import Event
from mlxgen.options import ReplyOptions
from mlxgen.request import Part
from mlxgen.session import Session


def run(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    """Check what can be checked without the model; then load, start the snapshot, and stream."""
    reply, prefix, parts = reply_options(args), reply_prefix(args), prompt_parts(args)
    if args.snapshot is not None:
        check_new_snapshot(args.snapshot, overwrite=args.overwrite)
    else:
        cached.make_room()
    output = make_output(console, as_json=args.json)
    try:
        session = new_session(args, parts, console, cancel)
    except Cancelled as stop:
        finished = never_started(stop.reason)
        output.event(finished)
        if stop.reason != "disconnect":
            console.important("stopped before the run began, so nothing is there to resume; give the command again")
        return exit_code(finished)
    with closing(session):
        reply.validate(session.model.vocab_size, session.model)  # before a snapshot is made
        put_prefix(session, prefix)
        return _reply(session, args, reply, output, console, cancel)


def prompt_parts(args: argparse.Namespace) -> list[Part]:
    """The user's turn: pictures and video, then the text."""
    text = prompt_text(args)
    return [*media_parts(args), text]


def new_session(args: argparse.Namespace, parts: list[Part], console: Console, cancel: CancelToken) -> Session:
    """A session on the loaded model with the user's turn in it."""
    options = session_options(args)
    model = load_model(args, console, cancel)
    keep_prefixes(model, off=args.no_prefix_cache)
    session = Session(model, system=args.system, options=options)
    session.add(parts)
    return session


def put_prefix(session: Session, prefix: str | None) -> None:
    """Let the reply to come begin with `prefix`, if there is one."""
    if prefix is not None:
        session.append_text(prefix)


def first_events(session: Session, reply: ReplyOptions, cancel: CancelToken) -> Iterator[Event]:
    """The events of the reply to the turns there are, which may have a prefix already (that has no part in its
    length)."""
    if session.position:
        return session.continue_(reply=reply, cancel=cancel)
    return session.stream(None, reply=reply, cancel=cancel)


def _reply(
    session: Session,
    args: argparse.Namespace,
    reply: ReplyOptions,
    output: Output,
    console: Console,
    cancel: CancelToken,
) -> int:
    path = start_snapshot(session, args)
    resumer = Resumer(path, ("--trust-remote-code",) if args.trust_remote_code else ())
    position = session.position  # what it begins with
    try:
        events = first_events(session, reply, cancel)
        output.started(path, resumed=False, position=position, text=session.reply_text, show_text=True)
        finished = show_run(events, output, console, resumer)
    except Exception:
        _after_error(session, path, console, resumer, keep=args.snapshot is not None or session.position > position)
        raise
    if finished.finish_reason == "cancelled":
        if saved(session):
            output.saved(path, session.position)
        tell_stopped(finished, console, resumer, session.position)
    elif args.snapshot is not None:
        if saved(session):
            output.saved(path, session.position)
    else:
        discard(session, path)
    return exit_code(finished)


def start_snapshot(session: Session, args: argparse.Namespace) -> Path:
    """Begin the snapshot: the one that was named, or one in the cache folder."""
    if args.snapshot is not None:
        return session.autosave(args.snapshot, overwrite=args.overwrite)
    return session.autosave(cached.new_path())


def discard(session: Session, path: Path) -> None:
    """Remove a snapshot nobody needs any more."""
    session.close()
    with contextlib.suppress(SnapshotError):
        cached.remove(path)


def _after_error(session: Session, path: Path, console: Console, resumer: Resumer, *, keep: bool) -> None:
    """What was done before an error is kept where there is any of it, or where `keep` says so."""
    if keep or session.sequence.num_fed > 0 or any(medium.frames for medium in session.media):
        console.important(f"what was done is kept; go on with: {resumer.line()}")
    else:
        discard(session, path)
