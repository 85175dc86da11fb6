"""Caches of every kind: exported in their physical layout, restored to the byte, trimmed only where that is exact."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from harness import SETUPS, Setup, model
from mlx_lm.models import cache as kinds

from mlxgen.cache import CacheOptions, adapter_of, can_trim, leaves, make_cache, trim
from mlxgen.errors import InvalidValueError, UnsupportedError
from mlxgen.sequence import TokenSequence
from mlxgen.snapshot.export import CacheExport, export_cache, from_host
from mlxgen.snapshot.safetensors import HostArray

SETUPS = {**SETUPS, "chunked": Setup("llama4")}
IDS = [10 + (11 * i) % 250 for i in range(80)]


def filled(setup, length: int) -> TokenSequence:
    sequence = TokenSequence(model(setup.kind), setup.cache, ids=IDS)
    for end in range(16, length - 4, 16):
        sequence.feed(end)
    while sequence.num_fed < length:
        sequence.feed_one()
    return sequence


def as_bytes(array: mx.array) -> bytes:
    return np.asarray(array.view(mx.uint8)).tobytes()


def physical(cache) -> list:
    return [
        (path, adapter_of(leaf).meta(leaf), [as_bytes(a) for a in adapter_of(leaf).arrays(leaf)])
        for path, leaf in leaves(cache)
    ]


def next_logits(sequence: TokenSequence, cache) -> mx.array:
    return sequence.forward(mx.array([99], mx.uint32), cache=cache, start=sequence.num_fed, inputs=None)


def restored(sequence: TokenSequence, setup):
    """What adapters alone make of what they exported, into the caches of a new sequence."""
    target = make_cache(sequence._module, setup.cache)
    for (_, leaf), (path, _) in zip(leaves(sequence.cache), leaves(target), strict=True):
        adapter = adapter_of(leaf)
        meta = adapter.meta(leaf)
        fresh = dict(leaves(target))[path]
        if isinstance(leaf, kinds.QuantizedKVCache):
            fresh = kinds.QuantizedKVCache(group_size=leaf.group_size, bits=leaf.bits)
            target[int(path)] = fresh
        if adapter.appends:
            adapter.allocate(fresh, meta)
            for start in range(0, leaf.offset, 20):
                adapter.write_rows(fresh, start, adapter.rows(leaf, start, min(start + 20, leaf.offset)))
        else:
            adapter.restore(fresh, meta, adapter.whole(leaf))
    return target


@pytest.mark.parametrize("length", [12, 50, 75])
@pytest.mark.parametrize("name", SETUPS)
def test_export_and_restore_keep_the_physical_layout_to_the_byte(name, length) -> None:
    setup = SETUPS[name]
    sequence = filled(setup, length)
    target = restored(sequence, setup)
    before, after = physical(sequence.cache), physical(target)
    for (path, meta, arrays), (other_path, other_meta, others) in zip(before, after, strict=True):
        assert (path, meta) == (other_path, other_meta)
        kind = adapter_of(dict(leaves(target))[path])
        if kind.appends:  # rows beyond the offset are never read
            leaf, other = dict(leaves(sequence.cache))[path], dict(leaves(target))[path]
            for name_, rows in kind.rows(leaf, 0, leaf.offset).items():
                assert as_bytes(rows) == as_bytes(kind.rows(other, 0, leaf.offset)[name_])
        else:
            assert arrays == others
    assert mx.array_equal(next_logits(sequence, sequence.cache), next_logits(sequence, target))


@pytest.mark.parametrize("name", SETUPS)
def test_an_export_shares_nothing_with_the_live_cache(name) -> None:
    """Its bytes stay what they were while generation goes on, and its being held makes no update copy the cache."""
    setup = SETUPS[name]
    sequence = filled(setup, 60)
    new_files, _, _ = export_cache(sequence, CacheExport(), 0)
    files = list(new_files)
    frozen = [{n: bytes(array.raw()) for n, array in arrays.items()} for _, arrays, _ in files]
    live = {np.asarray(a.view(mx.uint8)).ctypes.data for a in sequence.arrays()}
    for _, arrays, _ in files:
        for array in arrays.values():
            assert np.frombuffer(array.raw(), np.uint8).ctypes.data not in live
    del live
    for _ in range(8):
        sequence.feed_one()
    assert [{n: bytes(array.raw()) for n, array in arrays.items()} for _, arrays, _ in files] == frozen


def test_updates_stay_in_place_while_an_export_is_held() -> None:
    module = model("llama").module
    sequence = TokenSequence(model("llama"), ids=[7] * 200)
    sequence.feed(160)
    held = list(export_cache(sequence, CacheExport(), 0)[0])
    mx.clear_cache()
    sequence.feed_one()
    addresses = [np.asarray(a).ctypes.data for a in sequence.arrays()]
    for _ in range(6):
        sequence.feed_one()
        assert [np.asarray(a).ctypes.data for a in sequence.arrays()] == addresses
    assert held
    assert len(module.layers) == len(sequence.cache)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, mx.uint32, mx.int8, mx.bool_])
def test_arrays_of_every_dtype_travel_unchanged(dtype) -> None:
    from mlxgen.snapshot.export import to_host

    array = (mx.arange(24).reshape(2, 3, 4) % 3).astype(dtype)
    mx.eval(array)
    host = to_host(array)
    again = from_host(HostArray(host.dtype, host.shape, bytes(host.raw())))
    assert again.dtype == dtype
    assert mx.array_equal(again, array)


# -- trimming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETUPS)
def test_what_can_be_trimmed_is_as_if_it_had_never_been_fed(name) -> None:
    setup = SETUPS[name]
    trimmed_at = []
    for length in (12, 40, 70):
        for back in (1, 3, 11):
            sequence = filled(setup, length)
            if not sequence.can_trim_to(length - back):
                continue
            trimmed_at.append((length, back))
            sequence.retract(length - back)
            fresh = TokenSequence(model(setup.kind), setup.cache, ids=IDS)
            for kind, start, count in sequence.passes.entries:
                while fresh.num_fed < min(start + count, length - back):
                    if kind == "decode":
                        fresh.feed_one()
                    else:
                        fresh.feed(min(start + count, length - back))
            assert mx.allclose(next_logits(sequence, sequence.cache), next_logits(fresh, fresh.cache), atol=1e-5)
    recurrent = name in ("lfm2", "qwen3_5", "mamba2", "falcon_h1-list")
    assert bool(trimmed_at) != recurrent
    if name in ("ring", "gemma3-window"):
        window = 24 if name == "ring" else 16
        assert all(length < window for length, _ in trimmed_at), "a ring that has wrapped has lost what it overwrote"


def test_a_chunked_cache_is_trimmed_only_while_its_chunk_is_whole() -> None:
    setup = SETUPS["chunked"]  # chunks of 32
    for length, back, allowed in ((30, 20, True), (44, 3, True), (70, 3, True), (70, 40, False)):
        sequence = filled(setup, length)
        assert can_trim(sequence.cache, back) == allowed, (length, back)


def test_a_cache_list_is_trimmed_only_if_all_its_parts_can() -> None:
    sequence = filled(SETUPS["falcon_h1-list"], 20)
    assert [path for path, _ in leaves(sequence.cache)] == ["0.0", "0.1", "1.0", "1.1"]
    assert not can_trim(sequence.cache, 1)
    assert can_trim(sequence.cache, 0)


def test_a_concatenating_cache_forgets_what_was_trimmed() -> None:
    leaf = kinds.ConcatenateKVCache()
    rows = mx.arange(6, dtype=mx.float32).reshape(1, 1, 6, 1)
    leaf.update_and_fetch(rows, rows)
    trim([leaf], 2)
    keys, _ = leaf.update_and_fetch(rows[..., :1, :] + 50, rows[..., :1, :])
    assert keys.reshape(-1).tolist() == [0, 1, 2, 3, 50]


# -- building ------------------------------------------------------------------------------------------------------


def test_max_kv_size_also_bounds_models_that_make_their_own_caches() -> None:
    for kind, expected in (
        ("llama", {"RotatingKVCache"}),
        ("gemma3", {"RotatingKVCache"}),
        ("lfm2", {"ArraysCache", "RotatingKVCache"}),
        ("falcon_h1", {"ArraysCache", "RotatingKVCache"}),
        ("llama4", {"ChunkedKVCache", "RotatingKVCache"}),
    ):
        cache = make_cache(model(kind).module, CacheOptions(max_kv_size=40))
        assert {type(leaf).__name__ for _, leaf in leaves(cache)} == expected
    sizes = {leaf.max_size for _, leaf in leaves(make_cache(model("gemma3").module, CacheOptions(max_kv_size=40)))}
    assert sizes == {16, 40}, "the model's own window stays"
    sequence = TokenSequence(model("llama"), CacheOptions(max_kv_size=24), ids=IDS)
    sequence.feed(40)
    bound = None
    for _ in range(20):
        sequence.feed_one()
        bound = bound or sequence.num_bytes
        assert sequence.num_bytes == bound


def test_kv_bits_is_refused_where_there_are_rings_and_checked() -> None:
    with pytest.raises(UnsupportedError, match="rotating"):
        make_cache(model("gemma3").module, CacheOptions(kv_bits=8, kv_group_size=32))
    with pytest.raises(UnsupportedError, match="rotating"):
        make_cache(model("llama").module, CacheOptions(kv_bits=8, max_kv_size=64))
    with pytest.raises(InvalidValueError, match="kv_bits is 3"):
        make_cache(model("llama").module, CacheOptions(kv_bits=3))
    sequence = TokenSequence(model("llama"), CacheOptions(kv_bits=8, kv_group_size=64, quantized_kv_start=0), ids=IDS)
    with pytest.raises(UnsupportedError, match="kv_group_size=64"):
        sequence.feed(8)


@pytest.mark.parametrize("name", SETUPS)
def test_a_deep_copy_is_a_fork(name) -> None:
    setup = SETUPS[name]
    sequence = filled(setup, 50)
    fork = copy.deepcopy(sequence.cache)
    expected = next_logits(sequence, copy.deepcopy(sequence.cache))
    frozen = physical(fork)
    for token in (5, 6, 7):
        mx.eval(sequence.forward(mx.array([token], mx.uint32), cache=sequence.cache, start=0, inputs=None))
    assert physical(fork) == frozen
    assert mx.array_equal(next_logits(sequence, fork), expected)
