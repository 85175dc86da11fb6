"""What `mlxgen doctor` found out, line by line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `holds` is None for plain information."""

    name: str
    detail: str
    holds: bool | None = None

    def line(self) -> str:
        mark = {None: "      ", True: "ok    ", False: "BROKEN"}[self.holds]
        return f"{mark} {self.name}: {self.detail}"
