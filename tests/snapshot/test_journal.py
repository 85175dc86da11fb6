from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from snapshot.folders import RECORDS

from mlxgen.errors import InvalidValueError, SnapshotError
from mlxgen.snapshot import journal
from mlxgen.snapshot.journal import JournalPin, Record, encode_header, encode_record, parse
from mlxgen.snapshot.store import SnapshotStore

HEADER = encode_header("0" * 32)
WHERE = Path("journal.log")


def whole(*lines: bytes) -> journal.JournalContent:
    return parse(memoryview(b"".join(lines)), WHERE)


def test_lines_are_framed_as_documented() -> None:
    line = encode_record(Record("tokens", {"ids": [1, 2], "text": "ö"}))
    crc, body = line.split(b" ", 1)
    assert body == 'tokens {"ids":[1,2],"text":"ö"}\n'.encode()
    assert crc == b"%08x" % zlib.crc32(body[:-1])


def test_records_come_back() -> None:
    content = whole(HEADER, *map(encode_record, RECORDS))
    assert content.records == RECORDS
    assert content.problem is None
    assert content.length == content.size == content.ends[-1]


@pytest.mark.parametrize("name", ["", "Tokens", "a b", "a-b", "a1", "journal", "x" * 65, "ö"])
def test_bad_type_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match="record type"):
        encode_record(Record(name, 1))


def test_the_first_bad_line_ends_the_log() -> None:
    lines = [HEADER, *map(encode_record, RECORDS)]
    for position in range(1, len(lines)):
        start = sum(map(len, lines[:position]))
        for offset in range(len(lines[position])):
            damaged = bytearray(b"".join(lines))
            damaged[start + offset] ^= 4
            content = parse(memoryview(bytes(damaged)), WHERE)
            assert content.records == RECORDS[: position - 1]
            assert content.length == start
            assert content.problem is not None


def test_a_torn_last_line_is_told_from_damage() -> None:
    data = HEADER + encode_record(RECORDS[0])
    for length in range(len(HEADER) + 1, len(data)):
        content = parse(memoryview(data[:length]), WHERE)
        assert (content.records, content.length, content.torn) == ([], len(HEADER), True)
    content = whole(HEADER, b"\n", encode_record(RECORDS[0]))
    assert (content.records, content.torn) == ([], False)


@pytest.mark.parametrize(
    "body",
    [b"tokens", b"tokens ", b"tokens {", b" 1", b"Tokens 1", b"tokens NaN", b"tokens \xff", b"journal {}", b"t 1 2"],
)
def test_a_line_with_a_good_checksum_and_bad_content_ends_the_log(body: bytes) -> None:
    content = whole(HEADER, b"%08x %b\n" % (zlib.crc32(body), body), encode_record(RECORDS[0]))
    assert content.records == []
    assert content.length == len(HEADER)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged from its first line"),
        (b"\0" * 100, "damaged from its first line"),
        (encode_record(RECORDS[0]), "damaged from its first line"),
        (HEADER[1:], "damaged from its first line"),
        (encode_header("zz"), "journal id"),
    ],
)
def test_a_bad_first_line_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        whole(data)


def test_another_major_version_is_refused_and_another_minor_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "JOURNAL_MINOR", 7)
    newer = encode_header("0" * 32)
    monkeypatch.setattr(journal, "JOURNAL_MINOR", 0)
    assert whole(newer).records == []
    monkeypatch.setattr(journal, "JOURNAL_MAJOR", 2)
    newer = encode_header("0" * 32)
    monkeypatch.setattr(journal, "JOURNAL_MAJOR", 1)
    with pytest.raises(SnapshotError, match="schema 2, this version of mlxgen reads 1"):
        whole(newer)


def test_pins_are_checked_for_length_hash_and_count() -> None:
    content = whole(HEADER, *map(encode_record, RECORDS))
    middle = content.ends[2]
    digests, _ = content.hash_prefixes([middle, middle + 1])
    good = JournalPin(middle, digests[middle], 2)
    assert content.pin_problem(good, digests[middle]) is None
    assert "pins 3 records" in str(content.pin_problem(JournalPin(middle, good.xxh3, 3), good.xxh3))
    assert "aren't those" in str(content.pin_problem(JournalPin(middle, "0" * 32, 2), good.xxh3))
    off = JournalPin(middle + 1, digests[middle + 1], 2)
    assert "pins 2 records" in str(content.pin_problem(off, off.xxh3))
    assert "it pins" in str(content.pin_problem(JournalPin(content.size + 1, good.xxh3, 2), None))


def test_one_append_is_one_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SnapshotStore.create(tmp_path / "a.mlxgen") as store:
        calls: list[int] = []
        real = os.write

        def counted(fd: int, data: Any) -> int:
            calls.append(len(data))
            return real(fd, data)

        monkeypatch.setattr(os, "write", counted)
        store.append(RECORDS[0])
        store.append(RECORDS)
        store.append([])
        assert len(calls) == 2
        assert store.pin().num_records == 1 + len(RECORDS)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("part", [0, 7])
def test_an_append_that_fails_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, error: int
) -> None:
    path = tmp_path / "a.mlxgen"
    with SnapshotStore.create(path) as store:
        store.append(RECORDS[0])
        before, pin = (path / "journal.log").read_bytes(), store.pin()
        real, calls = os.write, 0

        def full(fd: int, data: Any) -> int:
            nonlocal calls
            calls += 1
            if calls == 1 and part:
                return real(fd, data[:part])
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(SnapshotError, match=os.strerror(error)) as caught:
            store.append(RECORDS[1:])
        assert caught.value.errno == error
        assert (path / "journal.log").read_bytes() == before
        assert store.pin() == pin
        monkeypatch.undo()
        store.append(RECORDS[1:])
    with SnapshotStore.open(path) as store:
        assert store.records == RECORDS
        assert store.notes == []


class Interrupt(BaseException):
    pass


def test_an_exception_out_of_a_signal_handler_during_append_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.mlxgen"
    with SnapshotStore.create(path) as store:
        store.append(RECORDS[0])
        real = os.write

        def interrupted(fd: int, data: Any) -> int:
            real(fd, data[: len(data) // 2])
            raise Interrupt

        monkeypatch.setattr(os, "write", interrupted)
        with pytest.raises(Interrupt):
            store.append(RECORDS[1])
        monkeypatch.undo()
        store.append(RECORDS[1:])
        store.commit({}, [], store.pin())
    with SnapshotStore.open(path) as store:
        assert store.records == RECORDS
        assert store.notes == []
        assert store.manifest is not None


def test_the_journal_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_JOURNAL_BYTES", 300)
    with SnapshotStore.create(tmp_path / "a.mlxgen") as store:
        with pytest.raises(SnapshotError, match="the limit is 300"):
            store.append(Record("tokens", "x" * 300))
        store.append(Record("tokens", "x"))
    monkeypatch.setattr(journal, "MAX_RECORD_BYTES", 50)
    with pytest.raises(InvalidValueError, match="the limit is 50"):
        encode_record(Record("tokens", "x" * 50))
