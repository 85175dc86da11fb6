"""What a session and a reply can be told, as values that go into the snapshot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxgen.bans import BanList
from mlxgen.cache import CacheOptions
from mlxgen.constraints import Constraint, Grammar, healing_at_end
from mlxgen.decode import DecodeOptions
from mlxgen.errors import InvalidValueError, NotResumableError, UnsupportedError
from mlxgen.events import Token
from mlxgen.models.model import Model
from mlxgen.prefill import DEFAULT_STEP_SIZE, MIN_STEP_SIZE
from mlxgen.sampling import LogitsProcessor, SamplingParams, is_resumable
from mlxgen.stop import StopMatcher
from mlxgen.stop_regex import check_patterns
from mlxgen.tokenizer import token_ids_checked


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a session's caches are built and its prompts fed; fixed for its life, part of its snapshot.

    `prefill_step_size` is the number of prompt tokens between two checkpoints. With `max_stop_latency_s` the first
    chunk is small, its time is measured, and the chunk size for the rest is chosen so that one chunk takes about that
    long (recorded; two runs may choose differently, hence off by default). `raw`: no chat template, turns are appended
    as they are, special tokens included. `template_options` are passed to the chat template (for instance
    enable_thinking).

    `prefix_cache`: prompts begin with what the model's prefix cache knows of them, and leave there what they prefill
    (see `prefix_cache`). It changes nothing but the time, so it isn't part of a snapshot. Not used with
    `max_stop_latency_s`, where no two runs cut a prompt alike.
    """

    cache: CacheOptions = field(default_factory=CacheOptions)
    prefill_step_size: int = DEFAULT_STEP_SIZE
    max_stop_latency_s: float | None = None
    raw: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)
    prefix_cache: bool = True

    def validate(self) -> None:
        self.cache.validate()
        if type(self.prefill_step_size) is not int or not 1 <= self.prefill_step_size < 2**31:
            raise InvalidValueError(
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


StopWhen = Callable[[str, Token], bool]
"""Asked after each token, with the reply's text so far (what is held back included) and the token's event: whether the
reply ends there."""


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How one reply is sampled and when it ends.

    `max_tokens`: None for no limit; 0 prefills only. `stop` are strings: the reply ends before the first of them and
    they aren't shown. `stop_token_ids` end it like the model's own end-of-text tokens, which `ignore_eos` turns off.
    `grammar`: what the whole reply must look like. `heal`: where the prompt ends in raw text (or in words put into the
    model's mouth), its last tokens are sampled again, so that a word which was cut there goes on naturally.

    `stop_regex` are patterns (of the `regex` package) that end the reply like stop strings: before the match, once
    there is one (see `stop_regex.RegexStops` for what `$` sees and how much is held back). `stop_when` is a function of
    the caller's: see `StopWhen`. A run with one can be saved only if it has a `name`; `ResumeOptions.stop_when` brings
    it back. `stop_after_thinking` ends the reply with the token that closes a thinking section.

    `ban` are strings the reply must not say (upper and lower case differ): where one is complete, the tokens from its
    beginning on are taken back (`Backtrack`) and its first token may not come there. `sections` gives `Section` and
    `ToolCall` events and says of every token which section it is of. `thinking_budget`: after so many tokens of
    thinking (over the whole reply) the section is closed with the model's own closing tokens, and the reply goes on.
    """

    max_tokens: int | None = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    processors: tuple[LogitsProcessor, ...] = ()
    grammar: Grammar | None = None
    heal: bool = False
    stop_regex: tuple[str, ...] = ()
    stop_when: StopWhen | None = None
    stop_after_thinking: bool = False
    ban: tuple[str, ...] = ()
    sections: bool = False
    thinking_budget: int | None = None

    @property
    def follows_sections(self) -> bool:
        """Whether something that was asked for needs to know about sections."""
        return self.sections or self.stop_after_thinking or self.thinking_budget is not None

    @property
    def stop_when_name(self) -> str | None:
        """The name under which a resumed run must be given its `stop_when`; None for one without a name."""
        name = getattr(self.stop_when, "name", None)
        return name if isinstance(name, str) and name else None

    def validate(self, vocab_size: int, model: Model | None = None) -> None:
        """Raise for what can't be; with `model`, the grammar is compiled for it, too (see `Grammar.validate`)."""
        self.decode_options(None).validate(vocab_size)
        if self.max_tokens is not None and not (type(self.max_tokens) is int and 0 <= self.max_tokens < 2**31):
            raise InvalidValueError(f"max_tokens is {self.max_tokens}; give 0 to {2**31 - 1}, or None for no limit")
        StopMatcher(self.stop)  # refuses what can't be matched
        token_ids_checked(self.stop_token_ids, vocab_size)
        check_patterns(self.stop_regex)
        BanList(self.ban)
        self._validate_steering(model)
        if self.grammar is not None and self.heal:
            raise InvalidValueError(
                "heal lets the reply begin with the end of the prompt, which the grammar knows nothing of; leave one "
                "of the two out"
            )
        if self.grammar is not None and self.ignore_eos:
            raise InvalidValueError(
                "a reply with a grammar ends where the grammar says, or where it may by the end-of-text token, which "
                "ignore_eos turns off; leave one of the two out"
            )
        if self.grammar is not None and model is not None:
            self.grammar.validate(model.tokenizer, model.vocab_size, model.eos_token_ids)
        if self.heal and model is not None:
            healing_at_end(model.tokenizer, ())  # refuses a tokenizer whose tokens aren't strings of bytes

    def _validate_steering(self, model: Model | None) -> None:
        if self.ban and any(map(is_resumable, self.processors)):
            raise UnsupportedError(
                "banned strings take tokens back, and a logits processor with a state of its own can't go back with "
                "them; leave one of the two out"
            )
        budget = self.thinking_budget
        if budget is not None and not (type(budget) is int and 0 <= budget < 2**31):
            raise InvalidValueError(f"thinking_budget is {budget}; give 0 to {2**31 - 1} tokens, or None for no limit")
        asked = "stop_after_thinking" if self.stop_after_thinking else "thinking_budget" if budget is not None else None
        if asked and model is not None and not getattr(model.tokenizer, "has_thinking", False):
            raise InvalidValueError(
                f"{asked} is set, and {model.name} has no thinking sections (its vocabulary has no tokens that open "
                "and close them); leave it out"
            )

    def require_resumable(self) -> None:
        """Raise `NotResumableError` naming what can't be saved; to be called before anything runs."""
        self.decode_options(None).require_resumable()
        if self.stop_when is not None and self.stop_when_name is None:
            raise NotResumableError(
                "stop_when has no name, so this run can't be saved and resumed; give the function an attribute `name`, "
                "or don't ask for a snapshot"
            )

    def decode_options(self, limit: int | None, constraints: tuple[Constraint, ...] = ()) -> DecodeOptions:
        """The same for the token iterator; `limit` counts tokens from the start of the reply.

        The grammar is among the constraints, after those given here: `bound(model)` compiles it.
        """
        return DecodeOptions(
            sampling=self.sampling,
            max_tokens=limit,
            logprobs=self.logprobs or self.top_logprobs > 0,
            top_logprobs=self.top_logprobs,
            processors=self.processors,
            constraints=constraints if self.grammar is None else (*constraints, self.grammar),
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
            "grammar": None if self.grammar is None else self.grammar.to_json(),
            "heal": self.heal,
            "stop_regex": list(self.stop_regex),
            "stop_when": None if self.stop_when is None else self.stop_when_name or "",
            "stop_after_thinking": self.stop_after_thinking,
            "ban": list(self.ban),
            "sections": self.sections,
            "thinking_budget": self.thinking_budget,
        }

    @classmethod
    def from_json(
        cls,
        data: Mapping[str, Any],
        processors: tuple[LogitsProcessor, ...] = (),
        stop_when: StopWhen | None = None,
    ) -> ReplyOptions:
        """Raises `NotResumableError` unless `processors` are those of the saved reply, by name and order, and
        `stop_when` is the one it had, by name."""
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
            # Journals of before there were grammars don't have these.
            grammar=None if data.get("grammar") is None else Grammar.from_json(data["grammar"]),
            heal=bool(data.get("heal", False)),
            stop_regex=tuple(data.get("stop_regex", ())),
            stop_when=_same_stop_when(data.get("stop_when"), stop_when),
            stop_after_thinking=bool(data.get("stop_after_thinking", False)),
            ban=tuple(data.get("ban", ())),
            sections=bool(data.get("sections", False)),
            thinking_budget=None if data.get("thinking_budget") is None else int(data["thinking_budget"]),
        )


def _same_stop_when(name: Any, given: StopWhen | None) -> StopWhen | None:
    """The callable of a saved reply that had one by this name (None: it had none; "": one without a name)."""
    found = getattr(given, "name", None)
    if name is None and given is None:
        return None
    if not name or name != found:
        had = "none" if name is None else "one without a name" if name == "" else repr(name)
        raise NotResumableError(
            f"this reply was to end by the stop condition {had}; pass the same one as stop_when (got "
            f"{'none' if given is None else repr(found)}) to go on with it"
        )
    return given
