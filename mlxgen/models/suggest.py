"""`did you mean …?` for names that aren't there."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


def closest(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of the candidates, or an empty string."""
    known = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f"; did you mean {known[matches[0]]!r}?" if matches and known[matches[0]] != name else ""


def nearby_folder(path: Path) -> str:
    """`; did you mean '…'?` for the folder beside `path` with the nearest name, or an empty string."""
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except OSError:
        return ""
    matches = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; did you mean '{path.parent / matches[0]}'?" if matches else ""
