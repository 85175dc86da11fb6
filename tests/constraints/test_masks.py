"""Masks and bans."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxgen.constraints import BanConstraint, Constraint, banned_mask, masked
from mlxgen.constraints.masks import mask_of_bits, only_mask


def test_a_banned_mask_has_all_but_the_ids() -> None:
    mask = banned_mask(10, [3, 7, 12, -1])
    assert (mask.shape, mask.dtype) == ((1, 10), mx.bool_)
    assert [i for i, allowed in enumerate(mask[0].tolist()) if not allowed] == [3, 7]
    assert all(banned_mask(5, [])[0].tolist())
    assert [i for i, allowed in enumerate(only_mask(10, [3, 7, 12])[0].tolist()) if allowed] == [3, 7]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 70, 200])
def test_bits_are_ids_lowest_first_and_what_has_none_is_out(vocab_size) -> None:
    allowed = np.random.default_rng(vocab_size).integers(0, 2, 96).astype(bool)
    bits = np.packbits(allowed, bitorder="little").tobytes()
    expected = [bool(allowed[i]) if i < 96 else False for i in range(vocab_size)]
    assert mask_of_bits(bits, vocab_size)[0].tolist() == expected


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_masked_logits_keep_their_dtype_and_rows_without_a_mask_are_out(dtype) -> None:
    logits = mx.arange(6, dtype=mx.float32)[None].astype(dtype)
    out = masked(logits, mx.array([[True, False, True, False]]))
    assert out.dtype == dtype
    assert out.astype(mx.float32).tolist() == [[0.0, -np.inf, 2.0, -np.inf, -np.inf, -np.inf]]


def test_bans_are_by_position_and_nothing_else() -> None:
    constraint = BanConstraint({0: [1], 2: (3, 4)}, 6)
    assert isinstance(constraint, Constraint)
    assert constraint.allowed([]).tolist() == [[True, False, True, True, True, True]]
    assert constraint.allowed([5]) is None
    assert constraint.allowed([5, 5]).tolist() == [[True, True, True, False, False, True]]
    assert not constraint.done([5, 5])
