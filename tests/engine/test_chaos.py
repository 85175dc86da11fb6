"""A few runs of `scripts/chaos_kill.py`: kill -9 at random moments, also while resuming; the same byte for byte."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos_kill.py"


def test_killed_at_random_moments_and_resumed_a_run_is_byte_identical() -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--runs",
        "4",
        "--case",
        "lfm2/sampled",
        "--max-tokens",
        "100",
        "--cold",
        "0",
    ]
    result = subprocess.run([*command, "--jobs", "2", "--verbose"], capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 of 4 runs byte-identical" in result.stdout
    kills = [int(count) for count in re.findall(r"(?:decode|load|prefill|save)\)? (\d+)", result.stdout)]
    assert sum(kills) >= 4, result.stdout
