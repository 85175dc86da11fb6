"""A session in one job after another: finished, cancelled, failed; in two at once; used behind its job's back."""

from __future__ import annotations

import pytest
from engine_queue.rig import (
    MANY,
    Bench,
    alone,
    blocker,
    outcome_of_result,
    prompt,
    read_until_token,
    reply,
)
from harness import Outcome

from mlxgen.engine import Engine
from mlxgen.errors import ContextLengthError, InvalidValueError, SessionBusyError
from mlxgen.events import Finished, Token
from mlxgen.options import ReplyOptions


def test_a_job_of_one_token_enqueued_again_500_times_is_one_run_of_500(bench, engine) -> None:
    """Over two growth steps of the cache's buffer (256 rows each)."""
    expected = alone("llama", 0, 500)
    session, one = bench.session("a"), reply(0, 1)
    outcome = Outcome()
    outcome.take(iter(engine.submit(session, prompt(0), reply=one)))
    while session.position < 500:
        finished = outcome.take(iter(engine.submit(session, reply=one)))
        assert finished.usage.generated_tokens == 1
    assert outcome.values == expected
    fed = len(bench.passes)
    assert fed <= 500 + 2, "one pass a token, and the prompt's"


def test_a_cancelled_job_and_one_that_ended_go_on_also_with_other_options(bench, engine) -> None:
    session = bench.session("a")
    job = engine.submit(session, prompt(1), reply=reply(1, MANY))
    read_until_token(iter(job), 3)
    job.cancel()
    job.result(60)
    assert engine.submit(session).result(60).usage.generated_tokens < MANY, "only what it still lacked"
    assert [token.id for token in session.history.reply.tokens] == [value[1] for value in alone("llama", 1, MANY)]
    assert engine.submit(session, reply=reply(1, 5)).result(60).usage.generated_tokens == 5
    assert [token.id for token in session.history.reply.tokens] == [value[1] for value in alone("llama", 1, MANY + 5)]
    assert engine.submit(session, "And now?", reply=reply(2, 3)).result(60).usage.reused_tokens > MANY
    assert len(session.turns) == 4


def test_a_failed_job_reaches_its_consumer_only_and_can_be_enqueued_again(bench, engine) -> None:
    class Failing:
        fails = True

        def __call__(self, tokens, logits):
            if self.fails and tokens.shape[0] > 50:
                raise LookupError("in a processor")
            return logits

    failing = Failing()
    other = engine.submit(bench.session("other"), prompt(0), priority=-1, reply=reply(0))
    session = bench.session("failing")
    job = engine.submit(session, prompt(1), reply=ReplyOptions(max_tokens=40, ignore_eos=True, processors=(failing,)))
    tokens = []
    for _ in range(2):
        with pytest.raises(LookupError, match="in a processor"):
            tokens.extend(event for event in job if isinstance(event, Token))
        with pytest.raises(LookupError, match="in a processor"):
            job.result(60)
    assert tokens
    assert job.done
    assert outcome_of_result(other) == alone("llama", 0)
    failing.fails = False
    assert engine.submit(session).result(60).finish_reason == "length"
    plain = bench.session("plain").send(prompt(1), reply=ReplyOptions(max_tokens=40, ignore_eos=True))
    assert session.reply_text == plain.text


def test_what_is_wrong_at_once_is_said_at_once_and_changes_nothing(bench, engine) -> None:
    session = bench.session("a")
    with pytest.raises(InvalidValueError, match="max_tokens is -1"):
        engine.submit(session, "Hello", reply=ReplyOptions(max_tokens=-1))
    with pytest.raises(InvalidValueError, match="nothing to reply to"):
        engine.submit(session)
    with pytest.raises(InvalidValueError, match="another model object"):
        engine.submit(Bench().session("b"), "Hello")
    for priority in (0.5, None, "high"):
        with pytest.raises(InvalidValueError, match="whole number"):
            engine.submit(session, "Hello", priority=priority)
    assert session.turns == ()
    assert engine.num_jobs == 0
    too_long = engine.submit(session, "word " * 5000)
    with pytest.raises(ContextLengthError):
        too_long.result(60)
    assert session.turns == (), "a turn that fits no prompt is taken back"
    assert engine.submit(session, prompt(1), reply=reply(1)).result(60).finish_reason == "length"


def test_a_session_in_two_jobs_is_refused_and_nothing_happens_to_the_first(bench, engine) -> None:
    session = bench.session("a")
    job = engine.submit(session, prompt(1), reply=reply(1, 40))
    for other in (engine, Engine(bench.model)):
        with pytest.raises(SessionBusyError, match="is in another job"):
            other.submit(session, "Something else")
    assert outcome_of_result(job) == alone("llama", 1, 40)
    assert len(session.turns) == 2
    # Right after Finished, while it is being saved, is no error: submit waits for that.
    for _ in range(5):
        for event in engine.submit(session, reply=reply(1, 2)):
            if isinstance(event, Finished):
                break


def test_a_session_that_was_used_behind_its_job_s_back_is_said_to_the_job(bench, engine) -> None:
    hold = blocker(bench, engine)
    waiting = engine.submit(bench.session("waiting"), prompt(1), reply=reply(1))
    paused = engine.submit(bench.session("paused"), prompt(1), reply=reply(1))
    other = engine.submit(bench.session("other"), prompt(0), priority=-1, reply=reply(0))
    waiting.session.add("Something else")
    hold.cancel()
    with pytest.raises(SessionBusyError, match="used by somebody else"):
        waiting.result(60)
    paused.result(60)
    late = engine.submit(paused.session, reply=reply(1, MANY))
    read_until_token(iter(late), 5)
    late.pause(wait=True)
    paused.session.send("Something else", reply=reply(0, 2))
    late.resume()
    with pytest.raises(SessionBusyError, match="used by somebody else"):
        late.result(60)
    assert outcome_of_result(other) == alone("llama", 0)
