"""The append-only journal: one checksummed line of text per record; what it says is the truth about a run.

A line is `<crc32, 8 hex> <type> <compact JSON>\\n`, the crc over `<type> <compact JSON>`. The first line, of type
`journal`, identifies the journal. The first bad line ends the log: nothing after it is believed.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from mlxgen.errors import InvalidValueError, SnapshotError
from mlxgen.snapshot import jsontext
from mlxgen.snapshot.durable import snapshot_error, sync_file

JOURNAL_NAME: Final = "journal.log"
JOURNAL_MAJOR: Final = 1
JOURNAL_MINOR: Final = 0
MAX_JOURNAL_BYTES: Final = 1 << 30
MAX_RECORD_BYTES: Final = 64 << 20
HEADER_TYPE: Final = "journal"
HEADER_START: Final = re.compile(rb'[0-9a-f]{8} journal \{"format":"mlxgen-journal"')

_TYPE: Final = re.compile(r"[a-z_]{1,64}")
_JOURNAL_ID: Final = re.compile(r"[0-9a-f]{32}")
_types_seen: set[str] = set()


@dataclass(frozen=True, slots=True)
class Record:
    """One journal record: a type name of `[a-z_]` and any JSON value (its object keys strings, not starting with $)."""

    type: str
    data: Any


@dataclass(frozen=True, slots=True)
class JournalPin:
    """What the journal held at one moment: its length in bytes, the xxh3_128 of those bytes, the number of records."""

    length: int
    xxh3: str
    num_records: int


def encode_record(record: Record) -> bytes:
    """The record's line. Raises `InvalidValueError` for a bad type name, a value JSON can't hold, or over 64 MiB."""
    name = record.type
    if name not in _types_seen:
        if not _TYPE.fullmatch(name) or name == HEADER_TYPE:
            raise InvalidValueError(f"record type {name!r}; use 1 to 64 of a-z and _, and not {HEADER_TYPE!r}")
        _types_seen.add(name)
    return _line(name, record.data)


def encode_header(journal_id: str, first_generation: int = 1) -> bytes:
    """The first line of a journal with this id (32 hex digits); lower generations belong to what it overwrote."""
    schema = {"major": JOURNAL_MAJOR, "minor": JOURNAL_MINOR}
    header = {"format": "mlxgen-journal", "schema": schema, "id": journal_id, "first_generation": first_generation}
    return _line(HEADER_TYPE, header)


def _line(name: str, data: Any) -> bytes:
    body = name.encode() + b" " + jsontext.encode(data)
    if len(body) > MAX_RECORD_BYTES:
        raise InvalidValueError(f"a {name} record of {len(body)} bytes, the limit is {MAX_RECORD_BYTES}; split it")
    return b"%08x %b\n" % (zlib.crc32(body), body)


@dataclass
class JournalContent:
    """What a journal's bytes say, up to the first bad line.

    `length` is where the good part ends, `size` where the file does. `problem` says what is wrong in between (None:
    nothing); `torn` is true when that is only an unfinished last line, the normal trace of a kill.
    """

    journal_id: str
    first_generation: int
    records: list[Record]
    length: int
    size: int
    problem: str | None
    torn: bool
    data: memoryview
    ends: list[int] = field(default_factory=list)

    def pin_problem(self, pin: JournalPin, hexdigest: str | None) -> str | None:
        """Why a pin doesn't hold for this journal, or None; `hexdigest` is that of the first `pin.length` bytes."""
        if pin.length > self.size:
            return f"{JOURNAL_NAME} has {self.size} bytes, it pins {pin.length}"
        if pin.length > self.length:
            return f"{JOURNAL_NAME} is damaged inside the {pin.length} bytes it pins"
        if hexdigest != pin.xxh3:
            return f"the first {pin.length} bytes of {JOURNAL_NAME} aren't those it pins"
        at = bisect_right(self.ends, pin.length)
        if at == 0 or self.ends[at - 1] != pin.length or at - 1 != pin.num_records:
            return f"it pins {pin.num_records} records in {pin.length} bytes, {JOURNAL_NAME} has {max(at - 1, 0)} there"
        return None

    def hash_prefixes(self, lengths: Iterable[int]) -> tuple[dict[int, str], xxhash.xxh3_128]:
        """xxh3_128 of the first n bytes for each n in the good part, and a hasher that has had all of it; one pass."""
        hasher, done, digests = xxhash.xxh3_128(), 0, {}
        for length in sorted({*(n for n in lengths if n <= self.length), self.length}):
            hasher.update(self.data[done:length])
            done = length
            digests[length] = hasher.hexdigest()
        return digests, hasher


def parse(data: memoryview, path: Path) -> JournalContent:
    """Read a journal from memory. Raises `SnapshotError` for a damaged first line or an unknown major version."""
    raw = data.obj if isinstance(data.obj, bytes) and len(data.obj) == len(data) else bytes(data)
    size, position = len(raw), 0
    records: list[Record] = []
    ends: list[int] = []
    header: Any = None
    problem: str | None = None
    torn = False
    while position < size:
        newline = raw.find(b"\n", position)
        if newline < 0:
            problem, torn = f"the line at byte {position} isn't finished", True
            break
        record = _parse_line(raw[position:newline])
        if record is None:
            problem = f"the line at byte {position} fails its check"
            break
        if header is None:
            header = record
        elif record.type == HEADER_TYPE:
            problem = f"the line at byte {position} begins another journal"
            break
        else:
            records.append(record)
        position = newline + 1
        ends.append(position)
    journal_id, first_generation = _check_header(header, path)
    return JournalContent(journal_id, first_generation, records, position, size, problem, torn, memoryview(raw), ends)


def _parse_line(line: bytes) -> Record | None:
    if line[8:9] != b" ":
        return None
    body = line[9:]
    if line[:8] != b"%08x" % zlib.crc32(body):
        return None
    name, space, text = body.partition(b" ")
    try:
        kind = name.decode("ascii")
        if not space or (kind not in _types_seen and not _TYPE.fullmatch(kind)):
            return None
        return Record(kind, jsontext.decode(text))
    except ValueError:
        return None


def _check_header(header: Record | None, path: Path) -> tuple[str, int]:
    if header is None or header.type != HEADER_TYPE or not isinstance(header.data, dict):
        raise SnapshotError(
            f"{path} is damaged from its first line on, so nothing in it can be trusted; "
            f"restore the folder from a backup or begin again with overwrite"
        )
    schema, journal_id = header.data.get("schema"), header.data.get("id")
    if header.data.get("format") != "mlxgen-journal" or not isinstance(schema, dict):
        raise SnapshotError(f"{path} isn't a journal of mlxgen; check the path")
    major = schema.get("major")
    if type(major) is not int or major != JOURNAL_MAJOR:
        raise SnapshotError(
            f"{path} has journal schema {major!r}, this version of mlxgen reads {JOURNAL_MAJOR}; "
            f"use the version that wrote it"
        )
    if not isinstance(journal_id, str) or not _JOURNAL_ID.fullmatch(journal_id):
        raise SnapshotError(f"{path} has no valid journal id ({journal_id!r}); restore the folder from a backup")
    first = header.data.get("first_generation", 1)
    if type(first) is not int or first < 1:
        raise SnapshotError(f"{path} has no valid first generation ({first!r}); restore the folder from a backup")
    return journal_id, first


class JournalWriter:
    """The end of an open journal. Owned by the store; `append` and `pin` on one thread, `sync` on any.

    What `append` returned for survives a kill at once (it is in the system's file cache) and a power cut after `sync`.
    """

    def __init__(self, path: Path, fd: int, pin: JournalPin, hasher: xxhash.xxh3_128) -> None:
        self._path = path
        self._fd = fd
        # Replaced in one store, so that an exception out of a signal handler finds either the old or the new state.
        self._state: tuple[int, xxhash.xxh3_128, int] = (pin.length, hasher, pin.num_records)
        self._unsure = False
        self._synced = 0
        self._sync_failed = False

    def append(self, records: Record | Sequence[Record]) -> None:
        """Write the records' lines with one system call; all or none of them, if that fails."""
        if isinstance(records, Record):
            data, count = encode_record(records), 1
        else:
            data, count = b"".join([encode_record(record) for record in records]), len(records)
            if not count:
                return
        if self._fd < 0:
            raise SnapshotError(f"{self._path} is closed; open the snapshot again")
        if self._unsure:
            self._cut_back()
        length, hasher, num_records = self._state
        if length + len(data) > MAX_JOURNAL_BYTES:
            raise SnapshotError(
                f"{self._path} would grow to {length + len(data)} bytes, the limit is "
                f"{MAX_JOURNAL_BYTES}; begin a new snapshot"
            )
        self._unsure = True
        try:
            written = os.write(self._fd, data)
            while written < len(data):  # a full disk takes a part, then says so
                written += os.write(self._fd, data[written:])
        except OSError as exc:
            try:
                self._cut_back()
            except SnapshotError:
                pass  # tried again before the next append; a torn line is cut at the next open in any case
            raise snapshot_error("append to", self._path, exc) from exc
        hasher = hasher.copy()
        hasher.update(data)
        self._state = (length + len(data), hasher, num_records + count)
        self._unsure = False

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._state[0])
        except OSError as exc:
            raise snapshot_error("remove an unfinished line from", self._path, exc) from exc
        self._unsure = False

    def pin(self) -> JournalPin:
        length, hasher, num_records = self._state
        return JournalPin(length, hasher.hexdigest(), num_records)

    @property
    def length(self) -> int:
        return self._state[0]

    @property
    def num_records(self) -> int:
        return self._state[2]

    def sync(self) -> None:
        """Flush everything appended so far to the disk. Raises `SnapshotError`.

        After an input/output error the system may have dropped what it couldn't write, and would claim success the
        next time; so from then on this only ever fails.
        """
        if self._fd < 0:
            raise SnapshotError(f"{self._path} is closed; open the snapshot again")
        if self._sync_failed:
            raise SnapshotError(
                f"{self._path} couldn't be flushed before; check the disk, then open the snapshot again"
            )
        length = self._state[0]
        if length == self._synced:
            return
        try:
            sync_file(self._fd)
        except OSError as exc:
            self._sync_failed = exc.errno == errno.EIO
            raise snapshot_error("flush", self._path, exc) from exc
        self._synced = length

    def close(self) -> None:
        """Flush and close; closes even when flushing fails. Closing twice is fine."""
        if self._fd < 0:
            return
        try:
            if not self._sync_failed:
                self.sync()
        finally:
            fd, self._fd = self._fd, -1
            os.close(fd)
