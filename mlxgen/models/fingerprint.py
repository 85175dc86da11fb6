"""Which model this is: SHA-256 over everything that decides what it says.

Header and size don't tell a fine-tune from its base, so the weights themselves are hashed: by the hub's own SHA-256
where the file lies in a hub cache, else by reading it once and remembering the result for exactly that file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import ModelLoadError
from mlxgen.models.adapter import CONFIG_NAME, WEIGHTS_NAME
from mlxgen.models.cachedir import cache_folder

_log = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 8 << 20
_SETTLED_NS = 1_000_000_000
_SHA256_NAME: Final = re.compile(r"[0-9a-f]{64}")

_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "config": ("config.json", "hf_quant_config.json"),
    "generation_config": ("generation_config.json",),
    "tokenizer": (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "*.tiktoken",
    ),
    "chat_template": ("chat_template.jinja", "chat_template.json"),
    "processor": ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`digest` (64 hex digits) identifies the model; `parts` holds the SHA-256 of each part it was made from."""

    digest: str
    parts: Mapping[str, str]

    @classmethod
    def of(cls, parts: Mapping[str, str]) -> Fingerprint:
        ordered = dict(sorted(parts.items()))
        return cls(hashlib.sha256(json.dumps(ordered, separators=(",", ":")).encode()).hexdigest(), ordered)

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the parts that aren't the same in both, sorted; empty when it is the same model."""
        names = self.parts.keys() | other.parts.keys()
        return tuple(sorted(name for name in names if self.parts.get(name) != other.parts.get(name)))


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells whether a file is still the one that was seen: size, times and inode, without reading it."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        try:
            status = path.stat()
        except OSError as error:
            raise ModelLoadError(f"can't read {path}: {error.strerror}") from error
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def fingerprint_parts(folder: Path, weights: Iterable[Path], adapter: Path | None = None) -> dict[str, list[Path]]:
    """Which files make up each part of a model's fingerprint. `weights` are the folder's weight files."""
    parts = {
        part: sorted(path for pattern in patterns for path in folder.glob(pattern)) for part, patterns in _PARTS.items()
    }
    parts.update({f"weights/{path.name}": [path] for path in weights})
    if adapter is not None:
        parts["adapter"] = [adapter / CONFIG_NAME, adapter / WEIGHTS_NAME]
    return {part: files for part, files in parts.items() if files}


def stamp_files(parts: Mapping[str, Iterable[Path]]) -> dict[Path, FileStamp]:
    return {path: FileStamp.of(path) for files in parts.values() for path in files}


def fingerprint_files(
    parts: Mapping[str, Iterable[Path]],
    *,
    loaded: Mapping[Path, FileStamp] | None = None,
    cancel: CancelToken = NEVER,
) -> Fingerprint:
    """The fingerprint of a model on disk. One checkpoint per 8 MB read.

    `loaded` are the stamps taken when the model was loaded: a file that has changed since then isn't what is in memory,
    and raises `ModelLoadError`.
    """
    digests: dict[str, str] = {}
    for part, files in parts.items():
        digest = hashlib.sha256()
        for path in files:
            if loaded is not None and loaded.get(path) != FileStamp.of(path):
                raise ModelLoadError(f"{path} has changed since the model was loaded; load the model again")
            digest.update(f"{path.name}\0{file_sha256(path, cancel=cancel)}\n".encode())
        digests[part] = digest.hexdigest()
    return Fingerprint.of(digests)


def fingerprint_arrays(
    module: Any, tokenizer: Any, config: Mapping[str, Any], *, cancel: CancelToken = NEVER
) -> Fingerprint:
    """The fingerprint of a model built in memory: a hash of its arrays, tokenizer, template and config.

    Evaluates the parameters; call it on the thread that owns the model. One checkpoint per 8 MB.
    """
    digest = hashlib.sha256(type(module).__qualname__.encode())
    for name, array in sorted(tree_flatten(module.parameters()), key=lambda item: item[0]):
        digest.update(f"{name}\0{array.dtype}\0{array.shape}\n".encode())
        _update_in_blocks(digest, array, cancel)
    return Fingerprint.of(
        {
            "arrays": digest.hexdigest(),
            "config": _json_sha256(dict(config)),
            "tokenizer": _tokenizer_sha256(tokenizer),
            "chat_template": _json_sha256(getattr(tokenizer, "chat_template", None)),
        }
    )


def _update_in_blocks(digest: Any, array: mx.array, cancel: CancelToken) -> None:
    if array.size == 0:
        return
    # As bytes, because NumPy has no bfloat16.
    view = np.asarray(mx.contiguous(array.reshape(-1)).view(mx.uint8))
    for start in range(0, view.size, _BLOCK_BYTES):
        cancel.checkpoint()
        digest.update(view[start : start + _BLOCK_BYTES].data)


def _tokenizer_sha256(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
    return _json_sha256(vocabulary)


def _json_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def file_sha256(path: Path, *, cancel: CancelToken = NEVER) -> str:
    """SHA-256 (hex) of a file's bytes: from the hub's blob name, from the cache of hashes, or by reading the file."""
    if (known := hub_blob_sha256(path)) is not None:
        return known
    stamp = FileStamp.of(path)
    if (cached := _cached_hash(path, stamp)) is not None:
        return cached
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                cancel.checkpoint()
                digest.update(block)
    except OSError as error:
        raise ModelLoadError(f"can't read {path}: {error.strerror}") from error
    if FileStamp.of(path) != stamp:
        raise ModelLoadError(f"{path} changed while it was being hashed; wait until it is written, and try again")
    _remember_hash(path, stamp, digest.hexdigest())
    return digest.hexdigest()


def hub_blob_sha256(path: Path) -> str | None:
    """The SHA-256 by which a hub cache names the blob that `path` links to, or None.

    Large files lie in `models--…/blobs/` under their SHA-256 (64 hex digits), which was compared when they were
    downloaded; small ones under a git hash (40), which isn't taken.
    """
    current = path
    for _ in range(8):
        if not current.is_symlink():
            return None
        try:
            current = Path(os.path.normpath(current.parent / os.readlink(current)))
        except OSError:
            return None
        in_cache = current.parent.name == "blobs" and current.parent.parent.name.startswith("models--")
        if in_cache and _SHA256_NAME.fullmatch(current.name) and current.exists():
            return current.name
    return None


def _cache_entry(path: Path) -> Path:
    return cache_folder() / "hashes" / f"{hashlib.sha256(os.path.realpath(path).encode()).hexdigest()}.json"


def _cache_key(path: Path, stamp: FileStamp) -> list[Any]:
    return [os.path.realpath(path), stamp.size, stamp.mtime_ns, stamp.ctime_ns, stamp.inode]


def _cached_hash(path: Path, stamp: FileStamp) -> str | None:
    try:
        entry = json.loads(_cache_entry(path).read_bytes())
        digest = entry["sha256"]
        if entry["key"] == _cache_key(path, stamp) and _SHA256_NAME.fullmatch(digest):
            return str(digest)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _remember_hash(path: Path, stamp: FileStamp, digest: str) -> None:
    # A file written a moment ago can change again without its times changing (they tick in milliseconds).
    if time.time_ns() - max(stamp.mtime_ns, stamp.ctime_ns) < _SETTLED_NS:
        return
    entry = _cache_entry(path)
    temporary = entry.with_name(f"{entry.name}.{os.getpid()}.tmp")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_text(json.dumps({"key": _cache_key(path, stamp), "sha256": digest}))
        os.replace(temporary, entry)
    except OSError as error:  # a cache that can't be written costs time only
        _log.debug("can't remember the hash of %s: %s", path, error)
