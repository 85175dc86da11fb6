"""All that a conversation consists of, as one object: what a session owns, a reply works on and a snapshot saves."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any, Literal, Protocol

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.decode import processor_memory
from mlxgen.errors import InvalidValueError, MediaError
from mlxgen.history import History, MediumSource
from mlxgen.inputs import PreparedMedium
from mlxgen.models.model import Model
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.preparation import (
    Prompt,
    PromptSource,
    chat_message,
    chat_prompt,
    prepared_input,
    raw_ids,
)
from mlxgen.request import ImagePart, MediaPart
from mlxgen.sampling import is_resumable
from mlxgen.sequence import TokenSequence
from mlxgen.snapshot.store import Record
from mlxgen.sources import hash_file, hash_folder, num_bytes_of

# What was committed: a prepared picture, a prepared video frame, an encoded part of a medium, a prefill chunk, a token.
Unit = Literal["image", "frame", "features", "chunk", "token"]


class Journal(Protocol):
    """Who writes down what happens to a state (`persist.Keeper`)."""

    def write(self, records: Sequence[Record]) -> None:
        """Write those of all records that aren't written yet, now."""
        ...

    def tick(self, state: SessionState, unit: Unit, settle: Callable[[], None]) -> None:
        """A unit was committed: save arrays if it is time."""
        ...


class SessionState:
    """History, media and token sequence of one conversation, changed only by records.

    Owned by one session and used by one thread at a time. `history` survives every stop (it is the journal), `media`
    and `sequence` as far as their arrays were saved; the rest (`sources` in memory, custom processors) must be given
    again to a resumed session.
    """

    def __init__(self, model: Model, options: SessionOptions) -> None:
        self.model = model
        self.options = options
        self.history = History()
        self.media: list[PreparedMedium] = []
        self.sources: list[MediaPart | None] = []
        self.sequence = TokenSequence(model, options.cache)
        self.reply_options: ReplyOptions | None = None
        self.journal: Journal | None = None
        self.allow_urls = False  # for media that a snapshot names by address; those added here bring their own word
        # What a resume couldn't feed again yet: features that a kill took must be computed first.
        self.owed: Callable[[CancelToken], None] | None = None

    @property
    def unfinished(self) -> bool:
        """Whether a reply was begun and has neither ended by itself nor been followed by another turn."""
        reply = self.history.reply
        return reply is not None and not reply.finished

    def record(self, type_: str, data: Any) -> None:
        """Change the history by one record, and write it to the journal if there is one."""
        self.append(Record(type_, data))

    def append(self, *records: Record) -> None:
        """The same for records that belong together: the journal gets all of them in one write, or none."""
        try:
            for record in records:
                self.history.apply(record)
        except BaseException:
            self.heal()  # applied whole or not at all
            raise
        if self.journal is not None:
            self.journal.write(self.history.records)

    def heal(self) -> None:
        """Bring history and sequence together again after an exception in just the wrong place.

        A `KeyboardInterrupt` can land between any two steps. What was computed and not recorded is recorded now (but
        for a sampled token, which belongs to the next event); what was recorded by half is replayed.
        """
        if self.history.torn:
            self.history = History.replay(self.history.records)
        del self.media[len(self.history.media) :], self.sources[len(self.history.media) :]
        if self.history.torn or len(self.sequence.ids) != len(self.history.ids):
            return
        for kind, start, count in list(self.sequence.passes.entries):
            if kind == "prefill" and start >= self.history.num_fed and start + count <= self.sequence.num_fed:
                self.record("pass", [start, count])

    @property
    def agreed(self) -> bool:
        """Whether sequence and history are at the same token: what is saved together must be."""
        return not self.history.torn and self.sequence.ids == self.history.ids

    def follow(self, cancel: CancelToken) -> None:
        """Before a run: the sequence is where the history is, or one token ahead (sampled, and not recorded yet)."""
        ids, known = self.sequence.ids, self.history.ids
        if ids == known:
            self._feed_known(cancel)
        elif len(ids) != len(known) + 1 or ids[:-1] != known:
            self.agree(cancel)

    def _feed_known(self, cancel: CancelToken) -> None:
        """Feed again what is on record as fed and isn't: going back was interrupted before its record, or this was
        stopped. (What a resume owes comes in `catch_up`.)"""
        sequence, history = self.sequence, self.history
        if self.owed is None and sequence.end < history.num_fed:
            sequence.repair(cancel)
            sequence.replay(history.passes.entries, history.num_fed, cancel=cancel)

    def agree(self, cancel: CancelToken = NEVER) -> None:
        """Take out of the sequence what the history doesn't know; it is computed again when the reply goes on.

        Where an interrupt hit between a rewind and its record, what was dropped and shouldn't have been is fed again.
        """
        self.heal()
        sequence, known = self.sequence, self.history.ids
        if sequence.ids == known:
            self._feed_known(cancel)
            return
        common = next((i for i, (a, b) in enumerate(zip(sequence.ids, known, strict=False)) if a != b), None)
        if common is None:
            common = min(len(sequence.ids), len(known))
        sequence.retract(min(common, sequence.num_fed))
        sequence.ids = list(known)
        self.place_media()
        if sequence.num_fed < self.history.num_fed:
            sequence.replay(self.history.passes.entries, self.history.num_fed, cancel=cancel)

    def back_to(self, num_tokens: int, *, banned: int | None = None) -> None:
        """Keep the first `num_tokens` tokens of the last reply. No forward pass now; what a cache that can't be trimmed
        must run again comes with the next run. `banned`: an id that may not stand there.
        """
        history, sequence = self.history, self.sequence
        reply = history.reply
        assert reply is not None
        data: dict[str, Any] = {"turns": len(history.turns), "tokens": num_tokens}
        if reply is history.laid_out and reply.start is not None:
            end = reply.start + num_tokens
            data["keep"] = sequence.go_back(end - 1)
            del sequence.ids[end:]
        if banned is not None:
            data["banned"] = banned
        self.record("rewind", data)

    def put(self, ids: Sequence[int], *following: Record) -> None:
        """Make `ids` the next tokens of the last reply, as if the model had chosen them. They are fed with the next
        run. `following` are records that belong to them, written with them."""
        self.agree()
        data: dict[str, Any] = {"ids": list(ids)}
        memory = self.processor_states()
        if memory:
            data["memory"] = memory
        if self.history.reply is self.history.laid_out:
            self.sequence.ahead = None
            data["fed"] = self.sequence.end
            self.sequence.ids += ids
        self.append(Record("append", data), *following)

    def fork(self) -> SessionState:
        """The same conversation for another session; nothing is run and no array is copied (`TokenSequence.fork`)."""
        if self.owed is not None:
            raise InvalidValueError(
                "this resumed session must encode its media again before it can be forked; go on with its reply first"
            )
        twin = copy.copy(self)
        twin.sequence = self.sequence.fork()
        twin.history = self.history.fork()
        twin.media = [medium.fork() for medium in self.media]
        twin.sources = list(self.sources)
        twin.journal = None
        if self.reply_options is not None and self.reply_options.processors:
            processors = tuple(copy.deepcopy(processor) for processor in self.reply_options.processors)
            twin.reply_options = replace(self.reply_options, processors=processors)
        return twin

    def place_media(self) -> None:
        """Say to the sequence which media stand where in its ids, as the history has it. All must be encoded."""
        layout = self.history.layout
        if layout is None:
            self.sequence.inputs = None
            return
        prompt = Prompt(self.history.ids[: layout.num_tokens], layout.replies)
        self.sequence.inputs = prepared_input(self.model, prompt, [self.media[index] for index in layout.media])

    def unit_done(self, unit: Unit, settle: Callable[[], None] | None = None) -> None:
        """One unit was committed: the moment for an autosave."""
        if self.journal is not None:
            self.journal.tick(self, unit, settle or _nothing)

    def catch_up(self, cancel: CancelToken) -> None:
        """Feed again what a resume had to leave out, now that all media are encoded. After a stop: begin anew."""
        if self.owed is not None:
            self.owed(cancel)
            self.owed = None

    def require_resumable(self) -> None:
        """Raise `NotResumableError` if the reply under way has something that can't be saved."""
        if self.reply_options is not None and self.unfinished:
            self.reply_options.require_resumable()

    def processor_states(self) -> list[Any]:
        """What the custom processors of the reply under way want saved."""
        options = self.reply_options
        if options is None or self.history.reply is None:
            return []
        return [json.loads(processor_memory(processor)) for processor in options.processors if is_resumable(processor)]

    # -- media ----------------------------------------------------------------------------------------------------

    def add_medium(self, part: MediaPart) -> int:
        """Take note of a medium of the turn that is being added; its index. Its content is hashed now."""
        kind = "image" if isinstance(part, ImagePart) else "video"
        path = _place_of(part.source)
        name = path if path is not None else f"<{type(part.source).__name__}>"
        source_hash = "" if path is None else _hash_of(path)
        # Before the record: `heal` drops what has none.
        self.sources.append(part)
        self.media.append(PreparedMedium(kind="image" if kind == "image" else "video", source_name=name))
        self.record(
            "medium",
            {"kind": kind, "name": name, "path": path, "source_hash": source_hash, "options": asdict(part.options)},
        )
        return len(self.media) - 1

    def media_in_use(self) -> list[int]:
        """Indices of the media of the turns there are now, in reading order."""
        return [part for turn in self.history.turns for part in turn.parts if isinstance(part, int)]

    def new_media(self) -> list[int]:
        """Those of them that came after the last earlier reply, or aren't complete: what the next prompt brings."""
        turns = self.history.turns
        end = len(turns) - 1 if turns and turns[-1].reply is not None else len(turns)
        replied = [i for i in range(end) if (reply := turns[i].reply) is not None and reply.tokens]
        old = [part for turn in turns[: max(replied, default=0)] for part in turn.parts if isinstance(part, int)]
        media = ((index, self.media[index]) for index in self.media_in_use())
        return [i for i, medium in media if i not in old or not (medium.prepared and medium.encoded)]

    def media_part(self, index: int) -> MediaPart:
        """Where medium `index` is read from. Raises `MediaError` when it was in memory of a process that is gone."""
        part = self.sources[index]
        if part is not None:
            return part
        source: MediumSource = self.history.media[index]
        if source.path is None:
            raise MediaError(
                f"medium {index + 1} ({source.name}) was passed in memory and not prepared before the stop, so it is "
                "gone; undo() the turn and pass it again"
            )
        # What a snapshot says is nobody's permission to go to the network.
        return source.part(allow_urls=source.options.allow_urls and self.allow_urls)

    def check_folder(self, index: int, cancel: CancelToken) -> None:
        """Raise `MediaError` if a medium that is a folder isn't what it was when the turn was added."""
        source = self.history.media[index]
        if not source.source_hash.startswith(_FOLDER) or not os.path.isdir(source.path or ""):
            return
        if _FOLDER + hash_folder(source.path, cancel=cancel) != source.source_hash:
            raise self._changed(index)

    def check_source(self, index: int) -> None:
        """The same for a medium that is a file, once it was opened; what was prepared of it is dropped."""
        wanted, medium = self.history.media[index].source_hash, self.media[index]
        if wanted and not wanted.startswith(_FOLDER) and medium.source_hash and wanted != medium.source_hash:
            self.media[index] = PreparedMedium(kind=medium.kind, source_name=medium.source_name)
            raise self._changed(index)

    def _changed(self, index: int) -> MediaError:
        return MediaError(
            f"{self.history.media[index].name} has changed since it was added to the conversation; put the former "
            "content back, or undo() the turn and add it again"
        )

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def prompt(self, *, locate_replies: bool = False) -> Prompt:
        """The ids of the whole conversation up to where the open reply begins; earlier replies keep their own ids.

        Where these stand is only found out with media, or `locate_replies`.
        """
        media = [self.media[index] for index in self.media_in_use()]
        if self.options.raw:
            return self._raw_prompt(media)
        messages: list[dict[str, Any]] = []
        reply_ids: dict[int, list[int]] = {}
        for turn in self.history.turns:
            if turn.reply is None:
                parts = [part if isinstance(part, str) else self._part_of(part) for part in turn.parts]
                messages.append(chat_message(self.model, turn.role, parts))
            elif turn.reply.tokens and turn is not self.history.turns[-1]:
                ids = turn.reply.ids
                # The token that ended the turn is the template's to write.
                if ids[-1] in self.model.eos_token_ids:
                    ids = ids[:-1]
                reply_ids[len(messages)] = ids
                messages.append(chat_message(self.model, "assistant", [self.model.tokenizer.decode(ids)]))
        created = datetime.fromisoformat(self.history.session["created"])
        conversation = PromptSource(messages, reply_ids, self.options.template_options, created, locate_replies)
        return chat_prompt(self.model, conversation, media)

    def _part_of(self, index: int) -> MediaPart:
        source = self.history.media[index]
        return source.part(allow_urls=False)

    def _raw_prompt(self, media: Sequence[PreparedMedium]) -> Prompt:
        ids: list[int] = []
        ranges: list[tuple[int, int]] = []
        remaining = list(media)
        for turn in self.history.turns:
            if turn.reply is not None:
                healed = turn.reply.healed
                if healed:
                    del ids[len(ids) - len(healed) :]  # the reply says them again, in other tokens
                if turn is self.history.turns[-1]:
                    break  # the reply that is to begin here, or to go on
                ranges.append((len(ids), len(ids) + len(turn.reply.tokens)))
                ids += turn.reply.ids
            else:
                count = sum(1 for part in turn.parts if isinstance(part, int))
                own, remaining = remaining[:count], remaining[count:]
                ids += raw_ids(self.model, turn.text, own, first=not ids)
        if not ids:
            raise InvalidValueError("the prompt is empty; give at least one token")
        return Prompt(ids, tuple(ranges))


def _nothing() -> None:
    return None


_FOLDER = "folder:"  # before the hash of a folder, which is made in another way than the families'


def _place_of(source: Any) -> str | None:
    """Where another process finds a source again: its absolute path, or its address. None for what is in memory."""
    if isinstance(source, os.PathLike):
        return os.path.abspath(os.fsdecode(source))
    if not isinstance(source, str) or source[:5].casefold() == "data:" or len(source) >= 4096:
        return None
    if "://" in source:
        return source
    return os.path.abspath(os.path.expanduser(source) if source.startswith("~") else source)


# Hashing a source is no unit that could be stopped: of more than this (a second's reading), the content is known
# from when it is first opened, not from when its turn is added.
_MAX_HASHED_BYTES = 256 * 2**20


def _hash_of(path: str) -> str:
    if num_bytes_of(path) > _MAX_HASHED_BYTES:
        return ""
    if os.path.isdir(path):
        return _FOLDER + hash_folder(path)
    return hash_file(path) if os.path.isfile(path) else ""
