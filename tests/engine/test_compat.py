"""`stream_generate` and `generate` against mlx-lm's own, on the same model object."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import mlx_lm
import pytest
import tiny
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlxgen
from mlxgen.cancellation import CancelToken
from mlxgen.errors import InvalidValueError, UnsupportedError

PROMPT = "The sea was calm, and the boat"
KINDS = ("llama", "gemma3", "lfm2", "qwen3_5", "falcon_h1")


def both(kind: str, prompt=PROMPT, **options):
    module, tokenizer = tiny.load(kind)
    theirs = list(mlx_lm.stream_generate(module, tokenizer, prompt, **options))
    ours = list(mlxgen.stream_generate(module, tokenizer, prompt, **options))
    return theirs, ours


def same(theirs, ours, num_prompt_tokens=None) -> None:
    assert [r.token for r in ours] == [r.token for r in theirs]
    # mlx-lm's detokenizer drops a space at the very start, and shows byte 0 as the letter that stands for it.
    text = "".join(r.text for r in ours)
    assert text.removeprefix(" ") == "".join(r.text for r in theirs).removeprefix(" ").replace("\u0100", "\0")
    assert [r.finish_reason for r in ours] == [r.finish_reason for r in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprobs.shape == other.logprobs.shape
        assert mx.allclose(mine.logprobs, other.logprobs, atol=1e-5)
        assert mine.generation_tokens == other.generation_tokens
        assert mine.prompt_tokens in (other.prompt_tokens, num_prompt_tokens)
        assert mine.from_draft is False
    assert {f.name for f in dataclasses.fields(ours[0])} == {f.name for f in dataclasses.fields(theirs[0])}
    assert ours[-1].prompt_tps > 0
    assert ours[-1].generation_tps > 0
    assert ours[-1].peak_memory > 0


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_texts_and_fields_are_the_same(kind) -> None:
    theirs, ours = both(kind, max_tokens=12)
    same(theirs, ours)
    assert ours[-1].finish_reason == "length"
    module, tokenizer = tiny.load(kind)
    assert mlxgen.generate(module, tokenizer, PROMPT, max_tokens=12) == "".join(r.text for r in ours)


def test_a_stop_token_ends_it_the_same_way() -> None:
    module, tokenizer = tiny.load("llama")
    token = list(mlx_lm.stream_generate(module, tokenizer, PROMPT, max_tokens=8))[5].token
    before = set(tokenizer.eos_token_ids)
    tokenizer.eos_token_ids.add(token)
    try:
        theirs, ours = both("llama", max_tokens=20)
        same(theirs, ours)
        assert ours[-1].finish_reason == "stop"
        theirs, ours = both("llama", max_tokens=-1)
        same(theirs, ours)
    finally:
        tokenizer.eos_token_ids.clear()
        tokenizer.eos_token_ids.update(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_cache_over_three_turns_is_mlx_lm_s(kind) -> None:
    module, tokenizer = tiny.load(kind)
    theirs, ours = make_prompt_cache(module), make_prompt_cache(module)
    for turn, length in (("First, ", 5), (" and then more of it, ", 1), ("last.", 7)):
        other = list(mlx_lm.stream_generate(module, tokenizer, turn, max_tokens=length, prompt_cache=theirs))
        mine = list(mlxgen.stream_generate(module, tokenizer, turn, max_tokens=length, prompt_cache=ours))
        same(other, mine)
        assert offsets(ours) == offsets(theirs)


def offsets(cache):
    found = []
    for entry in cache:
        found += [getattr(leaf, "offset", None) for leaf in getattr(entry, "caches", [entry])]
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_leaving_in_the_middle_leaves_prompt_and_yielded_tokens_in_the_cache(kind) -> None:
    module, tokenizer = tiny.load(kind)
    ids = tokenizer.encode(PROMPT)
    cache, seen = make_prompt_cache(module), []
    for response in mlxgen.stream_generate(module, tokenizer, PROMPT, max_tokens=20, prompt_cache=cache):
        seen.append(response.token)
        if len(seen) == 5:
            break
    assert {offset for offset in offsets(cache) if offset is not None} == {len(ids) + 5}
    after = make_prompt_cache(module)
    fed = list(mlx_lm.stream_generate(module, tokenizer, PROMPT, max_tokens=5, prompt_cache=after))
    assert [r.token for r in fed] == seen
    follow = [r.token for r in mlx_lm.stream_generate(module, tokenizer, " So", max_tokens=6, prompt_cache=after)]
    assert [
        r.token for r in mlx_lm.stream_generate(module, tokenizer, " So", max_tokens=6, prompt_cache=cache)
    ] == follow


def test_an_error_gives_the_cache_back_true() -> None:
    module, tokenizer = tiny.load("llama")
    ids = tokenizer.encode(PROMPT)
    cache = make_prompt_cache(module)
    list(mlxgen.stream_generate(module, tokenizer, PROMPT, max_tokens=3, prompt_cache=cache))
    calls = 0

    def failing(tokens, logits):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise LookupError("third")
        return logits

    seen = []
    with pytest.raises(LookupError, match="third"):
        for response in mlxgen.stream_generate(
            module, tokenizer, " So", max_tokens=9, prompt_cache=cache, logits_processors=[failing]
        ):
            seen.append(response.token)
    assert set(offsets(cache)) == {len(ids) + 3 + len(tokenizer.encode(" So")) + len(seen)}


def test_processors_and_samplers_of_mlx_lm() -> None:
    processors = make_logits_processors(logit_bias={9: 1.5}, repetition_penalty=1.3, repetition_context_size=8)
    same(*both("llama", max_tokens=12, logits_processors=processors))
    seen: list[list[int]] = []

    def recording(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    module, tokenizer = tiny.load("llama")
    list(mlx_lm.stream_generate(module, tokenizer, PROMPT, max_tokens=4, logits_processors=[recording]))
    theirs, seen = seen[:4], []
    list(mlxgen.stream_generate(module, tokenizer, PROMPT, max_tokens=4, logits_processors=[recording]))
    assert seen[:4] == theirs

    def run(library):
        mx.random.seed(7)
        return [
            r.token
            for r in library.stream_generate(
                module, tokenizer, PROMPT, max_tokens=12, sampler=make_sampler(temp=1.0, top_p=0.9)
            )
        ]

    assert run(mlxgen) == run(mlx_lm)
    assert run(mlxgen) == run(mlxgen)


def test_progress_is_reported_at_the_same_places() -> None:
    module, tokenizer = tiny.load("llama")
    calls: dict[str, list[tuple[int, int]]] = {}
    for name, library in (("theirs", mlx_lm), ("ours", mlxgen)):
        calls[name] = []
        list(
            library.stream_generate(
                module,
                tokenizer,
                PROMPT * 3,
                max_tokens=2,
                prefill_step_size=16,
                prompt_progress_callback=lambda *pair, name=name: calls[name].append(pair),
            )
        )
    assert calls["ours"] == calls["theirs"]
    assert len(calls["ours"]) > 4


def test_input_embeddings_alone_and_with_the_prompt() -> None:
    module, tokenizer = tiny.load("llama")
    ids = tokenizer.encode(PROMPT)
    embeddings = module.model.embed_tokens(mx.array(ids)) * 1.1
    for prompt in (ids, []):
        same(*both("llama", prompt, max_tokens=8, input_embeddings=embeddings, prefill_step_size=8), len(ids))
    with pytest.raises(ValueError, match="rows"):
        next(mlxgen.stream_generate(module, tokenizer, ids[:-1], input_embeddings=embeddings))


def test_bounded_and_quantised_caches() -> None:
    theirs, ours = both("llama", max_tokens=10, kv_bits=8, kv_group_size=32, quantized_kv_start=16)
    same(theirs, ours)
    module, tokenizer = tiny.load("llama")
    # mlx-lm ignores max_kv_size for models that make their own cache; given the caches, both must agree.
    cache = [mlx_lm.models.cache.RotatingKVCache(max_size=16, keep=4) for _ in module.layers]
    expected = list(mlx_lm.stream_generate(module, tokenizer, PROMPT, max_tokens=14, prompt_cache=cache))
    assert [r.token for r in mlxgen.stream_generate(module, tokenizer, PROMPT, max_tokens=14, max_kv_size=16)] == [
        r.token for r in expected
    ]
    with pytest.raises(UnsupportedError, match="rotating"):
        next(mlxgen.stream_generate(module, tokenizer, PROMPT, max_kv_size=16, kv_bits=8))


def test_ids_arrays_and_loaded_models_are_taken_as_prompts_and_models() -> None:
    module, tokenizer = tiny.load("llama")
    ids = tokenizer.encode(PROMPT)
    expected = [r.token for r in mlx_lm.stream_generate(module, tokenizer, PROMPT, max_tokens=4)]
    loaded, their_tokenizer = mlxgen.load(str(tiny.folder("llama")))
    assert loaded is not None
    model = mlxgen.load(str(tiny.folder("llama")))
    for given, prompt in ((module, ids), (module, mx.array(ids)), (model, PROMPT)):
        assert [r.token for r in mlxgen.stream_generate(given, their_tokenizer, prompt, max_tokens=4)] == expected


def test_bad_arguments_are_errors_before_anything_runs() -> None:
    module, tokenizer = tiny.load("llama")
    for options in ({"max_tokens": 0}, {"max_tokens": -2}, {"prefill_step_size": 0}, {"kv_bits": 3}):
        with pytest.raises(InvalidValueError):
            list(mlxgen.stream_generate(module, tokenizer, PROMPT, **options))
    with pytest.raises(ValueError, match="non-zero"):
        list(mlx_lm.stream_generate(module, tokenizer, PROMPT, max_tokens=0))
    for prompt in ([], [10**6], [-1]):
        with pytest.raises(InvalidValueError):
            list(mlxgen.stream_generate(module, tokenizer, prompt))
    with pytest.raises(UnsupportedError, match="draft"):
        list(mlxgen.stream_generate(module, tokenizer, PROMPT, draft_model=module))
    with pytest.raises(UnsupportedError, match="verbose"):
        mlxgen.generate(module, tokenizer, PROMPT, True)


def test_a_cancelled_token_ends_the_stream() -> None:
    module, tokenizer = tiny.load("llama")
    token, seen = CancelToken(), []
    for response in mlxgen.stream_generate(module, tokenizer, PROMPT, max_tokens=-1, cancel=token):
        seen.append(response)
        if len(seen) == 3:
            token.cancel()
    assert [r.finish_reason for r in seen] == [None, None, None, "cancelled"]
    assert seen[-1].text == ""
    assert seen[-1].generation_tokens == 3
