"""A snapshot folder as its one writer and its readers see it: records, immutable array files, generations.

Nothing here knows what the records and arrays mean. The format is specified in docs/snapshot-format.md.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import xxhash

from mlxgen.errors import InvalidValueError, SnapshotError
from mlxgen.snapshot import manifest as manifests
from mlxgen.snapshot import recovery, safetensors
from mlxgen.snapshot.durable import LOCK_NAME, TEMPORARY_NAME, Folder, snapshot_error, sync_file
from mlxgen.snapshot.journal import (
    JOURNAL_NAME,
    JournalPin,
    JournalWriter,
    Record,
    encode_header,
    encode_record,
)
from mlxgen.snapshot.manifest import DATA_NAME, MANIFEST_NAME, MAX_DATA_FILE_BYTES, FileEntry, Manifest, manifest_name
from mlxgen.snapshot.safetensors import HostArray
from mlxgen.snapshot.view import SnapshotView, absolute, is_snapshot, read_only

__all__ = [
    "FileEntry",
    "HostArray",
    "JournalPin",
    "Manifest",
    "Record",
    "SnapshotStore",
    "SnapshotView",
    "is_snapshot",
    "read_only",
]

_JOURNAL_FLAGS: Final = os.O_RDWR | os.O_APPEND


class SnapshotStore:
    """The one writer of a snapshot folder; holds the folder's lock from `create` or `open` to `close`.

    Threads: `append` and `pin` belong to one thread (the model's), `put`, `discard` and `commit` to one thread (the
    writer's); the two may run at the same time. `read`, `verify` and the attributes are safe where neither `commit`
    nor `fall_back` is running. `fall_back` is for the time before the writer starts, `close` for the time after both
    have ended.

    A kill at any instruction leaves every record whose `append` had returned, and the previous or the new generation.
    A power cut may also take the records since the last `append(sync=True)`, `commit` or `close`.

    Attributes: `path` (absolute), `records` (the good ones found when opened; later appends don't grow it), `manifest`
    (the newest generation that verifies, None before the first commit), `notes` (what was wrong and what was done).
    """

    def __init__(self, folder: Folder, lock_fd: int, journal: JournalWriter, journal_id: str) -> None:
        """Use `create` or `open`."""
        self.path = folder.path
        self.records: list[Record] = []
        self.manifest: Manifest | None = None
        self.notes: list[str] = []
        self._folder = folder
        self._lock_fd = lock_fd
        self._journal = journal
        self._journal_id = journal_id
        self._previous: Manifest | None = None
        self._generation = 0
        self._numbers: dict[str, int] = {}
        self._uncommitted: set[str] = set()

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], *, overwrite: bool = False, records: Sequence[Record] = ()
    ) -> SnapshotStore:
        """Begin a new snapshot at a path that doesn't exist yet; missing parent folders are made.

        `records` are its first ones. With `overwrite`, an existing snapshot (or empty folder) there is given up for the
        new one, records included, in one atomic step; any other existing thing is refused, and foreign files in the
        folder stay. Raises `SnapshotError`,
        `SnapshotLockedError` when the existing snapshot is in use.
        """
        target = absolute(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.mkdir(target, 0o700)
                made = True
            except FileExistsError:
                made = False
            if made:
                os.chmod(target, 0o700)  # whatever the umask is
        except OSError as exc:
            raise snapshot_error("create the snapshot", target, exc) from exc
        if not made:
            _refuse_existing(target, overwrite)
        folder = Folder.open(target)
        store: SnapshotStore | None = None
        lock_fd = -1
        try:
            os.fchmod(folder.fd, 0o700)
            lock_fd = folder.lock()
            if not made:
                _refuse_existing(target, overwrite)  # another process may have begun one before the lock was ours
            store = cls._begin(folder, lock_fd, records)
            _sync_parent(target)
            return store
        except BaseException as exc:
            try:
                if made and lock_fd >= 0:
                    _remove_begun(folder)
            finally:
                if store is not None:
                    store.close()
                else:
                    folder.close()
                    if lock_fd >= 0:
                        os.close(lock_fd)
            if isinstance(exc, OSError) and not isinstance(exc, SnapshotError):
                raise snapshot_error("create the snapshot", target, exc) from exc
            raise

    @classmethod
    def _begin(cls, folder: Folder, lock_fd: int, records: Sequence[Record]) -> SnapshotStore:
        before = folder.names()
        journal_id = secrets.token_hex(16)
        last_generation = max(recovery.generation_numbers(before), default=0)
        content = encode_header(journal_id, last_generation + 1) + b"".join(map(encode_record, records))
        # The one step that ends an overwritten snapshot (its generations don't belong to this journal), and by which
        # the new one has all its records: whenever a kill comes, one of the two is whole.
        folder.write(JOURNAL_NAME, [content], replace=True)
        for name in sorted(before, key=lambda name: not MANIFEST_NAME.fullmatch(name)):
            if any(pattern.fullmatch(name) for pattern in (MANIFEST_NAME, DATA_NAME, TEMPORARY_NAME)):
                folder.remove(name)
        left = folder.names()
        fd, _ = folder.open_regular(JOURNAL_NAME, _JOURNAL_FLAGS)
        start = JournalPin(len(content), "", len(records))
        journal = JournalWriter(folder.path / JOURNAL_NAME, fd, start, xxhash.xxh3_128(content))
        store = cls(folder, lock_fd, journal, journal_id)
        store._count_names(left)  # what couldn't be removed keeps its number
        store._generation = max(store._generation, last_generation)
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SnapshotStore:
        """Go on with an existing snapshot: take its lock, check it, drop what is torn, sweep what no manifest names.

        Falls back a generation when the newest one doesn't verify, and says why in `notes`. While anything is damaged
        only temporary files are swept. Raises `SnapshotLockedError` when another process has it, `SnapshotError` when
        there is none, a newer mlxgen wrote it, or nothing in it can be used.
        """
        target = absolute(path)
        folder = Folder.open(target)
        lock_fd = -1
        fd = -1
        try:
            recovery.require_snapshot(folder)
            lock_fd = folder.lock()
            opened_up = _make_private(folder)
            found = recovery.recover(folder)
            content = found.journal
            fd, size = folder.open_regular(JOURNAL_NAME, _JOURNAL_FLAGS)
            if size != content.length:
                try:
                    os.ftruncate(fd, content.length)
                    sync_file(fd)
                except OSError as exc:
                    raise snapshot_error("cut the damaged end off", target / JOURNAL_NAME, exc) from exc
            start = JournalPin(content.length, "", len(content.records))
            store = cls(
                folder, lock_fd, JournalWriter(target / JOURNAL_NAME, fd, start, found.hasher), content.journal_id
            )
        except BaseException:
            folder.close()
            for opened in (lock_fd, fd):
                if opened >= 0:
                    os.close(opened)
            raise
        store.records = content.records
        store.notes = opened_up + found.notes
        store.manifest, store._previous = (*found.generations, None, None)[:2]
        store._count_names(found.names)
        try:
            store._sweep(found.names, everything=not found.unusable)
        except BaseException:
            store.close()
            raise
        return store

    def _count_names(self, names: Any) -> None:
        for name in names:
            data = DATA_NAME.fullmatch(name)
            if data is not None:
                self._numbers[data[1]] = max(self._numbers.get(data[1], 0), int(data[2]) + 1)
            generation = MANIFEST_NAME.fullmatch(name)
            if generation is not None:
                self._generation = max(self._generation, int(generation[1]))

    def _sweep(self, names: Sequence[str], *, everything: bool) -> None:
        """Remove temporary files; with `everything`, also what neither kept generation names. Manifests go first."""
        kept = [manifest for manifest in (self.manifest, self._previous) if manifest is not None]
        needed = {manifest_name(manifest.generation) for manifest in kept} | self._uncommitted
        needed.update(entry.name for manifest in kept for entry in manifest.files)
        for pattern in (TEMPORARY_NAME, MANIFEST_NAME, DATA_NAME) if everything else (TEMPORARY_NAME,):
            for name in names:
                if name not in needed and pattern.fullmatch(name):
                    self._folder.remove(name)

    def append(self, record: Record | Sequence[Record], *, sync: bool = False) -> None:
        """Add records to the journal, all of them or (with an error) none; safe from a kill when it returns.

        One system call for all of them. With `sync` also safe from a power cut. Raises `SnapshotError` (a full disk,
        the 1 GiB limit), `InvalidValueError` for what isn't JSON.
        """
        self._journal.append(record)
        if sync:
            self._journal.sync()

    @property
    def num_records(self) -> int:
        """How many records the journal holds."""
        return self._journal.num_records

    def pin(self) -> JournalPin:
        """The journal's length and hash at this moment, for `commit`; takes microseconds, however long it is."""
        return self._journal.pin()

    def put(self, kind: str, arrays: Mapping[str, HostArray], *, meta: Mapping[str, Any] | None = None) -> FileEntry:
        """Write an immutable file of arrays, on the disk when this returns; it counts once a commit names it.

        Its name is `KIND-NUMBER.safetensors` with the kind's next number. `meta` (small JSON) goes into the manifest.
        The arrays' buffers mustn't change meanwhile. Raises `SnapshotError` when it can't be written (nothing is left
        of it then), `InvalidValueError` for arrays or a kind that can't be stored.
        """
        number = self._numbers.get(kind, 0)
        name = manifests.data_name(kind, number)
        num_bytes = sum(array.nbytes for array in arrays.values())
        if num_bytes + safetensors.MAX_HEADER_BYTES > MAX_DATA_FILE_BYTES:
            raise InvalidValueError(f"{kind} of {num_bytes} bytes, the limit is {MAX_DATA_FILE_BYTES}; split it")
        pieces = safetensors.encode(arrays)
        self._check_open()
        self._numbers[kind] = number + 1
        size, digest = self._folder.write(name, pieces)
        self._uncommitted.add(name)
        return FileEntry(name, size, digest, kind, dict(meta or {}))

    def discard(self, entry: FileEntry) -> None:
        """Delete a file that was put and won't be committed (a commit that failed on a full disk, say)."""
        if entry.name not in self._uncommitted:
            raise InvalidValueError(
                f"{entry.name} is not an uncommitted file of this store; only those can be discarded"
            )
        self._uncommitted.discard(entry.name)
        self._folder.remove(entry.name)

    def read(self, entry: FileEntry) -> dict[str, HostArray]:
        """The arrays of a file: read once, checked (regular file, size, hash, structure), views into that one buffer.

        Raises `SnapshotError`; `fall_back` then drops to the previous generation.
        """
        self._check_open()
        return recovery.read_entry(self._folder, entry)

    def commit(self, body: Mapping[str, Any], files: Sequence[FileEntry], pin: JournalPin) -> int:
        """Make a new generation of these files and the journal up to `pin`; its number. Then sweep the third-newest.

        The journal is flushed first. On any failure (`SnapshotError`) the previous generation still stands, and a later
        commit may try again with the same files. `body` is any JSON object. A file must come from `put` or a kept
        generation, otherwise it is an `InvalidValueError`.
        """
        self._check_open()
        kept = [manifest for manifest in (self.manifest, self._previous) if manifest is not None]
        known = {entry.name for manifest in kept for entry in manifest.files} | self._uncommitted
        names = [entry.name for entry in files]
        for name in names:
            if name not in known:
                raise InvalidValueError(
                    f"{name} is no file of this snapshot; commit what put() returned or a manifest names"
                )
        if len(set(names)) != len(names) or len(names) > manifests.MAX_FILES:
            raise InvalidValueError(
                f"{len(names)} files, {len(set(names))} different ones, limit {manifests.MAX_FILES}"
            )
        if pin.length > self._journal.length:
            raise InvalidValueError(
                f"the pin is at byte {pin.length} of a journal of {self._journal.length}; pin this store"
            )
        generation = self._generation + 1
        manifest = Manifest(generation, self._journal_id, pin, tuple(files), dict(body))
        data = manifests.encode(manifest)
        self._journal.sync()
        self._generation = generation
        self._folder.write(manifest_name(generation), [data])
        self.manifest, self._previous = manifest, self.manifest
        self._uncommitted.difference_update(names)
        self._sweep(self._folder.names(), everything=True)
        return generation

    def fall_back(self, reason: str) -> Manifest | None:
        """Give up the newest generation, whose content turned out bad, for the previous one (None: the journal alone).

        Nothing on the disk changes until the next commit replaces the bad generation. The reason goes into `notes`.
        """
        if self.manifest is None:
            raise SnapshotError(
                f"{self.path}: {reason}; there is no earlier generation, restore the folder from a backup"
            )
        bad = self.manifest.generation
        self.manifest, self._previous = self._previous, None
        instead = "the journal alone" if self.manifest is None else f"generation {self.manifest.generation}"
        self.notes.append(f"generation {bad} can't be used: {reason}; {instead} is used instead")
        return self.manifest

    def verify(self) -> list[str]:
        """Everything wrong with the current generation, all its files read and checked; empty when it is sound."""
        self._check_open()
        return recovery.problems_of(self._folder, self.manifest)

    def close(self) -> None:
        """Flush the journal and let go of the folder, even when the flush fails. Closing twice is fine."""
        try:
            self._journal.close()
        finally:
            self._folder.close()
            fd, self._lock_fd = self._lock_fd, -1
            if fd >= 0:
                os.close(fd)

    def _check_open(self) -> None:
        if self._lock_fd < 0:
            raise SnapshotError(f"{self.path} is closed; open the snapshot again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _refuse_existing(target: Path, overwrite: bool) -> None:
    if not target.is_dir():
        raise SnapshotError(f"{target} exists and is not a folder; use another path")
    try:
        names = os.listdir(target)
    except OSError as exc:
        raise snapshot_error("list", target, exc) from exc
    if names and recovery.is_unbegun(names):
        return
    if not overwrite:
        what = "is a snapshot already" if recovery.is_snapshot(target) else "exists already"
        raise SnapshotError(f"{target} {what}; resume it, overwrite it, or use another path")
    if names and not recovery.is_snapshot(target):
        raise SnapshotError(
            f"{target} is a folder but not an mlxgen snapshot, so it isn't overwritten; use another path"
        )


def _remove_begun(folder: Folder) -> None:
    """Leave nothing behind that would stand in the way of another try."""
    for name in (JOURNAL_NAME, LOCK_NAME):
        folder.remove(name)
    try:
        os.rmdir(folder.path)
    except OSError:
        pass


def _make_private(folder: Folder) -> list[str]:
    mode = os.fstat(folder.fd).st_mode & 0o777
    if not mode & 0o077:
        return []
    try:
        os.fchmod(folder.fd, 0o700)
    except OSError as exc:
        return [f"{folder.path} is open to other users (mode {mode:04o}) and can't be closed: {exc.strerror}"]
    return [f"{folder.path} was open to other users (mode {mode:04o}); it is private (0700) now"]


def _sync_parent(target: Path) -> None:
    parent = Folder.open(target.parent)
    try:
        parent.sync()
    except OSError as exc:
        raise snapshot_error("flush", target.parent, exc) from exc
    finally:
        parent.close()
