"""One run on a model's thread: its generator of events, its place in the queue, and how it is paused and stopped."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import InvalidValueError
from mlxgen.events import Event
from mlxgen.mailbox import Mailbox

MAX_UNREAD_EVENTS = 64

_numbers = itertools.count()


class Scheduler(Protocol):
    """The thread a run is on (`owner.OwnerThread`)."""

    current: Any

    @property
    def here(self) -> bool: ...

    def wake(self) -> None: ...

    def give_way(self, run: Run) -> None: ...


class Run:
    """One run on a model's thread: what makes its events, its place in the queue, and how it is stopped.

    `start` is called on that thread, when it is this run's turn; what it returns is a generator of events that asks a
    token of `new_token()` at its checkpoints. It yields None when it has come to rest because `paused` was set (`rest`
    tells); it is asked again when it no longer is. After `Finished` it is exhausted at once.

    Made and read by its consumer on any thread; `cancel`, `pause`, `resume` take no lock, so that they may be called
    from a signal handler or by the garbage collector.
    """

    def __init__(self, *, priority: int = 0, cancel: CancelToken = NEVER) -> None:
        self.priority = priority
        self.number = next(_numbers)
        self.watched = cancel is not NEVER
        self.token = CancelToken(parent=cancel if self.watched else None)
        self.box = Mailbox(MAX_UNREAD_EVENTS, on_room=self.wake, on_gone=self._gone)
        self.paused = False
        self.rest = threading.Event()  # set while nothing of it is open: before its start, while paused, at the end
        self.rest.set()
        self.start: Callable[[], Iterator[Event | None]] | None = None
        self.events: Iterator[Event | None] | None = None
        self.advancing = False
        self.owner: Scheduler | None = None

    def new_token(self) -> CancelToken:
        """A token for the generator: also asks whether to pause, and lets more urgent runs go first."""
        return _RunToken(self)

    # -- any thread ----------------------------------------------------------------------------------------------------

    def cancel(self, reason: str) -> None:
        self.token.cancel(reason)
        self.wake()

    def pause(self) -> None:
        self.paused = True
        self.wake()

    def resume(self) -> None:
        self.paused = False
        self.wake()

    def wake(self) -> None:
        """Let the thread look again: something it decides by has changed."""
        if self.owner is not None:
            self.owner.wake()

    def _gone(self) -> None:
        self.cancel("disconnect")

    @property
    def running(self) -> bool:
        """Whether it is this run's turn."""
        return self.owner is not None and self.owner.current is self

    def wait_end(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended, its save included; False when the time was over first."""
        self.require_other_thread()
        return self.box.wait(until_end=True, timeout_s=timeout_s)

    def wait_rest(self) -> None:
        """Wait until a pause has been reached (or the end)."""
        self.require_other_thread()
        self.rest.wait()

    async def settled(self) -> None:
        """Wait until it has ended, even if the waiting task is cancelled meanwhile; then let that go on.

        Doesn't wait where no loop runs: there a generator is being closed that its loop left behind.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        cancelled = False
        while not self.box.ended:
            try:
                await self.box.await_(until_end=True)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    def require_other_thread(self) -> None:
        """Raise `InvalidValueError` on the model's own thread, which would wait for itself."""
        if self.owner is not None and self.owner.here and not self.box.ended:
            raise InvalidValueError(
                "the model's own thread (a logits processor, for instance) can't wait for a run: it would wait for "
                "itself; call cancel() or pause() and return"
            )

    # -- the model's thread ----------------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[int, int]:
        return (-self.priority, self.number)

    @property
    def stopping(self) -> bool:
        """Whether it must come to its end, or to rest. That takes one checkpoint, so it goes before everything."""
        return self.token.cancelled or (self.paused and not self.rest.is_set())

    @property
    def ready(self) -> bool:
        return not self.paused and not self.box.full


def cancel_with(reader: object, run: Run) -> None:
    """Cancel a queued run, with reason "disconnect", when nobody holds `reader` any more."""
    # Not the run itself: through its error's frames it may hold the reader.
    weakref.finalize(reader, _abandon, run.token, run.owner).atexit = False


def _abandon(token: CancelToken, owner: Scheduler | None) -> None:
    token.cancel("disconnect")
    if owner is not None:
        owner.wake()


class _RunToken(CancelToken):
    """What a run's work asks at its checkpoints."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        super().__init__(parent=run.token)
        self._run = run

    @property
    def reason(self) -> str | None:
        if self._run.paused:
            self.cancel("requested")
        return super().reason

    def checkpoint(self) -> None:
        owner = self._run.owner
        if owner is not None and owner.here:
            owner.give_way(self._run)
        super().checkpoint()
