"""The token after the one that is shown: being sampled, or about to be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxgen.errors import GrammarError
from mlxgen.sequence import Sampled


@dataclass(slots=True)
class Ahead:
    """A token being sampled: its arrays are under way, or evaluated. `host` is set once they were read."""

    token: mx.array
    logprob: mx.array | None = None
    top: tuple[mx.array, mx.array] | None = None
    vector: mx.array | None = None
    host: Sampled | None = None
    memory: list[str] | None = None  # what the custom processors remembered when this had been sampled
    # With constraints: where it was sampled, and its logit there, minus infinity if nothing else was left.
    source: Undrawn | None = None
    score: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        if self.logprob is None and self.vector is None and self.score is None:  # what most runs ask for
            return [self.token]
        return [a for a in (self.token, self.logprob, *(self.top or ()), self.vector, self.score) if a is not None]

    def read(self) -> Sampled:
        """Wait for the arrays and bring them to the host. Raises `GrammarError` if no token had a probability."""
        if self.host is None:
            score: Any = 0.0 if self.score is None else self.score.item()
            if not score > -math.inf:
                raise GrammarError(
                    "none of the tokens that grammar, healing and bans allow has a probability: a logits processor, a "
                    "bias or another of these rules them out; change one of them"
                )
            top = None
            if self.top is not None:
                ids, values = self.top
                id_list: Any = ids.reshape(-1).tolist()
                value_list: Any = values.reshape(-1).tolist()
                top = tuple((int(i), float(v)) for i, v in zip(id_list, value_list, strict=True))
                if self.score is not None:
                    top = tuple(pair for pair in top if pair[1] > -math.inf)
            logprob: Any = None if self.logprob is None else self.logprob.item()
            token: Any = self.token.item()
            self.host = Sampled(token, logprob, top)
        return self.host


@dataclass(slots=True)
class Undrawn:
    """With constraints, the place of the next token: its logits, under way or evaluated. It is sampled at the next
    call, when the token before it is known and has been shown."""

    logits: mx.array
    memory: list[str] | None = None  # what the custom processors remembered after these logits
