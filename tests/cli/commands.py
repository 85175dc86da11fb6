"""How the tests run the command: in this process where nothing is lost by it, else in a process of its own."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny

from mlxgen.cli.main import main

LONG = 3000
"""More tokens than any test waits for (the tiny models' context has room for 4096)."""


def llama() -> str:
    return str(tiny.folder("llama"))


def generate_args(*extra: str, prompt: str = "hello there", max_tokens: int = 40, ignore_eos: bool = True) -> list[str]:
    args = ["generate", "--model", llama(), "--prompt", prompt, "--max-tokens", str(max_tokens)]
    return [*args, *(["--ignore-eos"] if ignore_eos else []), *extra]


@dataclass
class Result:
    code: int
    out: bytes
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def call(capfdbinary: Any, *args: str) -> Result:
    """Run the command in this process."""
    capfdbinary.readouterr()
    try:
        code = main(args)
    except SystemExit as stop:  # argparse's
        code = int(stop.code or 0)
    out, err = capfdbinary.readouterr()
    return Result(code, out, err.decode())


@dataclass
class Process:
    """`python -m mlxgen` with its standard output read line by line, standard error collected aside."""

    args: list[str]
    text: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.popen = subprocess.Popen(
            self.command(self.args),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._err: list[bytes] = []
        self._reader = threading.Thread(target=lambda: self._err.append(self.popen.stderr.read()))
        self._reader.start()

    @staticmethod
    def command(args: list[str]) -> list[str]:
        return [sys.executable, "-m", "mlxgen", *args]

    def tokens(self, count: int) -> list[dict[str, Any]]:
        """Read events until there are `count` tokens (or the end)."""
        while len(of(self.events, "token")) < count:
            line = self.popen.stdout.readline()
            if not line:
                break
            self.events.append(json.loads(line))
        return self.events

    def narrow(self) -> None:
        """Make the pipe small (where that can be done), so that the process can't run far ahead of its reader."""
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            fcntl.fcntl(self.popen.stdout, fcntl.F_SETPIPE_SZ, 4096)

    def signal(self, signum: int) -> None:
        self.popen.send_signal(signum)

    def finish(self) -> Result:
        """Read the rest and wait for the end."""
        rest = b"" if self.popen.stdout.closed else self.popen.stdout.read()
        code = self.popen.wait(timeout=120)
        self._reader.join()
        if not self.text:
            for line in rest.splitlines():
                # After kill -9 the last line may be cut.
                if code != -signal.SIGKILL or line.endswith(b"}"):
                    self.events.append(json.loads(line))
        return Result(code, rest, b"".join(self._err).decode())


def snapshots(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []
