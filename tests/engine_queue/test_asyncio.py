"""The engine in an event loop, beside `Session.astream`: one thread for both, stops that wait."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from engine_queue.rig import Bench, alone, long, prompt, reply, until
from harness import Outcome, model

from mlxgen.engine import Engine
from mlxgen.errors import InvalidValueError
from mlxgen.events import Finished, Token
from mlxgen.options import ReplyOptions
from mlxgen.owner import last_event, owner_of
from mlxgen.resumption import ResumeOptions, resume


async def collected(events) -> Outcome:
    outcome = Outcome()
    async for event in events:
        take(outcome, event)
    return outcome


def take(outcome: Outcome, event) -> None:
    if isinstance(event, Token):
        outcome.tokens.append(event)
    elif isinstance(event, Finished):
        assert outcome.finished is None
        outcome.finished = event


def test_many_jobs_in_one_loop_each_says_what_it_says_alone() -> None:
    async def run() -> None:
        bench = Bench()
        async with Engine(bench.model) as engine:
            jobs = [
                engine.submit(bench.session(str(n)), prompt(n), priority=n % 3, reply=reply(n, 8)) for n in range(6)
            ]
            outcomes = await asyncio.gather(*(collected(job) for job in jobs))
            for number, outcome in enumerate(outcomes):
                assert outcome.values == alone("llama", number, 8)
                assert (await jobs[number].aresult()) is outcome.finished
        assert engine.closed

    asyncio.run(run())


def test_pause_resume_and_cancel_from_the_loop() -> None:
    async def run() -> None:
        bench = Bench()
        async with Engine(bench.model) as engine:
            job = engine.submit(bench.session("a"), prompt(1), reply=reply(1, 12))
            outcome = Outcome()
            async for event in job:
                take(outcome, event)
                if isinstance(event, Token) and event.index == 3:
                    job.pause()
                    while job.state != "paused" and not job.done:
                        await asyncio.sleep(0.001)
                    job.resume()
            assert outcome.values == alone("llama", 1, 12)
            job = engine.submit(job.session, reply=long())
            async for event in job:
                if isinstance(event, Token):
                    job.cancel("hangup")
            assert (await job.aresult()).cancel_reason == "hangup"

    asyncio.run(run())


@pytest.mark.parametrize("how", ["for", "aresult", "with"])
def test_cancelling_the_task_cancels_the_job_and_waits_for_the_unit_in_flight(how) -> None:
    async def run() -> None:
        bench = Bench()
        async with Engine(bench.model) as engine:
            job = engine.submit(bench.session("a"), prompt(1), reply=long())

            async def consume() -> None:
                if how == "for":
                    async for _ in job:
                        pass
                elif how == "aresult":
                    await job.aresult()
                else:
                    async with job:
                        await asyncio.sleep(60)

            task = asyncio.create_task(consume())
            while len(bench.passes) < 8:
                await asyncio.sleep(0.001)
            at_cancel = len(bench.passes)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert job.done
            passes = len(bench.passes)
            assert passes - at_cancel <= 3
            await asyncio.sleep(0.1)
            assert len(bench.passes) == passes, "nothing runs after the await returned"
            assert (await job.aresult()).cancel_reason == "disconnect"
            assert (await engine.submit(job.session, reply=reply(1, 2)).aresult()).finish_reason == "length"

    asyncio.run(run())


def test_a_task_that_dies_with_its_handle_frees_the_model() -> None:
    async def run() -> None:
        bench = Bench()
        async with Engine(bench.model) as engine:

            async def consume() -> None:
                async for event in engine.submit(bench.session("a"), prompt(1), reply=long()):
                    if isinstance(event, Token):
                        await asyncio.sleep(60)

            task = asyncio.create_task(consume())
            while engine.num_jobs == 0 or len(bench.passes) < 5:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            gc.collect()
            for _ in range(1000):
                if engine.num_jobs == 0:
                    break
                await asyncio.sleep(0.005)
            assert engine.num_jobs == 0

    asyncio.run(run())


def test_a_slow_task_stops_its_own_job_only() -> None:
    async def run() -> None:
        bench = Bench()
        async with Engine(bench.model) as engine:
            slow = engine.submit(
                bench.session("slow"), prompt(0), priority=5, reply=ReplyOptions(max_tokens=100, ignore_eos=True)
            )
            events = aiter(slow)
            await anext(events)
            assert (await collected(engine.submit(bench.session("b"), prompt(1), reply=reply(1)))).values == alone(
                "llama", 1
            )
            assert slow.state == "unread"
            assert len((await collected(events)).tokens) == 100

    asyncio.run(run())


def test_astream_and_the_engine_use_one_thread_and_the_urgent_job_goes_first() -> None:
    threads = set()

    async def run() -> None:
        bench = Bench()
        bench.on_pass = lambda: threads.add(threading.current_thread())
        async with Engine(bench.model) as engine:
            plain = asyncio.create_task(collected(bench.session("plain").astream(prompt(2), reply=reply(2, 200))))
            while len(bench.passes) < 6:
                await asyncio.sleep(0.001)
            urgent = engine.submit(bench.session("urgent"), prompt(1), priority=1, reply=reply(1, 6))
            later = engine.submit(bench.session("later"), prompt(0), reply=reply(0, 6))
            assert (await collected(urgent)).values == alone("llama", 1, 6)
            assert not plain.done()
            assert (await collected(later)).values == alone("llama", 0, 6)
            assert (await plain).values == alone("llama", 2, 200)
            order = list(dict.fromkeys(reversed(bench.names())))
            assert order == ["later", "plain", "urgent"], "as a job of priority 0, submitted first"
            thread = owner_of(bench.model)._thread
            assert threads == {thread}
            # Closing the engine leaves others' streams alone.
            events = bench.session("another").astream(prompt(0), reply=reply(0, 40))
            await anext(events)
        assert thread.is_alive()
        await events.aclose()

    asyncio.run(run())


def test_errors_reach_the_task_and_only_that() -> None:
    class Failing:
        def __call__(self, tokens, logits):
            raise LookupError("on the model's thread")

    async def run() -> None:
        bench = Bench()
        async with Engine(bench.model) as engine:
            failing = engine.submit(bench.session("f"), prompt(0), reply=ReplyOptions(processors=(Failing(),)))
            fine = engine.submit(bench.session("g"), prompt(1), reply=reply(1))
            with pytest.raises(LookupError, match="the model's thread"):
                await collected(failing)
            with pytest.raises(LookupError, match="the model's thread"):
                await failing.aresult()
            assert (await collected(fine)).values == alone("llama", 1)
            await engine.aclose()
            await engine.aclose()
            with pytest.raises(InvalidValueError, match="closed"):
                engine.submit(bench.session("h"), "x")

    asyncio.run(run())


def test_a_loop_that_was_given_up_while_it_waited_cancels_its_job() -> None:
    bench = Bench()
    with Engine(bench.model) as engine:
        job = engine.submit(bench.session("a"), prompt(1), reply=long())
        job.pause(wait=True)
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(collected(job))
        while job._run.box._events or not job._run.box._until_event:
            loop.run_until_complete(asyncio.sleep(0.01))
        waiting._log_destroy_pending = False
        loop.close()
        job.resume()
        until(lambda: job.done)
        assert job.result().cancel_reason == "disconnect"


@pytest.mark.parametrize("begun_in_the_loop", [True, False])
def test_a_stream_of_a_loop_that_was_given_up_is_cancelled_when_nobody_holds_it(begun_in_the_loop) -> None:
    bench = Bench()
    session = bench.session("a")
    events = session.astream(prompt(1), reply=long())
    loop = asyncio.new_event_loop()

    async def begin(events) -> None:
        await anext(events)

    loop.run_until_complete(begin(events) if begun_in_the_loop else anext(events))
    loop.close()
    owner = owner_of(bench.model)
    assert owner._num_live == 1
    del events
    gc.collect()
    until(lambda: owner._num_live == 0)
    assert session.history.reply.finish == {"reason": "cancelled", "cancel_reason": "disconnect"}


def test_the_same_job_is_read_by_a_thread_after_a_loop() -> None:
    bench = Bench()
    with Engine(bench.model) as engine:
        job = engine.submit(bench.session("a"), prompt(1), reply=reply(1, 30))
        outcome = Outcome()

        async def first() -> None:
            async for event in job:
                take(outcome, event)
                if isinstance(event, Token) and event.index == 2:
                    return

        asyncio.run(first())
        for event in job:
            take(outcome, event)
        assert outcome.values == alone("llama", 1, 30)


EXIT_SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    import mlxgen, tiny
    from mlxgen import AutosavePolicy, Engine, ReplyOptions, Session, Token

    model = mlxgen.load(str(tiny.folder("llama")))
    engine, long = Engine(model), ReplyOptions(max_tokens=2000, ignore_eos=True)
    sessions = [Session(model) for _ in range(3)]
    for number, session in enumerate(sessions):
        session.autosave(f"{{number}}.mlxgen", policy=AutosavePolicy(every_s=1e9, every_tokens=10**9))
    running, paused, waiting = [engine.submit(session, "Hello", reply=long) for session in sessions]
    paused.pause()
    for event in running:
        if isinstance(event, Token) and event.index == 3:
            break
    print("here")
    {leave}
"""


@pytest.mark.parametrize("leave", ["", "del engine", "del running, waiting"])
def test_a_process_that_doesn_t_close_stops_and_saves_its_jobs(leave, tmp_path) -> None:
    script = textwrap.dedent(EXIT_SCRIPT).format(tests=str(Path(__file__).parents[1]), leave=leave)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "here\n"
    assert done.stderr == ""
    using = ResumeOptions(model=model("llama"))
    with resume(tmp_path / "0.mlxgen", options=using) as session:
        reason = "disconnect" if "running" in leave else "shutdown"
        assert session.history.reply.finish == {"reason": "cancelled", "cancel_reason": reason}
        assert session.position >= 4
        finished = last_event(session.continue_(reply=reply(0, 2)))
        assert finished.usage.prefilled_tokens == 0, "the cache was saved too"
    for number in (1, 2):
        with resume(tmp_path / f"{number}.mlxgen", options=using) as session:
            assert session.unfinished
            assert session.position == 0
