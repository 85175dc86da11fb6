"""How engines and jobs end: closed, dropped, left; and what they let go of."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from engine_queue.rig import (
    MANY,
    alone,
    blocker,
    long,
    prompt,
    read_until_token,
    reply,
    until,
)

from mlxgen.engine import Engine
from mlxgen.errors import InvalidValueError
from mlxgen.events import Token
from mlxgen.options import ReplyOptions
from mlxgen.owner import owner_of
from mlxgen.session import Session


def test_closing_stops_the_running_one_and_those_that_wait_or_are_paused(bench) -> None:
    engine = Engine(bench.model)
    thread = owner_of(bench.model)._thread
    running = blocker(bench, engine, priority=0)
    waiting = engine.submit(bench.session("waiting"), prompt(1), reply=reply(1, 12))
    paused = engine.submit(bench.session("paused"), prompt(2), priority=1, reply=reply(2, MANY))
    read_until_token(iter(paused), 3)
    paused.pause(wait=True)
    unread = engine.submit(bench.session("unread"), prompt(0), priority=1, reply=long())
    until(lambda: unread.state == "unread")
    engine.close()
    assert engine.closed
    for job in (running, waiting, paused, unread):
        assert job.done
        assert job.result().finish_reason == "cancelled"
        assert job.result().cancel_reason == "shutdown"
    assert not thread.is_alive()
    passes = len(bench.passes)
    engine.close()
    with pytest.raises(InvalidValueError, match="closed"):
        engine.submit(waiting.session)
    assert len(bench.passes) == passes
    with Engine(bench.model) as other:
        for job in (waiting, paused):
            assert other.submit(job.session).result(60).finish_reason == "length"
    ids = [token.id for token in paused.session.history.reply.tokens]
    assert ids == [value[1] for value in alone("llama", 2, MANY)]


def test_closing_again_from_several_threads_and_while_others_submit(bench) -> None:
    engine = Engine(bench.model)
    jobs, refused = [], []

    def submit(number) -> None:
        while True:
            try:
                jobs.append(engine.submit(bench.session(str(number)), prompt(number), reply=reply(number, 2)))
            except InvalidValueError as error:
                refused.append(str(error))
                return

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(jobs) > 5)
    closers = [threading.Thread(target=engine.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in closers + threads:
        thread.join(60)
        assert not thread.is_alive()
    engine.close()
    assert all(job.result(10) for job in jobs), "none is left without an end"
    assert all("closed" in error for error in refused)
    assert len(refused) == 3


def test_two_engines_of_one_model_share_its_thread_and_close_only_their_own_jobs(bench) -> None:
    one, other = Engine(bench.model), Engine(bench.model)
    first = one.submit(bench.session("one"), prompt(1), priority=1, reply=long())
    second = other.submit(bench.session("other"), prompt(2), reply=reply(2, MANY))
    second._run.box.open_wide()
    read_until_token(iter(first), 2)
    thread = owner_of(bench.model)._thread
    one.close()
    assert first.result().cancel_reason == "shutdown"
    assert thread.is_alive()
    assert second.result(60).finish_reason == "length"
    other.close()
    assert not thread.is_alive()


def test_a_handle_that_nobody_holds_cancels_its_job_and_the_engine_may_be_dropped_first(bench) -> None:
    engine = Engine(bench.model)
    session = bench.session("dropped")
    job = engine.submit(session, prompt(1), reply=long())
    read_until_token(iter(job), 2)
    run = job._run
    del job
    gc.collect()
    assert run.wait_end(60)
    assert run.box.finished.cancel_reason == "disconnect"
    kept = Engine(bench.model).submit(session, reply=reply(1, 3))
    assert kept.result(60).usage.generated_tokens == 3
    engine.close()


@pytest.mark.parametrize("how", ["ended", "failed", "cancelled while paused"])
def test_a_session_is_let_go_of_with_its_job(bench, engine, how) -> None:
    def fail(tokens, logits):
        raise LookupError

    session = bench.session("a")
    options = ReplyOptions(max_tokens=4, processors=(fail,) if how == "failed" else ())
    job = engine.submit(session, prompt(1), reply=options)
    if how == "cancelled while paused":
        job.pause(wait=True)
        job.cancel()
    if how == "failed":
        with pytest.raises(LookupError):
            job.result(60)
    else:
        job.result(60)
    gone = weakref.ref(session)
    del session, job
    gc.collect()
    assert gone() is None


def test_leaving_a_loop_keeps_the_job_leaving_with_ends_it(bench, engine) -> None:
    session = bench.session("a")
    with engine.submit(session, prompt(1), reply=reply(1, 200)) as job:
        for event in job:
            if isinstance(event, Token) and event.index == 2:
                break
        assert not job.done
        assert next(event for event in job if isinstance(event, Token)).index == 3
    assert job.done
    assert job.result().cancel_reason == "disconnect"
    with pytest.raises(LookupError), engine.submit(session, reply=reply(1, 200)) as job:
        raise LookupError
    assert job.done
    assert Session.send(session, "And now?", reply=reply(0, 2)).finish_reason == "length"


def test_a_processor_can_cancel_but_not_wait(bench, engine) -> None:
    problems = []

    class Impatient:
        job = None

        def __call__(self, tokens, logits):
            if self.job is not None and not problems:
                for wait in (
                    self.job.result,
                    engine.close,
                    lambda: self.job.pause(wait=True),
                    lambda: next(iter(self.job)),
                ):
                    try:
                        wait()
                    except InvalidValueError as error:
                        problems.append(str(error))
            return logits

    processor = Impatient()
    job = engine.submit(
        bench.session("a"), prompt(1), reply=ReplyOptions(max_tokens=400, ignore_eos=True, processors=(processor,))
    )
    processor.job = job
    job.resume()
    assert job.result(60).cancel_reason == "shutdown", "engine.close() has asked for it"
    assert len(problems) == 4
    assert all("wait for itself" in problem for problem in problems)
