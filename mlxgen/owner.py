"""The thread that owns a model, the queue of runs it works on, and the asyncio front.

MLX's streams belong to the thread that made them, so everything that is queued or asynchronous on one model runs on
that model's one thread. A run is a generator of events; between two of them the thread may turn to another run, and
the first one, left as it is, goes on later. Nothing is copied or recorded for that.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from bisect import insort
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import mlx.core as mx

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.events import Event, Finished
from mlxgen.runs import Run, cancel_with

# How often the token of a caller is looked at while nothing runs: it is a plain attribute and wakes nobody.
_POLL_S = 0.05
# Runs within each other, each in the middle of an event of a less urgent one.
_MAX_NESTED = 8


class OwnerThread:
    """Works on runs, one unit at a time: the most urgent that can go on, among equals the one that came first.

    It starts at once and ends with `close` (or the model). The list of runs belongs to the thread; others only put into
    its inbox. At its end it gives MLX's per-thread streams back: a thread that ends with them just before the process
    does can crash the process.
    """

    def __init__(self, name: str) -> None:
        self._inbox: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._runs: list[Run] = []
        self._num_nested = 0
        self.current: Run | None = None
        self.closing = threading.Event()
        self.ended = False
        self._num_live = 0
        self._gate = threading.Lock()  # for the two before it; held for a moment, never while anything is freed
        self.finalizer: weakref.finalize[..., Any] | None = None  # ends it with the model
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.get_ident() == self._thread.ident

    def add(self, run: Run) -> bool:
        """Queue a run; False if the thread has ended or is about to."""
        with self._gate:
            if self.ended:
                return False
            self._num_live += 1
            run.owner = self
            self._inbox.put(run)
            return True

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        """Stop every run at its next checkpoint, then end. Returns when the thread has ended."""
        with self._gate:
            self.ended = True
        atexit.unregister(self.close)
        self.closing.set()
        self.wake()
        if not self.here:
            self._thread.join()

    def close_if_unused(self) -> None:
        """End the thread unless somebody else has a run on it."""
        with self._gate:
            if self._num_live:
                return
            self.ended = True
        if self.finalizer is not None:
            self.finalizer.detach()
        self.close()

    # -- the thread itself ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            mx.clear_streams()

    def _turn(self) -> bool:
        """Advance one run by one unit, or wait for a message; False when all is done."""
        closing = self.closing.is_set()  # before looking into the inbox: nothing is put there afterwards
        self._receive()
        run = self._next()
        if run is not None:
            self._advance(run)
            return True
        self.current = None
        if closing and not self._runs:
            return False
        self._wait()
        return True

    def _wait(self) -> None:
        watched = any(run.watched for run in self._runs)
        try:
            self._take_in(self._inbox.get(timeout=_POLL_S if watched else None))
        except queue.Empty:
            pass

    def _receive(self) -> None:
        while not self._inbox.empty():
            self._take_in(self._inbox.get())
        if self.closing.is_set():
            for run in self._runs:
                run.token.cancel("shutdown")

    def _take_in(self, message: Run | None) -> None:
        if message is not None:
            insort(self._runs, message, key=lambda run: run.place)

    def _next(self, above: Run | None = None) -> Run | None:
        """Whose turn it is; with `above`, only what may interrupt that run in the middle of its event."""
        best: Run | None = None
        for run in self._runs:
            if run.stopping:
                if not run.advancing:
                    return run
                return None  # it is being interrupted itself: return into it, so that it can stop
            if best is None and run.ready and not run.advancing and (above is None or run.priority > above.priority):
                best = run
        return best

    def _advance(self, run: Run) -> None:
        """Run up to the next event, and put that into the mailbox. A run that is to stop runs up to where it has."""
        self.current, run.advancing = run, True
        try:
            if run.events is None:
                assert run.start is not None
                run.events = run.start()
            for event in run.events:
                if event is None:
                    return
                run.box.put(event)
                if not isinstance(event, Finished) and not run.stopping:
                    return
        except BaseException as error:
            # Whoever asked is told; the thread goes on for the others.
            self._end(run, error)
        else:
            self._end(run, None)
        finally:
            run.advancing = False

    def _end(self, run: Run, error: BaseException | None) -> None:
        self._runs.remove(run)
        self.current = None
        # A run that is over must not keep its session alive, nor an idle thread its last run.
        run.start = run.events = None
        run.rest.set()
        with self._gate:
            self._num_live -= 1
        run.box.end(error)

    def give_way(self, run: Run) -> None:
        """At a checkpoint of `run`: do here and now what is more urgent, then return into it.

        Most units end with an event, and there the queue is looked at anyway. A picture's way through the tower, or the
        passes a resume runs again, are many units and one event.
        """
        if self._inbox.empty() or self._num_nested == _MAX_NESTED:
            return
        self._num_nested += 1
        try:
            self._receive()
            while (urgent := self._next(above=run)) is not None:
                self._advance(urgent)
                self._receive()
        finally:
            self._num_nested -= 1
            self.current = run


_owners: weakref.WeakKeyDictionary[Any, OwnerThread] = weakref.WeakKeyDictionary()
_owners_lock = threading.Lock()


def owner_of(model: Any) -> OwnerThread:
    """The thread of this model, started at the first call; it ends when the model is garbage or the process exits."""
    with _owners_lock:
        owner = _owners.get(model)
        if owner is None or owner.ended:
            owner = _owners[model] = OwnerThread("mlxgen-owner")
            owner.finalizer = weakref.finalize(model, owner.close)
            # At the process's end before all finalizers, those of the sessions' snapshots among them: what still runs
            # is stopped and saved.
            owner.finalizer.atexit = False
            atexit.register(owner.close)
        return owner


def add_run(model: Any, run: Run) -> None:
    """Queue a run on the model's thread."""
    while not owner_of(model).add(run):
        pass  # the thread was just being ended: the next call starts another


def end_thread_if_unused(model: Any) -> None:
    """End the model's thread if nothing runs or waits on it; the next run starts another."""
    with _owners_lock:
        owner = _owners.get(model)
    if owner is not None:
        owner.close_if_unused()


async def stream_from_owner(
    model: Any, start: Callable[[CancelToken], Iterator[Event]], *, cancel: CancelToken = NEVER
) -> AsyncGenerator[Event, None]:
    """Run `start(token)` and its events on the model's thread, in the queue with priority 0; yield the events here.

    Cancelling the task (or leaving the loop early) cancels the token and waits until the unit in flight is done and
    the session is settled, then lets the cancellation go on.
    """
    run = Run(cancel=cancel)
    token = run.new_token()
    run.start = lambda: start(token)
    add_run(model, run)
    reader = _Reader()
    cancel_with(reader, run)  # for a loop that was abandoned without closing its generators: nothing below runs then
    try:
        while (event := await run.box.anext()) is not None:
            yield event
    finally:
        if not run.box.ended:
            run.cancel("disconnect")
            await run.settled()


class _Reader:
    """Lives as long as the frame that reads a run's events."""


def last_event(events: Iterator[Event]) -> Finished:
    """Exhaust a stream and return its `Finished`."""
    finished: Finished | None = None
    for event in events:
        if isinstance(event, Finished):
            finished = event
    assert finished is not None, "a stream ends with Finished or raises"
    return finished
