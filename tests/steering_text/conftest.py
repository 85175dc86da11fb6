from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of snapshots are written here. That they survive a power cut is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
