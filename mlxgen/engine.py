"""Many sessions on one model: one runs, the others wait; an urgent one goes first, and nobody notices in the text."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import InvalidValueError, SessionBusyError
from mlxgen.events import Event
from mlxgen.job import Job, job_events
from mlxgen.models.model import Model
from mlxgen.options import ReplyOptions
from mlxgen.owner import add_run, end_thread_if_unused
from mlxgen.request import Part
from mlxgen.runs import Run
from mlxgen.session import DEFAULT_REPLY, Session

# Which session is in which job: looked up by its next `submit`. Both weakly: the thread holds what hasn't ended,
# and the error of a job that has would hold its session.
_jobs: weakref.WeakKeyDictionary[Session, weakref.ref[Run]] = weakref.WeakKeyDictionary()
_jobs_lock = threading.Lock()


class Engine:
    """Runs the jobs of one model on the model's own thread, one unit at a time: no batching.

    The most urgent job that can go on has the thread; among equals the one that was submitted first, until it ends. A
    more urgent one takes over at the next checkpoint of the one that is running, which goes on later from exactly
    there, with the same tokens. So a job may wait for ever while there are more urgent ones. `Session.astream` and
    other engines of the same model stand in the same queue (`astream` with priority 0).

    Usable from any thread and any event loop. Owns no session: they stay their owner's, but must be left alone while
    their job isn't paused or done. `close` it, or use it in `with` or `async with`; nothing survives it but the
    sessions, which can be submitted to another engine.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def num_jobs(self) -> int:
        """How many of its jobs haven't ended."""
        with self._lock:
            return sum(not run.box.ended for run in list(self._runs))

    def submit(
        self,
        session: Session,
        prompt: str | Sequence[Part] | None = None,
        *,
        priority: int = 0,
        reply: ReplyOptions | None = None,
        cancel: CancelToken = NEVER,
    ) -> Job:
        """Queue a reply of `session`: to `prompt`, as `Session.stream` does, or without one to its last turn.

        If the session ends with a reply, that goes on, as with `Session.continue_`, whether it was cancelled, failed or
        has ended (`reply` then gives other options, and `max_tokens` more tokens). So a session whose job is done can
        be submitted again, any number of times.

        Higher `priority` is more urgent. Runs nothing and waits for nothing, but for the end of a save that the
        session's last job is about to finish, and for the hash of a picture or video in `prompt`. Raises
        `InvalidValueError` for invalid options, a session of another model, or a closed engine, and `SessionBusyError`
        if the session is in a job already. What goes wrong later is raised by the job. Keep the job: it is cancelled
        when nobody holds it any more.
        """
        if session.model is not self.model:
            raise InvalidValueError(
                f"the session is one of {session.model.name}, another model object than this engine's "
                f"({self.model.name}); submit it to an engine of its own model"
            )
        if not isinstance(priority, int):
            raise InvalidValueError(f"priority is {priority!r}; give a whole number, higher is more urgent")
        self._require_open()
        run = Run(priority=priority, cancel=cancel)
        _claim(session, run)
        try:
            events = _begin(session, prompt, reply, run.new_token())
            run.start = lambda: job_events(run, session, events)
            with self._lock:
                self._require_open()
                self._runs.add(run)
                add_run(self.model, run)
        except BaseException:
            run.box.end(None)
            raise
        return Job(session, run)

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidValueError("this engine is closed; make another with Engine(model), the sessions are intact")

    def close(self) -> None:
        """Stop the running job at its next checkpoint, cancel those that wait or are paused, and end the thread.

        Each job ends with `Finished`, reason "shutdown", and its session can go on elsewhere. Returns when all have
        been saved and the thread has ended (if nobody else uses it: it ends with the model otherwise). Idempotent.
        """
        for run in self._shut():
            run.wait_end()
        end_thread_if_unused(self.model)

    async def aclose(self) -> None:
        """`close` in an event loop."""
        for run in self._shut():
            await run.settled()
        end_thread_if_unused(self.model)

    def _shut(self) -> list[Run]:
        with self._lock:
            self._closed = True
            runs = list(self._runs)
        for run in runs:
            run.cancel("shutdown")
        return runs

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _claim(session: Session, run: Run) -> None:
    """Note that `session` is in a job now. Waits for a job that has said `Finished` and is only being saved."""
    while True:
        with _jobs_lock:
            known = _jobs.get(session)
            other = None if known is None else known()
            if other is None or other.box.ended:
                _jobs[session] = weakref.ref(run)
                return
        if other.box.finished is None:
            raise SessionBusyError(
                "the session is in another job; wait for that one's result() (cancel() it first, if it isn't wanted), "
                "or submit a fork"
            )
        other.wait_end()


def _begin(
    session: Session, prompt: str | Sequence[Part] | None, reply: ReplyOptions | None, cancel: CancelToken
) -> Iterator[Event]:
    """The generator of the reply; nothing has run yet. The turn is recorded, on the submitter's thread."""
    if prompt is None and session.history.reply is not None:
        return session.continue_(reply=reply, cancel=cancel)
    return session.stream(prompt, reply=DEFAULT_REPLY if reply is None else reply, cancel=cancel)
