"""What one token does to a reply: the event it becomes, whether the reply ends with it, whether it must go again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mlxgen.errors import BannedStringError, SnapshotError, StopConditionError
from mlxgen.events import Section, StopHit, StopKind, Token, ToolCall, TopLogprob
from mlxgen.history import Reply
from mlxgen.models.model import Model
from mlxgen.options import ReplyOptions
from mlxgen.sections import SectionMarkers, ToolText
from mlxgen.sequence import Sampled
from mlxgen.snapshot.store import Record
from mlxgen.steeredtext import BanHit, SteeredText, Steering
from mlxgen.textstream import TextStream
from mlxgen.tokenizer import token_ids_checked

MAX_BACKTRACKS: Final = 1000  # in one run of a reply

Finish = dict[str, Any]  # the data of a `finish` record


@dataclass(slots=True)
class Verdict:
    """The event of a token that is about to be recorded, its marks, how the reply ends if it ends with it (None: it
    goes on), and the events that follow the token's."""

    event: Token
    marks: tuple[Record, ...] = ()
    finish: Finish | None = None
    following: tuple[Section | ToolCall, ...] = ()


class Judge:
    """Judges the tokens of one run of a reply, in order. Owned by the run; everything it knows follows from the reply's
    tokens, marks and options, so nothing of it is saved.

    In this order: a banned string that a token completes takes it (and those before it, from the string's beginning on)
    back; then the reply may end by a stop token, by the stop string or pattern that begins first, by the end of
    thinking, by the callable, by its length. So stop conditions see only text that isn't banned.
    """

    def __init__(
        self, model: Model, reply: Reply, options: ReplyOptions, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._model = model
        self._reply = reply
        self._options = options
        self.limit: int | None = reply.limit
        self._tools = tools
        own = frozenset(options.stop_token_ids)
        self._stop_ids = own if options.ignore_eos else own | model.eos_token_ids
        self._markers = SectionMarkers.of(model.tokenizer) if options.follows_sections else None
        self._num_backtracks = 0
        self.text = rebuild_text(model.tokenizer, reply)

    def rebuild(self) -> None:
        """The text stream anew, after the reply's tokens or marks have changed."""
        self.text = rebuild_text(self._model.tokenizer, self._reply)

    # -- settings ------------------------------------------------------------------------------------------------------

    def steering(self, prompt: Sequence[int]) -> Steering | None:
        """What the text must be steered by from here on, if that is something else than so far; None if it isn't."""
        options, text = self._options, self.text
        current = text.steering if isinstance(text, SteeredText) else Steering()
        opened = current.opened
        if self._markers is not None and not current.sections:
            opened = self._markers.opened_by(prompt, self._model.eos_token_ids)
        wanted = Steering(
            options.stop_regex, options.ban, self._markers is not None, opened if self._markers is not None else False
        )
        if wanted == replace(current, opened=wanted.opened, num_lifted=0):
            return None
        count = len(self._reply.tokens)
        # Where other strings are banned now, what stood in the way of the former ones here may be said again.
        same = wanted.ban == current.ban
        lifted = self._num_lifted(count) if same else len(self._reply.banned.get(count, ()))
        return replace(wanted, num_lifted=lifted)

    def banned_before(self, steering: Steering) -> BanHit | None:
        """A string that is banned by new settings and was said before, in text that nobody has seen yet."""
        text = self.text
        if not text.held or not steering.ban:
            return None
        if not isinstance(text, SteeredText):
            text = SteeredText.rebuild(
                self._model.tokenizer, self._reply.first_stops, self._reply.ids, self._reply.marks
            )
        return text.banned_in_held(steering.ban)

    def banned(self) -> dict[int, tuple[int, ...]]:
        """The ids that may not come at places of the reply that are still empty."""
        count = len(self._reply.tokens)
        found = {place: ids[self._num_lifted(place) :] for place, ids in self._reply.banned.items() if place >= count}
        return {place: ids for place, ids in found.items() if ids}

    def _num_lifted(self, place: int) -> int:
        lifted = self.text.lifted if isinstance(self.text, SteeredText) else (0, 0)
        return lifted[1] if lifted[0] == place else 0

    # -- tokens --------------------------------------------------------------------------------------------------------

    def judge(self, sampled: Sampled, *, forced: bool = False) -> Verdict | BanHit:
        """What `sampled`, the next token, does. A `forced` one can't be taken back.

        Raises `StopConditionError`; the stream must be rebuilt then, as after a `BanHit`.
        """
        text, count = self.text, len(self._reply.tokens) + 1
        carried = text.carried  # let go of when the reply went on; travels with this token
        marks: tuple[Record, ...] = ()
        finish: Finish | None = None
        if sampled.id in self._stop_ids:
            text.skip()
            shown, marks = text.flush(), (_mark(count, "silent"), _mark(count, "flush"))
            finish = {"reason": "stop", "stop_token": sampled.id, **self.hit("token", sampled.id)}
        else:
            step = text.judge(sampled.id) if isinstance(text, SteeredText) and not forced else text.feed(sampled.id)
            if isinstance(step, BanHit):
                return step
            shown = step.text
            if step.stop_hit is not None:
                finish = self._found_in_text()
            elif (ended := self._ended_by_choice(sampled, carried + shown)) is not None:
                finish = ended
            elif self.limit is not None and count >= self.limit:
                finish = {"reason": "length"}
            if finish is not None and step.stop_hit is None:
                marks = (_mark(count, "flush"),)
                shown += text.flush()
        event = self._event(sampled, carried + shown)
        return Verdict(event, marks, finish, self._following() if isinstance(text, SteeredText) else ())

    def _event(self, sampled: Sampled, text: str) -> Token:
        top = None if sampled.top is None else tuple(TopLogprob(id=i, logprob=v) for i, v in sampled.top)
        section = self.text.section if isinstance(self.text, SteeredText) else None
        return Token(len(self._reply.tokens), sampled.id, text, sampled.logprob, top, section)

    def _found_in_text(self) -> Finish:
        hit = self.text.hit
        assert hit is not None
        stop = StopHit(hit.kind, hit.value, hit.token_index, hit.char_index)
        return {"reason": "stop", **({"stop_string": hit.value} if hit.kind == "string" else {}), **_recorded(stop)}

    def _ended_by_choice(self, sampled: Sampled, shown: str) -> Finish | None:
        """How the reply ends by the end of thinking or by the caller's own word, if it does."""
        options, text = self._options, self.text
        if options.stop_after_thinking and isinstance(text, SteeredText):
            ended = text.thinking_ended
            if ended is not None:
                assert self._markers is not None
                stop = StopHit("thinking", self._markers.think_end, text.token_at(ended.char_index), ended.char_index)
                return {"reason": "stop", **_recorded(stop)}
        if options.stop_when is not None and self._asked(sampled, shown):
            return {"reason": "stop", **self.hit("callable", options.stop_when_name)}
        return None

    def _asked(self, sampled: Sampled, shown: str) -> bool:
        ask, text = self._options.stop_when, self.text
        assert ask is not None
        try:
            return bool(ask(text.text + text.held, self._event(sampled, shown)))
        except Exception as error:
            name = self._options.stop_when_name or getattr(ask, "__name__", type(ask).__name__)
            raise StopConditionError(
                f"the stop condition {name!r} raised {type(error).__name__} at token {len(self._reply.tokens)} "
                f"({' '.join(str(error).split())[:200]}); mend it, or go on without it"
            ) from error

    def hit(self, kind: StopKind, value: str | int | None) -> Finish:
        """What a `finish` record says of a stop at the next token."""
        return _recorded(StopHit(kind, value, len(self._reply.tokens), self.text.num_chars))

    def _following(self) -> tuple[Section | ToolCall, ...]:
        assert isinstance(self.text, SteeredText)
        events: list[Section | ToolCall] = []
        for found in self.text.ready():
            if isinstance(found, ToolText):
                events += self.text.parse(found, self._tools)
            else:
                events.append(found)
        return tuple(events)

    def completed(self, verdict: Verdict) -> Verdict:
        """The same for a token after which the grammar lets nothing follow."""
        if verdict.finish is not None and verdict.finish["reason"] == "stop":
            return verdict
        shown = self.text.flush()
        stop = StopHit("grammar", None, len(self._reply.tokens), self.text.num_chars)
        event = replace(verdict.event, text=verdict.event.text + shown)
        following = self._following() if isinstance(self.text, SteeredText) else ()
        return Verdict(
            event,
            (_mark(len(self._reply.tokens) + 1, "flush"),),
            {"reason": "stop", **_recorded(stop)},
            verdict.following + following,
        )

    # -- what isn't the model's choice ---------------------------------------------------------------------------------

    @property
    def forces(self) -> bool:
        """Whether `forced` needs asking."""
        return self._options.thinking_budget is not None or self._closing() is not None

    def forced(self) -> int | None:
        """The token that must come next, whatever the model would say: one that closes thinking; None if any may."""
        count, text = len(self._reply.tokens), self.text
        begun = self._closing()
        if begun is not None and begun[0] <= count < begun[0] + len(begun[1]):
            return begun[1][count - begun[0]]
        budget = self._options.thinking_budget
        if budget is None or self._markers is None or not isinstance(text, SteeredText):
            return None
        # A character is not cut in two: it has at most three more tokens.
        if not text.thinking or text.num_thinking < budget or text.pending:
            return None
        return self._markers.think_end_ids[0]

    def closing_mark(self) -> tuple[Record, ...]:
        """What is recorded with the first of the tokens that close a thinking section; nothing for the others."""
        count, begun = len(self._reply.tokens), self._closing()
        if begun is not None and begun[0] <= count < begun[0] + len(begun[1]):
            return ()
        assert self._markers is not None
        # Its place is behind the first of them, so that going back to before it takes it away.
        return (_mark(count + 1, "close", list(self._markers.think_end_ids)),)

    def _closing(self) -> tuple[int, list[int]] | None:
        """Where the last closing of a thinking section began, and its ids."""
        for count, kind, detail in reversed(self._reply.marks):
            if kind == "close":
                return count - 1, token_ids_checked(_closing_ids(detail), self._model.vocab_size)
        return None

    def first_to_go(self, hit: BanHit) -> int:
        """The first token to be taken back: one that was put there stays, and the next one goes."""
        index = hit.index
        while self.closes_thinking(index):
            index += 1
        return index

    def closes_thinking(self, index: int) -> bool:
        """Whether token number `index` is one that was put there to close a thinking section."""
        marks = self._reply.marks
        closings = [(count - 1, len(_closing_ids(detail))) for count, kind, detail in marks if kind == "close"]
        return any(begun <= index < begun + num_tokens for begun, num_tokens in closings)

    def check_backtrack(self, hit: BanHit, index: int, token: int) -> None:
        """Raise `BannedStringError` where going back can't help."""
        self._num_backtracks += 1
        if self._num_backtracks > MAX_BACKTRACKS:
            raise BannedStringError(
                f"the reply has gone back {MAX_BACKTRACKS} times for banned strings, the last time for {hit.banned!r} "
                f"at token {index}; ban less, or continue_() to try on"
            )
        banned = {*self.banned().get(index, ()), token}
        if len(banned) >= self._model.vocab_size:
            raise BannedStringError(
                f"the banned strings rule out every token at token {index} (the last one for {hit.banned!r}); ban less"
            )


def rebuild_text(tokenizer: Any, reply: Reply) -> TextStream:
    """The text stream of a reply as its tokens and marks say."""
    kind = SteeredText if any(mark[1] == "steer" for mark in reply.marks) else TextStream
    return kind.rebuild(tokenizer, reply.first_stops, reply.ids, reply.marks)


def stop_of(finish: Mapping[str, Any]) -> StopHit | None:
    """The `StopHit` that a `finish` record has."""
    data = finish.get("hit")
    try:
        return None if data is None else StopHit(data["kind"], data["value"], int(data["token"]), int(data["char"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SnapshotError(f"the journal's 'finish' record is malformed ({error}); it can't be used") from error


def _recorded(stop: StopHit) -> Finish:
    return {"hit": {"kind": stop.kind, "value": stop.value, "token": stop.token_index, "char": stop.char_index}}


def _closing_ids(detail: Any) -> list[Any]:
    if not isinstance(detail, list):
        raise SnapshotError(f"the journal's 'close' mark has {detail!r} for token ids; it can't be used")
    return detail


def _mark(count: int, kind: str, *detail: Any) -> Record:
    return Record("mark", [count, kind, *detail])
