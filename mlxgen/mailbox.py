"""Events on their way from the model's thread to one consumer, which may be a thread or an asyncio task."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from mlxgen.events import Event, Finished


class Mailbox:
    """A queue of events with an end. Says when it is full; never blocks the side that puts.

    Filled by the model's thread; emptied by one consumer at a time, on any thread or in any event loop. `on_room` is
    called when a full mailbox has room again, `on_gone` when the event loop that waited was closed: both from the
    consumer's side or the model's thread, so they must not block.
    """

    def __init__(self, max_events: int, *, on_room: Callable[[], None], on_gone: Callable[[], None]) -> None:
        self._max_events = max_events
        self._on_room = on_room
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._until_event: list[Callable[[], None]] = []
        self._until_end: list[Callable[[], None]] = []
        self._wide = False
        self.finished: Finished | None = None
        self.error: BaseException | None = None
        self.ended = False

    @property
    def full(self) -> bool:
        """Whether the consumer should read before more is made."""
        return not self._wide and len(self._events) >= self._max_events

    # -- the model's thread --------------------------------------------------------------------------------------------

    def put(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.finished = event
        with self._lock:
            self._events.append(event)
            wakes, self._until_event = self._until_event, []
        for wake in wakes:
            wake()

    def end(self, error: BaseException | None) -> None:
        """Nothing more will come; `error` is raised where the consumer meets the end."""
        with self._lock:
            self.error = error
            self.ended = True
            wakes = self._until_event + self._until_end
            self._until_event, self._until_end = [], []
        for wake in wakes:
            wake()

    # -- the consumer --------------------------------------------------------------------------------------------------

    def open_wide(self) -> None:
        """Never be full again: the consumer waits for the end first, and reads afterwards or not at all."""
        with self._lock:
            was_full, self._wide = self.full, True
        if was_full:
            self._on_room()

    def next(self) -> Event | None:
        """Wait for the next event; None at the end. Raises the run's error there, each time it is asked."""
        while True:
            event, ended = self._take()
            if event is not None or ended:
                return event
            self.wait(until_end=False)

    async def anext(self) -> Event | None:
        while True:
            event, ended = self._take()
            if event is not None or ended:
                return event
            await self.await_(until_end=False)

    def _take(self) -> tuple[Event | None, bool]:
        with self._lock:
            was_full = self.full
            event = self._events.popleft() if self._events else None
            ended = event is None and self.ended
        if was_full:
            self._on_room()
        if ended and self.error is not None:
            raise self.error
        return event, ended

    def wait(self, *, until_end: bool, timeout_s: float | None = None) -> bool:
        """Wait until there is an event or the end (`until_end`: the end only); False when the time was over first."""
        ready = threading.Event()
        if not self._register(ready.set, until_end):
            return True
        try:
            return ready.wait(timeout_s)
        finally:
            self._forget(ready.set)

    async def await_(self, *, until_end: bool) -> None:
        """The same in an event loop."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(ready.set)
            except RuntimeError:  # a loop that was closed while its task waited: nobody will ever read this
                self._on_gone()

        if self._register(wake, until_end):
            try:
                await ready.wait()
            finally:
                self._forget(wake)

    def _register(self, wake: Callable[[], None], until_end: bool) -> bool:
        """Whether there is something to wait for; `wake` is then called once, on the model's thread."""
        with self._lock:
            if self.ended or (self._events and not until_end):
                return False
            (self._until_end if until_end else self._until_event).append(wake)
            return True

    def _forget(self, wake: Callable[[], None]) -> None:
        with self._lock:
            for waiting in (self._until_event, self._until_end):
                if wake in waiting:
                    waiting.remove(wake)
