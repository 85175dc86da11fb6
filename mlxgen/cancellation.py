"""Cooperative cancellation: an explicit token, asked at every checkpoint.

The token travels as the last keyword argument (`cancel: CancelToken = NEVER`). It is not kept in a context variable,
because a scope set inside a generator leaks into whoever resumes that generator.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from mlxgen.errors import InvalidValueError

REASONS: Final = ("requested", "interrupt", "terminate", "hangup", "deadline", "disconnect", "shutdown")


class Cancelled(BaseException):
    """A requested stop, on its way from a checkpoint to the one place that turns it into the last event.

    A `BaseException`, so that `except Exception` in a consumer's or a library's code can't eat it. `partial` is what
    was finished so far where the raising function promises that (`prepare`), otherwise None.
    """

    def __init__(self, reason: str, partial: Any = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.partial = partial


class CancelToken:
    """Says when to stop, and why. Once cancelled it stays so; the first reason wins.

    `cancel()` may be called from any thread and from a signal handler: it is one plain attribute store and takes no
    lock (two racing calls may both believe they were first; either reason is a true one). Nothing survives a stop:
    a resumed run takes a new token.

    `deadline` is an absolute time of `time.monotonic()` in seconds. That clock doesn't count the time a Mac sleeps, so
    a closed lid doesn't use up a deadline. A token with a `parent` is cancelled when the parent is.
    """

    __slots__ = ("_deadline", "_parent", "_reason")

    def __init__(self, *, deadline: float | None = None, parent: CancelToken | None = None) -> None:
        if deadline is not None and math.isnan(deadline):
            raise InvalidValueError("deadline is NaN; give seconds of time.monotonic(), or None for no deadline")
        self._deadline = deadline
        self._parent = parent
        self._reason: str | None = None

    @classmethod
    def after(cls, seconds: float, *, parent: CancelToken | None = None) -> CancelToken:
        """A token that cancels itself with reason `deadline` this many seconds from now (0 or less: at once)."""
        if math.isnan(seconds):
            raise InvalidValueError("a timeout of NaN seconds; give a number of seconds")
        return cls(deadline=time.monotonic() + seconds, parent=parent)

    def cancel(self, reason: str = "requested") -> None:
        """Ask for a stop at the next checkpoint. Later calls, and their reasons, are ignored."""
        if self._reason is None:
            self._reason = reason

    @property
    def reason(self) -> str | None:
        """Why to stop, or None while there is no reason to."""
        if self._reason is not None:
            return self._reason
        if self._parent is not None:
            inherited = self._parent.reason
            if inherited is not None:
                self._reason = inherited
                return inherited
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._reason = "deadline"
        return self._reason

    @property
    def cancelled(self) -> bool:
        return self.reason is not None

    def checkpoint(self) -> None:
        """Return at once, or raise `Cancelled` when a stop was asked for. Costs well under a microsecond."""
        reason = self.reason
        if reason is not None:
            raise Cancelled(reason)

    def __repr__(self) -> str:
        return f"CancelToken(reason={self.reason!r})"


class _Never(CancelToken):
    __slots__ = ()

    def cancel(self, reason: str = "requested") -> None:
        raise InvalidValueError("NEVER can't be cancelled: it is shared by all callers; pass your own CancelToken()")

    @property
    def reason(self) -> str | None:
        return None

    def checkpoint(self) -> None:
        return None


NEVER: Final[CancelToken] = _Never()

_SIGNAL_REASONS: Final = {signal.SIGINT: "interrupt", signal.SIGTERM: "terminate", signal.SIGHUP: "hangup"}


@contextmanager
def cancel_on_interrupt(token: CancelToken | None = None) -> Iterator[CancelToken]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into `token.cancel(...)` while the block runs; a second signal raises.

    For programs (the command line uses it); the library itself never installs a handler. Must be entered on the main
    thread. The former handlers come back at the end. A handler runs between two bytecodes of Python, never inside MLX,
    so the first press can't leave a layer half updated; the second raises `KeyboardInterrupt` (`SystemExit(128 + n)`
    for the other two), for somebody who wants out now.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InvalidValueError("cancel_on_interrupt() works on the main thread only; elsewhere call token.cancel()")
    token = CancelToken() if token is None else token
    seen = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + signum)
        seen = True
        token.cancel(_SIGNAL_REASONS[signal.Signals(signum)])

    former = {signum: signal.signal(signum, handle) for signum in _SIGNAL_REASONS}
    try:
        yield token
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)
