"""`mlxgen chat`: a conversation in the terminal. Ctrl-C stops an answer and keeps it; the next line is a new turn."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from mlxgen.cancellation import CancelToken, cancel_on_interrupt
from mlxgen.cli import cached, exitcodes
from mlxgen.cli.console import Console, printable
from mlxgen.cli.generate import discard
from mlxgen.cli.lines import Interrupted, Lines
from mlxgen.cli.media import image_part, media_options, video_part
from mlxgen.cli.run import Resumer, closing
from mlxgen.cli.settings import (
    UsageError,
    check_new_snapshot,
    load_model,
    reply_options,
    session_options,
    show_load,
)
from mlxgen.errors import InvalidValueError, MlxgenError
from mlxgen.events import Event, InputProgress, PrefillProgress, Token
from mlxgen.options import ReplyOptions
from mlxgen.request import MediaOptions, Part
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

_HELP = """\
/retry          answer the last turn again
/continue       go on with the last answer, where it was stopped or full
/undo           take the last turn and its answer back
/image PATH     show a picture with the next turn (several: one by one)
/video PATH     the same with a video
/save PATH      write a snapshot of the conversation
/help, /exit
//text          a turn that begins with /
Ctrl-C stops an answer and keeps it; at the prompt, twice leaves (Ctrl-D too)."""


def run(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    """Load, then read lines until the user leaves; the conversation is kept in a snapshot all along."""
    if args.resume is not None and (args.system is not None or args.snapshot is not None):
        raise UsageError("--resume goes on in its own snapshot with its own system prompt; leave the others away")
    reply = reply_options(args)
    limits = media_options(args)
    session = _open(args, console, cancel)
    with closing(session):
        reply.validate(session.model.vocab_size)
        code = _Chat(session, console, cancel, reply, limits).loop()
        _leave(session, console, named=args.snapshot is not None or args.resume is not None)
        return code


def _open(args: argparse.Namespace, console: Console, cancel: CancelToken) -> Session:
    if args.resume is not None:
        model = load_model(args, console, cancel) if args.model is not None else None
        options = ResumeOptions(model=model, on_progress=show_load(console))
        session = resume(args.resume, options=options, cancel=cancel)
        console.clear_bar()
        for note in session.notes:
            console.important(f"note: {note}")
        replies = sum(turn.reply is not None for turn in session.turns)
        console.note(f"{replies} answers so far" + ("; /continue goes on with the last" if session.unfinished else ""))
        return session
    options_ = session_options(args)
    if args.snapshot is not None:
        check_new_snapshot(args.snapshot, overwrite=args.overwrite)
    else:
        cached.make_room()
    session = Session(load_model(args, console, cancel), system=args.system, options=options_)
    if args.snapshot is not None:
        session.autosave(args.snapshot, overwrite=args.overwrite)
    else:
        session.autosave(cached.new_path())
    console.note(f"{session.model.name}; /help lists the commands")
    return session


def _leave(session: Session, console: Console, *, named: bool) -> None:
    path = session.snapshot_path
    if path is None:
        return
    if not named and not any(turn.role == "user" for turn in session.turns):
        discard(session, path)
        return
    console.important(f"the conversation is kept; go on with: {Resumer(path, command='chat --resume').line()}")


class _Chat:
    """The loop. Owns the media waiting for the next turn; everything else is the session's."""

    def __init__(
        self, session: Session, console: Console, cancel: CancelToken, reply: ReplyOptions, limits: MediaOptions
    ) -> None:
        self._limits = limits
        self._session = session
        self._console = console
        self._cancel = cancel
        self._reply = reply
        self._media: list[Part] = []
        self._retries = 0
        self._line_ended = False

    def loop(self) -> int:
        """Read and answer until the user leaves; the exit code."""
        lines = Lines(self._console, self._cancel)
        try:
            while True:
                if self._console.output_closed:
                    return exitcodes.CLOSED_PIPE
                try:
                    line = lines.next()
                except Interrupted as stop:
                    return exitcodes.of_cancel_reason(stop.reason)
                except InvalidValueError as error:
                    self._console.important(f"error: {error}")
                    continue
                if line is None:
                    return exitcodes.OK
                try:
                    if not self._take(line):
                        return exitcodes.OK
                except MlxgenError as error:
                    self._console.important(f"error: {' '.join(str(error).split())}")
        finally:
            lines.close()

    def _take(self, line: str) -> bool:
        """Do what a line says; False to leave."""
        if line.startswith("//"):
            self._answer(line[1:])
        elif line.startswith("/"):
            word, _, rest = line.partition(" ")
            return self._command(word, rest.strip())
        elif line.strip() or self._media:
            self._answer(line)
        return True

    def _command(self, word: str, rest: str) -> bool:
        if word in ("/exit", "/quit"):
            return False
        if word == "/help":
            for line in _HELP.splitlines():
                self._console.tell(line)
        elif word == "/undo":
            self._undo()
        elif word == "/retry":
            self._retry()
        elif word == "/continue":
            self._continue()
        elif word == "/save":
            self._save(rest)
        elif word in ("/image", "/video"):
            self._add(word, rest)
        else:
            raise InvalidValueError(f"unknown command {printable(word, 30)}; /help lists them, // begins a text with /")
        return True

    # -- turns -----------------------------------------------------------------------------------------------------

    def _answer(self, text: str) -> None:
        media, self._media = self._media, []
        parts: list[Part] = [*media, text]
        self._session.add(parts)
        self._retries = 0
        try:
            self._stream(self._reply)
        except MlxgenError:
            if not self._session.position:
                self._session.undo()
                self._console.note("the turn was taken back")
            raise

    def _stream(self, reply: ReplyOptions | None) -> None:
        """Show an answer until it ends or is stopped; a stopped one stays in the conversation."""
        token = CancelToken(parent=self._cancel)
        self._line_ended = False
        session, console = self._session, self._console
        with cancel_on_interrupt(token):
            if reply is None:
                events = session.continue_(reply=self._more(), cancel=token)
            else:
                events = session.stream(None, reply=reply, cancel=token)
            for event in events:
                if console.output_closed:
                    token.cancel("disconnect")
                self._show(event)
        console.clear_bar()
        if not self._line_ended:
            console.write("\n")
        reason = token.reason
        if reason == "interrupt":
            console.note("(stopped; /continue goes on with it)")
        elif reason is not None:
            self._cancel.cancel(reason)  # SIGTERM, SIGHUP or a closed pipe: leave

    def _show(self, event: Event) -> None:
        if isinstance(event, Token):
            self._console.write(event.text)
            self._line_ended = event.text.endswith("\n") if event.text else self._line_ended
        elif isinstance(event, PrefillProgress):
            self._console.bar("prompt", event.done, event.total)
        elif isinstance(event, InputProgress):
            self._console.bar(f"{event.phase} {event.kind}s", event.index + 1, event.total)

    def _more(self) -> ReplyOptions | None:
        """None for what a stopped answer still lacks; for an ended one, as many tokens again."""
        return None if self._session.unfinished else self._reply

    # -- commands --------------------------------------------------------------------------------------------------

    def _undo(self) -> None:
        turn = next((turn for turn in reversed(self._session.turns) if turn.role == "user"), None)
        self._session.undo()
        self._console.note(f"took back: {printable(turn.text if turn else '', 60)}")

    def _retry(self) -> None:
        session = self._session
        if not any(turn.role == "user" for turn in session.turns):
            raise InvalidValueError("there is no turn to answer again")
        if session.history.reply is not None:
            session.drop_reply()
        self._retries += 1
        reply, sampling = self._reply, self._reply.sampling
        if sampling.greedy:
            self._console.note("(with --temp 0 the answer is the same)")
        elif sampling.seed is not None:
            reply = replace(reply, sampling=replace(sampling, seed=(sampling.seed + self._retries) % 2**64))
        self._stream(reply)

    def _continue(self) -> None:
        if self._session.history.reply is None:
            raise InvalidValueError("there is no answer to go on with")
        self._stream(None)

    def _save(self, path: str) -> None:
        if not path:
            raise InvalidValueError("/save needs a path, for instance /save talk.mlxgen")
        self._console.note(f"saved {self._session.save(os.path.expanduser(path))}")

    def _add(self, word: str, path: str) -> None:
        if not path:
            raise InvalidValueError(f"{word} needs a path")
        make = image_part if word == "/image" else video_part
        self._media.append(make(os.path.expanduser(path), self._limits))
        self._console.note(f"{Path(path).name}: goes with the next turn")
