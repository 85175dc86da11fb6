from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxgen.errors import InvalidValueError
from mlxgen.sampling import token_logprob, top_logprobs


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_log_probabilities_are_float32_log_softmax(dtype: mx.Dtype) -> None:
    logits = mx.random.normal((1, 50), key=mx.random.key(1)).astype(dtype) * 4
    x = np.array(logits.astype(mx.float32), dtype=np.float64)[0]
    expected = x - np.log(np.exp(x).sum())
    order = np.argsort(-expected, kind="stable")

    one = token_logprob(logits, mx.array([7], dtype=mx.uint32))
    assert (one.dtype, one.shape) == (mx.float32, (1,))
    assert one.item() == pytest.approx(expected[7], abs=1e-5)

    ids, values = top_logprobs(logits, 5)
    assert (ids.shape, values.shape, values.dtype) == ((1, 5), (1, 5), mx.float32)
    np.testing.assert_allclose(np.array(values)[0], expected[order[:5]], atol=1e-5)
    np.testing.assert_allclose(expected[np.array(ids)[0]], expected[order[:5]])


def test_k_is_checked() -> None:
    logits = mx.zeros((1, 4))
    assert sorted(top_logprobs(logits, 4)[0].tolist()[0]) == [0, 1, 2, 3]
    for k in (0, 5):
        with pytest.raises(InvalidValueError):
            top_logprobs(logits, k)
