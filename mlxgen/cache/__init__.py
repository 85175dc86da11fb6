"""The KV caches of mlx-lm, made exportable, restorable and trimmable, one adapter per kind."""

from mlxgen.cache.adapter import CacheAdapter, adapter_of, can_trim, fork, leaves, room_for, trim
from mlxgen.cache.build import CacheOptions, make_cache, quantize_from
from mlxgen.cache.marks import StateMark, StateMarks

__all__ = [
    "CacheAdapter",
    "CacheOptions",
    "StateMark",
    "StateMarks",
    "adapter_of",
    "can_trim",
    "fork",
    "leaves",
    "make_cache",
    "quantize_from",
    "room_for",
    "trim",
]
