"""The KV caches of mlx-lm, made exportable, restorable and trimmable, one adapter per kind."""

from mlxgen.cache.adapter import CacheAdapter, adapter_of, can_trim, leaves, trim
from mlxgen.cache.build import CacheOptions, make_cache, quantize_from

__all__ = [
    "CacheAdapter",
    "CacheOptions",
    "adapter_of",
    "can_trim",
    "leaves",
    "make_cache",
    "quantize_from",
    "trim",
]
