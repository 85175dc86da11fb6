"""A kill or a power cut at any system call leaves the old or the new state, and nothing promised is lost.

The life of a snapshot is run once per system call that changes something, and stopped dead there: before the call,
after it, or (a write) half-way through. For a power cut the folder is then rebuilt from what had been flushed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from snapshot.folders import EARLY, KV, LATE, MIDDLE, PREP, STATE_1, STATE_2, build, plain

from mlxgen.errors import SnapshotError
from mlxgen.snapshot import recovery
from mlxgen.snapshot.store import FileEntry, HostArray, Record, SnapshotStore, read_only

CALLS = ("open", "write", "pwrite", "fsync", "rename", "unlink", "ftruncate", "mkdir", "rmdir", "chmod", "fchmod")


class Killed(BaseException):
    pass


class Disk:
    """What would be on the disk after a power cut: contents and folder entries as of their last flush."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents: dict[int, bytes] = {}
        self.entries: dict[str, int] = {}
        if folder.exists():
            for name in os.listdir(folder):
                self.flush_file((folder / name).stat().st_ino)
            self.flush_folder()

    def created(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino  # may be that of a file deleted since the folder was last flushed
        for name in [name for name, known in self.entries.items() if known == inode]:
            self.contents[-inode] = self.contents[inode]
            self.entries[name] = -inode
        self.contents[inode] = b""

    def flush(self, fd: int) -> None:
        found = os.fstat(fd)
        if self.folder.exists() and found.st_ino == self.folder.stat().st_ino:
            self.flush_folder()
        else:
            self.flush_file(found.st_ino)

    def flush_file(self, inode: int) -> None:
        for name in os.listdir(self.folder):
            if (self.folder / name).lstat().st_ino == inode:
                self.contents[inode] = (self.folder / name).read_bytes()

    def flush_folder(self) -> None:
        self.entries = {name: (self.folder / name).lstat().st_ino for name in os.listdir(self.folder)}

    def cut_power(self, *, renames_kept: bool, data: str) -> None:
        """Leave only what must have survived; optionally the newer folder entries, or more of the newer data."""
        if not self.folder.exists():
            return
        newest = {
            (self.folder / name).lstat().st_ino: (self.folder / name).read_bytes() for name in os.listdir(self.folder)
        }
        if renames_kept:
            self.flush_folder()
        shutil.rmtree(self.folder)
        self.folder.mkdir(0o700)
        for name, inode in self.entries.items():
            content = self.contents.get(inode, b"")
            new = newest.get(inode, content)
            if data == "half" and new.startswith(content):
                content = new[: (len(content) + len(new)) // 2]
            elif data == "zeros" and len(new) > len(content):
                content += bytes(len(new) - len(content))
            (self.folder / name).write_bytes(content)


@dataclass
class Promises:
    """What the run has said so far; `tried` is what may have happened without having been said."""

    created: bool = False
    acked: list[Record] = field(default_factory=list)
    flushed: int = 0
    tried: list[Record] = field(default_factory=list)
    committed: int = 0
    tried_commit: int = 0
    bodies: dict[int, tuple[Any, list[FileEntry], int]] = field(default_factory=dict)
    contents: dict[str, dict[str, HostArray]] = field(default_factory=dict)


class Bomb:
    """Lets `at` changing system calls happen, stops at the next one, and fails all later ones: the process is dead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, when: str, disk: Disk) -> None:
        self.count = 0
        self.dead = False
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name), at, when, disk))

    def _wrap(self, name: str, real: Callable[..., Any], at: int, when: str, disk: Disk) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            if self.dead:
                raise Killed
            self.count += 1
            due = self.count > at
            self.dead = due
            if due and when == "before":
                raise Killed
            if name == "fsync":
                disk.flush(args[0])
                result = None
            elif due and when == "half" and name == "write":
                result = real(args[0], args[1][: len(args[1]) // 2])
            else:
                result = real(*args, **kwargs)
            if name == "open":
                new = os.fstat(result).st_size == 0
                if new:
                    disk.created(result)
                if due:
                    os.close(result)
            if due:
                raise Killed
            return result

        return call


def append(store: SnapshotStore, said: Promises, records: list[Record], *, sync: bool = False) -> None:
    said.tried = said.acked + records
    store.append(records, sync=sync)
    said.acked = said.tried
    if sync:
        said.flushed = len(said.acked)


def put(store: SnapshotStore, said: Promises, kind: str, arrays: dict[str, HostArray]) -> FileEntry:
    entry = store.put(kind, arrays, meta={"n": len(arrays)})
    said.contents[entry.name] = arrays
    return entry


def commit(store: SnapshotStore, said: Promises, files: list[FileEntry]) -> None:
    said.tried_commit = said.committed + 1
    pin = store.pin()
    said.bodies[said.tried_commit] = ({"step": said.tried_commit}, files, pin.num_records)
    said.committed = store.commit({"step": said.tried_commit}, files, pin)
    said.flushed = max(said.flushed, pin.num_records)


def life(path: Path, said: Promises, stores: list[SnapshotStore]) -> None:
    """Create, save three times with files coming and going, close, open, save once more."""
    store = SnapshotStore.create(path, overwrite=path.exists())
    stores.append(store)
    said.created = True
    append(store, said, EARLY[:1])
    append(store, said, EARLY[1:], sync=True)
    prep = put(store, said, "prep", PREP)
    first = put(store, said, "state", STATE_1)
    commit(store, said, [prep, first])
    append(store, said, MIDDLE)
    kv = put(store, said, "kv", KV)
    second = put(store, said, "state", STATE_2)
    commit(store, said, [prep, kv, second])
    append(store, said, LATE)
    third = put(store, said, "state", STATE_1)
    commit(store, said, [prep, kv, third])
    append(store, said, EARLY)
    store.close()
    said.flushed = len(said.acked)
    store = SnapshotStore.open(path)
    stores.append(store)
    more = put(store, said, "kv", KV)
    commit(store, said, [prep, kv, more, third])
    store.close()


def hold(path: Path, said: Promises, *, num_records: int) -> None:
    """Open what is left, compare it with what was promised, and go on from it."""
    if not said.created:
        return hold_unbegun(path)
    view = read_only(path)
    with SnapshotStore.open(path) as store:
        assert store.records == view.records == said.tried[: len(store.records)]
        assert len(store.records) >= num_records
        generation = 0 if store.manifest is None else store.manifest.generation
        assert generation in (said.committed, said.tried_commit)
        for note in store.notes:
            assert note.startswith("journal.log") or "can't be used" in note
        if store.manifest is not None:
            body, files, pinned = said.bodies[generation]
            assert store.manifest.body == body
            assert list(store.manifest.files) == files
            assert store.manifest.pin.num_records == pinned <= len(store.records)
            for entry in files:
                assert plain(store.read(entry)) == plain(said.contents[entry.name])
        files = list(store.manifest.files) if store.manifest else []
        store.append(Record("turn", "goes on"))
        store.commit({"on": True}, [*files, store.put("kv", KV, meta={})], store.pin())
        assert store.verify() == []
        assert all(recovery.is_ours(name) and not name.startswith(".") for name in os.listdir(path))
    with SnapshotStore.open(path) as store:
        assert store.notes == []
        assert store.records == [*view.records, Record("turn", "goes on")]
        assert store.manifest is not None
        assert store.manifest.body == {"on": True}
    return None


def hold_unbegun(path: Path) -> None:
    if path.exists():
        try:
            with SnapshotStore.open(path) as store:
                assert (store.records, store.manifest) == ([], None)
        except SnapshotError as exc:
            assert "begin again with overwrite" in str(exc)  # either outcome is right
    with SnapshotStore.create(path, overwrite=path.exists()) as store:
        assert (store.records, store.manifest, store.notes) == ([], None, [])


def stop_at(path: Path, monkeypatch: pytest.MonkeyPatch, at: int, when: str) -> tuple[Promises, Disk, bool]:
    """Run the life up to a system call; what was promised, the disk, and whether the call was reached."""
    said, disk, stores = Promises(), Disk(path), list[SnapshotStore]()
    with monkeypatch.context() as patch:
        bomb = Bomb(patch, at, when, disk)
        try:
            life(path, said, stores)
        except Killed:
            pass
        for store in stores:
            try:
                store.close()  # gives the lock back, as the end of a process does; writes nothing any more
            except Killed:
                pass
    return said, disk, bomb.dead


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.parametrize("when", ["before", "after", "half"])
def test_killed_at_every_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    at, reached = 0, True
    while reached:
        path = tmp_path / str(at) / "run.mlxgen"
        path.parent.mkdir()
        said, _, reached = stop_at(path, monkeypatch, at, when)
        hold(path, said, num_records=len(said.acked))
        at += 1
    assert at > 60
    assert said.committed == 4


@pytest.mark.parametrize("data", ["synced", "half", "zeros"])
@pytest.mark.parametrize("renames_kept", [False, True])
def test_power_cut_at_every_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames_kept: bool, data: str
) -> None:
    at, reached = 0, True
    while reached:
        path = tmp_path / str(at) / "run.mlxgen"
        path.parent.mkdir()
        said, disk, reached = stop_at(path, monkeypatch, at, "after")
        disk.cut_power(renames_kept=renames_kept, data=data)
        hold(path, said, num_records=said.flushed)
        at += 1
    assert at > 60


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "half"])
def test_killed_while_overwriting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, power: bool) -> None:
    outcomes = set()
    for at in range(16):
        path = tmp_path / str(at) / "run.mlxgen"
        path.parent.mkdir()
        build(path)
        said, disk, _ = stop_at(path, monkeypatch, at, when)
        if power:
            disk.cut_power(renames_kept=False, data="synced")
        if said.created:
            outcomes.add("new")
            hold(path, said, num_records=said.flushed if power else len(said.acked))
            continue
        with SnapshotStore.open(path) as store:
            if store.records:
                outcomes.add("old")
                assert store.records == EARLY + MIDDLE + LATE
                assert store.manifest is not None
                assert store.manifest.generation == 2
                assert store.verify() == []
            else:
                outcomes.add("begun")
                assert store.manifest is None
                generation = store.commit({}, [], store.pin())
                assert {*os.listdir(path)} == {"journal.log", "lock", f"manifest-{generation:06d}.json"}
    assert outcomes >= {"old", "begun"}


WRITER = """
import sys
import numpy as np
from mlxgen.snapshot.store import HostArray, Record, SnapshotStore
number = 0
with SnapshotStore.open(sys.argv[1]) as store:
    number = len(store.records)
    print("ready", number, flush=True)
    while True:
        store.append(Record("tokens", number))
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()
        number += 1
        if number % 5 == 0:
            state = HostArray.from_numpy(np.full(1000, number, np.int32))
            store.commit({"number": number}, [store.put("state", {"a": state}, meta={})], store.pin())
"""


def test_really_killed_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "run.mlxgen"
    SnapshotStore.create(path).close()
    for turn in range(5):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready")
        time.sleep(0.05 + 0.013 * turn)
        process.send_signal(signal.SIGKILL)
        printed = process.communicate()[0].split()
        with SnapshotStore.open(path) as store:
            numbers = [record.data for record in store.records]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) > int(printed[-1])
            assert store.notes == []
            if store.manifest is not None:
                number = store.manifest.body["number"]
                assert store.manifest.pin.num_records == number
                assert store.read(store.manifest.files[0])["a"].numpy().tolist() == [number] * 1000
    assert store.manifest is not None
