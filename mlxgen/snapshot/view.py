"""A snapshot as somebody sees it who only looks: no lock, nothing changed on the disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlxgen.errors import SnapshotError
from mlxgen.snapshot import recovery
from mlxgen.snapshot.durable import Folder
from mlxgen.snapshot.journal import Record
from mlxgen.snapshot.manifest import FileEntry, Manifest
from mlxgen.snapshot.safetensors import HostArray

_MAX_LOOKS: Final = 4
"""How often a reader looks again while a writer changes the folder under it."""


@dataclass(frozen=True)
class SnapshotView:
    """A snapshot as it was when it was looked at; holds no lock and no open file."""

    path: Path
    manifest: Manifest | None
    records: list[Record]
    notes: list[str]

    def read(self, entry: FileEntry) -> dict[str, HostArray]:
        """Like `SnapshotStore.read`; a file that its writer replaced meanwhile is a `SnapshotError`."""
        folder = Folder.open(self.path)
        try:
            return recovery.read_entry(folder, entry)
        finally:
            folder.close()

    def verify(self) -> list[str]:
        """Like `SnapshotStore.verify`."""
        folder = Folder.open(self.path)
        try:
            return recovery.problems_of(folder, self.manifest)
        finally:
            folder.close()


def read_only(path: str | os.PathLike[str]) -> SnapshotView:
    """Look at a snapshot without a lock and without changing anything, also while another process writes it.

    Raises `SnapshotError` as `SnapshotStore.open` does, except that it doesn't mind a writer.
    """
    target = absolute(path)
    folder = Folder.open(target)
    try:
        recovery.require_snapshot(folder)
        for attempt in range(_MAX_LOOKS):
            before = folder.names()
            try:
                found = recovery.recover(folder)
            except SnapshotError:
                if attempt + 1 == _MAX_LOOKS or folder.names() == before:
                    raise
                continue
            if not found.unusable or folder.names() == before:
                break  # otherwise a commit may have swept files between the listing and their check: look again
        newest = found.generations[0] if found.generations else None
        return SnapshotView(target, newest, found.journal.records, found.notes)
    finally:
        folder.close()


def is_snapshot(path: str | os.PathLike[str]) -> bool:
    """Whether there is an mlxgen snapshot folder at the path, whole or damaged. Never raises, changes nothing."""
    return recovery.is_snapshot(absolute(path))


def absolute(path: str | os.PathLike[str]) -> Path:
    """An absolute path with `~` expanded; links in it are left alone."""
    return Path(os.path.abspath(os.path.expanduser(path)))
