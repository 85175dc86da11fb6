"""What decides which tokens may come next: a function of the reply's ids so far, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import mlx.core as mx


@runtime_checkable
class Constraint(Protocol):
    """Rules tokens of a reply out, and may say that the reply is complete.

    Whatever an implementation keeps between two calls only saves time: for the same `reply_ids` it gives the same
    answer, in whatever order it is asked. That is why a stop, a resume, a fork and a rewind need nothing saved of it.
    One iterator uses it at a time, on the model's thread.
    """

    def allowed(self, reply_ids: Sequence[int], /) -> mx.array | None:
        """Which ids may follow the reply's ids so far: bool of shape (1, vocabulary), or None for all of them.

        Raises `GrammarError` when none may, or when the reply so far is none that the constraint allows.
        """
        ...

    def done(self, reply_ids: Sequence[int], /) -> bool:
        """Whether nothing may follow: the reply ends, without an end-of-text token."""
        ...
