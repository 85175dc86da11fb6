"""One sequence of tokens and the caches that hold it: the ledger, kept true through every stop and every error.

`ids` are all tokens that exist for the model: those that were fed, in order, and behind them those still to be fed.
The first `num_fed` are the *ledger* (P1): every layer of the cache has been fed exactly these. During a reply `ids`
ends with the last token the user saw; if it isn't fed yet (`max_tokens` ended the reply) it is the *emitted* pending
token. `ahead` is the *unseen* one: sampled, not shown, not part of `ids`.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as kinds

from mlxgen.cache import (
    CacheOptions,
    StateMark,
    StateMarks,
    adapter_of,
    can_trim,
    leaves,
    make_cache,
    quantize_from,
    trim,
)
from mlxgen.cache import fork as fork_cache
from mlxgen.cache.marks import restore_mark
from mlxgen.cache.parking import Parked
from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import InvalidValueError
from mlxgen.inputs import ForwardPass, PreparedInput
from mlxgen.models.model import Model
from mlxgen.streams import generation_stream


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token on the host, with its log-probability and the most likely others if they were asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


@dataclass(slots=True)
class PassLog:
    """Which forward passes filled the cache: (kind, start, number of tokens), in order.

    Replaying the same passes gives the same bits; feeding the same tokens in other pieces need not (quantised
    caches, GPU kernels chosen by shape). Consecutive decode passes are one entry. A prefill pass of which a rewind
    kept only the first rows stays whole; that the next entry starts inside it says where it was trimmed.
    """

    entries: list[tuple[str, int, int]] = field(default_factory=list)

    def prefill(self, start: int, num_tokens: int) -> None:
        self.entries.append(("prefill", start, num_tokens))

    def decode(self, start: int) -> None:
        if self.entries:
            kind, first, count = self.entries[-1]
            if kind == "decode" and first <= start < first + count:
                return  # an interrupted commit, applied a second time
            if kind == "decode" and first + count == start:
                self.entries[-1] = ("decode", first, count + 1)
                return
        self.entries.append(("decode", start, 1))

    def trim(self, position: int) -> None:
        while self.entries and self.entries[-1][1] >= position:
            self.entries.pop()
        if self.entries:
            kind, start, count = self.entries[-1]
            if kind == "decode":
                self.entries[-1] = (kind, start, min(count, position - start))

    def boundary(self, position: int) -> int:
        """The last place at or before `position` where a pass ended: inside a prefill pass, its start."""
        for (kind, start, count), following in zip(self.entries, [*self.entries[1:], None], strict=True):
            end = start + count if following is None else min(start + count, following[1])
            if kind == "prefill" and start < position < end:
                return start
        return position


class TokenSequence:
    """See the module's docstring. Owned by one session (or one iterator); used by one thread at a time.

    Survives a stop: everything. Survives an error inside a pass: `ids`, `num_fed`, `ahead`; the cache may then be torn
    (layers at different offsets) and is mended by `repair()` before it is used again.
    """

    def __init__(
        self,
        model: Model,
        options: CacheOptions = CacheOptions(),
        *,
        cache: list[Any] | None = None,
        ids: Sequence[int] = (),
        num_fed: int = 0,
    ) -> None:
        self.forward: ForwardPass = model.forward
        self.vocab_size = model.vocab_size
        self.options = options
        # Whose `make_cache` and `layers` describe the caches: for a vision-language model its language part.
        self._module = model.module if model.vision is None else model.vision.language
        self.cache: list[Any] = make_cache(self._module, options) if cache is None else cache
        # Tokens that a cache of the caller's held before: unknown here, so such a cache can be trimmed but not rebuilt.
        self._before = _offset_of(self.cache) if cache is not None else 0
        self._filled_before = cache is not None and not all(leaf.empty() for _, leaf in leaves(cache))
        # What to begin anew with: a caller's empty cache may be of another kind than `options` would make.
        self._empty = None if cache is None or self._filled_before else copy.deepcopy(cache)
        self.ids: list[int] = list(ids)
        self.num_fed = num_fed
        self.ahead: Sampled | None = None
        self.last: Sampled | None = None  # the token appended to `ids` last, with its log-probabilities
        self.inputs: PreparedInput | None = None
        self.passes = PassLog()
        self._torn: _Tear | None = None
        # Passes to be run again, and to where.
        self._rebuilding: tuple[tuple[tuple[str, int, int], ...], int] | None = None
        self._recurrent_leaves: list[Any] | None = None
        self._requantized = False
        self._base: list[Any] | None = None  # the caches all forks of one place began with, for `park`
        self._num_shared = 0  # of how many tokens these still hold the same rows
        self._parked: Parked | None = None
        self.marks = StateMarks(options.mark_every, options.max_mark_bytes)
        self._marking = not self._filled_before and any(not adapter_of(leaf).appends for _, leaf in leaves(self.cache))

    @property
    def ledger(self) -> list[int]:
        return self.ids[: self.num_fed]

    def fork(self) -> TokenSequence:
        """An independent sequence at the same place, pending token included. No forward pass, no copy of arrays: the
        side that is written to first copies what it writes to (see `cache.fork`).

        Nothing may be under way: settle the iterator first. What `repair` has to do it has to do on both sides.
        """
        twin = copy.copy(self)
        twin.cache = fork_cache(self.cache)
        twin.ids = list(self.ids)
        twin.passes = PassLog(list(self.passes.entries))
        twin.marks = self.marks.fork()
        twin._recurrent_leaves = None
        return twin

    def mark(self) -> None:
        """Keep a state mark at the ledger's end, where the caches have something that can't be trimmed; and the last
        one before the last of `ids`, since coming back here for other logits means feeding that token again."""
        if self._marking and not self.torn and self.num_fed:
            self.marks.take(self.cache, self.num_fed, pinned=True)
            self.marks.pin_before(len(self.ids) - 1)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where a prefill chunk should end besides: behind media, for caches that only a state mark brings back there.

        A cut less than `mark_every` tokens behind the one before is left out.
        """
        return self.cuts_of(self.inputs)

    def cuts_of(self, inputs: PreparedInput | None) -> tuple[int, ...]:
        """The same for a prompt that isn't this sequence's yet."""
        if not self._marking or inputs is None:
            return ()
        ends = {span.medium: span.end for span in inputs.spans}
        cuts: list[int] = []
        for end in sorted(ends.values()):
            if end - (cuts[-1] if cuts else 0) >= self.options.mark_every:
                cuts.append(end)
        return tuple(cuts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the caches' arrays; 0 while they are parked."""
        return sum(array.nbytes for array in self.arrays())

    def share(self) -> None:
        """What the caches hold now is what forks of this sequence have in common; those can be parked."""
        self._base, self._num_shared = self.cache, self.num_fed

    def park(self) -> None:
        """Give back the memory of what forks have in common; the caches are put together again by their next use."""
        if self._base is None or self.torn:
            return
        self._parked = Parked(self.cache, self._base, self._num_shared)
        self.cache[:] = []
        self._recurrent_leaves = None

    def _unpark(self) -> None:
        if self._parked is not None:
            self.cache[:] = self._parked.restore()
            self._parked = None

    @property
    def end(self) -> int:
        """Where the ledger ends, once `repair` has run the passes that going back left to it."""
        return self.num_fed if self._rebuilding is None else self._rebuilding[1]

    def arrays(self) -> list[mx.array]:
        return [array for _, leaf in leaves(self.cache) for array in adapter_of(leaf).arrays(leaf)]

    def side_states(self) -> list[mx.array]:
        """The arrays that the current token's logits don't depend on: recurrent states, a cache just quantised."""
        if self._requantized:
            self._requantized = False
            return self.arrays()
        recurrent = self._recurrent()
        return [a for leaf in recurrent for a in leaf.cache if a is not None] if recurrent else []

    def _recurrent(self) -> list[Any]:
        if self._recurrent_leaves is None:
            self._recurrent_leaves = [leaf for _, leaf in leaves(self.cache) if isinstance(leaf, kinds.ArraysCache)]
        return self._recurrent_leaves

    def evaluate(self) -> None:
        """Finish all work on the cache that is still lazy or under way."""
        try:
            mx.eval(self.arrays())
        except Exception:
            self.failed_eval()
            raise

    # -- forward passes ------------------------------------------------------------------------------------------

    def feed(self, end: int) -> None:
        """One prefill pass: tokens `[num_fed, end)`, evaluated; logits are never computed. Commits, or is torn."""
        self.repair()
        self._prefill_pass(self.ids[self.num_fed : end], end)

    def fill(
        self,
        ids: Sequence[int],
        inputs: PreparedInput | None,
        cache: list[Any],
        entries: Sequence[tuple[str, int, int]],
    ) -> None:
        """Begin anew with `ids`, of which `cache` holds what the passes `entries` leave in empty caches."""
        self.reset()
        self._torn = _Tear.UNKNOWN  # should an exception come between, the passes are run again
        self._rebuilding = self._parked = self.ahead = None
        self.marks.cut(0)
        self.ids, self.inputs = list(ids), inputs
        self.cache[:] = cache
        self.passes = PassLog(list(entries))
        self.num_fed = sum(count for _, _, count in entries)
        self._torn = None
        if self._marking:
            self.marks.take(self.cache, self.num_fed)

    def _prefill_pass(self, tokens: list[int], end: int) -> None:
        """Feed `tokens` in one pass, then trim to `end` (a pass that is run again may have been trimmed later)."""
        start, inputs = self.num_fed, self.inputs
        if inputs is not None and start + len(tokens) > end:
            inputs = inputs.before(end)
        self._torn = _Tear.UNKNOWN
        with mx.stream(generation_stream()):
            try:
                self.forward(mx.array(tokens, mx.uint32), cache=self.cache, start=start, inputs=inputs)
                quantize_from(self.cache, self.options)
            except BaseException as error:
                self._torn = _tear(error)
                raise
            self._torn = _Tear.BETWEEN_LAYERS
            self.evaluate()
            mx.clear_cache()
        if start + len(tokens) > end:
            self._torn = _Tear.UNKNOWN
            trim(self.cache, start + len(tokens) - end)
        self.passes.prefill(start, len(tokens))
        self.num_fed = end
        self._torn = None
        if self._marking:
            if end in self.cuts:
                self.marks.take(self.cache, end, pinned=True)
            elif end >= self.marks.next_position:
                self.marks.take(self.cache, end)

    def step(self, token: mx.array) -> mx.array:
        """Build one decode pass for `token` (uint32 (1,), possibly not evaluated yet) without waiting for it.

        Returns the logits (1, vocabulary). The caller builds what is to be sampled from them, submits that with
        `mx.async_eval` and then calls `committed()`; an error before that leaves the sequence torn, to be repaired
        before the next pass. Not repaired here: this is the hot path.
        """
        self._torn = _Tear.UNKNOWN
        try:
            logits = self.forward(token, cache=self.cache, start=self.num_fed, inputs=self.inputs)
            # Before sampling, as mlx-lm does: the pass that crosses the threshold still attended to unquantised rows.
            if self.options.kv_bits is not None and quantize_from(self.cache, self.options):
                self._requantized = True
        except BaseException as error:
            self._torn = _tear(error)
            raise
        self._torn = _Tear.BETWEEN_LAYERS
        return logits[:, -1]

    def committed(self) -> None:
        """The pass of `step` was submitted: its token belongs to the ledger."""
        self.passes.decode(self.num_fed)
        self.num_fed += 1
        self._torn = None
        if self._marking and self.num_fed >= self.marks.next_position:
            self.marks.take(self.cache, self.num_fed)

    def failed_eval(self) -> None:
        """An evaluation raised: whatever the arrays hold now may be garbage; rebuild before the next pass."""
        self._torn = _Tear.UNKNOWN
        self.marks.cut(0)  # the newest may share what failed

    @property
    def torn(self) -> bool:
        """Whether `repair()` has something to do before the cache is as long as the ledger says."""
        return self._torn is not None or self._rebuilding is not None or self._parked is not None

    # -- going back ----------------------------------------------------------------------------------------------

    def rewind(self, position: int, *, cancel: CancelToken = NEVER) -> int:
        """Make the ledger end at `position` or before it, and say where it ends now.

        A cache that can be trimmed ends exactly there. One that can't (wrapped ring, recurrent state) goes back to the
        last mark before it, and runs what few passes led from there to `position` again, a checkpoint before each; if
        the mark is far, or there is none, the caller prefills from the returned position. `ids` behind the new end and
        `ahead` are dropped; after `Cancelled` they are still there.
        """
        if not 0 <= position <= self.num_fed:
            raise InvalidValueError(f"can't rewind to token {position}: the cache holds {self.num_fed}")
        self.repair(cancel)
        position = self._before_media(position)
        if position < self.num_fed:
            if self.can_trim_to(position):
                self._trim_to(position)
            else:
                self._back_to_mark(position, cancel)
        del self.ids[self.num_fed :]
        self.marks.cut(self.num_fed)
        self.ahead = None
        return self.num_fed

    def _before_media(self, position: int) -> int:
        """`position`, or the start of the prefill pass it lies in, if media stand behind it there: without them, that
        pass couldn't be run again to the same bits."""
        if self.inputs is None:
            return position
        for kind, start, count in self.passes.entries:
            if kind == "prefill" and start < position < start + count:
                behind = (span for span in self.inputs.spans if span.end > position and span.start < start + count)
                if next(behind, None) is not None:
                    return start
        return position

    def _back_to_mark(self, position: int, cancel: CancelToken) -> None:
        kept = PassLog(list(self.passes.entries))
        position = kept.boundary(position)
        kept.trim(position)
        if not self.to_mark(position):
            self.reset()
        elif position - self.num_fed <= self.options.mark_every:
            self._rebuilding = (tuple(kept.entries), position)
            self.repair(cancel)

    def to_mark(self, position: int) -> bool:
        """Go back to the last usable mark at or before `position`; False if there is none."""
        mark = self.mark_before(position)
        if mark is None:
            return False
        self._torn = _Tear.UNKNOWN
        for _, leaf in leaves(self.cache):
            if adapter_of(leaf).appends:
                adapter_of(leaf).trim(leaf, self.num_fed - mark.position)
        restore_mark(self.cache, mark)
        self._recurrent_leaves = None
        self.num_fed = mark.position
        self._num_shared = min(self._num_shared, mark.position)
        self.passes.trim(mark.position)
        self._torn = None
        return True

    def mark_before(self, position: int) -> StateMark | None:
        """The last state mark from which the passes up to `position` could be run again."""
        mark = self.marks.before(position)
        return None if mark is None or self._quantized_behind(mark.position) else mark

    def go_back(self, position: int) -> int:
        """Make the ledger end at `position`; the passes that a cache must run again for that are run by `repair`, which
        the next use calls. Returns where it will end: before `position` only if that is inside a prefill pass of a
        cache that can't be trimmed. `ids` stay.
        """
        self._unpark()  # what isn't there can't be trimmed
        if position > self.num_fed and not self.torn:
            return self.num_fed
        if self._rebuilding is None and self._torn is None and self.can_trim_to(position):
            self._trim_to(position)
            self.marks.cut(position)
        else:
            passes, former = (self.passes.entries, self.num_fed) if self._rebuilding is None else self._rebuilding
            kept = PassLog(list(passes))
            position = kept.boundary(min(position, former))
            kept.trim(position)
            self.marks.cut(position)
            if self._torn is None and not self._reachable(position):
                self._torn = _Tear.UNKNOWN
            self._rebuilding = (tuple(kept.entries), position)
        self.ahead = None
        return position

    def _reachable(self, position: int) -> bool:
        """Whether running passes again can begin somewhere: where the cache is, or at a mark, which it then is at."""
        return self.num_fed <= position or self.to_mark(position)

    def retract(self, position: int) -> None:
        """Make the ledger end at `position` exactly, and drop what follows it: by trimming, or else by running the
        recorded passes again."""
        self._go_back(position)
        del self.ids[position:]

    def step_back(self) -> None:
        """Take the last token out of the ledger again (it stays in `ids`), so that feeding it gives its logits anew.

        Needed only after an evaluation failed and took the sampled token with it.
        """
        position = self.num_fed - 1
        self._go_back(position)
        if self.num_fed < position:
            self.feed(position)

    def _go_back(self, position: int) -> None:
        self.repair()
        self.ahead = None
        if position < self.num_fed:
            self.go_back(position)
            self.repair()

    def repair(self, cancel: CancelToken = NEVER) -> None:
        """After an error inside a pass: bring every layer back to the ledger's end.

        A Python error while the graph was built left layers at different offsets: trimmed back where possible. After
        an error of an evaluation, inside a cache's own code, or where trimming can't help, the cache is rebuilt by
        running the recorded passes again, a checkpoint before each; `Cancelled` there loses nothing, the next call
        goes on.
        """
        if not self.torn:
            return
        self._unpark()
        if not self.torn:
            return
        if self._rebuilding is None and self._torn is _Tear.BETWEEN_LAYERS and self._trim_torn():
            self.passes.trim(self.num_fed)
            self._torn = None
            return
        self._rebuild(cancel)

    def can_trim_to(self, position: int) -> bool:
        """Whether every layer can give up its tokens from `position` on, and be as it was before them."""
        return can_trim(self.cache, self.num_fed - position) and not self._quantized_behind(position)

    def _quantized_behind(self, position: int) -> bool:
        """Whether the caches were quantised by a pass that going back to `position` undoes: trimming can't undo that,
        and the passes fed then would attend to quantised rows where they hadn't."""
        if self.options.kv_bits is None or not any(
            isinstance(a, kinds.QuantizedKVCache) for _, a in leaves(self.cache)
        ):
            return False
        kept = PassLog(list(self.passes.entries))
        kept.trim(position)
        longest = max((start + count for _, start, count in kept.entries), default=-1)
        return longest < self.options.quantized_kv_start

    def _trim_torn(self) -> bool:
        if self._quantized_behind(self.num_fed):
            return False
        excess: list[tuple[Any, int]] = []
        for _, leaf in leaves(self.cache):
            offset = _offset(leaf)
            count = None if offset is None else offset - self._before - self.num_fed
            if count is None or count < 0 or not adapter_of(leaf).can_trim(leaf, count):
                return False
            excess.append((leaf, count))
        self._torn = _Tear.UNKNOWN
        for leaf, count in excess:
            adapter_of(leaf).trim(leaf, count)
        return True

    def _rebuild(self, cancel: CancelToken) -> None:
        """Throw the cache away and run every recorded pass again, from an empty cache."""
        if self._filled_before:
            raise InvalidValueError(
                "a forward pass failed and the prompt_cache that was passed in can't be rebuilt (its tokens are "
                "unknown here); make a new cache and prefill again"
            )
        if self._rebuilding is None:
            self._rebuilding = (tuple(self.passes.entries), self.num_fed)
        if self._torn is not None:
            self.reset()
        self.replay(*self._rebuilding, cancel=cancel)
        self._rebuilding = None

    def replay(self, entries: Sequence[tuple[str, int, int]], target: int, *, cancel: CancelToken = NEVER) -> None:
        """Run recorded passes over `ids` until the ledger ends at `target`; what the cache has is left out.

        Of a prefill pass that was trimmed later, the tokens behind the trim may be gone: any others do in their place,
        since rows behind a trim are never read and (image blocks are never trimmed inside) rows before it don't depend
        on them. A stretch that no pass covers (its record was lost with a crash) is fed as one chunk.
        """
        if target < self.num_fed:
            raise InvalidValueError(
                f"the cache holds {self.num_fed} tokens already, beyond the {target} to be replayed"
            )
        starts = [start for _, start, _ in entries[1:]] + [target]
        for (kind, start, count), next_start in zip(entries, starts, strict=False):
            end = min(start + count, next_start, target)
            if end <= self.num_fed:
                continue
            if start > self.num_fed:
                cancel.checkpoint()
                self._prefill_pass(self.ids[self.num_fed : start], start)
            if kind == "decode":
                while self.num_fed < end:
                    cancel.checkpoint()
                    self.feed_one()
            else:
                cancel.checkpoint()
                self._prefill_pass(self.ids[self.num_fed : end] + [0] * (start + count - end), end)
        if self.num_fed < target:
            cancel.checkpoint()
            self._prefill_pass(self.ids[self.num_fed : target], target)

    def _trim_to(self, position: int) -> None:
        if self.num_fed > position:
            self._torn = _Tear.UNKNOWN
            trim(self.cache, self.num_fed - position)
            self.num_fed = position
            self._num_shared = min(self._num_shared, position)
            self.passes.trim(position)
            self._torn = None

    def feed_one(self) -> None:
        """Run the decode pass of the next token of `ids` again; its logits are already known and not computed."""
        token = mx.array(self.ids[self.num_fed : self.num_fed + 1], mx.uint32)
        with mx.stream(generation_stream()):
            self.step(token)
            self.evaluate()
        self.committed()

    def empty_cache(self) -> list[Any]:
        """New caches of the kinds this sequence began with."""
        return make_cache(self._module, self.options) if self._empty is None else copy.deepcopy(self._empty)

    def reset(self) -> None:
        """Empty the cache; `ids` stay, all of them to be fed again."""
        self._torn = _Tear.UNKNOWN  # until the end, should an exception come between
        self.cache[:] = self.empty_cache()
        self._recurrent_leaves = self._base = None
        self.num_fed = 0
        self.passes = PassLog()
        self._torn = None


class _Tear(enum.Enum):
    """How a pass ended that didn't end well."""

    BETWEEN_LAYERS = enum.auto()  # every leaf has either had the whole pass or nothing of it; its offset says which
    UNKNOWN = enum.auto()


def _tear(error: BaseException) -> _Tear:
    """Where in a pass an exception came from: in the code of a cache, anything may be half done."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == kinds.__file__:
            return _Tear.UNKNOWN
        trace = trace.tb_next
    return _Tear.BETWEEN_LAYERS


def _offset(leaf: Any) -> int | None:
    offset = getattr(leaf, "offset", None)
    return int(offset) if isinstance(offset, int) else None


def _offset_of(cache: Sequence[Any]) -> int:
    return max((_offset(leaf) or 0 for _, leaf in leaves(cache)), default=0)
