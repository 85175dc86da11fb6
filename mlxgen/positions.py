"""Places in a conversation: where a token stands, going back, and putting tokens into the model's mouth.

What changes a conversation here is one record each (`rewind`, `edit`, `append`), so a resumed session is where the live
one was. Going back runs nothing: rows are counted away, or a state mark is taken and the rest is owed to the next run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxgen.cache import quantize_from
from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import ContextLengthError, InvalidValueError
from mlxgen.history import Mark
from mlxgen.state import SessionState
from mlxgen.streams import generation_stream
from mlxgen.tokenizer import ChatTokenizer, token_ids_checked

_MAX_SCORED = 512  # rows of logits at a time: 512 of 150,000 entries in float32 are 300 MB


@dataclass(frozen=True, slots=True)
class Place:
    """After `num_turns` turns; where the last of them is a reply, after `num_tokens` of its tokens (None: all)."""

    num_turns: int
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities (natural logarithm, float32, of the model's own distribution) of a continuation, per token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        return self.total / len(self.logprobs)


def place_of_mark(state: SessionState, mark: Mark) -> Place:
    """Raises `InvalidValueError` for a mark whose place is gone. A mark is its number and place: one of another session
    that has the same isn't told apart.
    """
    if not isinstance(mark, Mark):
        raise InvalidValueError(f"{mark!r} is no mark; give one that mark() returned, or one of `marks`")
    if mark not in state.history.points:
        raise InvalidValueError(
            f"mark {mark.number} isn't in this conversation any more (it was rewound or changed before that place); "
            f"the marks there are: {[point.number for point in state.history.points]}"
        )
    return Place(mark.num_turns, mark.num_tokens)


def place_of_token(state: SessionState, num_tokens: int) -> Place:
    """The place after `num_tokens` of the conversation's token ids, if it lies in a reply or at the end of one.

    Raises `InvalidValueError` for a place inside a user's turn or the template's own text.
    """
    history = state.history
    if type(num_tokens) is not int or not 0 <= num_tokens <= len(history.ids):
        raise InvalidValueError(f"token {num_tokens} of {len(history.ids)}; give 0 to {len(history.ids)}")
    reply = history.reply
    if reply is not None and reply is history.laid_out and reply.start is not None and num_tokens >= reply.start:
        return Place(len(history.turns), num_tokens - reply.start)
    for index, start, end in _earlier_replies(state):
        if start <= num_tokens <= end:
            return Place(index + 1, num_tokens - start)
    raise InvalidValueError(
        f"token {num_tokens} lies in a turn that isn't the model's; rewind to a turn (num_turns), or edit() that turn"
    )


def _earlier_replies(state: SessionState) -> list[tuple[int, int, int]]:
    """(index of the turn, start, end) of each earlier reply whose tokens stand in the ids as they are."""
    history = state.history
    prompt = state.prompt(locate_replies=True)
    if history.ids[: len(prompt.ids)] != prompt.ids:
        raise InvalidValueError(
            "the conversation has changed since its last reply, so where its tokens stand isn't settled; rewind to a "
            "mark or a turn"
        )
    last = len(history.turns) - 1
    turns = [i for i, turn in enumerate(history.turns) if turn.reply is not None and turn.reply.tokens and i != last]
    found: list[tuple[int, int, int]] = []
    ranges = list(prompt.reply_ranges)
    for index in turns:
        reply = history.turns[index].reply
        assert reply is not None
        own = reply.ids
        for start, end in ranges:
            if prompt.ids[start:end] in (own, own[:-1]):
                found.append((index, start, end))
                ranges.remove((start, end))
                break
    return found


def rewind(state: SessionState, place: Place) -> None:
    """Make the conversation end at `place`. Nothing is run and nothing is recorded if it ends there already."""
    history = state.history
    if type(place.num_turns) is not int or not 0 <= place.num_turns <= len(history.turns):
        raise InvalidValueError(f"turn {place.num_turns} of {len(history.turns)}; give 0 to {len(history.turns)}")
    same = place.num_turns == len(history.turns)
    if not same:
        state.record("rewind", {"turns": place.num_turns, "tokens": None})
        state.reply_options = None
    reply = history.reply
    if reply is None or place.num_tokens is None or place.num_tokens == len(reply.tokens):
        return
    if place.num_tokens > len(reply.tokens):
        raise InvalidValueError(f"token {place.num_tokens} of a reply that has {len(reply.tokens)}")
    state.back_to(place.num_tokens)


def put(state: SessionState, ids: Sequence[int]) -> None:
    """Append checked ids to the last reply; a token that had ended it goes. Text that a stop string withheld stays
    with it."""
    history = state.history
    reply = history.reply
    assert reply is not None
    reopen(state)
    state.put(token_ids_checked([*reply.waiting, *ids], state.model.vocab_size))


def reopen(state: SessionState) -> None:
    """Take back the token that ended the last reply, if one did: what comes next belongs before it."""
    reply = state.history.reply
    if reply is not None and reply.finish is not None and reply.finish.get("stop_token") is not None:
        state.back_to(len(reply.tokens) - 1)


def ids_of(state: SessionState, continuation: str | Sequence[int]) -> list[int]:
    """Token ids of a continuation; text is encoded as what follows other text. Raises `InvalidValueError`."""
    if isinstance(continuation, str):
        ids = ChatTokenizer(state.model.tokenizer).encode_continuation(continuation)
    elif isinstance(continuation, Iterable):
        ids = token_ids_checked(continuation, state.model.vocab_size)
    else:
        raise InvalidValueError(f"a continuation is text or token ids, not {type(continuation).__name__}")
    if not ids:
        raise InvalidValueError("there is nothing to add: the text is empty; give at least one token")
    return ids


def score(state: SessionState, ids: Sequence[int], *, cancel: CancelToken = NEVER) -> Score:
    """Feed `ids` behind what `state` (a fork that will be dropped) has, and say how likely each of them was.

    A checkpoint before each chunk of the session's prefill step size. Raises `ContextLengthError`.
    """
    sequence, limit = state.sequence, state.model.context_length
    total = len(sequence.ids) + len(ids)
    if limit is not None and total > limit and state.options.cache.max_kv_size is None:
        raise ContextLengthError(
            f"with the continuation there are {total} tokens, and the model's context has {limit}; score a shorter one"
        )
    sequence.go_back(len(sequence.ids) - 1)
    sequence.repair(cancel)
    if sequence.num_fed < len(sequence.ids) - 1:
        cancel.checkpoint()
        sequence.feed(len(sequence.ids) - 1)
    tokens = [*sequence.ids[sequence.num_fed :], *ids]
    logprobs: list[float] = []
    step = min(state.options.prefill_step_size, _MAX_SCORED)
    for first in range(0, len(ids), step):
        cancel.checkpoint()
        last = min(first + step, len(ids))
        with mx.stream(generation_stream()):
            logits = sequence.forward(
                mx.array(tokens[first:last], mx.uint32),
                cache=sequence.cache,
                start=sequence.num_fed,
                inputs=sequence.inputs,
            )[0].astype(mx.float32)
            targets = mx.array(tokens[first + 1 : last + 1], mx.uint32)
            chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0] - mx.logsumexp(logits, axis=-1)
            quantize_from(sequence.cache, sequence.options)
            mx.eval(chosen, sequence.arrays())
        values: Any = chosen.tolist()
        logprobs += values
        sequence.num_fed += last - first
    return Score(tuple(ids), tuple(logprobs))
