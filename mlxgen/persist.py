"""Keep a session's snapshot up to date: records at once, arrays in increments, files written on another thread.

The model's thread evaluates copies of the rows that are new and hands them over; hashing, writing and fsync happen on
the writer thread. What the two threads share is a queue of finished jobs' inputs: no live array ever crosses.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxgen.errors import SnapshotError
from mlxgen.snapshot.export import (
    CacheExport,
    environment,
    export_cache,
    export_media,
    media_states,
    trim_entries,
    unchanged,
    with_pending,
)
from mlxgen.snapshot.store import FileEntry, HostArray, JournalPin, Record, SnapshotStore
from mlxgen.state import SessionState, Unit

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AutosavePolicy:
    """When arrays are saved without being asked: after `every_s` seconds or `every_tokens` tokens, and at phase
    changes.

    Never so often that handing over takes more than `max_share` of the time (records are written with every token
    anyway: what an autosave spares a resumed run is feeding tokens again).
    """

    every_s: float = 10.0
    every_tokens: int = 256
    max_share: float = 0.005


@dataclass(frozen=True, slots=True)
class _NewFile:
    kind: str
    arrays: Mapping[str, HostArray]
    meta: dict[str, Any]


@dataclass(slots=True)
class _Job:
    """One generation to be written. `keep`: cache rows behind this position are void in files of earlier jobs."""

    new: list[_NewFile]
    keep: int
    restart: bool
    body: dict[str, Any]
    pin: JournalPin
    same_state: bool = False  # nothing was fed since the job before: its `state` files still hold
    error: BaseException | None = None


class _Writer:
    """The writer thread. Owns the list of the snapshot's files; one job at a time, in order; ends when told to.

    After a failed job the files it would have added are missing, so the next one must start anew (`failed`).
    """

    def __init__(self, store: SnapshotStore, files: list[FileEntry]) -> None:
        self._store = store
        self._files = files
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="mlxgen-snapshot-writer", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._jobs.unfinished_tasks > 0

    def submit(self, job: _Job) -> None:
        self._jobs.put(job)

    def wait(self) -> None:
        self._jobs.join()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                self._write(job)
            except BaseException as error:
                # Whatever it is must not kill the thread silently: the model's thread reads it and says it once.
                self.failed = str(error)
                if job is not None:
                    job.error = error
            finally:
                self._jobs.task_done()

    def _write(self, job: _Job) -> None:
        if self.failed is not None and not job.restart:
            raise SnapshotError(self.failed)
        files = [] if job.restart else trim_entries(self._files, job.keep)
        if not job.same_state:
            files = [entry for entry in files if entry.kind != "state"]
        added: list[FileEntry] = []
        try:
            for new in job.new:
                added.append(self._store.put(new.kind, new.arrays, meta=new.meta))
            self._store.commit(job.body, [*files, *added], job.pin)
        except BaseException:
            for entry in added:
                self._discard(entry)
            raise
        self._files = [*files, *added]
        self.failed = None

    def _discard(self, entry: FileEntry) -> None:
        try:
            self._store.discard(entry)
        except (SnapshotError, ValueError):
            _log.debug("couldn't discard %s", entry.name, exc_info=True)


class Keeper:
    """The link between one session and its snapshot folder; holds the folder's lock while it lives.

    Owned by the session, used on the session's thread (the writer thread is its own). A failed write never stops a
    generation: it is put into `warnings` once, the last good generation stays, and later saves try again from scratch.
    """

    def __init__(self, store: SnapshotStore, policy: AutosavePolicy, *, files: list[FileEntry] | None = None) -> None:
        self.path: Path = store.path
        self.warnings: list[str] = []
        self._store = store
        self._policy = policy
        self._writer = _Writer(store, list(files or []))
        self._cache = CacheExport()
        self._media: dict[int, tuple[int, int]] = {}
        self._keep = 0
        self._stuck = False
        self._next_s = 0.0
        self._next_position = 0
        self._restart = False
        self._behind = False  # finished units of media wait for the writer

    def adopt(self, state: SessionState, cache: CacheExport, media: Mapping[int, tuple[int, int]]) -> None:
        """Take note of what a resumed snapshot's files hold already, so that only what is new gets written."""
        self._cache, self._media = cache, dict(media)
        self._keep = state.sequence.num_fed
        self._schedule(state, 0.0)

    # -- records -----------------------------------------------------------------------------------------------------

    def write(self, records: Sequence[Record]) -> None:
        """Bring the journal up to date with `records`, now. While the disk is full they wait for the next save."""
        if not self._stuck:
            self._write(records)

    def _write(self, records: Sequence[Record]) -> bool:
        # Counted by the journal itself: whatever interrupts this, no record is left out or written twice.
        new = records[self._store.num_records :]
        for record in new:
            if record.type == "prompt":
                self._keep = min(self._keep, int(record.data["keep"]))
        try:
            self._store.append(new)
        except SnapshotError as error:
            self._stuck = True
            self.warn(error)
            return False
        self._stuck = False
        return True

    def warn(self, error: BaseException) -> None:
        """Say once, in `warnings` and the log, that saving failed."""
        text = f"the snapshot isn't being saved: {error}"
        if text not in self.warnings:
            self.warnings.append(text)
            _log.warning("%s", text)

    # -- arrays --------------------------------------------------------------------------------------------------------

    def tick(self, state: SessionState, unit: Unit, settle: Callable[[], None]) -> None:
        """Autosave if it is time. `settle` waits for the token in flight; it is only called when something is saved.

        A prepared picture is saved at once, after waiting for the one before it: a kill takes what is being worked on
        and at most one that was finished. What else is finished of media while the writer is busy goes together.
        """
        if unit == "image":
            self._writer.wait()
            self._save(state, settle)
            return
        if unit in ("frame", "features"):
            self._behind = True
        now_s = time.monotonic()
        due = self._behind or (
            now_s >= self._next_s
            and (
                unit == "chunk"
                or now_s >= self._next_s + self._policy.every_s
                or state.sequence.num_fed >= self._next_position
            )
        )
        if due and not self._writer.busy:
            self._save(state, settle)

    def _schedule(self, state: SessionState, cost_s: float) -> None:
        # After a handover that took c seconds the next comes no sooner than c / max_share later.
        self._next_s = time.monotonic() + cost_s / self._policy.max_share
        self._next_position = state.sequence.num_fed + self._policy.every_tokens

    def _save(self, state: SessionState, settle: Callable[[], None]) -> _Job | None:
        began_s = time.perf_counter()
        if self._writer.failed is not None:
            self.warn(SnapshotError(self._writer.failed))
            if self._writer.busy:
                return None
            self._restart = True
        if not self._write(state.history.records):
            return None
        settle()
        restart, self._restart = self._restart, True  # until the job is handed over, whatever comes between
        if restart:
            self._cache, self._media, self._keep = CacheExport(), {}, 0
        try:
            job = self._job(state, restart)
        except Exception as error:
            self.warn(error)
            return None
        self._writer.submit(job)
        self._restart = self._behind = False
        self._schedule(state, time.perf_counter() - began_s)
        return job

    def _job(self, state: SessionState, restart: bool) -> _Job:
        new = [_NewFile("prep", arrays, meta) for arrays, meta in export_media(state.media, self._media)]
        keep = min(self._keep, self._cache.position, state.sequence.num_fed)
        same = not restart and keep == self._cache.position and unchanged(state.sequence, self._cache)
        if same:
            self._cache, restarted = with_pending(self._cache, state.sequence), False
        else:
            files, self._cache, restarted = export_cache(state.sequence, self._cache, keep)
            new += [_NewFile(kind, arrays, meta) for kind, arrays, meta in files]
        self._keep = state.sequence.num_fed
        body = {
            "cache": self._cache.to_json(),
            "media": media_states(state.media),
            "rope_delta": 0 if state.sequence.inputs is None else state.sequence.inputs.rope_delta,
            "processors": state.processor_states(),
            **environment(),
        }
        return _Job(new, 0 if restarted else keep, restart, body, self._store.pin(), same_state=same)

    def save(self, state: SessionState) -> None:
        """Write everything now and wait until it is on the disk. Raises `SnapshotError` if it can't be."""
        self._writer.wait()
        job = self._save(state, _nothing)
        self._writer.wait()
        if job is not None and job.error is not None:
            # An earlier job's failure may have been the reason (its files are missing): once more, from scratch.
            job = self._save(state, _nothing)
            self._writer.wait()
        if job is None or job.error is not None:
            reason = self._writer.failed or (self.warnings[-1] if self.warnings else "the journal can't be written")
            raise SnapshotError(f"{self.path} isn't saved: {reason}")

    def close(self) -> None:
        """Wait for the writer, close the folder and let go of its lock."""
        self._writer.close()
        self._store.close()


def _nothing() -> None:
    return None
