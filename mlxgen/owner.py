"""The thread that owns a model, and the asyncio front: events come to the loop, the work stays on one thread.

MLX's streams belong to the thread that made them, so everything asynchronous on one model runs on that model's one
thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import mlx.core as mx

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.events import Event, Finished

_log = logging.getLogger(__name__)
_POLL_S = 0.5


class OwnerThread:
    """Runs callables one after another on one thread. It starts with the first and ends with `close` (or the model).

    At its end it gives MLX's per-thread streams back: a thread that ends with them just before the process does can
    crash the process.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.closing = threading.Event()
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def close(self) -> None:
        """Finish what is queued (a reply that nobody reads any more is given up), then end. Returns when the thread
        has ended."""
        self.closing.set()
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    try:
        while (call := calls.get()) is not None:
            try:
                call()
            except BaseException:
                # Whoever asked has been told, or is gone; the thread goes on for the model's other sessions.
                _log.debug("a call on the model's thread failed", exc_info=True)
            del call  # an idle thread must not keep the last call's session alive
    finally:
        mx.clear_streams()


_owners: weakref.WeakKeyDictionary[Any, OwnerThread] = weakref.WeakKeyDictionary()
_owners_lock = threading.Lock()


def owner_of(model: Any) -> OwnerThread:
    """The thread of this model, started at the first call; it ends when the model is garbage or the process exits."""
    with _owners_lock:
        owner = _owners.get(model)
        if owner is None:
            owner = _owners[model] = OwnerThread("mlxgen-owner")
            weakref.finalize(model, owner.close)
        return owner


class _Bridge:
    """Carries events from the owner thread into an asyncio loop. Bounded: a slow consumer slows the work down."""

    def __init__(self, loop: asyncio.AbstractEventLoop, closing: threading.Event, max_events: int = 64) -> None:
        self._loop = loop
        self._closing = closing
        self._room = threading.Semaphore(max_events)
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self.ended = asyncio.Event()

    def put(self, item: Any) -> None:
        while not self._room.acquire(timeout=_POLL_S):
            # A loop that was abandoned without closing its generators would keep the model's thread, and the process's
            # end, waiting for ever.
            if self._loop.is_closed() or self._closing.is_set():
                raise RuntimeError("the event loop that read this reply is gone")
        self._loop.call_soon_threadsafe(self._events.put_nowait, item)

    def finish(self, error: BaseException | None) -> None:
        self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        self._events.put_nowait(_End(error))
        self.ended.set()

    async def get(self) -> Any:
        item = await self._events.get()
        self._room.release()
        return item

    def open_wide(self) -> None:
        """Never block the producer again: the consumer is gone and only waits for the end."""
        self._room.release(1 << 20)


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


async def stream_from_owner(
    model: Any, start: Callable[[CancelToken], Iterator[Event]], *, cancel: CancelToken = NEVER
) -> AsyncGenerator[Event, None]:
    """Run `start(token)` and its events on the model's thread; yield the events here.

    Cancelling the task (or leaving the loop early) cancels the token and waits until the unit in flight is done and
    the session is settled, then lets the cancellation go on.
    """
    token = CancelToken(parent=None if cancel is NEVER else cancel)
    owner = owner_of(model)
    bridge = _Bridge(asyncio.get_running_loop(), owner.closing)

    def work() -> None:
        error: BaseException | None = None
        try:
            events = start(token)
            try:
                for event in events:
                    bridge.put(event)
            finally:
                events.close()  # type: ignore[attr-defined]
        except BaseException as raised:
            error = raised
        bridge.finish(error)

    owner.submit(work)
    try:
        while True:
            item = await bridge.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        if not bridge.ended.is_set():
            token.cancel("disconnect")
            bridge.open_wide()
            await _wait_even_if_cancelled(bridge.ended)


async def _wait_even_if_cancelled(ended: asyncio.Event) -> None:
    cancelled = False
    while not ended.is_set():
        try:
            await ended.wait()
        except asyncio.CancelledError:
            cancelled = True  # asked again while waiting: the work is being stopped already
    if cancelled:
        raise asyncio.CancelledError


def last_event(events: Iterator[Event]) -> Finished:
    """Exhaust a stream and return its `Finished`."""
    finished: Finished | None = None
    for event in events:
        if isinstance(event, Finished):
            finished = event
    assert finished is not None, "a stream ends with Finished or raises"
    return finished
