"""Token healing: what is taken off a prompt, what may come in its place, and what the user then sees."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tiny
import tokenizers_for_tests as kinds
from harness import counted, model

from mlxgen.cancellation import Cancelled
from mlxgen.constraints import Healing, HealingConstraint, healing_at_end, healing_of
from mlxgen.constraints.vocabulary import bytes_of_tokens
from mlxgen.decode import DecodeOptions, TokenIterator
from mlxgen.detokenizer import Detokenizer
from mlxgen.errors import GrammarError, UnsupportedError
from mlxgen.sampling import SamplingParams

FALLBACK = kinds.hugging_face(kinds.byte_fallback(), eos_token="</s>")
PLAIN = kinds.hugging_face(kinds.byte_level(), eos_token="<|im_end|>")


def tokenizer() -> Any:
    return tiny.load("llama")[1]


def pieces(ids: Any, of: Any) -> list[bytes]:
    table = bytes_of_tokens(of)
    return [table.of(token) for token in ids]


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_the_bytes_of_tokens_are_what_they_decode_to() -> None:
    for text in kinds.TEXTS:
        for of in (tokenizer(), PLAIN):
            assert b"".join(pieces(of.encode(text, add_special_tokens=False), of)) == text.encode()
        assert b"".join(pieces(FALLBACK.encode(text, add_special_tokens=False), FALLBACK)) == b" " + text.encode()


def test_special_and_added_tokens_have_none() -> None:
    table = bytes_of_tokens(PLAIN)
    for name in ("<|im_end|>", "<think>", "</think>"):
        assert table.of(PLAIN.convert_tokens_to_ids(name)) == b""
    assert table.of(len(PLAIN)) == b""
    assert table.of(-1) == b""


def test_searching_by_beginning_finds_what_a_scan_finds() -> None:
    for of in (tokenizer(), FALLBACK):
        table = bytes_of_tokens(of)
        every = {token: table.of(token) for token in range(len(of)) if table.of(token)}
        rng = random.Random(0)
        for _ in range(200):
            data = rng.choice(list(every.values()))[: rng.randrange(1, 4)] + bytes(
                rng.choices(b"the \xff", k=rng.randrange(3))
            )
            assert sorted(table.starting_with(data)) == [t for t, piece in every.items() if piece.startswith(data)]
            shorter = [t for t, piece in every.items() if data.startswith(piece) and piece != data]
            assert sorted(table.beginnings_of(data)) == shorter
            longer = [t for t, piece in every.items() if piece.startswith(data) and piece != data]
            assert table.has_longer(data) == bool(longer)


@pytest.mark.parametrize("build", [kinds.metaspace, kinds.word_piece, kinds.split_bytes])
def test_tokenizers_of_other_kinds_are_refused(build) -> None:
    of = kinds.hugging_face(build())
    with pytest.raises(UnsupportedError, match="token healing needs"):
        healing_at_end(of, [3, 4])
    with pytest.raises(UnsupportedError, match="token healing needs"):
        HealingConstraint(of, b"a", 10)


# -- what is taken off -------------------------------------------------------------------------------------------------


def test_as_many_tokens_as_are_together_the_beginning_of_a_longer_one() -> None:
    of = tokenizer()
    for text, removed in [
        ("x the", b""),  # no token goes on from " the"
        ("x t", b" t"),  # " the"
        ("x th", b" th"),  # two tokens, which together begin " the"
        ("xq", b""),
        ("x an", b" an"),  # " and"
        ("x\n", b""),
    ]:
        ids = of.encode(text)
        found = healing_at_end(of, ids)
        assert found.removed == removed, text
        assert list(found.ids) == ids[len(ids) - len(found.ids) :]
        assert found.text == removed.decode()
        assert healing_of(of, found.ids) == found


def test_by_brute_force_no_longer_run_of_tokens_could_be_healed() -> None:
    of = tokenizer()
    table, rng = bytes_of_tokens(of), random.Random(1)
    num_healed = 0
    for _ in range(300):
        text = "".join(rng.choice(["the", " th", "i", "n", " a", "é", "n", "d", "🙂", " ", "s", "t"]) for _ in range(6))
        ids = of.encode(text)
        best = 0
        for count in range(1, len(ids)):
            data = b"".join(pieces(ids[len(ids) - count :], of))
            if table.has_longer(data) and _decodes(data):
                best = count
        found = healing_at_end(of, ids)
        assert len(found.ids) == best
        num_healed += best > 0
    assert num_healed > 100


def _decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_never_special_tokens_nor_anything_before_them_nor_the_last_that_must_stay() -> None:
    of = tokenizer()
    t = of.encode(" t")
    start = of.encode("<|im_start|>")
    assert healing_at_end(of, [*t, *start]) == Healing()
    assert healing_at_end(of, [*start, *t]).ids == tuple(t)
    assert healing_at_end(of, t) == Healing()
    assert healing_at_end(of, t, keep=0).ids == tuple(t)
    assert healing_at_end(of, []) == Healing()
    think = PLAIN.encode("<think>")
    assert healing_at_end(PLAIN, [*t, *think]) == Healing()
    assert healing_at_end(of, [*start, 10**6]) == Healing()


def test_never_half_a_character() -> None:
    """ "ð" and "Ł" are two bytes of an emoji and merge; a prompt's end is never cut between them."""
    of = tokenizer()
    table = bytes_of_tokens(of)
    for text in ("x🙂", "x😀", "xé", "x é"):
        ids = of.encode(text)
        for count in range(1, len(ids)):
            found = healing_at_end(of, ids[: len(ids) - count + 1])
            found.removed.decode()
        assert table.longest >= 2


def test_the_space_that_a_decoder_takes_off_at_the_start_isn_t_in_the_text() -> None:
    ids = FALLBACK.encode("at")
    assert FALLBACK.convert_ids_to_tokens(ids) == ["<s>", "▁", "a", "t"]
    ids = FALLBACK.encode("t")
    found = healing_at_end(FALLBACK, ids)
    assert (found.removed, found.text) == (b" t", "t")


# -- what may come -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [PLAIN, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_token_may_come_if_it_goes_on_with_the_bytes_or_stops_within_them(of) -> None:
    table = bytes_of_tokens(of)
    for removed in (b" t", b"the", " é".encode(), b" the ca"):
        constraint = HealingConstraint(of, removed, len(of) + 5)
        rng = random.Random(0)
        for _ in range(30):
            ids: list[int] = []
            data = b""
            while not data.startswith(removed):
                mask = np.array(constraint.allowed(ids))[0]
                rest = removed[len(data) :]
                expected = [
                    token
                    for token in range(len(of) + 5)
                    if table.of(token) and (table.of(token).startswith(rest) or rest.startswith(table.of(token)))
                ]
                assert np.nonzero(mask)[0].tolist() == expected
                ids.append(rng.choice(expected))
                data += table.of(ids[-1])
                assert not constraint.done(ids)
            assert constraint.allowed(ids) is None
            assert constraint.allowed([*ids, 0]) is None


def test_it_begins_behind_words_that_were_put_into_the_model_s_mouth() -> None:
    of = tokenizer()
    put = of.encode("xyz")
    alone = HealingConstraint(of, b" t", len(of)).allowed([])
    behind = HealingConstraint(of, b" t", len(of), first=len(put))
    assert (behind.allowed(put) == alone).all().item()
    assert behind.allowed([*put, *of.encode(" the")]) is None


def test_a_reply_that_began_otherwise_is_an_error() -> None:
    of = tokenizer()
    with pytest.raises(GrammarError, match="token 0 of the reply"):
        HealingConstraint(of, b" t", len(of)).allowed(of.encode("x"))
    with pytest.raises(GrammarError, match="token 0 of the reply"):
        HealingConstraint(of, b" t", len(of)).allowed([0])
    with pytest.raises(GrammarError, match="no token can write"):
        HealingConstraint(of, b" t", 3).allowed([])


# -- with a model ------------------------------------------------------------------------------------------------------


def healed_run(kind: str, sampling: SamplingParams, cut: int | None = None) -> tuple[list[Any], list[int], Healing]:
    """A healed prompt's reply; with `cut`, stopped after so many tokens and gone on with by a new iterator."""
    using, forward = counted(kind)
    of = using.tokenizer
    ids = of.encode("<|im_start|>Where did a train of th")
    healing = healing_at_end(of, ids)
    assert healing.removed
    constraint = HealingConstraint(of, healing.removed, using.vocab_size)
    options = DecodeOptions(sampling, max_tokens=10, logprobs=True, top_logprobs=4, constraints=(constraint,))
    iterator = TokenIterator.from_prompt(using, ids[: len(ids) - len(healing.ids)], options=options, step_size=8)
    tokens = [next(iterator) for _ in range(10 if cut is None else cut)]
    if cut is not None:
        iterator.settle()
        fresh = HealingConstraint(of, healing.removed, using.vocab_size)
        options = DecodeOptions(sampling, max_tokens=10, logprobs=True, top_logprobs=4, constraints=(fresh,))
        tokens += TokenIterator(iterator.sequence, options=options, step=cut, step_size=8)
    return tokens, forward.lengths, healing


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("seed", [None, 1])
def test_the_reply_begins_with_what_was_taken_and_stopping_anywhere_changes_nothing(kind, seed) -> None:
    sampling = SamplingParams() if seed is None else SamplingParams(temperature=1.5, seed=seed)
    expected, passes, healing = healed_run(kind, sampling)
    of = model(kind).tokenizer
    detokenizer = Detokenizer(of)
    text = "".join(detokenizer.add(token.id) for token in expected)
    assert text.startswith(healing.text)
    for token in expected:
        assert token.logprob <= 1e-6
        assert all(np.isfinite(value) for _, value in token.top)
        assert sum(np.exp(value) for _, value in token.top) < 1 + 1e-5
    assert len(expected[-1].top) == 4
    for cut in range(1, 10, 1 if kind == "llama" else 3):
        assert healed_run(kind, sampling, cut) == (expected, passes, healing)


def test_a_stop_before_the_first_token_changes_nothing_either() -> None:
    using = model("llama")
    of = using.tokenizer
    constraint = HealingConstraint(of, b" t", using.vocab_size)
    options = DecodeOptions(max_tokens=4, constraints=(constraint,))
    from mlxgen.cancellation import CancelToken

    stop = CancelToken()
    iterator = TokenIterator.from_prompt(using, of.encode("in the"), options=options, cancel=stop)
    stop.cancel("requested")
    with pytest.raises(Cancelled):
        next(iterator)
    iterator.settle()
    assert iterator.sequence.ahead is None
    tokens = list(TokenIterator(iterator.sequence, options=options))
    assert tokens == list(TokenIterator.from_prompt(using, of.encode("in the"), options=options))
    assert bytes_of_tokens(of).of(tokens[0].id)[:1] == b" "
