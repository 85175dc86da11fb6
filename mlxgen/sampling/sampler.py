"""From logits to a token: mlx-lm's filters in mlx-lm's order, with an explicit key.

Filters (top-p, min-p, XTC, top-k, each seeing what the former left) look at the distribution before temperature. Top-p
and min-p each keep the tokens above a threshold, so both together are one comparison; with top-k, and where XTC is
out of play, everything after finding the k best works on k numbers instead of the whole vocabulary.

On a GPU the steps are compiled into fewer kernels. On the CPU that gains nothing measurable (49,152 entries: 1.3 ms
either way) and costs a run of the system's C++ compiler, seconds if there is one, an error if there isn't.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from mlxgen.errors import InvalidValueError
from mlxgen.sampling.keys import step_key, step_uniform
from mlxgen.sampling.params import SamplingParams

Sampler = Callable[[mx.array, int], mx.array]
_Scalars = tuple[mx.array, mx.array, mx.array, mx.array]
_Draw = Callable[[mx.array, mx.array, _Scalars], mx.array]

_XTC_DRAW = 1


@dataclass(frozen=True)
class _Filters:
    """What decides the shape of the graph. The numbers are arguments, so that requests share one compiled function."""

    top_p: bool
    min_p: bool
    top_k: int
    min_tokens_to_keep: int
    xtc: bool
    xtc_special_tokens: tuple[int, ...]


def build_sampler(params: SamplingParams, *, xtc_special_tokens: Sequence[int] = ()) -> Sampler:
    """A function `(logits, step) -> token` that depends on its arguments and `params` only.

    `logits` is (1, vocabulary), logits or log-probabilities in any floating dtype; `step` counts the reply's tokens
    from 0; the result is uint32 of shape (1,), lazy. Greedy is one argmax. XTC never removes `xtc_special_tokens`
    (newline and the stop tokens, usually). May be called from any thread. `params` must have been validated; a
    temperature without a seed raises `InvalidValueError`.
    """
    if params.temperature == 0 or (params.top_k == 1 and params.xtc_probability == 0):
        return _greedy
    if params.seed is None:
        raise InvalidValueError(f"temperature {params.temperature!r} without a seed; call with_seed() first")
    filters = _Filters(
        top_p=0 < params.top_p < 1,
        min_p=params.min_p > 0,
        top_k=params.top_k,
        min_tokens_to_keep=params.min_tokens_to_keep if params.min_p > 0 else 1,
        xtc=False,
        xtc_special_tokens=(),
    )
    scalars: _Scalars = (
        mx.array(1.0 / params.temperature, dtype=mx.float32),
        mx.array(params.top_p, dtype=mx.float32),
        mx.array(math.log(params.min_p) if params.min_p > 0 else 0.0, dtype=mx.float32),
        mx.array(params.xtc_threshold, dtype=mx.float32),
    )
    seed, draw = params.seed, _graph(filters, on_gpu())
    if params.xtc_probability <= 0:
        return lambda logits, step: draw(logits, step_key(seed, step), scalars)

    probability = params.xtc_probability
    xtc_filters = _Filters(
        filters.top_p, filters.min_p, filters.top_k, filters.min_tokens_to_keep, True, tuple(xtc_special_tokens)
    )
    xtc_draw = _graph(xtc_filters, on_gpu())

    def sample_with_xtc(logits: mx.array, step: int) -> mx.array:
        # The host decides whether XTC applies, so that the steps without it don't pay for it.
        chosen = xtc_draw if step_uniform(seed, step, _XTC_DRAW) < probability else draw
        return chosen(logits, step_key(seed, step), scalars)

    return sample_with_xtc


def _greedy(logits: mx.array, step: int) -> mx.array:
    return mx.argmax(logits, axis=-1)


def on_gpu() -> bool:
    """Whether arrays are computed on a GPU by default."""
    return bool(mx.default_device() == mx.gpu)


@lru_cache(maxsize=64)
def _graph(filters: _Filters, compiled: bool) -> _Draw:
    def draw(logits: mx.array, key: mx.array, scalars: _Scalars) -> mx.array:
        x = logits.astype(mx.float32)
        if filters.top_k and filters.top_k < x.shape[-1] and not filters.xtc:
            return _draw_from_top_k(x, key, scalars, filters)
        return _draw_from_all(x, key, scalars, filters)

    # The key and the numbers are arguments: what a compiled function captures is baked in.
    return mx.compile(draw) if compiled else draw


def _draw_from_all(x: mx.array, key: mx.array, scalars: _Scalars, filters: _Filters) -> mx.array:
    inverse_temperature, top_p, log_min_p, xtc_threshold = scalars
    threshold = None
    if filters.top_p:
        descending = -mx.sort(-x, axis=-1)
        threshold = _top_p_threshold(descending, mx.logsumexp(x, axis=-1, keepdims=True), top_p)
    if filters.min_p:
        floor = mx.max(x, axis=-1, keepdims=True) + log_min_p
        if filters.min_tokens_to_keep > 1:
            best = mx.topk(x, filters.min_tokens_to_keep, axis=-1)
            floor = mx.minimum(floor, mx.min(best, axis=-1, keepdims=True))
        threshold = floor if threshold is None else mx.maximum(threshold, floor)
    if threshold is not None:
        x = mx.where(x >= threshold, x, -mx.inf)
    if filters.xtc:
        x = _without_top_choices(x, xtc_threshold, filters.xtc_special_tokens)
        if 0 < filters.top_k < x.shape[-1]:
            first = x.shape[-1] - filters.top_k
            best = mx.argpartition(x, first, axis=-1)[..., first:]
            chosen = mx.random.categorical(mx.take_along_axis(x, best, axis=-1) * inverse_temperature, key=key)
            return mx.take_along_axis(best, chosen[..., None], axis=-1).squeeze(-1)
    return mx.random.categorical(x * inverse_temperature, key=key)


def _draw_from_top_k(x: mx.array, key: mx.array, scalars: _Scalars, filters: _Filters) -> mx.array:
    inverse_temperature, top_p, log_min_p, _ = scalars
    first = x.shape[-1] - filters.top_k
    ids = mx.argpartition(x, first, axis=-1)[..., first:]
    best = mx.take_along_axis(x, ids, axis=-1)
    threshold = None
    if filters.top_p or filters.min_tokens_to_keep > 1:
        descending = -mx.sort(-best, axis=-1)
    if filters.top_p:
        threshold = _top_p_threshold(descending, mx.logsumexp(x, axis=-1, keepdims=True), top_p)
    if filters.min_p:
        floor = mx.max(best, axis=-1, keepdims=True) + log_min_p
        if filters.min_tokens_to_keep > 1:
            last = min(filters.min_tokens_to_keep, filters.top_k) - 1
            floor = mx.minimum(floor, descending[..., last : last + 1])
        threshold = floor if threshold is None else mx.maximum(threshold, floor)
    best = best * inverse_temperature if threshold is None else _scaled_above(best, threshold, inverse_temperature)
    chosen = mx.random.categorical(best, key=key)
    return mx.take_along_axis(ids, chosen[..., None], axis=-1).squeeze(-1)


def _scaled_above(x: mx.array, threshold: mx.array, scale: mx.array) -> mx.array:
    return mx.where(x >= threshold, x * scale, -mx.inf)


def _top_p_threshold(descending: mx.array, log_total: mx.array, top_p: mx.array) -> mx.array:
    """The smallest value kept: a token stays while the mass of those before it is below `top_p` (the first always)."""
    mass = mx.exp(descending - log_total)
    before = mx.cumsum(mass, axis=-1, inclusive=False)
    num_kept = mx.sum(before < top_p, axis=-1, keepdims=True)
    return mx.take_along_axis(descending, num_kept - 1, axis=-1)


def _without_top_choices(x: mx.array, threshold: mx.array, special_tokens: tuple[int, ...]) -> mx.array:
    """XTC ("exclude top choices"): of the tokens more probable than `threshold`, keep the least probable one only."""
    probs = mx.softmax(x, axis=-1)
    least = mx.min(mx.where(probs > threshold, probs, mx.inf), axis=-1, keepdims=True)
    removed = probs > least
    if special_tokens:
        ids = mx.array([special_tokens], dtype=mx.uint32)
        removed = mx.put_along_axis(removed, ids, mx.array(False), axis=-1)
    return mx.where(removed, -mx.inf, x)
