"""Snapshots nobody named: where an interrupted run is kept in the cache folder, and how much may gather there."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlxgen.cli.overview import Overview, folder_size, look
from mlxgen.cli.settings import UsageError
from mlxgen.errors import MlxgenError, SnapshotError
from mlxgen.models.cachedir import cache_folder, make_cache_folder
from mlxgen.snapshot.durable import Folder
from mlxgen.snapshot.store import is_snapshot

DEFAULT_BUDGET_BYTES: Final = 4 * 2**30
BUDGET_VARIABLE: Final = "MLXGEN_SNAPSHOT_BUDGET"

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_REMOVING: Final = ".removing-"


def snapshots_folder() -> Path:
    """Where they are (it may not exist yet)."""
    return cache_folder() / "snapshots"


def new_path() -> Path:
    """A name of its own for a new snapshot; sorts by time."""
    folder = make_cache_folder("snapshots")
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}.mlxgen"


def snapshot_paths(folder: Path) -> list[Path]:
    """The snapshots in a folder, the one written to last first."""
    try:
        entries = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SnapshotError(f"can't list {folder}: {error.strerror}; check the path") from error
    found = [path for path in entries if not path.name.startswith(_REMOVING) and is_snapshot(path)]
    return sorted(found, key=last_change, reverse=True)


def last_change(path: Path) -> float:
    """When its journal was last written, in seconds since the epoch."""
    for name in ("journal.log", ""):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def newest_interrupted() -> Path:
    """The interrupted run in the cache folder that was written to last. Raises `SnapshotError` when there is none."""
    folder = snapshots_folder()
    for path in snapshot_paths(folder):
        overview = _seen(path)
        if overview is not None and not overview.finished:
            return path
    raise SnapshotError(f"no interrupted run in {folder}; give the path of a snapshot")


def remove(path: Path) -> None:
    """Delete a snapshot that no process has in use; afterwards it is gone as a whole.

    Raises `SnapshotLockedError` when one has, `SnapshotError` for what isn't a snapshot or can't be deleted.
    """
    if not is_snapshot(path):
        raise SnapshotError(f"{path} is not an mlxgen snapshot; check the path")
    folder = Folder.open(path)
    lock = -1
    try:
        lock = folder.lock()
        # Out of sight in one step: no reader ever finds half of it.
        aside = path.parent / f"{_REMOVING}{secrets.token_hex(8)}"
        os.rename(path, aside)
        shutil.rmtree(aside)
    except OSError as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(
            f"can't remove {path}: {error.strerror or error}; check the folder's permissions"
        ) from error
    finally:
        folder.close()
        if lock >= 0:
            os.close(lock)


def make_room() -> list[Path]:
    """Remove snapshots of the cache folder until what is there is within the budget; the removed ones' paths.

    Finished ones go first, then interrupted ones, the oldest first; one that a process is using stays.
    """
    folder = snapshots_folder()
    _sweep(folder)
    budget = budget_bytes()
    sizes = {path: folder_size(path) for path in snapshot_paths(folder)}
    total = sum(sizes.values())
    removed: list[Path] = []
    if total <= budget:
        return removed
    for candidate in sorted(_candidates(sizes)):
        if total <= budget:
            break
        with contextlib.suppress(MlxgenError):
            remove(candidate.path)
            total -= sizes[candidate.path]
            removed.append(candidate.path)
    return removed


@dataclass(frozen=True, order=True, slots=True)
class _Candidate:
    unfinished: bool
    changed_s: float
    path: Path


def _candidates(sizes: dict[Path, int]) -> Iterator[_Candidate]:
    for path in sizes:
        overview = _seen(path)
        yield _Candidate(overview is not None and not overview.finished, last_change(path), path)


def _seen(path: Path) -> Overview | None:
    try:
        return look(path)
    except MlxgenError:
        return None  # damaged or just being removed: as good as finished


def _sweep(folder: Path) -> None:
    for left in folder.glob(f"{_REMOVING}*"):
        shutil.rmtree(left, ignore_errors=True)


def budget_bytes() -> int:
    """`$MLXGEN_SNAPSHOT_BUDGET` (bytes, or a number with K, M, G or T), else 4 GiB."""
    return bytes_of_variable(BUDGET_VARIABLE, DEFAULT_BUDGET_BYTES)


def bytes_of_variable(name: str, default: int) -> int:
    """The size that an environment variable gives, or the default without it."""
    text = os.environ.get(name)
    if not text:
        return default
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{name} is {text!r}; give bytes, or a number with K, M, G or T, such as 4G")
    return int(float(match[1]) * _UNITS[match[2].lower()])
