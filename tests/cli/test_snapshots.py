"""Listing, showing and removing snapshots; the cache folder's budget."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli.commands import call, generate_args, llama, snapshots

from mlxgen.cli import cached
from mlxgen.errors import SnapshotLockedError
from mlxgen.models import load
from mlxgen.options import ReplyOptions
from mlxgen.session import Session


def make(path: Path, *, finished: bool, age_s: float = 0.0, prompt: str = "hello") -> Session:
    """A snapshot with a finished or a stopped reply, changed so long ago. The session holds it until closed."""
    session = Session(load(llama()))
    session.autosave(path)
    events = session.stream(prompt, reply=ReplyOptions(max_tokens=4 if finished else 50, ignore_eos=True))
    for _ in zip(range(8), events, strict=False):
        pass
    if finished:
        for _ in events:
            pass
    session.close()
    changed = os.stat(path / "journal.log").st_mtime - age_s
    os.utime(path / "journal.log", (changed, changed))
    return session


def test_list_show_remove(capfdbinary: Any, cache: Path) -> None:
    assert call(capfdbinary, "snapshots", "list").err.startswith("no snapshots in")
    make(cache / "old.mlxgen", finished=True, age_s=7200, prompt="first \x1b[31m question")
    make(cache / "new.mlxgen", finished=False, age_s=5, prompt="second question")
    (cache / "other").mkdir()
    text = call(capfdbinary, "snapshots", "list").out.decode()
    new, old = text.splitlines()
    assert new.startswith("new.mlxgen")
    assert "decode" in new
    assert "second question" in new
    assert "2 h" in old
    assert "finished" in old
    assert "\x1b" not in text
    entries = [json.loads(line) for line in call(capfdbinary, "snapshots", "list", "--json").out.splitlines()]
    assert [entry["phase"] for entry in entries] == ["decode", "finished"]
    assert set(entries[0]) == {"snapshot", "changed", "size_bytes", "model", "phase", "position", "prompt"}
    assert entries[1]["position"] == 4
    same = call(capfdbinary, "snapshots", "list", str(cache)).out
    assert same.decode() == call(capfdbinary, "snapshots", "list").out.decode()

    shown = call(capfdbinary, "snapshots", "show", str(cache / "new.mlxgen"))
    text = shown.out.decode()
    assert shown.code == 0
    for expected in ("phase     decode,", "second question", "kv-000000.safetensors", "sound", llama(), "mlx 0."):
        assert expected in text
    assert call(capfdbinary, "snapshots", "show", str(cache / "new.mlxgen"), "--preview", "x.png").code == 1

    assert call(capfdbinary, "snapshots", "remove", str(cache / "old.mlxgen")).code == 0
    assert snapshots(cache) == ["new.mlxgen", "other"]
    failed = call(capfdbinary, "snapshots", "remove", str(cache / "other"), str(cache / "new.mlxgen"))
    assert failed.code == 1
    assert "not an mlxgen snapshot" in failed.err
    assert snapshots(cache) == ["other"]


def test_damage_is_shown(capfdbinary: Any, cache: Path) -> None:
    make(cache / "run.mlxgen", finished=False)
    file = next((cache / "run.mlxgen").glob("kv-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    shown = call(capfdbinary, "snapshots", "show", str(cache / "run.mlxgen"))
    assert shown.code == 1
    assert "problem " in shown.out.decode()
    assert "sound" not in shown.out.decode()
    (cache / "run.mlxgen" / "journal.log").write_bytes(b"nonsense\n")
    for manifest in (cache / "run.mlxgen").glob("manifest-*"):
        manifest.write_bytes(b"nonsense")
    listed = call(capfdbinary, "snapshots", "list")
    assert listed.code == 0
    assert b"damaged" in listed.out
    assert call(capfdbinary, "snapshots", "show", str(cache / "run.mlxgen")).code == 1


def test_budget_takes_the_oldest_finished_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (name, finished) in enumerate(
        [("stopped-old", False), ("finished-old", True), ("finished-new", True), ("stopped-new", False)]
    ):
        make(cache / f"{name}.mlxgen", finished=finished, age_s=1000 - 100 * number)
    sizes = {path.name: cached.folder_size(path) for path in cache.iterdir()}
    assert cached.make_room() == []
    monkeypatch.setenv(cached.BUDGET_VARIABLE, str(sum(sizes.values()) - 1))
    assert [path.name for path in cached.make_room()] == ["finished-old.mlxgen"]
    monkeypatch.setenv(cached.BUDGET_VARIABLE, str(sizes["stopped-new.mlxgen"]))
    assert [path.name for path in cached.make_room()] == ["finished-new.mlxgen", "stopped-old.mlxgen"]
    assert snapshots(cache) == ["stopped-new.mlxgen"]


def test_budget_leaves_what_is_in_use(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(cache / "free.mlxgen", finished=False)
    session = Session(load(llama()))
    session.autosave(cache / "used.mlxgen")
    monkeypatch.setenv(cached.BUDGET_VARIABLE, "0")
    assert [path.name for path in cached.make_room()] == ["free.mlxgen"]
    with pytest.raises(SnapshotLockedError):
        cached.remove(cache / "used.mlxgen")
    session.close()
    # Half removed by a process that was killed meanwhile.
    (cache / ".removing-0123").mkdir()
    (cache / ".removing-0123" / "x").write_text("x")
    assert [path.name for path in cached.make_room()] == ["used.mlxgen"]
    assert snapshots(cache) == []


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("0", 0), ("1000", 1000), ("4G", 4 << 30), ("1.5 MiB", 3 << 19), ("2kb", 2048)]
)
def test_budget_sizes(monkeypatch: pytest.MonkeyPatch, text: str, num_bytes: int) -> None:
    monkeypatch.setenv(cached.BUDGET_VARIABLE, text)
    assert cached.budget_bytes() == num_bytes


def test_generate_makes_room(capfdbinary: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(cache / "old.mlxgen", finished=True)
    monkeypatch.setenv(cached.BUDGET_VARIABLE, "1")
    assert call(capfdbinary, *generate_args(max_tokens=2)).code == 0
    assert snapshots(cache) == []
