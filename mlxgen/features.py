"""Encoded pictures that are kept in memory, so that a picture seen before isn't encoded again."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, Protocol

from mlxgen.inputs import Features, VisionModel

_FEATURE_STORE_BYTES = 512 * 2**20


class FeatureFiles(Protocol):
    """Where features are kept beyond the process. Neither call raises: what can't be read isn't there."""

    def load(self, content_hash: str, part: int) -> Features | None: ...

    def save(self, content_hash: str, part: int, features: Features) -> None: ...


class FeatureStore:
    """Encoded features by content hash, least recently used out first, bounded in bytes. One per model, on its thread.

    So that the same picture in another turn or session isn't encoded again. It is a cache: dropping it loses only time.
    `disk`, if there is one, is asked for what isn't in memory, and given what is new.
    """

    def __init__(self, max_bytes: int = _FEATURE_STORE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.disk: FeatureFiles | None = None
        self._entries: OrderedDict[tuple[str, int], Features] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, content_hash: str, part: int) -> Features | None:
        found = self._entries.get((content_hash, part))
        if found is not None:
            self._entries.move_to_end((content_hash, part))
        elif self.disk is not None:
            found = self.disk.load(content_hash, part)
            if found is not None:
                self._add(content_hash, part, found)
        return found

    def put(self, content_hash: str, part: int, features: Features) -> None:
        if (content_hash, part) in self._entries:
            return
        self._add(content_hash, part, features)
        if self.disk is not None:
            self.disk.save(content_hash, part, features)

    def _add(self, content_hash: str, part: int, features: Features) -> None:
        self._entries[(content_hash, part)] = features
        self._num_bytes += sum(array.nbytes for array in features.values())
        while self._num_bytes > self._max_bytes and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= sum(array.nbytes for array in dropped.values())


_stores: weakref.WeakKeyDictionary[Any, FeatureStore] = weakref.WeakKeyDictionary()


def feature_store(vision: VisionModel) -> FeatureStore:
    """The store that belongs to a loaded model."""
    return _stores.setdefault(vision, FeatureStore())
