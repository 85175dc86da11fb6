"""The asyncio front: the same events, stops that wait, and no thread left behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading

import pytest
from harness import PROMPT, SETUPS, Outcome, counted, greedy, model, new_session, sampled

from mlxgen.cancellation import CancelToken
from mlxgen.errors import InvalidValueError
from mlxgen.events import Finished, Token
from mlxgen.options import ReplyOptions
from mlxgen.owner import owner_of


async def collected(events) -> Outcome:
    outcome = Outcome()
    async for event in events:
        if isinstance(event, Token):
            outcome.tokens.append(event)
        elif isinstance(event, Finished):
            outcome.finished = event
    return outcome


def alone(name: str, prompt: str = PROMPT, reply=None) -> Outcome:
    outcome = Outcome()
    outcome.take(new_session(SETUPS[name]).stream(prompt, reply=reply or sampled()))
    return outcome


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "quantized-later"])
def test_the_same_events_and_either_front_goes_on_with_the_other_s_reply(name) -> None:
    """The cache was filled on the model's thread and goes on here (also just after it was quantised)."""
    expected = alone(name)
    for stop_after in (1, 2, 5, 9):
        session, outcome = new_session(SETUPS[name]), Outcome()

        async def part(session=session, outcome=outcome, stop_after=stop_after) -> None:
            events = session.astream(PROMPT, reply=sampled())
            async for event in events:
                if isinstance(event, Token):
                    outcome.tokens.append(event)
                    if len(outcome.tokens) == stop_after:
                        break
            await events.aclose()

        asyncio.run(part())
        while len(outcome.tokens) < session.position:  # recorded before the stop, on their way to a consumer that left
            outcome.tokens.append(expected.tokens[len(outcome.tokens)])
        if session.unfinished:
            outcome.take(session.continue_())
        assert outcome.values == expected.values
        assert session.reply_text == expected.finished.text


def test_cancelling_the_task_stops_within_one_unit_and_waits() -> None:
    async def run() -> None:
        using, forward = counted("llama")
        session = new_session(SETUPS["llama"], using)
        seen = asyncio.Event()

        async def consume() -> None:
            async for event in session.astream(PROMPT, reply=greedy(100_000)):
                if isinstance(event, Token) and event.index >= 3:
                    seen.set()

        task = asyncio.create_task(consume())
        await asyncio.wait_for(seen.wait(), 60)
        at_cancel = len(forward.lengths)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        passes = len(forward.lengths)
        assert passes - at_cancel <= 3
        await asyncio.sleep(0.2)
        assert len(forward.lengths) == passes, "nothing runs after the await returned"
        assert session.history.reply.finish == {"reason": "cancelled", "cancel_reason": "disconnect"}
        assert session.send("And now?", reply=greedy(3)).finish_reason == "length"

    asyncio.run(run())


def test_a_task_cancelled_twice_still_waits_for_the_unit_in_flight() -> None:
    async def run() -> None:
        using, forward = counted("llama")
        session = new_session(SETUPS["llama"], using)
        task = asyncio.create_task(collected(session.astream(PROMPT, reply=greedy(100_000))))
        while len(forward.lengths) < 8:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        passes = len(forward.lengths)
        await asyncio.sleep(0.1)
        assert len(forward.lengths) == passes
        assert not session.sequence.torn

    asyncio.run(run())


def test_two_sessions_of_one_model_at_once() -> None:
    async def run() -> list[Outcome]:
        sessions = [new_session(SETUPS["gemma3-window"]) for _ in range(2)]
        return await asyncio.gather(
            *(collected(s.astream(p, reply=sampled())) for s, p in zip(sessions, (PROMPT, "Other"), strict=True))
        )

    first, second = asyncio.run(run())
    assert first.values == alone("gemma3-window").values
    assert second.values == alone("gemma3-window", "Other").values


def test_the_caller_s_token_and_errors_come_through() -> None:
    async def run() -> None:
        session = new_session(SETUPS["llama"])
        token = CancelToken()
        outcome = Outcome()
        async for event in session.astream(PROMPT, reply=greedy(100_000), cancel=token):
            if isinstance(event, Token):
                outcome.tokens.append(event)
                token.cancel("hangup")
            elif isinstance(event, Finished):
                outcome.finished = event
        assert outcome.finished.cancel_reason == "hangup"
        with pytest.raises(InvalidValueError, match="max_tokens"):
            await collected(session.astream("x", reply=ReplyOptions(max_tokens=-5)))

        class Failing:
            def __call__(self, tokens, logits):
                raise LookupError("from the model's thread")

        with pytest.raises(LookupError, match="the model's thread"):
            await collected(session.astream("x", reply=ReplyOptions(processors=(Failing(),))))
        assert (await collected(session.astream("y", reply=greedy(2)))).finished.finish_reason == "length"

    asyncio.run(run())


def test_a_slow_consumer_slows_the_work_down_and_gets_everything() -> None:
    async def run() -> None:
        using, forward = counted("llama")
        session = new_session(SETUPS["llama"], using)
        tokens = 0
        async for event in session.astream(PROMPT, reply=greedy(150)):
            if isinstance(event, Token):
                tokens += 1
                if tokens == 1:
                    await asyncio.sleep(1.0)
                    assert len(forward.lengths) < 110, "at most 64 events wait"
        assert tokens == 150

    asyncio.run(run())


def test_a_loop_that_was_given_up_doesn_t_block_the_model_for_others() -> None:
    session = new_session(SETUPS["lfm2"])
    loop = asyncio.new_event_loop()
    events = session.astream(PROMPT, reply=greedy(100_000))

    async def first() -> None:
        async for event in events:
            if isinstance(event, Token):
                return

    loop.run_until_complete(first())
    loop.close()
    assert asyncio.run(collected(new_session(SETUPS["lfm2"]).astream(PROMPT, reply=sampled()))).values
    assert session.send("And now?", reply=greedy(2)).finish_reason == "length"


def test_the_model_s_thread_ends_with_the_model() -> None:
    from dataclasses import replace

    using = replace(model("llama"))
    asyncio.run(collected(new_session(SETUPS["llama"], using).astream("Hi", reply=greedy(2))))
    thread = owner_of(using)._thread
    assert thread.is_alive()
    assert thread is not threading.current_thread()
    del using
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


EXIT_SCRIPT = """
    import asyncio, sys
    sys.path.insert(0, {tests!r})
    from harness import SETUPS, new_session, greedy
    from mlxgen.events import Token
    session = new_session(SETUPS["llama"])

    async def run():
        async for event in session.astream("Hi", reply=greedy(100000)):
            if isinstance(event, Token) and event.index == 3:
                {leave}

    {how}
    print("here")
"""


@pytest.mark.parametrize(
    ("leave", "how"),
    [
        ("return", "asyncio.run(run())"),
        ("return", "loop = asyncio.new_event_loop(); loop.run_until_complete(run())"),
        ("sys.exit(0)", "asyncio.run(run())"),
    ],
)
def test_the_process_ends_well_right_afterwards(leave, how) -> None:
    from pathlib import Path

    tests = str(Path(__file__).parents[1])
    script = textwrap.dedent(EXIT_SCRIPT).format(tests=tests, leave=leave, how=how)
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "Fatal" not in done.stderr
