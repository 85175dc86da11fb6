"""Random programs of turns, stops, undos and resumes, against a model that only replays recorded passes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import mlx.core as mx
import pytest
from harness import SETUPS, Outcome, StopAt, greedy, model, new_session, sampled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxgen.history import History
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.sequence import TokenSequence

ACTIONS = st.one_of(
    st.tuples(st.just("send"), st.sampled_from(["Hi", "Tell me of the sea, at length.", "No."]), st.integers(0, 9)),
    st.tuples(st.just("continue"), st.integers(0, 6)),
    st.tuples(st.just("undo")),
    st.tuples(st.just("resume"), st.booleans()),
)
REPLIES = (greedy(5), sampled(5))


def replayed(setup, history: History) -> TokenSequence:
    """What the recorded passes, run one after another on an empty cache, come to: rewinds trim, or begin anew."""
    sequence = TokenSequence(model(setup.kind), setup.cache)
    for record in history.records:
        if record.type == "prompt":
            keep = record.data["keep"]
            if keep == sequence.num_fed + 1:
                sequence.feed_one()  # to sample a token that nobody saw
            sequence.rewind(min(keep, sequence.num_fed))
            assert sequence.num_fed == keep, "a rewind keeps what it says"
            sequence.ids[keep:] = record.data["ids"]
        elif record.type == "pass":
            start, count = record.data
            assert sequence.num_fed == start
            sequence.feed(start + count)
        elif record.type == "tok":
            if sequence.num_fed < len(sequence.ids):
                sequence.feed_one()
            sequence.ids.append(record.data[0])
    return sequence


def state_of(sequence: TokenSequence, length: int) -> list[mx.array]:
    """The logits of the next token, whatever it is: they depend on all that the cache holds."""
    while sequence.num_fed < length:
        sequence.feed_one()
    return sequence.step(mx.array([9], mx.uint32))


@pytest.mark.parametrize("name", ["llama", "gemma3-window", "qwen3_5", "quantized-later"])
@settings(
    max_examples=7, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(program=st.lists(ACTIONS, min_size=3, max_size=7), how=st.integers(0, 1))
def test_any_program_equals_the_replay_of_its_passes(name, program, how) -> None:
    setup, reply = SETUPS[name], REPLIES[how]
    using = model(setup.kind)
    with tempfile.TemporaryDirectory() as folder:
        session = new_session(setup)
        session.send("Begin.", reply=reply, cancel=StopAt(6))
        for number, (action, *arguments) in enumerate(program):
            if action == "send":
                session.send(arguments[0], reply=reply, cancel=StopAt(arguments[1]))
            elif action == "continue" and session.history.reply is not None:
                before, text = session.position, session.reply_text
                outcome = Outcome()
                outcome.take(session.continue_(cancel=StopAt(arguments[0])))
                assert [token.index for token in outcome.tokens] == list(range(before, session.position))
                assert session.reply_text == outcome.finished.text
                assert session.reply_text.startswith(text)
            elif action == "undo" and any(turn.role == "user" for turn in session.turns):
                session.undo()
            elif action == "resume":
                before = (session.history.ids, session.ledger, session.reply_text, session.position)
                path = Path(folder) / f"{number}.mlxgen"
                if arguments[0] and session.snapshot_path is not None:
                    path = session.save()
                else:
                    session.save(path)
                session.close()
                session = resume(path, options=ResumeOptions(model=using))
                assert session.notes == ()
                assert (session.history.ids, session.ledger, session.reply_text, session.position) == before
        history, sequence = session.history, session.sequence
        assert sequence.ids == history.ids
        again = History.replay(history.records)
        assert (again.ids, again.num_fed, again.passes) == (history.ids, history.num_fed, history.passes)
        expected = replayed(setup, history)
        assert expected.passes.entries == history.passes.entries
        sequence.repair()
        length = sequence.num_fed
        if length:
            expected.ids = list(sequence.ids)
            assert mx.array_equal(state_of(sequence, length), state_of(expected, length))
        session.close()
