"""Bidirectional blocks under every cache and any chunking, against one plain pass over the whole sequence."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache
from mlxgen_vision.families.gemma3 import Gemma3Model, Gemma3Vision, Parts
from mlxgen_vision.masks import BlockMasks, blocks_in_chunk, key_positions
from mlxgen_vision.processors.gemma3 import ImageWords, SquareSettings
from mlxgen_vision.processors.settings import Normalisation
from mlxgen_vision.towers.siglip import SiglipConfig

from mlxgen.errors import InvalidValueError, UnsupportedError
from mlxgen.inputs import MediaSpan, PreparedInput, PreparedMedium

WINDOW = 8
WIDTH = 32
LENGTH = 60
# One block as long as the window, one longer, two that touch, one of a single token.
BLOCKS = ((5, 13), (20, 31), (31, 35), (44, 45))
PLANS = (
    (LENGTH,),
    (4, 13, 16, 35, 40, 45, LENGTH),
    (2, 3, 4, 13, 14, 15, 16, 17, 18, 19, 20, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, LENGTH),
    (5, 13, 20, 31, 35, 43, 44, 45, LENGTH),
)


@pytest.fixture(scope="module")
def model() -> Gemma3Model:
    arguments = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=WIDTH,
        num_hidden_layers=4,
        intermediate_size=32,
        num_attention_heads=2,
        head_dim=32,
        vocab_size=50,
        num_key_value_heads=1,
        query_pre_attn_scalar=4,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
    )
    mx.random.seed(3)
    language = gemma3_text.Model(arguments)
    language.tie_word_embeddings = False
    language.update({})
    mx.eval(language.parameters())
    tower = SiglipConfig(hidden_size=8, num_attention_heads=1, image_size=16, patch_size=8, num_hidden_layers=1)
    settings = SquareSettings(16, 16, "bilinear", Normalisation(), None)
    return Gemma3Model(Parts(language, Gemma3Vision(tower, WIDTH, 4), settings, ImageWords(), 49, 4))


@pytest.fixture(scope="module")
def inputs() -> PreparedInput:
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 40, LENGTH)
    media, spans = [], []
    for number, (start, end) in enumerate(BLOCKS):
        ids[start:end] = 49
        rows = mx.array(rng.standard_normal((end - start, WIDTH)).astype(np.float32))
        media.append(PreparedMedium("image", features=[{"features": rows}]))
        spans.append(MediaSpan(start, end, number, 0, end - start))
    return PreparedInput([int(token) for token in ids], media, tuple(spans), atomic=BLOCKS)


def plain_logits(model: Gemma3Model, inputs: PreparedInput, *, bidirectional: bool = True) -> np.ndarray:
    """The definition, literally: one pass without a cache, masks written out pair by pair."""
    text = model.language.model
    block = np.full(LENGTH, -1)
    for number, (start, end) in enumerate(BLOCKS):
        block[start:end] = number
    full, sliding = np.zeros((2, LENGTH, LENGTH), bool)
    for query, key in itertools.product(range(LENGTH), repeat=2):
        together = bidirectional and block[query] >= 0 and block[query] == block[key]
        full[query, key] = key <= query or together
        sliding[query, key] = full[query, key] and key > query - WINDOW
    hidden = text.embed_tokens(mx.array(inputs.token_ids)[None]) * mx.array(WIDTH**0.5, mx.bfloat16).astype(mx.float32)
    for span, medium in zip(inputs.spans, inputs.media, strict=True):
        hidden[:, span.start : span.end] = medium.features[0]["features"]
    for number, layer in enumerate(text.layers):
        hidden = layer(hidden, mx.array(full if number % 3 == 2 else sliding), None)
    return np.array(model.language.lm_head(text.norm(hidden))[0])


def chunked_logits(model: Gemma3Model, inputs: PreparedInput, ends: tuple[int, ...], caches: list) -> np.ndarray:
    rows, start = [], 0
    for end in ends:
        ids = mx.array(inputs.token_ids[start:end], dtype=mx.uint32)
        rows.append(model.forward(ids, cache=caches, start=start, inputs=inputs)[0])
        mx.eval(rows[-1])
        start = end
    return np.array(mx.concatenate(rows))


@pytest.mark.parametrize("ends", PLANS)
def test_every_chunking_equals_one_plain_pass(model, inputs, ends):
    expected = plain_logits(model, inputs)
    assert np.abs(expected - plain_logits(model, inputs, bidirectional=False)).max() > 0.1
    assert np.abs(chunked_logits(model, inputs, ends, model.language.make_cache()) - expected).max() < 1e-4


@pytest.mark.parametrize("ends", PLANS)
def test_plain_caches_under_sliding_layers_give_the_same(model, inputs, ends):
    caches = [KVCache() for _ in model.language.layers]
    assert np.abs(chunked_logits(model, inputs, ends, caches) - plain_logits(model, inputs)).max() < 1e-4


def test_rotating_caches_under_full_layers_give_the_same_as_long_as_they_hold_everything(model, inputs):
    caches = [RotatingKVCache(max_size=LENGTH + 1, keep=4) for _ in model.language.layers]
    assert np.abs(chunked_logits(model, inputs, PLANS[1], caches) - plain_logits(model, inputs)).max() < 1e-4


@pytest.mark.parametrize("ends", PLANS)
def test_quantised_caches_stay_close(model, inputs, ends):
    def caches() -> list:
        made = model.language.make_cache()
        return [QuantizedKVCache(group_size=32, bits=8) if isinstance(c, KVCache) else c for c in made]

    expected = plain_logits(model, inputs)
    apart = np.abs(chunked_logits(model, inputs, ends, caches()) - expected).max()
    assert apart < 0.1 * np.abs(expected - plain_logits(model, inputs, bidirectional=False)).max()


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("max_size", [6, 16])
def test_key_positions_name_the_rows_a_ring_returns(max_size, keep):
    """Each key row holds its own position, so the ring itself says where everything went."""
    rng = np.random.default_rng(max_size + keep)
    for _ in range(20):
        cache, start = RotatingKVCache(max_size=max_size, keep=keep), 0
        for length in [int(n) for n in rng.choice([1, 1, 1, 2, 3, 9], size=14)]:
            rows = mx.broadcast_to(
                mx.arange(start, start + length, dtype=mx.float32)[None, None, :, None], (1, 1, length, 4)
            )
            expected = key_positions(cache, length) if length > 1 else None
            keys, _ = cache.update_and_fetch(rows, rows)
            if expected is not None:
                assert np.array(keys)[0, 0, :, 0].tolist() == expected.tolist()
            start += length


def test_a_trimmed_cache_is_read_from_where_it_stands():
    cache = RotatingKVCache(max_size=10)
    rows = mx.zeros((1, 1, 6, 4))
    cache.update_and_fetch(rows, rows)
    cache.trim(2)
    assert key_positions(cache, 3).tolist() == list(range(7))


def test_a_chunk_that_cuts_a_block_is_refused(model, inputs):
    for start, end in ((0, 9), (9, 20), (6, 12)):
        with pytest.raises(InvalidValueError, match="cuts the image tokens"):
            blocks_in_chunk(BLOCKS, start, end - start)
    assert blocks_in_chunk(BLOCKS, 20, 15) == ((20, 31), (31, 35))
    with pytest.raises(InvalidValueError, match=r"chunk \[0, 9\)"):
        chunked_logits(model, inputs, (9,), model.language.make_cache())


def test_a_cache_at_another_place_is_refused():
    with pytest.raises(InvalidValueError, match="holds 0 tokens"):
        BlockMasks(20, 11, BLOCKS).mask(KVCache(), None)


def test_an_unknown_cache_is_refused():
    class Foreign:
        offset = 20

    with pytest.raises(UnsupportedError, match="Foreign"):
        BlockMasks(20, 11, BLOCKS).mask(Foreign(), None)
