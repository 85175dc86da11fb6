"""One reply end to end: media, prompt, prefill, decode, and the one place where `Cancelled` becomes the last event."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.constraints import BanConstraint, Constraint, HealingConstraint, healing_at_end, healing_of
from mlxgen.decode import TokenIterator
from mlxgen.errors import ContextLengthError, OutOfMemoryError
from mlxgen.events import Backtrack, Event, Finished, FinishReason, InputProgress, PrefillProgress, Section, Usage
from mlxgen.history import Reply, token_record
from mlxgen.inputs import PreparedInput
from mlxgen.judge import Finish, Judge, Verdict, stop_of
from mlxgen.models.memory import RunSize, check_fits, estimate_run, wired_limit
from mlxgen.options import ReplyOptions
from mlxgen.prefill import MIN_STEP_SIZE, plan_prefill, step_size_for_latency
from mlxgen.prefixcache import PrefixCache, prefix_cache
from mlxgen.prefixcache.cache import Prompt as PrefixPrompt
from mlxgen.prefixcache.keys import MIN_TOKENS
from mlxgen.preparation import encode_medium, prepare_medium, prepared_input, require_vision, shared_prefix
from mlxgen.sequence import Sampled
from mlxgen.snapshot.store import Record
from mlxgen.state import SessionState
from mlxgen.steeredtext import BanHit, SteeredText
from mlxgen.textstream import TextStream

_log = logging.getLogger(__name__)

_MIN_TOKENS_TO_ESTIMATE = 2048


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
        self._judge: Judge | None = None
        self._iterator: TokenIterator | None = None
        self._masking = False  # whether the iterator has masks for single places
        self._num_handed = 0  # characters of the reply's text that have gone out with tokens
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
            tools = state.options.template_options.get("tools")
            self._judge = Judge(state.model, self._reply, self._options, tools)
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

    def prefill(self) -> Iterator[Event]:
        """The events of what comes before the reply's next token, and no more: nothing is recorded of an end."""
        self._judge = Judge(self._state.model, self._reply, self._options)
        with wired_limit(self._state.model):
            yield from self._prompt_phases()

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

    def _phases(self) -> Generator[Event, None, Finish]:
        yield from self._prompt_phases()
        return (yield from self._decode())

    def _prompt_phases(self) -> Iterator[Event]:
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

    # -- prompt ----------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Compute the prompt's ids, go back to what they share with the ledger, and record the rest."""
        state, sequence = self._state, self._state.sequence
        prompt = state.prompt()
        if self._options.heal and state.options.raw and not self._reply.tokens and not self._reply.healed:
            healing = healing_at_end(state.model.tokenizer, prompt.ids)
            if healing.ids:
                state.record("mark", [0, "heal", {"ids": list(healing.ids), "text": healing.text}])
                assert self._judge is not None
                self._judge.rebuild()
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
        estimate, what = estimate_run(state.model, size), f"a run of {total} tokens ({num_tokens} of them prompt)"
        try:
            check_fits(estimate, what=what)
        except OutOfMemoryError:
            # Before anything is refused, what is only kept for later goes.
            if self._prefixes is None or not self._prefixes.make_room():
                raise
            check_fits(estimate, what=what)

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
        if self._prefixes is not None:
            self._prefixes.keep(sequence)
        self._work.prefilled_tokens += end - start
        state.unit_done("chunk")
        yield PrefillProgress(end, total)

    # -- decode ----------------------------------------------------------------------------------------------------

    def _decode(self) -> Generator[Event, None, Finish]:
        state, reply, judge = self._state, self._reply, self._judge
        assert judge is not None
        limit = judge.limit = self._limit()
        yield from self._steer(judge)
        self._mend(judge)
        forces = judge.forces
        while limit is None or len(reply.tokens) < limit:
            forced = judge.forced() if forces else None
            sampled = self._unrecorded() if forced is None else None
            if sampled is None:
                if self._iterator is None:
                    yield from self._catch_up()
                begins = not reply.tokens and state.sequence.num_fed < reply.num_prompt_tokens
                if begins:
                    # The prompt's last token is fed by the pass that gives the reply's first. Said before that pass:
                    # between a token's sampling and its record nothing may come that a consumer could leave at.
                    yield PrefillProgress(reply.num_prompt_tokens, reply.num_prompt_tokens)
                if forced is None:
                    sampled = next(self._iterator or self._open_iterator(judge, limit), None)
                    if sampled is None:
                        return {"reason": "stop", **judge.hit("grammar", None)}
                else:
                    sampled = Sampled(forced)
                    self._make_place()
                self._work.prefilled_tokens += begins
            verdict = judge.judge(sampled, forced=forced is not None)
            if isinstance(verdict, BanHit):
                yield from self._take_back(judge, verdict, sampled)
                continue
            self._count_token()
            if forced is not None:
                state.put([forced], *judge.closing_mark(), *_seams(verdict))
            else:
                if self._options.grammar is not None and self._iterator is not None and self._iterator.complete:
                    verdict = judge.completed(verdict)
                # The last token and that it was the last are one write: a kill between the two would let a resumed run
                # go on past the end.
                state.append(token_record(sampled), *_seams(verdict))
            if self._masking and not judge.banned() and self._healing() is None:
                self._settle()
            self._num_handed += len(verdict.event.text)
            state.unit_done("token", self.settle)
            yield verdict.event
            if verdict.following:
                yield from verdict.following
            if verdict.finish is not None:
                return verdict.finish
        return {"reason": "length"}

    def _catch_up(self) -> Iterator[PrefillProgress]:
        """Feed what going back has left to be fed, all but the last token."""
        sequence = self._state.sequence
        sequence.repair(self._cancel)
        if self._reply.tokens and sequence.num_fed < len(sequence.ids) - 1:
            yield from self._prefill()

    def _open_iterator(self, judge: Judge, limit: int | None) -> TokenIterator:
        state, reply = self._state, self._reply
        banned = judge.banned()
        healing = self._healing()
        self._masking = bool(banned) or healing is not None
        constraints: tuple[Constraint, ...] = () if healing is None else (healing,)
        if banned:
            constraints = (*constraints, BanConstraint(banned, state.model.vocab_size))
        assert reply.start is not None
        self._iterator = TokenIterator(
            state.sequence,
            options=self._options.decode_options(limit, constraints).bound(state.model),
            step=len(state.sequence.ids) - reply.start,
            step_size=reply.step_size or state.options.prefill_step_size,
            cancel=self._cancel,
        )
        return self._iterator

    def _steer(self, judge: Judge) -> Iterator[Section | Backtrack]:
        """Note down what the reply's text is steered by from here on, where that isn't what it was so far."""
        state, reply = self._state, self._reply
        text = judge.text
        if isinstance(text, SteeredText) and text.hit is not None and text.hit.kind == "regex":
            while text.stop_hit is not None:  # the reply goes on after it
                state.record("mark", [len(reply.tokens), "release"])
                text.release()
        wanted = judge.steering(state.history.ids[: reply.start])
        while wanted is not None and (hit := judge.banned_before(wanted)) is not None:
            self._num_handed = len(judge.text.text) - len(judge.text.carried)
            yield from self._go_back(judge, hit.index, hit.banned)
            wanted = judge.steering(state.history.ids[: reply.start])
        text = judge.text
        if wanted is not None:
            known = isinstance(text, SteeredText) and text.steering.sections
            state.record("mark", [len(reply.tokens), "steer", wanted.to_json()])
            judge.rebuild()
            text = judge.text
            if wanted.sections and not known and isinstance(text, SteeredText) and text.opening is not None:
                yield text.opening
        self._num_handed = len(text.text) - len(text.carried)

    def _mend(self, judge: Judge) -> None:
        """With `heal`: where the reply ends in words that were put there, their last tokens are chosen anew."""
        state, reply = self._state, self._reply
        if not self._options.heal or not reply.num_put or reply.waiting:
            return
        count = len(reply.tokens)
        if judge.closes_thinking(count - 1):
            return  # these are nobody's words
        healing = healing_at_end(state.model.tokenizer, reply.ids[count - reply.num_put :], keep=0)
        if not healing.ids:
            return
        state.back_to(count - len(healing.ids))
        state.record("mark", [len(reply.tokens), "mend", {"ids": list(healing.ids), "text": healing.text}])
        judge.rebuild()
        self._num_handed = len(judge.text.text) - len(judge.text.carried)

    def _healing(self) -> HealingConstraint | None:
        """What the reply's next tokens must still begin with; None where nothing was healed, or all is said again."""
        for count, kind, detail in reversed(self._reply.marks):
            if kind in ("heal", "mend"):
                model = self._state.model
                removed = healing_of(model.tokenizer, [int(token) for token in detail["ids"]]).removed
                constraint = HealingConstraint(model.tokenizer, removed, model.vocab_size, first=count)
                return constraint if constraint.allowed(self._reply.ids) is not None else None
        return None

    def _make_place(self) -> None:
        """Before a token that the model doesn't choose: the token before it is fed by a decode pass, as it would have
        been if the model had chosen."""
        state, sequence = self._state, self._state.sequence
        self._cancel.checkpoint()
        self._settle()
        state.agree(self._cancel)
        if sequence.num_fed < len(sequence.ids):
            sequence.feed_one()

    def _take_back(self, judge: Judge, hit: BanHit, sampled: Sampled) -> Iterator[Backtrack]:
        """Go back to where a banned string begins, and keep its first token from coming there again."""
        reply, index = self._reply, judge.first_to_go(hit)
        token = sampled.id if index == len(reply.tokens) else reply.tokens[index].id
        judge.check_backtrack(hit, index, token)
        self._count_token()
        self._settle()
        yield from self._go_back(judge, index, hit.banned, token)

    def _go_back(self, judge: Judge, index: int, banned: str, token: int | None = None) -> Iterator[Backtrack]:
        self._state.back_to(index, banned=token)
        judge.rebuild()
        if len(judge.text.text) - len(judge.text.carried) != self._num_handed:
            self._state.record("mark", [index, "shown", self._num_handed])
            judge.rebuild()
        yield Backtrack(index, banned)

    def _count_token(self) -> None:
        now_s = time.perf_counter()
        self._work.generated_tokens += 1
        if self._work.first_token_s is None:
            self._work.first_token_s = now_s
        self._work.last_token_s = now_s

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

    # -- the end -----------------------------------------------------------------------------------------------------

    def finished(self) -> Finished:
        """The last event: what `finish` in the history says, with the whole text and what this run did."""
        text = None if self._judge is None else self._judge.text
        return finished_event(self._reply, text, self._usage(), self._state.options.template_options.get("tools"))

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


def _prefix_cache_of(state: SessionState) -> PrefixCache | None:
    options = state.options
    if not options.prefix_cache or options.max_stop_latency_s is not None:
        return None
    cache = prefix_cache(state.model)
    cache.watch(state.sequence)
    return cache


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


def finished_event(
    reply: Reply, text: TextStream | None, usage: Usage, tools: Sequence[Mapping[str, Any]] | None = None
) -> Finished:
    """The `Finished` of a reply as its history has it. `tools` are those the template was given, for parsing calls."""
    finish = reply.finish or {"reason": "cancelled", "cancel_reason": None}
    reason: FinishReason = finish["reason"]
    steered = text if isinstance(text, SteeredText) else None
    return Finished(
        finish_reason=reason,
        cancel_reason=finish.get("cancel_reason"),
        text="" if text is None else text.text,
        usage=usage,
        stop_string=finish.get("stop_string"),
        stop_token=finish.get("stop_token"),
        stop=stop_of(finish),
        sections=() if steered is None else steered.sections(),
        tool_calls=() if steered is None else steered.tool_calls(tools),
    )


def _seams(verdict: Verdict) -> list[Record]:
    """What is recorded in one write with a token: its marks, and that it was the last."""
    if verdict.finish is None:
        return [*verdict.marks]
    return [*verdict.marks, Record("finish", verdict.finish)]
