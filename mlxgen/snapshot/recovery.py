"""What a snapshot folder holds, judged without changing it: the journal's good part and the generations that verify.

The journal is the truth: its records stand on their own checksums, whatever happens to the generations. A generation
stands if its manifest is whole, the part of the journal it pins is, and every file it names is there with the right
size (their content is checked when it is read).
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from mlxgen.errors import SnapshotError
from mlxgen.snapshot import manifest as manifests
from mlxgen.snapshot import safetensors
from mlxgen.snapshot.durable import LOCK_NAME, TEMPORARY_NAME, Folder
from mlxgen.snapshot.journal import HEADER_START, JOURNAL_NAME, MAX_JOURNAL_BYTES, JournalContent, parse
from mlxgen.snapshot.manifest import (
    DATA_NAME,
    MANIFEST_NAME,
    MAX_DATA_FILE_BYTES,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    ManifestError,
    UnknownSchemaError,
    manifest_name,
)
from mlxgen.snapshot.safetensors import HostArray


@dataclass
class Recovered:
    """The result of `recover`. `generations` are the usable ones, newest first; `unusable` maps others to why not."""

    names: list[str]
    journal: JournalContent
    hasher: xxhash.xxh3_128
    generations: list[Manifest]
    unusable: dict[int, str]
    notes: list[str] = field(default_factory=list)


def recover(folder: Folder) -> Recovered:
    """Judge a folder. Raises `SnapshotError` when nothing in it can be used, or a newer mlxgen wrote it."""
    path = folder.path
    names = folder.names()
    if JOURNAL_NAME not in names:
        raise SnapshotError(f"{path} has no {JOURNAL_NAME}; check the path, or restore that file from a backup")
    journal = parse(folder.read(JOURNAL_NAME, max_bytes=MAX_JOURNAL_BYTES), path / JOURNAL_NAME)
    parsed: list[Manifest] = []
    unusable: dict[int, str] = {}
    foreign: str | None = None
    for generation in sorted(generation_numbers(names), reverse=True):
        if generation < journal.first_generation:
            break  # left over from what was overwritten; the next sweep has it
        try:
            name = manifest_name(generation)
            parsed.append(manifests.decode(folder.read(name, max_bytes=MAX_MANIFEST_BYTES), generation))
        except UnknownSchemaError as exc:
            if exc.certain:
                raise SnapshotError(f"{path / name}: {exc}; use the version of mlxgen that wrote it") from exc
            unusable[generation], foreign = str(exc), foreign or str(exc)
        except (ManifestError, SnapshotError) as exc:
            unusable[generation] = str(exc)
    digests, hasher = journal.hash_prefixes(manifest.pin.length for manifest in parsed)
    usable: list[Manifest] = []
    for manifest in parsed:
        problem = _generation_problem(folder, manifest, journal, digests.get(manifest.pin.length))
        if problem is None:
            usable.append(manifest)
        else:
            unusable[manifest.generation] = problem
    if foreign is not None and not usable:
        raise SnapshotError(
            f"{path}: {foreign}; use the version of mlxgen that wrote it, or restore the folder from a backup"
        )
    if not usable and not journal.records and (unusable or (journal.problem is not None and not journal.torn)):
        reasons = [f"generation {number}: {why}" for number, why in sorted(unusable.items(), reverse=True)]
        if journal.problem is not None:
            reasons.insert(0, f"{JOURNAL_NAME}: {journal.problem}")
        raise SnapshotError(
            f"{path} is damaged and nothing in it can be used ({'; '.join(reasons)}); "
            f"restore the folder from a backup, or begin again with overwrite"
        )
    found = Recovered(names, journal, hasher, usable, unusable)
    found.notes = _notes(found)
    return found


def _generation_problem(folder: Folder, manifest: Manifest, journal: JournalContent, digest: str | None) -> str | None:
    if manifest.journal_id != journal.journal_id:
        return f"it belongs to another journal than {JOURNAL_NAME}"
    problem = journal.pin_problem(manifest.pin, digest)
    if problem is not None:
        return problem
    for entry in manifest.files:
        status = folder.status(entry.name)
        if status is None:
            return f"{entry.name} is missing"
        if not stat.S_ISREG(status.st_mode):
            return f"{entry.name} is not a regular file"
        if status.st_size != entry.bytes:
            return f"{entry.name} has {status.st_size} bytes instead of {entry.bytes}"
    return None


def _notes(found: Recovered) -> list[str]:
    notes = []
    journal = found.journal
    if journal.problem is not None:
        lost = f"{journal.size - journal.length} bytes after its first {len(journal.records)} records are not used"
        notes.append(f"{JOURNAL_NAME}: {journal.problem}; {lost}")
    chosen = found.generations[0].generation if found.generations else 0
    instead = f"generation {chosen} is used instead" if chosen else "the journal alone is used instead"
    for generation, why in sorted(found.unusable.items(), reverse=True):
        if generation > chosen:
            notes.append(f"generation {generation} can't be used: {why}; {instead}")
    return notes


def read_entry(folder: Folder, entry: FileEntry) -> dict[str, HostArray]:
    """The arrays of one data file, after its type, size, hash and structure were checked. Raises `SnapshotError`."""
    path = folder.path / entry.name
    try:
        manifests.check_entry(entry)
    except ManifestError as exc:
        raise SnapshotError(f"{folder.path}: {exc}; the snapshot is damaged") from exc
    data = folder.read(entry.name, max_bytes=MAX_DATA_FILE_BYTES, num_bytes=entry.bytes)
    if xxhash.xxh3_128(data).hexdigest() != entry.xxh3:
        raise SnapshotError(
            f"{path} fails its hash, so its content changed; fall back a generation or restore a backup"
        )
    try:
        return safetensors.decode(data)
    except safetensors.SafetensorsError as exc:
        raise SnapshotError(f"{path}: {exc}; fall back a generation or restore a backup") from exc


def problems_of(folder: Folder, manifest: Manifest | None) -> list[str]:
    """Everything wrong with one generation, each file read and checked whole; empty when it is sound."""
    found = recover(folder)
    if manifest is None:
        return found.notes
    problems = [] if found.journal.problem is None else [f"{JOURNAL_NAME}: {found.journal.problem}"]
    if manifest not in found.generations:
        why = found.unusable.get(manifest.generation, f"{manifest_name(manifest.generation)} is gone or another one")
        problems.append(f"generation {manifest.generation} can't be used: {why}")
    for entry in manifest.files:
        try:
            read_entry(folder, entry)
        except SnapshotError as exc:
            problems.append(str(exc))
    return problems


def generation_numbers(names: Iterable[str]) -> list[int]:
    """The generations that have a manifest under its canonical name."""
    matches = (MANIFEST_NAME.fullmatch(name) for name in names)
    return [int(found[1]) for found in matches if found and found[0] == manifest_name(int(found[1]))]


def is_ours(name: str) -> bool:
    """Whether a name is one this format uses: what is swept or overwritten is only ever among these."""
    if name in (JOURNAL_NAME, LOCK_NAME):
        return True
    return any(pattern.fullmatch(name) for pattern in (TEMPORARY_NAME, MANIFEST_NAME, DATA_NAME))


def require_snapshot(folder: Folder) -> None:
    """Raise `SnapshotError` for a folder that is empty or isn't a snapshot, before anything is made in it."""
    if is_unbegun(folder.names()):
        raise SnapshotError(
            f"{folder.path} holds no snapshot (none was begun in it); remove it, or begin again with overwrite"
        )
    if not is_snapshot(folder.path):
        raise SnapshotError(f"{folder.path} is not an mlxgen snapshot; check the path")


def is_unbegun(names: Iterable[str]) -> bool:
    """Whether a folder's names are those of a snapshot killed before its journal existed (nothing was promised yet)."""
    return all(name == LOCK_NAME or TEMPORARY_NAME.fullmatch(name) for name in names)


def is_snapshot(path: Path) -> bool:
    """Whether there is an mlxgen snapshot folder, whole or damaged. Never raises, changes nothing."""
    try:
        folder = Folder.open(path)
    except SnapshotError:
        return False
    try:
        if generation_numbers(folder.names()):
            return True
        fd, _ = folder.open_regular(JOURNAL_NAME)
        with open(fd, "rb") as file:
            start = file.read(64)
        return path.suffix == ".mlxgen" or HEADER_START.match(start) is not None
    except OSError:
        return False
    finally:
        folder.close()
