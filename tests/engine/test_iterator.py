"""`TokenIterator` alone: how many passes it makes, where it stops, and how a new one goes on from what it left."""

from __future__ import annotations

import itertools
from dataclasses import replace

import mlx.core as mx
import pytest
from harness import PROMPT, SETUPS, Outcome, StopAt, counted, model, new_session, sampled

from mlxgen import CacheOptions, Cancelled, DecodeOptions, InvalidValueError, SamplingParams, TokenIterator
from mlxgen.cancellation import CancelToken
from mlxgen.events import PrefillProgress
from mlxgen.options import SessionOptions
from mlxgen.prefill import MIN_STEP_SIZE
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

IDS = [10 + (7 * i) % 250 for i in range(37)]
GREEDY = DecodeOptions(max_tokens=9)
SAMPLED = DecodeOptions(
    SamplingParams(temperature=1.1, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=5),
    max_tokens=9,
    logprobs=True,
    top_logprobs=2,
)


def tokens(iterator) -> list:
    return list(iterator)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
@pytest.mark.parametrize("name", SETUPS)
def test_a_new_iterator_goes_on_from_the_old_one_s_sequence(name, options) -> None:
    setup = SETUPS[name]
    using, forward = counted(setup.kind)
    first = TokenIterator.from_prompt(using, IDS, options=options, cache_options=setup.cache, step_size=16)
    expected = tokens(first)
    assert forward.lengths == [16, 16, 4] + [1] * 9, "no pass for a token beyond the last"
    assert first.sequence.ids == IDS + [token.id for token in expected]
    assert first.sequence.ledger == first.sequence.ids[:-1]
    assert first.sequence.ahead is None
    for cut in (0, 1, 4, 8):
        forward.lengths.clear()
        before = TokenIterator.from_prompt(using, IDS, options=options, cache_options=setup.cache, step_size=16)
        seen = [next(before) for _ in range(cut)]
        before.settle()
        sequence = before.sequence
        assert sequence.ledger == (sequence.ids if cut else [])
        assert (sequence.ahead is not None) == (cut > 0)
        after = TokenIterator(sequence, options=options, step=cut, step_size=16)
        seen += tokens(after)
        assert seen == expected
        assert forward.lengths == [16, 16, 4] + [1] * 9


def test_a_cancelled_token_stops_before_the_next_unit_and_the_same_iterator_goes_on() -> None:
    for num_checkpoints in range(1, 8):
        using, forward = counted("lfm2")
        whole = [t.id for t in TokenIterator.from_prompt(using, IDS, options=GREEDY, step_size=16)]
        forward.lengths.clear()
        iterator = TokenIterator.from_prompt(using, IDS, options=GREEDY, step_size=16, cancel=StopAt(num_checkpoints))
        seen = []
        with pytest.raises(Cancelled):
            seen += [token.id for token in iterator]
        passes = len(forward.lengths)
        for _ in range(3):
            with pytest.raises(Cancelled):
                next(iterator)
        assert len(forward.lengths) == passes
        iterator.cancel = CancelToken()
        seen = iterator.sequence.ids[len(IDS) :] + [token.id for token in iterator]
        assert seen == whole


def test_prefill_by_hand_and_its_plan() -> None:
    iterator = TokenIterator.from_prompt(model("llama"), IDS, options=GREEDY, step_size=16)
    assert iterator.plan().ends == (16, 32, 36)
    assert list(iterator.prefill()) == [16, 32, 36]
    assert iterator.plan().ends == ()
    assert len(tokens(iterator)) == 9


def test_asking_past_the_end_stays_at_the_end() -> None:
    using, forward = counted("llama")
    iterator = TokenIterator.from_prompt(using, IDS, options=replace(GREEDY, max_tokens=1))
    assert len(tokens(iterator)) == 1
    passes = len(forward.lengths)
    assert tokens(iterator) == []
    with pytest.raises(StopIteration):
        next(iterator)
    assert len(forward.lengths) == passes
    assert tokens(TokenIterator.from_prompt(using, IDS, options=replace(GREEDY, max_tokens=0))) == []


def test_leaving_it_has_one_pass_in_flight_at_most() -> None:
    using, forward = counted("llama")
    iterator = TokenIterator.from_prompt(using, IDS, options=replace(GREEDY, max_tokens=None), step_size=64)
    for count in range(1, 20):
        next(iterator)
        assert len(forward.lengths) == 1 + 1 + count
    iterator.settle()
    iterator.settle()
    assert len(forward.lengths) == 21
    assert iterator.sequence.ahead is not None


def test_log_probabilities_are_those_of_the_distribution() -> None:
    options = replace(GREEDY, logprobs=True, top_logprobs=3, full_logprobs=True)
    iterator = TokenIterator.from_prompt(model("llama"), IDS, options=options)
    for token in iterator:
        vector = iterator.last_vector
        assert abs(mx.logsumexp(vector).item()) < 1e-5
        assert token.logprob == pytest.approx(vector[token.id].item(), abs=1e-6)
        assert token.top[0] == (token.id, pytest.approx(token.logprob, abs=1e-6))
        assert [value for _, value in token.top] == sorted((value for _, value in token.top), reverse=True)


@pytest.mark.parametrize(
    ("ids", "options", "cache"),
    [
        ([], GREEDY, CacheOptions()),
        ([307], GREEDY, CacheOptions()),
        ([-1], GREEDY, CacheOptions()),
        (IDS, DecodeOptions(max_tokens=-1), CacheOptions()),
        (IDS, DecodeOptions(SamplingParams(temperature=1.0)), CacheOptions()),
        (IDS, DecodeOptions(SamplingParams(temperature=float("inf"), seed=1)), CacheOptions()),
        (IDS, DecodeOptions(top_logprobs=10**6), CacheOptions()),
        (IDS, GREEDY, CacheOptions(max_kv_size=0)),
        (IDS, GREEDY, CacheOptions(kv_bits=5)),
    ],
)
def test_bad_input_is_refused_before_anything_runs(ids, options, cache) -> None:
    using, forward = counted("llama")
    with pytest.raises(InvalidValueError):
        TokenIterator.from_prompt(using, ids, options=options, cache_options=cache)
    assert forward.lengths == []


# -- a chunk size chosen for the time to stop --------------------------------------------------------------------------

LONG = "word " * 60


def test_a_stop_latency_chooses_a_chunk_size_records_it_and_a_resumed_run_keeps_it(tmp_path) -> None:
    options = SessionOptions(prefill_step_size=256, max_stop_latency_s=1e-4)
    session = Session(model("llama"), options=options)
    events = []
    for event in session.stream(LONG, reply=sampled(4), cancel=StopAt(4)):
        events.append(event)
    chosen = session.history.reply.step_size
    assert chosen == MIN_STEP_SIZE, "nothing is that fast: the smallest chunk there is"
    assert [record.data for record in session.history.records if record.type == "plan"] == [{"step_size": chosen}]
    done = [event.done for event in events if isinstance(event, PrefillProgress)]
    assert max(b - a for a, b in itertools.pairwise(done)) <= 64
    path = session.save(tmp_path / "a.mlxgen")
    whole = Outcome()
    whole.take(session.continue_())
    using, forward = counted("llama")
    with resume(path, options=ResumeOptions(model=using)) as again:
        assert again.history.reply.step_size == chosen
        outcome = Outcome()
        outcome.take(again.continue_())
        assert outcome.values == whole.values
        assert max(forward.lengths) <= chosen
        assert again.history.passes == session.history.passes


def test_a_generous_stop_latency_takes_the_largest_chunk() -> None:
    session = Session(model("llama"), options=SessionOptions(prefill_step_size=128, max_stop_latency_s=1e6))
    session.send(LONG, reply=sampled(2))
    assert session.history.reply.step_size == 128


def test_stop_latency_is_checked() -> None:
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidValueError, match="max_stop_latency_s"):
            Session(model("llama"), options=SessionOptions(max_stop_latency_s=bad))
    assert new_session(SETUPS["llama"]).send(PROMPT, reply=sampled(1)).finish_reason == "length"
