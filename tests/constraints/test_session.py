"""A reply with a grammar in a session: stopped, saved, killed, forked, rewound and gone on with."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from harness import PROMPT, SETUPS, Outcome, StopAt, counted, model, new_session
from schema_for_tests import SHORT

import mlxgen
from mlxgen import Grammar, GrammarError, InvalidValueError, ReplyOptions, SamplingParams, UnsupportedError
from mlxgen.events import Token
from mlxgen.persist import AutosavePolicy
from mlxgen.resumption import ResumeOptions, resume

SAMPLING = SamplingParams(temperature=1.2, top_k=80, repetition_penalty=1.2, seed=21)
REPLY = ReplyOptions(
    max_tokens=160, sampling=SAMPLING, logprobs=True, top_logprobs=2, grammar=Grammar.json_schema(SHORT)
)
AT_RUN_ENDS = AutosavePolicy(every_s=1e9, every_tokens=10**9)


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)


def uninterrupted(name: str, reply: ReplyOptions = REPLY) -> tuple[Outcome, list[int], int]:
    session, outcome, token = new_session(SETUPS[name]), Outcome(), StopAt()
    finished = outcome.take(session.stream(PROMPT, reply=reply, cancel=token))
    assert finished.finish_reason == "stop"
    assert set(json.loads(finished.text)) == {"a", "b"}
    return outcome, session.ledger, token.count


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_saved_at_every_checkpoint_and_resumed_it_is_the_same_reply(name, tmp_path) -> None:
    setup = SETUPS[name]
    expected, ledger, num_checkpoints = uninterrupted(name)
    using, forward = counted(setup.kind)
    new_session(setup, using).send(PROMPT, reply=REPLY)
    num_fed = forward.num_tokens
    for stop_at in range(0, num_checkpoints, 1 if name == "llama" else 4):
        forward.lengths.clear()
        session, outcome = new_session(setup, using), Outcome()
        outcome.take(session.stream(PROMPT, reply=REPLY, cancel=StopAt(stop_at)))
        path = session.save(tmp_path / f"{stop_at}.mlxgen")
        del session
        with resume(path, options=ResumeOptions(model=using)) as again:
            assert again.unfinished
            finished = outcome.take(again.continue_())
            assert outcome.values == expected.values
            assert finished.text == expected.finished.text
            assert finished.finish_reason == "stop"
            assert again.ledger == ledger
        assert forward.num_tokens == num_fed, "nothing is fed twice"


@pytest.mark.parametrize("name", ["llama", "falcon_h1-list"])
def test_killed_after_every_token_it_is_the_same_reply(name, tmp_path) -> None:
    """As after kill -9: a journal with tokens that no saved cache knows."""
    setup = SETUPS[name]
    expected, _, _ = uninterrupted(name)
    session = new_session(setup)
    live = session.autosave(tmp_path / "live.mlxgen", policy=AT_RUN_ENDS)
    copies = []
    for event in session.stream(PROMPT, reply=REPLY):
        if isinstance(event, Token):
            copies.append(
                shutil.copytree(live, tmp_path / f"{len(copies)}.mlxgen", ignore=shutil.ignore_patterns(".tmp-*"))
            )
    session.close()
    assert len(copies) == len(expected.tokens)
    for copy in copies[:: 2 if name == "llama" else 5]:
        with resume(copy, options=ResumeOptions(model=model(setup.kind))) as again:
            rest, before = Outcome(), again.position
            if again.unfinished:
                rest.take(again.continue_())
            assert rest.values == expected.values[before:]
            assert again.reply_text == expected.finished.text
            assert again.last_finished.finish_reason == "stop"


def test_a_kill_between_the_last_token_and_its_end_changes_nothing(tmp_path) -> None:
    """The journal without its last record, should the two ever be torn apart: the grammar says that it is the end."""
    session, outcome = new_session(SETUPS["llama"]), Outcome()
    outcome.take(session.stream(PROMPT, reply=REPLY))
    path = session.save(tmp_path / "a.mlxgen")
    journal = path / "journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if b" tok" in line[:16] or line[9:13] == b"tok ")
    journal.write_bytes(b"".join(lines[: last + 1]))
    for manifest in path.glob("manifest-*"):
        manifest.unlink()
    with resume(path, options=ResumeOptions(model=model("llama"))) as again:
        assert again.unfinished
        finished = _last(again.continue_())
        assert (finished.finish_reason, finished.usage.generated_tokens) == ("stop", 0)
        assert again.position == len(outcome.tokens)


def _last(events: Any) -> Any:
    for event in events:
        last = event
    return last


def test_forks_and_rewinds_go_on_the_same_way() -> None:
    for name in ("llama", "qwen3_5"):
        expected, _, _ = uninterrupted(name)
        session, outcome = new_session(SETUPS[name]), Outcome()
        outcome.take(session.stream(PROMPT, reply=REPLY, cancel=StopAt(14)))
        before = len(outcome.tokens)
        assert 3 < before < len(expected.tokens) - 2
        twin = session.fork()
        for one in (session, twin):
            rest = Outcome()
            rest.take(one.continue_())
            assert rest.values == expected.values[before:]
        start = session.history.reply.start
        for count in (5, 2, len(expected.tokens) - 1):
            session.rewind(num_tokens=start + min(count, session.position))
            rest, position = Outcome(), session.position
            rest.take(session.continue_())
            assert rest.values == expected.values[position:]
            assert session.reply_text == expected.finished.text


def test_the_next_turn_comes_on_top_of_a_complete_reply() -> None:
    using, forward = counted("llama")
    session = new_session(SETUPS["llama"], using)
    session.send(PROMPT, reply=REPLY)
    forward.lengths.clear()
    before = session.ledger
    session.send("And now?", reply=replace(REPLY, grammar=None, max_tokens=3))
    assert session.ledger[: len(before)] == before
    assert forward.num_tokens == len(session.ledger) - len(before), "what the user saw isn't fed again"


def test_a_complete_reply_that_is_gone_on_with_has_ended() -> None:
    session = new_session(SETUPS["llama"])
    text = session.send(PROMPT, reply=REPLY).text
    finished = _last(session.continue_())
    assert (finished.finish_reason, finished.text, finished.usage.generated_tokens) == ("stop", text, 0)
    free = _last(session.continue_(reply=replace(REPLY, grammar=None, max_tokens=3)))
    assert free.usage.generated_tokens == 3
    assert free.text.startswith(text)


def test_a_grammar_put_on_a_reply_under_way_is_an_error_and_the_session_goes_on() -> None:
    session, outcome = new_session(SETUPS["llama"]), Outcome()
    free = replace(REPLY, grammar=None, ignore_eos=True, max_tokens=12)
    outcome.take(session.stream(PROMPT, reply=free, cancel=StopAt(9)))
    count = session.position
    assert count
    with pytest.raises(GrammarError, match="doesn't follow the JSON schema"):
        list(session.continue_(reply=REPLY))
    assert session.position == count
    expected = Outcome()
    expected.take(new_session(SETUPS["llama"]).stream(PROMPT, reply=free))
    outcome.take(session.continue_(reply=replace(free, max_tokens=12 - count)))
    assert outcome.values == expected.values


def test_words_put_into_the_model_s_mouth_are_part_of_what_the_grammar_sees() -> None:
    session = new_session(SETUPS["llama"])
    session.add(PROMPT)
    session.append_text('{"a":"x')
    finished = _last(session.continue_(reply=REPLY))
    assert finished.finish_reason == "stop"
    assert json.loads(finished.text)["a"].startswith("x")


@pytest.mark.parametrize(
    ("grammar", "kind"),
    [
        (Grammar.regex("(a"), InvalidValueError),
        (Grammar.json_schema({"type": "strng"}), InvalidValueError),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), UnsupportedError),
        (Grammar.lark("start: start"), InvalidValueError),
        (Grammar.lark("start: " + '"a" ' * 200_000), GrammarError),
    ],
)
def test_a_grammar_that_can_t_be_used_changes_nothing(grammar, kind) -> None:
    using, forward = counted("llama")
    session = new_session(SETUPS["llama"], using)
    records = len(session.history.records)
    with pytest.raises(kind):
        session.stream(PROMPT, reply=replace(REPLY, grammar=grammar))
    assert (len(session.history.records), forward.lengths) == (records, [])
    assert session.send(PROMPT, reply=REPLY).finish_reason == "stop"


def test_an_expression_that_explodes_midway_leaves_the_session_at_its_last_token(tmp_path) -> None:
    exploding = replace(REPLY, grammar=Grammar.regex(r"(\w{0,500}\s?){0,500}x"), max_tokens=400)
    session, outcome = new_session(SETUPS["llama"]), Outcome()
    session.autosave(tmp_path / "a.mlxgen")
    with pytest.raises(GrammarError, match="too complex"):
        outcome.take(session.stream(PROMPT, reply=exploding))
    count = session.position
    assert count == len(outcome.tokens) > 0
    assert session.reply_text == outcome.text
    session.close()
    with resume(tmp_path / "a.mlxgen", options=ResumeOptions(model=model("llama"))) as again:
        assert (again.position, again.reply_text) == (count, outcome.text)
        finished = _last(again.continue_(reply=replace(REPLY, grammar=None, ignore_eos=True, max_tokens=4)))
        assert finished.usage.generated_tokens == 4
        assert again.send("And then?", reply=REPLY).finish_reason == "stop"


class Wandering:
    name = "test/wandering"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls += 1
        return logits + 0.5 * mx.sin(mx.arange(logits.shape[-1]) * (1 + self.calls % 7))

    def state(self) -> int:
        return self.calls

    def restore(self, state: int) -> None:
        self.calls = state


def test_with_a_processor_that_remembers_replaying_samples_with_the_grammar_again(tmp_path) -> None:
    setup = SETUPS["llama"]
    expected, _, _ = uninterrupted("llama", replace(REPLY, processors=(Wandering(),)))
    session = new_session(setup)
    live = session.autosave(tmp_path / "live.mlxgen", policy=AT_RUN_ENDS)
    copies = []
    for event in session.stream(PROMPT, reply=replace(REPLY, processors=(Wandering(),))):
        if isinstance(event, Token) and event.index % 4 == 1:
            copies.append(shutil.copytree(live, tmp_path / f"{event.index}.mlxgen"))
    session.close()
    for copy in copies:
        with resume(copy, options=ResumeOptions(model=model("llama"), processors=(Wandering(),))) as again:
            rest, before = Outcome(), again.position
            rest.take(again.continue_())
            assert rest.values == expected.values[before:]


def test_banned_strings_and_a_grammar_together() -> None:
    grammar = Grammar.regex("(abc|abd|xyz){4}")
    plain = replace(REPLY, grammar=grammar, top_logprobs=0)
    texts = [
        new_session(SETUPS["llama"]).send(PROMPT, reply=replace(plain, sampling=replace(SAMPLING, seed=s))).text
        for s in range(4)
    ]
    assert any("abc" in text for text in texts)
    for seed in range(4):
        reply = replace(plain, ban=("abc",), sampling=replace(SAMPLING, seed=seed))
        text = new_session(SETUPS["llama"]).send(PROMPT, reply=reply).text
        assert "abc" not in text
        assert len(text) == 12


def test_the_options_are_written_down_and_read_again() -> None:
    for grammar in (None, Grammar.any_json(), Grammar.lark('start: "é"')):
        options = replace(REPLY, grammar=grammar)
        assert ReplyOptions.from_json(json.loads(json.dumps(options.to_json()))).grammar == grammar
    assert ReplyOptions.from_json(ReplyOptions(heal=True).to_json()).heal
    old = {key: value for key, value in REPLY.to_json().items() if key not in ("grammar", "heal")}
    assert ReplyOptions.from_json(old).grammar is None
    for more, name in (({"heal": True}, "heal"), ({"ignore_eos": True}, "ignore_eos")):
        with pytest.raises(InvalidValueError, match=name):
            replace(REPLY, **more).validate(307)
    assert mlxgen.Grammar is Grammar


def test_on_the_model_s_own_thread_after_this_one_and_two_sessions_in_turns() -> None:
    expected, _, _ = uninterrupted("llama")
    using = model("llama")

    async def on_the_owner() -> Outcome:
        outcome = Outcome()
        async for event in new_session(SETUPS["llama"], using).astream(PROMPT, reply=REPLY):
            if isinstance(event, Token):
                outcome.tokens.append(event)
        return outcome

    assert asyncio.run(on_the_owner()).values == expected.values
    outcomes = [Outcome(), Outcome()]
    streams = [new_session(SETUPS["llama"], using).stream(PROMPT, reply=REPLY) for _ in outcomes]
    for events in itertools.zip_longest(*streams):
        for outcome, event in zip(outcomes, events, strict=True):
            if isinstance(event, Token):
                outcome.tokens.append(event)
    assert [outcome.values for outcome in outcomes] == [expected.values] * 2
