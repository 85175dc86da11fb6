"""Log-probabilities of the distribution after penalties and bias, before temperature and filters.

All results are lazy: evaluate them together with the token, and only when somebody asked for them.
"""

from __future__ import annotations

import mlx.core as mx

from mlxgen.errors import InvalidValueError


def token_logprob(logits: mx.array, token: mx.array) -> mx.array:
    """The natural log-probability of `token`: logits (1, vocabulary), token (1,) -> float32 (1,)."""
    x = logits.astype(mx.float32)
    chosen = mx.take_along_axis(x, token[:, None], axis=-1).squeeze(-1)
    return chosen - mx.logsumexp(x, axis=-1)


def top_logprobs(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The `k` most probable tokens, best first: (ids uint32 (1, k), natural log-probabilities float32 (1, k))."""
    if not 1 <= k <= logits.shape[-1]:
        raise InvalidValueError(f"{k} top log-probabilities asked; the vocabulary allows 1 to {logits.shape[-1]}")
    x = logits.astype(mx.float32)
    ids = mx.argpartition(-x, k - 1, axis=-1)[..., :k]
    best = mx.take_along_axis(x, ids, axis=-1)
    order = mx.argsort(-best, axis=-1)
    ids, best = mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(best, order, axis=-1)
    return ids, best - mx.logsumexp(x, axis=-1, keepdims=True)
