"""Constrained decoding: right, and right across a stop, an error or an interrupt at every place."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from harness import SETUPS, Setup, StopAt, counted, model
from schema_for_tests import SCHEMA, SHORT, fits

import mlxgen.decode
from mlxgen import Cancelled, DecodeOptions, InvalidValueError, SamplingParams, TokenIterator
from mlxgen.cancellation import CancelToken
from mlxgen.constraints import BanConstraint, Grammar
from mlxgen.errors import GrammarError
from mlxgen.sequence import TokenSequence

IDS = [10 + (7 * i) % 250 for i in range(37)]
GRAMMAR = Grammar.json_schema(SHORT)
EOS = 2
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.2, top_p=0.95, top_k=80, repetition_penalty=1.3, frequency_penalty=0.2, seed=11)
LIMIT = 160  # more than the grammar allows


def options_of(
    kind: str, grammar: Grammar | None = GRAMMAR, sampling: SamplingParams = GREEDY, **more: Any
) -> DecodeOptions:
    """Options with a constraint of their own, as every run has."""
    own = () if grammar is None else (grammar,)
    options = DecodeOptions(
        sampling, **{"max_tokens": LIMIT, "logprobs": True, "top_logprobs": 3, "constraints": own, **more}
    )
    return options.bound(model(kind))


def start(using: Any, setup: Setup, options: DecodeOptions, cancel: CancelToken | None = None) -> TokenIterator:
    return TokenIterator.from_prompt(
        using, IDS, options=options, cache_options=setup.cache, step_size=16, cancel=cancel or CancelToken()
    )


def go_on(sequence: TokenSequence, options: DecodeOptions, cancel: CancelToken | None = None) -> TokenIterator:
    step = len(sequence.ids) - len(IDS)
    return TokenIterator(sequence, options=options, step=step, step_size=16, cancel=cancel or CancelToken())


def text_of(tokens: Sequence[Any]) -> str:
    return str(model("llama").tokenizer.decode([token.id for token in tokens]))


# -- right -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "mamba2"])
def test_greedy_and_sampled_replies_are_json_that_fits_and_end_by_themselves(kind) -> None:
    texts = set()
    for sampling in (GREEDY, *(replace(SAMPLED, seed=seed) for seed in range(3))):
        options = options_of(kind, Grammar.json_schema(SCHEMA), sampling)
        iterator = start(model(kind), SETUPS["llama"], options)
        tokens = list(iterator)
        assert len(tokens) < LIMIT
        assert iterator.complete
        assert iterator.sequence.ids[len(IDS) :] == [token.id for token in tokens]
        assert fits(json.loads(text_of(tokens)))
        texts.add(text_of(tokens))
        assert list(iterator) == []
    assert len(texts) > 2


def test_only_what_is_allowed_is_sampled_and_log_probabilities_are_those_among_it() -> None:
    plain = DecodeOptions(max_tokens=1, full_logprobs=True)
    free = start(model("llama"), SETUPS["llama"], plain)
    next(free)
    allowed = [model("llama").tokenizer.encode(letter)[0] for letter in "xyz"]
    iterator = start(model("llama"), SETUPS["llama"], options_of("llama", Grammar.regex("[xyz]q"), full_logprobs=True))
    token = next(iterator)
    own = np.array(free.last_vector)[allowed]
    expected = own - np.log(np.exp(own).sum())
    assert token.id == allowed[int(own.argmax())]
    assert token.logprob == pytest.approx(float(expected.max()), abs=1e-5)
    assert [i for i, _ in token.top] == [allowed[i] for i in np.argsort(-expected)]
    assert [value for _, value in token.top] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
    vector = np.array(iterator.last_vector)
    assert np.isneginf(np.delete(vector, allowed)).all()
    assert vector[allowed] == pytest.approx(expected, abs=1e-5)
    last = next(iterator)
    assert (last.logprob, last.top) == (0.0, ((last.id, 0.0),)), "fewer than asked for where fewer are possible"


def test_a_grammar_that_allows_everything_changes_nothing() -> None:
    for name in ("llama", "gemma3-window", "quantized-later", "falcon_h1-list"):
        setup = SETUPS[name]
        using, forward = counted(setup.kind)
        for sampling in (GREEDY, SAMPLED):
            plain = list(start(using, setup, options_of(setup.kind, None, sampling, max_tokens=12)))
            lengths = list(forward.lengths)
            forward.lengths.clear()
            bans = BanConstraint({}, using.vocab_size)
            same = list(start(using, setup, options_of(setup.kind, None, sampling, max_tokens=12, constraints=(bans,))))
            assert same == plain
            assert forward.lengths == lengths
            forward.lengths.clear()


def test_the_model_s_padding_rows_are_never_sampled(tmp_path) -> None:
    import tiny

    import mlxgen

    folder = tiny.make("llama", tmp_path / "wide", config={"vocab_size": 400})
    wide = mlxgen.load(str(folder))
    assert wide.vocab_size == 400
    for seed in range(3):
        options = DecodeOptions(SamplingParams(temperature=2.0, seed=seed), max_tokens=LIMIT, constraints=(GRAMMAR,))
        tokens = list(TokenIterator.from_prompt(wide, IDS, options=options))
        assert set(json.loads(text_of(tokens))) == {"a", "b"}


# -- stopped and gone on with ------------------------------------------------------------------------------------------


def whole(setup: Setup, sampling: SamplingParams, **more: Any) -> tuple[list[Any], list[int]]:
    using, forward = counted(setup.kind)
    tokens = list(start(using, setup, options_of(setup.kind, sampling=sampling, **more)))
    return tokens, list(forward.lengths)


@pytest.mark.parametrize("name", ["llama", "gemma3-window", "qwen3_5", "ring", "quantized-later", "falcon_h1-list"])
def test_a_new_iterator_goes_on_from_every_token_exactly(name) -> None:
    setup = SETUPS[name]
    expected, passes = whole(setup, SAMPLED)
    assert b'"' in text_of(expected).encode()
    for cut in range(0, len(expected) + 1, 1 if name == "llama" else 4):
        using, forward = counted(setup.kind)
        before = start(using, setup, options_of(setup.kind, sampling=SAMPLED))
        seen = [next(before) for _ in range(cut)]
        before.settle()
        before.settle()
        sequence = before.sequence
        assert sequence.ledger == (sequence.ids if cut else [])
        assert (sequence.ahead is not None) == (0 < cut < len(expected))
        seen += go_on(sequence, options_of(setup.kind, sampling=SAMPLED))
        assert seen == expected
        assert forward.lengths == passes, "no pass is made that the whole run doesn't make"


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_cancelled_at_every_checkpoint_it_goes_on_exactly(name) -> None:
    setup = SETUPS[name]
    expected, passes = whole(setup, GREEDY)
    token = StopAt()
    list(start(model(setup.kind), setup, options_of(setup.kind), token))
    assert token.count > len(expected)
    for stop_at in range(0, token.count, 1 if name == "llama" else 4):
        using, forward = counted(setup.kind)
        iterator, seen = start(using, setup, options_of(setup.kind), StopAt(stop_at)), []
        with pytest.raises(Cancelled):
            for sampled in iterator:
                seen.append(sampled)
        num_passes = len(forward.lengths)
        iterator.settle()
        assert len(forward.lengths) == num_passes
        seen += go_on(iterator.sequence, options_of(setup.kind))
        assert (seen, forward.lengths) == (expected, passes)


def test_the_same_iterator_goes_on_after_settling_as_autosave_does() -> None:
    expected, passes = whole(SETUPS["llama"], SAMPLED)
    using, forward = counted("llama")
    iterator, seen = start(using, SETUPS["llama"], options_of("llama", sampling=SAMPLED)), []
    for token in iterator:
        seen.append(token)
        if len(seen) % 3 == 0:
            iterator.settle()
    assert (seen, forward.lengths) == (expected, passes)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_going_back_is_cutting_the_ids(name) -> None:
    setup = SETUPS[name]
    expected, _ = whole(setup, SAMPLED)
    iterator = start(model(setup.kind), setup, options_of(setup.kind, sampling=SAMPLED))
    list(iterator)
    iterator.settle()
    sequence = iterator.sequence
    shared = options_of(setup.kind, sampling=SAMPLED)  # one constraint, led back and forth
    for count in (len(expected) - 1, 12, 15, 7, 3, 1, 0):
        position = len(IDS) + count
        sequence.go_back(position - 1)
        del sequence.ids[position:]
        again = go_on(sequence, shared)
        tokens = [next(again) for _ in range(min(5, len(expected) - count))]
        assert tokens == expected[count : count + 5]
        again.settle()


def test_two_forks_go_on_the_same_way() -> None:
    for name in ("llama", "qwen3_5"):
        setup = SETUPS[name]
        expected, _ = whole(setup, SAMPLED)
        iterator = start(model(setup.kind), setup, options_of(setup.kind, sampling=SAMPLED))
        seen = [next(iterator) for _ in range(9)]
        iterator.settle()
        twin = iterator.sequence.fork()
        assert seen + list(go_on(twin, options_of(setup.kind, sampling=SAMPLED))) == expected
        assert seen + list(iterator) == expected


# -- the end -----------------------------------------------------------------------------------------------------------


def test_max_tokens_has_no_pass_beyond_and_a_complete_reply_at_most_the_one_in_flight() -> None:
    expected, passes = whole(SETUPS["llama"], GREEDY)
    assert passes == [16, 16, 4] + [1] * (len(expected) + 1), (
        "the last token is in the ledger: nothing was sampled of it"
    )
    using, forward = counted("llama")
    for limit in (0, 1, 5):
        forward.lengths.clear()
        iterator = start(using, SETUPS["llama"], options_of("llama", max_tokens=limit))
        assert list(iterator) == expected[:limit]
        iterator.settle()
        assert forward.lengths == ([16, 16, 4] + [1] * limit if limit else [])
        assert iterator.sequence.ahead is None
        assert not iterator.complete


def test_where_the_reply_may_go_on_the_end_of_text_token_ends_it() -> None:
    grammar = Grammar.regex("[a-z]{2}[a-z]*")
    pushing = replace(SAMPLED, logit_bias={EOS: 40.0})
    iterator = start(model("llama"), SETUPS["llama"], options_of("llama", grammar, pushing))
    tokens = list(iterator)
    assert tokens[-1].id == EOS
    assert len(text_of(tokens[:-1])) >= 2, "not before it may"
    assert iterator.complete


def test_a_complete_reply_has_no_next_token_however_it_is_asked_again() -> None:
    using, forward = counted("llama")
    iterator = start(using, SETUPS["llama"], options_of("llama"))
    tokens = list(iterator)
    iterator.settle()
    passes = len(forward.lengths)
    again = go_on(iterator.sequence, options_of("llama"))
    assert again.complete
    assert list(again) == []
    assert len(forward.lengths) == passes
    assert len(tokens) < LIMIT


# -- constraints that come later ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "ring"])
def test_a_token_sampled_ahead_without_the_constraint_is_dropped_if_it_breaks_it(name) -> None:
    setup = SETUPS[name]
    free = options_of(setup.kind, None, max_tokens=None)
    for allowed in (True, False):
        using, forward = counted(setup.kind)
        before = start(using, setup, free)
        for _ in range(6):
            next(before)
        before.settle()
        sequence = before.sequence
        ahead = sequence.ahead
        assert ahead is not None
        fresh = start(using, setup, free)
        for _ in range(6):
            next(fresh)
        expected = next(fresh)
        assert ahead == expected
        position = len(sequence.ids) - len(IDS)
        bans = BanConstraint({position: [7 if allowed else ahead.id]}, using.vocab_size)
        num_passes = len(forward.lengths)
        iterator = go_on(sequence, replace(free, constraints=(bans,), max_tokens=position + 3))
        tokens = list(iterator)
        assert len(tokens) == 3
        if allowed:
            assert tokens[0] == ahead
            assert len(forward.lengths) == num_passes + 2, "no pass is run again"
        else:
            assert tokens[0].id != ahead.id
            best = next(i for i, _ in ahead.top if i != ahead.id)
            assert tokens[0].id == best
        assert sequence.ids == IDS + [t.id for t in tokens_before(before)] + [t.id for t in tokens]
        assert sequence.ledger == sequence.ids[:-1]


def tokens_before(iterator: TokenIterator) -> list[Any]:
    sequence = iterator.sequence
    return [type("T", (), {"id": token})() for token in sequence.ids[len(IDS) : len(IDS) + 6]]


def test_dropping_it_can_be_stopped_pass_by_pass_where_a_cache_can_t_be_trimmed() -> None:
    setup = SETUPS["qwen3_5"]
    free = options_of(setup.kind, None, max_tokens=None)
    before = start(model(setup.kind), replace(setup, cache=replace(setup.cache, mark_every=1000)), free)
    for _ in range(6):
        next(before)
    before.settle()
    sequence = before.sequence
    ahead = sequence.ahead
    bans = replace(free, constraints=(BanConstraint({6: [ahead.id]}, model(setup.kind).vocab_size),))
    num_stops = 0
    while True:
        iterator = go_on(sequence, bans, StopAt(1))
        try:
            token = next(iterator)
            break
        except Cancelled:
            num_stops += 1
            iterator.settle()
            assert num_stops < 60
    assert token.id != ahead.id
    expected = go_on(start_at(setup, free, 6), bans)
    assert token == next(expected)


def start_at(setup: Setup, options: DecodeOptions, count: int) -> TokenSequence:
    iterator = start(model(setup.kind), setup, options)
    for _ in range(count):
        next(iterator)
    iterator.settle()
    return iterator.sequence


def test_a_grammar_for_a_reply_that_doesn_t_follow_it_is_an_error_and_nothing_changes() -> None:
    sequence = start_at(SETUPS["llama"], options_of("llama", None, max_tokens=None), 5)
    ids, ahead, ledger = list(sequence.ids), sequence.ahead, sequence.ledger
    iterator = go_on(sequence, options_of("llama"))
    for _ in range(2):
        with pytest.raises(GrammarError, match="doesn't follow the JSON schema"):
            next(iterator)
    iterator.settle()
    assert (sequence.ids, sequence.ahead, sequence.ledger) == (ids, ahead, ledger)
    assert len([next(go_on(sequence, options_of("llama", None)))]) == 1


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_grammar_must_be_compiled_for_the_model() -> None:
    sequence = TokenSequence(model("llama"), ids=IDS)
    with pytest.raises(InvalidValueError, match="bound"):
        TokenIterator(sequence, options=DecodeOptions(constraints=(GRAMMAR,)))


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_an_expression_that_explodes_midway_leaves_the_last_good_position(name) -> None:
    setup = SETUPS[name]
    grammar = Grammar.regex(r"(\w{0,500}\s?){0,500}x")
    using, forward = counted(setup.kind)
    iterator = start(using, setup, options_of(setup.kind, grammar, SAMPLED, max_tokens=400))
    tokens = []
    with pytest.raises(GrammarError, match="too complex") as raised:
        for token in iterator:
            tokens.append(token)
    assert tokens
    sequence = iterator.sequence
    for _ in range(2):
        passes = len(forward.lengths)
        with pytest.raises(GrammarError, match="too complex") as again:
            next(iterator)
        assert str(again.value) == str(raised.value)
        assert len(forward.lengths) == passes, "nothing is run for it"
        iterator.settle()
        assert sequence.ids == IDS + [token.id for token in tokens]
        assert sequence.ledger == sequence.ids
        assert sequence.ahead is None
    other = go_on(sequence, options_of(setup.kind, grammar, SAMPLED, max_tokens=400))
    with pytest.raises(GrammarError, match="too complex"):
        next(other)
    free = options_of(setup.kind, None, SAMPLED, max_tokens=len(tokens) + 4)
    rest = list(go_on(sequence, free))
    assert len(rest) == 4
    plain = TokenSequence(model(setup.kind), setup.cache, ids=list(IDS))
    plain.ids += [token.id for token in tokens]
    plain.feed(16), plain.feed(32), plain.feed(36)
    while plain.num_fed < len(plain.ids) - 1:
        plain.feed_one()
    assert rest == list(go_on(plain, free)), "as if the grammar had never been"


class Forbidding:
    """A processor that leaves nothing of what the grammar allows, from one place on."""

    name = "test/forbidding"

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls += 1
        if tokens.shape[0] - len(IDS) < self.at:
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == 200, logits, -mx.inf)

    def state(self) -> int:
        return self.calls

    def restore(self, state: int) -> None:
        self.calls = state


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "ring"])
@pytest.mark.parametrize("at", [0, 3])
def test_where_processor_and_grammar_leave_nothing_it_is_an_error_with_nothing_recorded(name, at) -> None:
    setup = SETUPS[name]
    grammar = Grammar.regex("[xyz]{8}")
    processor = Forbidding(at)
    iterator = start(model(setup.kind), setup, options_of(setup.kind, grammar, processors=(processor,)))
    tokens = []
    with pytest.raises(GrammarError, match="has a probability"):
        for token in iterator:
            tokens.append(token)
    assert len(tokens) == at
    for _ in range(2):
        with pytest.raises(GrammarError, match="has a probability"):
            next(iterator)
        iterator.settle()
        assert iterator.sequence.ids == IDS + [token.id for token in tokens]
        assert iterator.sequence.ahead is None
    processor.at = 100
    rest = list(go_on(iterator.sequence, options_of(setup.kind, grammar)))
    assert tokens + rest == list(start(model(setup.kind), setup, options_of(setup.kind, grammar)))


def test_a_processor_that_needs_ids_on_the_host_and_one_with_memory() -> None:
    class Wandering:
        name = "test/wandering"

        def __init__(self, host: bool) -> None:
            self.needs_host_ids, self.calls = host, 0

        def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
            self.calls += 1
            return logits + 0.7 * mx.sin(mx.arange(logits.shape[-1]) * (1 + self.calls % 5))

        def state(self) -> int:
            return self.calls

        def restore(self, state: int) -> None:
            self.calls = state

    results = []
    for host in (False, True):
        expected = list(start(model("llama"), SETUPS["llama"], options_of("llama", processors=(Wandering(host),))))
        assert set(json.loads(text_of(expected))) == {"a", "b"}
        results.append(expected)
        for cut in range(0, len(expected), 9):
            processor = Wandering(host)
            before = start(model("llama"), SETUPS["llama"], options_of("llama", processors=(processor,)))
            seen = [next(before) for _ in range(cut)]
            before.settle()
            seen += go_on(before.sequence, options_of("llama", processors=(processor,)))
            assert seen == expected
    assert results[0] == results[1]


def test_an_evaluation_that_fails_takes_nothing_with_it(monkeypatch) -> None:
    read = mlxgen.decode.Ahead.read
    for name in ("llama", "qwen3_5"):
        setup = SETUPS[name]
        expected, _ = whole(setup, SAMPLED)
        for fail_at in (0, 9):
            calls = 0

            def failing(self, fail_at=fail_at):
                nonlocal calls
                calls += 1
                if calls == fail_at + 1:
                    raise RuntimeError("the evaluation failed")
                return read(self)

            monkeypatch.setattr(mlxgen.decode.Ahead, "read", failing)
            iterator = start(model(setup.kind), setup, options_of(setup.kind, sampling=SAMPLED))
            seen = []
            with pytest.raises(RuntimeError):
                for token in iterator:
                    seen.append(token)
            monkeypatch.setattr(mlxgen.decode.Ahead, "read", read)
            assert seen + list(iterator) == expected


# -- interrupts --------------------------------------------------------------------------------------------------------

FILES = ("mlxgen/decode.py", "mlxgen/ahead.py", "mlxgen/sequence.py", "constraints/grammar.py", "constraints/masks.py")


def interrupted(count: int, function: Any) -> bool:
    """Run it with a KeyboardInterrupt at the n-th instruction in these files; whether it came."""
    remaining, raised = count, False

    def local(frame: Any, event: str, arg: Any) -> Any:
        nonlocal remaining, raised
        if event in ("line", "opcode") and not raised:
            remaining -= 1
            if remaining < 0:
                raised = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename.endswith(FILES):
            frame.f_trace_opcodes = True
            return local
        return None

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("same", [True, False])
def test_a_keyboard_interrupt_between_any_two_instructions(name, same) -> None:
    setup = replace(SETUPS[name], step_size=64)
    grammar = Grammar.regex("[a-z]{3}[0-9]{2}")
    expected = list(start(model(setup.kind), setup, options_of(setup.kind, grammar, SAMPLED)))
    rng = random.Random(f"{name}{same}")
    num_interrupts = 0
    for _ in range(15):
        iterator = start(model(setup.kind), setup, options_of(setup.kind, grammar, SAMPLED))
        for _ in range(3):
            num_interrupts += interrupted(rng.randrange(4000), lambda: list(iterator))  # noqa: B023
            if not same:
                interrupted(rng.randrange(300), iterator.settle)
                iterator.settle()
                iterator = go_on(iterator.sequence, options_of(setup.kind, grammar, SAMPLED))
        list(iterator)
        assert iterator.sequence.ids == IDS + [token.id for token in expected]
        assert iterator.sequence.last == expected[-1]
        assert iterator.complete
    assert num_interrupts > 10
    assert re.fullmatch("[a-z]{3}[0-9]{2}", text_of(expected))
