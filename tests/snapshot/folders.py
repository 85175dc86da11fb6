"""A small snapshot with two generations, and ways to compare what comes back with what went in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlxgen.errors import SnapshotError
from mlxgen.snapshot.store import HostArray, Manifest, Record, SnapshotStore

PREP = {"pixels": HostArray.from_numpy(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))}
STATE_1 = {"conv": HostArray.from_numpy(np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3))}
STATE_2 = {"conv": HostArray.from_numpy(np.linspace(1, 2, 6, dtype=np.float32).reshape(2, 3))}
KV = {
    "0.keys": HostArray.from_numpy(np.arange(16, dtype=np.uint16).reshape(1, 2, 8), "BF16"),
    "0.values": HostArray.from_numpy(np.arange(16, 32, dtype=np.uint16).reshape(1, 2, 8), "BF16"),
    "mask": HostArray.from_numpy(np.array([True, False, True])),
}
EARLY = [Record("turn", {"role": "user", "text": "Grüße"}), Record("media", {"sha256": "ab" * 32})]
MIDDLE = [Record("tokens", {"ids": [5, 6], "logprobs": [-0.1, float("-inf")]})]
LATE = [Record("tokens", {"ids": [7]}), Record("finish", {"reason": "length"})]
RECORDS = EARLY + MIDDLE + LATE
CONTENT = {
    "prep-000.safetensors": PREP,
    "state-000000.safetensors": STATE_1,
    "kv-000000.safetensors": KV,
    "state-000001.safetensors": STATE_2,
}


def build(path: Path) -> None:
    """Generation 1: EARLY, a prep and a state file. 2: MIDDLE too, new kv and state. LATE is in no pin."""
    with SnapshotStore.create(path) as store:
        store.append(EARLY)
        prep = store.put("prep", PREP, meta={"index": 0})
        state = store.put("state", STATE_1, meta={"end": 4})
        store.commit({"step": 1}, [prep, state], store.pin())
        store.append(MIDDLE)
        kv = store.put("kv", KV, meta={"start": 0, "end": 2})
        state = store.put("state", STATE_2, meta={"end": 6})
        store.commit({"step": 2}, [prep, kv, state], store.pin())
        store.append(LATE)


def plain(arrays: dict[str, HostArray] | Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Arrays as values that compare with ==."""
    return {name: (array.dtype, tuple(array.shape), bytes(array.raw())) for name, array in arrays.items()}


def load(path: Path) -> tuple[Manifest | None, list[Record], list[str]]:
    """Open, read every file of the newest generation that has only good ones; what was read must be what was put."""
    with SnapshotStore.open(path) as store:
        while store.manifest is not None:
            try:
                for entry in store.manifest.files:
                    assert plain(store.read(entry)) == plain(CONTENT[entry.name])
                break
            except SnapshotError as exc:
                store.fall_back(str(exc))
        return store.manifest, store.records, store.notes
