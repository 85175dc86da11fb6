"""What a session and a reply can be told, as values that go into the snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxgen.cache import CacheOptions
from mlxgen.decode import DecodeOptions
from mlxgen.errors import InvalidValueError, NotResumableError
from mlxgen.prefill import DEFAULT_STEP_SIZE, MIN_STEP_SIZE
from mlxgen.sampling import LogitsProcessor, SamplingParams
from mlxgen.stop import StopMatcher
from mlxgen.tokenizer import token_ids_checked


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a session's caches are built and its prompts fed; fixed for its life, part of its snapshot.

    `prefill_step_size` is the number of prompt tokens between two checkpoints. With `max_stop_latency_s` the first
    chunk is small, its time is measured, and the chunk size for the rest is chosen so that one chunk takes about that
    long (recorded; two runs may choose differently, hence off by default). `raw`: no chat template, turns are appended
    as they are, special tokens included. `template_options` are passed to the chat template (for instance
    enable_thinking).
    """

    cache: CacheOptions = field(default_factory=CacheOptions)
    prefill_step_size: int = DEFAULT_STEP_SIZE
    max_stop_latency_s: float | None = None

    `prefix_cache`: prompts begin with what the model's prefix cache knows of them, and leave there what they prefill
    (see `prefix_cache`). It changes nothing but the time, so it isn't part of a snapshot. Not used with
    `max_stop_latency_s`, where no two runs cut a prompt alike.
    raw: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        self.cache.validate()
        if not 1 <= self.prefill_step_size < 2**31:
            raise InvalidValueError(
    prefix_cache: bool = False
                f"prefill_step_size is {self.prefill_step_size}; give 1 or more tokens (512 to 4096 is usual)"
            )
        latency = self.max_stop_latency_s
        if latency is not None and not (math.isfinite(latency) and latency > 0):
            raise InvalidValueError(f"max_stop_latency_s is {latency}; give a number of seconds above 0, or None")
        if latency is not None and self.prefill_step_size < MIN_STEP_SIZE:
            raise InvalidValueError(
                f"prefill_step_size {self.prefill_step_size} is below the smallest chunk that max_stop_latency_s may "
                f"choose; give at least {MIN_STEP_SIZE}"
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "cache": self.cache.to_json(),
            "prefill_step_size": self.prefill_step_size,
            "max_stop_latency_s": self.max_stop_latency_s,
            "raw": self.raw,
            "template_options": dict(self.template_options),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SessionOptions:
        rest = {key: value for key, value in data.items() if key != "cache"}
        options = cls(cache=CacheOptions(**data["cache"]), **rest)
        options.validate()
        return options


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How one reply is sampled and when it ends.

    `max_tokens`: None for no limit; 0 prefills only. `stop` are strings: the reply ends before the first of them and
    they aren't shown. `stop_token_ids` end it like the model's own end-of-text tokens, which `ignore_eos` turns off.
    """

    max_tokens: int | None = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    processors: tuple[LogitsProcessor, ...] = ()

    def validate(self, vocab_size: int) -> None:
        self.decode_options(None).validate(vocab_size)
        if self.max_tokens is not None and not 0 <= self.max_tokens < 2**31:
            raise InvalidValueError(f"max_tokens is {self.max_tokens}; give 0 to {2**31 - 1}, or None for no limit")
        StopMatcher(self.stop)  # refuses what can't be matched
        token_ids_checked(self.stop_token_ids, vocab_size)

    def decode_options(self, limit: int | None) -> DecodeOptions:
        """The same for the token iterator; `limit` counts tokens from the start of the reply."""
        return DecodeOptions(
            sampling=self.sampling,
            max_tokens=limit,
            logprobs=self.logprobs or self.top_logprobs > 0,
            top_logprobs=self.top_logprobs,
            processors=self.processors,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON for the journal; processors by name (their states are saved beside it)."""
        return {
            "max_tokens": self.max_tokens,
            "sampling": self.sampling.to_json(),
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            "processors": [getattr(processor, "name", None) for processor in self.processors],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], processors: tuple[LogitsProcessor, ...] = ()) -> ReplyOptions:
        """Raises `NotResumableError` unless `processors` are those of the saved reply, by name and order."""
        names = [getattr(processor, "name", None) for processor in processors]
        if names != list(data["processors"]) or None in names:
            raise NotResumableError(
                f"this reply was sampled with the logits processors {data['processors']}; "
                f"pass the same ones (got {names}) to go on with it"
            )
        return cls(
            max_tokens=data["max_tokens"],
            sampling=SamplingParams.from_json(data["sampling"]),
            stop=tuple(data["stop"]),
            stop_token_ids=tuple(data["stop_token_ids"]),
            ignore_eos=bool(data["ignore_eos"]),
            logprobs=bool(data["logprobs"]),
            top_logprobs=int(data["top_logprobs"]),
            processors=processors,
        )
