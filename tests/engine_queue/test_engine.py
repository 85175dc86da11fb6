"""The engine from plain threads: what a consumer sees, order, pause, resume and cancel."""

from __future__ import annotations

import threading
import time

import pytest
from engine_queue.rig import (
    MANY,
    alone,
    blocker,
    long,
    outcome_of_result,
    prompt,
    read_until_token,
    reply,
    until,
)
from harness import Outcome

import mlxgen
from mlxgen.cancellation import CancelToken
from mlxgen.events import Finished, PrefillProgress, Token
from mlxgen.options import ReplyOptions
from mlxgen.persist import AutosavePolicy
from mlxgen.resumption import ResumeOptions

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
