"""The token iterator: one forward pass in flight, a checkpoint before every token, and its whole state a plain
value."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxgen.ahead import Ahead, Undrawn
from mlxgen.cache import CacheOptions
from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.constraints import Constraint, Grammar, allowed_by, is_done, masked, permits
from mlxgen.errors import GrammarError, InvalidValueError, NotResumableError
from mlxgen.inputs import PreparedInput
from mlxgen.models.model import Model
from mlxgen.prefill import DEFAULT_STEP_SIZE, PrefillPlan, plan_prefill
from mlxgen.sampling import (
    LogitsProcessor,
    PenaltyState,
    ResumableProcessor,
    SamplingParams,
    build_penalties,
    build_sampler,
    is_resumable,
    token_logprob,
    top_logprobs,
)
from mlxgen.sequence import Sampled, TokenSequence
from mlxgen.streams import generation_stream
from mlxgen.tokenizer import token_ids_checked

_log = logging.getLogger(__name__)

# mlx-lm gives memory that MLX holds back for reuse to the system every 256 tokens; the same here, for the same memory
# curve.
_CLEAR_EVERY = 256
MAX_TOP_LOGPROBS = 100


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """How tokens are chosen, and how many.

    `max_tokens` counts from the start of the reply; None means no limit. `processors` run on the logits after
    penalties and bias. `sampler` replaces mlxgen's own (it gets log-probabilities (1, vocabulary) as in mlx-lm, and
    draws from its own random state: such a run can't be resumed exactly). `full_logprobs` keeps the whole vector of
    each token.

    `constraints` mask the logits after all of these, so log-probabilities are those among the tokens that are allowed
    (and where fewer than `top_logprobs` are, so many). They are functions of the reply's ids: nothing of them is saved.
    A `Grammar` among them must be `bound` to the model.
    """

    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = 256
    logprobs: bool = False
    top_logprobs: int = 0
    processors: tuple[LogitsProcessor, ...] = ()
    sampler: Callable[[mx.array], mx.array] | None = None
    full_logprobs: bool = False
    constraints: tuple[Constraint | Grammar, ...] = ()

    def bound(self, model: Model) -> DecodeOptions:
        """The same with every grammar compiled for `model`. Raises what `Grammar.constraint` raises."""
        if not any(isinstance(constraint, Grammar) for constraint in self.constraints):
            return self
        constraints = (
            c.constraint(model.tokenizer, model.vocab_size, model.eos_token_ids) if isinstance(c, Grammar) else c
            for c in self.constraints
        )
        return replace(self, constraints=tuple(constraints))

    def validate(self, vocab_size: int) -> None:
        self.sampling.validate(vocab_size)
        if self.max_tokens is not None and not (type(self.max_tokens) is int and 0 <= self.max_tokens < 2**31):
            raise InvalidValueError(f"max_tokens is {self.max_tokens}; give 0 to {2**31 - 1}, or None for no limit")
        limit = min(MAX_TOP_LOGPROBS, vocab_size)
        if type(self.top_logprobs) is not int or not 0 <= self.top_logprobs <= limit:
            raise InvalidValueError(f"top_logprobs is {self.top_logprobs}; give 0 to {limit}")

    def require_resumable(self) -> None:
        """Raise `NotResumableError` naming what can't be saved; to be called before anything runs."""
        if self.sampler is not None:
            raise NotResumableError(
                "a sampler of your own draws from its own random state, so this run can't be saved and resumed; "
                "use SamplingParams, or don't ask for a snapshot"
            )
        for processor in self.processors:
            if is_resumable(processor):
                processor_memory(processor)
            else:
                raise NotResumableError(
                    f"the logits processor {getattr(processor, '__name__', type(processor).__name__)!r} doesn't say "
                    "how to save its state (name, state(), restore()), so this run can't be saved; see LogitsProcessor"
                )


def processor_memory(processor: ResumableProcessor) -> str:
    """What a processor wants remembered, as JSON: a copy, and what a resumed run would be given. Raises
    `NotResumableError`."""
    try:
        return json.dumps(processor.state())
    except (TypeError, ValueError) as error:
        raise NotResumableError(
            f"the state of the logits processor {processor.name!r} isn't JSON ({error}), so this run can't be saved; "
            "give numbers, strings, lists and dicts"
        ) from error


class TokenIterator:
    """Iterate over the tokens of a reply; stop between any two and go on later from exactly there.

    Before token k is returned, the pass that feeds k and samples k+1 has been submitted; so at a stop at most one
    sampled token is unseen (`sequence.ahead`), and none after the last of `max_tokens`. Each `next()` is one
    checkpoint followed by one unit of work followed by its commit. `Cancelled` is raised at the checkpoint,
    `StopIteration` after `max_tokens` and where a constraint says that the reply is complete; in all cases everything
    that was done is in `sequence`, from which a new iterator goes on: `TokenIterator(sequence, options=...,
    step=old.step)`.

    With constraints, too, a pass is in flight while a token is shown; the next one is sampled from its logits at the
    next call (or by `settle`). `GrammarError` there leaves everything as it was after the last token.

    Owned by one consumer; used on one thread at a time. A custom processor's own state isn't in `sequence`: save
    `processor.state()` beside it.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        *,
        options: DecodeOptions = DecodeOptions(),
        step: int = 0,
        step_size: int = DEFAULT_STEP_SIZE,
        cancel: CancelToken = NEVER,
    ) -> None:
        self._vocab_size = sequence.vocab_size
        if not sequence.ids and sequence.ahead is None:
            raise InvalidValueError("there is nothing to generate from: the prompt is empty; give at least one token")
        seed = options.sampling.seed
        if options.sampling.temperature > 0 and seed is None:
            raise InvalidValueError("sampling without a seed can't be resumed; use sampling.with_seed()")
        self.sequence = sequence
        self.options = options
        self.step = step
        self.cancel = cancel
        self.step_size = step_size
        self._base = len(sequence.ids) - step
        self._sample = None if options.sampler is not None else build_sampler(options.sampling)
        self._penalties: PenaltyState | None = None
        self._history: mx.array | None = None
        self.last_vector: mx.array | None = None  # of the token returned last, with `full_logprobs`
        self._stale = True
        self._confused = False
        self._flight: tuple[Ahead, Ahead | Undrawn | None, int] | None = None
        self._commit: tuple[Sampled, Ahead | Undrawn | None, int] | None = None
        self._synchronous = self.synchronous
        self._resumable = tuple(processor for processor in options.processors if is_resumable(processor))
        self._memory = self._memories()
        ahead = sequence.ahead
        self._ahead: Ahead | Undrawn | None = (
            None if ahead is None else Ahead(mx.array([ahead.id], mx.uint32), host=ahead, memory=self._memory)
        )
        self._constraints = _only_bound(options.constraints)
        # A token that was sampled ahead may have been sampled without these constraints.
        self._unchecked = ahead is not None and bool(self._constraints)

    @classmethod
    def from_prompt(
        cls,
        model: Model,
        ids: Sequence[int],
        *,
        options: DecodeOptions = DecodeOptions(),
        cache_options: CacheOptions = CacheOptions(),
        step_size: int = DEFAULT_STEP_SIZE,
        cancel: CancelToken = NEVER,
    ) -> TokenIterator:
        """An iterator over a new sequence. The prompt is prefilled chunk by chunk at the first `next()`."""
        options.validate(model.vocab_size)
        options = options.bound(model)
        checked = token_ids_checked(ids, model.vocab_size)
        sequence = TokenSequence(model, cache_options, ids=checked)
        return cls(sequence, options=options, step_size=step_size, cancel=cancel)

    @classmethod
    def from_input(
        cls,
        model: Model,
        prepared: PreparedInput,
        *,
        options: DecodeOptions = DecodeOptions(),
        cache_options: CacheOptions = CacheOptions(),
        step_size: int = DEFAULT_STEP_SIZE,
        cancel: CancelToken = NEVER,
    ) -> TokenIterator:
        """An iterator over a new sequence that begins with a prepared prompt, pictures and all (see `mlxgen.prepare`).

        Raises `InvalidValueError` for an input that isn't complete: what a stopped `prepare` left in
        `Cancelled.partial`. Nothing is run then.
        """
        for number, medium in enumerate(prepared.media, start=1):
            if not medium.prepared or not medium.encoded:
                raise InvalidValueError(
                    f"the prepared input isn't complete: medium {number} of {len(prepared.media)} "
                    f"({medium.source_name or medium.kind}) isn't {'encoded' if medium.prepared else 'prepared'} yet; "
                    "call prepare() again with partial= what Cancelled.partial gave"
                )
        if not prepared.token_ids:
            raise InvalidValueError(
                "the prepared input isn't complete: it has no token ids yet; call prepare() again with partial= what "
                "Cancelled.partial gave"
            )
        iterator = cls.from_prompt(
            model,
            prepared.token_ids,
            options=options,
            cache_options=cache_options,
            step_size=step_size,
            cancel=cancel,
        )
        if prepared.media:
            iterator.sequence.inputs = prepared
        return iterator

    # -- prefill ---------------------------------------------------------------------------------------------------

    def plan(self) -> PrefillPlan:
        """The chunks still to be fed before the first token: all of `ids` but the last."""
        sequence = self.sequence
        atomic = () if sequence.inputs is None else sequence.inputs.atomic
        return plan_prefill(sequence.num_fed, len(sequence.ids) - 1, self.step_size, atomic, sequence.cuts)

    def prefill(self, plan: PrefillPlan | None = None) -> Iterator[int]:
        """Feed the prompt chunk by chunk; yields the number of tokens fed after each. A checkpoint before each
        chunk."""
        sequence = self.sequence
        for end in (plan or self.plan()).after(sequence.num_fed):
            self.cancel.checkpoint()
            sequence.feed(end)
            yield sequence.num_fed

    # -- decode ----------------------------------------------------------------------------------------------------

    @property
    def synchronous(self) -> bool:
        """Whether each token must reach the host before the next pass can be built (a processor said so)."""
        return any(getattr(processor, "needs_host_ids", False) for processor in self.options.processors)

    def __iter__(self) -> TokenIterator:
        return self

    def __next__(self) -> Sampled:
        if self._flight is not None or self._commit is not None:
            # An exception (a KeyboardInterrupt while waiting for it) kept this token from being returned.
            missed = self._finish_commit()
            if missed is not None:
                return missed
        limit = self.options.max_tokens
        if limit is not None and self.step >= limit:
            raise StopIteration
        if self._constraints and is_done(self._constraints, self._reply_ids()):
            raise StopIteration
        if self._unchecked:
            self._check_ahead()
        if self.sequence.torn:
            self.sequence.repair(self.cancel)
        if self.sequence.num_fed < len(self.sequence.ids) - 1:
            for _ in self.prefill():
                pass
        self.cancel.checkpoint()
        try:
            return self._one_token(limit)
        except BaseException:
            # Penalty windows, histories and processors may be a token ahead of the sequence now.
            self._stale = self._confused = True
            raise

    def _one_token(self, limit: int | None) -> Sampled:
        sequence = self.sequence
        with mx.stream(generation_stream()):
            if self._stale:
                self._rebuild_history()
            ahead = self._ahead
            if ahead is None:
                ahead = self._launch_pending()
            if isinstance(ahead, Undrawn):
                ahead = self._draw(ahead)
            following = None
            if (limit is None or self.step + 1 < limit) and not self._synchronous:
                following = self._launch(ahead.token, self.step + 1)
            self._flight = (ahead, following, len(sequence.ids))
            sampled = self._finish_commit()
        assert sampled is not None
        if self.step % _CLEAR_EVERY == 1:
            mx.clear_cache()
        self.last_vector = ahead.vector
        return sampled

    def _read(self, ahead: Ahead) -> Sampled:
        try:
            return ahead.read()
        except GrammarError:
            self._flight = None
            self._ahead = ahead.source
            self._stale = self._confused = True
            raise
        except Exception:
            self.sequence.failed_eval()
            self._flight = self.sequence.ahead = self._ahead = None
            self._stale = self._confused = True
            raise

    def _launch_pending(self) -> Ahead | Undrawn:
        """Feed the one token of `ids` that isn't in the ledger yet, and sample from its logits."""
        sequence = self.sequence
        if self._constraints:
            allowed_by(self._constraints, self._reply_ids())  # where nothing may follow, nothing is run
        if sequence.num_fed == len(sequence.ids):
            sequence.step_back()
            self._rebuild_history()
        token = mx.array(sequence.ids[sequence.num_fed :], mx.uint32)
        ahead = self._launch(token, self.step)
        sequence.committed()
        self._ahead = ahead
        return ahead

    def _launch(self, token: mx.array, step: int) -> Ahead | Undrawn:
        """Submit the pass that feeds `token` and samples token number `step` of the reply. Waits for nothing."""
        sequence = self.sequence
        logits = self._adjust(token, sequence.step(token))
        ahead: Ahead | Undrawn
        if self._constraints:
            ahead, arrays = Undrawn(logits), [logits]
        else:
            ahead = self._choose(logits, step)
            arrays = ahead.arrays()
        # Recurrent states are no input of this token, only of the next: submit them too, so that nothing lazy that
        # belongs to this thread's stream is left for whoever closes the loop from another thread.
        arrays += sequence.side_states()
        if self._history is not None:
            # Evaluated with every token: a processor that never looks must not leave a chain of concatenations.
            arrays.append(self._history)
        try:
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        except Exception:
            self._forget_ahead()
            raise
        if self._resumable:
            ahead.memory = self._memories()
        return ahead

    def _forget_ahead(self) -> None:
        """An evaluation failed while it was submitted: what hasn't reached the host is lost."""
        self.sequence.failed_eval()
        if isinstance(self._ahead, Undrawn) or (self._ahead is not None and self._ahead.host is None):
            self._ahead = None

    def _adjust(self, token: mx.array, logits: mx.array) -> mx.array:
        """Penalties, bias and custom processors, in this order."""
        if self._penalties is not None:
            self._penalties.advance(token)
            logits = self._penalties.apply(logits)
        if self.options.processors:
            self._history = token if self._history is None else mx.concatenate([self._history, token])
            for processor in self.options.processors:
                logits = processor(self._history, logits)
        return logits

    def _choose(self, logits: mx.array, step: int) -> Ahead:
        options = self.options
        vector = None
        if options.full_logprobs or options.sampler is not None:
            vector = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if options.sampler is not None and vector is not None:
            chosen = options.sampler(vector)
        else:
            assert self._sample is not None
            chosen = self._sample(logits, step)
        ahead = Ahead(chosen, vector=None if vector is None else vector.reshape(-1))
        if options.logprobs or options.top_logprobs:
            ahead.logprob = token_logprob(logits, chosen)
        if options.top_logprobs:
            ahead.top = top_logprobs(logits, options.top_logprobs)
        return ahead

    # -- constraints -------------------------------------------------------------------------------------------------

    def _reply_ids(self) -> list[int]:
        return self.sequence.ids[self._base :]

    @property
    def complete(self) -> bool:
        """Whether a constraint says that nothing may follow the token returned last: the reply has ended.

        Never raises: where a constraint fails, the next `next()` says so.
        """
        try:
            return bool(self._constraints) and is_done(self._constraints, self._reply_ids())
        except GrammarError:
            return False

    def _draw(self, place: Undrawn) -> Ahead:
        """Sample the next token among those that may follow; submitted, not waited for. Raises `GrammarError`."""
        mask = allowed_by(self._constraints, self._reply_ids())
        logits = place.logits if mask is None else masked(place.logits, mask)
        ahead = self._choose(logits, self.step)
        ahead.source, ahead.memory = place, place.memory
        if mask is not None:
            ahead.score = mx.take_along_axis(logits, ahead.token[:, None], axis=-1)
        try:
            mx.async_eval(ahead.arrays())  # type: ignore[no-untyped-call]
        except Exception:
            self._forget_ahead()
            raise
        self._ahead = ahead
        return ahead

    def _check_ahead(self) -> None:
        """Drop the token that was sampled ahead if it may not come now: the pass that it is from is run again."""
        sequence = self.sequence
        if sequence.ahead is not None and not permits(self._constraints, self._reply_ids(), sequence.ahead.id):
            self._ahead = None
            sequence.go_back(sequence.num_fed - 1)
        self._unchecked = False

    # -- after an exception ------------------------------------------------------------------------------------------

    def _rebuild_history(self) -> None:
        if self._confused:
            self._recall()
        sequence = self.sequence
        # What was fed. A token to be fed is added by `_adjust`, when its pass is built.
        fed = sequence.ids[: sequence.num_fed]
        self._penalties = build_penalties(self.options.sampling, fed, self._vocab_size)
        self._history = mx.array(fed, mx.uint32) if self.options.processors and fed else None
        self._stale = False

    def _memories(self) -> list[str]:
        return [processor_memory(processor) for processor in self._resumable]

    def _recall(self) -> None:
        """Put the custom processors back to where they were after the last token that counts."""
        memory = self._memory if self._ahead is None else self._ahead.memory
        if memory is not None:
            for processor, state in zip(self._resumable, memory, strict=True):
                processor.restore(json.loads(state))
        self._confused = False

    def _finish_commit(self) -> Sampled | None:
        """Wait for the token in flight and apply its commit record; the token, None if there was nothing to commit.

        Each record is written in one store and applied idempotently: an exception can land between any two.
        """
        if self._commit is None:
            if self._flight is None:
                return None
            ahead, following, length = self._flight
            self._commit = (self._read(ahead), following, length)
        sampled, following, length = self._commit
        sequence = self.sequence
        sequence.ahead = None
        sequence.last = sampled
        if len(sequence.ids) == length:
            sequence.ids.append(sampled.id)
        if following is not None and sequence.num_fed == length:
            sequence.committed()
        if self._flight is not None and self._flight[0].memory is not None:
            self._memory = self._flight[0].memory
        self._ahead = following
        self.step = length + 1 - self._base
        self._flight = None
        self._commit = None
        return sampled

    def settle(self) -> None:
        """Wait for the token in flight and put it into `sequence.ahead`; afterwards nothing is under way.

        To be called when the loop stops for whatever reason, before the sequence is read, saved or used otherwise.
        """
        try:
            self._finish_commit()
            ahead = self._ahead
            if isinstance(ahead, Undrawn):
                with mx.stream(generation_stream()):
                    ahead = None if self.complete else self._draw(ahead)
            if ahead is not None:
                self.sequence.ahead = self._read(ahead)
        except GrammarError:
            # No next token can be sampled; the next `next()` says why.
            _log.debug("no token was sampled ahead", exc_info=True)
        finally:
            if self._confused:
                self._recall()


def _only_bound(constraints: Sequence[Constraint | Grammar]) -> tuple[Constraint, ...]:
    bound: list[Constraint] = []
    for constraint in constraints:
        if isinstance(constraint, Grammar):
            raise InvalidValueError("a grammar must be compiled for the model first: use options.bound(model)")
        bound.append(constraint)
    return tuple(bound)
