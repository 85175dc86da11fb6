"""The engine's promises, from plain threads: order, pause, cancel, errors, enqueuing again, closing, dropped jobs."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
from engine_queue.rig import Bench, alone, long, outcome_of, prompt, read_until_token, reply, until
from harness import Outcome

import mlxgen
from mlxgen.cancellation import CancelToken
from mlxgen.engine import Engine
from mlxgen.errors import ContextLengthError, InvalidValueError, SessionBusyError
from mlxgen.events import Finished, PrefillProgress, Token
from mlxgen.options import ReplyOptions
from mlxgen.owner import owner_of
from mlxgen.persist import AutosavePolicy
from mlxgen.resumption import ResumeOptions
from mlxgen.runs import MAX_UNREAD_EVENTS
from mlxgen.session import Session

# More tokens than may be unread: a job of so many doesn't end before its consumer wants it to.
MANY = MAX_UNREAD_EVENTS + 20


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def engine(bench):
    with Engine(bench.model) as engine:
        yield engine


def blocker(bench: Bench, engine: Engine, priority: int = 9) -> mlxgen.Job:
    """A job that has the thread until it is cancelled; nothing less urgent runs."""
    job = engine.submit(bench.session("blocker"), "Hold on.", priority=priority, reply=long())
    job._run.box.open_wide()
    until(lambda: "blocker" in bench.names())
    return job


# -- what a consumer sees ----------------------------------------------------------------------------------------------


def test_the_events_are_the_session_s_own(bench, engine) -> None:
    plain = list(bench.session("plain").stream(prompt(0), reply=reply(0)))
    job = engine.submit(bench.session("job"), prompt(0), reply=reply(0))
    events = list(job)
    assert [type(event) for event in events] == [type(event) for event in plain]
    assert events[:-1] == plain[:-1]
    assert events[-1].text == plain[-1].text
    assert events[-1].usage.generated_tokens == plain[-1].usage.generated_tokens == 4
    assert job.done
    assert job.state == "done"
    assert job.result() is events[-1]
    assert list(job) == []


def test_result_leaves_the_events_readable_however_many(bench, engine) -> None:
    job = engine.submit(bench.session("a"), prompt(0), reply=ReplyOptions(max_tokens=150, ignore_eos=True))
    first = next(iter(job))
    assert isinstance(first, PrefillProgress)
    assert job.result(60).usage.generated_tokens == 150
    assert sum(isinstance(event, Token) for event in job) == 150


def test_result_can_be_waited_for_only_so_long(bench, engine) -> None:
    job = engine.submit(bench.session("a"), prompt(0), reply=long())
    with pytest.raises(TimeoutError, match=r"within 0.05 seconds \(it is (running|waiting)\)"):
        job.result(0.05)
    assert not job.done
    job.cancel("hangup")
    assert job.result(60).cancel_reason == "hangup"


def test_a_consumer_that_doesn_t_read_stalls_nobody_else(bench, engine) -> None:
    """The unread one is more urgent and submitted first; it stops at 64 events, and goes on when it is read."""
    slow = engine.submit(
        bench.session("slow"), prompt(0), priority=5, reply=ReplyOptions(max_tokens=80, ignore_eos=True)
    )
    until(lambda: slow.state == "unread")
    passes = len(bench.passes)
    other = engine.submit(bench.session("other"), prompt(1), reply=reply(1))
    assert outcome_of_result(other) == alone("llama", 1)
    assert slow.state == "unread"
    assert {name for name, _ in bench.passes[passes:]} == {"other"}
    assert sum(isinstance(event, Token) for event in slow) == 80


def outcome_of_result(job) -> list:
    job.result(60)
    return outcome_of(job).values


# -- order -------------------------------------------------------------------------------------------------------------


def test_one_runs_the_others_wait_by_priority_then_by_when_they_came(bench, engine) -> None:
    hold = blocker(bench, engine)
    jobs = {
        name: engine.submit(bench.session(name), prompt(number), priority=priority, reply=reply(number, 2))
        for number, (name, priority) in enumerate([("a", 0), ("b", 1), ("c", 0), ("d", -1), ("e", 1)])
    }
    assert hold.state == "running"
    assert {job.state for job in jobs.values()} == {"waiting"}
    assert engine.num_jobs == 6
    hold.cancel()
    for job in jobs.values():
        job.result(60)
    order = [name for name in bench.names() if name != "blocker"]
    assert list(dict.fromkeys(order)) == ["b", "e", "a", "c", "d"]
    assert order == sorted(order, key=["b", "e", "a", "c", "d"].index), "one at a time"
    assert engine.num_jobs == 0


def test_the_interrupted_one_goes_on_before_an_equal_that_came_later(bench, engine) -> None:
    jobs = []

    def act() -> None:
        if len(bench.passes) == 5:
            jobs.append(engine.submit(bench.session("second"), prompt(1), reply=reply(1)))
            jobs.append(engine.submit(bench.session("urgent"), prompt(2), priority=1, reply=reply(2)))

    bench.on_pass = act
    jobs.append(engine.submit(bench.session("first"), prompt(0), reply=reply(0, 12)))
    jobs[0].result(60)
    for job in jobs:
        job.result(60)
    assert list(dict.fromkeys(reversed(bench.names()))) == ["second", "first", "urgent"]


# -- pause, resume, cancel ---------------------------------------------------------------------------------------------


def test_a_paused_job_runs_nothing_and_then_goes_on_exactly(bench, engine) -> None:
    expected = alone("llama", 1, MANY)
    for at in (0, 1, 5):
        session = bench.session(f"paused at {at}")
        job = engine.submit(session, prompt(1), reply=reply(1, MANY))
        events, outcome = iter(job), Outcome()
        seen = []
        for event in events:
            seen.append(event)
            if (at == 0 and isinstance(event, PrefillProgress)) or (isinstance(event, Token) and event.index == at):
                break
        job.pause(wait=True)
        assert job.state == "paused"
        passes = len(bench.passes)
        other = engine.submit(bench.session("other"), prompt(0), reply=reply(0))
        assert outcome_of_result(other) == alone("llama", 0), "others run meanwhile"
        assert {name for name, _ in bench.passes[passes:]} == {"other"}
        assert job.state == "paused"
        job.resume()
        seen += list(events)
        assert sum(isinstance(event, Finished) for event in seen) == 1
        outcome.take(iter(seen))
        assert outcome.values == expected
        usage = outcome.finished.usage
        assert usage.generated_tokens == MANY
        assert usage.prefilled_tokens == usage.prompt_tokens, "nothing was fed twice"
        assert usage.time_to_first_token_s is not None


def test_pausing_is_level_triggered_and_harmless_at_any_time(bench, engine) -> None:
    hold = blocker(bench, engine)
    job = engine.submit(bench.session("a"), prompt(1), reply=reply(1))
    job.pause(wait=True)
    job.pause()
    assert job.state == "paused"
    job.resume()
    job.resume()
    assert job.state == "waiting"
    job.pause()
    hold.cancel()
    hold.result(60)
    time.sleep(0.05)
    assert "a" not in bench.names()
    job.resume()
    assert outcome_of_result(job) == alone("llama", 1)
    job.pause(wait=True)
    job.resume()
    job.cancel()
    assert job.result().finish_reason == "length"
    assert job.state == "done"


def test_a_paused_session_is_on_the_disk_and_may_be_saved_and_forked(bench, engine, tmp_path) -> None:
    session = bench.session("a")
    path = session.autosave(tmp_path / "own.mlxgen", policy=AutosavePolicy(every_s=1e9, every_tokens=10**9))
    job = engine.submit(session, prompt(1), reply=reply(1, MANY))
    read_until_token(iter(job), 4)
    job.pause(wait=True)
    copy = session.save(tmp_path / "copy.mlxgen")
    twin = session.fork()
    position = session.position
    assert 5 <= position < MANY
    expected = alone("llama", 1, MANY)
    assert Outcome().take(twin.continue_()).text == "".join(value[2] for value in expected)
    with mlxgen.resume(copy, options=ResumeOptions(model=bench.model)) as resumed:
        assert resumed.position == position
        assert resumed.sequence.num_fed > 0
        assert Outcome().take(resumed.continue_()).usage.prefilled_tokens == 0
        assert [token.id for token in resumed.history.reply.tokens] == [value[1] for value in expected]
    job.resume()
    assert job.result(60).text == twin.reply_text
    session.close()
    with mlxgen.resume(path, options=ResumeOptions(model=bench.model)) as resumed:
        assert resumed.last_finished.text == twin.reply_text


def test_cancelled_while_waiting_or_paused_it_ends_without_any_work(bench, engine) -> None:
    hold = blocker(bench, engine)
    waiting = engine.submit(bench.session("waiting"), prompt(1), reply=reply(1))
    paused = engine.submit(bench.session("paused"), prompt(1), reply=reply(1))
    paused.pause()
    waiting.cancel()
    paused.cancel("hangup")
    assert waiting.result(60) == Finished("cancelled", "requested", "")
    assert paused.result(60) == Finished("cancelled", "hangup", "")
    assert list(waiting) == [waiting.result()]
    assert hold.state == "running"
    assert set(bench.names()) == {"blocker"}
    hold.cancel()
    again = engine.submit(waiting.session)
    assert outcome_of_result(again) == alone("llama", 1), "its turn was recorded; it is answered now"


def test_cancelling_the_running_one_keeps_what_was_said(bench, engine) -> None:
    session = bench.session("a")
    job = engine.submit(session, prompt(1), reply=reply(1, MANY))
    read_until_token(iter(job), 3)
    job.cancel()
    finished = job.result(60)
    assert finished.finish_reason == "cancelled"
    assert finished.text == session.reply_text
    assert 4 <= session.position <= MANY


def test_a_job_that_was_paused_and_is_cancelled_says_all_it_did(bench, engine) -> None:
    job = engine.submit(bench.session("a"), prompt(1), reply=reply(1, MANY))
    read_until_token(iter(job), 3)
    job.pause(wait=True)
    position = job.session.position
    job.cancel("terminate")
    finished = job.result(60)
    assert finished.cancel_reason == "terminate"
    assert finished.usage.generated_tokens == position
    assert finished.text == job.session.reply_text != ""


@pytest.mark.parametrize("where", ["running", "waiting", "paused", "before"])
def test_the_caller_s_own_token_cancels_it_wherever_it_is(bench, engine, where) -> None:
    token = CancelToken()
    if where == "before":
        token.cancel("terminate")
    hold = blocker(bench, engine) if where == "waiting" else None
    job = engine.submit(bench.session("a"), prompt(1), reply=long(), cancel=token)
    if where == "paused":
        job.pause(wait=True)
    elif where == "running":
        read_until_token(iter(job), 2)
    token.cancel("terminate")
    assert job.result(60).cancel_reason == "terminate"
    if where != "running":
        assert "a" not in bench.names() or where == "paused"
    if hold is not None:
        assert not hold.done


def test_every_method_from_another_thread_at_the_same_time(bench, engine) -> None:
    job = engine.submit(bench.session("a"), prompt(1), reply=reply(1, 40))
    results, problems = [], []

    def guarded(call) -> None:
        try:
            call()
        except BaseException as error:
            problems.append(error)

    def play() -> None:
        for _ in range(20):
            job.pause(wait=True)
            job.resume()

    calls = [
        lambda: results.append(job.result(60)),
        lambda: results.append(job.result(60)),
        play,
        lambda: [job.state for _ in range(1000)],
        lambda: [job.done for _ in range(1000)],
        lambda: results.extend(job),
    ]
    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems
    finished = [event for event in results if isinstance(event, Finished)]
    assert len(finished) == 3
    assert all(event is finished[0] for event in finished)
    outcome = Outcome()
    outcome.take(event for event in results if isinstance(event, Token | Finished))
    assert outcome.values == alone("llama", 1, 40)


# -- enqueuing again ---------------------------------------------------------------------------------------------------


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


# -- the end -----------------------------------------------------------------------------------------------------------


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
