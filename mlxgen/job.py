"""The handle of a reply that was submitted to an engine, and what a reply with pauses tells its one consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator
from dataclasses import fields, replace
from types import TracebackType
from typing import Literal, cast

from mlxgen.errors import SessionBusyError
from mlxgen.events import Event, Finished, Usage
from mlxgen.runs import Run, cancel_with
from mlxgen.session import Session

JobState = Literal["waiting", "running", "paused", "unread", "done"]


class Job:
    """The handle of one submitted reply: its events, and how to pause and stop it. Made by `Engine.submit`.

    Has one consumer, which reads it with `for`, `async for`, `result` or `aresult`, in any thread or loop. The events
    are those of `Session.stream`, however often the job had to wait, with one `Finished`; an error of the run is raised
    instead of it. A consumer that doesn't read stops its job at 64 unread events; the others go on.

    Leaving a loop doesn't cancel the job. Leaving `with job:` or `async with job:` does, and waits for the unit in
    flight; so does cancelling a task that waits for it. A job that nobody holds any more is cancelled.
    """

    def __init__(self, session: Session, run: Run) -> None:
        self.session = session
        self._run = run
        cancel_with(self, run)

    @property
    def priority(self) -> int:
        return self._run.priority

    @property
    def done(self) -> bool:
        """Whether it has ended, its save included: the session is free."""
        return self._run.box.ended

    @property
    def state(self) -> JobState:
        """What it is doing: "waiting" for its turn, "running", "paused", "unread" (64 events wait for the consumer), or
        "done"."""
        run = self._run
        if run.box.ended:
            return "done"
        if run.paused and run.rest.is_set():
            return "paused"
        if run.running:
            return "running"
        return "unread" if run.box.full else "waiting"

    # -- control -------------------------------------------------------------------------------------------------------

    def pause(self, *, wait: bool = False) -> None:
        """Stop at the next checkpoint, as a cancelled reply would (autosaved sessions are saved), until `resume`.

        `wait`: return when that is reached; from then on the session may be saved or forked, but not given other turns.
        (In an event loop: `await asyncio.to_thread(job.pause, wait=True)`.) No effect on a job that is done.
        """
        self._run.pause()
        if wait:
            self._run.wait_rest()

    def resume(self) -> None:
        """Take its place in the queue again: by priority, then by when it was submitted."""
        self._run.resume()

    def cancel(self, reason: str = "requested") -> None:
        """Stop for good at the next checkpoint; a job that waits or is paused ends without any more work.

        The last event is `Finished` with "cancelled" and this reason. No effect on a job that is done.
        """
        self._run.cancel(reason)

    # -- one consumer ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        self._run.require_other_thread()
        while (event := self._run.box.next()) is not None:
            yield event

    def result(self, timeout_s: float | None = None) -> Finished:
        """Wait for the end and return `Finished`; raises the run's error, or `TimeoutError` (the job then goes on).

        Events that weren't read stay readable; from now on there is no limit to them.
        """
        self._run.box.open_wide()
        if not self._run.wait_end(timeout_s):
            raise TimeoutError(f"the job hasn't ended within {timeout_s} seconds (it is {self.state}) and goes on")
        return self._outcome()

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        while (event := await self._unless_cancelled()) is not None:
            yield event

    async def _unless_cancelled(self) -> Event | None:
        try:
            return await self._run.box.anext()
        except asyncio.CancelledError:
            await self._leave()
            raise

    async def aresult(self) -> Finished:
        """`result` in an event loop. Cancelling the task cancels the job, and waits for the unit in flight."""
        self._run.box.open_wide()
        try:
            await self._run.box.await_(until_end=True)
        except asyncio.CancelledError:
            await self._leave()
            raise
        return self._outcome()

    async def _leave(self) -> None:
        self._run.cancel("disconnect")
        await self._run.settled()

    def _outcome(self) -> Finished:
        box = self._run.box
        if box.error is not None:
            raise box.error
        assert box.finished is not None
        return box.finished

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.cancel("disconnect")
        self._run.wait_end()

    async def __aenter__(self) -> Job:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()


def job_events(run: Run, session: Session, events: Iterator[Event]) -> Iterator[Event | None]:
    """The events of a job, on the model's thread: those of one reply, over however many pauses.

    Waiting for a more urgent job needs nothing here: this generator isn't asked then. A pause may last, and the process
    may end meanwhile; so it is a stop like any other, kept to itself, and then `continue_()`.
    """
    stopped: Finished | None = None  # where a pause ended it
    while not run.token.cancelled:
        run.rest.clear()
        if run.paused:  # since it was chosen
            run.rest.set()
            yield None
            continue
        before, stopped = stopped, None
        for event in events:
            if not isinstance(event, Finished):
                yield event
                continue
            usage = event.usage if before is None else _added(before.usage, event.usage)
            if event.finish_reason == "cancelled" and not run.token.cancelled:
                stopped = replace(event, usage=usage)
                continue
            yield replace(event, cancel_reason=event.cancel_reason and run.token.reason, usage=usage)
            for _ in events:  # which saves the session
                pass
            return
        if stopped is None:
            raise _taken()
        place = _place(session)
        run.rest.set()
        while run.paused and not run.token.cancelled:
            yield None
        if run.token.cancelled:
            break
        if _place(session) != place:
            raise _taken()
        events = session.continue_(cancel=run.new_token())
    if stopped is None:
        cast("Generator[Event]", events).close()
        current = session.history.reply
        prompt_tokens = 0 if current is None else current.num_prompt_tokens
        stopped = Finished("cancelled", None, session.reply_text, Usage(prompt_tokens=prompt_tokens))
    yield replace(stopped, cancel_reason=run.token.reason)


def _place(session: Session) -> tuple[int, int]:
    return len(session.turns), session.position


def _taken() -> SessionBusyError:
    return SessionBusyError(
        "the session was used by somebody else while its job was waiting; leave it alone until the job is done (it may "
        "be saved or forked while the job is paused)"
    )


def _added(first: Usage, second: Usage) -> Usage:
    """What two runs of one reply did together: counts are added, speeds are those over both, the time to the first
    token is that of the run that made it."""
    counts = {
        field.name: getattr(first, field.name) + getattr(second, field.name)
        for field in fields(Usage)
        if field.type == "int"
    }
    prompt_s = _seconds(first.prefilled_tokens, first.prompt_tps) + _seconds(second.prefilled_tokens, second.prompt_tps)
    steps = [max(usage.generated_tokens - 1, 0) for usage in (first, second)]
    decode_s = _seconds(steps[0], first.generation_tps) + _seconds(steps[1], second.generation_tps)
    first_token_s = first.time_to_first_token_s
    return replace(
        second,
        **counts
        | {
            "prompt_tokens": second.prompt_tokens,
            "reused_tokens": first.reused_tokens if first.prompt_tokens else second.reused_tokens,
            "peak_memory_bytes": max(first.peak_memory_bytes, second.peak_memory_bytes),
        },
        prompt_tps=counts["prefilled_tokens"] / prompt_s if prompt_s > 0 else 0.0,
        generation_tps=sum(steps) / decode_s if decode_s > 0 else 0.0,
        time_to_first_token_s=second.time_to_first_token_s if first_token_s is None else first_token_s,
    )


def _seconds(num_tokens: int, tps: float) -> float:
    return num_tokens / tps if tps > 0 else 0.0
