"""What is kept in memory, how much of it, and what a run that was given up leaves to the next."""

from __future__ import annotations

import time
from itertools import pairwise

import mlx.core as mx
import pytest
from harness import SETUPS, StopAt, greedy
from prefixcache.rig import LONG, cold, next_logits, options_of, own_model, say, session

from mlxgen.errors import OutOfMemoryError
from mlxgen.prefixcache import PrefixCacheOptions, prefix_cache
from mlxgen.prefixcache.cache import Prompt
from mlxgen.session import Session

LLAMA = SETUPS["llama"]


def test_a_client_that_always_gives_up_gets_further_each_time() -> None:
    mine, forward = own_model()
    expected = cold(LLAMA)
    reused = []
    for _ in range(20):
        one = session(mine)
        one.add(LONG)
        # Two chunks' time, or the time for two tokens.
        finished = one.send(reply=greedy(6), cancel=StopAt(2))
        reused.append(finished.usage.reused_tokens)
        if finished.usage.generated_tokens:
            break
    assert reused == sorted(reused)
    assert all(b - a == 2 * LLAMA.step_size for a, b in pairwise(reused[:-1]))
    assert len(reused) >= 3
    forward.lengths.clear()
    assert say(session(mine)).values == expected.values


def test_a_failed_prefill_leaves_its_chunks_to_the_next(monkeypatch) -> None:
    mine, forward = own_model()
    inner = forward.inner

    def failing(ids, *, cache, start, inputs):
        if start == 48:
            raise RuntimeError("no more")
        return inner(ids, cache=cache, start=start, inputs=inputs)

    monkeypatch.setattr(forward, "inner", failing)
    with pytest.raises(RuntimeError, match="no more"):
        session(mine).send(LONG, reply=greedy(6))
    monkeypatch.setattr(forward, "inner", inner)
    outcome = say(session(mine))
    assert outcome.reused == 48
    assert outcome.values == cold(LLAMA).values


def test_two_sessions_share_a_system_prompt_and_neither_changes_it_for_the_other() -> None:
    mine, _ = own_model()
    system = "You answer at length, and in a friendly way, whatever you are asked. " * 3
    one, other = session(mine, system=system), session(mine, system=system)
    first = say(one, "Hello there!")
    held = prefix_cache(mine).info().num_bytes
    second = say(other, "What is the sea?")
    shared = second.reused
    assert shared >= 9 * LLAMA.step_size
    rows = held // (len(one.sequence.ids) - 7)
    assert prefix_cache(mine).info().num_bytes <= held + rows * (second.prefilled + 32), "held once"
    assert second.values == cold(LLAMA, "What is the sea?", system=system).values
    before = [mx.array(array) for array in other.sequence.arrays()]
    one.rewind(num_turns=1)
    say(one, "Something else altogether, if you please.")
    assert all(mx.array_equal(a, b) for a, b in zip(before, other.sequence.arrays(), strict=True))
    third = say(session(mine, system=system), "What is the sea?")
    assert third.values == second.values
    assert first.reused == 0


def test_the_ledger_comes_first_and_the_store_only_where_it_has_more() -> None:
    mine, _ = own_model()
    one = session(mine)
    say(one)
    assert prefix_cache(mine).info().num_hits == 0
    held = len(one.ledger)
    outcome = say(one, "And then?")
    assert outcome.reused == held, "nothing of the session's own is lost to the store"
    assert prefix_cache(mine).info().num_hits == 0
    one.rewind(num_turns=1)
    other = say(one, "Quite another thing, which has nothing to do with it and goes on for a while.")
    assert other.reused < 48
    one.rewind(num_turns=1)
    back = say(one)
    assert back.reused >= 96, "what the session itself has lost meanwhile"
    assert back.values == cold(LLAMA).values


def test_blocks_and_living_sessions_together_keep_to_the_budget() -> None:
    mine, _ = own_model()
    probe = session(mine)
    say(probe)
    live, blocks = probe.sequence.num_bytes, prefix_cache(mine).info().num_bytes
    del probe
    budget = 3 * live + blocks + blocks // 2
    mine, _ = own_model(memory_bytes=budget)
    store = prefix_cache(mine)
    sessions = []
    for number in range(5):
        one = session(mine, system=f"{number} is the number.")
        assert say(one).values == cold(LLAMA, system=f"{number} is the number.").values
        info = store.info()
        assert info.num_bytes == 0 or info.num_bytes + info.live_bytes <= budget
        sessions = [*sessions[-1:], one]
    assert store.info().num_blocks > 0
    assert say(session(mine, system="4 is the number.")).reused > 0
    assert say(session(mine, system="0 is the number.")).reused == 0, "used longest ago"
    sessions.clear()
    small, _ = own_model(memory_bytes=live)
    say(session(small))
    assert say(session(small)).values == cold(LLAMA).values
    assert prefix_cache(small).info().num_bytes <= live


def test_the_beginning_of_a_prompt_outlives_its_end() -> None:
    mine, _ = own_model()
    store = prefix_cache(mine)
    say(session(mine))
    size = store.info().num_bytes
    num_blocks = store.info().num_blocks
    store.configure(PrefixCacheOptions(size // 2))
    assert 0 < store.info().num_blocks < num_blocks
    store.configure(PrefixCacheOptions(10 * size))
    assert say(session(mine)).reused == store.info().num_reused_tokens > 0


def test_without_a_budget_nothing_is_copied_and_a_session_may_do_without() -> None:
    mine, forward = own_model(memory_bytes=0)
    say(session(mine))
    forward.lengths.clear()
    assert say(session(mine)).reused == 0
    info = prefix_cache(mine).info()
    assert (info.num_lookups, info.num_stored, info.copy_s) == (0, 0, 0.0)
    mine, _ = own_model()
    say(session(mine))
    alone = Session(mine, system="Be brief.", options=LLAMA.session_options.__class__(prefix_cache=False))
    assert say(alone).reused == 0


def test_a_run_that_needs_the_memory_gets_it(monkeypatch) -> None:
    mine, _ = own_model()
    say(session(mine))
    tried = []

    def check(estimate, *, what, available=None):
        tried.append(what)
        if prefix_cache(mine).info().num_blocks:
            raise OutOfMemoryError("full")

    expected = cold(LLAMA)
    monkeypatch.setattr("mlxgen.reply.check_fits", check)
    monkeypatch.setattr("mlxgen.reply._MIN_TOKENS_TO_ESTIMATE", 1)
    assert say(session(mine)).values == expected.values
    assert len(tried) == 2


def test_a_lookup_among_a_thousand_prefixes_takes_less_than_a_millisecond() -> None:
    mine, _ = own_model()
    store = prefix_cache(mine)
    one = session(mine)
    base = list(range(5, 105)) * 3
    for number in range(1000):
        one.sequence.reset()
        one.sequence.ids = [number % 300 + 5, number // 300 + 5, *base[:32]]
        one.sequence.feed(32)
        store.keep(one.sequence)
    assert store.info().num_blocks == 1000
    prompt = Prompt([*one.sequence.ids[:32], 7, 8], None, 32)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        found = store.find(one.sequence, prompt)
        times.append(time.perf_counter() - began)
    assert [(chunk.start, chunk.end) for chunk in found] == [(0, 32)]
    assert min(times) <= 0.001


def test_max_stop_latency_and_other_cache_options_share_nothing() -> None:
    mine, _ = own_model()
    say(session(mine))
    latency = Session(mine, system="Be brief.", options=options_of(LLAMA, max_stop_latency_s=10.0))
    assert say(latency).reused == 0
    ring = session(mine, SETUPS["ring"])
    assert say(ring).reused == 0
    assert say(session(mine, SETUPS["ring"])).reused > 0
    assert mx.all(mx.isfinite(next_logits(ring)))
