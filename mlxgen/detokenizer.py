"""Token ids to text, one id at a time, never half a character.

Three ways, chosen by the tokenizer's own decoder:

- byte-level BPE: a token is a string of bytes; they run through an incremental UTF-8 decoder;
- SentencePiece with byte fallback: a token is text or one byte;
- anything else: `.decode` of a short window that starts where the text was last complete.

The first two cost a look-up per token and don't depend on how the text goes on.
"""

from __future__ import annotations

import codecs
import json
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, Protocol

from tokenizers import Tokenizer

from mlxgen.errors import InvalidValueError

_REPLACEMENT: Final = "\ufffd"


class Detokenizer:
    """Turns one reply's ids into text as soon as the text is certain. Owned by that reply, used by one thread.

    All that was returned, with `pending()` at the end, is `tokenizer.decode(ids, skip_special_tokens=False,
    clean_up_tokenization_spaces=False)`. The bytes of an unfinished character are held back; bytes that can't become
    one come out as U+FFFD as soon as that is certain (at most three tokens later). One exception: in a byte-fallback
    vocabulary `decode` spoils a whole run of bytes if one of them is invalid; characters that were complete before the
    invalid byte came have been returned already, and stay.

    It is a function of the ids only: feed the same ids again and it is in the same state. `tokenizer` is a
    `TokenizerWrapper` of mlx-lm, a tokenizer of transformers, or a `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._stream = _choose_stream(tokenizer)

    def add(self, token: int) -> str:
        """The text that became certain with this id, often "".

        An id at or past the tokenizer's vocabulary gives "": many models pad their output layer, so such an id is
        possible, and has no text. A negative one raises `InvalidValueError`.
        """
        token = operator.index(token)
        if token < 0:
            raise InvalidValueError(f"token id {token} is negative; ids count from 0")
        return self._stream.add(token)

    def pending(self) -> str:
        """What the held bytes would come out as if nothing followed (U+FFFD); "" between two characters."""
        return self._stream.pending()


class _Stream(Protocol):
    def add(self, token: int) -> str: ...

    def pending(self) -> str: ...


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: a printable byte is its own Latin-1 character, the 68 others are U+0100 and up
    in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class _ByteLevelStream:
    def __init__(self, backend: Tokenizer) -> None:
        self._token_of = backend.id_to_token
        self._byte_of_char = _byte_of_char()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._seen: dict[int, bytes] = {}

    def add(self, token: int) -> str:
        data = self._seen.get(token)
        if data is None:
            data = self._seen[token] = self.bytes_of(token) or b""
        return self._utf8.decode(data)

    def bytes_of(self, token: int) -> bytes | None:
        name = self._token_of(token)
        if name is None:
            return None
        try:
            return bytes([self._byte_of_char[char] for char in name])
        except KeyError:  # an added token with a character outside the alphabet stands for itself
            return name.encode("utf-8", "replace")

    def pending(self) -> str:
        held, _ = self._utf8.getstate()
        return held.decode("utf-8", "replace")


class _ByteFallbackStream:
    """For decoders that are Replace..., ByteFallback, Fuse, perhaps Strip at the start."""

    def __init__(self, backend: Tokenizer, replacements: list[tuple[str, str]], strip: tuple[str, int]) -> None:
        self._token_of = backend.id_to_token
        self._replacements = replacements
        self._strip_char, self._num_to_strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="strict")
        self._num_held = 0  # bytes of an unfinished character
        self._run_is_valid = True

    def add(self, token: int) -> str:
        name = self._token_of(token)
        if name is None:
            return ""
        for old, new in self._replacements:
            name = name.replace(old, new)
        byte = _fallback_byte(name)
        if byte is None:
            text = _REPLACEMENT * self._num_held + name
            self._start_run()
        elif not self._run_is_valid:
            text = _REPLACEMENT
        else:
            text = self._add_byte(byte)
        return self._strip_start(text)

    def bytes_of(self, token: int) -> bytes | None:
        name = self._token_of(token)
        if name is None:
            return None
        for old, new in self._replacements:
            name = name.replace(old, new)
        byte = _fallback_byte(name)
        return name.encode("utf-8", "replace") if byte is None else bytes([byte])

    def _add_byte(self, byte: int) -> str:
        self._num_held += 1
        try:
            text = self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            text = _REPLACEMENT * self._num_held
            self._start_run()
            self._run_is_valid = False
            return text
        if text:
            self._num_held = 0
        return text

    def _start_run(self) -> None:
        self._utf8.reset()
        self._num_held = 0
        self._run_is_valid = True

    def _strip_start(self, text: str) -> str:
        while self._num_to_strip and text:
            if text[0] != self._strip_char:
                self._num_to_strip = 0
            else:
                text = text[1:]
                self._num_to_strip -= 1
        return text

    def pending(self) -> str:
        return _REPLACEMENT * self._num_held


def _fallback_byte(name: str) -> int | None:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return int(name[3:5], 16)
        except ValueError:
            return None
    return None


class _WindowStream:
    """Decodes the ids since a point where the text was complete; that point follows at a distance, so that the
    decoder sees a token before the new ones and a window never grows past a few tokens of valid text.
    """

    _MAX_TOKENS = 16
    # The bytes of one unfinished character are at most three, so they are spread over at most three tokens.
    _MAX_WAITING = 3

    def __init__(self, decode: Callable[[list[int]], str], is_known: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_known = is_known
        self._ids: list[int] = []
        self._text = ""
        self._num_shown = 0  # characters of the window's text returned already
        self._num_waiting = 0  # tokens since some text last became certain
        self._complete = 0  # the last length of the window at which all its text was certain

    def add(self, token: int) -> str:
        if not self._is_known(token):
            return ""
        self._ids.append(token)
        self._text = self._decode(self._ids)
        certain = len(self._text.rstrip(_REPLACEMENT))
        self._num_waiting = 1 if certain > self._num_shown else self._num_waiting + 1
        if self._num_waiting > self._MAX_WAITING:
            certain = len(self._text)
        new = self._text[self._num_shown : certain]
        self._num_shown = max(self._num_shown, certain)
        if certain == len(self._text):
            self._num_waiting = 0
            if len(self._ids) > self._MAX_TOKENS:
                self._slide()
            self._complete = len(self._ids)
        return new

    def _slide(self) -> None:
        self._ids = self._ids[self._complete :]
        self._text = self._decode(self._ids)
        self._num_shown = len(self._text)

    def pending(self) -> str:
        return self._text[self._num_shown :]


def _choose_stream(tokenizer: Any) -> _Stream:
    tokenizer = unwrap(tokenizer)
    backend = fast_backend(tokenizer)
    if backend is None:
        limit = max(tokenizer.get_vocab().values()) + 1

        def decode(ids: list[int]) -> str:
            text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            return text

        return _WindowStream(decode, lambda token: token < limit)
    stream = _stream_of_decoder(backend)
    if stream is not None:
        return stream
    return _WindowStream(
        lambda ids: backend.decode(ids, skip_special_tokens=False), lambda token: backend.id_to_token(token) is not None
    )


def unwrap(tokenizer: Any) -> Any:
    """The transformers tokenizer inside a `TokenizerWrapper` of mlx-lm; anything else as it is."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    return tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer


def fast_backend(tokenizer: Any) -> Tokenizer | None:
    """The `tokenizers.Tokenizer` whose `decode` is what `tokenizer.decode` does, or None if there is no such one."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    kind = type(tokenizer)
    own_decode = (
        kind.decode is not PreTrainedTokenizerFast.decode or kind._decode is not PreTrainedTokenizerFast._decode
    )
    return None if own_decode else tokenizer.backend_tokenizer


def token_bytes(tokenizer: Any) -> Callable[[int], bytes | None] | None:
    """A function that gives the bytes a token puts into the text, or None for an id that isn't there; byte-level and
    byte-fallback tokenizers have one, for others this is None.

    What a decoder does at the very start of a text (taking a space off) isn't in it.
    """
    backend = fast_backend(unwrap(tokenizer))
    stream = None if backend is None else _stream_of_decoder(backend)
    return stream.bytes_of if isinstance(stream, _ByteLevelStream | _ByteFallbackStream) else None


def _stream_of_decoder(backend: Tokenizer) -> _Stream | None:
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevelStream(backend)
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps = steps[1:]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteFallback", "Fuse"]:
        return _ByteFallbackStream(backend, replacements, (" ", 0))
    if kinds == ["ByteFallback", "Fuse", "Strip"] and steps[2]["stop"] == 0:
        return _ByteFallbackStream(backend, replacements, (steps[2]["content"], steps[2]["start"]))
    return None
