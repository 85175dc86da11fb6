"""Penalties and logit bias as one value that follows the reply, one step ahead of the host.

Rules as in mlx-lm (`sample_utils`), in this order: bias added; repetition (Keskar et al. 2019, arXiv:1909.05858): the
logit of every token in the window is divided by the penalty if positive, multiplied if negative; presence: subtracted
once for every different token in its window; frequency: subtracted once for every occurrence. A window is the last N
ids of prompt and reply together.

The windows live as counts per token id on the device. Counts are integers, so that adding and removing tokens one by
one gives the very same values as counting the ids afresh: a resumed run can't differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlxgen.errors import InvalidValueError
from mlxgen.sampling.params import SamplingParams
from mlxgen.sampling.sampler import on_gpu

_Apply = Callable[[mx.array, dict[str, mx.array]], mx.array]


class _Window:
    """The last `size` ids and, per token of the vocabulary, how often it is among them (int32, shape (vocabulary,)).

    `recent` holds host integers for ids known at the start and the tokens' own device arrays afterwards: a token leaves
    the window long after it was evaluated, and never has to visit the host for it.
    """

    def __init__(self, size: int, ids: Sequence[int], vocab_size: int) -> None:
        self._size = size
        self._vocab_size = vocab_size
        tail = list(ids[-size:])
        self._recent: deque[int | mx.array] = deque(tail)
        countable = np.array([i for i in tail if i < vocab_size], dtype=np.int64)
        self.counts = mx.array(np.bincount(countable, minlength=vocab_size).astype(np.int32))

    def advance(self, token: mx.array) -> None:
        self._recent.append(token)
        ids, change = token, _COME
        if len(self._recent) > self._size:
            oldest = self._recent.popleft()
            if isinstance(oldest, mx.array):
                ids, change = mx.concatenate([token, oldest]), _COME_AND_GO
            elif oldest < self._vocab_size:
                ids, change = mx.concatenate([token, mx.array([oldest], dtype=token.dtype)]), _COME_AND_GO
        self.counts = self.counts.at[ids].add(change)


_NAMES = ("bias", "repetition", "presence", "frequency")
_COME = mx.array([1], dtype=mx.int32)
_COME_AND_GO = mx.array([1, -1], dtype=mx.int32)


@dataclass(frozen=True)
class _Active:
    """Which parts are in play; what decides the shape of the graph."""

    bias: bool
    repetition: bool
    presence: bool
    frequency: bool


class PenaltyState:
    """Applies the penalties of one reply. Owned by its iterator, used on the model's thread; nothing in it is saved,
    since `rebuild(ids)` restores it exactly.
    """

    def __init__(self, params: SamplingParams, ids: Sequence[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sizes: dict[str, int] = {}
        self._constants: dict[str, mx.array] = {}
        for name in ("repetition", "presence", "frequency"):
            penalty = getattr(params, f"{name}_penalty")
            if penalty:
                self._sizes[name] = getattr(params, f"{name}_context_size")
                self._constants[name] = mx.array(penalty, dtype=mx.float32)
        if params.logit_bias:
            bias = np.zeros(vocab_size, dtype=np.float32)
            for token, value in params.logit_bias.items():
                bias[token] = value
            self._constants["bias"] = mx.array(bias)
        self._apply = _graph(_Active(*(name in self._constants for name in _NAMES)), on_gpu())
        self._windows: dict[int, _Window] = {}
        self.rebuild(ids)

    def rebuild(self, ids: Sequence[int]) -> None:
        """Start over from the ids of prompt and reply known so far; the same as having advanced through them.

        An id at or past the vocabulary (some models' picture placeholders) takes its place in the window and has no
        logit to penalise; a negative one raises `InvalidValueError`.
        """
        sizes = set(self._sizes.values())
        longest = max(sizes, default=0)
        if longest and any(i < 0 for i in ids[-longest:]):
            raise InvalidValueError(f"token id {min(ids[-longest:])} is negative; ids count from 0")
        self._windows = {size: _Window(size, ids, self._vocab_size) for size in sizes}

    def apply(self, logits: mx.array) -> mx.array:
        """The penalised logits, float32 of the same shape (1, vocabulary), lazy; `logits` is left as it is."""
        arrays = dict(self._constants)
        for name, size in self._sizes.items():
            arrays[f"{name}_counts"] = self._windows[size].counts
        return self._apply(logits, arrays)

    def advance(self, token: mx.array) -> None:
        """Take in the newest token: an integer array of shape (1,) that need not be evaluated yet."""
        for window in self._windows.values():
            window.advance(token)


def build_penalties(params: SamplingParams, ids: Sequence[int], vocab_size: int) -> PenaltyState | None:
    """The state for a reply that follows `ids` (prompt, and reply so far), or None when there is nothing to apply.

    `params` must have been validated against the same `vocab_size`.
    """
    if not (params.repetition_penalty or params.presence_penalty or params.frequency_penalty or params.logit_bias):
        return None
    return PenaltyState(params, ids, vocab_size)


@lru_cache(maxsize=16)
def _graph(active: _Active, compiled: bool) -> _Apply:
    def apply(logits: mx.array, arrays: dict[str, mx.array]) -> mx.array:
        x = logits.astype(mx.float32)
        if active.bias:
            x = x + arrays["bias"]
        if active.repetition:
            penalty = arrays["repetition"]
            x = mx.where(arrays["repetition_counts"] > 0, mx.where(x < 0, x * penalty, x / penalty), x)
        if active.presence:
            x = mx.where(arrays["presence_counts"] > 0, x - arrays["presence"], x)
        if active.frequency:
            x = x - arrays["frequency"] * arrays["frequency_counts"].astype(mx.float32)
        return x

    return mx.compile(apply) if compiled else apply
