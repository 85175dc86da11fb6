"""What a run tells its consumer, in the order it happens. All are plain values; none refers to a live array."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mlxgen.cancellation import Cancelled

FinishReason = Literal["stop", "length", "cancelled"]
SectionKind = Literal["answer", "thinking", "tool_call"]
StopKind = Literal["token", "string", "regex", "callable", "thinking", "grammar"]


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
    penalties and bias, before temperature and filters) are None unless asked for. `section`, too, is None unless
    sections are asked for; a token that opens or closes a section belongs to it. Text that was held back may come with
    a token of another section: where exactly a section begins and ends, its `Section` events say.
    """

    index: int
    id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] | None = None
    section: SectionKind | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """A section of thinking, or a tool call, began or ended. What is in no section is the answer.

    `index` is the token that opened or closed it (one that the prompt left open begins at 0). `char_index` counts in
    the reply's text: what is said in the section stands between its two events' `char_index`; the words that open and
    close it are before and behind that.

    The events that a token brings follow it at once: `Token`, then `Section`, then `ToolCall`. No cancellation comes
    between them; a loop that is left between them isn't told the rest later (`Finished` has all of it). While a token
    may still be taken back (see `Backtrack`), they wait.
    """

    kind: SectionKind
    began: bool
    index: int
    char_index: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The model called a tool. `index` is the token that closed the call.

    `name` and `arguments` are what mlx-lm's parser for this model's format makes of `text` (what stood in the section);
    `id` is the call's own id, where the format has one. A call that can't be parsed has an `error` instead, and no name
    or arguments. A section with several calls gives several events.
    """

    name: str | None
    arguments: dict[str, Any] | None
    index: int
    text: str
    id: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Backtrack:
    """The tokens from `index` on are taken back, since they had become `banned`; others come in their place.

    None of their text was shown: the texts of all `Token` events joined, of those that were taken back too, stay the
    reply's text.
    """

    index: int
    banned: str


@dataclass(frozen=True, slots=True)
class StopHit:
    """What ended a reply, and where. `value`: the token id, the string, the pattern, the callable's name (None if it
    has none), the string that closed the thinking section; None for a grammar.

    `token_index` and `char_index` (in the reply's text) say where it began: for a string or a pattern the beginning of
    the match, for "thinking" that of the closing string; for the others the last token, and the end of the text.
    """

    kind: StopKind
    value: str | int | None
    token_index: int
    char_index: int


@dataclass(frozen=True, slots=True)
class SectionText:
    """What a reply says in one section (without the strings that open and close it)."""

    kind: SectionKind
    text: str


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

    When `finish_reason` is "stop", `stop` says what hit and where (None for a reply that an earlier version of mlxgen
    recorded); `stop_string` and `stop_token` are its value for these kinds. `sections` is `text` by sections, in order,
    and `tool_calls` all calls of the reply, where sections were asked for.
    """

    finish_reason: FinishReason
    cancel_reason: str | None
    text: str
    usage: Usage = field(default_factory=Usage)
    stop_string: str | None = None
    stop_token: int | None = None
    stop: StopHit | None = None
    sections: tuple[SectionText, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()

    def raise_if_cancelled(self) -> None:
        """Raise `Cancelled` if this run was stopped, for callers who want the exception."""
        if self.finish_reason == "cancelled":
            raise Cancelled(self.cancel_reason or "requested")


Event = InputProgress | PrefillProgress | Token | Section | ToolCall | Backtrack | Finished
