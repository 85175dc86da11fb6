"""The chat in a terminal of 20 columns (a pty), and over a pipe."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli.commands import LONG, call, llama, snapshots
from cli.talking import COLUMNS, Terminal, talk

from mlxgen.cli.console import bar_line


def test_chat_on_a_narrow_terminal(capfdbinary: Any, cache: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.mlxgen"
    terminal = Terminal(
        ["chat", "--model", llama(), "--ignore-eos", "--max-tokens", str(LONG), "--prefill-step-size", "64"]
    )
    try:
        terminal.wait_for(b"> ")
        terminal.type(b"word " * 150 + b"\n")
        # Bars while the prompt is read, then Ctrl-C in the middle of the answer keeps it.
        terminal.wait_for(rb"prompt +100%")
        terminal.wait_for(rb"\x1b\[K[^\r]{30,}")
        terminal.type(b"\x03")
        terminal.wait_for(rb"/continue goes on")
        terminal.wait_for(b"> ")
        terminal.type(b"/undo\n")
        terminal.wait_for(rb"took back: word word")
        terminal.wait_for(b"> ")
        terminal.type(b"second\n")
        terminal.wait_for(rb"prompt +100%")
        terminal.wait_for(rb"\x1b\[K[^\r]{30,}")
        terminal.type(b"\x03")
        terminal.wait_for(rb"/continue goes on")
        terminal.wait_for(b"> ")
        terminal.type(f"/save {saved}\n".encode())
        terminal.wait_for(rb"saved /")
        terminal.wait_for(b"> ")
        # At the prompt: once asks, twice leaves.
        terminal.type(b"\x03")
        terminal.wait_for(rb"Ctrl-C again leaves")
        terminal.type(b"\x03")
        terminal.wait_for(rb"chat --resume")
    finally:
        code = terminal.close()
    assert code == 130
    bars = re.findall(rb"\r\x1b\[K([^\r\n]*?)(?=\r)", terminal.shown)
    drawn = [bar.decode() for bar in bars if b"%" in bar and b"prompt" in bar]
    assert len(drawn) >= 3
    assert all(len(bar) < COLUMNS for bar in drawn)
    shown = json.loads(call(capfdbinary, "snapshots", "show", str(saved), "--json").out)
    assert [turn["role"] for turn in shown["turns"]] == ["user", "assistant"]
    assert shown["turns"][0]["text"] == "second"
    assert shown["turns"][1]["tokens"] > 0
    assert len(snapshots(cache)) == 1
    history = cache.parent / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "second" in history.read_text()


def test_ctrl_c_the_moment_a_prompt_appears_is_never_lost(cache: Path) -> None:
    terminal = Terminal(["chat", "--model", llama()])
    try:
        for _ in range(40):
            terminal.wait_for(b"> ")
            terminal.type(b"\x03")
            terminal.wait_for(rb"Ctrl-C again leaves", timeout=10)
            terminal.wait_for(b"> ")
            terminal.type(b"\n")  # an empty line: the next Ctrl-C is a first one again
    finally:
        terminal.process.terminate()
        code = terminal.close()
    assert code == 143


def test_sigterm_at_the_prompt_leaves(cache: Path) -> None:
    terminal = Terminal(["chat", "--model", llama(), "--ignore-eos", "--max-tokens", "3"])
    try:
        terminal.wait_for(b"> ")
        terminal.type(b"hello\n")
        terminal.wait_for(rb"\n> ")
        terminal.process.terminate()
        terminal.wait_for(rb"chat --resume")
    finally:
        code = terminal.close()
    assert code == 143
    assert len(snapshots(cache)) == 1


def test_commands_over_a_pipe(capfdbinary: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "talk.mlxgen"
    lines = b"hello\n/retry\n/continue\nbye\n/undo\n//x\n/nonsense\n"
    lines += b"/image\n/image nowhere.png\n/save\n\xff\n\n/exit\nnever\n"
    code, out, err = talk(capfdbinary, monkeypatch, lines, "--snapshot", str(path), "--system", "Be brief.")
    assert code == 0
    assert "unknown command /nonsense" in err
    assert "/image needs a path" in err
    assert "nowhere.png" in err
    assert "/save needs a path" in err
    assert "not UTF-8" in err
    assert f"chat --resume {path}" in err
    assert "with --temp 0 the answer is the same" in err
    assert out.count("\n") >= 5
    shown = json.loads(call(capfdbinary, "snapshots", "show", str(path), "--json").out)
    roles = [(turn["role"], turn["text"], turn["tokens"]) for turn in shown["turns"]]
    assert roles == [
        ("system", "Be brief.", None),
        ("user", "hello", None),
        ("assistant", "", 12),  # six, answered again, and six more
        ("user", "/x", None),
        ("assistant", "", 6),
    ]
    assert snapshots(cache) == []
    # Go on with it in a new session; only the new turn is prefilled.
    code, _, err = talk(capfdbinary, monkeypatch, b"more\n", "--resume", str(path), model=False)
    assert code == 0
    assert "2 answers so far" in err
    shown = json.loads(call(capfdbinary, "snapshots", "show", str(path), "--json").out)
    assert [turn["text"] for turn in shown["turns"] if turn["role"] == "user"] == ["hello", "/x", "more"]


def test_a_retry_is_another_answer(capfdbinary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("--temp", "1.0", "--seed", "5")
    _, once, _ = talk(capfdbinary, monkeypatch, b"hello\n", *args)
    _, twice, _ = talk(capfdbinary, monkeypatch, b"hello\n/retry\n", *args)
    assert twice.startswith(once)
    assert len(twice) > len(once)
    assert twice.removeprefix(once) != once


def test_nothing_said_leaves_nothing(capfdbinary: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = talk(capfdbinary, monkeypatch, b"/help\n/undo\n/retry\n/continue\n")
    assert code == 0
    assert out == ""
    assert "//text" in err
    assert err.count("error:") == 3
    assert "--resume" not in err
    assert snapshots(cache) == []


def test_bars_fit_any_terminal() -> None:
    for width in range(1, 130):
        for label in ("prompt", "encode frames", "download MB"):
            for done, total in ((0, 1), (7, 40), (123456, 999999), (5, 0)):
                assert len(bar_line(label, done, total, width)) <= width - 1


def test_bars_say_what_there_is_room_for() -> None:
    assert bar_line("prompt", 512, 2048, 8) == " 25%"
    assert bar_line("prompt", 512, 2048, 20) == "prompt  25%"
    assert bar_line("prompt", 512, 2048, 24) == "prompt  25% 512/2048"
    assert bar_line("prompt", 512, 2048, 40) == "prompt  25% [####............] 512/2048"
