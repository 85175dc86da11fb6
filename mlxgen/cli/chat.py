"""`mlxgen chat`: a conversation in the terminal. Ctrl-C stops an answer and keeps it; the next line is a new turn."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mlxgen.cancellation import CancelToken
from mlxgen.cli import cached, exitcodes
from mlxgen.cli.answers import Answers, Begin
from mlxgen.cli.branching import MAX_BRANCHES, Branching
from mlxgen.cli.console import Console, printable
from mlxgen.cli.conversations import MAIN, Conversation, Conversations
from mlxgen.cli.generate import discard
from mlxgen.cli.lines import Interrupted, Lines
from mlxgen.cli.media import image_part, media_options, video_part
from mlxgen.cli.prefixes import keep_prefixes
from mlxgen.cli.run import Resumer, closing
from mlxgen.cli.settings import (
    UsageError,
    check_new_snapshot,
    load_model,
    reply_options,
    reply_prefix,
    session_options,
    show_load,
)
from mlxgen.errors import InvalidValueError, MlxgenError
from mlxgen.options import ReplyOptions
from mlxgen.request import MediaOptions, Part
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

_HELP = """\
/retry             answer the last turn again
/branch N          N answers to the last turn, to choose from
/continue          go on with the last answer, where it was stopped or full
/undo              take the last turn and its answer back
/edit [N] TEXT     put TEXT in the place of the last turn (of turn N) and answer again
/turns             your turns, with their numbers
/rewind [N|MARK]   take back the last answer; the last N turns; what came after a mark
/mark [NAME]       remember this place for /rewind
/fork [NAME]       go on in a copy of the conversation; the original stays as it is
/switch [NAME]     go to another of the conversations; without a name, list them
/image PATH        show a picture with the next turn (several: one by one)
/video PATH        the same with a video
/save PATH         write a snapshot of the conversation
/help, /exit
//text             a turn that begins with /
Ctrl-C stops an answer and keeps it; at the prompt, twice leaves (Ctrl-D too)."""


def run(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    """Load, then read lines until the user leaves; the conversation is kept in a snapshot all along."""
    if args.resume is not None and (args.system is not None or args.snapshot is not None):
        raise UsageError("--resume goes on in its own snapshot with its own system prompt; leave the others away")
    asked = _Asked(reply_options(args), reply_prefix(args), media_options(args))
    named = args.snapshot is not None or args.resume is not None
    conversations = Conversations(_open(args, asked.reply, console, cancel), named=named)
    with closing(conversations):
        model = conversations.current.session.model
        asked.reply.validate(model.vocab_size, model)
        code = _Chat(conversations, console, cancel, asked).loop()
        _leave(conversations, console, named=named)
        return code


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the command line asks for: how to answer, what each answer begins with, and the limits of media."""

    reply: ReplyOptions
    prefix: str | None
    limits: MediaOptions


def _open(args: argparse.Namespace, reply: ReplyOptions, console: Console, cancel: CancelToken) -> Session:
    if args.resume is not None:
        model = load_model(args, console, cancel) if args.model is not None else None
        options = ResumeOptions(model=model, on_progress=show_load(console))
        session = resume(args.resume, options=options, cancel=cancel)
        keep_prefixes(session.model, off=args.no_prefix_cache)
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
    model = load_model(args, console, cancel)
    reply.validate(model.vocab_size, model)  # before a snapshot is made
    session = Session(model, system=args.system, options=options_)
    keep_prefixes(session.model, off=args.no_prefix_cache)
    if args.snapshot is not None:
        session.autosave(args.snapshot, overwrite=args.overwrite)
    else:
        session.autosave(cached.new_path())
    console.note(f"{session.model.name}; /help lists the commands")
    return session


def _leave(conversations: Conversations, console: Console, *, named: bool) -> None:
    """Say where each conversation is kept; one in which nothing was said isn't."""
    all_of_them = list(conversations)
    for one in all_of_them:
        path = one.session.snapshot_path
        if path is None:
            continue
        if not named and not any(turn.role == "user" for turn in one.session.turns):
            discard(one.session, path)
            continue
        which = f"the conversation {one.name!r}" if len(all_of_them) > 1 else "the conversation"
        console.important(f"{which} is kept; go on with: {Resumer(path, command='chat --resume').line()}")


class _Chat:
    """The loop. Owns the media waiting for the next turn; everything else is the sessions'."""

    def __init__(self, conversations: Conversations, console: Console, cancel: CancelToken, asked: _Asked) -> None:
        self._conversations = conversations
        self._console = console
        self._cancel = cancel
        self._reply = asked.reply
        self._prefix = asked.prefix
        self._limits = asked.limits
        self._answers = Answers(console, cancel)
        self._lines = Lines(console, cancel)
        self._media: list[Part] = []
        self._retries = 0
        self._num_put = 0  # tokens of the prefix in the answer that was begun last
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/undo": self._undo,
            "/retry": self._retry,
            "/branch": self._branch,
            "/continue": self._continue,
            "/edit": self._edit,
            "/turns": self._list_turns,
            "/rewind": self._rewind,
            "/mark": self._mark,
            "/fork": self._fork,
            "/switch": self._switch,
            "/save": self._save,
            "/image": self._add_image,
            "/video": self._add_video,
        }

    @property
    def _here(self) -> Conversation:
        return self._conversations.current

    @property
    def _session(self) -> Session:
        return self._here.session

    def loop(self) -> int:
        """Read and answer until the user leaves; the exit code."""
        try:
            while True:
                if self._console.output_closed:
                    return exitcodes.CLOSED_PIPE
                try:
                    line = self._lines.next("> " if self._here.name == MAIN else f"{self._here.name}> ")
                    if line is None or not self._take(line):
                        return exitcodes.OK
                except Interrupted as stop:
                    return exitcodes.of_cancel_reason(stop.reason)
                except MlxgenError as error:
                    self._console.important(f"error: {' '.join(str(error).split())}")
        finally:
            self._lines.close()

    def _take(self, line: str) -> bool:
        """Do what a line says; False to leave."""
        if line.startswith("//"):
            self._answer(line[1:])
        elif line.startswith("/"):
            word, _, rest = line.partition(" ")
            if word in ("/exit", "/quit"):
                return False
            command = self._commands.get(word)
            if command is None:
                raise InvalidValueError(
                    f"unknown command {printable(word, 30)}; /help lists them, // begins a text with /"
                )
            command(rest.strip())
        elif line.strip() or self._media:
            self._answer(line)
        return True

    # -- answers ---------------------------------------------------------------------------------------------------

    def _answer(self, text: str) -> None:
        media, self._media = self._media, []
        parts: list[Part] = [*media, text]
        self._session.add(parts)
        self._retries = 0
        try:
            self._stream(self._reply)
        except MlxgenError:
            if self._session.position <= self._num_put:
                self._session.undo()
                self._console.note("the turn was taken back")
            raise

    def _stream(self, reply: ReplyOptions) -> None:
        """Show a new answer until it ends or is stopped; a stopped one stays in the conversation."""
        session, self._num_put = self._session, 0
        if self._prefix is None:
            self._show(lambda token: session.stream(None, reply=reply, cancel=token))
        else:
            session.append_text(self._prefix)
            self._num_put = session.position
            self._show(lambda token: session.continue_(reply=reply, cancel=token), session.reply_text)

    def _show(self, begin: Begin, begins_with: str = "") -> None:
        finished = self._answers.show(begin, begins_with=begins_with)
        if finished.cancel_reason == "interrupt":
            self._console.note("(stopped; /continue goes on with it)")

    def _retry(self, rest: str) -> None:
        session = self._session
        if not any(turn.role == "user" for turn in session.turns):
            raise InvalidValueError("there is no turn to answer again")
        if session.history.reply is not None:
            session.drop_reply()
        if self._reply.sampling.greedy:
            self._console.note("(with --temp 0 the answer is the same)")
        self._stream(self._reseeded())

    def _reseeded(self, count: int = 1) -> ReplyOptions:
        """The options with a seed that no answer to this turn had yet, `count` answers further on."""
        reply, sampling = self._reply, self._reply.sampling
        first, self._retries = self._retries + 1, self._retries + count
        if sampling.greedy or sampling.seed is None:
            return reply
        return replace(reply, sampling=replace(sampling, seed=(sampling.seed + first) % 2**64))

    def _branch(self, rest: str) -> None:
        if not (rest.isdecimal() and 2 <= int(rest) <= MAX_BRANCHES):
            raise InvalidValueError(f"/branch needs how many answers, from 2 to {MAX_BRANCHES}: /branch 3")
        count = int(rest)
        branching = Branching(self._session, self._reseeded(count), self._prefix, self._answers, self._console)
        branching.run(count, self._lines)

    def _continue(self, rest: str) -> None:
        session = self._session
        if session.history.reply is None:
            raise InvalidValueError("there is no answer to go on with")
        # A stopped answer gets what it still lacks, one that has ended as many tokens again.
        more = None if session.unfinished else self._reply
        self._show(lambda token: session.continue_(reply=more, cancel=token))

    # -- places ----------------------------------------------------------------------------------------------------

    @property
    def _own_turns(self) -> list[int]:
        """The places of the user's turns among all."""
        return [index for index, turn in enumerate(self._session.turns) if turn.role == "user"]

    def _list_turns(self, rest: str) -> None:
        turns = self._session.turns
        for number, index in enumerate(self._own_turns, 1):
            self._console.tell(f"{number}  {printable(turns[index].text, 100)}")

    def _undo(self, rest: str) -> None:
        turn = next((turn for turn in reversed(self._session.turns) if turn.role == "user"), None)
        self._session.undo()
        self._console.note(f"took back: {printable(turn.text if turn else '', 60)}")

    def _rewind(self, rest: str) -> None:
        session, own = self._session, self._own_turns
        if not rest:
            if session.history.reply is None:
                raise InvalidValueError("the conversation doesn't end with an answer; /rewind N takes N turns back")
            session.rewind()
            self._console.note("took back the last answer; /retry answers again, /edit TEXT changes the turn")
        elif rest.isdecimal():
            count = int(rest)
            if not 1 <= count <= len(own):
                raise InvalidValueError(f"can't take back {count} turns of {len(own)}; give 1 to {len(own)}")
            first = session.turns[own[-count]]
            session.rewind(num_turns=own[-count])
            self._console.note(f"took back {count} of your turns, from this one on: {printable(first.text, 60)}")
        else:
            session.rewind(self._here.marked(rest))
            self._console.note(f"back at {rest}: {len(self._own_turns)} of your turns")

    def _mark(self, rest: str) -> None:
        name = self._here.mark(rest)
        self._console.note(f"/rewind {name} comes back here")

    def _edit(self, rest: str) -> None:
        own = self._own_turns
        if not own:
            raise InvalidValueError("there is no turn to edit")
        word, _, after = rest.partition(" ")
        number, text = (int(word), after.strip()) if word.isdecimal() else (len(own), rest)
        if not text:
            raise InvalidValueError("/edit needs the new text: /edit TEXT, or /edit N TEXT for turn N")
        if not 1 <= number <= len(own):
            raise InvalidValueError(
                f"there is no turn {number}; give 1 to {len(own)} (a text that begins with a number: "
                f"/edit {len(own)} {printable(rest, 30)})"
            )
        former = self._session.turns[own[number - 1]].text
        self._session.edit(own[number - 1], text)
        self._retries = 0
        self._console.note(f"turn {number} was: {printable(former, 60)}")
        self._stream(self._reply)

    # -- conversations ---------------------------------------------------------------------------------------------

    def _fork(self, rest: str) -> None:
        left = self._here.name
        fork = self._conversations.fork(rest)
        self._console.note(f"this is {fork.name!r} now, kept in {fork.session.snapshot_path}; /switch {left} goes back")

    def _switch(self, rest: str) -> None:
        if not rest:
            for one in self._conversations:
                self._console.tell(f"{'*' if one is self._here else ' '} {one.summary}")
            return
        self._console.note(self._conversations.switch(rest).summary)

    def _save(self, path: str) -> None:
        if not path:
            raise InvalidValueError("/save needs a path, for instance /save talk.mlxgen")
        self._console.note(f"saved {self._session.save(os.path.expanduser(path))}")

    # -- the rest --------------------------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        for line in _HELP.splitlines():
            self._console.tell(line)

    def _add_image(self, path: str) -> None:
        self._add("/image", path, image_part)

    def _add_video(self, path: str) -> None:
        self._add("/video", path, video_part)

    def _add(self, word: str, path: str, make: Callable[[str, MediaOptions], Part]) -> None:
        if not path:
            raise InvalidValueError(f"{word} needs a path")
        self._media.append(make(os.path.expanduser(path), self._limits))
        self._console.note(f"{Path(path).name}: goes with the next turn")
