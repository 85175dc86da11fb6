"""Know a file or folder again by its content."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from mlxgen.cancellation import NEVER, CancelToken


def hash_file(path: Any, *, cancel: CancelToken = NEVER) -> str:
    """SHA-256 (hex) of a file's bytes, a checkpoint every few megabytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(4 * 2**20):
            cancel.checkpoint()
            digest.update(block)
    return digest.hexdigest()


def hash_folder(path: Any, *, cancel: CancelToken = NEVER) -> str:
    """SHA-256 (hex) of the names and contents of a folder's files; hidden ones, which file managers write, don't count.

    To know the folder again, whatever a family makes of it.
    """
    digest = hashlib.sha256()
    for name in sorted(os.listdir(path)):
        file = os.path.join(path, name)
        if not name.startswith(".") and os.path.isfile(file):
            digest.update(os.fsencode(name) + b"\0" + bytes.fromhex(hash_file(file, cancel=cancel)))
    return digest.hexdigest()


def num_bytes_of(path: Any) -> int:
    """Bytes of a file, or of the files in a folder; 0 for what isn't there."""
    if os.path.isdir(path):
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    return os.path.getsize(path) if os.path.isfile(path) else 0
