"""What a snapshot holds, read from its journal and manifest alone: no lock, no model, nothing changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlxgen.history import History, Turn
from mlxgen.snapshot.store import FileEntry, SnapshotView, read_only

Phase = Literal["empty", "prepare", "encode", "prefill", "decode", "finished"]


@dataclass(frozen=True, slots=True)
class MediumOverview:
    """One picture or video: what is there of it. `sizes` are (height, width) of the prepared frames, from `state`."""

    kind: str
    name: str
    num_prepared: int
    num_frames: int | None
    num_encoded: int
    num_parts: int | None
    content_hash: str

    @property
    def prepared(self) -> bool:
        return self.num_frames is not None and self.num_prepared == self.num_frames and bool(self.content_hash)

    @property
    def encoded(self) -> bool:
        return self.num_parts is not None and self.num_encoded == self.num_parts


@dataclass(frozen=True, slots=True)
class Overview:
    """`position` counts the tokens of the last reply; `size_bytes` everything in the folder."""

    view: SnapshotView
    history: History
    media: tuple[MediumOverview, ...]
    phase: Phase
    position: int
    size_bytes: int

    @property
    def path(self) -> Path:
        return self.view.path

    @property
    def model(self) -> str:
        return str(self.history.model.get("name", "?"))

    @property
    def finished(self) -> bool:
        """Whether there is nothing to go on with: the last reply ended by itself, or there is no turn at all."""
        return self.phase in ("finished", "empty")

    @property
    def files(self) -> Sequence[FileEntry]:
        return () if self.view.manifest is None else self.view.manifest.files

    @property
    def last_user_turn(self) -> Turn | None:
        return next((turn for turn in reversed(self.history.turns) if turn.role == "user"), None)


def look(path: str | os.PathLike[str]) -> Overview:
    """Read a snapshot, also while another process writes it. Raises `SnapshotError` when nothing in it can be used."""
    view = read_only(path)
    history = History.replay(view.records)
    states = [] if view.manifest is None else view.manifest.body.get("media", [])
    media = tuple(
        _medium(source.kind, source.name, states[index] if index < len(states) else {})
        for index, source in enumerate(history.media)
    )
    reply = history.reply
    return Overview(
        view=view,
        history=history,
        media=media,
        phase=_phase(history, media),
        position=0 if reply is None else len(reply.tokens),
        size_bytes=folder_size(view.path),
    )


def _medium(kind: str, name: str, state: Mapping[str, Any]) -> MediumOverview:
    return MediumOverview(
        kind=kind,
        name=name,
        num_prepared=int(state.get("frames", 0)),
        num_frames=state.get("num_frames"),
        num_encoded=int(state.get("parts", 0)),
        num_parts=state.get("num_parts"),
        content_hash=str(state.get("content_hash", "")),
    )


def _phase(history: History, media: Sequence[MediumOverview]) -> Phase:
    """What goes on when the last reply is resumed."""
    if not any(turn.role == "user" for turn in history.turns):
        return "empty"
    reply = history.reply
    if reply is not None and reply.finished:
        return "finished"
    # Tokens that were put there can be older than the reading of the prompt.
    read = reply is not None and reply is history.laid_out and history.num_fed >= (reply.start or 0)
    if reply is not None and reply.tokens and read:
        return "decode"
    used = {part for turn in history.turns for part in turn.parts if isinstance(part, int)}
    if any(not media[index].prepared for index in used):
        return "prepare"
    if any(not media[index].encoded for index in used):
        return "encode"
    return "prefill"


def folder_size(path: Path) -> int:
    """Bytes of the files in a folder; one that disappears meanwhile counts nothing."""
    total = 0
    try:
        for entry in os.scandir(path):
            try:
                total += entry.stat(follow_symlinks=False).st_size
            except OSError:
                continue
    except OSError:
        return total
    return total
