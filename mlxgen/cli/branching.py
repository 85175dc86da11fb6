"""`/branch N`: several answers to the last turn, one after another, of which one is kept.

They are generated in forks that are saved nowhere; until one is chosen the conversation and its snapshot aren't
touched. Choosing is one record in the journal, so there is no moment at which a crash could lose something that was
kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mlxgen.cancellation import CancelToken
from mlxgen.cli.answers import Answers, Begin
from mlxgen.cli.console import Console
from mlxgen.cli.lines import Lines
from mlxgen.errors import InvalidValueError
from mlxgen.options import ReplyOptions
from mlxgen.session import Session

MAX_BRANCHES: Final = 64
_NOTHING: Final = ReplyOptions(max_tokens=0)


@dataclass(frozen=True, slots=True)
class Branching:
    """What the branches of one conversation are made with. `reply_prefix` is what each of them begins with."""

    session: Session
    reply: ReplyOptions
    reply_prefix: str | None
    answers: Answers
    console: Console

    def run(self, num_branches: int, lines: Lines) -> bool:
        """Show the answers and put the chosen one into the conversation; False if none was kept.

        Raises `InvalidValueError` where there is nothing to answer, or all answers would be the same.
        """
        session = self.session
        if not any(turn.role == "user" for turn in session.turns):
            raise InvalidValueError("there is no turn to answer yet")
        if self.reply.sampling.greedy:
            raise InvalidValueError(
                f"with --temp 0 all {num_branches} answers would be the same; begin the chat with --temp 0.8, say"
            )
        texts = self._texts(num_branches)
        chosen = None if texts is None else self._choose(texts, lines)
        if texts is None or chosen is None:
            self.console.note("(none was kept; the conversation is as it was)")
            return False
        self._keep(texts[chosen])
        self.console.note(f"kept answer {chosen + 1}")
        return True

    def _texts(self, num_branches: int) -> list[str] | None:
        """The answers, shown one after another under their numbers; None if that was stopped."""
        base = self._base()
        branches = [] if base is None else base.branch(num_branches, reply=self.reply)
        del base
        texts: list[str] = []
        while branches:
            branch = branches.pop(0)  # so that each is freed when the next one runs
            self.console.tell(f"answer {len(texts) + 1} of {num_branches}")
            finished = self.answers.show(_going_on(branch), begins_with=branch.reply_text)
            if finished.finish_reason == "cancelled":
                return None
            texts.append(finished.text)
        return texts or None

    def _base(self) -> Session | None:
        """A fork in which the last turn has no answer and its prompt is read; None if that was stopped."""
        # A prompt that is new is read in the conversation itself, where that is kept whatever becomes of the branches.
        if not self.session.position and not self._read(self.session):
            return None
        base = self.session.fork()
        if base.history.reply is not None:
            base.rewind()
        if not self._read(base):
            return None
        if self.reply_prefix is not None:
            base.append_text(self.reply_prefix)
        return base

    def _read(self, session: Session) -> bool:
        """Read the prompt of the last turn into the cache; False if that was stopped."""
        was_open = session.history.reply is not None
        finished = self.answers.read(lambda token: session.stream(None, reply=_NOTHING, cancel=token))
        if not was_open:
            session.drop_reply()
        return finished.finish_reason != "cancelled"

    def _choose(self, texts: list[str], lines: Lines) -> int | None:
        while True:
            line = lines.ask(f"keep which, 1 to {len(texts)}? [1] ")
            if line is None:
                return None
            word = line.strip() or "1"
            if not (word.isdecimal() and 1 <= int(word) <= len(texts)):
                self.console.important(f"error: {word[:20]!r} is none of them; give 1 to {len(texts)}, or Ctrl-C")
            elif not texts[int(word) - 1]:
                self.console.important(f"error: answer {word} is empty; choose another, or Ctrl-C")
            else:
                return int(word) - 1

    def _keep(self, text: str) -> None:
        session = self.session
        if session.history.reply is None:
            # An answer that nothing is generated of: the text takes its place.
            stopped = CancelToken()
            stopped.cancel()
            session.send(None, reply=self.reply, cancel=stopped)
        session.edit(len(session.turns) - 1, text)


def _going_on(branch: Session) -> Begin:
    return lambda token: branch.continue_(cancel=token)
