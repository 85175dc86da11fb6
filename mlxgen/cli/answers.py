"""One answer of the chat on the terminal: shown as it comes, stopped by Ctrl-C, which keeps what there is of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mlxgen.cancellation import CancelToken, cancel_on_interrupt
from mlxgen.cli.console import Console
from mlxgen.events import Event, Finished, InputProgress, PrefillProgress, Token

Begin = Callable[[CancelToken], Iterator[Event]]
"""Begins an answer, or goes on with one."""


class Answers:
    """Shows answers one after another. Owned by the chat; used on the main thread.

    `cancel` is the chat's own token: SIGTERM, SIGHUP and a closed pipe cancel it with the answer, Ctrl-C doesn't.
    """

    def __init__(self, console: Console, cancel: CancelToken) -> None:
        self._console = console
        self._cancel = cancel
        self._begins_with = ""
        self._line_ended = False

    def show(self, begin: Begin, *, begins_with: str = "") -> Finished:
        """Show an answer until it ends or is stopped, and end its line. `begins_with`: what it says already."""
        self._begins_with, self._line_ended = begins_with, False
        try:
            finished = self._run(begin)
            self._write("")
        finally:
            self._begins_with = ""
        if not self._line_ended:
            self._console.write("\n")
        return finished

    def read(self, begin: Begin) -> Finished:
        """The same for what has no text: a prompt that is only read."""
        return self._run(begin)

    def _run(self, begin: Begin) -> Finished:
        console, token = self._console, CancelToken(parent=self._cancel)
        finished: Finished | None = None
        with cancel_on_interrupt(token):
            for event in begin(token):
                if console.output_closed:
                    token.cancel("disconnect")
                if isinstance(event, Finished):
                    finished = event
                else:
                    self._show(event)
        console.clear_bar()
        if token.reason not in (None, "interrupt"):
            self._cancel.cancel(token.reason)  # SIGTERM, SIGHUP or a closed pipe: leave
        assert finished is not None, "a run ends with Finished, or raises"
        return finished

    def _show(self, event: Event) -> None:
        if isinstance(event, Token):
            self._write(event.text)
        elif isinstance(event, PrefillProgress):
            self._console.bar("prompt", event.done, event.total)
        elif isinstance(event, InputProgress):
            self._console.bar(f"{event.phase} {event.kind}s", event.index + 1, event.total)

    def _write(self, text: str) -> None:
        text, self._begins_with = self._begins_with + text, ""
        self._console.write(text)
        self._line_ended = text.endswith("\n") if text else self._line_ended
