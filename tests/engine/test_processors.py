"""Custom logits processors: saved and restored exactly where they can be, refused where they can't."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import mlx.core as mx
import pytest
from harness import PROMPT, SETUPS, Outcome, StopAt, counted, greedy, model, new_session, sampled

from mlxgen.errors import NotResumableError
from mlxgen.events import Token
from mlxgen.persist import AutosavePolicy
from mlxgen.resumption import ResumeOptions, resume

NUM_TOKENS = 7
AT_RUN_ENDS = AutosavePolicy(every_s=1e9, every_tokens=10**9)


class Wandering:
    """Its bias depends on how often it was called and on what it saw; hands out the list that it goes on to change."""

    name = "test/wandering"
    needs_host_ids = False

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.calls = 0

    def __call__(self, tokens, logits):
        self.calls += 1
        self.seen.append(tokens.shape[0] * self.calls)
        return logits + 0.3 * mx.sin(mx.arange(logits.shape[-1]) * (1 + sum(self.seen) % 17))

    def state(self):
        return {"calls": self.calls, "seen": self.seen}

    def restore(self, state, /) -> None:
        self.calls, self.seen = state["calls"], state["seen"]


class OneByOne(Wandering):
    name = "test/one-by-one"
    needs_host_ids = True

    def __call__(self, tokens, logits):
        assert tokens[-1].item() >= 0
        return super().__call__(tokens, logits)


def with_processor(cls=Wandering):
    return replace(sampled(NUM_TOKENS), processors=(cls(),))


def whole(setup, cls):
    session, outcome, token = new_session(setup), Outcome(), StopAt()
    outcome.take(session.stream(PROMPT, reply=with_processor(cls), cancel=token))
    return outcome, token.count


@pytest.mark.parametrize("cls", [Wandering, OneByOne])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_saved_at_every_checkpoint_it_goes_on_exactly(name, cls, tmp_path) -> None:
    setup = SETUPS[name]
    expected, num_checkpoints = whole(setup, cls)
    for stop_at in range(num_checkpoints):
        session, outcome = new_session(setup), Outcome()
        outcome.take(session.stream(PROMPT, reply=with_processor(cls), cancel=StopAt(stop_at)))
        path = session.save(tmp_path / f"{stop_at}.mlxgen")
        with resume(path, options=ResumeOptions(model=model(setup.kind), processors=(cls(),))) as again:
            outcome.take(again.continue_())
        assert outcome.values == expected.values


@pytest.mark.parametrize("cls", [Wandering, OneByOne])
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_after_a_kill_replaying_brings_it_to_where_it_was(name, cls, tmp_path) -> None:
    setup = SETUPS[name]
    expected, _ = whole(setup, cls)
    session = new_session(setup)
    live = session.autosave(tmp_path / "live.mlxgen", policy=AT_RUN_ENDS)
    copies = []
    outcome = Outcome()
    outcome.take(session.stream(PROMPT, reply=with_processor(cls), cancel=StopAt(6)))  # one generation
    events = session.continue_()
    for event in events:
        if isinstance(event, Token):
            copies.append(shutil.copytree(live, tmp_path / f"{len(copies)}.mlxgen"))
    session.close()
    assert len(copies) > 2
    for copy in copies:
        with resume(copy, options=ResumeOptions(model=model(setup.kind), processors=(cls(),))) as again:
            rest, before = Outcome(), again.position
            if again.unfinished:
                rest.take(again.continue_())
            assert rest.values == expected.values[before:]
        # The generation, too, is gone: everything is sampled again from the record of the reply.
    for copy in copies[:2]:
        broken = shutil.copytree(copy, tmp_path / f"broken-{copy.name}")
        for manifest in broken.glob("manifest-*"):
            manifest.unlink()
        with resume(broken, options=ResumeOptions(model=model(setup.kind), processors=(cls(),))) as again:
            outcome = Outcome()
            before = again.position
            if again.unfinished:
                outcome.take(again.continue_())
            assert outcome.values == expected.values[before:]


def test_a_second_reply_begins_where_the_processor_was(tmp_path) -> None:
    """The same object serves two replies: the second begins with what it remembers of the first."""
    setup, processor = SETUPS["llama"], Wandering()
    reply = replace(sampled(NUM_TOKENS), processors=(processor,))
    session = new_session(setup)
    live = session.autosave(tmp_path / "live.mlxgen", policy=AT_RUN_ENDS)
    session.send(PROMPT, reply=reply)
    expected, copy = Outcome(), None
    for event in session.stream("And then?", reply=reply):
        if isinstance(event, Token):
            expected.tokens.append(event)
            if event.index == 2:
                copy = shutil.copytree(live, tmp_path / "copy.mlxgen")
    with resume(copy, options=ResumeOptions(model=model("llama"), processors=(Wandering(),))) as again:
        outcome, before = Outcome(), again.position
        outcome.take(again.continue_())
        assert before == 3
        assert outcome.values == expected.values[before:]


def test_a_reply_that_ended_by_its_length_goes_on_with_its_processor(tmp_path) -> None:
    setup = SETUPS["qwen3_5"]
    expected = Outcome()
    expected.take(new_session(setup).stream(PROMPT, reply=replace(sampled(2 * NUM_TOKENS), processors=(Wandering(),))))
    session, outcome = new_session(setup), Outcome()
    outcome.take(session.stream(PROMPT, reply=with_processor()))
    path = session.save(tmp_path / "a.mlxgen")
    with resume(path, options=ResumeOptions(model=model("qwen3_5"), processors=(Wandering(),))) as again:
        outcome.take(again.continue_())
    assert outcome.values == expected.values
    with resume(path, options=ResumeOptions(model=model("qwen3_5"))) as again:
        assert again.last_finished is not None
        with pytest.raises(NotResumableError, match="wandering"):
            again.continue_()
        assert again.send("Another", reply=greedy(2)).finish_reason == "length"


def test_another_processor_than_the_saved_one_is_refused(tmp_path) -> None:
    session = new_session(SETUPS["llama"])
    session.send(PROMPT, reply=with_processor(), cancel=StopAt(8))
    path = session.save(tmp_path / "a.mlxgen")
    for processors in ((), (OneByOne(),), (Wandering(), Wandering())):
        with pytest.raises(NotResumableError, match=r"test/wandering"):
            resume(path, options=ResumeOptions(model=model("llama"), processors=processors))


class Unstable(Wandering):
    """Saves nothing of what matters."""

    def state(self):
        return {"calls": 0, "seen": []}


def test_a_processor_that_saves_too_little_is_noticed_on_replay(tmp_path) -> None:
    session = new_session(SETUPS["llama"])
    live = session.autosave(tmp_path / "live.mlxgen", policy=AT_RUN_ENDS)
    session.send(PROMPT, reply=with_processor(Unstable), cancel=StopAt(7))
    for event in session.continue_():
        if isinstance(event, Token) and session.position == 6:
            break
    copy = shutil.copytree(live, tmp_path / "copy.mlxgen")
    for manifest in copy.glob("manifest-*"):
        manifest.unlink()
    with pytest.raises(NotResumableError, match="isn't complete"):
        resume(copy, options=ResumeOptions(model=model("llama"), processors=(Unstable(),)))
    session.close()


def test_foreign_ones_are_refused_before_anything_runs_when_it_is_to_be_saved(tmp_path) -> None:
    using, forward = counted("llama")
    foreign = replace(greedy(20), processors=(lambda tokens, logits: logits,))
    session = new_session(SETUPS["llama"], using)
    session.autosave(tmp_path / "a.mlxgen")
    records = len(session.history.records)
    with pytest.raises(NotResumableError, match="<lambda>"):
        session.stream(PROMPT, reply=foreign)
    assert (forward.lengths, len(session.history.records)) == ([], records)
    session.close()
    session = new_session(SETUPS["llama"], using)
    assert session.send(PROMPT, reply=foreign, cancel=StopAt(8)).finish_reason == "cancelled"
    for refused in (lambda: session.save(tmp_path / "b.mlxgen"), lambda: session.autosave(tmp_path / "c.mlxgen")):
        with pytest.raises(NotResumableError, match="<lambda>"):
            refused()
    assert not (tmp_path / "b.mlxgen").exists()
    session.continue_().close()


def test_a_state_that_isn_t_json_is_refused_before_anything_runs(tmp_path) -> None:
    class Odd(Wandering):
        name = "test/odd"

        def state(self):
            return {1, 2}

    using, forward = counted("llama")
    session = new_session(SETUPS["llama"], using)
    session.autosave(tmp_path / "a.mlxgen")
    with pytest.raises(NotResumableError, match="isn't JSON"):
        session.stream(PROMPT, reply=with_processor(Odd))
    assert forward.lengths == []
    session.close()


def test_going_on_with_other_options_survives_a_kill_before_the_next_token(tmp_path) -> None:
    """The unseen token was sampled with the old options; it comes whether the process lived on or not."""
    for name in ("llama", "qwen3_5"):
        setup = SETUPS[name]
        session = new_session(setup)
        live = session.autosave(tmp_path / f"{name}.mlxgen", policy=AT_RUN_ENDS)
        session.send(PROMPT, reply=greedy(12), cancel=StopAt(8))
        events = session.continue_(reply=sampled(5))
        copy = shutil.copytree(live, tmp_path / f"{name}-copy.mlxgen")
        for manifest in copy.glob("manifest-*"):
            manifest.unlink()
        expected, outcome = Outcome(), Outcome()
        expected.take(events)
        with resume(copy, options=ResumeOptions(model=model(setup.kind))) as again:
            outcome.take(again.continue_())
        assert [(t.id, t.text) for t in outcome.tokens] == [(t.id, t.text) for t in expected.tokens]
        session.close()


def test_states_in_the_journal_are_plain_json(tmp_path) -> None:
    session = new_session(SETUPS["llama"])
    session.send(PROMPT, reply=with_processor(), cancel=StopAt(8))
    path = session.save(tmp_path / "a.mlxgen")
    lines = (path / "journal.log").read_text().splitlines()
    reply = next(json.loads(line[15:]) for line in lines if line[9:15] == "reply ")
    assert reply["options"]["processors"] == ["test/wandering"]
    assert reply["memory"] == [{"calls": 0, "seen": []}]
