"""The two streams of a command: the reply (or JSON) to standard output, everything else to standard error.

Both may go away at any moment (`| head`, a closed terminal): a lost standard output asks the run to stop, a lost
standard error is ignored. Nothing here raises.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import BinaryIO, Final

_MAX_WIDTH: Final = 100
_CLEAR_LINE: Final = "\r\x1b[K"


class Console:
    """Owned by one command, used on its main thread. `output_closed` says that the reader of standard output is gone.

    `on_closed` is called once when that is noticed. Notes, statistics and bars are left out with `quiet`; warnings and
    errors never. Bars are drawn only with `bars` and if standard error is a terminal.
    """

    def __init__(self, *, quiet: bool = False, bars: bool = True, on_closed: Callable[[], None] = lambda: None) -> None:
        self.quiet = quiet
        self.output_closed = False
        self._on_closed = on_closed
        self._output: BinaryIO | None = _binary(sys.stdout)
        self._errors: BinaryIO | None = _binary(sys.stderr)
        self._draws = bars and not quiet and _is_terminal(self._errors)
        self._shared_terminal = _is_terminal(self._output) and _is_terminal(self._errors)
        self._bar_shown = False
        self._line_open = False  # text without a newline at its end stands on the terminal

    def write(self, text: str) -> None:
        """Write to standard output as UTF-8, whatever the locale says, and flush."""
        if not text:
            return
        self.clear_bar()
        if self._shared_terminal:
            self._line_open = not text.endswith("\n")
        if self._output is None or self.output_closed:
            return
        try:
            self._output.write(text.encode("utf-8", "surrogateescape"))
            self._output.flush()
        except (OSError, ValueError):
            self.output_closed = True
            _give_up(self._output)
            self._on_closed()

    def note(self, text: str) -> None:
        """One line for the user, left out with `quiet`."""
        if not self.quiet:
            self.tell(text)

    def important(self, text: str) -> None:
        """One line that `quiet` doesn't leave out: a warning, an error, the command that resumes."""
        self.tell(f"mlxgen: {text}")

    def tell(self, text: str) -> None:
        """One line on standard error that the user asked for."""
        self.clear_bar()
        self.end_line()
        self._to_errors(f"{_one_line(text)}\n")

    def end_line(self) -> None:
        """Begin a new line on the terminal if the reply's last one isn't ended."""
        if self._line_open:
            self._line_open = False
            self._to_errors("\n")

    # -- bars ------------------------------------------------------------------------------------------------------

    def bar(self, label: str, done: int, total: int) -> None:
        """Draw a progress bar that fits the terminal, in place of the last one."""
        if not self._draws or self._errors is None:
            return
        self.end_line()
        self._bar_shown = True
        self._to_errors(_CLEAR_LINE + bar_line(label, done, total, self._width()))

    @property
    def draws_bars(self) -> bool:
        """Whether bars are drawn at all."""
        return self._draws and self._errors is not None

    def clear_bar(self) -> None:
        if self._bar_shown:
            self._bar_shown = False
            self._to_errors(_CLEAR_LINE)

    def _width(self) -> int:
        try:
            return os.get_terminal_size(sys.stderr.fileno()).columns or 80
        except (OSError, ValueError, AttributeError):
            return 80

    def _to_errors(self, text: str) -> None:
        if self._errors is None:
            return
        try:
            self._errors.write(text.encode("utf-8", "backslashreplace"))
            self._errors.flush()
        except (OSError, ValueError):
            _give_up(self._errors)
            self._errors = None


def bar_line(label: str, done: int, total: int, width: int) -> str:
    """One line of at most `width - 1` characters (a full line would wrap), however narrow the terminal is.

    The share comes first to be kept, then the label, then the bar itself.
    """
    room = max(0, min(width, _MAX_WIDTH) - 1)
    share = min(1.0, done / total) if total > 0 else 1.0
    percent = f"{share:4.0%}"
    counts = f" {done}/{total}"
    left = f"{label} " if len(label) + 1 + len(percent) <= room else ""
    rest = room - len(left) - len(percent)
    if rest >= len(counts) + 10:
        cells = min(rest - len(counts) - 3, 40)
        filled = int(share * cells)
        return f"{left}{percent} [{'#' * filled}{'.' * (cells - filled)}]{counts}"
    if rest >= len(counts):
        return f"{left}{percent}{counts}"
    return f"{left}{percent}"[:room]


class ConsoleHandler(logging.Handler):
    """Shows the library's warnings as lines on standard error, each text once."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._seen:
            self._seen.add(text)
            self._console.important(f"{record.levelname.lower()}: {text}")


def _binary(stream: object) -> BinaryIO | None:
    # None when the descriptor was closed before Python started.
    return getattr(stream, "buffer", None)


def _is_terminal(stream: BinaryIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def _give_up(stream: BinaryIO) -> None:
    """Let the descriptor lead nowhere, so that flushing what is buffered at exit doesn't fail once more."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
    except (OSError, ValueError):
        pass


def _one_line(text: str) -> str:
    """Control characters (of a file's name, of somebody's prompt) must not reach the terminal."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


def printable(text: str, limit: int) -> str:
    """The start of a text on one line, at most `limit` characters, without control characters."""
    line = " ".join(_one_line(text[: limit * 2]).split())
    return line if len(line) <= limit and len(text) <= limit * 2 else f"{line[: limit - 1]}…"
