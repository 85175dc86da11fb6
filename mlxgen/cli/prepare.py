"""`mlxgen prepare`: read, resize and encode pictures and video now; `mlxgen resume` generates later.

The snapshot is that of a reply which was stopped just before prefill, so that going on is nothing special.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.cli import exitcodes
from mlxgen.cli.console import Console
from mlxgen.cli.generate import first_events, new_session, prompt_parts, put_prefix
from mlxgen.cli.run import Resumer, closing, exit_code, make_output, never_started, saved, show_run, tell_stopped
from mlxgen.cli.settings import check_new_snapshot, reply_options, reply_prefix
from mlxgen.events import Event, PrefillProgress
from mlxgen.options import ReplyOptions
from mlxgen.session import Session

_DONE = "requested"


def run(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    """Prepare and encode everything, lay out the prompt, save. What is finished when it is stopped is kept."""
    reply, prefix, parts = reply_options(args), reply_prefix(args), prompt_parts(args)
    check_new_snapshot(args.snapshot, overwrite=args.overwrite)
    output = make_output(console, as_json=args.json)
    try:
        session = new_session(args, parts, console, cancel)
    except Cancelled as stop:
        finished = never_started(stop.reason)
        output.event(finished)
        return exit_code(finished)
    with closing(session):
        reply.validate(session.model.vocab_size, session.model)
        put_prefix(session, prefix)
        path = session.autosave(args.snapshot, overwrite=args.overwrite)
        resumer = Resumer(path, ("--trust-remote-code",) if args.trust_remote_code else ())
        events = _before_prefill(session, reply, cancel)
        output.started(path, resumed=False, position=session.position, text=session.reply_text)
        finished = show_run(events, output, console, resumer)
        if saved(session):
            output.saved(path, session.position)
        if finished.cancel_reason != _DONE:
            tell_stopped(finished, console, resumer, session.position)
            return exit_code(finished)
        usage = finished.usage
        console.note(f"prepared {len(session.media)} pictures and videos; the prompt has {usage.prompt_tokens} tokens")
        console.note(f"generate with: {resumer.line()}")
        return exitcodes.OK


def _before_prefill(session: Session, reply: ReplyOptions, cancel: CancelToken) -> Iterator[Event]:
    """The events of a reply that is stopped where prefill would begin."""
    stop = CancelToken(parent=cancel)
    for event in first_events(session, reply, stop):
        if isinstance(event, PrefillProgress):
            stop.cancel(_DONE)
        else:
            yield event
