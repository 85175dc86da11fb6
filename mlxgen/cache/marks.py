"""Marks: what caches that can't be trimmed were at earlier positions, so that going back costs a short replay.

A cache whose rows are only appended goes back by counting fewer of them. A recurrent state or a ring that has wrapped
has lost what it was; it is kept here now and then. A mark shares its arrays with the live cache until that changes
them: a recurrent state is replaced by every pass anyway (no copy), a ring is copied once per mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxgen.cache.adapter import adapter_of, fork_entry, leaves, map_leaves


@dataclass(frozen=True, slots=True)
class StateMark:
    """The caches that can't be trimmed as they were after `position` tokens, by path. `pinned`: kept when memory is
    short as long as others can go."""

    position: int
    leaves: Mapping[str, Any]
    pinned: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        return [array for leaf in self.leaves.values() for array in adapter_of(leaf).arrays(leaf)]


class StateMarks:
    """The marks of one sequence, in order of position. Owned by the sequence; survives a stop as far as it was saved.

    A mark every `every` tokens, besides those asked for, in at most `max_bytes`: beyond that the mark that leaves the
    smallest gap goes first, pinned ones last. Nothing is kept for caches that are all appended to.
    """

    def __init__(self, every: int, max_bytes: int) -> None:
        self._every = every
        self._max_bytes = max_bytes
        self._marks: list[StateMark] = []
        self._num_bytes = 0
        self.next_position = every

    def __iter__(self) -> Iterator[StateMark]:
        return iter(self._marks)

    def __len__(self) -> int:
        return len(self._marks)

    def take(self, cache: Sequence[Any], position: int, *, pinned: bool = False) -> None:
        """Keep what the caches are now, after `position` tokens; nothing where all of them can be trimmed."""
        self.next_position = (position // self._every + 1) * self._every
        kept = {path: fork_entry(leaf) for path, leaf in leaves(cache) if not adapter_of(leaf).appends}
        if kept and position:
            self.add(StateMark(position, kept, pinned))

    def add(self, mark: StateMark) -> None:
        """Put in a mark; one that was at the same position is replaced."""
        same = [old for old in self._marks if old.position == mark.position]
        pinned = mark.pinned or any(old.pinned for old in same)
        rest = [old for old in self._marks if old.position != mark.position]
        rest.append(StateMark(mark.position, mark.leaves, pinned))
        self._marks = sorted(rest, key=lambda one: one.position)
        self._num_bytes = sum(one.num_bytes for one in self._marks)
        while self._num_bytes > self._max_bytes and len(self._marks) > 1:
            gone = self._marks.pop(self._least())
            self._num_bytes -= gone.num_bytes

    def _least(self) -> int:
        """The index of the mark that is missed least: its neighbours are closest. The newest stays."""
        marks = self._marks

        def cost(index: int) -> tuple[bool, int]:
            before = marks[index - 1].position if index else 0
            return marks[index].pinned, marks[index + 1].position - before

        return min(range(len(marks) - 1), key=cost)

    @property
    def worth_saving(self) -> list[StateMark]:
        """The pinned marks, where all marks keep to their limit of bytes."""
        return [mark for mark in self._marks if mark.pinned] if self._num_bytes <= self._max_bytes else []

    def before(self, position: int) -> StateMark | None:
        """The last mark at or before `position`."""
        return max((mark for mark in self._marks if mark.position <= position), key=_position, default=None)

    def pin_before(self, position: int) -> None:
        """Pin the last mark at or before `position`."""
        mark = self.before(position)
        if mark is not None and not mark.pinned:
            self.add(replace(mark, pinned=True))

    def cut(self, position: int) -> None:
        """Forget the marks behind `position`: other tokens will stand there."""
        self._marks = [mark for mark in self._marks if mark.position <= position]
        self._num_bytes = sum(mark.num_bytes for mark in self._marks)
        self.next_position = (position // self._every + 1) * self._every

    def fork(self) -> StateMarks:
        """The same marks for another sequence; a mark never changes, so both may hold it."""
        twin = StateMarks(self._every, self._max_bytes)
        twin._marks, twin._num_bytes, twin.next_position = list(self._marks), self._num_bytes, self.next_position
        return twin


def restore_mark(cache: list[Any], mark: StateMark) -> None:
    """Put the caches that a mark holds back; the others must be trimmed to its position by the caller."""
    # The mark stays as it is: what goes into the cache is a fork of it.
    map_leaves(cache, lambda path, leaf: fork_entry(mark.leaves[path]) if path in mark.leaves else leaf)


def _position(mark: StateMark) -> int:
    return mark.position
