"""Logits processors of the caller's own, and which of them can go on after a stop."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, runtime_checkable

import mlx.core as mx


class LogitsProcessor(Protocol):
    """Changes the logits before sampling; any function of this shape will do (mlx-lm's processors among them).

    `tokens` is uint32 of shape (n,): all ids of prompt and reply, evaluated; `logits` is (1, vocabulary). Returns
    logits of the same shape. It runs after mlxgen's own penalties and bias, once for every sampled token, in order. A
    processor that is no more than a function is *foreign*: it runs, but a reply that uses it can't be saved, because
    nobody can tell what it remembers.
    """

    def __call__(self, tokens: mx.array, logits: mx.array, /) -> mx.array: ...


@runtime_checkable
class ResumableProcessor(Protocol):
    """A processor whose memory can be saved and restored, so that a stopped reply goes on as if it hadn't stopped.

    `name` is stable over versions: the snapshot records it, and a resumed run must be given a processor of the same
    name. `state()` is JSON-able and complete; after `restore(state)` the processor continues exactly as the one that
    was asked. A processor without memory returns None and ignores it.
    """

    name: str

    def __call__(self, tokens: mx.array, logits: mx.array, /) -> mx.array: ...

    def state(self) -> Any: ...

    def restore(self, state: Any, /) -> None: ...


def is_resumable(processor: object) -> TypeGuard[ResumableProcessor]:
    """Whether a reply that uses this processor can be saved: it has a non-empty `name`, `state` and `restore`."""
    if isinstance(processor, type):
        return False
    name = getattr(processor, "name", None)
    return (
        isinstance(name, str)
        and bool(name)
        and callable(processor)
        and callable(getattr(processor, "state", None))
        and callable(getattr(processor, "restore", None))
    )
