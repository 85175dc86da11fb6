"""mlx-vlm's models keep positions and the like of the current request on themselves: put back after every call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What one module held: its entries (arrays, lists) and its attributes, and what was in those that can grow."""

    module: nn.Module
    entries: dict[str, Any]
    attributes: dict[str, Any]
    contents: tuple[tuple[Any, Any], ...]


class Isolation:
    """Every module of a model as it was when nothing had been asked of it.

    Owned by the model's one adapter, used on the thread that owns the model. Holds nothing of a request: what a call
    left is dropped when it ends, however it ends. What a request needs later comes in as an argument.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: list[_Kept] | None = None
        self._changing: list[_Kept] = []

    @contextmanager
    def call(self, *, every_module: bool = True) -> Iterator[None]:
        """A call of the model. Without `every_module` only those modules that ever changed in a call are put back:
        looking at all of them takes a few milliseconds, which is too long for one token."""
        self.begin()
        try:
            yield
        finally:
            self.restore(every_module=every_module)

    def begin(self) -> None:
        """Remember the model as it is, at the first call; weights may have been replaced (LoRA) until then."""
        if self._kept is None:
            self._kept = [_keep(module) for module in self._model.modules()]

    def restore(self, *, every_module: bool = True) -> None:
        kept = self._kept or []
        for one in kept if every_module else self._changing:
            if _put_back(one) and one not in self._changing:
                self._changing.append(one)

    def forget(self) -> None:
        """Remember the model anew at the next call; which modules change stays known by their class."""
        self._kept, self._changing = None, []

    @property
    def changing(self) -> Sequence[str]:
        """The classes of modules that calls changed, for messages and tests."""
        return [type(one.module).__name__ for one in self._changing]


def _keep(module: nn.Module) -> _Kept:
    entries, attributes = dict(module), dict(vars(module))
    growing = [value for held in (entries, attributes) for value in held.values() if _grows(value)]
    return _Kept(module, entries, attributes, tuple((value, value.copy()) for value in growing))


def _grows(value: Any) -> bool:
    return isinstance(value, list | dict | set) and not isinstance(value, nn.Module)


def _put_back(kept: _Kept) -> bool:
    """Whether anything had changed. Arrays and modules are compared by identity."""
    changed = False
    attributes = vars(kept.module)
    if not _same(kept.module, kept.entries):
        changed = True
        for name in [name for name in kept.module if name not in kept.entries]:
            dict.pop(kept.module, name)
        for name, value in kept.entries.items():
            dict.__setitem__(kept.module, name, value)
    if not _same(attributes, kept.attributes):
        changed = True
        attributes.clear()
        attributes.update(kept.attributes)
    for value, content in kept.contents:
        if isinstance(value, dict):
            same = _same(value, content)
        elif isinstance(value, list):
            same = len(value) == len(content) and all(a is b for a, b in zip(value, content, strict=True))
        else:
            same = value == content
        if not same:
            changed = True
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
    return changed


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return len(now) == len(then) and all(name in now and now[name] is value for name, value in then.items())
