"""Branches that must share a bounded memory: those that rest are parked when the copies of all don't fit."""

from __future__ import annotations

import weakref

from mlxgen.state import SessionState


class Siblings:
    """The branches of one place. Shared by their sessions, used on their thread; holds none of them alive.

    A branch that runs has a copy of the caches. After each run, as long as the copies together take more than
    `max_bytes`, the one that ran longest ago is parked (`TokenSequence.park`); the one that ran last stays.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._states: list[weakref.ref[SessionState]] = []

    def ran(self, state: SessionState) -> None:
        """`state` has just run: make room at the others' expense."""
        others = [found for ref in self._states if (found := ref()) is not None and found is not state]
        self._states = [weakref.ref(other) for other in (*others, state)]
        total = sum(one.sequence.num_bytes for one in (*others, state))
        for other in others:
            if total <= self._max_bytes:
                return
            total -= other.sequence.num_bytes
            other.sequence.park()
