from __future__ import annotations

import gc
import threading

import pytest
from harness import NUM_TOKENS, PROMPT, SETUPS, Outcome, StopAt, counted, greedy, model, new_session, sampled

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.decode import TokenIterator
from mlxgen.errors import ContextLengthError, InvalidValueError, SessionBusyError
from mlxgen.events import Finished, PrefillProgress, Token
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.sequence import TokenSequence
from mlxgen.session import Session


def fresh_reply(setup, session, reply):
    """What a new sequence says that is fed the same token ids by the same passes, up to where the reply begins."""
    start = session.history.reply.start
    sequence = TokenSequence(model(setup.kind), setup.cache, ids=session.history.ids[:start])
    entries = [entry for entry in session.sequence.passes.entries if entry[1] < start - 1]
    sequence.replay(
        [(kind, first, min(count, start - 1 - first) if kind == "decode" else count) for kind, first, count in entries],
        start - 1,
    )
    iterator = TokenIterator(sequence, options=reply.decode_options(reply.max_tokens), step_size=setup.step_size)
    return [token.id for token in iterator]


@pytest.mark.parametrize("name", SETUPS)
def test_the_next_turn_follows_a_stopped_answer_and_prefills_only_what_is_new(name) -> None:
    setup = SETUPS[name]
    using, forward = counted(setup.kind)
    session, outcome = new_session(setup, using), Outcome()
    outcome.take(session.stream(PROMPT, reply=greedy(), cancel=StopAt(10)))
    seen = [token.id for token in outcome.tokens]
    assert 2 < len(seen) < NUM_TOKENS
    held = len(session.ledger)
    forward.lengths.clear()
    finished = session.send("And now?", reply=greedy(8))
    fed_prompt = finished.usage.prefilled_tokens
    assert session.ledger[:held] == session.history.ids[:held], "what the user saw stays"
    assert finished.usage.reused_tokens == held
    assert fed_prompt == session.history.reply.start - held
    assert forward.num_tokens == fed_prompt + 7, "8 tokens sampled, the last not fed"
    assert finished.usage.prompt_tokens == session.history.reply.start
    assert session.history.reply.ids == fresh_reply(setup, session, greedy(8))


def test_an_unseen_token_is_dropped_by_the_next_turn_and_kept_by_the_same_reply() -> None:
    session, outcome = new_session(SETUPS["llama"]), Outcome()
    outcome.take(session.stream(PROMPT, reply=greedy(), cancel=StopAt(9)))
    unseen = session.sequence.ahead
    assert unseen is not None
    ledger = session.ledger
    assert ledger[-1] == outcome.tokens[-1].id
    session.send("Stop. Something else.", reply=greedy(2))
    assert session.ledger[: len(ledger)] == ledger
    again, second = new_session(SETUPS["llama"]), Outcome()
    second.take(again.stream(PROMPT, reply=greedy(), cancel=StopAt(9)))
    second.take(again.continue_())
    assert second.tokens[len(outcome.tokens)].id == unseen.id


def test_a_cancelled_token_runs_nothing_and_leaves_a_usable_session() -> None:
    using, forward = counted("llama")
    session = new_session(SETUPS["llama"], using)
    token = CancelToken()
    token.cancel("disconnect")
    events = list(session.stream(PROMPT, reply=greedy(), cancel=token))
    assert forward.lengths == []
    assert [type(event) for event in events if not isinstance(event, PrefillProgress)] == [Finished]
    assert events[-1].cancel_reason == "disconnect"
    with pytest.raises(Cancelled):
        events[-1].raise_if_cancelled()
    assert session.send("Hello", reply=greedy(3)).finish_reason == "length"


def test_a_turn_stopped_before_its_reply_stays_and_undo_removes_it() -> None:
    session = new_session(SETUPS["llama"])
    session.send("One", reply=greedy(4), cancel=StopAt(0))
    session.send("Two", reply=greedy(4))
    text = session.model.tokenizer.decode(session.history.ids)
    assert "One" in text
    assert "Two" in text
    session.undo()
    session.undo()
    assert [turn.role for turn in session.turns] == ["system"]
    with pytest.raises(InvalidValueError, match="no turn"):
        session.undo()


def test_max_tokens_one_five_hundred_times_is_one_run_of_five_hundred() -> None:
    setup = SETUPS["llama"]
    whole, pieces = Outcome(), Outcome()
    new = new_session(setup)
    whole.take(new.stream(PROMPT, reply=sampled(530)))
    session = new_session(setup)
    pieces.take(session.stream(PROMPT, reply=sampled(1)))
    for _ in range(529):
        pieces.take(session.continue_())
    assert [t.id for t in pieces.tokens] == [t.id for t in whole.tokens]
    assert [t.logprob for t in pieces.tokens] == [t.logprob for t in whole.tokens]
    assert session.ledger == new.ledger


def test_max_tokens_zero_prefills_only_and_one_runs_one_step() -> None:
    using, forward = counted("llama")
    session = new_session(SETUPS["llama"], using)
    finished = session.send(PROMPT, reply=greedy(0))
    assert finished.finish_reason == "length"
    assert session.position == 0
    assert forward.num_tokens == session.history.reply.start - 1
    session.send("More", reply=greedy(1))
    assert forward.lengths[-1] == 1
    assert len(session.ledger) == len(session.history.ids) - 1


def test_interrupting_often_gives_the_asked_number_of_tokens() -> None:
    session, outcome = new_session(SETUPS["lfm2"]), Outcome()
    outcome.take(session.stream(PROMPT, reply=greedy(17), cancel=StopAt(5)))
    for _ in range(40):
        if not session.unfinished:
            break
        outcome.take(session.continue_(cancel=StopAt(2)))
    assert [token.index for token in outcome.tokens] == list(range(17))
    assert outcome.finished.finish_reason == "length"


@pytest.mark.parametrize("leave", ["break", "raise", "close elsewhere", "garbage"])
@pytest.mark.parametrize("name", ["llama", "gemma3-window", "qwen3_5"])
def test_however_a_consumer_leaves_ledger_and_cache_agree(name, leave) -> None:
    setup = SETUPS[name]
    expected = Outcome()
    expected.take(new_session(setup).stream(PROMPT, reply=greedy()))
    session, outcome = new_session(setup), Outcome()
    events = session.stream(PROMPT, reply=greedy())

    def read_five() -> None:
        while len(outcome.tokens) < 5:
            event = next(events)
            if isinstance(event, Token):
                outcome.tokens.append(event)

    if leave == "raise":
        with pytest.raises(RuntimeError, match="the consumer's own"):
            for event in events:
                if isinstance(event, Token):
                    outcome.tokens.append(event)
                if len(outcome.tokens) == 5:
                    raise RuntimeError("the consumer's own")
    else:
        read_five()
    if leave == "close elsewhere":
        thread = threading.Thread(target=events.close)
        thread.start()
        thread.join()
    elif leave == "garbage":
        del events
        gc.collect()
    outcome.take(session.continue_())
    assert outcome.values == expected.values


def test_another_thread_inside_is_a_clear_error() -> None:
    session = new_session(SETUPS["llama"])
    inside, leave = threading.Event(), threading.Event()

    class Slow(CancelToken):
        def checkpoint(self) -> None:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=lambda: session.send(PROMPT, reply=greedy(1), cancel=Slow()))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(SessionBusyError, match="another thread"):
        session.add("me too")
    leave.set()
    thread.join()


def test_two_sessions_interleaved_token_by_token_equal_each_alone() -> None:
    for name in ("llama", "gemma3-window", "qwen3_5", "falcon_h1-list"):
        setup = SETUPS[name]
        alone = [Outcome(), Outcome()]
        prompts = (PROMPT, "Quite another one")
        for outcome, prompt in zip(alone, prompts, strict=True):
            outcome.take(new_session(setup).stream(prompt, reply=sampled()))
        together = [Outcome(), Outcome()]
        runs = [new_session(setup).stream(prompt, reply=sampled()) for prompt in prompts]
        running = [0, 1]
        while running:
            for i in list(running):
                event = next(runs[i], None)
                if event is None:
                    running.remove(i)
                elif isinstance(event, Token):
                    together[i].tokens.append(event)
        assert together[0].values == alone[0].values
        assert together[1].values == alone[1].values


def test_same_seed_same_tokens_whatever_else_uses_the_random_state() -> None:
    import mlx.core as mx

    first = new_session(SETUPS["llama"]).send(PROMPT, reply=sampled()).text
    mx.random.seed(99)
    mx.random.normal((10,))
    state = [array.tolist() for array in mx.random.state]
    assert new_session(SETUPS["llama"]).send(PROMPT, reply=sampled()).text == first
    assert [array.tolist() for array in mx.random.state] == state, "the global random state is never touched"


def test_a_random_seed_is_chosen_once_and_recorded() -> None:
    reply = ReplyOptions(max_tokens=3, ignore_eos=True, sampling=sampled().sampling.__class__(temperature=1.0))
    session = new_session(SETUPS["llama"])
    session.send(PROMPT, reply=reply)
    seed = session.history.reply.options["sampling"]["seed"]
    session.continue_(reply=None).close()
    assert isinstance(seed, int)
    assert session.history.reply.options["sampling"]["seed"] == seed


def test_stop_token_is_not_shown_and_the_reply_can_go_on_past_it() -> None:
    plain = Outcome()
    plain.take(new_session(SETUPS["llama"]).stream(PROMPT, reply=greedy()))
    stop_id = plain.tokens[6].id
    first = next(i for i, token in enumerate(plain.tokens) if token.id == stop_id)
    using, forward = counted("llama")
    session, outcome = new_session(SETUPS["llama"], using), Outcome()
    options = ReplyOptions(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=True, stop_token_ids=(stop_id,))
    finished = outcome.take(session.stream(PROMPT, reply=options))
    assert finished.finish_reason == "stop"
    assert finished.stop_token == stop_id
    assert len(outcome.tokens) == first + 1
    decode_passes = sum(1 for length in forward.lengths if length == 1)
    assert decode_passes <= first + 2, "at most one pass beyond the stop token"
    outcome.take(session.continue_(reply=greedy(NUM_TOKENS - first - 1)))
    assert [t.id for t in outcome.tokens] == [t.id for t in plain.tokens]


def test_a_stop_string_is_never_shown_and_appears_when_the_reply_goes_on() -> None:
    plain = Outcome()
    plain.take(new_session(SETUPS["llama"]).stream(PROMPT, reply=greedy()))
    text = plain.finished.text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    at = text.index(stop)
    session, outcome = new_session(SETUPS["llama"]), Outcome()
    finished = outcome.take(
        session.stream(PROMPT, reply=ReplyOptions(max_tokens=NUM_TOKENS, ignore_eos=True, stop=(stop,)))
    )
    assert (finished.finish_reason, finished.stop_string) == ("stop", stop)
    assert finished.text == text[:at] == outcome.text
    done = len(outcome.tokens)
    outcome.take(session.continue_(reply=greedy(NUM_TOKENS - done)))
    assert outcome.finished.text == text == outcome.text


def test_prompt_longer_than_the_context_is_refused_and_nothing_is_lost() -> None:
    from dataclasses import replace

    using = replace(model("llama"), context_length=40)
    session = Session(using, options=SessionOptions(prefill_step_size=16))
    with pytest.raises(ContextLengthError, match="context 40"):
        session.send("x" * 200, reply=greedy(4))
    assert session.turns == (), "a turn that can't be part of any prompt is taken back"
    finished = session.send("Hi", reply=greedy(500))
    assert finished.finish_reason == "length"
    assert len(session.history.ids) == 40


def test_a_deadline_stops_the_run() -> None:
    session = new_session(SETUPS["llama"])
    finished = session.send(PROMPT, reply=greedy(100_000), cancel=CancelToken.after(0.3))
    assert finished.cancel_reason == "deadline"
    assert session.unfinished


@pytest.mark.parametrize(
    "options",
    [
        ReplyOptions(max_tokens=-1),
        ReplyOptions(stop=("",)),
        ReplyOptions(stop="abc"),
        ReplyOptions(stop_token_ids=(10**6,)),
        ReplyOptions(stop_token_ids=(-1,)),
        ReplyOptions(top_logprobs=10**6),
        ReplyOptions(sampling=sampled().sampling.__class__(temperature=float("nan"))),
        ReplyOptions(sampling=sampled().sampling.__class__(logit_bias={10**9: 1.0})),
    ],
)
def test_bad_options_are_refused_before_anything_changes(options) -> None:
    session = new_session(SETUPS["llama"])
    records = len(session.history.records)
    with pytest.raises(InvalidValueError):
        session.stream(PROMPT, reply=options)
    assert len(session.history.records) == records


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="surrogate"):
        new_session(SETUPS["llama"]).add("bad \udc80 text")


def test_an_answer_without_end_reports_its_usage() -> None:
    finished = new_session(SETUPS["llama"]).send(PROMPT, reply=greedy(10))
    usage = finished.usage
    assert usage.generated_tokens == 10
    assert usage.prompt_tokens == usage.prefilled_tokens + usage.reused_tokens
    assert usage.time_to_first_token_s > 0
    assert usage.generation_tps > 0
    assert usage.prompt_tps > 0
    assert usage.peak_memory_bytes > 0
