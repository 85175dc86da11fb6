"""Blocks and picture features as files: one immutable file each, in one folder per model, within one budget.

A file's name is what it is known by, and the hash of its bytes; there is no index besides the names. A file is written
as a snapshot's are: under a temporary name, flushed, then renamed. Everything that changes the folder holds its lock,
so several processes can use one, and a temporary file that is found under the lock was left by a process that died.
Reading takes no lock: a file is read whole or not at all, and is believed only if its bytes have its name's hash.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from mlxgen.errors import SnapshotError, SnapshotLockedError
from mlxgen.snapshot import safetensors
from mlxgen.snapshot.durable import TEMPORARY_NAME, Folder
from mlxgen.snapshot.safetensors import HostArray

MAX_FILE_BYTES: Final = 2**34

_NAME: Final = re.compile(r"([0-9a-z-]{1,150})\.([0-9a-f]{32})\.safetensors")
_LOCK_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of the cache. `used_ns`: when it was written or last of use (its time of modification)."""

    path: Path
    num_bytes: int
    used_ns: int

    @property
    def name(self) -> str:
        """What it is known by."""
        match = _NAME.fullmatch(self.path.name)
        return "" if match is None else match[1]


def stored_files(root: Path) -> list[StoredFile]:
    """All files of the cache in `root`, of all models, the one that wasn't used longest first. Takes no lock."""
    found: list[StoredFile] = []
    for folder in _model_folders(root):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                        found.append(StoredFile(Path(entry.path), status.st_size, status.st_mtime_ns))
    return sorted(found, key=lambda file: (file.used_ns, file.path))


def read_file(path: Path) -> dict[str, HostArray] | None:
    """The arrays of a file; None if it isn't there (any more). Raises `SnapshotError` if it is damaged."""
    match = _NAME.fullmatch(path.name)
    try:
        folder = Folder.open(path.parent)
    except SnapshotError:
        return None
    try:
        if match is None or folder.status(path.name) is None:
            return None
        data = folder.read(path.name, max_bytes=MAX_FILE_BYTES)
    except SnapshotError:
        if not os.path.lexists(path):
            return None  # another process made room just now
        raise
    finally:
        folder.close()
    if xxhash.xxh3_128_hexdigest(data) != match[2]:
        raise SnapshotError(f"{path} is damaged: its bytes don't have the hash in its name; remove it")
    try:
        return safetensors.decode(data)
    except safetensors.SafetensorsError as error:
        raise SnapshotError(f"{path} is damaged: {error}; remove it") from error


def clear(root: Path) -> int:
    """Remove all files of the cache; how many there were. Raises `SnapshotError` if they can't be removed."""
    if not root.is_dir():
        return 0
    with locked(root):
        _sweep(root)
        files = stored_files(root)
        for file in files:
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:
                raise SnapshotError(f"can't remove {file.path}: {error.strerror}; check its permissions") from error
        for folder in _model_folders(root):
            with contextlib.suppress(OSError):
                folder.rmdir()
    return len(files)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the cache's lock. Raises `SnapshotError` if it can't be had within 10 seconds."""
    folder = Folder.open(root)
    lock, deadline_s = -1, time.monotonic() + _LOCK_TIMEOUT_S
    try:
        while lock < 0:
            try:
                lock = folder.lock()
            except SnapshotLockedError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(0.01)
        yield
    finally:
        if lock >= 0:
            os.close(lock)
        folder.close()


def _model_folders(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _sweep(root: Path) -> None:
    """Remove what killed processes left. The lock must be held."""
    for folder in _model_folders(root):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if TEMPORARY_NAME.fullmatch(name):
                    (folder / name).unlink(missing_ok=True)


class DiskTier:
    """The files of one model in the cache. Owned by the model's prefix cache.

    `find`, `read` and `touch` are called on the model's thread, `write` on the writer thread.
    """

    def __init__(self, root: Path, model_folder: str, max_bytes: int) -> None:
        self.root = root
        self.folder = root / model_folder
        self._max_bytes = max_bytes
        self._names: dict[str, str] = {}
        self._seen_ns = -1

    def prepare(self) -> None:
        """Make the folders and remove what killed processes left. Raises `SnapshotError`: nothing can be written."""
        self._make_folder()
        with locked(self.root):
            _sweep(self.root)
            self._make_room(0)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SnapshotError(f"can't make {self.folder}: {error.strerror}; check its permissions") from error

    def find(self, name: str) -> bool:
        """Whether there is a file of that name, as far as a look at the folder tells."""
        try:
            changed_ns = os.stat(self.folder).st_mtime_ns
            # What changed within the clock's resolution may have been after the look.
            if changed_ns != self._seen_ns or time.time_ns() - changed_ns < 50_000_000:
                matches = map(_NAME.fullmatch, os.listdir(self.folder))
                self._names = {match[1]: match[0] for match in matches if match is not None}
                self._seen_ns = changed_ns
        except OSError:
            self._names = {}
        return name in self._names

    def read(self, name: str) -> dict[str, HostArray] | None:
        """The arrays of a file, or None if it isn't there. A damaged one is removed and raises `SnapshotError`."""
        if not self.find(name):
            return None
        path = self.folder / self._names[name]
        try:
            return read_file(path)
        except SnapshotError:
            self.remove(name)
            raise

    def remove(self, name: str) -> None:
        """Remove a file that is of no use."""
        known = self._names.pop(name, None)
        if known is not None:
            with contextlib.suppress(OSError):
                (self.folder / known).unlink(missing_ok=True)

    def touch(self, names: Sequence[str]) -> None:
        """These were of use now; of several, the later ones are to go first."""
        now_ns = time.time_ns()
        for number, name in enumerate(reversed(names)):
            if name in self._names:
                with contextlib.suppress(OSError):
                    os.utime(self.folder / self._names[name], ns=(now_ns + number * 1000, now_ns + number * 1000))

    def write(self, name: str, arrays: Mapping[str, HostArray], chain: Sequence[str] = ()) -> bool:
        """Write a file, which stands on those of the names `chain`; False if it can't fit the budget.

        Raises `SnapshotError` when it can't be written; nothing of it is left then.
        """
        pieces = list(safetensors.encode(arrays))
        num_bytes = sum(memoryview(piece).nbytes for piece in pieces)
        if num_bytes > self._max_bytes:
            return False
        hasher = xxhash.xxh3_128()
        for piece in pieces:
            hasher.update(piece)
        self._make_folder()  # `clear` removes it
        with locked(self.root):
            if self.find(name):
                return True  # another process was quicker
            _sweep(self.root)
            if not self._make_room(num_bytes, spare=set(chain)):
                return False
            folder = Folder.open(self.folder)
            try:
                folder.write(f"{name}.{hasher.hexdigest()}.safetensors", pieces)
            finally:
                folder.close()
            self.find(name)
            self.touch([*chain, name])
        return True

    def _make_room(self, num_bytes: int, spare: Collection[str] = ()) -> bool:
        """Remove what wasn't used longest until `num_bytes` more fit; not what the new file stands on."""
        files = stored_files(self.root)
        total = sum(file.num_bytes for file in files) + num_bytes
        for file in files:
            if total <= self._max_bytes:
                return True
            if file.name in spare and file.path.parent == self.folder:
                continue
            with contextlib.suppress(OSError):
                file.path.unlink()
                total -= file.num_bytes
        return total <= self._max_bytes
