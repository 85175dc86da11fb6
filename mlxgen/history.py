"""The conversation as a fold over records: what a journal holds, and what a session is rebuilt from.

A live session changes its history only by applying the very records it appends to the journal, so that what a resumed
session reads is what the live one was. Record types (see docs/snapshot-format.md): session, model, turn, medium, reply,
prompt, plan, pass, tok, mark, finish, undo, rewind, append, edit, point.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlxgen.errors import SnapshotError
from mlxgen.request import ImagePart, MediaOptions, MediaPart, VideoPart
from mlxgen.sequence import PassLog, Sampled
from mlxgen.snapshot.store import Record


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a reply's last run began: after `num_tokens` tokens, with the unseen next one (if it was sampled already)
    and what the custom processors remembered. `num_records` had been written before."""

    num_tokens: int
    pending: Sampled | None
    memory: tuple[Any, ...]
    num_records: int


@dataclass(slots=True)
class Reply:
    """One assistant turn, from the moment its settings are known. `start` is where its tokens begin in `ids`.

    `limit` is the number of tokens at which it ends by length (None: no limit). `marks` are the seams of its text:
    (number of tokens so far, what happened there): "flush" (held text was shown, the reply ended by length), "release"
    (withheld text was let go, the reply went on after a stop string), "silent" (the last token ended the reply and has
    no text), "stops" with the list of stop strings from here on. `banned`: token ids that may not stand at a position
    of the reply, because a banned string began with them there.
    """

    options: dict[str, Any]
    limit: int | None
    first_stops: tuple[str, ...] = ()
    start: int | None = None
    tokens: list[Sampled] = field(default_factory=list)
    marks: list[tuple[int, str, Any]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    num_prompt_tokens: int = 0
    step_size: int | None = None
    resumed: Resumption | None = None
    banned: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_put: int = 0  # how many of the last tokens nobody sampled: words put into the model's mouth

    @property
    def waiting(self) -> list[int]:
        """The ids that token healing took off right before this place: what comes next says them again."""
        marks = [(count, detail) for count, kind, detail in self.marks if kind in ("heal", "mend")]
        return list(marks[-1][1]["ids"]) if marks and marks[-1][0] == len(self.tokens) else []

    @property
    def healed(self) -> list[int]:
        """The ids that token healing took off the end of the prompt."""
        return next((list(detail["ids"]) for _, kind, detail in self.marks if kind == "heal"), [])

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens; the reply is open again. Stop strings in force stay in force."""
        self.num_put = max(0, self.num_put - (len(self.tokens) - num_tokens))
        del self.tokens[num_tokens:]
        later = [mark for mark in self.marks if mark[0] > num_tokens]
        stops = [mark[2] for mark in later if mark[1] == "stops"]
        self.marks = [mark for mark in self.marks if mark[0] <= num_tokens]
        if stops:
            self.marks.append((num_tokens, "stops", stops[-1]))
        self.banned = {position: ids for position, ids in self.banned.items() if position <= num_tokens}
        self.finish = None
        if self.resumed is not None:
            at_start = self.resumed.num_tokens == num_tokens and self.resumed.pending is None
            memory = self.resumed.memory if at_start else ()
            self.resumed = replace(self.resumed, num_tokens=num_tokens, pending=None, memory=memory)

    def copy(self) -> Reply:
        twin = copy.copy(self)
        twin.tokens, twin.marks, twin.banned = list(self.tokens), list(self.marks), dict(self.banned)
        return twin

    @property
    def finished(self) -> bool:
        """Whether it ended by itself (a stop, or its length); a cancelled reply can go on."""
        return self.finish is not None and self.finish["reason"] != "cancelled"

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(slots=True)
class Turn:
    """A user's or system's turn (`parts`: text, or the index of a medium), or the model's (`reply`)."""

    role: str
    parts: list[str | int] = field(default_factory=list)
    reply: Reply | None = None

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a conversation to come back to: after `num_turns` turns, the last of which, if it is a reply, had
    `num_tokens` tokens then. `number` counts the marks that were ever set."""

    number: int
    num_turns: int
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class MediumSource:
    """Where a medium came from. `path` is None for pictures that were passed in memory."""

    kind: str
    name: str
    path: str | None
    source_hash: str
    options: MediaOptions

    def part(self, *, allow_urls: bool) -> MediaPart:
        make = ImagePart if self.kind == "image" else VideoPart
        return make(self.path, replace(self.options, allow_urls=allow_urls))


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """Which media stand in `History.ids`: those with indices `media` in its first `num_tokens` ids.

    `replies` are the half-open ranges of these ids that are earlier replies (placeholders in them stand for nothing).
    The media needn't be of the turns there are now: an undone turn stays in the cache until the next prompt.
    """

    media: tuple[int, ...]
    num_tokens: int
    replies: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class History:
    """Everything a session knows that isn't an array. Owned by the session; survives every stop (it *is* the
    journal)."""

    session: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    media: list[MediumSource] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    num_fed: int = 0  # how many of them are known to have been fed
    passes: PassLog = field(default_factory=PassLog)
    records: list[Record] = field(default_factory=list)
    layout: MediaLayout | None = None  # None: there are no media in `ids`
    laid_out: Reply | None = None  # whose prompt and tokens `ids` are; an undone reply's stay until the next prompt
    points: list[Mark] = field(default_factory=list)  # the marks whose place still exists
    num_points: int = 0  # how many were ever set
    torn: bool = False  # a record was applied by half (an exception of a signal handler): replay the records

    @classmethod
    def replay(cls, records: Iterable[Record]) -> History:
        history = cls()
        for record in records:
            history.apply(record)
        return history

    def fork(self) -> History:
        """The same history for another session; records, tokens and passes are shared, the lists of them are not."""
        twin = copy.copy(self)
        replies = {id(turn.reply): turn.reply.copy() for turn in self.turns if turn.reply is not None}
        if self.laid_out is not None:
            twin.laid_out = replies.get(id(self.laid_out)) or self.laid_out.copy()
        twin.turns = [
            Turn(turn.role, list(turn.parts), None if turn.reply is None else replies[id(turn.reply)])
            for turn in self.turns
        ]
        twin.media, twin.ids, twin.points = list(self.media), list(self.ids), list(self.points)
        twin.records, twin.passes = list(self.records), PassLog(list(self.passes.entries))
        return twin

    @property
    def reply(self) -> Reply | None:
        """The reply in progress, or the last one, if the conversation ends with one."""
        return self.turns[-1].reply if self.turns else None

    def apply(self, record: Record) -> None:
        """Fold one record in. An unknown type is an error: a reader that skipped it would not be where the writer
        was."""
        handler = _HANDLERS.get(record.type)
        if handler is None:
            raise SnapshotError(f"the journal has a record of unknown type {record.type!r}; use a newer mlxgen")
        self.torn = True
        try:
            handler(self, record.data)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError) as error:
            raise SnapshotError(
                f"the journal's {record.type!r} record is malformed ({error}); it can't be used"
            ) from error
        self.records.append(record)
        self.torn = False

    # -- handlers ------------------------------------------------------------------------------------------------

    def _session(self, data: Mapping[str, Any]) -> None:
        self.session = dict(data)

    def _model(self, data: Mapping[str, Any]) -> None:
        self.model = {
            "name": str(data["name"]),
            "source": None if data["source"] is None else str(data["source"]),
            "revision": None if data.get("revision") is None else str(data["revision"]),
            "adapter": None if data["adapter"] is None else str(data["adapter"]),
            "digest": str(data["digest"]),
            "parts": {str(key): str(value) for key, value in data["parts"].items()},
        }

    def _turn(self, data: Mapping[str, Any]) -> None:
        parts = [part if isinstance(part, str) else int(part["medium"]) for part in data["parts"]]
        if any(isinstance(part, int) and not 0 <= part < len(self.media) for part in parts):
            raise ValueError("it names a medium that isn't there")
        self.turns.append(Turn(str(data["role"]), parts))

    def _medium(self, data: Mapping[str, Any]) -> None:
        options = MediaOptions(**data["options"])
        self.media.append(MediumSource(data["kind"], data["name"], data["path"], data["source_hash"], options))

    def _reply(self, data: Mapping[str, Any]) -> None:
        reply = self.reply
        if data["continued"]:
            if reply is None:
                raise SnapshotError("the journal continues a reply that doesn't exist; it is damaged")
            reply.options, reply.limit, reply.finish = dict(data["options"]), data["limit"], None
        else:
            options = dict(data["options"])
            reply = Reply(options, data["limit"], tuple(options["stop"]))
            self.turns.append(Turn("assistant", reply=reply))
        pending = data.get("pending")
        reply.resumed = Resumption(
            len(reply.tokens),
            None if pending is None else _sampled(pending),
            tuple(data.get("memory", ())),
            len(self.records),
        )

    def _prompt(self, data: Mapping[str, Any]) -> None:
        keep = int(data["keep"])
        if not 0 <= keep <= len(self.ids):
            raise ValueError(f"it keeps {keep} of {len(self.ids)} tokens")
        del self.ids[keep:]
        self.ids += [_token_id(token) for token in data["ids"]]
        if keep == self.num_fed + 1:
            self._fed(keep)  # the pass that had sampled the unseen token, now dropped
        self.passes.trim(keep)
        self.num_fed = keep
        reply = self.laid_out = self._open_reply()
        # A reply that goes on after another one in its place was undone: its own tokens end the prompt.
        reply.start = len(self.ids) - len(reply.tokens)
        reply.num_prompt_tokens = reply.start
        if reply.resumed is not None:
            reply.resumed = replace(reply.resumed, pending=None)
        reply.step_size = data.get("step_size")
        media = tuple(int(index) for index in data.get("media", ()))
        replies = tuple((int(start), int(end)) for start, end in data.get("replies", ()))
        self.layout = MediaLayout(media, reply.start, replies) if media else None

    def _plan(self, data: Mapping[str, Any]) -> None:
        self._open_reply().step_size = int(data["step_size"])

    def _pass(self, data: Any) -> None:
        start, count = (int(value) for value in data)
        if not 0 <= start <= self.num_fed < start + count <= len(self.ids):
            raise ValueError(f"tokens {start} to {start + count}, where {self.num_fed} of {len(self.ids)} had been fed")
        self.passes.prefill(start, count)
        self.num_fed = start + count

    def _tok(self, data: Any) -> None:
        sampled = _sampled(data)
        reply, ids = self._open_reply(), self.ids
        if reply is not self.laid_out or not ids:
            raise ValueError("it has no prompt")
        # That it was sampled says that the token before it had been fed.
        self.passes.decode(len(ids) - 1)
        self.num_fed = len(ids)
        ids.append(sampled.id)
        reply.tokens.append(sampled)
        reply.num_put = 0

    def _mark(self, data: Any) -> None:
        count, kind, detail = (list(data) + [None])[:3]
        if not 0 <= int(count) <= len(self._open_reply().tokens):
            raise ValueError(f"it is behind token {count} of a reply's {len(self._open_reply().tokens)}")
        if kind in ("heal", "mend"):
            detail = {"ids": [_token_id(token) for token in detail["ids"]], "text": str(detail["text"])}
        elif kind == "close":
            detail = [_token_id(token) for token in detail]
        self._open_reply().marks.append((int(count), str(kind), detail))

    def _finish(self, data: Mapping[str, Any]) -> None:
        self._open_reply().finish = dict(data)

    def _undo(self, data: Mapping[str, Any]) -> None:
        count = int(data["turns"])
        if not 0 < count <= len(self.turns):
            raise ValueError(f"{count} of {len(self.turns)} turns")
        self._keep_turns(len(self.turns) - count)

    def _rewind(self, data: Mapping[str, Any]) -> None:
        num_turns, num_tokens = int(data["turns"]), data["tokens"]
        if not 0 <= num_turns <= len(self.turns):
            raise ValueError(f"it keeps {num_turns} of {len(self.turns)} turns")
        self._keep_turns(num_turns)
        if num_tokens is None:
            return
        reply, count = self._open_reply(), int(num_tokens)
        if not 0 <= count <= len(reply.tokens):
            raise ValueError(f"it keeps {count} of a reply's {len(reply.tokens)} tokens")
        reply.cut(count)
        self.points = [p for p in self.points if p.num_turns < num_turns or (p.num_tokens or 0) <= count]
        if reply is self.laid_out and reply.start is not None:
            keep, end = int(data["keep"]), reply.start + count
            if not 0 <= keep < end:
                raise ValueError(f"it keeps {keep} tokens in the cache, of {end}")
            del self.ids[end:]
            self._fed(keep)
            self.passes.trim(keep)
            self.num_fed = keep
        banned = data.get("banned")
        if banned is not None:
            reply.banned[count] = (*reply.banned.get(count, ()), _token_id(banned))

    def _fed(self, position: int) -> None:
        """Take note of the pass that sampled the unseen token, where it had run and nothing has said so yet."""
        if position == self.num_fed + 1:
            self.passes.decode(self.num_fed)
            self.num_fed = position
        elif position > self.num_fed:
            raise ValueError(f"{position} tokens fed, where {self.num_fed} are known to be")

    def _append(self, data: Mapping[str, Any]) -> None:
        reply = self._open_reply()
        added = [Sampled(_token_id(token)) for token in data["ids"]]
        if reply is self.laid_out:
            self._fed(int(data["fed"]))
            self.ids += [token.id for token in added]
        reply.tokens += added
        reply.num_put += len(added)
        reply.finish = None
        reply.resumed = Resumption(len(reply.tokens), None, tuple(data.get("memory", ())), len(self.records))

    def _edit(self, data: Mapping[str, Any]) -> None:
        index = int(data["turn"])
        if not 0 <= index < len(self.turns):
            raise ValueError(f"turn {index} of {len(self.turns)}")
        turn = self.turns[index]
        if not data["keep_later"]:
            self._keep_turns(index + 1)
        if turn.reply is None:
            self._turn(data)
            turn.parts = self.turns.pop().parts
        else:
            tokens = [Sampled(_token_id(token)) for token in data["ids"]]
            fresh = Reply(dict(turn.reply.options), turn.reply.limit, tuple(turn.reply.options["stop"]), tokens=tokens)
            fresh.finish = {"reason": "length"}
            turn.reply = fresh
        self.points = [point for point in self.points if point.num_turns <= index]

    def _point(self, data: Mapping[str, Any]) -> None:
        reply = self.reply
        self.points.append(Mark(int(data["number"]), len(self.turns), None if reply is None else len(reply.tokens)))
        self.num_points = int(data["number"]) + 1

    def _keep_turns(self, num_turns: int) -> None:
        del self.turns[num_turns:]
        self.points = [point for point in self.points if point.num_turns <= num_turns]

    def _open_reply(self) -> Reply:
        reply = self.reply
        if reply is None:
            raise SnapshotError("the journal has tokens outside of a reply; it is damaged")
        return reply


_HANDLERS = {
    "session": History._session,
    "model": History._model,
    "turn": History._turn,
    "medium": History._medium,
    "reply": History._reply,
    "prompt": History._prompt,
    "plan": History._plan,
    "pass": History._pass,
    "tok": History._tok,
    "mark": History._mark,
    "finish": History._finish,
    "undo": History._undo,
    "rewind": History._rewind,
    "append": History._append,
    "edit": History._edit,
    "point": History._point,
}


def token_record(token: Sampled) -> Record:
    """The record of a token the user is about to see."""
    return Record("tok", token_data(token))


def token_data(token: Sampled) -> list[Any]:
    """The shortest form that says it: [id], [id, logprob] or [id, logprob, top]."""
    if token.top is not None:
        return [token.id, token.logprob, [list(pair) for pair in token.top]]
    return [token.id] if token.logprob is None else [token.id, token.logprob]


def _sampled(data: Any) -> Sampled:
    if len(data) == 1:
        return Sampled(_token_id(data[0]))
    token, logprob, top = (list(data) + [None])[:3]
    tops = None if top is None else tuple((int(i), float(v)) for i, v in top)
    return Sampled(_token_id(token), None if logprob is None else float(logprob), tops)


def _token_id(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} isn't a token id")
    return value
