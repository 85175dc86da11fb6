"""How much a model's prefix cache may take, in memory and on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlxgen.errors import InvalidValueError
from mlxgen.models.memory import available_bytes

_SHARE_OF_MEMORY = 4


@dataclass(frozen=True, slots=True)
class PrefixCacheOptions:
    """`memory_bytes`: blocks and the caches of live sessions together (None: a quarter of the memory that is free when
    the cache is first used; 0: nothing is kept).

    `disk_bytes`: all files of all models together (0: none). `folder`: where they are (None: `prefix` in the user's
    cache folder). `disk_bytes_per_s`: what is written on average at most; what can't keep up isn't written.
    """

    memory_bytes: int | None = None
    disk_bytes: int = 0
    folder: Path | None = None
    disk_bytes_per_s: int = 64 * 2**20

    def validate(self) -> None:
        """Raises `InvalidValueError` for what can't be."""
        for name in ("memory_bytes", "disk_bytes", "disk_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**63:
                raise InvalidValueError(f"{name} is {value}; give 0 or more bytes")
        if self.disk_bytes and not self.disk_bytes_per_s:
            raise InvalidValueError("disk_bytes_per_s is 0, so nothing could be written; give disk_bytes=0 instead")


def default_memory_bytes() -> int:
    """The memory budget where none was chosen."""
    return available_bytes() // _SHARE_OF_MEMORY
