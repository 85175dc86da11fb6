"""The two calls people know from mlx-lm, with its arguments and response fields: changing over is changing an import.

They run on mlxgen's token iterator, so they may be stopped anywhere and leave the caller's `prompt_cache` true; what
they can't do is resume in another process (use `Session` for that). The signatures have more than five parameters
because mlx-lm's have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxgen.cache import CacheOptions
from mlxgen.cancellation import NEVER, Cancelled, CancelToken
from mlxgen.decode import DecodeOptions, TokenIterator
from mlxgen.errors import InvalidValueError, UnsupportedError
from mlxgen.inputs import PreparedInput
from mlxgen.models.memory import wired_limit
from mlxgen.models.model import Model
from mlxgen.prefill import DEFAULT_STEP_SIZE
from mlxgen.sampling import LogitsProcessor
from mlxgen.sequence import TokenSequence
from mlxgen.textstream import TextStream
from mlxgen.tokenizer import ChatTokenizer, token_ids_checked

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """One token, with mlx-lm's field names. `logprobs` is the whole vector; `peak_memory` is in GB (1e9 bytes).

    `finish_reason` is None until the last response: "stop", "length", or (mlxgen's own) "cancelled".
    """

    text: str
    token: int
    logprobs: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None


class _EmbeddingForward:
    """A forward pass whose prompt comes as embeddings; stateless but for the caller's array."""

    def __init__(self, module: Any, embeddings: mx.array) -> None:
        self._module = module
        self._embeddings = embeddings

    def __call__(self, ids: mx.array, *, cache: Sequence[Any], start: int, inputs: PreparedInput | None) -> mx.array:
        end = start + ids.shape[0]
        logits: mx.array
        if start >= self._embeddings.shape[0]:
            logits = self._module(ids[None], cache=list(cache))
        else:
            chunk = self._embeddings[start:end]
            logits = self._module(ids[None], cache=list(cache), input_embeddings=chunk[None])
        return logits


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    *,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = DEFAULT_STEP_SIZE,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
    draft_model: Any = None,
    cancel: CancelToken = NEVER,
) -> Iterator[GenerationResponse]:
    """Stream a reply as `mlx_lm.stream_generate` does; one response per token, the last with a `finish_reason`.

    `model` is a module (with its `tokenizer`) or what `mlxgen.load` returned. `max_tokens` -1 means no limit.
    `prompt_cache` is updated in place and holds prompt and every token that was yielded, whenever the caller stops. A
    cancelled token ends the stream with finish_reason "cancelled" (and the last token again, with no text), or, before
    the first token, with no response at all.
    """
    if draft_model is not None:
        raise UnsupportedError("speculative decoding isn't in this version of mlxgen; leave draft_model out")
    if max_tokens == 0 or max_tokens < -1:
        raise InvalidValueError(f"max_tokens is {max_tokens}; give 1 or more, or -1 for no limit")
    loaded = model if isinstance(model, Model) else Model.from_parts(model, tokenizer)
    ids = _prompt_ids(loaded, prompt, input_embeddings)
    if input_embeddings is not None:
        loaded = replace(loaded, forward=_EmbeddingForward(loaded.module, input_embeddings))
    decode = DecodeOptions(
        max_tokens=None if max_tokens == -1 else max_tokens,
        processors=tuple(logits_processors or ()),
        sampler=sampler,
        full_logprobs=True,
    )
    decode.validate(loaded.vocab_size)
    sequence = TokenSequence(
        loaded, CacheOptions(max_kv_size, kv_bits, kv_group_size, quantized_kv_start), cache=prompt_cache, ids=ids
    )
    iterator = TokenIterator(sequence, options=decode, step_size=prefill_step_size, cancel=cancel)
    run = _Run(loaded, iterator, len(ids), prompt_progress_callback or (lambda done, total: None))
    return run.responses(feed_last=prompt_cache is not None)


def generate(
    model: Any, tokenizer: Any, prompt: str | mx.array | Sequence[int], verbose: bool = False, **options: Any
) -> str:
    """The text of a reply; options as for `stream_generate`. Unlike mlx-lm's it never prints: `verbose` must be
    false."""
    if verbose:
        raise UnsupportedError(
            "verbose=True prints, which a library shouldn't; use stream_generate and print its texts"
        )
    return "".join(response.text for response in stream_generate(model, tokenizer, prompt, **options))


def _prompt_ids(model: Model, prompt: str | mx.array | Sequence[int], embeddings: mx.array | None) -> list[int]:
    if isinstance(prompt, str):
        ids = ChatTokenizer(model.tokenizer).encode_raw(prompt)
    else:
        given: Any = prompt.tolist() if isinstance(prompt, mx.array) else prompt
        ids = [int(token) for token in given]
    if embeddings is not None:
        if ids and len(ids) != embeddings.shape[0]:
            raise InvalidValueError(
                f"input_embeddings has {embeddings.shape[0]} rows, the prompt {len(ids)} tokens; they must be the same"
            )
        ids = ids or [0] * int(embeddings.shape[0])
    if not ids:
        raise InvalidValueError("the prompt is empty; give at least one token, or input_embeddings")
    return token_ids_checked(ids, model.vocab_size)


class _Run:
    """One call of `stream_generate`: the iterator's tokens as responses."""

    def __init__(
        self, model: Model, iterator: TokenIterator, num_prompt_tokens: int, progress: Callable[[int, int], None]
    ) -> None:
        self._model = model
        self._iterator = iterator
        self._num_prompt_tokens = num_prompt_tokens
        self._progress = progress
        self._text = TextStream(model.tokenizer)
        self._prompt_s = 0.0
        self._began_s = 0.0
        self._count = 0
        self._last: tuple[int, mx.array] | None = None

    def responses(self, *, feed_last: bool) -> Iterator[GenerationResponse]:
        with wired_limit(self._model):
            try:
                yield from self._tokens()
            except Cancelled:
                if self._last is not None:
                    yield self._response("", *self._last, "cancelled")
            finally:
                self._leave(feed_last=feed_last)

    def _leave(self, *, feed_last: bool) -> None:
        """Make the cache true: it holds prompt and yielded tokens. The error that led here, if any, is the one to
        see."""
        sequence = self._iterator.sequence
        try:
            self._iterator.settle()
            if feed_last:
                sequence.repair()
                # mlx-lm's cache holds the last token too, and its callers append the next turn to that.
                if self._count and sequence.num_fed == len(sequence.ids) - 1:
                    sequence.feed_one()
        except Exception:
            _log.warning("the prompt_cache that was passed in can't be used any more: make a new one", exc_info=True)

    def _tokens(self) -> Iterator[GenerationResponse]:
        iterator, total = self._iterator, self._num_prompt_tokens
        began_s = time.perf_counter()
        self._progress(0, total)
        for done in iterator.prefill():
            self._progress(done, total)
        limit = iterator.options.max_tokens
        for sampled in iterator:
            if self._count == 0:
                self._prompt_s = time.perf_counter() - began_s
                self._began_s = time.perf_counter()
                self._progress(total, total)
            self._count += 1
            vector = iterator.last_vector
            assert vector is not None
            self._last = (sampled.id, vector)
            if sampled.id in self._model.eos_token_ids:
                yield self._response(self._text.flush() + self._text.pending, sampled.id, vector, "stop")
                return
            text = self._text.feed(sampled.id).text
            ended = limit is not None and self._count >= limit
            if ended:
                text += self._text.flush() + self._text.pending
            yield self._response(text, sampled.id, vector, "length" if ended else None)

    def _response(self, text: str, token: int, vector: mx.array, finish_reason: str | None) -> GenerationResponse:
        elapsed_s = time.perf_counter() - self._began_s
        return GenerationResponse(
            text=text,
            token=token,
            logprobs=vector,
            from_draft=False,
            prompt_tokens=self._num_prompt_tokens,
            prompt_tps=self._num_prompt_tokens / self._prompt_s if self._prompt_s > 0 else 0.0,
            generation_tokens=self._count,
            generation_tps=self._count / elapsed_s if elapsed_s > 0 else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
        )
