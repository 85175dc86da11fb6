"""Make the caches of a model: as the model wants them, bounded (`max_kv_size`) or quantised (`kv_bits`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mlx_lm.models import cache as kinds

from mlxgen.cache.adapter import leaves, map_leaves
from mlxgen.errors import InvalidValueError, UnsupportedError

# The first tokens a bounded cache never overwrites, as mlx-lm keeps them (attention sinks, arXiv:2309.17453).
NUM_KEPT = 4
_BITS = (2, 4, 8)
_GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How a session's caches are built; fixed for the session's life, and part of its snapshot.

    `max_kv_size`: tokens a plain KV cache keeps (older ones, but the first 4, are overwritten). `kv_bits`: quantise
    plain KV caches in groups of `kv_group_size` from the pass on after which they hold at least `quantized_kv_start`
    tokens.

    Caches that can't be trimmed are remembered every `mark_every` tokens, in at most `max_mark_bytes` (but the newest
    mark stays): going back runs the passes since the last mark before the target again.
    """

    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    mark_every: int = 64
    max_mark_bytes: int = 256 * 2**20

    def validate(self) -> None:
        if self.max_kv_size is not None and not 8 <= self.max_kv_size < 2**31:
            raise InvalidValueError(f"max_kv_size is {self.max_kv_size}; give 8 to {2**31 - 1} tokens, or None")
        if self.kv_bits is not None and self.kv_bits not in _BITS:
            raise InvalidValueError(f"kv_bits is {self.kv_bits}; give 2, 4 or 8, or None for no quantisation")
        if self.kv_bits is not None and self.kv_group_size not in _GROUP_SIZES:
            raise InvalidValueError(f"kv_group_size is {self.kv_group_size}; give 32, 64 or 128")
        if not 0 <= self.quantized_kv_start < 2**31:
            raise InvalidValueError(f"quantized_kv_start is {self.quantized_kv_start}; give 0 or more tokens")
        if not 1 <= self.mark_every < 2**31:
            raise InvalidValueError(f"mark_every is {self.mark_every}; give 1 or more tokens (64 is usual)")
        if not 0 <= self.max_mark_bytes < 2**63:
            raise InvalidValueError(f"max_mark_bytes is {self.max_mark_bytes}; give 0 or more bytes")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_cache(module: Any, options: CacheOptions) -> list[Any]:
    """Empty caches for one sequence, one entry per layer.

    Unlike mlx-lm's `make_prompt_cache`, `max_kv_size` also works where the model makes its own caches: each plain
    `KVCache` becomes a ring, sliding-window and recurrent ones stay. Raises `UnsupportedError` for `kv_bits` with
    rings.
    """
    options.validate()
    cache: list[Any] = kinds.make_prompt_cache(module)
    if options.max_kv_size is not None:
        size = options.max_kv_size

        def bounded(path: str, leaf: Any) -> Any:
            return kinds.RotatingKVCache(size, keep=NUM_KEPT) if type(leaf) is kinds.KVCache else leaf

        map_leaves(cache, bounded)
    if options.kv_bits is not None and any(isinstance(leaf, kinds.RotatingKVCache) for _, leaf in leaves(cache)):
        raise UnsupportedError(
            f"kv_bits={options.kv_bits} doesn't work with rotating caches (a sliding-window model, or max_kv_size): "
            "MLX can't quantise a ring; leave one of the two away"
        )
    return cache


def quantize_from(cache: list[Any], options: CacheOptions) -> bool:
    """Quantise, in place, the plain KV caches that have reached `quantized_kv_start`; say whether any was.

    Called after every forward pass (as mlx-lm does), so when it happens is a function of the passes and is repeated
    exactly by a replay.
    """
    if options.kv_bits is None:
        return False
    changed = False

    def convert(path: str, leaf: Any) -> Any:
        nonlocal changed
        if type(leaf) is not kinds.KVCache or leaf.offset < options.quantized_kv_start or leaf.keys is None:
            return leaf
        for part in (leaf.keys, leaf.values):
            if part.shape[-1] % options.kv_group_size:
                raise UnsupportedError(
                    f"kv_group_size={options.kv_group_size} doesn't divide this model's head size {part.shape[-1]}; "
                    "use a smaller group size (32) or no kv_bits"
                )
        changed = True
        return leaf.to_quantized(group_size=options.kv_group_size, bits=options.kv_bits)

    map_leaves(cache, convert)
    return changed


def quantize_empty(cache: list[Any], path: str, group_size: int, bits: int) -> None:
    """Replace the empty plain cache at `path` by an empty quantised one, for a restore."""

    def convert(own_path: str, leaf: Any) -> Any:
        return kinds.QuantizedKVCache(group_size=group_size, bits=bits) if own_path == path else leaf

    map_leaves(cache, convert)
