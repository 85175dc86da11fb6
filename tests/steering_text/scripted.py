"""Models that say what a test tells them to, unless it is forbidden; and runs of them, cut up and put together."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from harness import CountingForward, Setup, StopAt, model
from tiny import CHAT_TEMPLATE, VOCAB_SIZE, make
from tiny.tokenizer import build_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from mlxgen.events import Backtrack, Event, Finished, Section, Token, ToolCall
from mlxgen.models import Model, load
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    + CHAT_TEMPLATE
    + "{# <tool_call> tool_call.name #}"
)
THINKING_TEMPLATE = TOOL_TEMPLATE.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")


@dataclass
class Scripted:
    """A forward pass whose most likely next token is the script's, by position; behind it come the model's own."""

    inner: Any
    script: Sequence[int] = ()
    first: int = 0  # how many tokens come before the script's first
    bonus: float = 1000.0

    def __call__(self, ids: mx.array, *, cache: Any, start: int, inputs: Any) -> mx.array:
        logits = self.inner(ids, cache=cache, start=start, inputs=inputs)
        extra = np.zeros(logits.shape, np.float32)
        for row in range(ids.shape[0]):
            place = start + row + 1 - self.first
            if 0 <= place < len(self.script):
                extra[0, row, self.script[place]] = self.bonus
        return logits + mx.array(extra)


@functools.cache
def sectioned(template: str = TOOL_TEMPLATE, markers: tuple[str, ...] = MARKERS, kind: str = "llama") -> Model:
    """A tiny model whose vocabulary has these markers as tokens of their own, from id 307 on."""
    root = Path(tempfile.mkdtemp(prefix="mlxgen-sections-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    make(kind, root, config={"vocab_size": VOCAB_SIZE + len(markers)})
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(root)
    return load(str(root))


def says(base: Model, words: str | Sequence[int], setup: Setup = Setup("llama"), **template: Any) -> Talker:
    """A talker of this model with a script."""
    ids = base.tokenizer.encode(words, add_special_tokens=False) if isinstance(words, str) else list(words)
    forward = Scripted(CountingForward(base.forward), ids)
    using = replace(base, forward=forward)
    options = replace(setup.session_options, template_options=template)
    talker = Talker(using, forward, options)
    probe = talker.session()
    probe.send("Say it.", reply=ReplyOptions(max_tokens=0))
    forward.first = len(probe.history.ids)
    return talker


def says_with(kind: str, words: str | Sequence[int]) -> Talker:
    return says(model(kind), words)


@dataclass
class Talker:
    """Makes sessions of one scripted model, all with the same prompt."""

    using: Model
    forward: Scripted
    options: SessionOptions

    def session(self) -> Session:
        return Session(self.using, options=self.options)

    def run(self, reply: ReplyOptions, **more: Any) -> Heard:
        heard = Heard()
        heard.take(self.session().stream("Say it.", reply=reply, **more))
        return heard

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.using.tokenizer.encode(text, add_special_tokens=False)
        return ids


@dataclass
class Heard:
    """What a consumer got, over however many runs."""

    events: list[Event] = field(default_factory=list)
    finished: Finished | None = None

    def take(self, events: Iterator[Event]) -> Finished:
        for event in events:
            if isinstance(event, Finished):
                self.finished = event
            elif isinstance(event, Token | Backtrack | Section | ToolCall):
                self.events.append(event)
        assert self.finished is not None
        return self.finished

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Token))

    @property
    def ids(self) -> list[int]:
        """The tokens that stayed."""
        ids: list[int] = []
        for event in self.events:
            if isinstance(event, Token):
                assert event.index == len(ids)
                ids.append(event.id)
            elif isinstance(event, Backtrack):
                del ids[event.index :]
        return ids

    def of(self, *kinds: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What an interruption must not change."""
        end = self.finished
        assert end is not None
        return (self.events, end.finish_reason, end.text, end.stop, end.sections, end.tool_calls)


def cut_everywhere(
    talker: Talker, reply: ReplyOptions, folder: Path | None = None, *, every: int = 1, **given: Any
) -> int:
    """Stop at each checkpoint in turn and go on, in memory or (with `folder`) through a snapshot: nothing changes."""
    token = StopAt()
    whole = talker.run(reply, cancel=token)
    for stop_at in range(0, token.count, every):
        session, heard = talker.session(), Heard()
        stopped = heard.take(session.stream("Say it.", reply=reply, cancel=StopAt(stop_at)))
        assert stopped.finish_reason == "cancelled"
        assert stopped.text == heard.text
        if folder is None:
            heard.take(session.continue_())
        else:
            path = session.save(folder / f"{stop_at}.mlxgen")
            with resume(path, options=ResumeOptions(model=talker.using, **given)) as again:
                assert again.reply_text == heard.text
                heard.take(again.continue_())
                assert again.last_finished is not None
                assert (again.last_finished.stop, again.last_finished.tool_calls, again.last_finished.sections) == (
                    heard.finished.stop,
                    heard.finished.tool_calls,
                    heard.finished.sections,
                )
        assert heard.outcome == whole.outcome, f"stopped at checkpoint {stop_at}"
        assert heard.text == heard.finished.text
    return token.count


def left_everywhere(talker: Talker, reply: ReplyOptions, check: Callable[[Heard, Heard], None]) -> None:
    """Leave the loop after each event in turn and go on."""
    whole = talker.run(reply)
    for leave_after in range(len(whole.events)):
        session, heard = talker.session(), Heard()
        stream = session.stream("Say it.", reply=reply)
        for event in stream:
            if isinstance(event, Token | Backtrack | Section | ToolCall):
                heard.events.append(event)
                if len(heard.events) > leave_after:
                    break
        stream.close()  # type: ignore[attr-defined]
        if session.unfinished:
            heard.take(session.continue_())
        else:
            heard.finished = session.last_finished
        check(heard, whole)
