"""What the engine's tests share: tiny models of every cache kind, counted, and runs that are compared byte by byte."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tiny import folder

from mlxgen.cache import CacheOptions
from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.events import Event, Finished, Token
from mlxgen.models import Model, load
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.sampling import SamplingParams
from mlxgen.session import Session


@functools.cache
def model(kind: str) -> Model:
    return load(str(folder(kind)))


@dataclass
class CountingForward:
    """Counts the passes and the tokens fed by them; otherwise the model's own forward pass."""

    inner: Any
    lengths: list[int] = field(default_factory=list)

    def __call__(self, ids, *, cache, start, inputs):
        # One token into empty caches: a lazy look at the shapes of the caches (a restore does it), nothing is computed.
        if (ids.shape[0], start) != (1, 0):
            self.lengths.append(int(ids.shape[0]))
        return self.inner(ids, cache=cache, start=start, inputs=inputs)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def counted(kind: str) -> tuple[Model, CountingForward]:
    base = model(kind)
    forward = CountingForward(base.forward)
    return replace(base, forward=forward), forward


@dataclass(frozen=True)
class Setup:
    """A model kind with cache options that together make one cache kind."""

    kind: str
    cache: CacheOptions = CacheOptions()
    step_size: int = 16

    @property
    def session_options(self) -> SessionOptions:
        return SessionOptions(cache=self.cache, prefill_step_size=self.step_size)


SETUPS = {
    "llama": Setup("llama"),
    "gemma3-window": Setup("gemma3"),
    "lfm2": Setup("lfm2"),
    "qwen3_5": Setup("qwen3_5"),
    "mamba2": Setup("mamba2"),
    "falcon_h1-list": Setup("falcon_h1"),
    "ring": Setup("llama", CacheOptions(max_kv_size=24)),
    "quantized": Setup("llama", CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=0)),
    "quantized-later": Setup("llama", CacheOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=45)),
}

NUM_TOKENS = 14
PROMPT = "Where does a stopped train of thought go? It waits."  # longer than gemma3's window of 16
STOP_STRING_NEVER = "\u2603never said\u2603"


def greedy(max_tokens: int = NUM_TOKENS) -> ReplyOptions:
    return ReplyOptions(max_tokens=max_tokens, logprobs=True, ignore_eos=True)


def sampled(max_tokens: int = NUM_TOKENS) -> ReplyOptions:
    return ReplyOptions(
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
        stop=(STOP_STRING_NEVER, "zq\u00e9"),
        sampling=SamplingParams(
            temperature=1.3,
            top_p=0.95,
            top_k=60,
            min_p=0.001,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias={5: 1.5},
            seed=1234,
        ),
    )


@dataclass
class Outcome:
    """What a reply came to, over however many runs: what must be equal, and the usage of each run."""

    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None

    def take(self, events: Iterator[Event]) -> Finished:
        for event in events:
            if isinstance(event, Token):
                self.tokens.append(event)
            elif isinstance(event, Finished):
                self.finished = event
        assert self.finished is not None
        return self.finished

    @property
    def values(self) -> list[Any]:
        return [(t.index, t.id, t.text, t.logprob, t.top_logprobs) for t in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class StopAt(CancelToken):
    """Cancels itself at the n-th checkpoint it is asked at; counts all of them."""

    __slots__ = ("count", "stop_at")

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.count = 0
        self.stop_at = stop_at

    def checkpoint(self) -> None:
        if self.stop_at is not None and self.count >= self.stop_at:
            self.cancel("requested")
        self.count += 1
        if self.reason is not None:
            raise Cancelled(self.reason)


def new_session(setup: Setup, using: Model | None = None) -> Session:
    return Session(using or model(setup.kind), system="Be brief.", options=setup.session_options)
