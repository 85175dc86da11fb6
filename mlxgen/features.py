"""Encoded pictures that are kept in memory, so that a picture seen before isn't encoded again."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

from mlxgen.inputs import Features, VisionModel

_FEATURE_STORE_BYTES = 512 * 2**20


class FeatureStore:
    """Encoded features by content hash, least recently used out first, bounded in bytes. One per model, on its thread.

    So that the same picture in another turn or session isn't encoded again. It is a cache: dropping it loses only time.
    """

    def __init__(self, max_bytes: int = _FEATURE_STORE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[str, int], Features] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, content_hash: str, part: int) -> Features | None:
        found = self._entries.get((content_hash, part))
        if found is not None:
            self._entries.move_to_end((content_hash, part))
        return found

    def put(self, content_hash: str, part: int, features: Features) -> None:
        key = (content_hash, part)
        if key in self._entries:
            return
        self._entries[key] = features
        self._num_bytes += sum(array.nbytes for array in features.values())
        while self._num_bytes > self._max_bytes and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= sum(array.nbytes for array in dropped.values())


_stores: weakref.WeakKeyDictionary[Any, FeatureStore] = weakref.WeakKeyDictionary()


def feature_store(vision: VisionModel) -> FeatureStore:
    """The store that belongs to a loaded model."""
    return _stores.setdefault(vision, FeatureStore())
