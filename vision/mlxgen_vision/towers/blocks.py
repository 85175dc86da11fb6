"""Transformer blocks of any vision tower: run a few at a time, attention in a width MLX has a fused kernel for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import mlx.core as mx

from mlxgen.inputs import Features
from mlxgen_vision.towers.pace import Pace

# Head widths for which MLX has a fused attention kernel on the GPU. Other widths are padded to the next of them with
# zeros, which changes no score and saves the quadratic score matrix.
_FUSED_HEAD_DIMS: Final = (64, 80, 128)


def fused_attention(query: mx.array, key: mx.array, value: mx.array, scale: float) -> mx.array:
    """Softmax attention of all with all over (batch, heads, patches, head_dim)."""
    head_dim = query.shape[-1]
    if mx.default_device() == mx.gpu:
        query, key, value = (pad_heads(x) for x in (query, key, value))
    return mx.fast.scaled_dot_product_attention(query, key, value, scale=scale)[..., :head_dim]


def pad_heads(x: mx.array) -> mx.array:
    """Widen the last axis with zeros to a width MLX has a fused kernel for, if there is one."""
    wider = next((dims for dims in _FUSED_HEAD_DIMS if dims >= x.shape[-1]), x.shape[-1])
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, wider - x.shape[-1])])


def block_flops(num_patches: int, hidden_size: int, mlp_weights: int, window: int) -> float:
    """Floating-point operations of one block: its matrices, and attention over `window` patches."""
    return 2.0 * num_patches * (4 * hidden_size**2 + mlp_weights) + 4.0 * num_patches * window * hidden_size


def run_blocks(
    hidden: mx.array,
    costs: Sequence[float],
    block: Callable[[int, mx.array], tuple[mx.array, Features]],
    merge: Callable[[mx.array], mx.array],
) -> Iterator[Features | None]:
    """Run the blocks step by step, `mx.eval` at the end of each; None after every step but the last, then the features.

    `costs` are the blocks' floating-point operations. `block(i, hidden)` is block i and the features that branch off
    after it, `merge(hidden)` what comes after the last block. A branch or the end counts as one more block: mergers
    cost about half of one.
    """
    pace = Pace()
    features: Features = {}
    pending = 0.0
    began_s = time.perf_counter()
    for number, cost in enumerate(costs):
        if number and not pace.fits(pending + cost):
            yield from _end_of_step(pace, pending, began_s, hidden, features)
            pending, began_s = 0.0, time.perf_counter()
        hidden, branch = block(number, hidden)
        pending += cost
        if branch and not pace.fits(pending + cost):
            yield from _end_of_step(pace, pending, began_s, hidden, features)
            pending, began_s = 0.0, time.perf_counter()
        features |= branch
        pending += cost if branch else 0.0
    if not pace.fits(pending + costs[-1]):
        yield from _end_of_step(pace, pending, began_s, hidden, features)
    features["features"] = merge(hidden)
    mx.eval(features)
    yield features


def _end_of_step(
    pace: Pace, flops: float, began_s: float, hidden: mx.array, features: Features
) -> Iterator[Features | None]:
    mx.eval(hidden, features)
    pace.took(flops, time.perf_counter() - began_s)
    yield None
