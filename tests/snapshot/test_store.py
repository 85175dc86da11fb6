from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot.folders import CONTENT, EARLY, KV, LATE, MIDDLE, PREP, RECORDS, STATE_1, build, load, plain

from mlxgen.errors import InvalidValueError, SnapshotError, SnapshotLockedError
from mlxgen.snapshot import durable
from mlxgen.snapshot.store import HostArray, Record, SnapshotStore, is_snapshot, read_only


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.mlxgen"


def data_names(path: Path) -> set[str]:
    return {name for name in os.listdir(path) if name not in ("journal.log", "lock")}


def test_everything_comes_back(path: Path) -> None:
    build(path)
    with SnapshotStore.open(path) as store:
        assert store.records == RECORDS
        assert store.notes == []
        manifest = store.manifest
        assert manifest is not None
        assert (manifest.generation, manifest.body, manifest.pin.num_records) == (2, {"step": 2}, 3)
        assert [entry.name for entry in manifest.files] == [
            "prep-000.safetensors",
            "kv-000000.safetensors",
            "state-000001.safetensors",
        ]
        assert [entry.meta for entry in manifest.of_kind("kv")] == [{"start": 0, "end": 2}]
        for entry in manifest.files:
            assert plain(store.read(entry)) == plain(CONTENT[entry.name])
        assert store.verify() == []


def test_only_a_journal_is_a_snapshot(path: Path) -> None:
    with SnapshotStore.create(path) as store:
        assert (store.records, store.manifest, store.notes) == ([], None, [])
    assert load(path) == (None, [], [])
    with SnapshotStore.open(path) as store:
        store.append(RECORDS, sync=True)
    assert load(path) == (None, RECORDS, [])


def test_going_on_after_opening_is_the_same_as_never_having_closed(path: Path) -> None:
    build(path)
    with SnapshotStore.open(path) as store:
        assert store.manifest is not None
        store.append(Record("turn", 2))
        state = store.put("state", STATE_1, meta={})
        assert state.name == "state-000002.safetensors"
        assert store.commit({"step": 3}, [*store.manifest.files[:2], state], store.pin()) == 3
        assert data_names(path) == {
            "manifest-000002.json",
            "manifest-000003.json",
            "prep-000.safetensors",
            "kv-000000.safetensors",
            "state-000001.safetensors",
            "state-000002.safetensors",
        }
        assert store.verify() == []
    with SnapshotStore.open(path) as store:
        assert store.records == [*RECORDS, Record("turn", 2)]
        assert store.manifest is not None
        assert store.manifest.body == {"step": 3}
        assert store.notes == []


def test_equal_input_gives_equal_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * (2 * n))
    for name in ("a", "b"):
        build(tmp_path / name)
    names = sorted(os.listdir(tmp_path / "a"))
    assert names == sorted(os.listdir(tmp_path / "b"))
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "run.mlxgen"
    former = os.umask(umask)
    try:
        build(path)
        load(path)
    finally:
        os.umask(former)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    modes = {name: stat.S_IMODE((path / name).stat().st_mode) for name in os.listdir(path)}
    assert modes == dict.fromkeys(modes, 0o600)
    assert len(modes) >= 8


def test_a_folder_open_to_others_is_made_private_and_said_so(path: Path) -> None:
    build(path)
    path.chmod(0o755)
    _, _, notes = load(path)
    assert "mode 0755" in notes[0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_missing_parents_are_made_and_the_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with SnapshotStore.create("a/b/run.mlxgen") as store:
        assert store.path == tmp_path / "a" / "b" / "run.mlxgen"
        monkeypatch.chdir("/")
        store.put("kv", KV, meta={})


def test_an_existing_path_is_refused_without_overwrite(tmp_path: Path, path: Path) -> None:
    build(path)
    before = {name: (path / name).read_bytes() for name in os.listdir(path)}
    with pytest.raises(SnapshotError, match="is a snapshot already"):
        SnapshotStore.create(path)
    assert {name: (path / name).read_bytes() for name in os.listdir(path)} == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(SnapshotError, match="exists already"):
        SnapshotStore.create(tmp_path / "empty")


def test_overwrite_replaces_snapshots_and_empty_folders_only(tmp_path: Path, path: Path) -> None:
    build(path)
    (path / "notes.txt").write_text("the user's")
    with SnapshotStore.create(path, overwrite=True) as store:
        assert (store.records, store.manifest) == ([], None)
        assert store.put("kv", KV, meta={}).name == "kv-000000.safetensors"
    assert load(path) == (None, [], [])
    assert (path / "notes.txt").read_text() == "the user's"
    (tmp_path / "empty").mkdir()
    SnapshotStore.create(tmp_path / "empty", overwrite=True).close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kv-000000.safetensors").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        with pytest.raises(SnapshotError, match="another path"):
            SnapshotStore.create(tmp_path / name, overwrite=True)
    assert (tmp_path / "mine" / "kv-000000.safetensors").read_text() == "mine"
    assert os.listdir(tmp_path / "mine") == ["kv-000000.safetensors"]


def test_what_is_no_snapshot_is_not_opened_nor_touched(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "journal.log").write_text("today I ate cake\n")
    for name, message in (("no", "No such file"), ("empty", "holds no snapshot"), ("mine", "not an mlxgen snapshot")):
        for opener in (SnapshotStore.open, read_only):
            with pytest.raises(SnapshotError, match=message):
                opener(tmp_path / name)
        assert not is_snapshot(tmp_path / name)
    assert os.listdir(tmp_path / "empty") == []
    assert os.listdir(tmp_path / "mine") == ["journal.log"]


def test_is_snapshot(path: Path) -> None:
    build(path)
    assert is_snapshot(path)
    (path / "journal.log").unlink()
    assert is_snapshot(path)
    assert not is_snapshot(path / "manifest-000002.json")


def test_a_second_writer_is_refused_in_this_process(path: Path) -> None:
    with SnapshotStore.create(path) as store:
        for opener in (SnapshotStore.open, lambda p: SnapshotStore.create(p, overwrite=True)):
            with pytest.raises(SnapshotLockedError, match=f"process {os.getpid()}"):
                opener(path)
        store.append(RECORDS)
    assert load(path) == (None, RECORDS, [])


HOLDER = """
import sys
from mlxgen.snapshot.store import Record, SnapshotStore
store = SnapshotStore.open(sys.argv[1])
store.append(Record("turn", "from the other process"))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    build(path)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


def test_two_processes(path: Path, holder: subprocess.Popen[bytes]) -> None:
    with pytest.raises(SnapshotLockedError, match=f"in use by process {holder.pid}; wait for it or stop it"):
        SnapshotStore.open(path)
    with pytest.raises(SnapshotLockedError):
        SnapshotStore.create(path, overwrite=True)
    view = read_only(path)
    assert view.records == [*RECORDS, Record("turn", "from the other process")]
    assert view.verify() == []
    holder.kill()
    holder.wait()
    _, records, notes = load(path)
    assert records == view.records
    assert notes == []


def test_looking_changes_nothing(path: Path) -> None:
    build(path)
    with (path / "journal.log").open("ab") as file:
        file.write(b"torn")
    (path / ".tmp-0123456789abcdef").write_bytes(b"x")
    (path / "lock").unlink()
    before = {name: (path / name).read_bytes() for name in os.listdir(path)}
    view = read_only(path)
    assert view.records == RECORDS
    assert view.manifest is not None
    assert view.manifest.generation == 2
    assert "4 bytes after its first 5 records" in view.notes[0]
    assert plain(view.read(view.manifest.of_kind("kv")[0])) == plain(KV)
    assert {name: (path / name).read_bytes() for name in os.listdir(path)} == before


def test_looking_while_another_thread_commits(path: Path) -> None:
    build(path)
    stop = threading.Event()

    def write() -> None:
        with SnapshotStore.open(path) as store:
            while not stop.is_set():
                store.append(Record("tokens", [1]))
                store.commit({}, [store.put("state", STATE_1, meta={})], store.pin())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            view = read_only(path)
            assert view.manifest is not None
            assert view.manifest.pin.num_records <= len(view.records)
    finally:
        stop.set()
        writer.join()


def test_sweeping_takes_what_no_generation_names_and_nothing_else(path: Path) -> None:
    build(path)
    for name in (".tmp-0123456789abcdef", "kv-000009.safetensors", "manifest-000003.json"):
        (path / name).write_bytes(b"x")
    foreign = {".DS_Store", "notes.txt", ".tmp-notes", "kv.safetensors", "model-00001-of-00002.safetensors"}
    for name in foreign:
        (path / name).write_bytes(b"x")
    load(path)  # an unreadable manifest is about: only temporary files go
    assert not (path / ".tmp-0123456789abcdef").exists()
    assert (path / "kv-000009.safetensors").exists()
    (path / "manifest-000003.json").unlink()
    load(path)
    assert not (path / "kv-000009.safetensors").exists()
    assert foreign <= set(os.listdir(path))
    assert {name for name in data_names(path) - foreign if "safetensors" in name} == set(CONTENT)


def test_a_file_put_but_not_committed_survives_commits_of_others_and_can_be_discarded(path: Path) -> None:
    with SnapshotStore.create(path) as store:
        first, second = (store.put("prep", PREP, meta={"index": index}) for index in range(2))
        third = store.put("prep", PREP, meta={})
        for _ in range(3):
            store.commit({}, [first], store.pin())
        store.commit({}, [first, second], store.pin())
        store.discard(third)
        assert not (path / third.name).exists()
        for entry in (first, third):
            with pytest.raises(InvalidValueError, match="not an uncommitted file"):
                store.discard(entry)
        with pytest.raises(InvalidValueError, match="no file of this snapshot"):
            store.commit({}, [third], store.pin())
        with pytest.raises(InvalidValueError, match="1 different"):
            store.commit({}, [first, first], store.pin())
        store.put("prep", PREP, meta={})
    with SnapshotStore.open(path) as store:
        assert {name for name in data_names(path) if name.startswith("prep")} == {first.name, second.name}


def test_a_pin_is_of_its_moment(path: Path) -> None:
    with SnapshotStore.create(path) as store:
        store.append(EARLY)
        pin = store.pin()
        store.append(MIDDLE)
        store.commit({}, [], pin)
        with pytest.raises(InvalidValueError, match="pin"):
            store.commit({}, [], type(pin)(10**6, pin.xxh3, 1))
    with SnapshotStore.open(path) as store:
        assert store.manifest is not None
        assert store.manifest.pin == pin
        assert store.records[pin.num_records :] == MIDDLE
        store.append(LATE)
        assert store.pin().num_records == len(RECORDS)


def test_appending_goes_on_while_the_writer_thread_commits(path: Path) -> None:
    with SnapshotStore.create(path) as store:
        pins, done = [store.pin()], threading.Event()

        def write() -> None:
            while not done.is_set():
                store.commit({}, [store.put("state", STATE_1, meta={})], pins[-1])

        writer = threading.Thread(target=write)
        writer.start()
        for number in range(2000):
            store.append(Record("tokens", number))
            pins.append(store.pin())
        done.set()
        writer.join()
    with SnapshotStore.open(path) as store:
        assert [record.data for record in store.records] == list(range(2000))
        assert store.manifest is not None
        assert store.manifest.pin in pins
        assert store.verify() == []


@pytest.mark.parametrize("kind", ["", "KV", "a-b", "../x", ".kv", "9a", "x" * 33])
def test_bad_kinds_are_refused(path: Path, kind: str) -> None:
    with SnapshotStore.create(path) as store, pytest.raises(InvalidValueError, match="file kind"):
        store.put(kind, KV, meta={})


def test_a_closed_store_says_so(path: Path) -> None:
    with SnapshotStore.create(path) as store:
        entry = store.put("kv", KV, meta={})
        pin = store.pin()
    store.close()
    for call in (
        lambda: store.append(RECORDS),
        lambda: store.put("kv", KV, meta={}),
        lambda: store.read(entry),
        lambda: store.commit({}, [entry], pin),
        lambda: store.verify(),
    ):
        with pytest.raises(SnapshotError, match="is closed"):
            call()


OPERATIONS = {
    "put": lambda store: store.put("kv", KV, meta={}),
    "commit": lambda store: store.commit({"step": 3}, store.manifest.files, store.pin()),
}
CALLS = ("write", "fsync", "rename", "open", "fchmod")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failing_system_call_leaves_the_last_generation_and_no_rubbish(
    path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, call: str, error: int
) -> None:
    build(path)
    with SnapshotStore.open(path) as store:
        store.append(LATE)
        before = data_names(path)

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, call, fail)
        with pytest.raises(
            SnapshotError, match=rf"{re.escape(os.strerror(error))}; .*what was saved before is intact"
        ) as caught:
            OPERATIONS[operation](store)
        assert caught.value.errno == error
        monkeypatch.undo()
        assert data_names(path) == before
        assert store.manifest is not None
        assert store.manifest.generation == 2
        assert store.verify() == []
        store.append(Record("turn", "goes on"))
        OPERATIONS[operation](store)
    _, records, notes = load(path)
    assert records == [*RECORDS, *LATE, Record("turn", "goes on")]
    assert notes == []


def test_a_disk_that_fills_up_while_writing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"k": HostArray.from_numpy(np.zeros(3 << 20, np.uint8))}
    with SnapshotStore.create(path) as store:
        real, room = os.write, [2 << 20]

        def limited(fd: int, data: Any) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = real(fd, data[: room[0]])
            room[0] -= done
            return done

        monkeypatch.setattr(os, "write", limited)
        with pytest.raises(SnapshotError, match="No space left on device; free some disk space"):
            store.put("kv", big, meta={})
        assert data_names(path) == set()


def test_a_full_disk_is_no_reason_not_to_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(path)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "write", full)
    with SnapshotStore.open(path) as store:
        assert store.records == RECORDS
        assert store.verify() == []
        with pytest.raises(SnapshotLockedError, match="in use by another process"):
            SnapshotStore.open(path)


def test_after_an_input_output_error_a_flush_is_never_believed_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(path)
    store = SnapshotStore.open(path)
    store.append(LATE)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(durable, "sync_file", fail)
    monkeypatch.setattr("mlxgen.snapshot.journal.sync_file", fail)
    with pytest.raises(SnapshotError, match="Input/output error; check the disk"):
        store.commit({}, [], store.pin())
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match="couldn't be flushed before"):
        store.commit({}, [], store.pin())
    store.append(Record("turn", "still taken"))
    store.close()
    with SnapshotStore.open(path) as store:
        assert store.records == [*RECORDS, *LATE, Record("turn", "still taken")]
        store.commit({}, [], store.pin())


def test_a_create_that_fails_leaves_nothing_in_the_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(SnapshotError, match="No space left"):
        SnapshotStore.create(path)
    monkeypatch.undo()
    assert not path.exists()
    SnapshotStore.create(path).close()


def test_a_read_only_disk_can_be_looked_at_and_not_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(path)
    real = os.open

    def read_only_disk(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only_disk)
    with pytest.raises(
        SnapshotError, match="Read-only file system; make the folder writable for you, or use another path"
    ):
        SnapshotStore.open(path)
    assert read_only(path).records == RECORDS


def test_fullfsync_is_used_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    supported = True

    def control(fd: int, command: int) -> int:
        calls.append(f"fcntl {command}")
        if not supported:
            raise OSError(errno.ENOTSUP, "not here")
        return 0

    monkeypatch.setattr("fcntl.F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr("fcntl.fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync"))
    with (tmp_path / "f").open("wb") as file:
        durable.sync_file(file.fileno())
        assert calls == ["fcntl 51"]
        supported = False
        durable.sync_file(file.fileno())
        assert calls == ["fcntl 51", "fcntl 51", "fsync"]
