"""Random programs over sessions, checked after every step against a model that only replays recorded passes.

A step is a tuple: a name and small numbers. What a step can't do where it stands (rewind an empty reply) it leaves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from harness import StopAt, sampled
from mlxgen.events import Backtrack, Finished, Token
from mlxgen.history import History
from mlxgen.options import ReplyOptions
from mlxgen.request import Part
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.sequence import PassLog, TokenSequence
from mlxgen.session import Session

PROMPTS = ("Hi", "Tell me of the sea, at length.", "No.")
Step = tuple[Any, ...]


def steered(max_tokens: int) -> ReplyOptions:
    """Replies that go back for banned strings, stop at patterns, and are sampled with penalties."""
    return replace(sampled(max_tokens), ban=("e", "th", " s"), stop=("zq",), stop_regex=(r"\d\d",))


def random_step(rng: random.Random) -> Step:
    number = rng.randrange
    return rng.choice(
        [
            lambda: ("send", number(len(PROMPTS)), number(10)),
            lambda: ("continue", number(7)),
            lambda: ("continue", number(7)),
            lambda: ("undo",),
            lambda: ("rewind", number(12)),
            lambda: ("rewind_turn", number(6)),
            lambda: ("mark",),
            lambda: ("rewind_mark", number(4)),
            lambda: ("fork", bool(number(2))),
            lambda: ("edit", number(6), bool(number(2))),
            lambda: ("append", number(len(PROMPTS))),
            lambda: ("score", number(len(PROMPTS))),
            lambda: ("resume", bool(number(2))),
        ]
    )()


@dataclass
class Program:
    """One run of a program. `others` are sessions that were forked off, or from, and must stay what they were."""

    session: Session
    reply: ReplyOptions
    folder: Path
    prompt: Callable[[int], str | Sequence[Part]] = PROMPTS.__getitem__
    others: list[tuple[Session, tuple[Any, ...]]] = field(default_factory=list)
    num_snapshots: int = 0

    def run(self, steps: Sequence[Step]) -> None:
        self.session.send(self.prompt(0), reply=self.reply, cancel=StopAt(6))
        for step in steps:
            getattr(self, f"do_{step[0]}")(*step[1:])
            self.check(self.session)
            for other, before in self.others:
                assert seen(other) == before
        for other, _ in self.others:
            self.check(other)
        self.session.close()

    # -- steps -----------------------------------------------------------------------------------------------------

    def do_send(self, prompt: int, stop_at: int) -> None:
        self.session.send(self.prompt(prompt), reply=self.reply, cancel=StopAt(stop_at))

    def do_continue(self, stop_at: int) -> None:
        if self.session.history.reply is None:
            return
        before, text = self.session.position, self.session.reply_text
        indices: list[int] = []
        finished = None
        for event in self.session.continue_(cancel=StopAt(stop_at)):
            if isinstance(event, Backtrack):
                indices = [index for index in indices if index < event.index]
                before = min(before, event.index)
            elif isinstance(event, Token):
                indices.append(event.index)
            elif isinstance(event, Finished):
                finished = event
        assert indices == list(range(before, self.session.position))
        assert finished is not None
        assert self.session.reply_text == finished.text
        assert self.session.reply_text.startswith(text)
        for banned in self.reply.ban:
            assert banned not in self.session.reply_text[len(text) :]

    def do_undo(self) -> None:
        if any(turn.role == "user" for turn in self.session.turns):
            self.session.undo()
            self._have_a_turn()

    def do_rewind(self, back: int) -> None:
        reply = self.session.history.reply
        if reply is None or reply is not self.session.history.laid_out:
            return
        count = max(0, len(reply.tokens) - back)
        self.session.rewind(num_tokens=reply.start + count)
        assert self.session.position == count

    def do_rewind_turn(self, num_turns: int) -> None:
        self.session.rewind(num_turns=min(num_turns, len(self.session.turns)))
        self._have_a_turn()

    def do_mark(self) -> None:
        mark = self.session.mark()
        assert (mark.num_turns, mark.num_tokens or 0) == (len(self.session.turns), self.session.position)

    def do_rewind_mark(self, number: int) -> None:
        marks = self.session.marks
        if marks:
            mark = marks[number % len(marks)]
            self.session.rewind(mark)
            assert (len(self.session.turns), self.session.position) == (mark.num_turns, mark.num_tokens or 0)
            self._have_a_turn()

    def do_fork(self, go_on_in_fork: bool) -> None:
        twin = self.session.fork()
        assert seen(twin) == seen(self.session)
        stays, self.session = (self.session, twin) if go_on_in_fork else (twin, self.session)
        stays.close()
        self.others = [*self.others[-2:], (stays, seen(stays))]

    def do_edit(self, turn: int, keep_later: bool) -> None:
        turn %= len(self.session.turns)
        self.session.edit(turn, "Something else, quite.", keep_later=keep_later)
        self._have_a_turn()

    def do_append(self, text: int) -> None:
        if self.session.turns[-1].role != "system":
            self.session.append_text(PROMPTS[text])

    def do_score(self, text: int) -> None:
        reply = self.session.history.reply
        if reply is not None and reply.tokens and reply is self.session.history.laid_out:
            before = seen(self.session)
            assert self.session.score(PROMPTS[text]).total < 0
            assert seen(self.session) == before

    def do_resume(self, into_autosaved: bool) -> None:
        before = seen(self.session)
        path = self.folder / f"{self.num_snapshots}.mlxgen"
        self.num_snapshots += 1
        if into_autosaved and self.session.snapshot_path is not None:
            path = self.session.save()
        else:
            self.session.save(path)
        self.session.close()
        self.session = resume(path, options=ResumeOptions(model=self.session.model))
        assert self.session.notes == ()
        assert seen(self.session) == before

    def _have_a_turn(self) -> None:
        """After going far back there may be nothing to reply to."""
        if not any(turn.role == "user" for turn in self.session.turns):
            self.session.add("Again.")

    # -- what must hold --------------------------------------------------------------------------------------------

    def check(self, session: Session) -> None:
        history, sequence = session.history, session.sequence
        assert sequence.ids == history.ids
        again = History.replay(history.records)
        assert (again.ids, again.num_fed, again.passes) == (history.ids, history.num_fed, history.passes)
        if history.layout is None:
            expected = replayed(session)
        else:
            expected = TokenSequence(session.model, session.options.cache, ids=history.ids)
            session.state.place_media()
            expected.inputs = sequence.inputs
            expected.replay(history.passes.entries, history.num_fed)
        assert expected.passes.entries == history.passes.entries
        sequence.repair()
        length = max(sequence.num_fed, history.num_fed)
        if length:
            expected.ids = list(sequence.ids)
            found, wanted = (next_logits(one, history, length) for one in (sequence, expected))
            assert mx.array_equal(found, wanted)
            if session.options.cache.kv_bits is None and session.options.cache.max_kv_size is None:
                difference = mx.abs(found - self._from_scratch(session, length)).max().item()
                assert difference < 1e-3, f"{difference} from a prefill from scratch, of {length} tokens"

    def _from_scratch(self, session: Session, length: int) -> mx.array:
        fresh = TokenSequence(session.model, session.options.cache, ids=session.sequence.ids)
        fresh.inputs = session.sequence.inputs
        fresh.feed(length)
        return next_logits(fresh, session.history, length)


def seen(session: Session) -> tuple[Any, ...]:
    """All that a session shows of itself."""
    return (list(session.history.ids), session.reply_text, session.position, session.marks, len(session.turns))


def replayed(session: Session) -> TokenSequence:
    """What the recorded passes, run one after another on an empty cache, come to; going back begins anew."""
    history = session.history
    sequence = TokenSequence(session.model, session.options.cache)
    for number, record in enumerate(history.records, start=1):
        if record.type in ("prompt", "rewind") and "keep" in record.data:
            keep = record.data["keep"]
            if keep == sequence.num_fed + 1:
                sequence.feed_one()  # to sample a token that nobody saw
            sequence = _gone_back(session, sequence, keep)
            if record.type == "prompt":
                sequence.ids[keep:] = record.data["ids"]
            else:
                del sequence.ids[len(History.replay(history.records[:number]).ids) :]
        elif record.type == "append" and "fed" in record.data:
            if record.data["fed"] == sequence.num_fed + 1:
                sequence.feed_one()
            sequence.ids += record.data["ids"]
        elif record.type == "pass":
            start, count = record.data
            assert sequence.num_fed == start
            sequence.feed(start + count)
        elif record.type == "tok":
            if sequence.num_fed < len(sequence.ids):
                sequence.feed_one()
            sequence.ids.append(record.data[0])
    return sequence


def _gone_back(session: Session, sequence: TokenSequence, keep: int) -> TokenSequence:
    if keep >= sequence.num_fed:
        return sequence
    kept = PassLog(list(sequence.passes.entries))
    kept.trim(keep)
    fresh = TokenSequence(session.model, session.options.cache, ids=sequence.ids)
    fresh.replay(kept.entries, keep)
    assert fresh.num_fed == keep
    return fresh


def next_logits(sequence: TokenSequence, history: History, length: int) -> mx.array:
    """The logits of the token after `length`, whatever it is: they depend on all that the cache holds.

    Of a fork, so that looking changes nothing.
    """
    twin = sequence.fork()
    if twin.inputs is not None:
        twin.inputs = twin.inputs.before(length)  # a picture that was only fed up to here can't be cut
    if twin.num_fed < history.num_fed:  # going back was stopped
        twin.replay(history.passes.entries, history.num_fed)
    while twin.num_fed < length:
        twin.feed_one()
    return twin.step(mx.array([9], mx.uint32))
