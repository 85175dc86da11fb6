"""The thread that writes the cache's files: off the model's thread, no faster than it may, never in anybody's way."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from mlxgen.errors import SnapshotError
from mlxgen.prefixcache.disk import DiskTier
from mlxgen.snapshot.safetensors import HostArray

_log = logging.getLogger(__name__)

_MAX_WAITING_BYTES = 2**29
_BURST_S = 4.0  # of what may be written a second, this many seconds' worth at once
_CLOSE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One file: its name, its arrays (nobody changes them any more), and the names of the blocks it stands on."""

    name: str
    arrays: Mapping[str, HostArray]
    chain: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class CacheWriter:
    """Writes jobs in order. Owned by the prefix cache of a model; ends with it. Uses no MLX.

    The first failure (a full disk, a folder that can't be written) ends all writing, with one warning: a cache that
    can't be kept is no reason to stop anything. What waits when the process ends is written for 3 seconds more.
    """

    def __init__(self, tier: DiskTier, bytes_per_s: int) -> None:
        self._tier = tier
        self._bytes_per_s = bytes_per_s
        self._jobs: deque[WriteJob] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._busy = False
        self._hurry = False
        self._closed = False
        self.warnings: list[str] = []
        self._thread = threading.Thread(target=self._run, name="mlxgen-prefix-writer", daemon=True)
        self._thread.start()

    def put(self, job: WriteJob) -> bool:
        """Hand a file over; False if too much is waiting already, or nothing can be written."""
        with self._changed:
            if self._closed or self.warnings:
                return False
            if any(job.name == waiting.name for waiting in self._jobs):
                return True
            if self._jobs and self._waiting_bytes + job.num_bytes > _MAX_WAITING_BYTES:
                return False
            self._jobs.append(job)
            self._waiting_bytes += job.num_bytes
            self._changed.notify_all()
        return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Write what waits without holding back; whether all of it was written within `timeout_s`."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)
            self._hurry = False
        return done and not self.warnings

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Write on for `timeout_s` at most, drop the rest, and end the thread. Idempotent."""
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def warn(self, text: str) -> None:
        """Say once that nothing is written any more."""
        if not self.warnings:
            self.warnings.append(f"the prefix cache isn't kept on the disk: {text}")
            _log.warning("%s", self.warnings[0])

    def _run(self) -> None:
        allowed, then_s = self._bytes_per_s * _BURST_S, time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._jobs)
                if self._closed:
                    return
                job = self._jobs.popleft()
                self._waiting_bytes -= job.num_bytes
                self._busy = True
            try:
                now_s = time.monotonic()
                allowed = min(allowed + (now_s - then_s) * self._bytes_per_s, self._bytes_per_s * _BURST_S)
                then_s = now_s
                # A file may overdraw the account; the next one waits until it is settled.
                self._hold_back(-allowed / self._bytes_per_s)
                allowed -= job.num_bytes
                if not self.warnings:
                    self._tier.write(job.name, job.arrays, job.chain)
            except (SnapshotError, OSError, ValueError) as error:
                self.warn(str(error))
            except Exception as error:
                _log.debug("the prefix cache's writer failed", exc_info=True)
                self.warn(repr(error))
            finally:
                del job
                with self._changed:
                    self._busy = False
                    if self.warnings:
                        self._jobs.clear()
                    self._changed.notify_all()

    def _hold_back(self, seconds: float) -> None:
        if seconds > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._hurry or self._closed, seconds)
