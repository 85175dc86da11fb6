from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own for every test, here and in the processes it starts; its snapshots' folder."""
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLXGEN_SNAPSHOT_BUDGET", raising=False)
    return tmp_path / "cache" / "snapshots"
