"""What comes out of the prefix cache has the bits that a cold run has, for every kind of cache."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from harness import SETUPS, StopAt, sampled
from prefixcache.rig import LONG, cold, next_logits, own_model, say, session

from mlxgen.prefixcache import prefix_cache
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

EVERY_KIND = pytest.mark.parametrize("name", SETUPS)


@EVERY_KIND
def test_the_same_prompt_is_filled_in_without_a_prefill_pass_and_says_the_same(name) -> None:
    setup = SETUPS[name]
    mine, forward = own_model(setup.kind)
    expected = cold(setup, reply=sampled(6))
    first = say(session(mine, setup), reply=sampled(6))
    assert (first.values, first.reused) == (expected.values, 0)
    forward.lengths.clear()
    second = say(session(mine, setup), reply=sampled(6))
    assert second.values == expected.values
    tail = (expected.prefilled - 1) % setup.step_size
    assert second.prefilled == 1 + (tail if tail < 16 else 0)
    assert set(forward.lengths[1 if tail < 16 else 0 :]) == {1}


@EVERY_KIND
def test_logits_are_bit_equal_after_a_hit_of_any_number_of_chunks(name) -> None:
    setup = SETUPS[name]
    mine, forward = own_model(setup.kind)
    whole = session(mine, setup)
    whole.add(LONG)
    whole.prefill()
    ids = whole.sequence.ids
    for num_words in (3, 8, 14, 20):
        prompt = " ".join(LONG.split()[:num_words]) + " so there, then, it is."
        warm = session(mine, setup)
        alone = Session(mine, system="Be brief.", options=replace(setup.session_options, prefix_cache=False))
        for one in (warm, alone):
            one.add(prompt)
            forward.lengths.clear()
            one.prefill()
        shared = next(i for i, (a, b) in enumerate(zip(ids, warm.sequence.ids, strict=False)) if a != b)
        fed = sum(forward.lengths)
        assert mx.array_equal(next_logits(warm), next_logits(alone))
        assert warm.sequence.passes == alone.sequence.passes
        assert fed == len(alone.sequence.ids) - 1, "without the cache all is fed"
        assert shared >= setup.step_size


@EVERY_KIND
def test_a_warm_run_that_is_stopped_anywhere_and_resumed_is_exact(name, tmp_path) -> None:
    setup = SETUPS[name]
    mine, _ = own_model(setup.kind)
    expected = cold(setup, LONG + " And more of it?", reply=sampled(6))
    say(session(mine, setup))
    for number, stop_at in enumerate((0, 1, 3)):
        warm = session(mine, setup)
        warm.add(LONG + " And more of it?")
        path = warm.autosave(tmp_path / f"{number}.mlxgen")
        stopped = warm.send(reply=sampled(6), cancel=StopAt(stop_at))
        assert stopped.usage.reused_tokens >= 3 * setup.step_size
        if number == 1:
            warm.close()
        else:
            warm._finalizer()  # without a last save: the passes are run again
        prefix_cache(mine).clear()
        with resume(path, options=ResumeOptions(model=mine)) as again:
            finished = again.continue_()
            tokens = [event for event in finished if event.__class__.__name__ == "Token"]
            own = again.history.reply.tokens
            assert [token.id for token in own] == [value[1] for value in expected.values]
            assert [token.logprob for token in own] == [value[3] for value in expected.values]
            assert len(tokens) <= 6
        say(session(mine, setup))


@EVERY_KIND
def test_a_filled_session_goes_back_and_on_like_any_other(name) -> None:
    setup = SETUPS[name]
    mine, _ = own_model(setup.kind)
    said = []
    for use in range(2):
        one = session(mine, setup)
        outcome = say(one)
        assert (outcome.reused > 0) == bool(use)
        one.rewind(num_tokens=one.history.reply.start + 3)
        again = one.continue_(reply=replace(sampled(3), sampling=replace(sampled().sampling, seed=5)))
        ids = [event.id for event in again if event.__class__.__name__ == "Token"]
        assert len(ids) == 3
        said.append((outcome.values, ids))
    assert said[0] == said[1]


def test_what_was_quantised_later_is_quantised_alike_in_blocks_from_before() -> None:
    setup = SETUPS["quantized-later"]
    mine, _ = own_model(setup.kind)
    one = session(mine, setup)
    one.add(LONG)
    one.prefill()
    other = session(mine, setup)
    other.add(LONG)
    other.prefill()
    from mlxgen.cache import adapter_of, leaves

    kinds = set()
    for (_, a), (_, b) in zip(leaves(one.sequence.cache), leaves(other.sequence.cache), strict=True):
        adapter = adapter_of(a)
        kinds.add(adapter.kind)
        left, right = (adapter.rows(leaf, 0, leaf.offset) for leaf in (a, b))
        assert left.keys() == right.keys()
        assert all(mx.array_equal(left[key], right[key]) for key in left)
    assert kinds == {"quantized"}
    assert prefix_cache(mine).info().num_hits == 1
