"""What a caller may say about sampling, checked before anything runs, and saved without losing a bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from mlxgen.errors import InvalidValueError

SEED_LIMIT: Final = 1 << 64
MAX_CONTEXT_SIZE: Final = 1 << 20
# Below this a reciprocal temperature would overflow float32 for ordinary logits; 0 already means "no randomness".
MIN_TEMPERATURE: Final = 1e-6
MAX_TEMPERATURE: Final = 100.0
MAX_PENALTY: Final = 100.0
# Larger than any logit (so it forces or bans), and still finite when added to one in float16.
MAX_BIAS: Final = 10_000.0


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The names, defaults and order of the filters are those of mlx-lm.

    `temperature` 0 is greedy (the filters then change nothing, the penalties and the bias do). Off are: `top_p` 0 or 1,
    `top_k` 0, `min_p` 0, `xtc_probability` 0, a penalty of None (or 0). `min_p` leaves at least `min_tokens_to_keep`.
    A `*_context_size` is how many of the last ids of prompt and reply its penalty looks at. `logit_bias` maps token
    ids to what is added to their logits. `seed` makes the reply reproducible; None is replaced by a random one with
    `with_seed()` when a reply starts, and that one is saved.

    Treat `logit_bias` as frozen too: it is copied on construction.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidValueError` for the first value outside its limits; `vocab_size` is the width of the logits."""
        self._validate_filters(vocab_size)
        for name in ("repetition", "presence", "frequency"):
            penalty = getattr(self, f"{name}_penalty")
            if penalty is not None:
                low = 0.0 if name == "repetition" else -MAX_PENALTY
                _check_number(f"{name}_penalty", penalty, low, MAX_PENALTY, "leave it out for no penalty")
            size = getattr(self, f"{name}_context_size")
            _check_integer(f"{name}_context_size", size, 1, MAX_CONTEXT_SIZE, "20 is usual")
        self._validate_bias(vocab_size)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, SEED_LIMIT - 1, "leave it out for a random one")

    def _validate_filters(self, vocab_size: int) -> None:
        off = "use 0 to turn it off"
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE, "use 0 for greedy decoding")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise InvalidValueError(
                f"temperature {self.temperature!r} is between 0 and {MIN_TEMPERATURE}; use 0 for greedy decoding"
            )
        _check_number("top_p", self.top_p, 0.0, 1.0, "use 1 to turn it off")
        _check_integer("top_k", self.top_k, 0, vocab_size, off)
        _check_number("min_p", self.min_p, 0.0, 1.0, off)
        _check_integer("min_tokens_to_keep", self.min_tokens_to_keep, 1, vocab_size, "1 is usual")
        _check_number("xtc_probability", self.xtc_probability, 0.0, 1.0, off)
        _check_number("xtc_threshold", self.xtc_threshold, 0.0, 0.5, "0.1 is usual")

    def _validate_bias(self, vocab_size: int) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidValueError(
                f"logit_bias is {type(self.logit_bias).__name__}; give a mapping of token id to bias"
            )
        for token, bias in self.logit_bias.items():
            _check_integer("logit_bias token id", token, 0, vocab_size - 1, "use ids of this model's vocabulary")
            _check_number(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS, "-10000 bans a token, 10000 forces it")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def with_seed(self) -> SamplingParams:
        """These parameters with a seed: their own, or a fresh one from the operating system."""
        if self.seed is not None:
            return self
        return replace(self, seed=int.from_bytes(os.urandom(8), "little"))

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict from which `from_json` makes an equal object (JSON keeps Python's floats exactly)."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.logit_bias is not None:
            data["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return data

    @classmethod
    def from_json(cls, data: Any) -> SamplingParams:
        """The inverse of `to_json`. Missing names take their defaults, unknown ones are refused; validate next."""
        if not isinstance(data, Mapping):
            raise InvalidValueError(f"sampling parameters are {type(data).__name__}; expected an object")
        known = {field.name for field in fields(cls)}
        unknown = sorted(str(name) for name in data if name not in known)
        if unknown:
            raise InvalidValueError(f"unknown sampling parameter {unknown[0]!r}; known are {', '.join(sorted(known))}")
        values = dict(data)
        bias = values.get("logit_bias")
        if bias is not None:
            if not isinstance(bias, Mapping):
                raise InvalidValueError(f"logit_bias is {type(bias).__name__}; expected an object of id to bias")
            values["logit_bias"] = {_token_key(token): value for token, value in bias.items()}
        return cls(**values)


def _token_key(token: Any) -> int:
    text = str(token)
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidValueError(f"logit_bias key {text[:40]!r} isn't a token id; use decimal integers")
    return int(text)


def _check_number(name: str, value: Any, low: float, high: float, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidValueError(f"{name} is {type(value).__name__}; give a number from {low:g} to {high:g}")
    if not low <= value <= high:  # false for NaN too
        raise InvalidValueError(f"{name} is {_short(value)}; it must be from {low:g} to {high:g}, {remedy}")


def _check_integer(name: str, value: Any, low: int, high: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValueError(f"{name} is {type(value).__name__}; give an integer from {low} to {high}")
    if not low <= value <= high:
        raise InvalidValueError(f"{name} is {_short(value)}; it must be from {low} to {high}, {remedy}")


def _short(value: float) -> str:
    # An int of thousands of digits must not make the message unreadable (or refuse to print at all).
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)
