"""Grammars: JSON schemas, regular expressions and Lark grammars that a reply follows, through `llguidance`.

The library keeps a parser of its own that is fed token by token. Here that is a cache: what a constraint answers is a
function of the ids it is given, and its parser is led to them, backwards if need be.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Literal

import mlx.core as mx

from mlxgen.constraints.masks import mask_of_bits
from mlxgen.detokenizer import fast_backend, unwrap
from mlxgen.errors import GrammarError, InvalidValueError, MlxgenError, UnsupportedError

_log = logging.getLogger(__name__)

GrammarKind = Literal["json_schema", "json", "regex", "lark"]

_NAMES: Final[Mapping[str, str]] = {
    "json_schema": "JSON schema",
    "json": "JSON grammar",
    "regex": "regular expression",
    "lark": "Lark grammar",
}
MAX_GRAMMAR_CHARS: Final = 1_000_000
MAX_COMPILE_S = 10.0
_TRIAL: Final = """
import sys
from llguidance import LLMatcher, LLTokenizer
LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(sys.stdin.buffer.read().decode()), log_level=0)
"""
# White space between the parts of a JSON text, as one run. Without an end, a model that has lost its way fills the
# reply with it; this is a line break and thirty levels of two spaces.
_JSON_SPACE: Final = r"[\x20\x0A\x0D\x09]{1,64}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a whole reply must look like; a value that goes into the snapshot. Made by the class methods.

    The reply ends where nothing more may follow, with finish reason "stop"; where it may end and may go on, the model's
    end-of-text token ends it. Log-probabilities are those among the tokens that the grammar allows.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in _NAMES:
            raise InvalidValueError(f"{self.kind!r} is no kind of grammar; it is one of {', '.join(_NAMES)}")
        if not isinstance(self.text, str):
            raise InvalidValueError(f"a grammar is text, not {type(self.text).__name__}")
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidValueError(
                f"a grammar of {len(self.text)} characters; the limit is {MAX_GRAMMAR_CHARS}, use a smaller one"
            )
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidValueError(
                f"the grammar has a lone surrogate at character {error.start}; it was read with the wrong encoding"
            ) from error

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that fits the schema (a dict, or its text). Properties come in the schema's order.

        White space between its parts is free, but no run of it is longer than 64 characters; llguidance's own keyword
        "x-guidance" in the schema changes that: `{"whitespace_flexible": false}` for none.

        Raises `InvalidValueError` for text that isn't JSON, and for a dict that JSON can't hold.
        """
        if isinstance(schema, str):
            try:
                found = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise InvalidValueError(f"the JSON schema isn't JSON ({error}); correct it") from error
        else:
            found = schema
        if not isinstance(found, Mapping):
            raise InvalidValueError(f"a JSON schema is an object, not {type(found).__name__}; see json-schema.org")
        try:
            text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidValueError(f"the JSON schema can't be written as JSON ({error}); correct it") from error
        return cls("json_schema", text)

    @classmethod
    def any_json(cls) -> Grammar:
        """Any JSON value."""
        return cls("json", "")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches from its start to its end. The syntax is Rust's (no look-around, no back-references)."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A grammar in llguidance's variant of Lark's notation; it begins with the rule `start`."""
        return cls("lark", grammar)

    def to_json(self) -> dict[str, str]:
        return {"kind": self.kind, "text": self.text}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Grammar:
        return cls(data["kind"], data["text"])

    def validate(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        """Compile it for this tokenizer, and see that a reply can begin.

        Raises `InvalidValueError` for a grammar that is wrong or that no text satisfies, `UnsupportedError` for what
        llguidance doesn't do, for a tokenizer that it can't use and where it isn't installed, `GrammarError` for a
        grammar that is too complex. The first time for a tokenizer takes up to a second or two, then a grammar takes
        milliseconds (at most `MAX_COMPILE_S`); a stop waits for it.
        """
        constraint = self.constraint(tokenizer, vocab_size, eos_token_ids)
        try:
            constraint.allowed([])
        except _DeadEnd as error:
            raise InvalidValueError(f"no text satisfies the {self.name}; correct it") from error

    def constraint(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> GrammarConstraint:
        """The grammar as a constraint on the ids of one vocabulary. Raises what `validate` raises.

        `tokenizer` is a `TokenizerWrapper` of mlx-lm or a fast tokenizer of transformers; `eos_token_ids` (the
        tokenizer's own, if empty) all end a reply that may end.
        """
        ids = {int(token) for token in eos_token_ids}
        if not ids:
            own = getattr(tokenizer, "eos_token_ids", None)
            ids = set(own) if isinstance(own, set | frozenset | list) else {tokenizer.eos_token_id}
        eos = tuple(sorted(token for token in ids if token is not None))
        return GrammarConstraint(self, _compiler_of(tokenizer, eos), vocab_size)

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return _NAMES[self.kind]


class GrammarConstraint:
    """A grammar for one vocabulary: a `Constraint`. Owned by one iterator; nothing in it needs saving.

    The library's limits are the one thing that isn't a function of the ids: how much it had to work out on other ways
    through the grammar counts as well, so a grammar that is too complex may fail a token sooner or later.
    """

    def __init__(self, grammar: Grammar, compiler: _Compiler, vocab_size: int) -> None:
        self.grammar = grammar
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._matcher = compiler.compile(grammar)
        # What the parser was fed. None while it is being fed, and after an error: then it begins anew.
        self._fed: list[int] | None = []
        self._mask: mx.array | None = None  # what may follow what it was fed
        self._failed: tuple[list[int], GrammarError] | None = None  # where it became too complex

    def allowed(self, reply_ids: Sequence[int], /) -> mx.array:
        with _reported(self.grammar, len(reply_ids)):
            matcher = self._matcher_at(reply_ids)
            if self._mask is not None:
                return self._mask
            bits: bytes = matcher.compute_bitmask()
            self._check(matcher, reply_ids)
        if not any(bits):
            raise _dead_end(self.grammar, len(reply_ids), "")
        self._mask = mask_of_bits(bits, self._vocab_size)
        return self._mask

    def done(self, reply_ids: Sequence[int], /) -> bool:
        with _reported(self.grammar, len(reply_ids)):
            return bool(self._matcher_at(reply_ids).is_stopped())

    def _matcher_at(self, reply_ids: Sequence[int]) -> Any:
        """The parser, having been fed exactly `reply_ids`."""
        ids, fed = list(reply_ids), self._fed
        if fed == ids:
            return self._matcher
        if self._failed is not None and ids[: len(self._failed[0])] == self._failed[0]:
            raise self._failed[1]
        self._fed = self._mask = None
        matcher, fed = self._led_back(fed, ids)
        self._matcher = matcher
        new = ids[len(fed) :]
        num_taken = matcher.try_consume_tokens(new)
        if num_taken < len(new):
            if not matcher.is_error():
                matcher.compute_bitmask()  # says whether it is the parser that can't go on
            self._check(matcher, ids[: len(fed) + num_taken + 1])
            raise GrammarError(
                f"the reply so far doesn't follow the {self.grammar.name}: token {len(fed) + num_taken} of it isn't "
                "one that may stand there; begin a new reply, or go on without the grammar"
            )
        self._fed = ids
        return matcher

    def _led_back(self, fed: list[int] | None, ids: list[int]) -> tuple[Any, list[int]]:
        """A parser that was fed a beginning of `ids`, and that beginning."""
        matcher = self._matcher
        if fed is not None:
            common = len(fed)
            if ids[:common] != fed:
                end = min(common, len(ids))
                common = next((i for i, (a, b) in enumerate(zip(fed, ids, strict=False)) if a != b), end)
            if common == len(fed) or matcher.rollback(len(fed) - common):
                return matcher, fed[:common]
        # Not a copy of one that was kept: copies share what their limits count, and an error of one is an error of all.
        return self._compiler.compile(self.grammar), []

    def _check(self, matcher: Any, ids: Sequence[int]) -> None:
        """Raise if the parser can't go on after `ids`."""
        if not matcher.is_error():
            return
        self._fed = self._mask = None
        message = matcher.get_error()
        if not _is_about_size(message):
            raise _dead_end(self.grammar, len(ids), message)
        error = GrammarError(
            f"the {self.grammar.name} became too complex at token {len(ids)} of the reply: {_one_line(message)}; "
            "simplify it"
        )
        self._failed = (list(ids), error)
        raise error


class _Compiler:
    """llguidance with its view of one tokenizer. Immutable; shared by the sessions of a model."""

    def __init__(self, library: Any, tokenizer: Any, eos: tuple[int, ...]) -> None:
        self._library = library
        self._tokenizer = _library_tokenizer(library, tokenizer, eos)
        # Its messages would quote the grammar, the text so far and its own inner state.
        self._limits = library.LLParserLimits(verbose_errors=False)
        self._tried: dict[Grammar, None] = {}

    def compile(self, grammar: Grammar) -> Any:
        """A parser of the grammar before the first token."""
        matcher, text = self._library.LLMatcher, grammar.text
        if grammar.kind == "lark" and "~" in text and grammar not in self._tried:
            _try_elsewhere(grammar)
            self._tried[grammar] = None
        with _reported(grammar, 0):
            try:
                if grammar.kind == "regex":
                    source = matcher.grammar_from_regex(text)
                elif grammar.kind == "lark":
                    source = matcher.grammar_from_lark(text)
                else:
                    source = matcher.grammar_from_json_schema(text or "{}", defaults=_json_options(text or "{}"))
            except ValueError as error:
                raise _compile_error(grammar, str(error)) from error
            compiled = matcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if compiled.is_error():
            raise _compile_error(grammar, compiled.get_error())
        return compiled


def _try_elsewhere(grammar: Grammar) -> None:
    """Compile a Lark grammar in a process that can be ended. Raises `GrammarError` if that takes too long.

    Intersections with complements (`~`) may take exponential time, which is the one place where the library has no
    limit; and a thread that is inside it can't be stopped.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        return  # a program that brings its own Python: there is nothing to start
    command = [sys.executable, "-c", _TRIAL]
    try:
        subprocess.run(
            command,
            input=grammar.text.encode(),
            timeout=MAX_COMPILE_S,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise GrammarError(
            f"the {grammar.name} is too complex: compiling it takes more than {MAX_COMPILE_S:g} s; simplify it"
        ) from error
    except OSError as error:
        _log.debug("the grammar is compiled untried", exc_info=error)


def _json_options(schema: str) -> dict[str, str]:
    """Ours, where the schema itself says nothing about white space."""
    own = json.loads(schema).get("x-guidance")
    said = isinstance(own, dict) and any(key.startswith("whitespace") for key in own)
    return {} if said else {"whitespace_pattern": _JSON_SPACE}


_compilers: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], _Compiler]] = weakref.WeakKeyDictionary()


def _compiler_of(tokenizer: Any, eos: tuple[int, ...]) -> _Compiler:
    """The compiler that belongs to a tokenizer, for as long as it lives; making it is what takes long."""
    library = _library()
    tokenizer = unwrap(tokenizer)
    own = _compilers.setdefault(tokenizer, {})
    found = own.get(eos)
    if found is None:
        found = own[eos] = _Compiler(library, tokenizer, eos)
    return found


def _library() -> Any:
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise UnsupportedError(
            f'grammars need the package llguidance ({error}); install it with: pip install "mlxgen[grammar]"'
        ) from error


def _library_tokenizer(library: Any, tokenizer: Any, eos: tuple[int, ...]) -> Any:
    kind = type(tokenizer).__name__
    if fast_backend(tokenizer) is None:
        raise UnsupportedError(f"grammars need a fast tokenizer (a tokenizer.json), and {kind} isn't one")
    from_tokenizer = import_module("llguidance.hf").from_tokenizer
    try:
        num_entries = len(tokenizer)
        return from_tokenizer(tokenizer, eos_token=[token for token in eos if token < num_entries] or None)
    except BaseException as error:  # a panic of the library isn't an Exception
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise UnsupportedError(
            f"llguidance can't use this model's tokenizer ({kind}): {_one_line(str(error))}; generate without a grammar"
        ) from error


# -- what the library says --------------------------------------------------------------------------------------------


@contextmanager
def _reported(grammar: Grammar, position: int) -> Iterator[None]:
    """A panic inside the library, or an error it raises where it says it doesn't, as a `GrammarError`."""
    try:
        yield
    except MlxgenError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise GrammarError(
            f"llguidance failed on the {grammar.name} at token {position} of the reply: {_one_line(str(error))}; "
            "simplify it"
        ) from error


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


_SIZE = re.compile(
    r"too (many|large|big|complex|deep|long)|panic|exceed|recursion limit|out of fuel|fuel exhausted|limit reached",
    re.IGNORECASE,
)
_UNSUPPORTED = re.compile(r"unimplemented|not supported|unsupported|unknown format|retriev|not implemented", re.I)


def _is_about_size(message: str) -> bool:
    return _SIZE.search(message.split("\n<", 1)[0]) is not None


def _compile_error(grammar: Grammar, message: str) -> Exception:
    said = _one_line(message)
    if _is_about_size(message):
        return GrammarError(f"the {grammar.name} is too complex: {said}; simplify it")
    if _UNSUPPORTED.search(said):
        return UnsupportedError(f"the {grammar.name} has something llguidance doesn't do: {said}; leave it out")
    if "nsatisfiable" in said:
        return InvalidValueError(f"no text satisfies the {grammar.name}: {said}; correct it")
    return InvalidValueError(f"the {grammar.name} isn't valid: {said}; correct it")


class _DeadEnd(GrammarError):
    """Nothing may follow, and it isn't the end."""


def _dead_end(grammar: Grammar, position: int, message: str) -> _DeadEnd:
    reason = f" ({_one_line(message)})" if message else ""
    return _DeadEnd(
        f"no token may follow at token {position} of the reply: the {grammar.name} can't go on from there{reason}; "
        "change it"
    )


def _one_line(message: str) -> str:
    """The library's message without the excerpts and dumps that come with it."""
    if message.startswith("panic"):  # what it says then is about its own code
        return "it is more than llguidance can hold"
    lines = [line.strip() for line in re.split(r"\n<", message, maxsplit=1)[0].splitlines()]
    lines = [line for line in lines if line and not re.match(r"\d+ \| |\^", line)]
    told = lines[:1] + [line for line in lines[1:] if line.startswith("error:")]
    return " ".join(told)[:300] or "no reason given"
