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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxgen.cache import StateMark
from mlxgen.errors import SnapshotError
from mlxgen.snapshot.export import (
    CacheExport,
    environment,
    export_cache,
    export_marks,
    export_media,
    marks_to_json,
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


# Files (of at most 64 MB, but for media and states) that may wait for the disk while the next one is made.
_MAX_WAITING_FILES = 2


@dataclass(frozen=True, slots=True)
class _NewFile:
    kind: str
    arrays: Mapping[str, HostArray]
    meta: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Job:
    """One generation to be written, its new files first, then the rest of it (`commit`), which says what it all means.

    Large files travel one by one while the next is being copied out of the cache, so that not the whole cache has to
    be in memory twice. `keep`: cache rows behind this position are void in files of earlier jobs.
    """

    added: list[FileEntry] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Commit:
    keep: int
    restart: bool
    body: dict[str, Any]
    pin: JournalPin
    same_state: bool = False  # nothing was fed since the job before: its `state` files still hold
    marks: frozenset[int] = frozenset()  # positions of the state marks in earlier files that still hold


class _Writer:
    """The writer thread. Owns the list of the snapshot's files; one job at a time, in order; ends when told to.

    After a failed job the files it would have added are missing, so the next one must start anew (`failed`).
    """

    def __init__(self, store: SnapshotStore, files: list[FileEntry]) -> None:
        self._store = store
        self._files = files
        self._parts: queue.Queue[tuple[_Job, _NewFile | _Commit] | None] = queue.Queue()
        self._room = threading.Semaphore(_MAX_WAITING_FILES)
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="mlxgen-snapshot-writer", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._parts.unfinished_tasks > 0

    def put(self, job: _Job, new: _NewFile) -> None:
        """Hand a file over; waits while as many as may be in memory at once are waiting to be written."""
        self._room.acquire()
        self._parts.put((job, new))

    def commit(self, job: _Job, commit: _Commit) -> None:
        self._parts.put((job, commit))

    def wait(self) -> None:
        self._parts.join()

    def close(self) -> None:
        self._parts.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            part = self._parts.get()
            try:
                if part is None:
                    return
                job, content = part
                if isinstance(content, _NewFile):
                    self._room.release()
                    self._put(job, content)
                else:
                    self._commit(job, content)
            finally:
                del part  # its arrays, before the next one comes
                self._parts.task_done()

    def _put(self, job: _Job, new: _NewFile) -> None:
        if job.error is None:
            try:
                job.added.append(self._store.put(new.kind, new.arrays, meta=new.meta))
            except BaseException as error:
                job.error = error

    def _commit(self, job: _Job, commit: _Commit) -> None:
        # Whatever goes wrong must not end the thread silently: the model's thread reads it and says it once.
        try:
            if job.error is not None:
                raise job.error
            if self.failed is not None and not commit.restart:
                raise SnapshotError(self.failed)
            files = [] if commit.restart else trim_entries(self._files, commit.keep)
            if not commit.same_state:
                files = [entry for entry in files if entry.kind != "state"]
            files = [entry for entry in files if entry.kind != "mark" or entry.meta["position"] in commit.marks]
            self._store.commit(commit.body, [*files, *job.added], commit.pin)
        except BaseException as error:
            job.error, self.failed = error, str(error)
            for entry in job.added:
                self._discard(entry)
        else:
            self._files = [*files, *job.added]
            self.failed = None

    def abandon(self, job: _Job) -> None:
        """Give up a job that can't be finished; its files are discarded, and the next one must start anew."""
        self.wait()
        for entry in job.added:
            self._discard(entry)

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
        self._marks: dict[int, StateMark] = {}
        self._keep = 0
        self._stuck = False
        self._next_s = 0.0
        self._next_position = 0
        self._restart = False
        self._behind = False  # finished units of media wait for the writer
        self._closed = False

    def adopt(
        self,
        state: SessionState,
        cache: CacheExport,
        media: Mapping[int, tuple[int, int]],
        marks: Sequence[StateMark],
        keep: int,
    ) -> None:
        """Take note of what a resumed snapshot's files hold already, so that only what is new gets written. Cache rows
        in them behind `keep` are void: the conversation was rewound after they had been written."""
        self._cache, self._media = cache, dict(media)
        self._marks = {mark.position: mark for mark in marks}
        self._keep = keep
        self._schedule(state, 0.0)

    # -- records -----------------------------------------------------------------------------------------------------

    def write(self, records: Sequence[Record]) -> None:
        """Bring the journal up to date with `records`, now. While the disk is full they wait for the next save."""
        if not self._stuck and not self._closed:
            self._write(records)

    def _write(self, records: Sequence[Record]) -> bool:
        # Counted by the journal itself: whatever interrupts this, no record is left out or written twice.
        new = records[self._store.num_records :]
        for record in new:
            if record.type in ("prompt", "rewind") and "keep" in record.data:
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
        if self._closed:
            return
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
        if self._closed:
            # A session that was dropped in the middle of a reply: its generator may be closed after its finalizer ran.
            return None
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
            self._cache, self._media, self._marks, self._keep = CacheExport(), {}, {}, 0
        job = _Job()
        try:
            self._hand_over(job, state, restart)
        except Exception as error:
            self._writer.abandon(job)
            self.warn(error)
            return None
        self._restart = self._behind = False
        self._schedule(state, time.perf_counter() - began_s)
        return job

    def _hand_over(self, job: _Job, state: SessionState, restart: bool) -> None:
        for arrays, meta in export_media(state.media, self._media):
            self._writer.put(job, _NewFile("prep", arrays, meta))
        keep = min(self._keep, self._cache.position, state.sequence.num_fed)
        same = not restart and keep == self._cache.position and unchanged(state.sequence, self._cache)
        if same:
            self._cache, restarted = with_pending(self._cache, state.sequence), False
        else:
            files, self._cache, restarted = export_cache(state.sequence, self._cache, keep)
            for kind, arrays, meta in files:
                self._writer.put(job, _NewFile(kind, arrays, meta))
        self._keep = state.sequence.num_fed
        before = dict(self._marks)
        marks = [mark for mark in state.sequence.marks.worth_saving if mark.position != state.sequence.num_fed]
        for kind, arrays, meta in export_marks(marks, self._marks):
            self._writer.put(job, _NewFile(kind, arrays, meta))
        held = frozenset(position for position, mark in self._marks.items() if before.get(position) is mark)
        body = {
            "cache": self._cache.to_json(),
            "marks": marks_to_json(self._marks),
            "media": media_states(state.media),
            "rope_delta": 0 if state.sequence.inputs is None else state.sequence.inputs.rope_delta,
            "processors": state.processor_states(),
            **environment(),
        }
        kept = 0 if restarted else keep
        self._writer.commit(job, _Commit(kept, restart, body, self._store.pin(), same_state=same, marks=held))

    def save(self, state: SessionState) -> None:
        """Write everything now and wait until it is on the disk. Raises `SnapshotError` if it can't be."""
        if self._closed:
            raise SnapshotError(f"{self.path} isn't saved: it was closed")
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
        """Wait for the writer, close the folder and let go of its lock. Later calls of anything do nothing."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._store.close()


def _nothing() -> None:
    return None
