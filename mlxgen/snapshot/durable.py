"""Files that survive a kill or a power cut at any instruction, in a private folder that one writer holds.

Everything is opened relative to the folder's descriptor, never through a symbolic link, and read only if it is a
regular file. A write goes to a temporary name, is flushed to the disk, and only then gets its real name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from mlxgen.errors import SnapshotError, SnapshotLockedError

LOCK_NAME: Final = "lock"
TEMPORARY_NAME: Final = re.compile(r"\.tmp-[0-9a-f]{16}")
CHUNK_BYTES: Final = 1 << 20
"""Bytes hashed and written at a time: small enough to stay in the processor's cache between the two."""

MAX_READ_BYTES: Final = 1 << 30
"""Per call; macOS refuses 2 GiB and more."""

_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OUT_OF_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


def snapshot_error(doing: str, path: Path | str, exc: OSError) -> SnapshotError:
    """The `SnapshotError` for a failed system call: what was tried, the system's reason, a remedy; keeps `errno`."""
    if exc.errno in _OUT_OF_SPACE:
        remedy = "free some disk space; what was saved before is intact"
    elif exc.errno in _NOT_ALLOWED:
        remedy = "make the folder writable for you, or use another path; what was saved before is intact"
    elif exc.errno == errno.ELOOP:
        remedy = "a snapshot holds no symbolic links; put the real file there"
    elif exc.errno in (errno.ENOENT, errno.ENOTDIR):
        remedy = "check the path"
    elif exc.errno == errno.ENAMETOOLONG:
        remedy = "use a shorter path"
    else:
        remedy = "check the disk; what was saved before is intact"
    error = SnapshotError(f"can't {doing} {path}: {exc.strerror or exc}; {remedy}")
    error.errno = exc.errno
    return error


def sync_file(fd: int) -> None:
    """Flush a file to the medium: F_FULLFSYNC where there is one (macOS), since fsync there stops at the drive's cache.

    File systems without F_FULLFSYNC (network shares) get a plain fsync. Raises OSError.
    """
    full: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(fd, full)
            return
        except OSError as exc:
            if exc.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS):
                raise
    os.fsync(fd)


def write_all(fd: int, data: memoryview | bytes) -> None:
    """Write every byte, however many calls that takes. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Folder:
    """An open snapshot folder. Usable from any thread; the descriptor stays valid when the folder is renamed."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Open an existing folder. Raises `SnapshotError` when there is none."""
        try:
            return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as exc:
            raise snapshot_error("open the snapshot", path, exc) from exc

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def names(self) -> list[str]:
        """The names of everything in the folder, sorted."""
        try:
            return sorted(os.listdir(self.fd))
        except OSError as exc:
            raise snapshot_error("list", self.path, exc) from exc

    def status(self, name: str) -> os.stat_result | None:
        """`lstat` of an entry, or None when it isn't there."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise snapshot_error("look at", self.path / name, exc) from exc

    def open_regular(self, name: str, flags: int = _READ_FLAGS) -> tuple[int, int]:
        """Open an existing regular file; (descriptor, size in bytes). A link, FIFO or device is a `SnapshotError`."""
        path = self.path / name
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as exc:
            raise snapshot_error("open", path, exc) from exc
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise SnapshotError(f"{path} is not a regular file; a snapshot holds only regular files: remove it")
        except BaseException:
            os.close(fd)
            raise
        return fd, found.st_size

    def read(self, name: str, *, max_bytes: int, num_bytes: int | None = None) -> memoryview:
        """A regular file's bytes, read-only, read once into one buffer.

        The size is checked before anything is allocated or read: at most `max_bytes`, and exactly `num_bytes` if given.
        """
        path = self.path / name
        fd, size = self.open_regular(name)
        try:
            if num_bytes is not None and size != num_bytes:
                raise SnapshotError(
                    f"{path} has {size} bytes, its manifest says {num_bytes}; it is truncated or foreign"
                )
            if size > max_bytes:
                raise SnapshotError(
                    f"{path} has {size} bytes, the limit is {max_bytes}; it is not a file of a snapshot"
                )
            buffer = np.empty(size, np.uint8)
            view, done = buffer.data, 0
            while done < size:
                got = os.readv(fd, [view[done : done + MAX_READ_BYTES]])
                if got == 0:
                    raise SnapshotError(
                        f"{path} ended after {done} of {size} bytes; it is being changed by something else"
                    )
                done += got
        except OSError as exc:
            if isinstance(exc, SnapshotError):
                raise
            raise snapshot_error("read", path, exc) from exc
        finally:
            os.close(fd)
        return view.toreadonly()

    def write(self, name: str, pieces: Iterable[memoryview | bytes], *, replace: bool = False) -> tuple[int, str]:
        """Write a new file so that it has either no name or its whole content on the disk; (bytes, xxh3_128 as hex).

        One pass: each piece is hashed and written chunk by chunk. On any failure nothing of it is left, and it raises
        `SnapshotError`. With `replace`, an existing file of that name is swapped for the new one in one step.
        """
        temporary = f".tmp-{secrets.token_hex(8)}"
        hasher = xxhash.xxh3_128()
        size = 0
        leftover: str | None = temporary
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(temporary, flags, 0o600, dir_fd=self.fd)
            try:
                os.fchmod(fd, 0o600)  # whatever the umask is
                for piece in pieces:
                    view = memoryview(piece)
                    for start in range(0, len(view), CHUNK_BYTES):
                        chunk = view[start : start + CHUNK_BYTES]
                        hasher.update(chunk)
                        write_all(fd, chunk)
                    size += len(view)
                sync_file(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            leftover = None if replace else name
            self.sync()
            leftover = None
        except OSError as exc:
            if isinstance(exc, SnapshotError):
                raise
            raise snapshot_error("write", self.path / name, exc) from exc
        finally:
            if leftover is not None:
                try:
                    os.unlink(leftover, dir_fd=self.fd)
                except OSError:
                    pass  # the failure that led here is the one to report; a sweep removes the rest
        return size, hasher.hexdigest()

    def remove(self, name: str) -> bool:
        """Delete an entry; False when the system won't (sweeping is tidiness, never a reason to fail a save)."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def sync(self) -> None:
        """Make renames and deletions durable. Raises OSError."""
        try:
            os.fsync(self.fd)
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without folder flushing
                raise

    def lock(self) -> int:
        """Become the folder's one writer until the returned descriptor is closed (or the process ends, however).

        Raises `SnapshotLockedError`, with the other process's id, when somebody else is.
        """
        path = self.path / LOCK_NAME
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(LOCK_NAME, flags, 0o600, dir_fd=self.fd)
        except OSError as exc:
            raise snapshot_error("lock", path, exc) from exc
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SnapshotError(f"{path} is not a regular file; a snapshot holds only regular files: remove it")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SnapshotLockedError(
                    f"{self.path} is in use by {self._holder(fd)}; wait for it or stop it, "
                    f"or copy the folder and use the copy"
                ) from None
            os.fchmod(fd, 0o600)
            try:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            except OSError:
                pass  # it only makes a message nicer; a full disk is no reason not to open a snapshot
        except OSError as exc:
            os.close(fd)
            if isinstance(exc, SnapshotError):
                raise
            if exc.errno in _OUT_OF_SPACE + _NOT_ALLOWED:
                raise snapshot_error("lock", path, exc) from exc
            raise SnapshotError(
                f"can't lock {path}: {exc.strerror}; keep snapshots on a file system with flock"
            ) from exc
        except BaseException:
            os.close(fd)
            raise
        return fd

    @staticmethod
    def _holder(fd: int) -> str:
        try:
            text = os.pread(fd, 32, 0).strip()
        except OSError:
            text = b""
        return f"process {int(text)}" if text.isdigit() else "another process"
