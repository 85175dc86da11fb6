"""What a run tells its consumer, in the order it happens. All are plain values; none refers to a live array."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mlxgen.cancellation import Cancelled

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class InputProgress:
    """One image or frame was prepared, or encoded. `index` counts from 0; no event for work that was already done."""

    kind: Literal["image", "frame"]
    phase: Literal["prepare", "encode"]
    index: int
    total: int


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of `total` prompt tokens are in the cache (tokens reused from before count as done)."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token. `index` counts from the start of the reply over all interruptions.

    `text` is what became certain with this token: often empty while a character or a possible stop string is held back,
    and then carried by a later token. `logprob` and `top_logprobs` (natural logarithm, of the distribution after
    penalties and bias, before temperature and filters) are None unless asked for.
    """

    index: int
    id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What *this* call did (a resumed run counts its own work only). Times in seconds, memory in bytes."""

    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    prompt_tps: float = 0.0
    generation_tps: float = 0.0
    time_to_first_token_s: float | None = None
    peak_memory_bytes: int = 0
    images_prepared: int = 0
    images_encoded: int = 0
    frames_prepared: int = 0
    frames_encoded: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every run. `text` is the whole reply as shown so far, over all interruptions.

    `stop_string` or `stop_token` says which one hit when `finish_reason` is "stop".
    """

    finish_reason: FinishReason
    cancel_reason: str | None
    text: str
    usage: Usage = field(default_factory=Usage)
    stop_string: str | None = None
    stop_token: int | None = None

    def raise_if_cancelled(self) -> None:
        """Raise `Cancelled` if this run was stopped, for callers who want the exception."""
        if self.finish_reason == "cancelled":
            raise Cancelled(self.cancel_reason or "requested")


Event = InputProgress | PrefillProgress | Token | Finished
