"""Conversations to token ids, so that earlier replies keep the ids they were made of and nobody's text is a command.

A chat template makes one string of a conversation. Encoding that string again would cut earlier replies into other
tokens than the model produced (and their cache would be worthless), and a user's `<|im_start|>` would become a turn.
So the template is rendered twice: with the real contents, and with every content replaced by a mark. Comparing the
two tells which part of the string is the template's, and which came from which content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mlxgen.conversation import Message, accepted, checked_message, checked_text
from mlxgen.detokenizer import fast_backend, unwrap
from mlxgen.errors import InvalidValueError, TemplateError
from mlxgen.spans import Conversation, Slot, Span, locate
from mlxgen.template import ChatTemplate, TemplateRefusal

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Expand = Callable[[list[str]], list[str]]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text to encode. `plain` text is nobody's command: special-token strings in it are ordinary characters."""

    text: str
    plain: bool = False


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """The content of the assistant message `messages[turn_index]`.

    `rewritten` is None where the template shows the reply as it is (perhaps without the white space around it): its own
    ids stand for it. Otherwise it is what the template made of it. `text` is what the string has in this place.
    """

    turn_index: int
    rewritten: str | None
    text: str


Piece = TextPiece | ReplyPiece


class ChatTokenizer:
    """Encodes conversations and raw prompts. Immutable; one per model, shared by its sessions and threads.

    `tokenizer` is what `mlx_lm.load` returns. `control_tokens` are strings to keep out of users' text beside the
    tokenizer's special tokens and those added tokens that the chat template itself writes.
    """

    def __init__(self, tokenizer: TokenizerWrapper, *, control_tokens: Iterable[str] = ()) -> None:
        self._wrapper = tokenizer
        self._tokenizer = unwrap(tokenizer)
        self._backend = fast_backend(self._tokenizer)
        self._extra_control_tokens = tuple(control_tokens)

    # -- conversations

    def pieces(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None = None,
        expand: Expand | None = None,
        now: datetime | None = None,
    ) -> list[Piece]:
        """The conversation as text, plain text and replies in order; joined, their text is the template's.

        `messages` are dicts with "role" and "content"; a content is a string or a list of parts, dicts with "type", of
        which those with "text" are text. `template_options` go to the template (`tools`, `enable_thinking`, ...).
        `expand` gets the template's own text as a list of strings, in order, in one call, and returns as many:
        placeholders of media are expanded there, and never in what somebody wrote. `now` is what a template that
        prints the date sees; pass the same for one conversation, or its beginning changes at midnight.

        Where the template refuses two user turns in a row, an empty assistant turn is put between them; where it
        refuses a system turn, its text and an empty line go in front of the first user turn. Raises `TemplateError` for
        a missing, failing or unbounded template, `InvalidValueError` for messages it can't use.
        """
        checked = [checked_message(message, index) for index, message in enumerate(messages)]
        if not checked:
            raise InvalidValueError("an empty conversation; give at least one message")
        options = dict(template_options or {})
        moment = datetime.now() if now is None else now

        template = self._template_for(options)

        def render(conversation: Conversation) -> str:
            return self._render(
                template, conversation, {**options, "add_generation_prompt": add_generation_prompt}, moment
            )

        conversation, real = accepted(checked, render)
        spans = locate(conversation, real, render, template.source if template is not None else "")
        return self._assemble(real, spans, expand)

    def encode(
        self, pieces: Sequence[Piece], reply_ids: Mapping[int, Sequence[int]], *, add_bos_if_missing: bool = False
    ) -> list[int]:
        """The token ids of a conversation.

        `reply_ids` has the ids of replies by `turn_index` (without the stop token: the template writes it). A reply
        that was rewritten, or has no ids there, is encoded together with the text around it, so that without any ids
        the result is `apply_chat_template(tokenize=True)`'s. A chat template writes BOS itself if the model wants it;
        with `add_bos_if_missing` it is put in front where the tokenizer would and the text doesn't start with it, as
        the processors of vision models do. Ids are range-checked.
        """
        ids: list[int] = []
        text = ""
        started = False

        def end_text() -> None:
            nonlocal text, started
            if text:
                ids.extend(self._encode_text(text, plain=False, first=not started))
                started, text = True, ""

        for piece in pieces:
            if isinstance(piece, ReplyPiece):
                own = reply_ids.get(piece.turn_index)
                if own is not None and piece.rewritten is None:
                    end_text()
                    ids.extend(token_ids_checked(own))
                    started = True
                elif own is not None or not self._special_pattern.search(piece.text):
                    text += piece.text
                else:  # a reply that somebody else supplies may hold "<|im_end|>": that is text as well
                    end_text()
                    ids.extend(self._encode_plain(piece.text, started))
                    started = True
            elif piece.plain:
                end_text()
                ids.extend(self._encode_plain(piece.text, started))
                started = started or bool(piece.text)
            else:
                text += piece.text
        end_text()
        if add_bos_if_missing:
            ids = self._with_bos(ids)
        return ids

    # -- raw prompts

    def encode_raw(self, text: str, add_special: bool = True) -> list[int]:
        """A prompt without a template, special tokens in it included.

        BOS is put in front only if the tokenizer does so by itself and the text doesn't start with it; never an EOS at
        the end, which would end the prompt. Raises `InvalidValueError` for text that isn't valid Unicode.
        """
        ids = self._encode_text(checked_text(text, "the prompt"), plain=False, first=True)
        return self._with_bos(ids) if add_special else ids

    def encode_continuation(self, text: str) -> list[int]:
        """Text that follows other tokens, special tokens in it included; nothing is put in front of it."""
        return self._encode_text(checked_text(text, "the text"), plain=False, first=False)

    # -- rendering

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        """By name; empty where a Python function renders instead (mlx-lm has some, and tokenizers may bring one)."""
        from transformers import PreTrainedTokenizerBase

        own = type(self._tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        if own or getattr(self._wrapper, "_chat_template", None) is not None:
            return {}
        source = self._tokenizer.chat_template
        sources = dict(source) if isinstance(source, Mapping) else {"default": source}
        if not isinstance(sources.get("default"), str):
            raise TemplateError(
                "this model has no chat template; pass one, or use the prompt as it is (--ignore-chat-template)"
            )
        return {name: ChatTemplate(text) for name, text in sources.items()}

    @property
    def has_chat_template(self) -> bool:
        """Whether `pieces` can work at all. Raises `TemplateError` for one that isn't valid."""
        return bool(getattr(self._wrapper, "has_chat_template", self._tokenizer.chat_template is not None))

    def _template_for(self, options: Mapping[str, Any]) -> ChatTemplate | None:
        templates = self._templates
        if options.get("tools") and "tool_use" in templates:
            return templates["tool_use"]
        return templates.get("default")

    def _render(
        self, template: ChatTemplate | None, messages: Conversation, options: dict[str, Any], now: datetime
    ) -> str:
        # As mlx-lm does: some models call the option otherwise, and all get it.
        thinking = getattr(self._wrapper, "_thinking_kwarg", "enable_thinking")
        if "enable_thinking" in options:
            options = {thinking if key == "enable_thinking" else key: value for key, value in options.items()}
        options = {thinking: bool(getattr(self._wrapper, "has_thinking", False)), **options}
        plain = Slot.without_keys(messages)
        if template is not None:
            defaults = {"tools": None, "documents": None, **self._tokenizer.special_tokens_map}
            return template.render({**defaults, **options, "messages": plain}, now)
        try:
            text: str = self._wrapper.apply_chat_template(plain, tokenize=False, **options)
        except Exception as error:
            message = " ".join(str(error).split())[:300]
            raise TemplateRefusal(f"the chat template refuses this conversation: {message}; change it") from error
        return text

    def _assemble(self, real: str, spans: list[Span], expand: Expand | None) -> list[Piece]:
        """Cut the string at the spans; texts with no control tokens go back into the template's text around them."""
        own: list[str] = []
        position = 0
        for span in spans:
            own.append(real[position : span.start])
            position = span.end
        own.append(real[position:])
        if expand is not None:
            expanded = expand(list(own))
            if len(expanded) != len(own):
                raise InvalidValueError(f"expand returned {len(expanded)} texts for {len(own)}; it must return as many")
            own = list(expanded)

        pieces: list[Piece] = []

        def add_text(text: str) -> None:
            if pieces and isinstance(pieces[-1], TextPiece) and not pieces[-1].plain:
                text = pieces.pop().text + text
            if text:
                pieces.append(TextPiece(text))

        add_text(own[0])
        index = 0
        while index < len(spans):
            span, text = spans[index], real[spans[index].start : spans[index].end]
            if span.turn_index is not None:
                pieces.append(ReplyPiece(span.turn_index, text if span.rewritten else None, text))
            else:
                # Parts with nothing between them are one text: the halves of a special token may be in two parts.
                while not own[index + 1] and index + 1 < len(spans) and spans[index + 1].turn_index is None:
                    index += 1
                    text += real[spans[index].start : spans[index].end]
                if self._has_command(text):
                    pieces.append(TextPiece(text, plain=True))
                else:
                    add_text(text)
            add_text(own[index + 1])
            index += 1
        return pieces

    # -- encoding

    @cached_property
    def _added_tokens(self) -> dict[str, tuple[int, bool]]:
        """content -> (id, special) of all added tokens."""
        decoder = getattr(self._tokenizer, "added_tokens_decoder", None) or {}
        return {token.content: (int(index), bool(token.special)) for index, token in decoder.items()}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return _any_of(token for token, (_, special) in self._added_tokens.items() if special)

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        """Special tokens, and added ones (`<think>`) that the template writes; white space and HTML tags aren't."""
        source = "\n".join(template.source for template in self._templates.values())
        control = [
            token
            for token, (_, special) in self._added_tokens.items()
            if special or (token.strip() and not token.strip().isalnum() and token in source)
        ]
        return _any_of([*control, *self._extra_control_tokens])

    @cached_property
    def _normalized_pattern(self) -> re.Pattern[str] | None:
        """For tokenizers that search for some added tokens after normalisation (lower case, NFKC), else None."""
        normalizer = None if self._backend is None else self._backend.normalizer
        decoder = getattr(self._tokenizer, "added_tokens_decoder", None) or {}
        tokens = [token.content for token in decoder.values() if token.normalized]
        tokens = [token for token in tokens if self._control_pattern.fullmatch(token)]
        if normalizer is None or not tokens:
            return None
        return _any_of(normalizer.normalize_str(token) for token in tokens)

    def _has_command(self, text: str) -> bool:
        """Whether something in this text would become a control token."""
        if self._control_pattern.search(text):
            return True
        pattern = self._normalized_pattern
        if pattern is None or self._backend is None:
            return False
        return pattern.search(self._backend.normalizer.normalize_str(text)) is not None

    def _encode_text(self, text: str, *, plain: bool, first: bool) -> list[int]:
        if first or not self._adds_prefix:
            return self._encode_as_is(text, plain)
        # In the middle of a sequence a tokenizer must not put the space in front that it puts at the start.
        for anchor in ("\n", "|", "a"):
            lead = self._encode_as_is(anchor, plain)
            ids = self._encode_as_is(anchor + text, plain)
            if ids[: len(lead)] == lead:
                return ids[len(lead) :]
        return self._encode_as_is(text, plain)

    def _encode_plain(self, text: str, started: bool) -> list[int]:
        ids = self._encode_text(text, plain=True, first=not started)
        commands = {index for index, _ in self._added_tokens.values()} & set(ids)
        if not commands:
            return ids
        # A vocabulary may still hold the string as an ordinary entry; spelled letter by letter it is only text.
        for token, (index, special) in self._added_tokens.items():
            if index in commands and (special or self._control_pattern.fullmatch(token)):
                spelled = [i for char in token for i in self._encode_text(char, plain=True, first=False)]
                if index in spelled:
                    raise InvalidValueError(f"{token!r} can't be written as plain text with this tokenizer; remove it")
                ids = [i for old in ids for i in (spelled if old == index else [old])]
        return ids

    def _encode_as_is(self, text: str, plain: bool) -> list[int]:
        if not plain:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
            return list(ids)
        backend = self._backend
        if backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        # The backend's own pipeline without its first step, the search for added tokens.
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]

    @cached_property
    def _adds_prefix(self) -> bool:
        """Whether the tokenizer encodes a text at the start otherwise than in the middle."""
        alone, after = self._encode_as_is("x", True), self._encode_as_is("\nx", True)
        lead = self._encode_as_is("\n", True)
        return after != [*lead, *alone]

    @cached_property
    def _bos_ids(self) -> list[int]:
        """What the tokenizer by itself puts in front of a text."""
        bare = list(self._tokenizer.encode("x", add_special_tokens=False))
        full = list(self._tokenizer.encode("x", add_special_tokens=True))
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        return []

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self._bos_ids
        return ids if ids[: len(bos)] == bos else [*bos, *ids]


def token_ids_checked(ids: Sequence[int], vocab_size: int | None = None) -> list[int]:
    """`ids` as a list of Python integers in `[0, vocab_size)`; else `InvalidValueError` names the first that isn't."""
    checked: list[int] = []
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidValueError(f"token id at position {position} is {type(token).__name__}; ids are integers")
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            limit = "0 or more" if vocab_size is None else f"from 0 to {vocab_size - 1}"
            raise InvalidValueError(f"token id {token} at position {position} must be {limit}; is it another model's?")
        checked.append(token)
    return checked


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted({string for string in strings if string}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
