"""Estimates against what is really allocated, and the limits they are compared with."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import KINDS, folder

import mlxgen.models.memory as memory
from mlxgen.errors import OutOfMemoryError
from mlxgen.models import (
    MemoryEstimate,
    Model,
    RunSize,
    available_bytes,
    check_fits,
    estimate_run,
    estimate_weights,
    load,
    wired_limit,
)
from mlxgen.models.checkpoint import checked_tensors


def run(model: Model, num_tokens: int, chunk_size: int) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model.module)
    ids = mx.array([5 + i % 200 for i in range(num_tokens)], dtype=mx.uint32)
    for start in range(0, num_tokens, chunk_size):
        chunk = ids[start : start + chunk_size]
        mx.eval(model.forward(chunk, cache=caches, start=start, inputs=None))
    return caches


def allocated(caches: list[Any]) -> int:
    arrays = [a for cache in caches for _, a in tree_flatten(cache.state) if isinstance(a, mx.array)]
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_estimate_is_what_the_cache_takes(kind: str) -> None:
    model = load(folder(kind))
    estimate = estimate_run(model, RunSize(300, chunk_size=64)).cache_bytes
    taken = allocated(run(model, 300, 64))
    assert taken <= estimate
    # Bounded caches keep at most a window and a chunk; the bound isn't reached at every length.
    assert estimate <= 2 * taken


@pytest.mark.parametrize("kind", KINDS)
def test_estimating_computes_nothing(kind: str) -> None:
    model = load(folder(kind))
    estimate_run(model, RunSize(300, chunk_size=64))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    estimate_run(model, RunSize(10**7, chunk_size=64))
    assert mx.get_peak_memory() - before < 500_000


def test_peak_of_a_prefill_stays_below_the_estimate() -> None:
    model = load(folder("llama"))
    size = RunSize(2048, chunk_size=512)
    run(model, 64, 64)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run(model, size.num_tokens, size.chunk_size)
    assert mx.get_peak_memory() - before <= estimate_run(model, size).total_bytes


def test_cache_grows_with_tokens_unless_it_is_bounded() -> None:
    def growth(kind: str) -> float:
        model = load(folder(kind))
        sizes = [estimate_run(model, RunSize(n, chunk_size=256)).cache_bytes for n in (8192, 16384)]
        return sizes[1] / sizes[0]

    assert growth("llama") == 2.0
    assert growth("mamba2") == 1.0
    assert 1.0 < growth("gemma3") < 2.0


def test_quantised_cache_is_counted_as_such() -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model = load(folder("llama"))
    estimate = estimate_run(model, RunSize(512, 512, kv_bits=8, kv_group_size=32)).cache_bytes
    caches = [cache.to_quantized(group_size=32, bits=8) for cache in make_prompt_cache(model.module)]
    mx.eval(model.module(mx.zeros((1, 512), dtype=mx.uint32), cache=caches))
    assert estimate == allocated(caches)


def test_weights_come_from_the_headers() -> None:
    tensors = checked_tensors(folder("llama"))
    assert estimate_weights(tensors).weights_bytes == load(folder("llama")).num_bytes


def test_check_fits_names_numbers_and_remedy() -> None:
    check_fits(MemoryEstimate(1, 2, 3), what="this", available=6)
    with pytest.raises(OutOfMemoryError, match=r"about 30\.00 GB \(weights 30\.00 GB\), but 16\.00 GB.*smaller"):
        check_fits(MemoryEstimate(weights_bytes=30 * 10**9), what="this", available=16 * 10**9)
    estimate = MemoryEstimate(cache_bytes=20 * 10**9, activation_bytes=10**9)
    with pytest.raises(OutOfMemoryError, match=r"21\.00 GB \(KV cache 20\.00 GB, activations 1\.00 GB\).*kv_bits=8"):
        check_fits(estimate, what="a prompt of 60000 tokens", available=16 * 10**9)
    with pytest.raises(MemoryError):
        check_fits(estimate, what="x", available=0)


def test_available_memory_is_measured() -> None:
    assert 50 * 10**6 < available_bytes() < 100 * 10**12


def test_on_a_gpu_the_recommended_working_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_recommended_bytes", lambda: 10**12)
    assert available_bytes() == 10**12 - mx.get_active_memory()


def test_wired_limit_does_nothing_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(limit: int) -> int:
        raise AssertionError("limit was set")

    monkeypatch.setattr(memory, "_recommended_bytes", lambda: None)
    monkeypatch.setattr(mx, "set_wired_limit", forbidden)
    with wired_limit(load(folder("llama"))):
        pass


def test_wired_limit_is_set_and_restored_after_synchronising(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []
    model = load(folder("llama"))

    def set_limit(limit: int) -> int:
        calls.append(limit)
        return 77

    monkeypatch.setattr(memory, "_recommended_bytes", lambda: model.num_bytes)
    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    monkeypatch.setattr(mx, "synchronize", lambda stream: calls.append("synchronize"))
    with pytest.raises(KeyError), wired_limit(model):
        raise KeyError
    assert calls == ["synchronize", model.num_bytes, "synchronize", 77]
    assert "it may be slow" in caplog.text
