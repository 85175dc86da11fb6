"""Signals, time limits, kills, closed pipes: stopped at once, saved, and gone on with to the same bytes."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from cli.commands import LONG, Process, call, generate_args, of, snapshots

from mlxgen.cli.output import JsonOutput
from mlxgen.events import Event, Token

SAMPLED = ("--temp", "0.9", "--top-p", "0.95", "--repetition-penalty", "1.1", "--seed", "3", "--logprobs", "--json")
SIGNALS = {
    signal.SIGINT: ("interrupt", 130),
    signal.SIGTERM: ("terminate", 143),
    signal.SIGHUP: ("hangup", 129),
    signal.SIGKILL: (None, -signal.SIGKILL),
}


def by_index(events: list[dict[str, Any]]) -> dict[int, tuple[int, str, float]]:
    return {event["index"]: (event["id"], event["text"], event["logprob"]) for event in of(events, "token")}


def test_ten_cycles_of_stopping_and_going_on(capfdbinary: Any, cache: Path) -> None:
    """By every signal and by kill -9, each time in a new process; together they say what one run says."""
    tokens = 700
    whole = call(capfdbinary, *generate_args(*SAMPLED, max_tokens=tokens)).events
    expected = by_index(whole)
    assert len(expected) == tokens
    got: dict[int, tuple[int, str, float]] = {}
    path = ""
    kinds = itertools.cycle(SIGNALS)
    for cycle in range(10):
        signum = next(kinds)
        process = Process(
            generate_args(*SAMPLED, max_tokens=tokens) if cycle == 0 else ["resume", path, "--json"],
        )
        process.narrow()
        process.tokens(1 + cycle % 4)
        process.signal(signum)
        result = process.finish()
        reason, code = SIGNALS[signum]
        started = process.events[0]
        assert started["event"] == "started", (started, result.err)
        path = started["snapshot"]
        assert started["resumed"] is (cycle > 0)
        assert started["position"] >= len(got)
        if cycle == 0:
            assert started["position"] == 0
        seen = by_index(process.events)
        assert all(got.get(index, token) == token for index, token in seen.items())
        got |= seen
        assert result.code == code
        if reason is not None:
            finished, saved = process.events[-2:]
            assert (finished["finish_reason"], finished["cancel_reason"]) == ("cancelled", reason)
            assert saved == {"event": "saved", "snapshot": path, "position": max(got) + 1}
            assert finished["text"] == "".join(expected[index][1] for index in range(max(got) + 1))
            assert finished["usage"]["prefilled_tokens"] == (17 if cycle == 0 else 0)
            command = shlex.split(result.err.strip().rpartition("go on with: ")[2])
            assert command[-2:] == ["resume", path]
    last = call(capfdbinary, "resume", path, "--json")
    got |= by_index(last.events)
    assert last.code == 0
    finished = of(last.events, "finished")[0]
    assert finished["finish_reason"] == "length"
    assert finished["text"] == whole[-1]["text"]
    # After a kill, a token at the seam may have been recorded and not printed.
    assert all(got[index] == expected[index] for index in got)
    assert len(expected) - len(got) <= 3
    assert snapshots(cache) == [os.path.basename(path)]


def test_text_of_two_processes_joins(capfdbinary: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "run.mlxgen")
    whole = call(capfdbinary, *generate_args("--temp", "0.9", "--seed", "2", max_tokens=400))
    process = Process(generate_args("--temp", "0.9", "--seed", "2", "--snapshot", path, max_tokens=400), text=True)
    first = process.popen.stdout.read(20)
    process.signal(signal.SIGINT)
    stopped = process.finish()
    first += stopped.out
    assert stopped.code == 130
    assert len(first) < len(whole.out)
    # The command that was printed is the one to run.
    command = shlex.split(stopped.err.strip().rpartition("go on with: ")[2])
    done = subprocess.run(command, capture_output=True, check=True)
    assert first + done.stdout == whole.out
    assert b"tokens were there already" in done.stderr
    again = call(capfdbinary, "resume", path, "--from-start")
    assert again.out == whole.out


def test_from_start_prints_all(capfdbinary: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "run.mlxgen")
    whole = call(capfdbinary, *generate_args(max_tokens=30))
    call(capfdbinary, *generate_args("--snapshot", path, max_tokens=12))
    more = call(capfdbinary, "resume", path, "--from-start", "--max-tokens", "18")
    assert more.out == whole.out


def test_closed_pipe_two_processes_and_a_look_meanwhile(
    capfdbinary: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(generate_args("--json", max_tokens=LONG))
    path = process.tokens(5)[0]["snapshot"]
    # A second process is refused, and told who has it; the first goes on.
    refused = call(capfdbinary, "resume", path, "--json")
    assert refused.code == 1
    assert refused.events[0]["type"] == "SnapshotLockedError"
    assert f"in use by process {process.popen.pid}" in refused.err
    removed = call(capfdbinary, "snapshots", "remove", path)
    assert removed.code == 1
    assert "in use by process" in removed.err
    # Looking needs no lock.
    shown = json.loads(call(capfdbinary, "snapshots", "show", path, "--json").out)
    assert (shown["phase"], shown["problems"]) == ("decode", [])
    assert len(process.tokens(10)) > 10
    process.popen.stdout.close()
    result = process.finish()
    assert result.code == 141
    assert result.err == ""
    assert snapshots(cache) == [os.path.basename(path)]
    # `resume` alone finds it; its own time limit stops it again (the reader of its events is slow).
    show, began_s = JsonOutput.event, time.monotonic()

    def show_slowly(output: JsonOutput, event: Event) -> None:
        show(output, event)
        if isinstance(event, Token):
            time.sleep(max(0.0, began_s + 5 - time.monotonic()))

    monkeypatch.setattr(JsonOutput, "event", show_slowly)
    resumed = call(capfdbinary, "resume", "--json", "--timeout", "4")
    assert resumed.code == 124
    assert resumed.events[0]["snapshot"] == path
    assert resumed.events[0]["position"] >= 10
    assert len(of(resumed.events, "token")) == 1
    assert resumed.events[-2]["cancel_reason"] == "deadline"
    assert f"resuming {path}" in resumed.err
    assert "time is up after" in resumed.err


def test_no_time_at_all(capfdbinary: Any, cache: Path, tmp_path: Path) -> None:
    result = call(capfdbinary, *generate_args("--json", "--timeout", "0"))
    assert result.code == 124
    assert [event["event"] for event in result.events] == ["finished"]
    assert result.events[0]["cancel_reason"] == "deadline"
    assert "give the command again" in result.err
    assert snapshots(cache) == []
    # Stopped while the model is loaded again: the snapshot is as it was, and the text so far is told.
    path = str(tmp_path / "run.mlxgen")
    call(capfdbinary, *generate_args("--json", "--snapshot", path, max_tokens=10))
    stopped = call(capfdbinary, "resume", path, "--max-tokens", "5", "--timeout", "0", "--json")
    assert stopped.code == 124
    assert len(stopped.events[-1]["text"]) > 5
    more = call(capfdbinary, "resume", path, "--max-tokens", "5", "--json")
    assert more.events[0]["position"] == 10


def test_second_press_leaves_at_once(capfdbinary: Any) -> None:
    """The reader has stopped reading, so the process hangs in a write: only a second Ctrl-C gets out of that."""
    process = Process(generate_args("--json", max_tokens=LONG))
    process.narrow()  # while it is empty: a pipe can't be made smaller than what is in it
    events = process.tokens(1)
    path = events[0]["snapshot"]
    journal = os.path.join(path, "journal.log")
    size = -1
    while os.path.getsize(journal) != size:
        size = os.path.getsize(journal)
        time.sleep(0.6)
    process.signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.popen.wait(timeout=0.5)
    process.signal(signal.SIGINT)
    assert process.popen.wait(timeout=10) == 130
    process.popen.stdout.close()
    result = process.finish()
    assert result.err.count("\n") == 1
    assert "left at once; go on with:" in result.err
    resumed = call(capfdbinary, "resume", path, "--json", "--max-tokens", "1")
    assert resumed.events[0]["position"] > 10
    assert resumed.code == 0


def test_standard_streams_that_are_closed(tmp_path: Path) -> None:
    """`>&- 2>&-`: nothing to write to is no reason to fail before the reply is saved."""
    path = tmp_path / "run.mlxgen"
    args = generate_args("--snapshot", str(path), max_tokens=5)
    command = shlex.join([*Process.command(args)])
    done = subprocess.run(["sh", "-c", f"{command} >&- 2>&-"], check=False)
    assert done.returncode == 0
    assert (path / "journal.log").is_file()
