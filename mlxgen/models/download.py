"""One large file from an HTTP server that knows Range: block by block, resumable, verified by SHA-256."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import huggingface_hub
from filelock import FileLock, Timeout
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from mlxgen.cancellation import CancelToken
from mlxgen.errors import ModelLoadError
from mlxgen.models.background import stream_in_background

_log = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 10.0
_MAX_ATTEMPTS: Final = 5
_RETRY_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class BlobDownload:
    """What to download and where to: `target` appears only when all `size_bytes` have the hash `sha256` (hex)."""

    url: str
    sha256: str
    size_bytes: int
    target: Path
    lock: Path

    @property
    def partial(self) -> Path:
        return self.target.with_name(f"{self.target.name}.mlxgen.incomplete")


def download_blob(blob: BlobDownload, *, on_progress: Callable[[int], None], cancel: CancelToken) -> None:
    """Bring `blob.target` into being. The unit between two checkpoints is one block as it arrives (some 64 kB).

    After a stop or a failure the partial file stays, and the next call asks the server for the rest only. A broken
    connection is tried again five times without progress. Two processes take turns at the lock. `on_progress` gets the
    number of bytes in place.
    """
    with _locked(blob.lock, cancel):
        if blob.target.exists():
            return
        blob.target.parent.mkdir(parents=True, exist_ok=True)
        for last_try in (False, True):
            with open(blob.partial, "ab") as file:
                digest = _hash_partial(blob, file, cancel)
                _fill(blob, file, digest, on_progress, cancel)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() == blob.sha256:
                os.replace(blob.partial, blob.target)
                return
            blob.partial.unlink()
            if last_try:
                raise ModelLoadError(
                    f"{blob.url} arrived twice with SHA-256 {digest.hexdigest()} instead of {blob.sha256}; a proxy or "
                    "the connection changes it, try another network"
                )
            _log.warning("%s arrived damaged (SHA-256 differs); downloading it again", blob.url)


def _hash_partial(blob: BlobDownload, file: Any, cancel: CancelToken) -> Any:
    digest = hashlib.sha256()
    if os.fstat(file.fileno()).st_size > blob.size_bytes:
        file.truncate(0)
    with open(blob.partial, "rb") as existing:
        while block := existing.read(_BLOCK_BYTES):
            cancel.checkpoint()
            digest.update(block)
    return digest


def _fill(blob: BlobDownload, file: Any, digest: Any, on_progress: Callable[[int], None], cancel: CancelToken) -> None:
    done = os.fstat(file.fileno()).st_size
    on_progress(done)
    attempts = 0
    while done < blob.size_bytes:
        before = done
        blocks = stream_in_background(lambda start=done: _blocks(blob, start), cancel=cancel)  # type: ignore[misc]
        try:
            for block in blocks:
                file.write(block)
                digest.update(block)
                done += len(block)
                on_progress(done)
        except ConnectionError as error:
            attempts = 0 if done > before else attempts + 1
            if attempts >= _MAX_ATTEMPTS:
                raise ModelLoadError(
                    f"the connection broke at byte {done} of {blob.size_bytes} of {blob.url} ({error}); try again, it "
                    "goes on from there"
                ) from error
            _log.warning("connection lost at byte %d of %s (%s); going on from there", done, blob.url, error)
            _wait(_RETRY_WAIT_S, cancel)
        finally:
            file.flush()


def _blocks(blob: BlobDownload, start: int) -> Iterator[bytes]:
    """Bytes `[start, size)` of the file. Whatever breaks on the way is a `ConnectionError`."""
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    client: Any = huggingface_hub.get_session()
    try:
        with client.stream("GET", blob.url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as response:
            if response.status_code in (408, 429) or response.status_code >= 500:
                raise ConnectionError(f"HTTP {response.status_code}")
            hf_raise_for_status(response)
            skip = start if response.status_code != 206 else 0  # a server that doesn't know Range sends it all again
            left = blob.size_bytes - start
            for block in response.iter_bytes():  # as they arrive: a slow line must not hold back a megabyte
                if skip:
                    skipped = min(skip, len(block))
                    block, skip = block[skipped:], skip - skipped
                if len(block) > left:
                    raise ModelLoadError(f"{blob.url} is longer than the {blob.size_bytes} bytes the hub announced")
                left -= len(block)
                if block:
                    yield block
            if left:
                raise ConnectionError(f"{left} bytes short")
    except (OSError, GeneratorExit):
        raise
    except Exception as error:  # the HTTP client's transport errors derive from Exception only
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _locked(path: Path, cancel: CancelToken) -> Iterator[None]:
    """huggingface_hub's own lock file for the blob, waited for with checkpoints."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(path))
    while True:
        cancel.checkpoint()
        try:
            lock.acquire(timeout=0.1)
            break
        except Timeout:
            continue
    try:
        yield
    finally:
        lock.release()


def _wait(seconds: float, cancel: CancelToken) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cancel.checkpoint()
        time.sleep(0.05)


def require_disk_space(folder: Path, num_bytes: int, what: str, variable: str = "HF_HUB_CACHE") -> None:
    """Raise `ModelLoadError` before anything is written when `num_bytes` more don't fit on the disk of `folder`.

    `variable` is the environment variable that moves the folder, for the remedy.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise ModelLoadError(
            f"{what} needs {num_bytes / 1e9:.2f} GB in {folder}, and {free / 1e9:.2f} GB are free; free some space, or "
            f"set {variable} to a folder on another disk"
        )
