"""How the tests talk to the chat: on a terminal of 20 columns (a pty), or over a pipe in this process."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli.commands import call, llama

from mlxgen.cli.overview import look
from mlxgen.judge import rebuild_text
from mlxgen.models.config import read_config
from mlxgen.models.load import LoadOptions, read_tokenizer

COLUMNS = 20


class Terminal:
    """A process on a pseudo-terminal; what it shows is gathered in `shown`."""

    def __init__(self, args: list[str]) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlxgen", *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.shown = b""
        self._position = 0

    def wait_for(self, pattern: bytes, timeout: float = 60) -> bytes:
        """Read until something new matches; what came before it."""
        deadline = time.monotonic() + timeout
        while True:
            match = re.search(pattern, self.shown[self._position :])
            if match:
                before = self.shown[self._position : self._position + match.start()]
                self._position += match.end()
                return before
            if not self._read(deadline):
                raise AssertionError(f"no {pattern!r} in {self.shown[self._position :]!r}")

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:  # Linux's end of file
            return False
        self.shown += data
        return bool(data)

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def close(self) -> int:
        while self._read(time.monotonic() + 30):
            pass
        os.close(self.master)
        return self.process.wait(timeout=30)


def talk(
    capfdbinary: Any,
    monkeypatch: pytest.MonkeyPatch,
    lines: bytes,
    *args: str,
    model: bool = True,
    ignore_eos: bool = True,
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines), isatty=lambda: False))
    chosen = ["--model", llama()] if model else []
    chosen += ["--ignore-eos"] if ignore_eos else []
    result = call(capfdbinary, "chat", *chosen, "--max-tokens", "6", *args)
    return result.code, result.out.decode(), result.err


def turns(path: Path) -> list[tuple[str, str]]:
    """The conversation in a snapshot: (role, text), of answers the text as it was shown."""
    history = look(path).history
    tokenizer = read_tokenizer(Path(llama()), read_config(Path(llama())), LoadOptions())
    return [
        (turn.role, turn.text if turn.reply is None else rebuild_text(tokenizer, turn.reply).text)
        for turn in history.turns
    ]
