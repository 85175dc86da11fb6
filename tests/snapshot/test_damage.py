"""Whatever happens to a file, what opens is one of the generations that were committed, and a prefix of the records."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from snapshot.folders import EARLY, KV, LATE, MIDDLE, PREP, RECORDS, STATE_1, build, load

from mlxgen.errors import SnapshotError
from mlxgen.snapshot import manifest as manifests
from mlxgen.snapshot.journal import encode_header, encode_record
from mlxgen.snapshot.store import FileEntry, Record, SnapshotStore, read_only

FILES = {
    "journal.log": None,
    "manifest-000001.json": 2,
    "manifest-000002.json": 1,
    "prep-000.safetensors": 0,
    "state-000000.safetensors": 2,
    "state-000001.safetensors": 1,
    "kv-000000.safetensors": 1,
}
"""The generation that is left when this file is damaged (0: the journal alone); None where it depends."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "run.mlxgen"
    build(path)
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    return Path(shutil.copytree(original, tmp_path / "run.mlxgen"))


def restore(original: Path, path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(original, path)


def check(path: Path, left: int | None) -> int:
    """Load, and hold what comes back against what was committed; the generation."""
    manifest, records, notes = load(path)
    assert records == RECORDS[: len(records)]
    generation = 0 if manifest is None else manifest.generation
    if manifest is not None:
        assert manifest.body == {"step": generation}
        assert manifest.pin.num_records == {1: len(EARLY), 2: len(EARLY + MIDDLE)}[generation]
        assert len(records) >= manifest.pin.num_records
    if left is not None:
        assert generation == left
        assert records == RECORDS
    assert notes or generation == 2  # only unpinned records, cut at a line's end, can go without a trace
    return generation


@pytest.mark.parametrize("name", FILES)
def test_truncated(original: Path, path: Path, name: str) -> None:
    data = (original / name).read_bytes()
    for length in {*range(0, len(data), 1 + len(data) // 30), 0, 1, len(data) - 1}:
        (path / name).write_bytes(data[:length])
        check_or_refuse(path, name, length)
        restore(original, path)


@pytest.mark.parametrize("name", FILES)
def test_one_bit_flipped(original: Path, path: Path, name: str) -> None:
    data = (original / name).read_bytes()
    step = 1 + len(data) // 80
    for number, position in enumerate(range(0, len(data), step)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << number % 8
        (path / name).write_bytes(damaged)
        check_or_refuse(path, name, position)
        restore(original, path)


def check_or_refuse(path: Path, name: str, position: int) -> None:
    """The first two lines of the journal are what nothing is left without; damage anywhere else leaves something."""
    if name == "journal.log" and position < FIRST_RECORD_END:
        with pytest.raises(SnapshotError, match="begin again with overwrite"):
            load(path)
    else:
        check(path, FILES[name])


FIRST_RECORD_END = len(encode_header("0" * 32)) + len(encode_record(EARLY[0]))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("extra", [b"\n", b"\0" * 4096, b"x"])
def test_bytes_after_the_end(path: Path, name: str, extra: bytes) -> None:
    with (path / name).open("ab") as file:
        file.write(extra)
    check(path, 2 if name == "journal.log" else FILES[name])


@pytest.mark.parametrize("name", FILES)
def test_missing(path: Path, name: str) -> None:
    (path / name).unlink()
    if name == "journal.log":
        with pytest.raises(SnapshotError, match=r"has no journal\.log"):
            SnapshotStore.open(path)
    elif name == "manifest-000002.json":
        manifest, records, notes = load(path)  # nothing tells that there ever was one
        assert manifest is not None
        assert (manifest.generation, records, notes) == (1, RECORDS, [])
    elif name in ("manifest-000001.json", "state-000000.safetensors"):
        manifest, records, _ = load(path)
        assert manifest is not None
        assert (manifest.generation, records) == (2, RECORDS)
    else:
        check(path, FILES[name])


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def symlink(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def symlink_to_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def sparse_terabyte(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [fifo, symlink, symlink_to_device, folder, sparse_terabyte])
def test_not_a_regular_file_of_the_right_size(path: Path, name: str, change: Callable[[Path], None]) -> None:
    change(path / name)
    begun = time.perf_counter()
    if name == "journal.log":
        for opener in (SnapshotStore.open, read_only):
            with pytest.raises(SnapshotError):
                opener(path)
    elif FILES[name] == 2:
        manifest, records, _ = load(path)
        assert manifest is not None
        assert (manifest.generation, records) == (2, RECORDS)
    else:
        check(path, FILES[name])
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize("change", [fifo, symlink, folder])
def test_a_lock_that_is_no_regular_file(path: Path, change: Callable[[Path], None]) -> None:
    change(path / "lock")
    with pytest.raises(SnapshotError):
        SnapshotStore.open(path)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(FILES, 2)))
def test_swapped_files(path: Path, first: str, second: str) -> None:
    a, b, c = path / first, path / second, path / "c"
    a.rename(c)
    b.rename(a)
    c.rename(b)
    if "journal.log" in (first, second):
        with pytest.raises(SnapshotError):
            check(path, None)
    else:
        damaged = {FILES[first], FILES[second]}
        expected = 1 if damaged == {1} else 2 if damaged == {2} else 0
        manifest, records, _ = load(path)
        assert records == RECORDS
        assert (0 if manifest is None else manifest.generation) == expected


def test_files_of_another_snapshot_are_noticed(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.mlxgen"
    with SnapshotStore.create(other) as store:
        store.append(Record("turn", "another"))
        prep = store.put("prep", {"pixels": KV["mask"]}, meta={})
        store.commit({"step": 1}, [prep], store.pin())
    shutil.copy(other / "manifest-000001.json", path / "manifest-000003.json")
    with SnapshotStore.open(path) as store:
        assert store.manifest is not None
        assert store.manifest.generation == 2
        assert "generation 1 under the name of 3" in store.notes[0]
    shutil.copy(other / "journal.log", path / "journal.log")
    (path / "manifest-000003.json").unlink()
    with SnapshotStore.open(path) as store:
        assert store.manifest is None
        assert store.records == [Record("turn", "another")]
        assert "belongs to another journal" in store.notes[0]
    assert (path / "kv-000000.safetensors").exists()  # nothing is swept while something is wrong


def test_damage_inside_a_pin_keeps_the_records_before_it(original: Path, path: Path) -> None:
    lines = (original / "journal.log").read_bytes().splitlines(keepends=True)
    for number in range(1, len(lines)):
        bad = [*lines[:number], b"0" + lines[number][1:] if lines[number][:1] != b"0" else b"1" + lines[number][1:]]
        (path / "journal.log").write_bytes(b"".join([*bad, *lines[number + 1 :]]))
        left = 2 if number > len(EARLY + MIDDLE) else 1 if number > len(EARLY) else 0
        if number == 1:
            with pytest.raises(SnapshotError, match="nothing in it can be used"):
                SnapshotStore.open(path)
        else:
            assert check(path, None) == left
            manifest, records, notes = load(path)
            assert (0 if manifest is None else manifest.generation) == left
            assert records == RECORDS[: number - 1]
            assert left == 2 or notes
        restore(original, path)


def test_after_falling_back_the_snapshot_goes_on_and_heals(path: Path) -> None:
    os.truncate(path / "kv-000000.safetensors", 10)
    with SnapshotStore.open(path) as store:
        assert store.manifest is not None
        assert store.manifest.generation == 1
        assert "kv-000000.safetensors has 10 bytes" in store.notes[0]
        state = store.put("state", STATE_1, meta={})
        assert state.name == "state-000002.safetensors"
        assert store.commit({"step": 3}, [store.manifest.files[0], state], store.pin()) == 3
    assert not (path / "manifest-000002.json").exists()
    assert not (path / "kv-000000.safetensors").exists()
    with SnapshotStore.open(path) as store:
        assert store.manifest is not None
        assert (store.manifest.generation, store.notes, store.records) == (3, [], RECORDS)
        assert store.verify() == []


def test_content_is_checked_when_read_and_falling_back_is_the_callers(path: Path) -> None:
    name = "kv-000000.safetensors"
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)
    with SnapshotStore.open(path) as store:
        assert store.manifest is not None
        assert (store.manifest.generation, store.notes) == (2, [])
        assert "fails its hash" in store.verify()[0]
        with pytest.raises(SnapshotError, match="fails its hash"):
            store.read(store.manifest.of_kind("kv")[0])
        older = store.fall_back("kv is bad")
        assert older is not None
        assert older is store.manifest
        assert older.generation == 1
        assert store.notes == ["generation 2 can't be used: kv is bad; generation 1 is used instead"]
        assert store.fall_back("this too") is None
        with pytest.raises(SnapshotError, match="no earlier generation"):
            store.fall_back("and this")


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], *, rehash: bool = True) -> None:
    """Change a manifest's JSON, with a hash that holds unless told otherwise."""
    value = json.loads(path.read_bytes())
    digest = value.pop("xxh3")
    change(value)
    head = json.dumps(value, separators=(",", ":")).encode()[:-1]
    if rehash:
        digest = xxhash.xxh3_128(head).hexdigest()
    path.write_bytes(head + b',"xxh3":"%b"}\n' % digest.encode())


def test_another_major_schema_is_refused(path: Path) -> None:
    rewrite(path / "manifest-000002.json", lambda value: value["schema"].update(major=2))
    for opener in (SnapshotStore.open, read_only):
        with pytest.raises(SnapshotError, match=r"schema 2\.0, this version of mlxgen reads 1\.x; use the version"):
            opener(path)
    assert (path / "kv-000000.safetensors").exists()


def test_another_major_schema_with_a_bad_hash_is_damage_unless_nothing_else_stands(path: Path) -> None:
    rewrite(path / "manifest-000002.json", lambda value: value["schema"].update(major=2), rehash=False)
    check(path, 1)
    rewrite(path / "manifest-000001.json", lambda value: value["schema"].update(major=2), rehash=False)
    with pytest.raises(SnapshotError, match="schema 2"):
        SnapshotStore.open(path)


def test_another_minor_schema_and_unknown_keys_are_accepted(path: Path) -> None:
    def newer(value: dict[str, Any]) -> None:
        value["schema"].update(minor=9, patch="x")
        value["later"] = value["journal"]["later"] = value["files"][0]["later"] = {"a": [1]}
        del value["files"][1]["meta"]

    rewrite(path / "manifest-000002.json", newer)
    with SnapshotStore.open(path) as store:
        assert store.manifest is not None
        assert (store.manifest.generation, store.manifest.schema, store.notes) == (2, (1, 9), [])


CRAFTED: dict[str, Callable[[dict[str, Any]], None]] = {
    "path out of the folder": lambda value: value["files"][0].update(name="../prep-000.safetensors"),
    "absolute path": lambda value: value["files"][0].update(name="/etc/passwd"),
    "hidden name": lambda value: value["files"][0].update(name=".prep-000.safetensors"),
    "name with a newline": lambda value: value["files"][0].update(name="prep-000.safetensors\n"),
    "the journal as a data file": lambda value: value["files"][0].update(name="journal.log"),
    "another kind than the name's": lambda value: value["files"][0].update(kind="kv"),
    "named twice": lambda value: value["files"].append(value["files"][0]),
    "negative size": lambda value: value["files"][0].update(bytes=-1),
    "boolean size": lambda value: value["files"][0].update(bytes=True),
    "fractional size": lambda value: value["files"][0].update(bytes=1.5),
    "terabyte": lambda value: value["files"][0].update(bytes=1 << 40),
    "hash of another length": lambda value: value["files"][0].update(xxh3="00"),
    "meta is a list": lambda value: value["files"][0].update(meta=[]),
    "files missing": lambda value: value.pop("files"),
    "files is an object": lambda value: value.update(files={}),
    "entry is a string": lambda value: value["files"].append("kv-000000.safetensors"),
    "body missing": lambda value: value.pop("body"),
    "body is a list": lambda value: value.update(body=[]),
    "another generation": lambda value: value.update(generation=1),
    "another format": lambda value: value.update(format="zip"),
    "schema is a string": lambda value: value.update(schema="1.0"),
    "pin past the end": lambda value: value["journal"].update(bytes=10**6),
    "pin off a line end": lambda value: value["journal"].update(bytes=value["journal"]["bytes"] - 1),
    "pin of another count": lambda value: value["journal"].update(records=2),
    "pin of another hash": lambda value: value["journal"].update(xxh3="0" * 32),
    "another journal": lambda value: value["journal"].update(id="0" * 32),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_manifest_with_a_good_hash_is_not_used(path: Path, name: str) -> None:
    rewrite(path / "manifest-000002.json", CRAFTED[name])
    check(path, 1)


def test_a_manifest_with_a_key_twice_is_not_used(path: Path) -> None:
    where = path / "manifest-000002.json"
    head = where.read_bytes()[:-44].replace(b'{"format"', b'{"generation":2,"format"', 1)
    where.write_bytes(head + b',"xxh3":"%b"}\n' % xxhash.xxh3_128(head).hexdigest().encode())
    check(path, 1)


def test_an_entry_that_was_never_in_a_manifest_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with SnapshotStore.open(path) as store:
        for name in ("../secret", str(tmp_path / "secret"), "journal.log", "lock"):
            with pytest.raises(SnapshotError, match="isn't KIND-NUMBER"):
                store.read(FileEntry(name, 6, "0" * 32, "kv", {}))


def test_a_data_file_with_a_good_hash_and_crafted_structure_is_refused(path: Path) -> None:
    text = b'{"a":{"dtype":"F32","shape":[1048576,1048576,1048576],"data_offsets":[0,4]}}'
    data = len(text).to_bytes(8, "little") + text + b"1234"
    (path / "kv-000000.safetensors").write_bytes(data)
    digest = xxhash.xxh3_128(data).hexdigest()
    rewrite(path / "manifest-000002.json", lambda value: value["files"][1].update(bytes=len(data), xxh3=digest))
    with SnapshotStore.open(path) as store:
        assert store.manifest is not None
        assert store.manifest.generation == 2
        with pytest.raises(SnapshotError, match=r"kv-000000\.safetensors: array 'a'"):
            store.read(store.manifest.of_kind("kv")[0])


def test_limits_are_checked_before_reading(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxgen.snapshot.recovery.MAX_MANIFEST_BYTES", 100)
    manifest, records, notes = load(path)
    assert (manifest, records) == (None, RECORDS)
    assert "the limit is 100" in notes[0]
    monkeypatch.setattr("mlxgen.snapshot.recovery.MAX_JOURNAL_BYTES", 100)
    with pytest.raises(SnapshotError, match="the limit is 100"):
        SnapshotStore.open(path)


def test_both_manifests_damaged_leaves_the_journal(path: Path) -> None:
    for name in ("manifest-000001.json", "manifest-000002.json"):
        os.truncate(path / name, 100)
    manifest, records, notes = load(path)
    assert (manifest, records, len(notes)) == (None, RECORDS, 2)
    with SnapshotStore.open(path) as store:
        assert store.commit({"step": 3}, [store.put("prep", PREP, meta={})], store.pin()) == 3
        assert sorted(os.listdir(path)) == ["journal.log", "lock", "manifest-000003.json", "prep-001.safetensors"]
    assert manifests.manifest_name(3) == "manifest-000003.json"
    assert len(RECORDS) == len(EARLY + MIDDLE + LATE)
