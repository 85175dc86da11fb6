from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_repetition_penalty

from mlxgen.sampling import is_resumable


class Counting:
    name = "counting"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls += 1
        return logits

    def state(self) -> Any:
        return {"calls": self.calls}

    def restore(self, state: Any) -> None:
        self.calls = state["calls"]


class Nameless(Counting):
    name = ""


def test_only_a_named_processor_with_state_is_resumable() -> None:
    assert is_resumable(Counting())
    assert not is_resumable(Nameless())
    assert not is_resumable(Counting)
    assert not is_resumable(lambda tokens, logits: logits)
    assert not is_resumable(make_repetition_penalty(1.1))
