"""Models that an installed package brings along, found through the entry-point group `mlxgen.models`.

An entry point's name is the model's name; it names a function without arguments that returns the model's folder.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

GROUP: Final = "mlxgen.models"


@functools.cache
def bundled_models() -> Mapping[str, Path]:
    """Folder by name. One that can't be found is left out with a logged warning. Looked up once per process."""
    found: dict[str, Path] = {}
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            folder = Path(entry.load()())
            if not (folder / "config.json").is_file():
                raise FileNotFoundError(f"{folder} has no config.json")
        except Exception as error:
            _log.warning("the bundled model %r is left out: %s: %s", entry.name, type(error).__name__, error)
            continue
        found.setdefault(entry.name, folder)
    return found
