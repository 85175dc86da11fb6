"""What a prefix cache holds and has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counted since the model was loaded. Owned by its prefix cache."""

    num_lookups: int = 0
    num_hits: int = 0
    num_reused_tokens: int = 0
    num_stored: int = 0
    num_read: int = 0
    num_damaged: int = 0
    copy_s: float = 0.0  # copying rows out of caches, and into them


@dataclass(frozen=True, slots=True)
class PrefixCacheInfo:
    """`num_bytes`: of blocks in memory; `live_bytes`: of the caches of living sessions, which count in the budget
    (`memory_bytes`) too. `copy_s`: seconds spent copying, out of caches and into them, since the model was loaded."""

    num_blocks: int
    num_bytes: int
    live_bytes: int
    memory_bytes: int
    num_lookups: int
    num_hits: int
    num_reused_tokens: int
    num_stored: int
    num_read: int
    num_damaged: int
    copy_s: float
    warnings: tuple[str, ...]
