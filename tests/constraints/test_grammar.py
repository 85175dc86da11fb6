"""`Grammar` and `GrammarConstraint` without a model: what compiles, what is refused and how, what may come next."""

from __future__ import annotations

import gc
import json
import random
import re
import sys
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
import tokenizers_for_tests as kinds
from schema_for_tests import SCHEMA, fits

from mlxgen.constraints import Constraint, Grammar, allowed_by, is_done, permits
from mlxgen.constraints import grammar as module
from mlxgen.errors import GrammarError, InvalidValueError, MlxgenError, UnsupportedError

ARRAY = {"type": "array", "items": {"type": "integer"}}
EOS, END_OF_TEXT = 2, 0  # <|im_end|>, <|endoftext|>


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.load("llama")[1]


def constraint_of(grammar: Grammar, tokenizer: Any, vocab_size: int = tiny.VOCAB_SIZE, eos: Any = ()) -> Constraint:
    return grammar.constraint(tokenizer, vocab_size, eos)


def ids_in(mask: mx.array | None) -> list[int]:
    assert mask is not None
    assert mask.dtype == mx.bool_
    return np.nonzero(np.array(mask)[0])[0].tolist()


def walk(constraint: Constraint, rng: random.Random, limit: int = 400) -> list[int]:
    """Ids at random among those that may come, until the constraint says that it is done."""
    ids: list[int] = []
    while not constraint.done(ids):
        ids.append(rng.choice(ids_in(constraint.allowed(ids))))
        assert len(ids) < limit
    return ids


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode([token for token in ids if token not in (EOS, END_OF_TEXT)])


# -- the value ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema(SCHEMA),
        Grammar.json_schema(json.dumps(SCHEMA)),
        Grammar.any_json(),
        Grammar.regex(r"[a-z]{1,8}é?"),
        Grammar.lark('start: "a" b\nb: /[0-9]+/'),
    ],
)
def test_it_is_a_value_that_goes_through_json(grammar) -> None:
    again = Grammar.from_json(json.loads(json.dumps(grammar.to_json())))
    assert again == grammar
    assert hash(again) == hash(grammar)


def test_a_schema_is_the_same_as_text_and_as_dict_and_keeps_its_order() -> None:
    assert Grammar.json_schema(json.dumps(SCHEMA, indent=3)) == Grammar.json_schema(SCHEMA)
    assert list(json.loads(Grammar.json_schema(SCHEMA).text)["properties"]) == list(SCHEMA["properties"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema("{"), "isn't JSON"),
        (lambda: Grammar.json_schema("[1]"), "is an object"),
        (lambda: Grammar.json_schema("false"), "is an object"),
        (lambda: Grammar.json_schema(3), "is an object"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema({"const": {1, 2}}), "can't be written as JSON"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "can't be written as JSON"),
        (lambda: Grammar.json_schema('{"const": NaN}'), "can't be written as JSON"),
        (lambda: Grammar("bnf", "x"), "no kind of grammar"),  # type: ignore[arg-type]
        (lambda: Grammar("regex", None), "is text"),  # type: ignore[arg-type]
        (lambda: Grammar.regex("a" * (module.MAX_GRAMMAR_CHARS + 1)), "the limit is 1000000"),
        (lambda: Grammar.regex("\ud800"), "lone surrogate"),
    ],
)
def test_what_no_grammar_can_be_is_refused_at_once(make, message) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()


# -- compiling ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "regex, unclosed": (Grammar.regex("(a"), InvalidValueError, "unclosed group"),
    "regex, look-ahead": (Grammar.regex("(?=a)b"), UnsupportedError, "look-around"),
    "regex, reference": (Grammar.regex(r"(a)\1"), UnsupportedError, "backreferences"),
    "regex, nothing fits": (Grammar.regex(r"[^\s\S]"), InvalidValueError, "no text satisfies"),
    "schema, wrong type": (Grammar.json_schema({"type": "strng"}), InvalidValueError, "strng"),
    "schema, false": (
        Grammar.json_schema({"required": ["a"], "properties": {"a": False}, "type": "object"}),
        InvalidValueError,
        "no text satisfies",
    ),
    "schema, contradiction": (
        Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
        InvalidValueError,
        "no text satisfies",
    ),
    "schema, missing reference": (Grammar.json_schema({"$ref": "#/nope"}), InvalidValueError, "nope"),
    "schema, remote reference": (Grammar.json_schema({"$ref": "http://a.test/b.json"}), UnsupportedError, "a.test"),
    "schema, keyword": (Grammar.json_schema({"type": "array", "uniqueItems": True}), UnsupportedError, "uniqueItems"),
    "schema, format": (Grammar.json_schema({"type": "string", "format": "nope"}), UnsupportedError, "nope"),
    "schema, pattern": (Grammar.json_schema({"type": "string", "pattern": "("}), InvalidValueError, "unclosed"),
    "lark, unknown rule": (Grammar.lark('start: "a" b'), InvalidValueError, "unknown name"),
    "lark, no start": (Grammar.lark('other: "a"'), InvalidValueError, "no start rule"),
    "lark, no grammar": (Grammar.lark("%%%"), InvalidValueError, "lexer error"),
    "lark, empty": (Grammar.lark(""), InvalidValueError, "mpty"),
    "lark, never ends": (Grammar.lark("start: start"), InvalidValueError, "no text satisfies"),
    "lark, unknown token": (Grammar.lark("start: <foo>"), InvalidValueError, "<foo>"),
    "lark, contradiction": (Grammar.lark("start: A\nA: /a/ & /b/"), InvalidValueError, "no text satisfies"),
    "lark, too large": (Grammar.lark("start: " + '"a" ' * 200_000), GrammarError, "too complex"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_grammar_that_can_t_be_used_is_one_line_before_anything_runs(name, tokenizer) -> None:
    grammar, kind, message = REFUSED[name]
    with pytest.raises(MlxgenError, match=re.escape(message)) as raised:
        grammar.validate(tokenizer, tiny.VOCAB_SIZE)
    assert type(raised.value) is kind
    said = str(raised.value)
    assert "\n" not in said
    assert len(said) < 500
    assert ";" in said or ":" in said


def test_a_schema_nested_too_deeply_is_too_complex(tokenizer) -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(GrammarError, match="too complex"):
        Grammar.json_schema(schema).validate(tokenizer, tiny.VOCAB_SIZE)


def test_complements_that_would_take_for_ever_are_too_complex(tokenizer, monkeypatch) -> None:
    text = "start: A\nA: /(.*a.{20})/ & /(.*b.{19})/ & /(.*c.{18})/ & ~/(.*d.{17}).*/ & /(.*h.{16}).*/"
    monkeypatch.setattr(module, "MAX_COMPILE_S", 1.5)
    with pytest.raises(GrammarError, match=r"too complex: compiling it takes more than 1\.5 s"):
        Grammar.lark(text).validate(tokenizer, tiny.VOCAB_SIZE)
    calls = []
    monkeypatch.setattr(module, "_try_elsewhere", lambda grammar: calls.append(grammar))
    simple = Grammar.lark("start: A\nA: /[a-z]{1,3}/ & ~/.*q.*/")
    for _ in range(3):
        constraint = constraint_of(simple, tokenizer)
    assert calls == [simple], "tried once"
    letters = {token: tokenizer.decode([token]) for token in ids_in(constraint.allowed([]))}
    assert "a" in letters.values()
    assert "q" not in letters.values()


def test_without_the_library_the_message_says_how_to_get_it(tokenizer, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r'pip install "mlxgen\[grammar\]"'):
        Grammar.any_json().validate(tokenizer, tiny.VOCAB_SIZE)


def test_tokenizers_that_the_library_can_t_read_are_refused() -> None:
    for tokenizer in (kinds.hugging_face(kinds.word_piece()), kinds.hugging_face(kinds.metaspace())):
        with pytest.raises(UnsupportedError, match="tokenizer"):
            Grammar.any_json().validate(tokenizer, len(tokenizer))


def test_what_was_compiled_goes_with_its_tokenizer() -> None:
    tokenizer = kinds.hugging_face(kinds.byte_level(), eos_token="<|im_end|>")
    Grammar.regex("a").validate(tokenizer, len(tokenizer))
    own = weakref.ref(module._compilers[tokenizer][(2,)])
    assert own() is module._compiler_of(tokenizer, (2,)), "made once"
    del tokenizer
    gc.collect()
    assert own() is None


def test_byte_fallback_tokenizers_work_too() -> None:
    tokenizer = kinds.hugging_face(kinds.byte_fallback(), eos_token="</s>")
    constraint = Grammar.regex("the é+").constraint(tokenizer, len(tokenizer))
    for seed in range(3):
        rng, ids = random.Random(seed), []
        while not constraint.done(ids) and len(ids) < 60:
            ids.append(rng.choice(ids_in(constraint.allowed(ids))))
        pieces = [tokenizer.convert_ids_to_tokens(token) for token in ids if token != 2]
        data = b"".join(
            bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
            for piece in pieces
        )
        assert re.fullmatch("the é*\ufffd?", data.decode(errors="replace"))


# -- what may come -----------------------------------------------------------------------------------------------------


def test_random_walks_give_json_that_fits(tokenizer) -> None:
    seen = set()
    for seed in range(12):
        text = text_of(tokenizer, walk(constraint_of(Grammar.json_schema(SCHEMA), tokenizer), random.Random(seed)))
        assert fits(json.loads(text))
        seen.add(text)
    assert len(seen) == 12


def test_lark_and_regular_expressions(tokenizer) -> None:
    lark = Grammar.lark('start: greeting " " name\ngreeting: "the" | "é"\nname: /[a-z]{2,4}/')
    for seed in range(6):
        assert re.fullmatch(
            "(the|é) [a-z]{2,4}", text_of(tokenizer, walk(constraint_of(lark, tokenizer), random.Random(seed)))
        )
        text = text_of(
            tokenizer, walk(constraint_of(Grammar.regex("(🙂|the){3}[0-9]"), tokenizer), random.Random(seed))
        )
        assert re.fullmatch("(🙂|the){3}[0-9]", text)


def test_every_end_of_text_token_ends_it_where_it_may_end_and_none_elsewhere(tokenizer) -> None:
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    constraint = constraint_of(Grammar.regex("ab*"), tokenizer, eos=(EOS, END_OF_TEXT))
    assert ids_in(constraint.allowed([])) == [a]
    assert ids_in(constraint.allowed([a])) == sorted([END_OF_TEXT, EOS, b])
    for eos in (EOS, END_OF_TEXT):
        assert constraint.done([a, eos])
        assert not constraint.done([a])
    own = constraint_of(Grammar.regex("ab*"), tokenizer)
    assert ids_in(own.allowed([a])) == sorted([EOS, b]), "the tokenizer's own, when none are given"


def test_special_tokens_never_spell_text(tokenizer) -> None:
    allowed = ids_in(constraint_of(Grammar.regex(r"(?s:.*)"), tokenizer).allowed([]))
    assert set(range(len(tiny.SPECIAL_TOKENS))) & set(allowed) == {EOS}


def test_rows_beyond_the_tokenizer_s_vocabulary_and_a_narrower_model(tokenizer) -> None:
    wide = constraint_of(Grammar.regex("(?s:.+)"), tokenizer, vocab_size=400).allowed([])
    assert wide.shape == (1, 400)
    assert max(ids_in(wide)) < tiny.VOCAB_SIZE
    narrow = constraint_of(Grammar.regex("(?s:.+)"), tokenizer, vocab_size=100).allowed([])
    assert narrow.shape == (1, 100)


def test_white_space_in_json_comes_to_an_end(tokenizer) -> None:
    constraint = constraint_of(Grammar.json_schema(ARRAY), tokenizer)
    ids, space = tokenizer.encode("["), tokenizer.encode(" ")[0]
    count = 0
    while permits([constraint], ids, space):
        ids.append(space)
        count += 1
        assert count < 200
    assert count == 64
    for text in ("[1,2]", "[ 1 , 2 ]", "[\n  1,\n  2\n]"):
        assert constraint.done(tokenizer.encode(text))
    compact = constraint_of(Grammar.json_schema({**ARRAY, "x-guidance": {"whitespace_flexible": False}}), tokenizer)
    assert not permits([compact], tokenizer.encode("["), space)


# -- a function of the ids ---------------------------------------------------------------------------------------------


def test_what_it_answers_depends_on_the_ids_alone_in_whatever_order_it_is_asked(tokenizer) -> None:
    grammar = Grammar.json_schema(SCHEMA)
    walks = [walk(constraint_of(grammar, tokenizer), random.Random(seed)) for seed in range(3)]
    questions = [ids[:end] for ids in walks for end in range(len(ids) + 1)]
    fresh = {tuple(ids): (constraint_of(grammar, tokenizer)) for ids in questions}
    expected = {key: (ids_in(c.allowed(list(key))), c.done(list(key))) for key, c in fresh.items()}
    asked = constraint_of(grammar, tokenizer)
    rng = random.Random(0)
    for _ in range(3):
        rng.shuffle(questions)
        for ids in questions:
            assert (ids_in(asked.allowed(ids)), asked.done(ids)) == expected[tuple(ids)]


def test_a_reply_that_doesn_t_fit_is_an_error_and_the_next_question_is_answered(tokenizer) -> None:
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    constraint = constraint_of(Grammar.regex("a{1,3}b"), tokenizer)
    for ask in (constraint.allowed, constraint.done):
        with pytest.raises(GrammarError, match="token 1 of it"):
            ask([a, EOS])
        with pytest.raises(GrammarError, match="token 0 of it"):
            ask([b, a])
        assert ids_in(constraint.allowed([a])) == sorted([a, b])
    assert constraint.done([a, b])


EXPLODING = {
    "while a token is taken in": ("a{10000000}", "a"),
    "while what may follow is found": (r"(\w{0,500}\s?){0,500}x", None),
}


@pytest.mark.parametrize("name", EXPLODING)
def test_an_expression_that_explodes_on_the_way_is_an_error_every_time(name, tokenizer) -> None:
    pattern, first = EXPLODING[name]
    constraint = constraint_of(Grammar.regex(pattern), tokenizer)
    rng = random.Random(0)
    ids: list[int] = [] if first is None else tokenizer.encode(first)
    said = ""
    while len(ids) < 400:
        try:
            ids.append(rng.choice([token for token in ids_in(constraint.allowed(ids)) if token > EOS]))
        except GrammarError as error:
            said = str(error)
            break
    assert re.search("became too complex at token [0-9]+ of the reply", said)
    assert "\n" not in said
    with pytest.raises(GrammarError, match="too complex"):
        constraint.allowed(ids)
    assert ids_in(constraint.allowed([])), "before that place it still answers"


def test_an_interrupt_anywhere_inside_leaves_it_right(tokenizer) -> None:
    grammar = Grammar.json_schema(SCHEMA)
    ids = walk(constraint_of(grammar, tokenizer), random.Random(5))
    expected = ids_in(constraint_of(grammar, tokenizer).allowed(ids[:9]))
    for stop_at in range(0, 400, 7):
        constraint = constraint_of(grammar, tokenizer)
        constraint.allowed(ids[:4])
        remaining = stop_at

        def local(frame, event, arg):
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return local

        def trace(frame, event, arg):
            frame.f_trace_opcodes = True
            return local if frame.f_code.co_filename == module.__file__ else None

        sys.settrace(trace)
        try:
            constraint.allowed(ids[:12])
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert ids_in(constraint.allowed(ids[:9])) == expected


# -- several at once ---------------------------------------------------------------------------------------------------


def test_several_constraints_allow_what_all_of_them_do(tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    letters = constraint_of(Grammar.regex("[abc]d"), tokenizer)
    others = constraint_of(Grammar.regex("[a-z]*"), tokenizer)
    both = ids_in(allowed_by([letters, others], []))
    assert both == ids_in(letters.allowed([]))
    assert allowed_by([], [a]) is None
    assert not is_done([], [a])
    assert is_done([others, letters], tokenizer.encode("ad"))
    assert permits([], [], 3)
    assert not permits([letters], [], 10**6)
    assert isinstance(letters, Constraint)
