"""What a model, its cache and one prefill chunk will take, against what there is, before anything is allocated.

On the CPU an allocation that is too large ends the process instead of raising, and on a Mac it starts to swap: so the
estimate comes first.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxgen.errors import OutOfMemoryError
from mlxgen.models.checkpoint import TensorInfo
from mlxgen.models.config import text_config
from mlxgen.models.model import Model
from mlxgen.streams import generation_stream

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that a load or a run will allocate on top of what is there."""

    weights_bytes: int = 0
    cache_bytes: int = 0
    activation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class RunSize:
    """The size of a run: `num_tokens` of prompt and reply together, prefilled `chunk_size` at a time.

    `kv_bits` and `kv_group_size` as for a quantised KV cache (None: not quantised).
    """

    num_tokens: int
    chunk_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64


def estimate_weights(tensors: Mapping[str, TensorInfo]) -> MemoryEstimate:
    """Memory for a checkpoint with these tensors (from its headers; nothing is loaded)."""
    return MemoryEstimate(weights_bytes=sum(tensor.num_bytes for tensor in tensors.values()))


def estimate_run(model: Model, size: RunSize) -> MemoryEstimate:
    """Memory for the cache and the activations of a run on a loaded model.

    The cache's row sizes come from the model itself: one token is passed through lazily, and the shapes its caches
    would get are read; nothing is computed. Activations are an upper bound for the widest layer.
    """
    chunk = max(1, min(size.chunk_size, size.num_tokens))
    return MemoryEstimate(
        cache_bytes=sum(_cache_bytes(cache, size) for cache in _traced_caches(model)),
        activation_bytes=_activation_bytes(model, size.num_tokens, chunk),
    )


def _traced_caches(model: Model) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    module = model.vision.language if model.vision is not None else model.module
    caches: list[Any] = make_prompt_cache(module)
    model.forward(mx.zeros((1,), dtype=mx.uint32), cache=caches, start=0, inputs=None)
    return caches


def _cache_bytes(cache: Any, size: RunSize) -> int:
    from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache

    from mlxgen.cache import room_for

    if isinstance(cache, CacheList):
        return sum(_cache_bytes(part, size) for part in cache.caches)
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if keys is None or values is None:  # recurrent state: the same size for any number of tokens
        return sum(int(array.nbytes) for _, array in tree_flatten(cache.state) if isinstance(array, mx.array))
    rows = room_for(size.num_tokens)
    if isinstance(cache, RotatingKVCache):
        rows = min(rows, cache.max_size + size.chunk_size)
    elif isinstance(cache, ChunkedKVCache):
        rows = min(rows, cache.chunk_size + room_for(size.chunk_size))
    elements = rows * sum(int(array.size) // int(array.shape[-2]) for array in (keys, values))
    item_bytes = int(keys.itemsize)
    if size.kv_bits is not None and type(cache) is KVCache:
        return elements * size.kv_bits // 8 + 2 * item_bytes * elements // size.kv_group_size
    return elements * item_bytes


def _activation_bytes(model: Model, num_tokens: int, chunk: int) -> int:
    config = text_config(model.config)

    def number(key: str, default: int) -> int:
        value = config.get(key)
        value = max(value) if isinstance(value, list) and value else value
        return value if isinstance(value, int) else default

    item_bytes = max(
        (int(a.itemsize) for _, a in tree_flatten(model.module.parameters()) if mx.issubdtype(a.dtype, mx.floating)),
        default=4,
    )
    hidden = number("hidden_size", 4096)
    width = 8 * hidden + 3 * number("intermediate_size", 4 * hidden)
    total = chunk * width * item_bytes + 2 * 4 * model.vocab_size
    if mx.default_device() == mx.cpu:  # attention scores exist in full there; Metal's kernel never stores them
        total += 2 * chunk * num_tokens * number("num_attention_heads", 1) * item_bytes
    return total


def available_bytes() -> int:
    """Bytes that can still be allocated: of the GPU's recommended working set, or of physical memory on the CPU.

    MLX's own cache of freed buffers counts as available.
    """
    recommended = _recommended_bytes()
    if recommended is not None:
        return max(0, recommended - mx.get_active_memory())
    reusable = mx.get_cache_memory()
    if sys.platform == "linux":
        return min(_linux_available(), _cgroup_available()) + reusable
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, int(physical * 0.9) - mx.get_active_memory())


def _recommended_bytes() -> int | None:
    """The working set a GPU's driver recommends as a maximum; None without a GPU."""
    value = mx.device_info().get("max_recommended_working_set_size")
    return None if value is None else int(value)


def _linux_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available() -> int:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(0, int(limit) - used)


def check_fits(estimate: MemoryEstimate, *, what: str, available: int | None = None) -> None:
    """Raise `OutOfMemoryError` with the numbers and a remedy when the estimate exceeds `available` (None: measured)."""
    limit = available_bytes() if available is None else available
    if estimate.total_bytes <= limit:
        return
    parts = [
        f"{label} {_gigabytes(value)}"
        for label, value in (
            ("weights", estimate.weights_bytes),
            ("KV cache", estimate.cache_bytes),
            ("activations", estimate.activation_bytes),
        )
        if value
    ]
    remedy = (
        "take a smaller or more strongly quantised model, or close other programs"
        if estimate.weights_bytes
        else "shorten the prompt, lower the prefill chunk size, or quantise the cache (kv_bits=8)"
    )
    raise OutOfMemoryError(
        f"{what} needs about {_gigabytes(estimate.total_bytes)} ({', '.join(parts)}), but {_gigabytes(limit)} are "
        f"available; {remedy}"
    )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**7 else f"{num_bytes / 1e6:.2f} MB"


@contextmanager
def wired_limit(model: Model) -> Iterator[None]:
    """Let macOS keep the model's memory wired while the block runs; the former limit comes back at the end.

    Does nothing without a GPU. Running work is waited for before either change: MLX must not change the limit during
    an evaluation. Blocks may overlap in any order (two replies read turn about): the limit belongs to the process, so
    the first one in sets it and the last one out gives the former limit back.
    """
    recommended = _recommended_bytes()
    if recommended is None:
        yield
        return
    if model.num_bytes > 0.9 * recommended:
        _log.warning(
            "%s takes %s of the %s this machine recommends for models: it may be slow",
            model.name,
            _gigabytes(model.num_bytes),
            _gigabytes(recommended),
        )
    with _wired.lock:
        _wired.num_inside += 1
        if _wired.num_inside == 1:
            mx.synchronize(generation_stream())
            _wired.former = mx.set_wired_limit(recommended)
    try:
        yield
    finally:
        with _wired.lock:
            _wired.num_inside -= 1
            if _wired.num_inside == 0:
                mx.synchronize(generation_stream())
                mx.set_wired_limit(_wired.former)


class _Wired:
    """How many replies are running in this process, and the limit there was before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_inside = 0
        self.former = 0


_wired = _Wired()
