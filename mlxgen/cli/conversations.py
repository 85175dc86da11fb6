"""The conversations of one chat: the one it began with, its forks, each in a snapshot of its own, and their marks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mlxgen.cli import cached
from mlxgen.cli.console import printable
from mlxgen.cli.generate import discard
from mlxgen.errors import InvalidValueError, SnapshotError
from mlxgen.history import Mark
from mlxgen.session import Session

MAIN: Final = "main"
_NAME: Final = re.compile(r"[^\W\d][\w-]{0,39}")


@dataclass(slots=True)
class Conversation:
    """A session under a name. `marks` are those that were given a name in this process."""

    name: str
    session: Session
    marks: dict[str, Mark] = field(default_factory=dict)

    def mark(self, name: str) -> str:
        """Remember this place; the name it got. Raises `InvalidValueError` for a name that can't be one."""
        if name:
            _check_name(name)
        mark = self.session.mark()
        chosen = name or _own_name(mark)
        self.marks[chosen] = mark
        return chosen

    def marked(self, name: str) -> Mark:
        """The mark of that name: one that was given it, or `m0`, `m1`, … for any mark, also of an earlier process."""
        by_number = {_own_name(mark): mark for mark in self.session.marks}
        places = by_number | {given: mark for given, mark in self.marks.items() if mark in self.session.marks}
        if name not in places:
            there = f"the marks there are: {', '.join(places)}" if places else "/mark NAME sets one"
            raise InvalidValueError(f"no mark {printable(name, 40)!r} in this conversation; {there}")
        return places[name]

    @property
    def summary(self) -> str:
        turns = [turn.text for turn in self.session.turns if turn.role == "user"]
        last = f", the last: {printable(turns[-1], 40)}" if turns else ""
        return f"{self.name}: {len(turns)} {'turn' if len(turns) == 1 else 'turns'}{last}"


class Conversations:
    """Owned by the chat. All sessions stay open until `close`, each keeping its own snapshot up to date.

    Forks are kept beside a snapshot that was given a name (`named`), else in the cache folder.
    """

    def __init__(self, session: Session, *, named: bool) -> None:
        self.current = Conversation(MAIN, session)
        self._all = {MAIN: self.current}
        self._beside = session.snapshot_path if named else None

    def __iter__(self) -> Iterator[Conversation]:
        """All, the current one last."""
        return iter([one for one in self._all.values() if one is not self.current] + [self.current])

    def fork(self, name: str) -> Conversation:
        """Go on in a copy called `name` (or one that is free); where it was called from stays as it is.

        Raises `InvalidValueError` for a name that is taken or can't be one, `SnapshotError` where the fork can't be
        kept; nothing is changed then.
        """
        name = name or self._free_name()
        _check_name(name)
        if name in self._all:
            raise InvalidValueError(f"there is a conversation {name!r} already; /switch {name} goes there")
        session = self.current.session.fork()
        path = session.autosave(cached.new_path() if self._beside is None else self._beside_path(name))
        if session.media:  # the files they came from may be gone already
            try:
                session.save()
            except SnapshotError:
                discard(session, path)
                raise
        fork = Conversation(name, session, dict(self.current.marks))
        self._all[name] = self.current = fork
        return fork

    def _free_name(self) -> str:
        number = len(self._all)
        while f"fork{number}" in self._all:
            number += 1
        return f"fork{number}"

    def _beside_path(self, name: str) -> Path:
        assert self._beside is not None
        path = self._beside.with_name(f"{self._beside.name.removesuffix('.mlxgen')}-{name}.mlxgen")
        if path.exists():
            raise InvalidValueError(f"{path} exists already; give the fork another name")
        return path

    def switch(self, name: str) -> Conversation:
        if name not in self._all:
            raise InvalidValueError(
                f"no conversation {printable(name, 40)!r}; there are: {', '.join(self._all)} (/fork NAME makes one)"
            )
        self.current = self._all[name]
        return self.current

    def close(self) -> None:
        """Save and let go of all of them, whatever one of them raises."""
        with ExitStack() as stack:
            for one in self._all.values():
                stack.callback(one.session.close)


def _own_name(mark: Mark) -> str:
    return f"m{mark.number}"


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise InvalidValueError(
            f"{printable(name, 40)!r} can't be a name; give a letter, then letters, digits, - or _ (40 at most)"
        )
