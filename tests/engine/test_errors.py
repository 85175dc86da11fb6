"""Exceptions from every place there is: afterwards the session is usable at once and goes on exactly."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import pytest
from harness import PROMPT, SETUPS, Outcome, counted, model, new_session, sampled
from mlx_lm.models import cache as kinds

import mlxgen.ahead
from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.events import Token
from mlxgen.options import ReplyOptions
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.sequence import TokenSequence

NUM_TOKENS = 8
REPLY = sampled(NUM_TOKENS)


class Broken(Exception):
    pass


def uninterrupted(setup):
    session, outcome = new_session(setup), Outcome()
    outcome.take(session.stream(PROMPT, reply=REPLY))
    return session, outcome


@contextmanager
def failing(cls, call: int, error: type[BaseException] = Broken):
    """The `call`-th call (from 0) of any instance of a layer or cache class raises, after doing its work."""
    name = "update_and_fetch" if hasattr(cls, "update_and_fetch") else "__call__"
    original = getattr(cls, name)
    calls = 0

    def wrapped(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        result = original(self, *args, **kwargs)
        if calls == call + 1:
            raise error(f"call {call} of {cls.__name__}")
        return result

    setattr(cls, name, wrapped)
    try:
        yield
    finally:
        setattr(cls, name, original)


def layer_classes(setup):
    module = model(setup.kind).module
    layers = getattr(module, "layers", None) or module.model.layers
    return {type(layer) for layer in layers}, len(layers)


@pytest.mark.parametrize("name", SETUPS)
def test_an_error_in_a_layer_leaves_a_session_that_goes_on_exactly(name) -> None:
    setup = SETUPS[name]
    whole, expected = uninterrupted(setup)
    classes, num_layers = layer_classes(setup)
    cls = next(iter(classes))
    # Prefill is 4 chunks; then every layer of one decode pass, and a late one.
    calls = [0, num_layers + 1, *range(5 * num_layers, 6 * num_layers), 9 * num_layers]
    failed = 0
    for call in calls:
        session, outcome = new_session(setup), Outcome()
        try:
            with failing(cls, call):
                outcome.take(session.stream(PROMPT, reply=REPLY))
        except Broken:
            failed += 1
        assert session.unfinished or outcome.finished
        if session.unfinished:
            outcome.take(session.continue_())
        assert outcome.values == expected.values
        assert session.ledger == whole.ledger
        assert session.sequence.passes.entries == whole.sequence.passes.entries
    assert failed >= len(calls) - 3


@pytest.mark.parametrize("name", ["gemma3-window", "ring", "quantized-later", "qwen3_5", "falcon_h1-list"])
def test_an_error_inside_a_cache_is_never_trimmed_away(name) -> None:
    setup = SETUPS[name]
    whole, expected = uninterrupted(setup)
    for cls in (kinds.RotatingKVCache, kinds.KVCache, kinds.QuantizedKVCache):
        for call in (3, 14, 17):
            session, outcome = new_session(setup), Outcome()
            try:
                with failing(cls, call):
                    outcome.take(session.stream(PROMPT, reply=REPLY))
            except Broken:
                outcome.take(session.continue_())
            assert outcome.values == expected.values
            assert session.ledger == whole.ledger


@pytest.mark.parametrize("name", ["llama", "gemma3-window", "lfm2", "quantized-later"])
def test_after_an_error_the_next_turn_comes_at_once(name) -> None:
    setup = SETUPS[name]
    classes, num_layers = layer_classes(setup)
    session, outcome = new_session(setup), Outcome()
    with pytest.raises(Broken), failing(next(iter(classes)), 8 * num_layers - 1):
        outcome.take(session.stream(PROMPT, reply=REPLY))
    assert 0 < len(outcome.tokens) < NUM_TOKENS
    plain = new_session(setup)
    for event in plain.stream(PROMPT, reply=REPLY):
        if isinstance(event, Token) and event.index == len(outcome.tokens) - 1:
            break
    assert session.send("And now?", reply=REPLY).text == plain.send("And now?", reply=REPLY).text


@pytest.mark.parametrize("name", SETUPS)
def test_an_evaluation_that_fails_takes_the_caches_with_it_and_they_are_rebuilt(name, monkeypatch) -> None:
    setup = SETUPS[name]
    whole, expected = uninterrupted(setup)
    read = mlxgen.ahead.Ahead.read
    for fail_at in (0, 4):
        session, outcome, calls = new_session(setup), Outcome(), 0

        def failing_read(self, fail_at=fail_at, session=session):
            nonlocal calls
            calls += 1
            if calls == fail_at + 1:
                for array in session.sequence.arrays():  # what an evaluation left is garbage
                    array[...] = 0 if array.dtype == mx.uint32 else float("nan")
                raise RuntimeError("the evaluation failed")
            return read(self)

        monkeypatch.setattr(mlxgen.ahead.Ahead, "read", failing_read)
        with pytest.raises(RuntimeError, match="the evaluation failed"):
            outcome.take(session.stream(PROMPT, reply=REPLY))
        assert len(outcome.tokens) == fail_at
        outcome.take(session.continue_())
        assert outcome.values == expected.values
        assert session.ledger == whole.ledger


def test_a_prefill_evaluation_that_fails_is_run_again(monkeypatch) -> None:
    setup = SETUPS["qwen3_5"]
    _, expected = uninterrupted(setup)
    session, outcome, calls, evaluate = new_session(setup), Outcome(), 0, mx.eval

    def failing_eval(*args):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the evaluation failed")
        evaluate(*args)

    monkeypatch.setattr(mx, "eval", failing_eval)
    with pytest.raises(RuntimeError):
        outcome.take(session.stream(PROMPT, reply=REPLY))
    outcome.take(session.continue_())
    assert outcome.values == expected.values


def test_rebuilding_is_cancellable_pass_by_pass_and_does_nothing_twice() -> None:
    setup = SETUPS["qwen3_5"]
    _, expected = uninterrupted(setup)
    using, forward = counted("qwen3_5")
    session, outcome = new_session(setup, using), Outcome()
    classes, num_layers = layer_classes(setup)
    with pytest.raises(Broken), failing(next(iter(classes)), 9 * num_layers - 1):
        outcome.take(session.stream(PROMPT, reply=REPLY))
    num_passes = sum(count if kind == "decode" else 1 for kind, _, count in session.sequence.passes.entries)
    forward.lengths.clear()
    stops = 0
    while session.unfinished:
        checkpoints = 0

        class Second(CancelToken):
            def checkpoint(self) -> None:
                nonlocal checkpoints
                checkpoints += 1
                if checkpoints == 2:
                    raise Cancelled("requested")

        before = len(forward.lengths)
        outcome.take(session.continue_(cancel=Second()))
        assert len(forward.lengths) - before <= 2, "one unit, and the token it had to sample"
        stops += 1
    assert stops > num_passes
    assert outcome.values == expected.values
    assert len(forward.lengths) <= num_passes + NUM_TOKENS


def test_an_error_during_the_rebuild_begins_the_rebuild_anew() -> None:
    setup = SETUPS["lfm2"]
    whole, expected = uninterrupted(setup)
    classes, num_layers = layer_classes(setup)
    cls = next(iter(classes))
    session, outcome = new_session(setup), Outcome()
    with pytest.raises(Broken), failing(cls, 9 * num_layers - 1):
        outcome.take(session.stream(PROMPT, reply=REPLY))
    for call in (0, num_layers + 1, 3 * num_layers):
        with pytest.raises(Broken), failing(cls, call):
            outcome.take(session.continue_())
    outcome.take(session.continue_())
    assert outcome.values == expected.values
    assert session.sequence.passes.entries == whole.sequence.passes.entries


def interrupted_at(line_count: int, function, *, files: tuple[str, ...]):
    """Run `function`, and raise KeyboardInterrupt at the n-th line executed in files of these names; whether it was
    reached."""
    remaining, raised = line_count, False

    def local(frame, event, arg):
        nonlocal remaining, raised
        if event in ("line", "opcode") and not raised:
            remaining -= 1
            if remaining < 0:
                raised = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    def trace(frame, event, arg):
        if not raised and frame.f_code.co_filename.endswith(files):
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
    assert not raised
    return False


ENGINE = tuple(
    f"mlxgen/{name}.py"
    for name in ("sequence", "decode", "reply", "session", "state", "history", "persist", "textstream")
)
ENGINE += ("mlx_lm/models/cache.py", "mlxgen/snapshot/journal.py", "mlxgen/snapshot/export.py")


def count_opcodes(function) -> int:
    total = 0

    def local(frame, event, arg):
        nonlocal total
        total += event in ("line", "opcode")
        return local

    def trace(frame, event, arg):
        if frame.f_code.co_filename.endswith(ENGINE):
            frame.f_trace_opcodes = True
            return local
        return None

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return total


@pytest.mark.parametrize("name", ["llama", "gemma3-window", "qwen3_5", "quantized-later", "falcon_h1-list"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_keyboard_interrupt_between_any_two_instructions(name, kept, tmp_path) -> None:
    setup = replace(SETUPS[name], step_size=32)
    reply = sampled(4)
    whole, expected = new_session(setup), Outcome()
    expected.take(whole.stream(PROMPT, reply=reply))
    total = count_opcodes(lambda: new_session(setup).send(PROMPT, reply=reply))
    rng = random.Random(f"{name}{kept}")
    num_interrupts = 0
    for attempt in range(12):
        session = new_session(setup)
        path = tmp_path / f"{attempt}.mlxgen"
        if kept:
            session.autosave(path)
        # Three interrupts in a row, wherever they fall; then on to the end.
        at = [rng.randrange(total), rng.randrange(total), rng.randrange(total // 2)]
        outcome = Outcome()
        for count in at:
            if session.history.reply is not None and not session.unfinished:
                break
            num_interrupts += interrupted_at(count, lambda: go_on(session, outcome, reply), files=ENGINE)  # noqa: B023
        if kept and attempt % 3 == 0:
            session.close()
            session = resume(path, options=ResumeOptions(model=model(setup.kind)))
        go_on(session, outcome, reply)
        assert session.history.ids == whole.history.ids
        assert [t.logprob for t in session.history.reply.tokens] == [t.logprob for t in whole.history.reply.tokens]
        assert session.reply_text == whole.reply_text
        assert session.ledger == whole.ledger
        session.close()
        if kept:
            with resume(path, options=ResumeOptions(model=model(setup.kind))) as again:
                assert again.history.ids == whole.history.ids
                assert again.ledger == whole.ledger
                assert again.send("More", reply=reply).text == follow_up(setup, reply)
    assert num_interrupts > 10


def go_on(session, outcome, reply) -> None:
    """The call that is right wherever an interrupt left the session."""
    if session.history.reply is None:
        outcome.take(session.stream(None if session.turns[1:] else PROMPT, reply=reply))
    elif session.unfinished:
        outcome.take(session.continue_())


_follow_ups: dict[str, str] = {}


def follow_up(setup, reply) -> str:
    key = f"{setup}"
    if key not in _follow_ups:
        session = new_session(setup)
        session.send(PROMPT, reply=reply)
        _follow_ups[key] = session.send("More", reply=reply).text
    return _follow_ups[key]


def test_a_processor_that_raises_and_one_that_doesn_t() -> None:
    class Counting:
        name = "counting"

        def __init__(self, fail_at=None) -> None:
            self.calls, self.fail_at = 0, fail_at

        def __call__(self, tokens, logits):
            self.calls += 1
            if self.calls == self.fail_at:
                self.fail_at = None
                raise Broken
            return logits + (self.calls % 3) * mx.arange(logits.shape[-1]) * 0.05

        def state(self):
            return self.calls

        def restore(self, state) -> None:
            self.calls = state

    for name in ("llama", "lfm2"):
        setup = SETUPS[name]
        expected = Outcome()
        expected.take(new_session(setup).stream(PROMPT, reply=replace(REPLY, processors=(Counting(),))))
        for fail_at in (1, 2, 5, NUM_TOKENS):
            session, outcome = new_session(setup), Outcome()
            with pytest.raises(Broken):
                outcome.take(session.stream(PROMPT, reply=replace(REPLY, processors=(Counting(fail_at),))))
            outcome.take(session.continue_())
            assert outcome.values == expected.values


def test_an_error_in_the_consumer_s_body_loses_nothing() -> None:
    for name in ("llama", "qwen3_5"):
        setup = SETUPS[name]
        _, expected = uninterrupted(setup)
        session, outcome = new_session(setup), Outcome()
        with pytest.raises(ZeroDivisionError):
            for event in session.stream(PROMPT, reply=REPLY):
                if isinstance(event, Token):
                    outcome.tokens.append(event)
                    if event.index == 3:
                        1 / 0  # noqa: B018
        outcome.take(session.continue_())
        assert outcome.values == expected.values


def test_an_error_that_stays_comes_out_every_time_and_the_snapshot_survives_it(tmp_path) -> None:
    setup = SETUPS["lfm2"]
    _, expected = uninterrupted(setup)
    classes, _ = layer_classes(setup)
    cls = next(iter(classes))
    session, outcome = new_session(setup), Outcome()
    session.autosave(tmp_path / "a.mlxgen")
    for event in session.stream(PROMPT, reply=REPLY):
        if isinstance(event, Token):
            outcome.tokens.append(event)
            if event.index == 3:
                break
    original = cls.__call__
    cls.__call__ = lambda self, *args, **kwargs: (_ for _ in ()).throw(Broken("always"))
    try:
        for _ in range(3):
            with pytest.raises(Broken, match="always"):
                list(session.continue_())
        session.close()
    finally:
        cls.__call__ = original
    with resume(tmp_path / "a.mlxgen", options=ResumeOptions(model=model("lfm2"))) as again:
        outcome.take(again.continue_())
        assert outcome.values == expected.values


def test_a_sequence_goes_back_over_any_kind_of_cache() -> None:
    for name in ("llama", "ring", "qwen3_5", "quantized"):
        setup = SETUPS[name]
        ids = [5 + i % 200 for i in range(40)]
        sequence = TokenSequence(model(setup.kind), setup.cache, ids=ids)
        sequence.feed(16)
        sequence.feed(32)
        for _ in range(6):
            sequence.feed_one()
        sequence.retract(34)
        assert (sequence.ledger, sequence.ids) == (ids[:34], ids[:34])
        fresh = TokenSequence(model(setup.kind), setup.cache, ids=ids)
        fresh.feed(16)
        fresh.feed(32)
        fresh.feed_one()
        fresh.feed_one()
        token = mx.array([7], mx.uint32)
        assert sequence.passes.entries == fresh.passes.entries
        assert mx.array_equal(sequence.step(token), fresh.step(token))


def test_options_without_any_limit_stop_at_a_consumer_error_too() -> None:
    session = new_session(SETUPS["llama"])
    with pytest.raises(Broken):
        for event in session.stream(PROMPT, reply=ReplyOptions(max_tokens=None, ignore_eos=True)):
            if isinstance(event, Token) and event.index == 5:
                raise Broken
    assert session.position == 6
