"""The chat's input: lines from a terminal, with editing and history, or from a pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from mlxgen.cancellation import CancelToken
from mlxgen.cli.console import Console
from mlxgen.errors import InvalidValueError, MlxgenError
from mlxgen.models.cachedir import make_cache_folder

_PROMPT = "> "
_MAX_HISTORY = 1000
_REASONS = {signal.SIGTERM: "terminate", signal.SIGHUP: "hangup"}
_NUDGES_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Interrupted(BaseException):
    """The user, or a signal, wants to leave while a line is awaited. Not an `Exception`: nothing may eat it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Pressed(BaseException):
    """The first Ctrl-C at a prompt."""


class Lines:
    """Used on the main thread. The history (0600, in the cache folder) is written at `close`."""

    def __init__(self, console: Console, cancel: CancelToken) -> None:
        self._console = console
        self._cancel = cancel
        self._terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None
        self._readline: Any = None
        self._history: Path | None = None
        if self._terminal:
            self._load_history()

    def next(self, prompt: str = _PROMPT) -> str | None:
        """The next line without its newline; None at the end.

        Raises `Interrupted` after a second Ctrl-C in a row, and for SIGTERM and SIGHUP; `InvalidValueError` for a line
        that isn't UTF-8.
        """
        pressed = False
        while True:
            try:
                with _raising_signals(last=pressed or not self._terminal):
                    if self._cancel.reason is not None:  # it came while nobody was waiting here
                        raise Interrupted(self._cancel.reason)
                    if pressed:
                        self._console.important("Ctrl-C again leaves, and so does Ctrl-D")
                    return self._read(prompt)
            except _Pressed:
                pressed = True
                self._console.end_line()

    def ask(self, question: str) -> str | None:
        """The answer to a question; None for Ctrl-C and at the end. Raises what else `next` raises."""
        if self._readline is not None:
            self._readline.set_auto_history(False)
        try:
            with _raising_signals(last=False):
                if self._cancel.reason is not None:
                    raise Interrupted(self._cancel.reason)
                return self._read(question)
        except _Pressed:
            self._console.end_line()
            return None
        finally:
            if self._readline is not None:
                self._readline.set_auto_history(True)

    def _read(self, prompt: str) -> str | None:
        if sys.stdin is None:
            return None
        if self._terminal:
            try:
                return input(prompt)
            except EOFError:
                self._console.write("\n")
                return None
            except UnicodeDecodeError:
                raise InvalidValueError("that line isn't valid text in the terminal's encoding") from None
        data = sys.stdin.buffer.readline()
        if not data:
            return None
        try:
            return data.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InvalidValueError(
                f"a line on standard input is not UTF-8 (byte {data[error.start]:#04x} at position {error.start}); "
                "it was left out"
            ) from None

    # -- history -------------------------------------------------------------------------------------------------------

    def _load_history(self) -> None:
        try:
            import readline

            self._history = make_cache_folder() / "chat_history"
        except (ImportError, MlxgenError):
            return
        self._readline = readline
        readline.set_history_length(_MAX_HISTORY)
        with contextlib.suppress(OSError):
            readline.read_history_file(self._history)

    def close(self) -> None:
        if self._readline is None or self._history is None:
            return
        with contextlib.suppress(OSError):
            os.close(os.open(self._history, os.O_WRONLY | os.O_CREAT, 0o600))
            self._readline.write_history_file(self._history)
            os.chmod(self._history, 0o600)


@contextlib.contextmanager
def _raising_signals(*, last: bool) -> Iterator[None]:
    """While a line is awaited, a signal must end the waiting: a handler that only takes note would leave it blocked.

    Ctrl-C raises `_Pressed`, or `Interrupted` where it is the `last` one to be asked for.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(_REASONS[signal.Signals(signum)])

    def press(signum: int, frame: FrameType | None) -> None:
        raise Interrupted("interrupt") if last else _Pressed

    handlers = {signal.SIGINT: press, signal.SIGTERM: leave, signal.SIGHUP: leave}
    former: dict[int, Any] = {}
    try:
        with _nudged():
            for signum, handler in handlers.items():
                former[signum] = signal.signal(signum, handler)
            yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _nudged() -> Iterator[None]:
    """See to it that a signal ends a blocking read, also one that came in the moment before the read began.

    Python's handler runs when the interpreter has the word again; a signal that arrives after its last look and before
    the system call is noted, and the call blocks all the same. So a thread that is told of every signal interrupts the
    main thread a few times afterwards, with one that does nothing.
    """
    waiting = threading.main_thread().ident
    told, tell = os.pipe()
    for descriptor in (told, tell):
        os.set_blocking(descriptor, descriptor == told)
    left = threading.Event()

    def nudge() -> None:
        while not left.is_set():
            numbers = os.read(told, 64)
            if not numbers:
                return
            if all(number == signal.SIGURG for number in numbers):
                continue
            for pause_s in _NUDGES_S:
                if left.wait(pause_s):
                    return
                if waiting is not None:
                    signal.pthread_kill(waiting, signal.SIGURG)

    former_handler = signal.signal(signal.SIGURG, lambda signum, frame: None)
    former_descriptor = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    thread = threading.Thread(target=nudge, name="mlxgen-nudge", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(former_descriptor)
        os.close(tell)
        thread.join()
        os.close(told)
        signal.signal(signal.SIGURG, former_handler)
