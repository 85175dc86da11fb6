"""What the command's exit code says."""

from __future__ import annotations

from typing import Final

OK: Final = 0
ERROR: Final = 1
USAGE: Final = 2
CLOSED_PIPE: Final = 141
"""The reader of standard output went away: 128 + SIGPIPE, as a shell shows it for ordinary tools."""

_OF_REASON: Final = {
    "interrupt": 130,
    "terminate": 143,
    "hangup": 129,
    "deadline": 124,
    "disconnect": CLOSED_PIPE,
}


def of_cancel_reason(reason: str | None) -> int:
    """128 + the signal's number; 124 for `--timeout`, as timeout(1) has it."""
    return _OF_REASON.get(reason or "", ERROR)
