"""A few runs of `scripts/chaos_cache.py`: kill -9 during writes, damage, a full disk, folders nobody can write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos_cache.py"


def test_killed_while_it_writes_the_cache_never_answers_wrongly() -> None:
    command = [sys.executable, str(SCRIPT), "--runs", "1", "--prompts", "2", "--kinds", "lfm2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 of 1 runs right" in result.stdout
