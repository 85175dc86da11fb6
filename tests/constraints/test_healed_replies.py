"""Token healing in sessions: a raw prompt, or words put into the model's mouth, that end inside a word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import SETUPS, Outcome, StopAt, greedy, model, sampled

from mlxgen.constraints import healing_at_end
from mlxgen.events import Token
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

NUM_TOKENS = 8
CUT = "Where does a stopped tr"  # ends in a token that longer ones begin with


def session_of(name: str) -> Session:
    setup = SETUPS[name]
    return Session(model(setup.kind), options=replace(setup.session_options, raw=True))


def whole(name: str, reply):
    session, token, outcome = session_of(name), StopAt(), Outcome()
    outcome.take(session.stream(CUT, reply=reply, cancel=token))
    return session, outcome, token.count


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("reply", [greedy(NUM_TOKENS), sampled(NUM_TOKENS)], ids=["greedy", "sampled"])
def test_a_healed_prompt_goes_on_the_same_after_a_stop_anywhere(name, reply, tmp_path) -> None:
    reply = replace(reply, heal=True)
    session, expected, num_checkpoints = whole(name, reply)
    tokenizer = session.model.tokenizer
    prompt = tokenizer.encode(CUT, add_special_tokens=False)
    healing = healing_at_end(tokenizer, prompt)
    assert healing.text, "the test's prompt must have something to heal"
    written = tokenizer.decode(session.history.ids)
    assert written.startswith(CUT)
    assert written[len(CUT) :].startswith(session.reply_text)
    assert "".join(token.text for token in expected.tokens) == session.reply_text
    assert session.history.reply.start == len(prompt) - len(healing.ids)
    for stop_at in range(num_checkpoints):
        session, outcome = session_of(name), Outcome()
        outcome.take(session.stream(CUT, reply=reply, cancel=StopAt(stop_at)))
        session.save(tmp_path / f"{stop_at}.mlxgen")
        session.close()
        with resume(tmp_path / f"{stop_at}.mlxgen", options=ResumeOptions(model=session.model)) as again:
            outcome.take(again.continue_())
            assert again.reply_text == expected.text
        assert outcome.values == expected.values


def test_the_next_turn_knows_the_healed_words_once() -> None:
    session, _, _ = whole("llama", replace(greedy(NUM_TOKENS), heal=True))
    said = session.reply_text
    session.send(" More", reply=greedy(2))
    written = session.model.tokenizer.decode(session.history.ids)
    assert written.startswith(CUT + said)
    assert written.count("stopped tr") == 1


@pytest.mark.parametrize("more", [{}, {"ban": ("q",), "stop_regex": ("zzz+",)}], ids=["plain", "steered"])
def test_words_put_into_the_mouth_are_healed_and_told_once(more, tmp_path) -> None:
    def run(stop_at: int | None) -> tuple[list, str]:
        session, outcome = session_of("llama"), Outcome()
        session.add("Once ")
        session.append_text(CUT)
        outcome.take(session.continue_(reply=replace(greedy(NUM_TOKENS), heal=True, **more), cancel=StopAt(stop_at)))
        if stop_at is not None:
            session.save(tmp_path / f"{stop_at}.mlxgen")
            session.close()
            session = resume(tmp_path / f"{stop_at}.mlxgen", options=ResumeOptions(model=session.model))
            outcome.take(session.continue_())
            session.close()
        assert session.reply_text == CUT + outcome.text
        return outcome.values, session.reply_text

    expected = run(None)
    healing = healing_at_end(model("llama").tokenizer, model("llama").tokenizer.encode(CUT, add_special_tokens=False))
    assert healing.ids
    for stop_at in range(8):
        assert run(stop_at) == expected


def test_where_nothing_can_be_healed_nothing_changes() -> None:
    plain, healed = Outcome(), Outcome()
    prompt = "<|im_end|>"
    plain.take(session_of("llama").stream(prompt, reply=greedy(4)))
    healed.take(session_of("llama").stream(prompt, reply=replace(greedy(4), heal=True)))
    assert healed.values == plain.values
    assert all(isinstance(token, Token) for token in healed.tokens)


def test_words_after_a_healed_place_bring_back_what_was_taken_off() -> None:
    session = session_of("llama")
    session.send(CUT, reply=replace(greedy(NUM_TOKENS), heal=True), cancel=StopAt(1))
    assert session.history.reply.waiting
    session.append_text("ain, ")
    list(session.continue_(reply=greedy(2)))
    assert session.reply_text.startswith("ain, ")
    assert session.model.tokenizer.decode(session.history.ids).startswith(CUT + "ain, ")


def test_a_score_at_a_healed_place_is_of_what_follows_the_words_taken_off() -> None:
    session = session_of("llama")
    session.send(CUT, reply=replace(greedy(NUM_TOKENS), heal=True), cancel=StopAt(1))
    assert session.history.reply.waiting
    plain = session_of("llama")
    plain.add(CUT)
    assert session.score("ain").logprobs == pytest.approx(plain.score("ain").logprobs, abs=1e-4)
