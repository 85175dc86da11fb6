"""Where mlxgen keeps what it can make again: converted models, file hashes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mlxgen.errors import ModelLoadError


def cache_folder() -> Path:
    """The user's cache folder of mlxgen (not created here).

    `$MLXGEN_CACHE` if set, else `~/Library/Caches/mlxgen` on macOS, else `$XDG_CACHE_HOME/mlxgen` or
    `~/.cache/mlxgen`. Everything in it may be deleted at any time. Read anew at every call.
    """
    if chosen := os.environ.get("MLXGEN_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlxgen"
    # The XDG rules: a relative path in the variable is to be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "mlxgen"


def make_cache_folder(*parts: str) -> Path:
    """The cache folder's subfolder `parts`, made if missing, private to the user (0700)."""
    folder = cache_folder().joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ModelLoadError(
            f"can't make the cache folder {folder}: {error.strerror}; set MLXGEN_CACHE to a folder you can write to"
        ) from error
    return folder
