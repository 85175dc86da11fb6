"""The faster form of an activation is the activation."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlxgen_vision.towers.activations import gelu_tanh


def test_gelu_by_the_logistic_function_is_gelu_by_tanh():
    x = mx.concatenate([mx.linspace(-12, 12, 4001), mx.array([0.0, -0.0, 1e30, -1e30, 1e-30])])
    exact = np.array(x, np.float64)
    with np.errstate(over="ignore"):
        exact = 0.5 * exact * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    assert np.abs(np.array(gelu_tanh(x)) - exact)[:-4].max() <= 2e-6
    assert np.array(gelu_tanh(x))[-3:] == pytest.approx(exact[-3:], rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_it_rounds_no_worse_in_half_precision(dtype):
    x = mx.linspace(-8, 8, 2001).astype(dtype)
    exact = nn.gelu_approx(x.astype(mx.float32))
    ours, theirs = (mx.abs(f(x).astype(mx.float32) - exact).max().item() for f in (gelu_tanh, nn.gelu_approx))
    assert ours <= 1.5 * theirs
    large = mx.array([300.0, -300.0], dtype)
    assert gelu_tanh(large).tolist() == [300.0, 0.0]
