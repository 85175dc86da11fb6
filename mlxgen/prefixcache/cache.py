"""A model's prefix cache: the longest known beginning of a prompt, and what every prefill pass adds to it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import MlxgenError
from mlxgen.features import feature_store
from mlxgen.inputs import Features, PreparedInput
from mlxgen.models.cachedir import cache_folder
from mlxgen.models.model import Model
from mlxgen.prefill import plan_prefill
from mlxgen.prefixcache import options as settings
from mlxgen.prefixcache.block import Block, block_of, filled, size_of_block
from mlxgen.prefixcache.disk import DiskTier
from mlxgen.prefixcache.files import block_from, block_to_host, features_from, features_to_host
from mlxgen.prefixcache.keys import MIN_TOKENS, Chunk, Key, chunks, passes_from_zero, root_key
from mlxgen.prefixcache.layout import Layout
from mlxgen.prefixcache.options import PrefixCacheOptions
from mlxgen.prefixcache.stats import Counters, PrefixCacheInfo
from mlxgen.prefixcache.tree import BlockTree
from mlxgen.prefixcache.writer import CacheWriter, WriteJob
from mlxgen.sequence import TokenSequence
from mlxgen.snapshot.export import environment

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be prefilled: all `ids` but the last, cut into chunks of `step_size` tokens."""

    ids: Sequence[int]
    inputs: PreparedInput | None
    step_size: int


class PrefixCache:
    """Blocks of prefilled prompts in memory, and, if it is told so, on the disk. Owned by the model (weakly).

    Only passes that a cold run would make are kept, and a prompt is only ever matched by its own cold plan: what comes
    from here has the bits that a cold run has. Losing it loses only time, so nothing here ever fails a run: what goes
    wrong is said once in `warnings`. Any thread that may use the model may call it.
    """

    def __init__(self, model: Model, options: PrefixCacheOptions = PrefixCacheOptions()) -> None:
        self._model = weakref.ref(model)
        self._lock = threading.RLock()
        self._tree = BlockTree()
        self._live: weakref.WeakSet[TokenSequence] = weakref.WeakSet()
        self._layouts: dict[Key, Layout] = {}
        self._counters = Counters()
        self._tier: DiskTier | None = None
        self._writer: CacheWriter | None = None
        self._warnings: list[str] = []
        self._memory_bytes = 0
        self.configure(options)

    # -- settings ------------------------------------------------------------------------------------------------------

    def configure(self, options: PrefixCacheOptions) -> None:
        """Change budgets and folder. With a disk budget, the model's fingerprint is computed if it isn't known.

        Raises `InvalidValueError`. A folder that can't be used is a warning.
        """
        options.validate()
        chosen = options.memory_bytes
        with self._lock:
            self._memory_bytes = settings.default_memory_bytes() if chosen is None else chosen
            self._tree.make_room(self._memory_bytes)
        self.close()
        model = self._model()
        if options.disk_bytes and model is not None:
            self._open_disk(model, options)

    def _open_disk(self, model: Model, options: PrefixCacheOptions) -> None:
        root = cache_folder() / "prefix" if options.folder is None else options.folder
        tier = DiskTier(root, _folder_of(model), options.disk_bytes)
        writer = CacheWriter(tier, options.disk_bytes_per_s)
        try:
            tier.prepare()
        except MlxgenError as error:
            writer.warn(str(error))  # what is there may still be read
        self._tier, self._writer = tier, writer
        weakref.finalize(self, writer.close)
        if model.vision is not None:
            feature_store(model.vision).disk = _FeatureFiles(tier, writer)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that is to be on the disk is there; False if it isn't."""
        return self._writer is None or self._writer.flush(timeout_s)

    def close(self) -> None:
        """Let go of the disk: what waits to be written is written for 3 seconds more. Memory stays in use."""
        writer, self._writer, self._tier = self._writer, None, None
        model = self._model()
        if model is not None and model.vision is not None:
            feature_store(model.vision).disk = None
        if writer is not None:
            writer.close()
            self._warnings += writer.warnings

    def clear(self) -> None:
        """Forget what is in memory."""
        with self._lock:
            self._tree.clear()

    @property
    def enabled(self) -> bool:
        return self._memory_bytes > 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What went wrong, each said once. Nothing else depends on it."""
        return (*self._warnings, *(() if self._writer is None else self._writer.warnings))

    def info(self) -> PrefixCacheInfo:
        counters = self._counters
        with self._lock:
            return PrefixCacheInfo(
                num_blocks=len(self._tree),
                num_bytes=self._tree.num_bytes,
                live_bytes=self._live_bytes(),
                memory_bytes=self._memory_bytes,
                num_lookups=counters.num_lookups,
                num_hits=counters.num_hits,
                num_reused_tokens=counters.num_reused_tokens,
                num_stored=counters.num_stored,
                num_read=counters.num_read,
                num_damaged=counters.num_damaged,
                copy_s=counters.copy_s,
                warnings=self.warnings,
            )

    # -- reading -------------------------------------------------------------------------------------------------------

    def find(self, sequence: TokenSequence, prompt: Prompt) -> list[Chunk]:
        """The chunks of the prompt's cold plan that are known, from the first one on. Reads no file."""
        if not self.enabled:
            return []
        self._counters.num_lookups += 1
        inputs = prompt.inputs
        atomic = () if inputs is None else inputs.atomic
        plan = plan_prefill(0, len(prompt.ids) - 1, prompt.step_size, atomic, sequence.cuts_of(inputs))
        passes = list(zip((0, *plan.ends), plan.ends, strict=False))
        known: list[Chunk] = []
        with self._lock:
            for chunk in chunks(root_key(sequence.options), prompt.ids, inputs, passes):
                if chunk.key not in self._tree and (self._tier is None or not self._tier.find(_name_of(chunk.key))):
                    break
                known.append(chunk)
        return known

    def fill(
        self, sequence: TokenSequence, prompt: Prompt, known: Sequence[Chunk], *, cancel: CancelToken = NEVER
    ) -> list[Chunk]:
        """Make `sequence` hold what the chunks `known` (which `find` gave) left in its caches, without a forward pass;
        the prompt's ids become its own. Returns the chunks it now holds: fewer, or none, if a file turns out to be
        damaged or gone (the sequence is then as it was). A checkpoint comes before each file."""
        blocks = self._blocks(sequence, known, cancel)
        if not blocks:
            return []
        began_s = time.perf_counter()
        used = [block.chunk for block in blocks]
        keys = [chunk.key for chunk in used]
        try:
            cache = filled(sequence, blocks, len(prompt.ids))
        except Exception as error:
            self._warn(f"a hit couldn't be used ({error})")
            return []
        sequence.fill(prompt.ids, prompt.inputs, cache, [("prefill", c.start, c.end - c.start) for c in used])
        with self._lock:
            self._tree.touch(keys)
            if self._tier is not None:
                self._tier.touch([_name_of(key) for key in keys])
            for number, block in enumerate(blocks):
                self._offer(block, keys[:number])
            self._counters.num_hits += 1
            self._counters.num_reused_tokens += used[-1].end
            self._counters.copy_s += time.perf_counter() - began_s
        return used

    def _blocks(self, sequence: TokenSequence, known: Sequence[Chunk], cancel: CancelToken) -> list[Block]:
        blocks: list[Block] = []
        for chunk in known:
            with self._lock:
                block = self._tree.get(chunk.key)
            if block is None:
                cancel.checkpoint()
                block = self._read(sequence, chunk)
                if block is None:
                    break
                with self._lock:
                    self._keep(block, [one.chunk.key for one in blocks])
            blocks.append(block)
        return blocks

    def _read(self, sequence: TokenSequence, chunk: Chunk) -> Block | None:
        tier, name = self._tier, _name_of(chunk.key)
        if tier is None:
            return None
        try:
            arrays = tier.read(name)
            if arrays is None:
                return None
            block = block_from(arrays, chunk)
            self._layout(sequence).check(chunk, block.leaves, block.arrays)
        except Exception as error:
            # Whatever a file holds, the worst it may do is to be of no use.
            _log.info("a block of the prefix cache is left out: %s", error)
            tier.remove(name)
            self._counters.num_damaged += 1
            return None
        self._counters.num_read += 1
        return block

    def _layout(self, sequence: TokenSequence) -> Layout:
        key = root_key(sequence.options)
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = Layout(sequence)
        return found

    # -- writing -------------------------------------------------------------------------------------------------------

    def keep(self, sequence: TokenSequence) -> None:
        """The last pass of `sequence` was a prefill pass: keep what it added, if all before it were, too.

        Copies what the pass added (the whole of what is in rings and recurrent states), where there is room for it.
        """
        if not self.enabled:
            return
        try:
            self._keep_last_pass(sequence)
        except Exception as error:
            self._warn(f"a block couldn't be kept ({error})")

    def _keep_last_pass(self, sequence: TokenSequence) -> None:
        passes = passes_from_zero(sequence.passes.entries, sequence.num_fed)
        if not passes:
            return
        start, end = passes[-1]
        if end - start < MIN_TOKENS and end == len(sequence.ids) - 1:
            return  # nothing stands on it but this very prompt
        began_s = time.perf_counter()
        path = chunks(root_key(sequence.options), sequence.ids, sequence.inputs, passes)
        *chain, key = (chunk.key for chunk in path)
        with self._lock:
            self._live.add(sequence)
            if key in self._tree:
                self._tree.touch([*chain, key])
                return
            size = size_of_block(sequence, path[-1].end - path[-1].start)
            if not self._tree.make_room(self._room() - size, spare=set(chain)):
                return
            block = block_of(sequence, path[-1])
            if block is None:
                return
            self._tree.add(block, chain)
            self._counters.num_stored += 1
            self._offer(block, chain)
            self._counters.copy_s += time.perf_counter() - began_s

    def make_room(self) -> bool:
        """Give the blocks' memory back, because a run needs it; False if there are none."""
        with self._lock:
            held = len(self._tree) > 0
            self._tree.clear()
        return held

    def watch(self, sequence: TokenSequence) -> None:
        """Count the caches of `sequence` in the budget as long as it lives."""
        if self.enabled:
            with self._lock:
                self._live.add(sequence)

    def _keep(self, block: Block, chain: Sequence[Key]) -> None:
        """Put in a block that was read, if there is room."""
        if self._tree.make_room(self._room() - block.num_bytes, spare={*chain, block.key}):
            self._tree.add(block, chain)

    def _room(self) -> int:
        return self._memory_bytes - self._live_bytes()

    def _live_bytes(self) -> int:
        return sum(sequence.num_bytes for sequence in self._live)

    def _offer(self, block: Block, chain: Sequence[Key]) -> None:
        """Have a block written to the disk if it isn't there."""
        tier, writer, name = self._tier, self._writer, _name_of(block.key)
        if tier is not None and writer is not None and not writer.warnings and not tier.find(name):
            writer.put(WriteJob(name, block_to_host(block), tuple(map(_name_of, chain))))

    def _warn(self, text: str) -> None:
        warning = f"the prefix cache: {text}"
        _log.debug("%s", warning, exc_info=True)
        if warning not in self._warnings:
            self._warnings.append(warning)
            _log.warning("%s", warning)


class _FeatureFiles:
    """Encoded pictures on the disk, for the model's feature store."""

    def __init__(self, tier: DiskTier, writer: CacheWriter) -> None:
        self._tier = tier
        self._writer = writer

    def load(self, content_hash: str, part: int) -> Features | None:
        name = _feature_name(content_hash, part)
        try:
            arrays = self._tier.read(name)
            found = None if arrays is None else features_from(arrays, content_hash, part)
        except Exception as error:
            _log.info("features of the prefix cache are left out: %s", error)
            self._tier.remove(name)
            return None
        if found is not None:
            self._tier.touch([name])
        return found

    def save(self, content_hash: str, part: int, features: Features) -> None:
        name = _feature_name(content_hash, part)
        if not self._writer.warnings and not self._tier.find(name):
            self._writer.put(WriteJob(name, features_to_host(features, content_hash, part)))


def _name_of(key: Key) -> str:
    return f"block-{key}"


def _feature_name(content_hash: str, part: int) -> str:
    return f"features-{content_hash}-{part}"


def _folder_of(model: Model) -> str:
    """One folder for everything that decides which bits a pass gives: model, versions, device."""
    said: list[Any] = [model.fingerprint.digest, environment()]
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.name.rstrip("/").rpartition("/")[2])[:60].strip(".-")
    return f"{name or 'model'}-{digest[:32]}"


_caches: weakref.WeakKeyDictionary[Model, PrefixCache] = weakref.WeakKeyDictionary()
_caches_lock = threading.Lock()


def prefix_cache(model: Model) -> PrefixCache:
    """The prefix cache that belongs to a loaded model; made with default settings when it is first asked for."""
    with _caches_lock:
        found = _caches.get(model)
        if found is None:
            found = _caches[model] = PrefixCache(model)
        return found
