"""Marks, rewinding, forks, edits, appended text, scores and branches: exact for every kind of cache, and cheap."""

from __future__ import annotations

import shutil
from dataclasses import replace

import mlx.core as mx
import pytest
from harness import PROMPT, SETUPS, Outcome, Setup, StopAt, counted, greedy, model, new_session, sampled

from mlxgen.cancellation import Cancelled
from mlxgen.errors import ContextLengthError, InvalidValueError
from mlxgen.events import Token
from mlxgen.options import ReplyOptions
from mlxgen.persist import AutosavePolicy
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.sampling import SamplingParams
from mlxgen.sequence import TokenSequence
from mlxgen.session import Session

SETUPS = {name: replace(setup, cache=replace(setup.cache, mark_every=8)) for name, setup in SETUPS.items()}
NUM_TOKENS = 30
each_kind = pytest.mark.parametrize("name", SETUPS)
each_reply = pytest.mark.parametrize("reply", [greedy(NUM_TOKENS), sampled(NUM_TOKENS)], ids=["greedy", "sampled"])


def approximate(setup: Setup) -> bool:
    """Whether tokens fed in other pieces may give other results: quantised rows, rows that a ring has forgotten."""
    return setup.cache.kv_bits is not None or setup.cache.max_kv_size is not None


def whole(setup: Setup, reply) -> tuple[Session, list]:
    session = new_session(setup)
    outcome = Outcome()
    outcome.take(session.stream(PROMPT, reply=reply))
    return session, outcome.values


def reopened(session: Session, path) -> Session:
    session.save(path)
    session.close()
    return resume(path, options=ResumeOptions(model=session.model))


@each_kind
@each_reply
def test_rewound_to_any_token_a_reply_says_the_same_again(name, reply) -> None:
    session, expected = whole(SETUPS[name], reply)
    start = session.history.reply.start
    for count in (29, 17, 16, 9, 1, 0):
        session.rewind(num_tokens=start + count)
        assert session.position == count
        outcome = Outcome()
        outcome.take(session.continue_())
        assert outcome.values == expected[count:]
        assert session.reply_text == "".join(value[2] for value in expected)


@each_kind
def test_rewinding_costs_no_pass_but_for_those_since_the_last_state_mark(name) -> None:
    setup = SETUPS[name]
    using, forward = counted(setup.kind)
    session = new_session(setup, using)
    session.send(PROMPT, reply=greedy(NUM_TOKENS))
    forward.lengths.clear()
    session.rewind(num_tokens=session.history.reply.start + 20)
    assert forward.num_tokens == 0
    finished = list(session.continue_())[-1]
    trimmable = setup.kind == "llama" and name != "ring"
    own = finished.usage.generated_tokens
    assert own == NUM_TOKENS - 20
    # The token before is fed again for its logits; the last one is not fed.
    again = forward.num_tokens - own
    assert again == 0 if trimmable and name != "quantized-later" else 0 <= again <= 8


@each_kind
@each_reply
def test_forked_at_any_token_both_sides_say_what_one_would(name, reply) -> None:
    _, expected = whole(SETUPS[name], reply)
    session = new_session(SETUPS[name])
    forks = []
    outcome = Outcome()
    for event in session.stream(PROMPT, reply=reply):
        if isinstance(event, Token):
            outcome.tokens.append(event)
            if event.index in (0, 7, 15, 28):
                forks.append((event.index + 1, session.fork()))
    assert outcome.values == expected
    for count, fork in forks:
        rest = Outcome()
        rest.take(fork.continue_())
        assert rest.values == expected[count:]


@each_kind
def test_a_fork_and_its_parent_never_see_each_other(name) -> None:
    def answer(session: Session, prompt: str) -> list:
        outcome = Outcome()
        outcome.take(session.stream(prompt, reply=greedy(6)))
        return outcome.values

    def alone(prompts: list[str]) -> list:
        session, _ = whole(SETUPS[name], greedy(NUM_TOKENS))
        return [answer(session, prompt) for prompt in prompts]

    session, _ = whole(SETUPS[name], greedy(NUM_TOKENS))
    twin = session.fork()
    mine = [answer(session, "One."), None, None]
    theirs = [answer(twin, "Two?")]
    mine[1] = answer(session, "Three!")
    theirs.append(answer(twin, "Four."))
    mine.pop()
    assert mine == alone(["One.", "Three!"])
    assert theirs == alone(["Two?", "Four."])


@each_kind
def test_a_fork_costs_neither_passes_nor_memory_and_gives_it_back(name) -> None:
    setup = SETUPS[name]
    using, forward = counted(setup.kind)
    session = new_session(setup, using)
    session.send(PROMPT, reply=greedy(8))
    forward.lengths.clear()
    before = mx.get_active_memory()
    forks = [session.fork() for _ in range(5)]
    assert forward.num_tokens == 0
    assert mx.get_active_memory() - before < 1000
    for fork in forks:
        list(fork.continue_(reply=greedy(2)))
    del forks, fork
    session.sequence.evaluate()
    mx.clear_cache()
    assert mx.get_active_memory() - before < 1000


@each_kind
def test_a_fork_of_what_was_rewound_runs_nothing_either(name) -> None:
    setup = SETUPS[name]
    using, forward = counted(setup.kind)
    session = new_session(setup, using)
    expected = Outcome()
    expected.take(session.stream(PROMPT, reply=greedy(20)))
    session.rewind(num_tokens=session.history.reply.start + 13)
    del forward.lengths[:]
    twin = session.fork()
    assert not forward.lengths
    for side in (twin, session):
        outcome = Outcome()
        outcome.take(side.continue_())
        assert outcome.values == expected.values[13:]


@each_kind
def test_marks_survive_a_snapshot_and_end_with_their_place(name, tmp_path) -> None:
    session = new_session(SETUPS[name])
    reply = greedy(NUM_TOKENS)
    _, expected = whole(SETUPS[name], reply)
    empty = session.mark()
    for event in session.stream(PROMPT, reply=reply):
        if isinstance(event, Token) and event.index == 11:
            middle = session.mark()
    end = session.mark()
    session.send("And then?", reply=greedy(3))
    session = reopened(session, tmp_path / "a.mlxgen")
    assert session.marks == (empty, middle, end)
    session.rewind(end)
    assert session.position == NUM_TOKENS
    assert session.marks == (empty, middle, end)
    session.rewind(middle)
    assert session.marks == (empty, middle)
    outcome = Outcome()
    outcome.take(session.continue_())
    assert outcome.values == expected[12:]
    with pytest.raises(InvalidValueError, match="mark 2 isn't in this conversation"):
        session.rewind(end)
    session.rewind(empty)
    assert [turn.role for turn in session.turns] == ["system"]
    with pytest.raises(InvalidValueError, match="mark 1"):
        session.rewind(middle)


@each_kind
@each_reply
def test_a_rewound_session_resumes_where_it_was(name, reply, tmp_path) -> None:
    session, expected = whole(SETUPS[name], reply)
    session.autosave(tmp_path / "a.mlxgen")
    session.save()
    session.rewind(num_tokens=session.history.reply.start + 13)
    session = reopened(session, tmp_path / "b.mlxgen")
    outcome = Outcome()
    outcome.take(session.continue_(cancel=StopAt(9)))
    session = reopened(session, tmp_path / "c.mlxgen")
    outcome.take(session.continue_())
    assert outcome.values == expected[13:]
    # And from the snapshot that was written before the rewind, whose journal says of it.
    session = resume(tmp_path / "a.mlxgen", options=ResumeOptions(model=session.model))
    assert session.position == 13
    outcome = Outcome()
    outcome.take(session.continue_())
    assert outcome.values == expected[13:]


@each_kind
def test_rewound_to_an_earlier_reply_the_conversation_goes_on_from_inside_it(name) -> None:
    setup = SETUPS[name]
    session = new_session(setup)
    session.send(PROMPT, reply=greedy(12))
    first = session.history.reply.ids
    start = session.history.reply.start
    session.send("And then?", reply=greedy(5))
    session.rewind(num_tokens=start + 5)
    assert [turn.role for turn in session.turns] == ["system", "user", "assistant"]
    assert session.history.reply.ids == first[:5]
    finished = list(session.continue_())[-1]
    assert finished.finish_reason == "length"
    assert len(session.history.reply.ids) == 12
    if not approximate(setup):
        assert session.history.reply.ids == first


@pytest.mark.parametrize("value", [1.0, True, "1", None])
def test_places_and_numbers_are_integers(value) -> None:
    session, _ = whole(SETUPS["llama"], greedy(3))
    before = len(session.history.records)
    calls = [lambda: session.edit(value, "x"), lambda: session.branch(value, reply=greedy(3))]
    if value is not None:
        calls += [lambda: session.rewind(num_turns=value), lambda: session.rewind(num_tokens=value)]
        calls += [lambda: session.continue_(reply=ReplyOptions(max_tokens=value))]
        calls += [lambda: session.continue_(reply=ReplyOptions(thinking_budget=value))]
    calls += [lambda: session.rewind("m0"), lambda: session.append_text(None), lambda: session.score(None)]
    calls += [lambda: session.add(3), lambda: session.add([None]), lambda: session.edit(1, 7)]
    for call in calls:
        with pytest.raises(InvalidValueError):
            call()
    assert len(session.history.records) == before


def test_a_continuation_that_does_not_fit_the_context_is_not_scored() -> None:
    session = new_session(SETUPS["llama"], replace(model("llama"), context_length=100))
    session.add("Hi.")
    with pytest.raises(ContextLengthError, match="context has 100"):
        session.score([5] * 100)
    assert session.score([5]).ids == (5,)


def test_a_prefill_that_fails_leaves_the_conversation_as_it_was() -> None:
    session = new_session(SETUPS["llama"], replace(model("llama"), context_length=4))
    session.add(PROMPT)
    turns = session.turns
    with pytest.raises(ContextLengthError):
        session.prefill()
    assert session.turns == turns


def test_rewinding_says_what_is_wrong_and_changes_nothing() -> None:
    session, _ = whole(SETUPS["llama"], greedy(4))
    session.send("More.", reply=greedy(4))
    turns, records = session.turns, len(session.history.records)
    for arguments, message in [
        ({"num_tokens": 10**6}, "give 0 to"),
        ({"num_tokens": -1}, "give 0 to"),
        ({"num_tokens": 3}, "isn't the model's"),
        ({"num_turns": 9}, "give 0 to 5"),
        ({"num_turns": 1, "num_tokens": 1}, "one place"),
    ]:
        with pytest.raises(InvalidValueError, match=message):
            session.rewind(**arguments)
    assert (session.turns, len(session.history.records)) == (turns, records)
    session.rewind(num_turns=5)
    session.rewind(num_tokens=len(session.history.ids))
    assert len(session.history.records) == records
    session.rewind()
    assert len(session.turns) == 4


@each_kind
def test_words_put_into_the_models_mouth_are_as_if_it_had_said_them(name, tmp_path) -> None:
    setup = SETUPS[name]
    session = new_session(setup)
    session.add(PROMPT)
    session.append_text("It waits, ")
    assert session.reply_text == "It waits, "
    outcome = Outcome()
    outcome.take(session.continue_(reply=greedy(6), cancel=StopAt(5)))
    session.append_text("and then ")
    session = reopened(session, tmp_path / "a.mlxgen")
    finished = list(session.continue_(reply=greedy(4)))[-1]
    text = finished.text
    assert text.startswith("It waits, ")
    assert "and then " in text
    # The same ids prefilled from scratch give the same next token.
    again = new_session(setup)
    again.add(PROMPT)
    again.append_tokens(session.history.reply.ids[:-1])
    list(again.continue_(reply=greedy(1)))
    if not approximate(setup):
        assert again.history.reply.ids == session.history.reply.ids


def test_after_the_token_that_ended_a_reply_nothing_is_appended() -> None:
    session = new_session(SETUPS["llama"])
    session.send(PROMPT, reply=greedy(5))
    last = session.history.reply.ids[-1]
    session.rewind()
    session.send(None, reply=replace(greedy(5), stop_token_ids=(last,)))
    before = session.history.reply.ids
    assert session.history.reply.finish["stop_token"] == last
    session.append_text("So.")
    assert last not in session.history.reply.ids[len(before) - 1 :]
    assert session.reply_text.endswith("So.")


@each_kind
def test_an_edited_turn_is_prefilled_from_the_change(name) -> None:
    setup = SETUPS[name]
    using, forward = counted(setup.kind)
    session = new_session(setup, using)
    session.send("A long beginning that stays as it is, word for word. Blue?", reply=greedy(4))
    session.send("Second.", reply=greedy(4))
    forward.lengths.clear()
    session.edit(1, "A long beginning that stays as it is, word for word. Green!")
    assert [turn.role for turn in session.turns] == ["system", "user"]
    assert forward.num_tokens == 0
    session.send(None, reply=greedy(4))
    edited = session.history.ids
    fresh = new_session(setup)
    fresh.send("A long beginning that stays as it is, word for word. Green!", reply=greedy(4))
    if not approximate(setup):
        assert fresh.history.ids == edited
    assert forward.num_tokens - 4 < fresh.history.reply.start - 20


def test_an_edit_may_keep_what_follows_and_may_be_of_a_reply(tmp_path) -> None:
    session = new_session(SETUPS["llama"])
    session.send("One.", reply=greedy(4))
    session.send("Two.", reply=greedy(4))
    session.edit(2, "I said nothing.", keep_later=True)
    assert [turn.role for turn in session.turns] == ["system", "user", "assistant", "user", "assistant"]
    session = reopened(session, tmp_path / "a.mlxgen")
    session.rewind()
    session.send(None, reply=greedy(4))
    assert "I said nothing." in session.model.tokenizer.decode(session.history.ids)


@each_kind
def test_a_score_is_what_the_model_thinks_and_changes_nothing(name) -> None:
    session, _ = whole(SETUPS[name], greedy(9))
    reply = session.history.reply
    before = (session.history.ids, session.ledger, session.turns, session.reply_text)
    known = [token.logprob for token in reply.tokens[4:]]
    base = new_session(SETUPS[name])
    base.send(PROMPT, reply=greedy(4))
    found = base.score(reply.ids[4:])
    if not approximate(SETUPS[name]):
        assert list(found.logprobs) == pytest.approx(known, abs=1e-3)
    session.score("something else")
    assert (session.history.ids, session.ledger, session.turns, session.reply_text) == before
    rest = Outcome()
    rest.take(base.continue_(reply=greedy(5)))
    if not approximate(SETUPS[name]):
        assert base.history.reply.ids == reply.ids


def test_a_score_of_a_first_reply_prefills_once_and_can_be_stopped() -> None:
    using, forward = counted("llama")
    session = new_session(SETUPS["llama"], using)
    session.add(PROMPT)
    with pytest.raises(Cancelled):
        session.score("Yes.", cancel=StopAt(2))
    first = session.score("Yes.")
    forward.lengths.clear()
    other = session.score("No, never.")
    assert forward.num_tokens == len(other.ids)
    assert len(first.logprobs) == len(first.ids)
    assert first.total == pytest.approx(sum(first.logprobs))
    assert session.history.reply is None
    with pytest.raises(InvalidValueError, match="empty"):
        session.score("")


@each_kind
def test_branches_differ_by_their_seeds_only_and_share_the_prompt(name) -> None:
    setup = SETUPS[name]
    using, forward = counted(setup.kind)
    session = new_session(setup, using)
    session.add(PROMPT)
    reply = replace(greedy(6), sampling=SamplingParams(temperature=1.5, seed=7))
    branches = session.branch(3, reply=reply)
    prompt = forward.num_tokens
    texts = [list(branch.continue_())[-1].text for branch in branches]
    assert forward.num_tokens - prompt == 3 * 6
    assert len(set(texts)) > 1
    for number, text in enumerate(texts):
        alone = new_session(setup)
        own = replace(reply, sampling=replace(reply.sampling, seed=7 + number))
        assert alone.send(PROMPT, reply=own).text == text
    # From the middle of a reply, too; the token that was sampled ahead isn't used.
    session.send(None, reply=reply, cancel=StopAt(4))
    middle = session.history.reply.ids
    assert 0 < len(middle) < 6
    for branch in session.branch(2, reply=reply):
        list(branch.continue_())
        assert branch.history.reply.ids[: len(middle)] == middle
        assert len(branch.history.reply.ids) == len(middle) + 6
    assert model(setup.kind) is not None


@each_kind
def test_branches_that_do_not_fit_are_parked_and_go_on_as_if_they_had_not_been(name) -> None:
    setup = SETUPS[name]
    reply = replace(greedy(6), sampling=SamplingParams(temperature=1.5, seed=7))

    def texts(max_bytes: int) -> tuple[list[str], int]:
        session = new_session(setup)
        session.add(PROMPT)
        branches = session.branch(3, reply=reply, max_bytes=max_bytes)
        for _ in range(2):
            for branch in branches:
                list(branch.continue_())
        resting = sum(branch.sequence.num_bytes for branch in branches[:2])
        return [branch.reply_text for branch in branches], resting

    free, held = texts(2**40)
    tight, parked = texts(1)
    assert tight == free
    assert held > 0
    assert parked == 0


@each_kind
def test_a_parked_branch_is_rewound_as_one_that_was_not(name) -> None:
    setup = SETUPS[name]
    reply = replace(greedy(6), sampling=SamplingParams(temperature=1.5, seed=7))
    told = []
    for max_bytes in (2**40, 1):
        session = new_session(setup)
        session.add(PROMPT)
        branches = session.branch(2, reply=reply, max_bytes=max_bytes)
        for branch in branches:
            list(branch.continue_())
        rested = branches[0]
        assert (rested.sequence.num_bytes == 0) == (max_bytes == 1)
        rested.rewind(num_tokens=rested.history.reply.start + 3)
        list(rested.continue_(reply=greedy(6)))
        told.append([(token.id, token.logprob) for token in rested.history.reply.tokens])
    assert told[0] == told[1]


class Wandering:
    """A processor with a memory: its bias depends on how often it was called."""

    name = "test/wandering"
    needs_host_ids = False

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens, logits):
        self.calls += 1
        return logits + 0.3 * mx.sin(mx.arange(logits.shape[-1]) * (1 + self.calls % 17))

    def state(self):
        return {"calls": self.calls}

    def restore(self, state, /) -> None:
        self.calls = state["calls"]


def test_a_processor_of_the_users_own_is_copied_for_a_fork_and_bounds_rewinding(tmp_path) -> None:
    reply = replace(sampled(12), processors=(Wandering(),))
    expected = Outcome()
    expected.take(new_session(SETUPS["llama"]).stream(PROMPT, reply=replace(reply, processors=(Wandering(),))))

    session = new_session(SETUPS["llama"])
    list(session.stream(PROMPT, reply=reply, cancel=StopAt(8)))
    count = session.position
    assert 0 < count < 12
    twin = session.fork()
    for one in (twin, session):
        outcome = Outcome()
        outcome.take(one.continue_())
        assert outcome.values == expected.values[count:]
    start = session.history.reply.start
    for position in (start + count, start + count + 1):
        with pytest.raises(InvalidValueError, match="don't know what they were there"):
            session.rewind(num_tokens=position)
    session = new_session(SETUPS["llama"])
    list(session.stream(PROMPT, reply=replace(reply, processors=(Wandering(),))))
    session.rewind(num_tokens=start)  # where the run began
    outcome = Outcome()
    outcome.take(session.continue_())
    assert outcome.values == expected.values


def test_words_in_the_mouth_and_a_processor_with_a_memory_resume_exactly(tmp_path) -> None:
    def run(folder) -> list:
        session = new_session(SETUPS["llama"])
        list(session.stream(PROMPT, reply=replace(sampled(12), processors=(Wandering(),)), cancel=StopAt(8)))
        session.append_text("And so ")
        outcome = Outcome()
        outcome.take(session.continue_(cancel=StopAt(None if folder is None else 3)))
        if folder is not None:
            session.save(folder / "a.mlxgen")
            session.close()
            options = ResumeOptions(model=session.model, processors=(Wandering(),))
            session = resume(folder / "a.mlxgen", options=options)
            outcome.take(session.continue_())
        return [outcome.values, session.history.reply.ids]

    assert run(tmp_path) == run(None)


@each_kind
@pytest.mark.parametrize("num_kept", [0, 3])
def test_a_branch_that_went_back_before_its_place_is_parked_with_what_it_has(name, num_kept) -> None:
    def rows_of(max_bytes: int) -> tuple[list[int], list]:
        session = new_session(SETUPS[name])
        session.send("Hello there.", reply=sampled(12))
        first, second = session.branch(2, reply=sampled(4), max_bytes=max_bytes)
        outcome = Outcome()
        outcome.take(first.continue_())
        first.rewind(num_tokens=first.history.reply.start + num_kept)
        other = replace(sampled(), sampling=replace(sampled().sampling, seed=77))
        outcome.take(first.continue_(reply=replace(other, max_tokens=24)))
        list(second.continue_())
        outcome.take(first.continue_(reply=sampled(6)))
        return first.history.ids, outcome.values

    assert rows_of(1) == rows_of(10**12)


@each_kind
@pytest.mark.parametrize("edited", [False, True])
def test_a_score_behind_words_that_were_never_run_is_of_those_words(name, edited) -> None:
    setup = SETUPS[name]
    session = new_session(setup)
    if edited:
        session.send("Hello there.", reply=greedy(5))
        session.edit(2, "Well, well")
    else:
        session.add("Hello there.")
        session.append_text("Well, well")
    found = session.score(" so it is")
    assert session.score(" so it is") == found
    fresh = new_session(setup)
    fresh.add("Hello there.")
    fresh.append_text("Well, well")
    list(fresh.continue_(reply=greedy(0)))
    expected = fresh.score(" so it is")
    assert found.ids == expected.ids
    if not (edited and approximate(setup)):
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert session.reply_text == "Well, well"


@each_kind
@pytest.mark.parametrize("ask", ["score", "prefill", "branch"])
def test_a_reply_that_was_stopped_in_its_prompt_is_left_to_go_on(name, ask) -> None:
    setup = replace(SETUPS[name], step_size=8)
    prompt = f"{name} {ask}: {PROMPT}"
    session = new_session(setup)
    list(session.stream(prompt, reply=sampled(6), cancel=StopAt(1)))
    assert session.position == 0
    if ask == "score":
        session.score("so")
    elif ask == "prefill":
        session.prefill()
    else:
        (branch,) = session.branch(1, reply=sampled(6))
        list(branch.continue_())
    assert session.sequence.num_fed == len(session.sequence.ids) - 1
    outcome, expected = Outcome(), Outcome()
    outcome.take(session.continue_())
    expected.take(new_session(setup).stream(prompt, reply=sampled(6)))
    assert outcome.values == expected.values
    if ask == "branch":
        assert branch.history.reply.tokens == session.history.reply.tokens


@each_kind
def test_after_a_kill_behind_a_rewind_no_row_from_before_it_is_saved_as_if_it_were_new(name, tmp_path) -> None:
    """The newest generation is older than the rewind, and longer than what was kept."""
    setup = SETUPS[name]
    path, killed = tmp_path / "a.mlxgen", tmp_path / "killed.mlxgen"
    session = new_session(setup)
    session.autosave(path, policy=AutosavePolicy(every_s=10**6, every_tokens=10**6))
    session.send(PROMPT, reply=greedy(12))
    session.save()
    session.rewind(num_tokens=session.history.reply.start + 3)
    seeded = replace(sampled(12), ban=("e",))
    for event in session.continue_(reply=seeded):
        if isinstance(event, Token) and event.index == 9:
            shutil.copytree(path, killed)
            break
    again = resume(killed, options=ResumeOptions(model=session.model))
    list(again.continue_())
    again.close()
    list(session.continue_())
    with resume(killed, options=ResumeOptions(model=session.model)) as last:
        assert last.history.ids == session.history.ids
        found, expected = Outcome(), Outcome()
        found.take(last.continue_(reply=greedy(6)))
        expected.take(session.continue_(reply=greedy(6)))
        assert found.values == expected.values
    session.close()


@each_kind
@pytest.mark.parametrize("num_kept", [11, 5, 0])
def test_an_interrupt_between_going_back_and_its_record_takes_nothing_back(name, num_kept, monkeypatch) -> None:
    session, _ = whole(SETUPS[name], sampled(12))
    expected, _ = whole(SETUPS[name], sampled(12))
    go_back = TokenSequence.go_back

    def interrupted(self, position: int) -> int:
        go_back(self, position)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TokenSequence, "go_back", interrupted)
        session.rewind(num_tokens=session.history.reply.start + num_kept)
    twin = session.fork()
    outcomes = []
    for one in (session, twin, expected):
        outcomes.append(Outcome())
        outcomes[-1].take(one.continue_(reply=sampled(4)))
        assert one.sequence.passes.entries == one.history.passes.entries
    assert outcomes[0].values == outcomes[1].values == outcomes[2].values
