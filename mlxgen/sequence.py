"""One sequence of tokens and the caches that hold it: the ledger, kept true through every stop and every error.

`ids` are all tokens that exist for the model: those that were fed, in order, and behind them those still to be fed.
The first `num_fed` are the *ledger* (P1): every layer of the cache has been fed exactly these. During a reply `ids`
ends with the last token the user saw; if it isn't fed yet (`max_tokens` ended the reply) it is the *emitted* pending
token. `ahead` is the *unseen* one: sampled, not shown, not part of `ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache as memoized
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlxgen.cache import CacheOptions, adapter_of, can_trim, leaves, make_cache, quantize_from, trim
from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import InvalidValueError
from mlxgen.inputs import ForwardPass, PreparedInput
from mlxgen.models.model import Model


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


@memoized
def generation_stream() -> Any:
    """The stream all passes run on, one per thread (mlx-lm does the same: a busy default stream can't delay a
    token)."""
    return mx.new_thread_local_stream(mx.default_device())


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
        self.ids: list[int] = list(ids)
        self.num_fed = num_fed
        self.ahead: Sampled | None = None
        self.last: Sampled | None = None  # the token appended to `ids` last, with its log-probabilities
        self.inputs: PreparedInput | None = None
        self.passes = PassLog()
        self._torn: str | None = None
        self._recurrent_leaves: list[Any] | None = None

    @property
    def ledger(self) -> list[int]:
        return self.ids[: self.num_fed]

    def arrays(self) -> list[mx.array]:
        return [array for _, leaf in leaves(self.cache) for array in adapter_of(leaf).arrays(leaf)]

    def side_states(self) -> list[mx.array]:
        """The arrays of recurrent and convolution states, which the current token's logits don't depend on."""
        return [a for leaf in self._recurrent() for a in leaf.cache if a is not None]

    def _recurrent(self) -> list[Any]:
        if self._recurrent_leaves is None:
            self._recurrent_leaves = [leaf for _, leaf in leaves(self.cache) if isinstance(leaf, ArraysCache)]
        return self._recurrent_leaves

    def evaluate(self) -> None:
        """Finish all work on the cache that is still lazy or under way."""
        mx.eval(self.arrays())

    # -- forward passes ------------------------------------------------------------------------------------------

    def feed(self, end: int) -> None:
        """One prefill pass: tokens `[num_fed, end)`, evaluated; logits are never computed. Commits, or is torn."""
        self.repair()
        start = self.num_fed
        ids = mx.array(self.ids[start:end], mx.uint32)
        self._torn = "graph"
        with mx.stream(generation_stream()):
            self.forward(ids, cache=self.cache, start=start, inputs=self.inputs)
            quantize_from(self.cache, self.options)
            try:
                self.evaluate()
            except Exception:
                self.failed_eval()
                raise
            mx.clear_cache()
        self.passes.prefill(start, end - start)
        self.num_fed = end
        self._torn = None

    def step(self, token: mx.array, consume: Callable[[mx.array], Any]) -> Any:
        """Build one decode pass for `token` (uint32 (1,), possibly not evaluated yet) without waiting for it.

        `consume` gets the logits (1, vocabulary) and builds what is to be sampled from them; its result is returned.
        The caller submits that with `mx.async_eval` and then calls `committed()`; an error before that leaves the
        sequence torn, to be repaired before the next pass. Not repaired here: this is the hot path.
        """
        self._torn = "graph"
        logits = self.forward(token, cache=self.cache, start=self.num_fed, inputs=self.inputs)
        # Before sampling, as mlx-lm does: the pass that crosses the threshold still attended to unquantised rows.
        if self.options.kv_bits is not None:
            quantize_from(self.cache, self.options)
        return consume(logits[:, -1, :])

    def committed(self) -> None:
        """The pass of `step` was submitted: its token belongs to the ledger."""
        self.passes.decode(self.num_fed)
        self.num_fed += 1
        self._torn = None

    def failed_eval(self) -> None:
        """An evaluation raised: whatever the arrays hold now may be garbage; rebuild before the next pass."""
        self._torn = "eval"

    @property
    def torn(self) -> bool:
        return self._torn is not None

    # -- going back ----------------------------------------------------------------------------------------------

    def rewind(self, position: int) -> int:
        """Make the ledger end at `position` or before it, and say where it ends now.

        A cache that can be trimmed ends exactly there. One that can't (wrapped ring, recurrent state) is emptied: the
        caller prefills from the returned position, which is then 0. `ids` behind the new end and `ahead` are dropped.
        """
        if not 0 <= position <= self.num_fed:
            raise InvalidValueError(f"can't rewind to token {position}: the cache holds {self.num_fed}")
        self.repair()
        if position < self.num_fed:
            if can_trim(self.cache, self.num_fed - position):
                self._trim_to(position)
            else:
                self.reset()
        del self.ids[self.num_fed :]
        self.ahead = None
        return self.num_fed

    def step_back(self) -> None:
        """Take the last token out of the ledger again (it stays in `ids`), so that feeding it gives its logits anew.

        Needed only after an evaluation failed and took the sampled token with it.
        """
        self.repair()
        target = self.num_fed - 1
        if can_trim(self.cache, 1):
            self._trim_to(target)
        else:
            self.passes.trim(target)
            self.num_fed = target
            self.rebuild()

    def repair(self) -> None:
        """After an error inside a pass: bring every layer back to the ledger's end.

        A Python error while the graph was built left layers at different offsets: trimmed back where possible. After
        an error of an evaluation, or where trimming can't help, the cache is rebuilt by running the recorded passes
        again.
        """
        if self._torn is None:
            return
        if self._torn == "graph" and self._trim_torn():
            self._torn = None
            return
        self.rebuild()

    def _trim_torn(self) -> bool:
        extra = [(leaf, _offset(leaf)) for _, leaf in leaves(self.cache)]
        excess = [(leaf, None if offset is None else offset - self._before - self.num_fed) for leaf, offset in extra]
        if any(count is None or count < 0 or not adapter_of(leaf).can_trim(leaf, count) for leaf, count in excess):
            return False
        for leaf, count in excess:
            adapter_of(leaf).trim(leaf, count or 0)
        return True

    def rebuild(self) -> None:
        """Throw the cache away and run every recorded pass again, from an empty cache."""
        if self._before:
            raise InvalidValueError(
                "a forward pass failed and the prompt_cache that was passed in can't be rebuilt (its tokens are "
                "unknown here); make a new cache and prefill again"
            )
        entries, target = list(self.passes.entries), self.num_fed
        self.reset()
        self._torn = None
        self.replay(entries, target)

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
        for (kind, start, count), next_start in zip(entries, starts, strict=True):
            end = min(start + count, next_start, target)
            if end <= self.num_fed:
                continue
            if start > self.num_fed:
                cancel.checkpoint()
                self.feed(start)
            if kind == "decode":
                while self.num_fed < end:
                    cancel.checkpoint()
                    self.feed_one()
            else:
                cancel.checkpoint()
                self._feed_trimmed(start + count, end)
        if self.num_fed < target:
            cancel.checkpoint()
            self.feed(target)

    def _feed_trimmed(self, pass_end: int, end: int) -> None:
        known = len(self.ids)
        self.ids += [0] * (pass_end - known)
        try:
            self.feed(pass_end)
        finally:
            del self.ids[known:]
        self._trim_to(end)

    def _trim_to(self, position: int) -> None:
        if self.num_fed > position:
            trim(self.cache, self.num_fed - position)
            self.num_fed = position
            self.passes.trim(position)

    def feed_one(self) -> None:
        """Run the decode pass of the next token of `ids` again; its logits are already known and not computed."""
        token = mx.array(self.ids[self.num_fed : self.num_fed + 1], mx.uint32)
        with mx.stream(generation_stream()):
            self.step(token, lambda logits: None)
            self.evaluate()
        self.committed()

    def reset(self) -> None:
        """Empty the cache; `ids` stay, all of them to be fed again."""
        self.cache[:] = make_cache(self._module, self.options)
        self._recurrent_leaves = None
        self.num_fed = 0
        self.passes = PassLog()


def _offset(leaf: Any) -> int | None:
    offset = getattr(leaf, "offset", None)
    return int(offset) if isinstance(offset, int) else None


def _offset_of(cache: Sequence[Any]) -> int:
    return max((_offset(leaf) or 0 for _, leaf in leaves(cache)), default=0)
