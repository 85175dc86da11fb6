"""Blocks in memory: by key, least recently used out first, children before their parents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from mlxgen.prefixcache.block import Block
from mlxgen.prefixcache.keys import Key


class BlockTree:
    """The blocks of one model. Owned by its prefix cache, which holds a lock around every call.

    In order of use, a parent after its children: using a block counts as using all it stands on, and of these the
    first one last. So the block that was used longest ago never has children.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def get(self, key: Key) -> Block | None:
        return self._blocks.get(key)

    def touch(self, keys: Sequence[Key]) -> None:
        """The chain of blocks `keys`, from the first one on, was used now."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def add(self, block: Block, chain: Sequence[Key]) -> None:
        """Put in a block, which stands on the blocks `chain`."""
        if block.key not in self._blocks:
            self._blocks[block.key] = block
            self.num_bytes += block.num_bytes
        self.touch([*chain, block.key])

    def make_room(self, max_bytes: int, spare: Collection[Key] = ()) -> bool:
        """Drop blocks until no more than `max_bytes` are left, but none of `spare`; whether that was enough."""
        for key in self._oldest(spare):
            if self.num_bytes <= max_bytes:
                break
            self.num_bytes -= self._blocks.pop(key).num_bytes
        return self.num_bytes <= max_bytes

    def _oldest(self, spare: Collection[Key]) -> Iterable[Key]:
        return [key for key in self._blocks if key not in spare]

    def clear(self) -> None:
        self._blocks.clear()
        self.num_bytes = 0
