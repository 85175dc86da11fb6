"""A conversation with one model: add a turn, stream the reply, stop it anywhere, go on or ask something else."""

from __future__ import annotations

import copy
import json
import os
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import GeneratorType
from typing import Any, cast

from mlxgen.branches import Siblings
from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.conversation import checked_text
from mlxgen.decode import processor_memory
from mlxgen.errors import InvalidValueError, MediaError, MlxgenError, SessionBusyError, SnapshotError
from mlxgen.events import Event, Finished, InputProgress, Usage
from mlxgen.history import History, Mark, Reply, Turn, token_data
from mlxgen.inputs import PreparedMedium
from mlxgen.judge import rebuild_text
from mlxgen.models.memory import available_bytes
from mlxgen.models.model import Model
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.owner import last_event, stream_from_owner
from mlxgen.persist import AutosavePolicy, Keeper
from mlxgen.positions import Place, Score, ids_of, place_of_mark, place_of_token, put, reopen, rewind, score
from mlxgen.preparation import require_vision
from mlxgen.reply import ReplyRun, finished_event, media_events
from mlxgen.request import ImagePart, Part, VideoPart
from mlxgen.sampling import is_resumable
from mlxgen.sequence import Sampled, TokenSequence
from mlxgen.snapshot.store import Record, SnapshotStore
from mlxgen.state import SessionState

DEFAULT_REPLY = ReplyOptions()


class Session:
    """One conversation. Independent of every other on the same model (no request state lives on the model).

    Owned by one consumer; used by one thread at a time (a call that finds another thread inside raises
    `SessionBusyError`). At every moment between two events the session is whole: its ledger, caches and text agree,
    and after any stop, error or abandoned loop the next call goes on from there. What survives the process is what
    `save` or autosave wrote.
    """

    def __init__(self, model: Model, *, system: str | None = None, options: SessionOptions = SessionOptions()) -> None:
        options.validate()
        self.state = SessionState(model, options)
        self._keeper: Keeper | None = None
        self._active: Generator[Event] | Generator[InputProgress] | None = None
        self._reply_run: ReplyRun | None = None
        self._siblings: Siblings | None = None
        self.notes: tuple[str, ...] = ()
        self.state.record(
            "session", {"options": options.to_json(), "created": datetime.now().isoformat(timespec="seconds")}
        )
        if system is not None:
            if options.raw:
                raise InvalidValueError("a raw session has no chat template, so it can't have a system prompt")
            self.state.record("turn", {"role": "system", "parts": [checked_text(system, "the system prompt")]})

    @classmethod
    def _restored(cls, model: Model, options: SessionOptions, history: History) -> Session:
        """A session around a replayed history; the caller restores sequence and media."""
        session = cls(model, options=options)
        session.state.history = history
        session.state.sources = [None] * len(history.media)
        return session

    # -- what it knows -----------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        return self.state.model

    @property
    def options(self) -> SessionOptions:
        return self.state.options

    @property
    def history(self) -> History:
        return self.state.history

    @property
    def media(self) -> list[PreparedMedium]:
        return self.state.media

    @property
    def sequence(self) -> TokenSequence:
        return self.state.sequence

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self.history.turns)

    @property
    def ledger(self) -> list[int]:
        """The token ids in the cache, in order."""
        return self.sequence.ledger

    @property
    def unfinished(self) -> bool:
        """Whether a reply was begun and has neither ended by itself nor been followed by another turn."""
        return self.state.unfinished

    @property
    def position(self) -> int:
        """How many tokens the current (or last) reply has."""
        reply = self.history.reply
        return 0 if reply is None else len(reply.tokens)

    @property
    def reply_text(self) -> str:
        """What the user has seen of the current (or last) reply."""
        reply = self.history.reply
        return "" if reply is None else rebuild_text(self.model.tokenizer, reply).text

    @property
    def last_finished(self) -> Finished | None:
        """The last event of the last reply if it has ended by itself, for showing it again; computes nothing."""
        reply = self.history.reply
        if reply is None or not reply.finished:
            return None
        text, usage = rebuild_text(self.model.tokenizer, reply), Usage(prompt_tokens=reply.num_prompt_tokens)
        return finished_event(reply, text, usage, self.options.template_options.get("tools"))

    @property
    def snapshot_path(self) -> Path | None:
        return None if self._keeper is None else self._keeper.path

    @property
    def warnings(self) -> tuple[str, ...]:
        """What went wrong while autosaving (a full disk, for instance), each said once. The generation goes on."""
        return () if self._keeper is None else tuple(self._keeper.warnings)

    # -- turns ----------------------------------------------------------------------------------------------------

    def add(self, prompt: str | Sequence[Part], *, role: str = "user") -> None:
        """Add a turn without asking for a reply yet; text and media in reading order."""
        if not isinstance(prompt, Iterable):
            raise InvalidValueError(f"a turn is text, or a list of text and media, not {type(prompt).__name__}")
        parts: tuple[Part, ...] = (prompt,) if isinstance(prompt, str) else tuple(prompt)
        if role not in ("user", "system", "tool"):
            raise InvalidValueError(f"role {role!r}; give user, system or tool (the model's turns come from stream())")
        self._close_active()
        for part in parts:
            if isinstance(part, str):
                checked_text(part, "the text")
            elif isinstance(part, ImagePart | VideoPart):
                require_vision(self.model)
            else:
                raise InvalidValueError(
                    f"a turn has a part of {type(part).__name__}; give strings, ImagePart and VideoPart"
                )
        data: list[str | dict[str, int]] = []
        for part in parts:
            if isinstance(part, str):
                data.append(part)
            else:
                data.append({"medium": self.state.add_medium(part)})
        self.state.record("turn", {"role": role, "parts": data})

    def undo(self) -> None:
        """Take back the last user turn and the reply to it, if there is one. Tokens in the cache are reused later."""
        self._close_active()
        turns = self.history.turns
        last = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=None)
        if last is None:
            raise InvalidValueError("there is no turn to take back")
        self.state.record("undo", {"turns": len(turns) - last})
        self.state.reply_options = None

    def drop_reply(self) -> None:
        """Take back the last reply but keep the turn it answers, so that `stream()` answers it again."""
        self._close_active()
        if self.history.reply is None:
            raise InvalidValueError("the conversation doesn't end with a reply, so there is none to drop")
        self.state.record("undo", {"turns": 1})
        self.state.reply_options = None

    # -- replies ----------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[Part] | None = None,
        *,
        reply: ReplyOptions = DEFAULT_REPLY,
        cancel: CancelToken = NEVER,
    ) -> Iterator[Event]:
        """Add `prompt` as the user's turn (None: reply to the turns there are) and stream the model's reply.

        The first event comes after the turn was added; an invalid option raises before that and changes nothing. A
        token that is already cancelled runs nothing: the turn stays and the only event is `Finished`.
        """
        reply.validate(self.model.vocab_size, self.model)
        self._require_resumable(reply)
        self._close_active()
        if prompt is not None:
            self.add(prompt)
        if not any(turn.role == "user" for turn in self.history.turns):
            raise InvalidValueError("there is nothing to reply to: add a user turn first")
        last = self.history.reply
        if last is not None and last.tokens:
            raise InvalidValueError("the conversation ends with a reply: continue_() it, or give the next prompt")
        if last is not None:
            self.state.record("undo", {"turns": 1})  # it was stopped before its first token: this one takes its place
        return self._start(reply, continued=False, limit=reply.max_tokens, cancel=cancel, added=prompt is not None)

    def prepare_media(self, *, cancel: CancelToken = NEVER) -> Iterator[InputProgress]:
        """Prepare and encode the media of the turns there are, without a reply (prepare tonight, generate tomorrow).

        Raises `Cancelled` at a checkpoint; what was finished stays, here and in the snapshot, and a second call goes
        on with the rest.
        """
        self._close_active()
        self._active = events = self._prepare_media(cancel)
        return events

    def _prepare_media(self, cancel: CancelToken) -> Generator[InputProgress]:
        try:
            yield from media_events(self.state, cancel)
        finally:
            self._run_ended()

    def continue_(self, *, reply: ReplyOptions | None = None, cancel: CancelToken = NEVER) -> Iterator[Event]:
        """Go on with the same reply, wherever it was stopped: in the media, the prompt or the text.

        After a cancelled run the reply gets the tokens it still lacks; after one that ended by itself (max_tokens, a
        stop string), or with options given here, `max_tokens` more. Text that a stop string withheld appears now.
        """
        self._close_active()
        current = self.history.reply
        if current is None:
            raise InvalidValueError("there is no reply to go on with; use stream() for a new one")
        if reply is None:
            reply = self.reply_options(current)
            limit = current.limit
            if current.finished and reply.max_tokens is not None:
                limit = len(current.tokens) + reply.max_tokens
        else:
            reply.validate(self.model.vocab_size, self.model)
            self._require_resumable(reply)
            limit = None if reply.max_tokens is None else len(current.tokens) + reply.max_tokens
        return self._start(reply, continued=True, limit=limit, cancel=cancel)

    def send(
        self,
        prompt: str | Sequence[Part] | None = None,
        *,
        reply: ReplyOptions = DEFAULT_REPLY,
        cancel: CancelToken = NEVER,
    ) -> Finished:
        """Like `stream`, but wait for the end and return the last event (its `text` is the whole reply)."""
        return last_event(self.stream(prompt, reply=reply, cancel=cancel))

    def astream(
        self,
        prompt: str | Sequence[Part] | None = None,
        *,
        reply: ReplyOptions = DEFAULT_REPLY,
        cancel: CancelToken = NEVER,
    ) -> AsyncGenerator[Event, None]:
        """`stream` for asyncio: the work runs on the model's own thread, events arrive in the task's loop.

        Cancelling the task, or closing the generator, cancels the work and *waits* for the unit in flight; nothing runs
        on after that returns. (A loop that is left early closes it at once inside `async with contextlib.aclosing`.)
        """
        # Not an async generator around another: closing the outer one would leave the inner one to the collector.
        return stream_from_owner(
            self.model, lambda token: self.stream(prompt, reply=reply, cancel=token), cancel=cancel
        )

    def acontinue(
        self, *, reply: ReplyOptions | None = None, cancel: CancelToken = NEVER
    ) -> AsyncGenerator[Event, None]:
        """`continue_` for asyncio; see `astream`."""
        return stream_from_owner(self.model, lambda token: self.continue_(reply=reply, cancel=token), cancel=cancel)

    def _require_resumable(self, reply: ReplyOptions) -> None:
        if self._keeper is not None:
            reply.require_resumable()

    def _start(
        self, reply: ReplyOptions, *, continued: bool, limit: int | None, added: bool = False, cancel: CancelToken
    ) -> Iterator[Event]:
        reply = self._record_reply(reply, continued=continued, limit=limit)
        self._reply_run = run = ReplyRun(self.state, reply, cancel)
        self._active = events = self._run(run, added)
        return events

    def _record_reply(self, reply: ReplyOptions, *, continued: bool, limit: int | None) -> ReplyOptions:
        """Begin or go on with a reply; its options with their seed settled."""
        sampling = reply.sampling if reply.sampling.greedy else reply.sampling.with_seed()
        reply = replace(reply, sampling=sampling)
        current = self.history.reply
        if continued and current is not None:
            self._let_go(current, reply)
        data: dict[str, Any] = {"continued": continued, "options": reply.to_json(), "limit": limit}
        self.state.reply_options = reply
        memory = [json.loads(processor_memory(processor)) for processor in reply.processors if is_resumable(processor)]
        if memory:
            data["memory"] = memory
        pending = self._pending() if continued and self.history.laid_out is current else None
        if pending is not None:
            data["pending"] = token_data(pending)
        self.state.record("reply", data)
        return reply

    def _pending(self) -> Sampled | None:
        """The unseen token: sampled with the options the reply had so far, it is its next one with any options."""
        ahead_by = len(self.sequence.ids) - len(self.history.ids)
        return self.sequence.ahead if ahead_by == 0 else self.sequence.last if ahead_by == 1 else None

    def _let_go(self, current: Reply, reply: ReplyOptions) -> None:
        """Mark that a reply goes on after a stop string, or with other stop strings: text may be let go of."""
        count = len(current.tokens)
        if current.finish is not None and current.finish.get("stop_string") is not None:
            stream = rebuild_text(self.model.tokenizer, current)
            while stream.stop_hit is not None:
                stream.release()
                self.state.record("mark", [count, "release"])
        if list(reply.stop) != list(current.options["stop"]):
            self.state.record("mark", [count, "stops", list(reply.stop)])

    def reply_options(self, reply: Reply) -> ReplyOptions:
        """The options a reply was (last) run with; custom processors are those this session was given."""
        if self.state.reply_options is not None and reply is self.history.reply:
            return self.state.reply_options  # with processors that may be foreign: in memory they go on
        return ReplyOptions.from_json(reply.options)

    # -- positions ---------------------------------------------------------------------------------------------------

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The marks whose place still exists, in the order they were set; part of the snapshot."""
        return tuple(self.history.points)

    def mark(self) -> Mark:
        """Remember this place, to `rewind` to it. May be called between two events of a running reply."""
        self._settle_active()
        self.state.record("point", {"number": self.history.num_points})
        self.sequence.mark()
        return self.history.points[-1]

    def rewind(self, to: Mark | None = None, *, num_turns: int | None = None, num_tokens: int | None = None) -> None:
        """Make the conversation end at an earlier place: a mark, after so many turns, or after so many of its token ids
        (which must be the end of a reply, or inside one); with none of them, before the last reply.

        Costs no forward pass. The next run feeds what is new, and where a cache can't be trimmed (sliding window past
        its end, recurrent state) runs the passes since its last state mark again. A running reply is stopped first. A
        reply that was cut goes on with `continue_()`. Raises `InvalidValueError` for a place that doesn't exist and
        changes nothing then.
        """
        if sum(given is not None for given in (to, num_turns, num_tokens)) > 1:
            raise InvalidValueError("rewind() takes one place: a mark, num_turns or num_tokens")
        self._close_active()
        state = self.state
        if to is not None:
            place = place_of_mark(state, to)
        elif num_turns is not None:
            place = Place(num_turns)
        elif num_tokens is not None:
            place = place_of_token(state, num_tokens)
        else:
            if self.history.reply is None:
                raise InvalidValueError("the conversation doesn't end with a reply; say where to rewind to")
            place = Place(len(self.history.turns) - 1)
        self._require_processors_allow(place)
        rewind(state, place)

    def _require_processors_allow(self, place: Place) -> None:
        """A processor of the user's own remembers where it is now, and what it was when the last run began (unless a
        token was sampled ahead then, which it had seen); nothing between."""
        options, reply = self.state.reply_options, self.history.reply
        if options is None or reply is None or place.num_tokens is None or place.num_turns != len(self.history.turns):
            return
        if place.num_tokens == len(reply.tokens) or not any(map(is_resumable, options.processors)):
            return
        resumed = reply.resumed
        known = resumed is not None and resumed.num_tokens == place.num_tokens and resumed.pending is None
        if resumed is None or not known or not resumed.memory:
            raise InvalidValueError(
                f"can't rewind to token {place.num_tokens} of this reply: its custom logits processors don't know what "
                "they were there; rewind to where the reply began, or to a turn"
            )
        for processor, memory in zip(filter(is_resumable, options.processors), resumed.memory, strict=True):
            processor.restore(memory)

    def fork(self) -> Session:
        """An independent session that has come to exactly the same place; sampling goes on the same way in both.

        Runs nothing and copies no arrays: MLX copies the caches of the side that goes on first (their size in memory,
        once), and the copy is freed with the fork. Not saved anywhere until `save` or `autosave`. May be called between
        two events of a running reply. Custom logits processors are deep-copied.
        """
        self._settle_active()
        self.state.agree()
        twin = copy.copy(self)
        twin.state = self.state.fork()
        twin._keeper = twin._active = twin._reply_run = twin._siblings = None
        return twin

    def branch(
        self, num_branches: int, *, reply: ReplyOptions, max_bytes: int | None = None, cancel: CancelToken = NEVER
    ) -> list[Session]:
        """So many forks that answer (or go on) here, each with its own seed: `continue_()` runs one of them.

        The prompt is prefilled once, here, before. The seeds are those of `reply.sampling` counted up (a random one if
        it has none); with temperature 0 all branches say the same. Raises `Cancelled` if the prefill was stopped; what
        was done of it stays. A branch that was run holds a copy of the caches until it is dropped; where the copies of
        all don't fit `max_bytes` (None: half of what is free) those that rest keep only what they don't share, and copy
        the rest again when they go on. Run them in turn, then.
        """
        if type(num_branches) is not int or num_branches < 1:
            raise InvalidValueError(f"{num_branches} branches; give 1 or more")
        if max_bytes is not None and not max_bytes > 0:
            raise InvalidValueError(f"max_bytes is {max_bytes}; give a number of bytes above 0, or None")
        reply.validate(self.model.vocab_size, self.model)
        sampling = reply.sampling.with_seed()
        self._settle_active()
        self._bring_in(cancel)
        base = self.fork()
        base.sequence.share()
        branches = [base.fork() for _ in range(num_branches)]
        siblings = Siblings(available_bytes() // 2 if max_bytes is None else max_bytes)
        for number, branch in enumerate(branches):
            assert sampling.seed is not None
            own = replace(sampling, seed=(sampling.seed + number) % 2**64)
            branch._siblings = siblings
            branch._open_reply(replace(reply, sampling=own))
        return branches

    def _open_reply(self, reply: ReplyOptions) -> None:
        """Begin a reply (or let the one there is go on) with these options, without running anything."""
        current = self.history.reply
        if current is None:
            self._record_reply(reply, continued=False, limit=reply.max_tokens)
            return
        if current is self.history.laid_out and current.tokens:
            self.state.back_to(len(current.tokens))  # drops the token that was sampled ahead with the old options
        limit = None if reply.max_tokens is None else len(current.tokens) + reply.max_tokens
        self._record_reply(reply, continued=True, limit=limit)

    def prefill(self, *, cancel: CancelToken = NEVER) -> None:
        """Bring the prompt of the turns there are into the cache, media and all; the conversation stays as it is.

        Raises `Cancelled` if it was stopped; a second call goes on with the rest.
        """
        if self.history.reply is not None and self.history.reply.tokens:
            raise InvalidValueError("the conversation ends with a reply; its prompt is in the cache already")
        self._bring_in(cancel)

    def _bring_in(self, cancel: CancelToken) -> None:
        """Bring the conversation into the cache to its end, and change nothing else of it. A reply that is under way
        stays so if it has come to its text, or is stopped."""
        reply = self.history.reply
        if reply is None:
            try:
                finished = self.send(reply=ReplyOptions(max_tokens=0), cancel=cancel)
            finally:
                if self.history.reply is not None:
                    self.drop_reply()
            finished.raise_if_cancelled()
            return
        sequence = self.sequence
        there = reply is self.history.laid_out and sequence.end >= len(sequence.ids) - 1 and self.state.owed is None
        if there and reply.tokens:
            sequence.repair(cancel)  # here once, instead of in every fork
            return
        self._close_active()
        self._reply_run = run = ReplyRun(self.state, ReplyOptions(heal=bool(reply.options.get("heal"))), cancel)
        try:
            for _ in run.prefill():
                pass
        finally:
            self._run_ended()

    def edit(self, turn: int, text: str, *, keep_later: bool = False) -> None:
        """Give turn number `turn` (from 0) another text. What follows it is taken back, or stays (`keep_later`).

        Media of the turn stay where they were, before the text. The next run prefills from the first token that
        differs. A reply may be edited too: it then says `text`.
        """
        self._close_active()
        turns = self.history.turns
        if type(turn) is not int or not 0 <= turn < len(turns):
            raise InvalidValueError(f"turn {turn} of {len(turns)}; give 0 to {len(turns) - 1}")
        data: dict[str, Any] = {"turn": turn, "keep_later": keep_later}
        if turns[turn].reply is None:
            media = [{"medium": part} for part in turns[turn].parts if isinstance(part, int)]
            data |= {"role": turns[turn].role, "parts": [*media, checked_text(text, "the text")]}
        else:
            data["ids"] = ids_of(self.state, text)
        self.state.record("edit", data)
        self.state.reply_options = None

    def append_text(self, text: str) -> None:
        """Put words into the model's mouth: the reply begins, or goes on, with `text`, special tokens in it included.

        `continue_()` goes on from there. Nothing is run now. The text counts as shown, and isn't looked at for stops.
        """
        self.append_tokens(ids_of(self.state, text))

    def append_tokens(self, ids: Sequence[int]) -> None:
        """The same with token ids."""
        self._close_active()
        checked = ids_of(self.state, ids)
        if self.history.reply is None:
            if not any(turn.role == "user" for turn in self.history.turns):
                raise InvalidValueError("there is nothing to reply to: add a user turn first")
            self._record_reply(DEFAULT_REPLY, continued=False, limit=DEFAULT_REPLY.max_tokens)
        put(self.state, checked)
        reply = self.history.reply
        assert reply is not None
        stream = rebuild_text(self.model.tokenizer, reply)
        while stream.stop_hit is not None:
            stream.release()
            self.state.record("mark", [len(reply.tokens), "release"])
        if stream.held:  # half a stop string, or a banned one: what somebody else says isn't taken back
            self.state.record("mark", [len(reply.tokens), "flush"])

    def score(self, continuation: str | Sequence[int], *, cancel: CancelToken = NEVER) -> Score:
        """How likely the model finds `continuation` (text, or ids) as what comes next; the session stays as it is.

        Its prompt is prefilled if it isn't yet (and kept). The continuation itself is fed to a fork, so it costs a copy
        of the caches while it runs. Raises `Cancelled`.
        """
        self._settle_active()
        ids = ids_of(self.state, continuation)
        self._bring_in(cancel)
        twin = self.fork()
        reopen(twin.state)
        reply = twin.history.reply
        healed = [] if reply is None else reply.waiting  # what healing took off comes before anything else
        found = score(twin.state, [*healed, *ids], cancel=cancel)
        return Score(found.ids[len(healed) :], found.logprobs[len(healed) :])

    # -- saving ----------------------------------------------------------------------------------------------------

    def autosave(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        policy: AutosavePolicy = AutosavePolicy(),
    ) -> Path:
        """Keep a snapshot at `path` from now on: every token's record at once, arrays every few seconds. Its absolute
        path.

        Holds the snapshot's lock until `close`. Raises `SnapshotError` when there is something at `path` already.
        """
        if self._keeper is not None:
            raise InvalidValueError(f"this session is being saved to {self._keeper.path} already; close() it first")
        self._close_active()
        self.state.require_resumable()
        keeper = self._new_keeper(path, overwrite, policy)
        self._attach(keeper)
        return keeper.path

    def save(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> Path:
        """Write a complete snapshot and wait until it is on the disk; its absolute path.

        Without `path` (or with the autosave's own) only what is new is written. With another path a separate snapshot
        is made, and let go of again. Raises `SnapshotError`; the session goes on either way.
        """
        self._close_active()
        self.state.agree()
        if self._keeper is not None and (path is None or Path(os.path.abspath(path)) == self._keeper.path):
            self._keeper.save(self.state)
            return self._keeper.path
        if path is None:
            raise InvalidValueError("save() needs a path: this session isn't being saved anywhere yet")
        self.state.require_resumable()
        keeper = self._new_keeper(path, overwrite, AutosavePolicy())
        try:
            keeper.save(self.state)
        finally:
            keeper.close()
        return keeper.path

    def _new_keeper(self, path: str | os.PathLike[str], overwrite: bool, policy: AutosavePolicy) -> Keeper:
        if not self.history.model:
            self.state.append(Record("model", model_record(self.model)))
        store = SnapshotStore.create(path, overwrite=overwrite, records=self.history.records)
        return Keeper(store, policy)

    def _attach(self, keeper: Keeper) -> None:
        self._keeper = self.state.journal = keeper
        # A session that is dropped without close() must not keep the lock (and a thread) for the process's life.
        self._finalizer = weakref.finalize(self, keeper.close)

    def close(self) -> None:
        """Stop a reply that is still open, save what autosave hasn't yet, and let go of the snapshot. Idempotent."""
        self._close_active()
        keeper, self._keeper, self.state.journal = self._keeper, None, None
        if keeper is None:
            return
        try:
            if self.state.agreed and not self.sequence.torn:
                self._save_quietly(keeper)
        finally:
            self._finalizer()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _save_quietly(self, keeper: Keeper) -> None:
        try:
            keeper.save(self.state)
        except SnapshotError as error:
            keeper.warn(error)

    def _run(self, run: ReplyRun, added: bool) -> Generator[Event]:
        try:
            yield from run.events()
        except MlxgenError as error:
            if added and not run.laid_out and not isinstance(error, MediaError):
                # The turn itself is what's wrong (too long, refused by the template): left there it would be wrong in
                # every later prompt too. A medium that can't be read may be mended, and the reply continued.
                self.state.record("undo", {"turns": 2})
            raise
        finally:
            self._run_ended()

    def _run_ended(self) -> None:
        """The run has settled. Saving comes here: after the last event, so that it doesn't delay it."""
        self._active = self._reply_run = None
        self.state.heal()
        self.sequence.mark()
        if self._siblings is not None:
            self._siblings.ran(self.state)
        # After an error inside a pass the cache isn't worth saving before it is repaired, which the next call does; the
        # journal has everything.
        if self._keeper is not None and self.state.agreed and not self.sequence.torn:
            self._save_quietly(self._keeper)

    def _close_active(self) -> None:
        active = self._idle_active()
        if active is not None:
            active.close()
            self._active = None
        self.state.heal()

    def _idle_active(self) -> Generator[Event] | Generator[InputProgress] | None:
        """The generator of the reply under way, which is between two events. Raises `SessionBusyError` if it isn't."""
        active = self._active
        if active is not None and cast("GeneratorType[Event, None, None]", active).gi_running:
            raise SessionBusyError(
                "another thread is in the middle of this session's reply; cancel its token and wait for its last event"
            )
        return active

    def _settle_active(self) -> None:
        """Bring a reply under way to where its state can be looked at; it goes on afterwards."""
        if self._idle_active() is not None and self._reply_run is not None:
            self._reply_run.settle()
        else:
            self.state.heal()


def model_record(model: Model) -> dict[str, Any]:
    """What a snapshot says about its model: how to find it again, and how to know that it is the same."""
    found = model.fingerprint
    return {
        "name": model.name,
        "source": None if model.path is None else str(model.path),
        "revision": _hub_revision(model),
        "adapter": None if model.adapter_path is None else str(model.adapter_path),
        "digest": found.digest,
        "parts": dict(found.parts),
    }


def _hub_revision(model: Model) -> str | None:
    """The commit of a model from the hub, read off its place in the hub's cache (…/snapshots/<commit>)."""
    path = model.path
    return path.name if path is not None and path.parent.name == "snapshots" else None
