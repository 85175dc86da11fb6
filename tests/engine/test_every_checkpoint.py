"""Stop at each checkpoint in turn, go on, and compare ids, text and log-probabilities with the uninterrupted run."""

from __future__ import annotations

import shutil

import pytest
from harness import NUM_TOKENS, PROMPT, SETUPS, Outcome, StopAt, counted, greedy, model, new_session, sampled

from mlxgen.resumption import ResumeOptions, resume

OPTIONS = {"greedy": greedy, "sampled": sampled}


def uninterrupted(setup, reply):
    outcome, token = Outcome(), StopAt()
    session = new_session(setup)
    outcome.take(session.stream(PROMPT, reply=reply, cancel=token))
    return outcome, session.ledger, token.count


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", SETUPS)
def test_stopping_anywhere_in_memory_changes_nothing(name, how) -> None:
    setup, reply = SETUPS[name], OPTIONS[how]()
    expected, ledger, num_checkpoints = uninterrupted(setup, reply)
    assert len(expected.tokens) == NUM_TOKENS
    assert num_checkpoints > NUM_TOKENS
    using, forward = counted(setup.kind)
    whole = Outcome()
    whole.take(new_session(setup, using).stream(PROMPT, reply=reply))
    num_fed, num_passes = forward.num_tokens, len(forward.lengths)
    for stop_at in range(num_checkpoints):
        forward.lengths.clear()
        session, outcome = new_session(setup, using), Outcome()
        stopped = outcome.take(session.stream(PROMPT, reply=reply, cancel=StopAt(stop_at)))
        assert stopped.finish_reason == "cancelled"
        assert stopped.text == outcome.text
        finished = outcome.take(session.continue_())
        assert outcome.values == expected.values
        assert finished.text == expected.finished.text == outcome.text
        assert finished.finish_reason == expected.finished.finish_reason
        assert session.ledger == ledger
        # P4: nothing is fed twice, no pass is made that the uninterrupted run doesn't make.
        assert (forward.num_tokens, len(forward.lengths)) == (num_fed, num_passes)


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", SETUPS)
def test_stopping_anywhere_and_resuming_from_a_snapshot_changes_nothing(name, how, tmp_path) -> None:
    setup, reply = SETUPS[name], OPTIONS[how]()
    expected, ledger, num_checkpoints = uninterrupted(setup, reply)
    using, forward = counted(setup.kind)
    new_session(setup, using).send(PROMPT, reply=reply)
    num_fed = forward.num_tokens
    for stop_at in range(num_checkpoints):
        forward.lengths.clear()
        session, outcome = new_session(setup, using), Outcome()
        outcome.take(session.stream(PROMPT, reply=reply, cancel=StopAt(stop_at)))
        path = session.save(tmp_path / f"{stop_at}.mlxgen")
        del session
        with resume(path, options=ResumeOptions(model=using)) as again:
            assert again.unfinished
            assert again.reply_text == outcome.text
            outcome.take(again.continue_())
            assert outcome.values == expected.values
            assert outcome.finished.text == expected.finished.text
            assert again.ledger == ledger
        assert forward.num_tokens == num_fed


def copied(live, target):
    """A copy of a folder that is being written: what a kill at about this moment leaves."""
    while True:
        try:
            return shutil.copytree(live, target, ignore=shutil.ignore_patterns(".tmp-*"))
        except shutil.Error:
            shutil.rmtree(target)


@pytest.mark.parametrize("name", SETUPS)
def test_a_lost_process_resumes_from_journal_and_last_generation(name, tmp_path) -> None:
    """As after kill -9: the journal has tokens that no saved cache knows."""
    setup, reply = SETUPS[name], sampled()
    expected, _, _ = uninterrupted(setup, reply)
    session = new_session(setup)
    session.autosave(tmp_path / "live.mlxgen")
    copies = []
    for _ in session.stream(PROMPT, reply=reply):
        copies.append(copied(tmp_path / "live.mlxgen", tmp_path / f"copy{len(copies)}.mlxgen"))
    session.close()
    for copy in copies[::3]:
        with resume(copy, options=ResumeOptions(model=model(setup.kind))) as again:
            rest = Outcome()
            before = again.position
            if again.unfinished:
                rest.take(again.continue_())
                assert rest.values == expected.values[before:]
            else:
                assert again.last_finished is not None
            assert again.reply_text == expected.finished.text
