"""One reply end to end: media, prompt, prefill, decode, and the one place where `Cancelled` becomes the last event."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.decode import TokenIterator
from mlxgen.errors import ContextLengthError
from mlxgen.events import Event, Finished, FinishReason, InputProgress, PrefillProgress, Token, TopLogprob, Usage
from mlxgen.history import Reply, token_record
from mlxgen.models.memory import RunSize, check_fits, estimate_run, wired_limit
from mlxgen.inputs import PreparedInput
from mlxgen.options import ReplyOptions
from mlxgen.prefill import MIN_STEP_SIZE, plan_prefill, step_size_for_latency
from mlxgen.preparation import encode_medium, prepare_medium, prepared_input, require_vision, shared_prefix
from mlxgen.prefixcache import PrefixCache, prefix_cache
from mlxgen.prefixcache.cache import Prompt as PrefixPrompt
from mlxgen.prefixcache.keys import MIN_TOKENS
from mlxgen.sequence import Sampled
from mlxgen.snapshot.store import Record
from mlxgen.state import SessionState
from mlxgen.textstream import TextStream

_log = logging.getLogger(__name__)

_MIN_TOKENS_TO_ESTIMATE = 2048

_Finish = dict[str, Any]  # the data of a `finish` record


@dataclass(slots=True)
class Work:
    """What this run did, counted where it is done; becomes `Usage`."""

    started_s: float
    prefilled_tokens: int = 0
    prefill_s: float = 0.0
    generated_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    images_prepared: int = 0
    images_encoded: int = 0
    frames_prepared: int = 0
    frames_encoded: int = 0

    def count(self, event: InputProgress) -> None:
        name = f"{event.kind}s_{event.phase}d"
        setattr(self, name, getattr(self, name) + 1)


class ReplyRun:
    """Takes the open reply of a session from wherever it stands to its next end. Lives for one call; the session
    survives.

    On every way out (a stop, the end, an error, a consumer that leaves) the token in flight is waited for and put into
    the sequence, so that the ledger is true; then the session is free for the next call. Saving comes after the last
    event.
    """

    def __init__(self, state: SessionState, options: ReplyOptions, cancel: CancelToken) -> None:
        reply = state.history.reply
        assert reply is not None
        self._state = state
        self._reply: Reply = reply
        self._options = options
        self._cancel = cancel
        self._work = Work(time.perf_counter())
        self._reused_tokens = 0
        self._text: TextStream | None = None
        self._iterator: TokenIterator | None = None
        self._prefixes = _prefix_cache_of(state)
        self._feed_s = 0.0  # how long the last chunk took, without what the consumer or a save took

    @property
    def laid_out(self) -> bool:
        """Whether the prompt's ids are settled: from there on the turn before this reply has a place in the ledger."""
        return self._state.history.laid_out is self._reply

    def events(self) -> Iterator[Event]:
        """The events of the run; the last one is `Finished` unless an error is raised."""
        state = self._state
        try:
            self._text = rebuild_text(state.model.tokenizer, self._reply)
            with wired_limit(state.model):
                try:
                    finish = yield from self._phases()
                except Cancelled as stop:
                    finish = {"reason": "cancelled", "cancel_reason": stop.reason}
                self._settle()
                if self._reply.finish is None:
                    state.record("finish", finish)
            yield self.finished()
        finally:
            self._settle()

    def settle(self) -> None:
        """Between two events: wait for the token in flight, so that the sequence can be read; the run goes on
        afterwards."""
        if self._iterator is not None:
            self._iterator.settle()

    def _settle(self) -> None:
        iterator = self._iterator
        if iterator is None:
            return
        try:
            iterator.settle()
        except Exception:
            # The sequence knows that it is torn and repairs itself before its next pass. What the consumer must see
            # is the error (or the stop) that brought us here.
            _log.debug("the token in flight was lost", exc_info=True)
        self._iterator = None

    def _phases(self) -> Generator[Event, None, _Finish]:
        state = self._state
        for event in media_events(state, self._cancel):
            self._work.count(event)
            yield event
        state.sequence.repair(self._cancel)
        state.follow(self._cancel)
        if not self.laid_out:
            self._lay_out()
        state.catch_up(self._cancel)
        prompt_s = time.perf_counter()
        yield from self._prefill()
        self._work.prefill_s = time.perf_counter() - prompt_s
        state.sequence.mark()
        return (yield from self._decode())

    # -- prompt ----------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Compute the prompt's ids, go back to what they share with the ledger, and record the rest."""
        state, sequence = self._state, self._state.sequence
        prompt = state.prompt()
        target = prompt.ids + self._reply.ids
        limit = state.model.context_length
        if limit is not None and len(target) > limit and state.options.cache.max_kv_size is None:
            raise ContextLengthError(
                f"the prompt has {len(target)} tokens and the model's context {limit}; shorten it, or bound the cache "
                "with max_kv_size (older tokens are then forgotten)"
            )
        self._check_memory(len(target))
        inputs = prepared_input(state.model, prompt, [state.media[index] for index in state.media_in_use()])
        # At least one token must be fed: its logits are where the reply begins.
        keep = min(shared_prefix(sequence.ledger, sequence.inputs, target, inputs), len(target) - 1)
        known = self._fill_known(target, inputs, keep)
        if not known:
            kept = sequence.rewind(keep, cancel=self._cancel)
            known = self._fill_known(target, inputs, kept) if kept < keep else []
            keep = kept
        if known:
            keep = 0
        else:
            sequence.ids[keep:] = target[keep:]
            sequence.inputs = inputs
        step_size = None if state.options.max_stop_latency_s is not None else state.options.prefill_step_size
        data = {"keep": keep, "ids": target[keep:], "step_size": step_size}
        if inputs is not None:
            data["media"] = state.media_in_use()
            data["replies"] = [list(pair) for pair in prompt.reply_ranges]
        state.owed = None
        state.append(Record("prompt", data), *(Record("pass", [start, end - start]) for start, end in known))

    def _fill_known(self, target: list[int], inputs: PreparedInput | None, keep: int) -> list[tuple[int, int]]:
        """Fill the caches with what the prefix cache has of the prompt, if that is worth more than the first `keep`
        tokens, which they share with it; the passes that were spared."""
        cache, state = self._prefixes, self._state
        if cache is None:
            return []
        prompt = PrefixPrompt(target, inputs, state.options.prefill_step_size)
        known = cache.find(state.sequence, prompt)
        end = known[-1].end if known else 0
        # All of it is copied, so a few tokens more behind many aren't worth it.
        if end - keep < max(MIN_TOKENS, end // 32):
            return []
        return [(chunk.start, chunk.end) for chunk in cache.fill(state.sequence, prompt, known, cancel=self._cancel)]

    def _check_memory(self, num_tokens: int) -> None:
        """Refuse what would freeze the machine, before anything is allocated; short runs aren't worth the estimate."""
        state, limit, context = self._state, self._reply.limit, self._state.model.context_length
        total = num_tokens + (limit or 0)
        if context is not None and state.options.cache.max_kv_size is None:
            total = min(total, context)
        if total < _MIN_TOKENS_TO_ESTIMATE:
            return
        cache = state.options.cache
        size = RunSize(
            min(total, cache.max_kv_size or total),
            state.options.prefill_step_size,
            cache.kv_bits,
            cache.kv_group_size,
        )
        check_fits(estimate_run(state.model, size), what=f"a run of {total} tokens ({num_tokens} of them prompt)")

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self) -> Iterator[PrefillProgress]:
        state, sequence, reply = self._state, self._state.sequence, self._reply
        total = reply.num_prompt_tokens
        self._reused_tokens = min(sequence.num_fed, total)
        if reply.tokens and sequence.num_fed >= len(sequence.ids) - 1:
            return
        total = len(sequence.ids)
        yield PrefillProgress(sequence.num_fed, total)
        if reply.step_size is None:
            yield from self._probe(total)
        atomic = () if sequence.inputs is None else sequence.inputs.atomic
        step_size = reply.step_size or state.options.prefill_step_size
        for end in plan_prefill(sequence.num_fed, len(sequence.ids) - 1, step_size, atomic, sequence.cuts).ends:
            yield from self._feed(end, total)

    def _probe(self, total: int) -> Iterator[PrefillProgress]:
        """Feed one small chunk, measure it, and choose the chunk size for `max_stop_latency_s` from that."""
        state, sequence = self._state, self._state.sequence
        latency = state.options.max_stop_latency_s
        assert latency is not None
        atomic = () if sequence.inputs is None else sequence.inputs.atomic
        ends = plan_prefill(sequence.num_fed, len(sequence.ids) - 1, 4 * MIN_STEP_SIZE, atomic).ends
        # The first pass of a process also compiles kernels: the second chunk is the one that tells.
        for end in ends[:2]:
            start = sequence.num_fed
            yield from self._feed(end, total)
        if ends:
            num_tokens = sequence.num_fed - start
            size = step_size_for_latency(num_tokens, self._feed_s, latency, state.options.prefill_step_size)
            state.record("plan", {"step_size": size})

    def _feed(self, end: int, total: int) -> Iterator[PrefillProgress]:
        state, sequence = self._state, self._state.sequence
        self._cancel.checkpoint()
        start, began_s = sequence.num_fed, time.perf_counter()
        sequence.feed(end)
        self._feed_s = time.perf_counter() - began_s
        state.record("pass", [start, end - start])
        self._work.prefilled_tokens += end - start
        if self._prefixes is not None:
            self._prefixes.keep(sequence)
        state.unit_done("chunk")
        yield PrefillProgress(end, total)

    # -- decode ----------------------------------------------------------------------------------------------------

    def _decode(self) -> Generator[Event, None, _Finish]:
        state, sequence, reply = self._state, self._state.sequence, self._reply
        limit = self._limit()
        stop_ids = self._stop_ids()
        assert reply.start is not None
        iterator = self._iterator = TokenIterator(
            sequence,
            options=self._options.decode_options(limit),
            step=len(sequence.ids) - reply.start,
            step_size=reply.step_size or state.options.prefill_step_size,
            cancel=self._cancel,
        )
        while limit is None or len(reply.tokens) < limit:
            sampled = self._unrecorded()
            if sampled is None:
                begins = not reply.tokens and sequence.num_fed < reply.num_prompt_tokens
                if begins:
                    # The prompt's last token is fed by the pass that gives the reply's first. Said before that pass:
                    # between a token's sampling and its record nothing may come that a consumer could leave at.
                    yield PrefillProgress(reply.num_prompt_tokens, reply.num_prompt_tokens)
                sampled = next(iterator)
                self._work.prefilled_tokens += begins
            event, marks, finish = self._show(sampled, stop_ids, limit)
            # The last token and that it was the last are one write: a kill between the two would let a resumed run go
            # on past the end.
            ending = [] if finish is None else [Record("finish", finish)]
            state.append(token_record(sampled), *marks, *ending)
            state.unit_done("token", iterator.settle)
            yield event
            if finish is not None:
                return finish
        return {"reason": "length"}

    def _unrecorded(self) -> Sampled | None:
        """The token that a KeyboardInterrupt in just the wrong place left in the sequence but not in the history."""
        sequence, known = self._state.sequence, len(self._state.history.ids)
        return sequence.last if len(sequence.ids) > known else None

    def _limit(self) -> int | None:
        """Tokens at which the reply ends by length: what was asked, or where the model's context is full."""
        limit, context = self._reply.limit, self._state.model.context_length
        if context is None or self._state.options.cache.max_kv_size is not None:
            return limit
        room = max(context - self._reply.num_prompt_tokens, 0)
        if limit is None or room < limit:
            _log.info("the reply may have %d tokens: the model's context of %d is then full", room, context)
            return room
        return limit

    def _stop_ids(self) -> frozenset[int]:
        own = frozenset(self._options.stop_token_ids)
        return own if self._options.ignore_eos else own | self._state.model.eos_token_ids

    def _show(
        self, sampled: Sampled, stop_ids: frozenset[int], limit: int | None
    ) -> tuple[Token, list[Record], _Finish | None]:
        """The event of a token that is about to be recorded, its marks, and how the reply ends if it ends with it."""
        text = self._text
        assert text is not None
        now_s = time.perf_counter()
        self._work.generated_tokens += 1
        if self._work.first_token_s is None:
            self._work.first_token_s = now_s
        self._work.last_token_s = now_s
        count = len(self._reply.tokens) + 1
        carried = text.carried  # let go of when the reply went on; travels with this token
        marks: list[Record] = []
        finish: _Finish | None = None
        if sampled.id in stop_ids:
            marks = [Record("mark", [count, "silent"]), Record("mark", [count, "flush"])]
            text.skip()
            shown = text.flush()
            finish = {"reason": "stop", "stop_token": sampled.id}
        else:
            step = text.feed(sampled.id)
            shown = step.text
            if step.stop_hit is not None:
                finish = {"reason": "stop", "stop_string": step.stop_hit}
            elif limit is not None and count >= limit:
                marks = [Record("mark", [count, "flush"])]
                shown += text.flush()
                finish = {"reason": "length"}
        top = None if sampled.top is None else tuple(TopLogprob(id=i, logprob=v) for i, v in sampled.top)
        return Token(count - 1, sampled.id, carried + shown, sampled.logprob, top), marks, finish

    # -- the end -----------------------------------------------------------------------------------------------------

    def finished(self) -> Finished:
        """The last event: what `finish` in the history says, with the whole text and what this run did."""
        return finished_event(self._reply, self._text, self._usage())

    def _usage(self) -> Usage:
        work, reply = self._work, self._reply
        to_first_s = None if work.first_token_s is None else work.first_token_s - work.started_s
        decode_s = 0.0
        if work.first_token_s is not None and work.last_token_s is not None:
            decode_s = work.last_token_s - work.first_token_s
        return Usage(
            prompt_tokens=reply.num_prompt_tokens,
            prefilled_tokens=work.prefilled_tokens,
            reused_tokens=self._reused_tokens,
            generated_tokens=work.generated_tokens,
            prompt_tps=work.prefilled_tokens / work.prefill_s if work.prefill_s > 0 else 0.0,
            generation_tps=(work.generated_tokens - 1) / decode_s if decode_s > 0 else 0.0,
            time_to_first_token_s=to_first_s,
            peak_memory_bytes=mx.get_peak_memory(),
            images_prepared=work.images_prepared,
            images_encoded=work.images_encoded,
            frames_prepared=work.frames_prepared,
            frames_encoded=work.frames_encoded,
        )


def media_events(state: SessionState, cancel: CancelToken) -> Iterator[InputProgress]:
    """Prepare and encode what isn't yet of the media in the conversation; everything finished is kept at each event.

    Events count over all pictures (or all frames) that the next prompt brings: picture 3 of 40, whatever was finished
    before a stop.
    """
    indices = state.media_in_use()
    new = state.new_media()
    for index in indices:
        medium = state.media[index]
        if not medium.prepared:
            vision = require_vision(state.model)
            state.check_folder(index, cancel)
            for event in prepare_medium(vision, state.media_part(index), medium, cancel=cancel):
                state.check_source(index)
                state.unit_done("image" if medium.kind == "image" else "frame")
                yield _counted_over(state, new, index, event)
    for index in indices:
        medium = state.media[index]
        if not medium.encoded:
            vision = require_vision(state.model)
            num_parts = len(medium.features)
            for event in encode_medium(vision, medium, cancel=cancel):
                if len(medium.features) > num_parts:  # a part that stands for several frames has an event for each
                    num_parts = len(medium.features)
                    state.unit_done("features")
                yield _counted_over(state, new, index, event)


def _counted_over(state: SessionState, indices: Sequence[int], index: int, event: InputProgress) -> InputProgress:
    """The event of one medium with its index and total counted over all of `indices` of its kind."""
    before = total = 0
    for other in indices:
        medium = state.media[other]
        if medium.kind == state.media[index].kind:
            # How many frames a video has that wasn't opened yet nobody knows.
            count = 1 if medium.kind == "image" else medium.num_frames or 0
            total += count
            before += count if other < index else 0
    return replace(event, index=before + event.index, total=total)


def finished_event(reply: Reply, text: TextStream | None, usage: Usage) -> Finished:
    """The `Finished` of a reply as its history has it."""
    finish = reply.finish or {"reason": "cancelled", "cancel_reason": None}
    reason: FinishReason = finish["reason"]
    return Finished(
        finish_reason=reason,
        cancel_reason=finish.get("cancel_reason"),
        text="" if text is None else text.text,
        usage=usage,
        stop_string=finish.get("stop_string"),
        stop_token=finish.get("stop_token"),
    )


def rebuild_text(tokenizer: Any, reply: Reply) -> TextStream:
    """The text stream of a reply as its tokens and marks say."""
    return TextStream.rebuild(tokenizer, reply.first_stops, reply.ids, reply.marks)
def _prefix_cache_of(state: SessionState) -> PrefixCache | None:
    options = state.options
    if not options.prefix_cache or options.max_stop_latency_s is not None:
        return None
    cache = prefix_cache(state.model)
    cache.watch(state.sequence)
    return cache


