"""Prompts that attend in both directions: where they are, which passes may cut them, what is shared of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlxgen_vision.families import paligemma
from mlxgen_vision.prefix import PrefixPass, PrefixSpan, prefix_spans
from mlxgen_vision.processors.paligemma import SquareSettings, expand
from tokenizers import Tokenizer, processors
from vision_harness import tiny_vlm
from vision_harness.jobs import Counts, counting, image, model, new_session, options, reply, sources

from mlxgen.cache import CacheOptions
from mlxgen.errors import InvalidValueError, PlaceholderError, UnsupportedError
from mlxgen.inputs import MediaSpan, PreparedInput, PreparedMedium
from mlxgen.models import LoadOptions, load
from mlxgen.prefixcache.keys import chunks
from mlxgen.preparation import shared_prefix
from mlxgen.request import VideoPart
from mlxgen.session import Session

PICTURE, HIDDEN = 9, 64  # tokens to a tiny picture, the tiny model's width


@pytest.fixture
def folder(tmp_path):
    return sources(tmp_path / "media")


def prompt_of(pattern: str) -> tuple[list[int], PreparedInput]:
    """`I` is a picture, `r` a token of an earlier reply, everything else a token of text; the prepared input of it."""
    vision = model("paligemma").vision
    ids: list[int] = []
    given: list[int] = []
    for number, letter in enumerate(pattern):
        tokens = [vision.image_token] * PICTURE if letter == "I" else [40 + number]
        ids += tokens
        given += [-1] if letter == "r" else tokens
    media = [_medium(number) for number in range(pattern.count("I"))]
    spans = vision.locate(given, media)
    return ids, PreparedInput(ids, media, spans, atomic=vision.atomic(spans))


def _medium(number: int) -> PreparedMedium:
    rows = mx.array(np.random.default_rng(number).standard_normal((PICTURE, HIDDEN)).astype(np.float32))
    return PreparedMedium("image", content_hash=f"picture {number}", features=[{"features": rows}], num_parts=1)


def dense(ids: list[int], inputs: PreparedInput) -> np.ndarray:
    """Logits of the whole sequence at once, without a cache, from a mask written out token by token."""
    language = model("paligemma").vision.language
    hidden = np.array(language.model.embed_tokens(mx.array(ids))) * np.float32(HIDDEN**0.5)
    for span in inputs.spans:
        hidden[span.start : span.end] = np.array(inputs.media[span.medium].features[0]["features"])
    allowed = np.tril(np.ones((len(ids), len(ids)), bool))
    for first, last in inputs.atomic:
        allowed[first:last, first:last] = True
    out = mx.array(hidden)[None]
    for layer in language.model.layers:
        out = layer(out, mx.array(allowed), None)
    logits = language.model.embed_tokens.as_linear(language.model.norm(out)) / 30
    return np.array(mx.tanh(logits) * 30)[0]


def fed(ids: list[int], inputs: PreparedInput, ends: list[int], caches=None) -> np.ndarray:
    """Logits of the same in passes that end at `ends`."""
    vision = model("paligemma").vision
    caches = make_prompt_cache(vision.language) if caches is None else caches
    rows, start = [], 0
    for end in ends:
        out = vision.forward(mx.array(ids[start:end], mx.uint32), cache=caches, start=start, inputs=inputs)
        mx.eval(out, [cache.state for cache in caches])
        assert out.shape[1] == end - start
        rows.append(np.array(out)[0])
        start = end
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("Iabc", [(0, 12)]),
        ("aIbI", [(0, 20)]),
        ("IabrrcdI", [(0, 11), (15, 24)]),
        ("abrrIcI", [(4, 23)]),
        ("IrIrI", [(0, 9), (10, 19), (20, 29)]),
        ("Iabrrcd", [(0, 11)]),
        ("IIabrIIcdrrI", [(0, 20), (21, 41), (43, 52)]),
    ],
)
def test_prefixes_end_where_replies_begin(pattern, blocks):
    ids, inputs = prompt_of(pattern)
    assert list(inputs.atomic) == blocks
    assert all(isinstance(span, PrefixSpan) and span.last_id == ids[span.prefix[1] - 1] for span in inputs.spans)


@pytest.mark.parametrize(
    ("pattern", "ends"),
    [
        ("Iabc", [12]),
        ("Iabc", [11, 12]),
        ("IIab", [19, 20]),
        ("Iabrrr", [11, 12, 14]),
        ("Iabrrr", [10, 11, 12, 13, 14]),
        ("Iabrrr", [10, 14]),
        ("IabrrcIde", [10, 11, 14, 24, 25]),
        ("IabrrcIde", [24, 25]),
        ("IabrrcIde", [25]),
        ("abrrIcdrr", [2, 4, 14, 15, 17]),
    ],
)
def test_passes_give_what_the_whole_sequence_gives_at_once(pattern, ends):
    """Also where a pass ends before a prompt's last token, which the others see nevertheless."""
    ids, inputs = prompt_of(pattern)
    assert ends[-1] == len(ids)
    assert np.abs(fed(ids, inputs, ends) - dense(ids, inputs)).max() <= 2e-4


def test_the_last_token_changes_what_is_kept_of_those_before_it():
    """Otherwise the test above would prove little."""
    ids, inputs = prompt_of("Iabc")
    vision = model("paligemma").vision
    kept = []
    for last in (ids[-1], ids[-1] + 1):
        changed = [*ids[:-1], last]
        spans = prefix_spans(changed, [MediaSpan(0, PICTURE, 0, 0, PICTURE)])
        caches = make_prompt_cache(vision.language)
        changed_inputs = replace(inputs, token_ids=changed, spans=spans)
        vision.forward(mx.array(ids[:-1], mx.uint32), cache=caches, start=0, inputs=changed_inputs)
        assert all(cache.offset == len(ids) - 1 for cache in caches)
        kept.append(np.array(caches[-1].state[0]))
    assert np.abs(kept[0] - kept[1]).max() > 1e-2


def test_a_pass_run_again_may_not_know_the_last_token_any_more():
    """As after going back to before it: the ids behind are whatever, the prefix's own last one counts."""
    ids, inputs = prompt_of("Iabcrrrr")
    whole, again = (make_prompt_cache(model("paligemma").vision.language) for _ in range(2))
    fed(ids, inputs, [len(ids)], whole)
    fed([*ids[:11], 0, 0, 0, 0, 0], inputs.before(11), [len(ids)], again)
    for one, other in zip(whole, again, strict=True):
        assert mx.array_equal(one.state[0][..., :11, :], other.state[0][..., :11, :])


def test_a_ring_takes_a_prompt_that_is_longer_than_itself():
    ids, inputs = prompt_of("IIabcdrrr")
    caches = [RotatingKVCache(max_size=16, keep=4) for _ in range(2)]
    logits = fed(ids, inputs, [21, 22, 23], caches)
    assert np.abs(logits[:21] - dense(ids, inputs)[:21]).max() <= 2e-4
    assert all(cache.offset == 23 for cache in caches)
    more = [RotatingKVCache(max_size=16, keep=4) for _ in range(2)]
    ids, inputs = prompt_of("rrrrrrIIabcdrrr")
    fed(ids, inputs, [6, 27, 28], more)
    assert all(cache.offset == 28 for cache in more)


@pytest.mark.parametrize(("start", "end"), [(0, 5), (0, 10), (3, 12), (9, 11)])
def test_passes_that_cut_a_prefix_are_refused(start, end):
    ids, inputs = prompt_of("Iabc")
    caches = [KVCache() for _ in range(2)]
    for cache in caches:
        cache.offset = start
    with pytest.raises(InvalidValueError, match="PreparedInput.atomic"):
        model("paligemma").vision.forward(mx.array(ids[start:end], mx.uint32), cache=caches, start=start, inputs=inputs)


def test_text_and_single_tokens_are_mlx_lms_own_pass():
    _, inputs = prompt_of("Iabc")
    assert PrefixPass.of((), 0, 20) is None
    assert PrefixPass.of(inputs.spans, 11, 1) is None, "a prefix's last token in its own pass"
    assert PrefixPass.of(inputs.spans, 12, 3) is None
    assert PrefixPass.of(inputs.spans, 0, 11).borrowed == inputs.token_ids[11]
    assert PrefixPass.of(inputs.spans, 0, 12).borrowed is None


def test_a_placeholder_beyond_the_vocabulary(tmp_path):
    """As in PaliGemma's first checkpoints, whose tables have no row for it."""
    shutil.copytree(tiny_vlm.folder("paligemma"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"image_token_index": 100_000}
    vision = paligemma.FAMILY.load(tmp_path, config)
    ids, inputs = prompt_of("Iabc")
    beyond = [100_000] * PICTURE + ids[PICTURE:]
    spans = vision.locate(beyond, inputs.media)
    out = vision.forward(
        mx.array(beyond, mx.uint32),
        cache=make_prompt_cache(vision.language),
        start=0,
        inputs=replace(inputs, token_ids=beyond, spans=spans),
    )
    assert np.abs(np.array(out)[0] - dense(ids, inputs)).max() <= 2e-4


# -- what is shared


def test_a_prompt_that_goes_on_otherwise_shares_nothing_of_its_prefix():
    ids, inputs = prompt_of("Iabcd")
    longer, other = prompt_of("Iabcde")
    assert shared_prefix(ids, inputs, ids, inputs) == len(ids)
    assert shared_prefix(ids, inputs, longer, other) == 0
    assert shared_prefix(ids[:-1], inputs, ids, inputs) == 0, "half a prefix isn't known to be this one's"
    replied, earlier = prompt_of("Iabcdrr")
    again, later = prompt_of("IabcdrrIx")
    assert shared_prefix(replied, earlier, again, later) == len(replied)


def test_blocks_of_the_prefix_cache_know_the_whole_prefix():
    ids, inputs = prompt_of("Iabcd")
    passes = [(0, len(ids) - 1)]
    changed = [*ids[:-1], ids[-1] + 1]
    keys = {chunks("root", given, inputs, passes)[0].key for given in (ids, changed, ids)}
    assert len(keys) == 2
    text = replace(inputs, atomic=(), spans=())
    assert chunks("root", ids, text, passes)[0].key == chunks("root", changed, text, passes)[0].key


def test_asking_again_with_other_words_reads_the_picture_again_and_repeating_does_not(folder):
    counts = Counts()
    session = new_session("paligemma", counting(model("paligemma"), counts))
    session.send([image(folder, "A"), "What?"], reply=reply())
    prompt = session.state.history.reply.start
    first = [token.id for token in session.state.history.reply.tokens]
    session.undo()
    again = session.send([image(folder, "A"), "What?"], reply=reply())
    assert again.usage.reused_tokens == prompt - 1
    assert [token.id for token in session.state.history.reply.tokens] == first
    session.undo()
    other = session.send([image(folder, "A"), "What else?"], reply=reply())
    assert (other.usage.reused_tokens, other.usage.images_encoded) == (0, 0)
    fresh = new_session("paligemma")
    fresh.send([image(folder, "A"), "What else?"], reply=reply())
    assert session.ledger == fresh.ledger
    assert session.state.history.reply.tokens == fresh.state.history.reply.tokens


def test_raw_turns_are_prompts_of_their_own(folder):
    session = Session(model("paligemma"), options=replace(options("paligemma"), raw=True))
    session.send(["<image>What?", image(folder, "A")], reply=reply())
    session.send("more", reply=reply())
    session.send(["<image>And <image>?", image(folder, "B"), image(folder, "C")], reply=reply())
    inputs = session.state.sequence.inputs
    assert len(inputs.atomic) == 2
    (first, end), (second, last) = inputs.atomic
    text = session.model.tokenizer.decode
    assert (first, last) == (0, len(inputs.token_ids))
    assert text(inputs.token_ids[:end]) == "<image>" * PICTURE + "<bos>What?\n"
    assert text(inputs.token_ids[second:]) == "<image>" * PICTURE + "And " + "<image>" * PICTURE + "<bos>?\n"


def test_a_quantised_cache_is_refused(folder):
    session = new_session("paligemma", cache=CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=0))
    with pytest.raises(UnsupportedError, match="leave out kv_bits"):
        session.send([image(folder, "A"), "What?"], reply=reply())


# -- prompts and settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<image>caption en", "<image><image><bos>caption en\n"),
        ("<image>a\n", "<image><image><bos>a\n\n"),
        ("a<image>b", "a<image><image><bos>b\n"),
        ("<image><bos>caption en", "<image><image><bos>caption en\n"),
        ("<image><bos>caption en\n", "<image><image><bos>caption en\n"),
    ],
)
def test_raw_prompts_get_what_the_processor_writes(text, expected):
    assert expand(text, [PreparedMedium("image")], 2) == expected


def test_text_without_pictures_stays_as_it_is():
    assert expand("caption en", [], 2) == "caption en"
    with pytest.raises(PlaceholderError, match="0 placeholders"):
        expand("caption en", [PreparedMedium("image")], 2)


def published(path: Path, **tokenizer) -> Path:
    """The tiny checkpoint with a tokenizer as the published ones are: BOS in front of everything, no chat template."""
    shutil.copytree(tiny_vlm.folder("paligemma"), path)
    own = Tokenizer.from_file(str(path / "tokenizer.json"))
    own.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", own.token_to_id("<bos>"))]
    )
    own.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {"add_bos_token": True} | tokenizer
    settings.pop("chat_template") if "chat_template" not in tokenizer else None
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_published_tokenizers_need_no_template_and_put_no_bos_in_front(tmp_path, folder):
    whole = load(str(published(tmp_path / "m")))
    assert whole.tokenizer.encode("x")[:1] != [whole.tokenizer.bos_token_id]
    session = Session(whole, options=options("paligemma"))
    session.send(["In ", image(folder, "A"), "and", image(folder, "B"), "caption en"], reply=reply())
    ids = session.state.sequence.inputs.token_ids
    assert whole.tokenizer.decode(ids) == "<image>" * 2 * PICTURE + "<bos>In andcaption en\n"
    raw = Session(whole, options=replace(options("paligemma"), raw=True))
    raw.send(["<image><image>In andcaption en", image(folder, "A"), image(folder, "B")], reply=reply())
    assert raw.state.sequence.inputs.token_ids == ids
    assert raw.state.history.reply.tokens == session.state.history.reply.tokens


def test_a_template_of_its_own_and_the_callers_settings_win(tmp_path):
    own = published(tmp_path / "own", chat_template="own {{ bos_token }}")
    assert load(str(own)).tokenizer.chat_template == "own {{ bos_token }}"
    plain = published(tmp_path / "plain")
    given = load(str(plain), options=LoadOptions(tokenizer_config={"chat_template": "given", "add_bos_token": True}))
    assert given.tokenizer.chat_template == "given"
    assert given.tokenizer.encode("x")[0] == given.tokenizer.bos_token_id
    (plain / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    assert load(str(plain)).tokenizer.chat_template == "older"


def test_system_turns_go_in_front_of_the_users(tmp_path, folder):
    session = Session(model("paligemma"), system="Short.", options=options("paligemma"))
    session.send([image(folder, "A"), "caption en"], reply=reply())
    ids = session.state.sequence.inputs.token_ids
    assert session.model.tokenizer.decode(ids) == "<image>" * PICTURE + "<bos>Short.\n\ncaption en\n"


def test_videos_are_refused_with_a_remedy(folder):
    with pytest.raises(UnsupportedError, match="give frames of the video as pictures"):
        next(model("paligemma").vision.prepare(VideoPart(folder / "V")))


def test_gemma_1_has_the_gate_it_was_trained_with():
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "head_dim": 4}
    language = paligemma.build_language({"model_type": "gemma", "vocab_size": 32, **shape})
    assert isinstance(language, gemma.Model)
    mlp = language.layers[1].mlp
    x = mx.array(np.random.default_rng(0).standard_normal((1, 3, 8)).astype(np.float32)) * 3
    gate = np.array(x @ mlp.gate_proj.weight.T)
    tanh = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    expected = mx.array(tanh) * (x @ mlp.up_proj.weight.T) @ mlp.down_proj.weight.T
    assert np.abs(np.array(mlp(x) - expected)).max() <= 1e-5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, "soft caps"),
        ({"model_type": "gemma", "rope_scaling": {"type": "linear", "factor": 2}}, "rotary"),
        ({"model_type": "gemma2", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary"),
    ],
)
def test_text_models_it_was_not_published_with_are_refused(text, said):
    with pytest.raises(UnsupportedError, match=said):
        paligemma.build_language(text)


def test_settings_that_make_another_size_are_refused(tmp_path):
    for image_settings in (
        {"size": {"height": 448, "width": 224}},
        {"size": {"shortest_edge": 224}},
        {"do_resize": False},
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_settings))
        with pytest.raises(UnsupportedError, match="224x224"):
            SquareSettings.read(tmp_path, 224)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resample": 3}))
    assert SquareSettings.read(tmp_path, 224).side == 224
