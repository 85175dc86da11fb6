"""Open a snapshot and rebuild the session that wrote it, at exactly the place where it stopped."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from mlxgen.cache import StateMark
from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.decode import TokenIterator
from mlxgen.errors import MlxgenError, ModelLoadError, NotResumableError, SnapshotError
from mlxgen.history import History
from mlxgen.models.fingerprint import Fingerprint
from mlxgen.models.hub import LoadProgress
from mlxgen.models.load import LoadOptions, load
from mlxgen.models.model import Model
from mlxgen.options import ReplyOptions, SessionOptions, StopWhen
from mlxgen.persist import AutosavePolicy, Keeper
from mlxgen.sampling import LogitsProcessor, is_resumable
from mlxgen.sequence import PassLog, TokenSequence
from mlxgen.session import Session
from mlxgen.snapshot.export import CacheExport, environment
from mlxgen.snapshot.restore import cut_cache, restore_cache, restore_marks, restore_media
from mlxgen.snapshot.store import SnapshotStore
from mlxgen.tokenizer import token_ids_checked

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """`model` to use instead of loading the recorded one (it must be the same); `processors` and `stop_when` as the
    reply had them.

    `load` is how the recorded model is loaded (its adapter and revision come from the snapshot). A snapshot may be
    somebody else's: addresses that it names are fetched only with `allow_urls`.
    """

    model: Model | None = None
    load: LoadOptions = LoadOptions()
    allow_urls: bool = False
    processors: tuple[LogitsProcessor, ...] = ()
    stop_when: StopWhen | None = None
    policy: AutosavePolicy = AutosavePolicy()
    on_progress: Callable[[LoadProgress], None] | None = None


def resume(
    path: str | os.PathLike[str], *, options: ResumeOptions = ResumeOptions(), cancel: CancelToken = NEVER
) -> Session:
    """The session of a snapshot, with everything that was done; `continue_()` or `stream()` goes on from there.

    The session keeps saving to the same snapshot and holds its lock until `close`. A damaged newest generation falls
    back to the one before, or to replaying the journal; what happened is in `session.notes`. Raises `SnapshotError`
    (`SnapshotLockedError` when another process has it), `ModelLoadError`, `NotResumableError`; `Cancelled` leaves the
    snapshot as it was.
    """
    store = SnapshotStore.open(path)
    keeper: Keeper | None = None
    try:
        history = History.replay(store.records)
        if not history.session:
            raise SnapshotError(f"{store.path} was given up before its session began; nothing is in it, remove it")
        model = options.model if options.model is not None else _load_model(history, options, cancel)
        _check_model(history, model, store)
        _check_ids(history, model)
        session = Session._restored(model, _session_options(history), history)
        session.state.allow_urls = options.allow_urls
        session.state.reply_options = _reply_options(history, model, options)
        adopted = _restore(store, session, options, cancel)
        keeper = Keeper(store, options.policy, files=adopted.files)
        keeper.adopt(session.state, adopted.cache, adopted.media, adopted.marks, adopted.keep)
        session._attach(keeper)
        session.notes = tuple(store.notes) + _environment_notes(store)
        return session
    except BaseException:
        if keeper is not None:
            keeper.close()
        else:
            store.close()
        raise


def _load_model(history: History, options: ResumeOptions, cancel: CancelToken) -> Model:
    source, name = history.model.get("source"), history.model.get("name")
    if name is None:
        raise SnapshotError("the snapshot doesn't say which model it is of; pass the model")
    adapter = history.model.get("adapter") or options.load.adapter_path
    here = source is not None and os.path.isdir(source)
    revision = None if here else history.model.get("revision") or options.load.revision
    how = replace(options.load, adapter_path=adapter, revision=revision)
    try:
        return load(
            source if here and source is not None else name, options=how, on_progress=options.on_progress, cancel=cancel
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"the snapshot needs the model {name!r}: {error}") from error


def _check_model(history: History, model: Model, store: SnapshotStore) -> None:
    if not history.model:
        return
    saved = Fingerprint(history.model["digest"], history.model["parts"])
    found = model.fingerprint
    if saved.digest != found.digest:
        names = ", ".join(saved.differences(found)) or "everything"
        raise SnapshotError(
            f"{store.path} was made with another model than {model.name} ({names} differ); "
            f"pass the model it was made with: {history.model['name']}"
        )


def _check_ids(history: History, model: Model) -> None:
    replies = [turn.reply for turn in history.turns if turn.reply is not None]
    unseen = [reply.resumed.pending.id for reply in replies if reply.resumed and reply.resumed.pending]
    try:
        banned = [ids for reply in replies for ids in reply.banned.values()]
        healed = [reply.healed for reply in replies] + [reply.waiting for reply in replies]
        for ids in (history.ids, unseen, *(reply.ids for reply in replies), *banned, *healed):
            token_ids_checked(ids, model.vocab_size)
    except MlxgenError as error:
        raise SnapshotError(f"the journal has token ids that this model doesn't have ({error})") from error


_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)


def _session_options(history: History) -> SessionOptions:
    try:
        options = SessionOptions.from_json(history.session["options"])
        options.validate()
        options.to_json()
        datetime.fromisoformat(history.session["created"])
    except _MALFORMED as error:
        raise SnapshotError(f"the journal's session options are malformed ({error}); it can't be used") from error
    return options


def _reply_options(history: History, model: Model, given: ResumeOptions) -> ReplyOptions | None:
    """What the last reply was run with. A finished one can be opened without its processors and its `stop_when` (but
    not go on)."""
    reply = history.reply
    if reply is None:
        return None
    try:
        options = ReplyOptions.from_json(reply.options, given.processors, given.stop_when)
        options.validate(model.vocab_size)
    except NotResumableError:
        if reply.finished:
            return None
        raise
    except _MALFORMED as error:
        raise SnapshotError(f"the journal's reply options are malformed ({error}); it can't be used") from error
    return options


@dataclass(frozen=True, slots=True)
class _Adopted:
    files: list[Any]
    cache: CacheExport
    media: dict[int, tuple[int, int]]
    marks: tuple[StateMark, ...] = ()
    keep: int = 0  # rows of the cache that no rewind has made void since


def _restore(store: SnapshotStore, session: Session, options: ResumeOptions, cancel: CancelToken) -> _Adopted:
    """Arrays from the newest generation that can be read; then the passes that came after it, again."""
    adopted = _Adopted([], CacheExport(), {})
    while store.manifest is not None:
        try:
            adopted = _restore_generation(store, session, cancel)
            break
        except SnapshotError as error:
            _log.info("falling back: %s", error)
            session.state.sequence = TokenSequence(session.model, session.options.cache)
            store.fall_back(str(error))
    known = len(session.media)
    for source in session.history.media[known:]:
        session.media.append(_unprepared(source.kind, source.name))
    keep = _replay(store, session, adopted.cache, options, cancel)
    return replace(adopted, keep=keep)


def _unprepared(kind: str, name: str) -> Any:
    from mlxgen.inputs import PreparedMedium

    return PreparedMedium(kind="image" if kind == "image" else "video", source_name=name)


def _restore_generation(store: SnapshotStore, session: Session, cancel: CancelToken) -> _Adopted:
    manifest = store.manifest
    assert manifest is not None
    try:
        state = CacheExport.from_json(manifest.body["cache"])
        states = list(manifest.body["media"])
        _check_state(state, History.replay(store.records[: manifest.pin.num_records]), session.model)
    except _MALFORMED as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"{store.path}: generation {manifest.generation} is malformed ({error})") from error
    media = restore_media(store, states, cancel=cancel)
    if len(media) > len(session.history.media):
        raise SnapshotError(f"{store.path}: the manifest has {len(media)} media, the journal fewer")
    restore_cache(store, session.sequence, state, cancel=cancel)
    sequence = session.sequence
    sequence.num_fed, sequence.passes.entries = state.position, list(state.passes)
    store.notes += restore_marks(store, sequence, list(manifest.body.get("marks", ())), cancel=cancel)
    marks = tuple(sequence.marks)
    sequence.mark()  # a mark at the end itself would be a second copy of the state, and isn't in a file
    session.state.media = media
    counts = {index: (len(medium.frames), len(medium.features)) for index, medium in enumerate(media)}
    return _Adopted(list(manifest.files), state, counts, marks)


def _check_state(state: CacheExport, pinned: History, model: Model) -> None:
    """The manifest must say of the caches what the journal says of them: of two truths neither can be believed."""
    expected = PassLog(list(pinned.passes.entries))
    if state.position == pinned.num_fed + 1:
        expected.decode(pinned.num_fed)  # the pass that sampled the pending token
    elif state.position < pinned.num_fed:
        expected.trim(state.position)
    if (
        state.num_ids != len(pinned.ids)
        or not 0 <= state.position <= min(pinned.num_fed + 1, state.num_ids)
        or state.passes != tuple(expected.entries)
    ):
        raise SnapshotError(
            f"the manifest's cache of {state.position} tokens ({state.num_ids} known) isn't what the journal says "
            f"({pinned.num_fed} fed, {len(pinned.ids)} known)"
        )
    if state.pending is not None:
        token_ids_checked([state.pending.id], model.vocab_size)
        if state.position != state.num_ids:
            raise SnapshotError("the manifest has a pending token that doesn't follow its cache")


def _replay(
    store: SnapshotStore, session: Session, state: CacheExport, options: ResumeOptions, cancel: CancelToken
) -> int:
    """From the restored cache to the journal's end: cut what was rewound since, feed again what was fed since. Returns
    how many of the restored rows stayed."""
    history, sequence = session.history, session.sequence
    num_pinned = 0 if store.manifest is None else store.manifest.pin.num_records
    since = history.records[num_pinned:]
    sequence.num_fed = state.position
    sequence.passes.entries = list(state.passes)
    keeps = [
        int(record.data["keep"]) for record in since if record.type in ("prompt", "rewind") and "keep" in record.data
    ]
    if keeps:
        if min(keeps) == 0 or not cut_cache(sequence, min(keeps)):
            sequence.reset()
        sequence.marks.cut(min(keeps))
    sequence.ids = list(history.ids)
    if keeps or any(record.type in ("tok", "append") for record in since):
        state = replace(state, pending=None)
    states = [] if store.manifest is None else store.manifest.body.get("processors", [])
    base = _Base(num_pinned, state, tuple(states))

    def feed_again(cancel: CancelToken) -> None:
        session.state.place_media()
        if session.state.reply_options is not None and session.state.reply_options.processors:
            _replay_sampling(base, session, cancel)
            return
        if sequence.num_fed < history.num_fed:
            sequence.replay(history.passes.entries, history.num_fed, cancel=cancel)
        _restore_pending(base, session, cancel)

    if _media_complete(session):
        feed_again(cancel)
    elif history.reply is not None and history.reply.start is not None:
        # A kill came before the last features were on the disk. They are computed again when the reply goes on; what
        # was fed after them can only be fed again then.
        session.state.owed = feed_again
    return min([state.position, *keeps])


def _media_complete(session: Session) -> bool:
    layout = session.history.layout
    return layout is None or all(session.media[i].prepared and session.media[i].encoded for i in layout.media)


@dataclass(frozen=True, slots=True)
class _Base:
    """What a generation says that was written when the journal had `num_records`; `memory` is the processors'."""

    num_records: int
    state: CacheExport
    memory: tuple[Any, ...]


def _restore_pending(base: _Base, session: Session, cancel: CancelToken) -> None:
    """The unseen token, if the generation or the record of the last run has it: it was sampled with the options of
    then."""
    history, sequence, reply = session.history, session.sequence, session.history.reply
    pending = base.state.pending
    if pending is None and reply is not None and reply.resumed is not None and history.laid_out is reply:
        pending = reply.resumed.pending if len(reply.tokens) == reply.resumed.num_tokens else None
    if pending is None:
        return
    if sequence.num_fed == len(sequence.ids) - 1:
        cancel.checkpoint()
        sequence.feed_one()
    if sequence.num_fed == len(sequence.ids):
        sequence.ahead = pending


def _replay_sampling(base: _Base, session: Session, cancel: CancelToken) -> None:
    """With custom processors, sample the replayed tokens again: that brings the processors to where they were.

    It begins where their memory is known: at the generation, or at the record of the reply's last run if that is
    later. Nothing is left half done: after a stop a second call begins anew.
    """
    history, sequence, reply = session.history, session.sequence, session.history.reply
    options = session.state.reply_options
    assert options is not None
    if reply is None or reply.resumed is None:
        return
    memory, sampled_before, pending = base.memory, base.state.num_ids, base.state.pending
    if reply.resumed.num_records >= base.num_records:
        memory, pending = reply.resumed.memory, reply.resumed.pending
        sampled_before = (reply.start or 0) + reply.resumed.num_tokens
    try:
        for processor, saved in zip(options.processors, memory, strict=bool(memory)):
            if is_resumable(processor):
                processor.restore(saved)
    except Exception as error:
        raise NotResumableError(f"a logits processor doesn't take its own state back: {error}") from error
    known = list(history.ids)
    if history.laid_out is not reply or reply.start is None:
        return
    sampled_before = max(sampled_before, reply.start)
    try:
        fed_before = min(history.num_fed, sampled_before - 1)
        if sequence.num_fed < fed_before:
            sequence.replay(history.passes.entries, fed_before, cancel=cancel)
        sequence.ids = known[:sampled_before]
        if pending is not None and sequence.num_fed == sampled_before - 1:
            cancel.checkpoint()
            sequence.feed_one()
        sequence.ahead = pending if sequence.num_fed == sampled_before else None
        iterator = TokenIterator(
            sequence,
            options=options.decode_options(None).bound(session.model),
            step=sampled_before - reply.start,
            cancel=cancel,
        )
        while len(sequence.ids) < len(known):
            token = next(iterator)
            if token.id != known[len(sequence.ids) - 1]:
                raise NotResumableError(
                    "a custom logits processor gave another token on replay than before the stop: "
                    "its state() isn't complete"
                )
        iterator.settle()
    except BaseException:
        sequence.reset()
        sequence.ids = known
        raise


def _environment_notes(store: SnapshotStore) -> tuple[str, ...]:
    if store.manifest is None:
        return ()
    now, then = environment(), store.manifest.body
    changed = [
        f"{name} {version} (now {now['versions'][name]})"
        for name, version in then.get("versions", {}).items()
        if now["versions"].get(name) != version
    ]
    if then.get("device") != now["device"]:
        changed.append(f"device {then.get('device')} (now {now['device']})")
    if not changed:
        return ()
    return (f"the snapshot was written with {', '.join(changed)}: going on may not be bit-exact",)
