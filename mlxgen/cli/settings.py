"""From the parsed command line to the options of the library, everything checked before a model is loaded."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from mlxgen.cache import CacheOptions
from mlxgen.cancellation import CancelToken
from mlxgen.cli.console import Console
from mlxgen.cli.parser import DEFAULT_MODEL, DEFAULT_VISION_MODEL
from mlxgen.constraints import Grammar
from mlxgen.errors import InvalidValueError, MlxgenError, SnapshotError, UnsupportedError
from mlxgen.models import LoadOptions, LoadProgress, Model, load
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.prefill import DEFAULT_STEP_SIZE
from mlxgen.sampling import SamplingParams
from mlxgen.snapshot.store import is_snapshot

# Before the model is known; ids are checked against its own vocabulary when the reply starts.
_ANY_VOCABULARY: Final = 2**31

_T = TypeVar("_T")


class UsageError(MlxgenError, ValueError):
    """A flag's value outside its limits, or flags that exclude each other: exit code 2."""


def usage_checked(make: Callable[[], _T]) -> _T:
    """What `make` returns; an `InvalidValueError` in it was caused by a flag."""
    try:
        return make()
    except InvalidValueError as error:
        raise UsageError(str(error)) from error


def session_options(args: argparse.Namespace) -> SessionOptions:
    def make() -> SessionOptions:
        options = SessionOptions(
            cache=CacheOptions(args.max_kv_size, args.kv_bits, args.kv_group_size, args.quantized_kv_start),
            prefill_step_size=DEFAULT_STEP_SIZE if args.prefill_step_size is None else args.prefill_step_size,
            max_stop_latency_s=args.max_stop_latency,
            raw=getattr(args, "ignore_chat_template", False),
            template_options=args.chat_template_config or {},
        )
        options.validate()
        return options

    return usage_checked(make)


def reply_options(args: argparse.Namespace) -> ReplyOptions:
    _check_texts(args, ("stop", "stop_regex", "ban"))
    grammar = _grammar(args)

    def make() -> ReplyOptions:
        options = ReplyOptions(
            max_tokens=max_tokens(args.max_tokens),
            sampling=_sampling(args),
            stop=tuple(args.stop),
            stop_token_ids=tuple(args.stop_token_id),
            ignore_eos=args.ignore_eos,
            logprobs=args.logprobs,
            grammar=grammar,
            heal=args.heal,
            stop_regex=tuple(args.stop_regex or ()),
            ban=tuple(args.ban or ()),
            thinking_budget=args.thinking_budget,
            stop_after_thinking=args.stop_after_thinking,
            sections=args.sections,
        )
        options.validate(_ANY_VOCABULARY)
        return options

    return usage_checked(make)


_WITHOUT: Final[dict[str, dict[str, Any]]] = {
    "grammar": {"grammar": None},
    "stop": {"stop": ()},
    "stop-regex": {"stop_regex": ()},
    "ban": {"ban": ()},
    "thinking-budget": {"thinking_budget": None},
}


def changed_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags of `resume` change in a reply's options: names of `ReplyOptions` and their new values."""
    _check_texts(args, ("stop", "stop_regex", "ban"))
    changes: dict[str, Any] = {}
    for name in args.without:
        changes |= _WITHOUT[name]
    grammar = _grammar(args)
    if grammar is not None:
        changes["grammar"] = grammar
    for name in ("stop", "stop_regex", "ban"):
        if getattr(args, name) is not None:
            changes[name] = tuple(getattr(args, name))
    if args.thinking_budget is not None:
        changes["thinking_budget"] = args.thinking_budget
    if args.max_tokens is not None:
        changes["max_tokens"] = max_tokens(args.max_tokens)
    usage_checked(lambda: replace(ReplyOptions(), **changes).validate(_ANY_VOCABULARY))
    return changes


def reply_prefix(args: argparse.Namespace) -> str | None:
    """What the reply begins with. Raises `UsageError` for a text that can't be put there."""
    prefix: str | None = args.reply_prefix
    if prefix == "":
        raise UsageError("--reply-prefix is empty; give the text that the reply begins with, or leave it out")
    _check_texts(args, ("reply_prefix",))
    return prefix


def _check_texts(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(args, name)
        for text in [value] if isinstance(value, str) else value or ():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"--{name.replace('_', '-')} has bytes that aren't UTF-8 (at character {error.start}); set the "
                    "terminal to UTF-8, or write the text in another way"
                ) from error


def _grammar(args: argparse.Namespace) -> Grammar | None:
    """What `--json-schema`, `--regex` or `--grammar` asks for (the parser allows one of them)."""
    if args.json_schema is None and args.regex is None and args.grammar is None:
        return None
    if find_spec("llguidance") is None:  # said before a model is loaded for nothing
        raise UnsupportedError('grammars need the package llguidance; install it with: pip install "mlxgen[grammar]"')
    if args.regex is not None:
        _check_texts(args, ("regex",))
        return usage_checked(lambda: Grammar.regex(args.regex))
    path: str = args.grammar if args.json_schema is None else args.json_schema
    text = _text_of(path)
    try:
        return Grammar.lark(text) if args.json_schema is None else Grammar.json_schema(text)
    except InvalidValueError as error:
        raise InvalidValueError(f"{path}: {error}") from error


# Read before it is looked at; a grammar has a limit of its own, far below.
_MAX_FILE_BYTES: Final = 16 * 2**20


def _text_of(path: str) -> str:
    """A file's text (UTF-8). Raises `InvalidValueError` for one that can't be read."""
    place = Path(path).expanduser()
    try:
        with place.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise InvalidValueError(f"no file {path!r}{near_name(place)}") from None
    except (OSError, ValueError) as error:
        raise InvalidValueError(
            f"can't read {path!r}: {getattr(error, 'strerror', None) or error}; give a file"
        ) from None
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidValueError(f"{path} has more than {_MAX_FILE_BYTES} bytes; give a smaller file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidValueError(
            f"{path} is not UTF-8 (byte {data[error.start]:#04x} at position {error.start}); convert it, for instance "
            "with iconv -f latin1 -t utf-8"
        ) from None


def near_name(path: Path) -> str:
    """The end of the message about a file that isn't there: what may have been meant."""
    try:
        names = sorted(os.listdir(path.parent))
    except OSError:
        return f": there is no folder {str(path.parent)!r}; check the path"
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else "; check the path"


def max_tokens(value: int) -> int | None:
    """The flag's value as the library has it: -1 is no limit."""
    if value < -1:
        raise UsageError(f"--max-tokens is {value}; give 0 or more, or -1 for no limit")
    return None if value == -1 else value


def _sampling(args: argparse.Namespace) -> SamplingParams:
    bias = args.logit_bias
    data: dict[str, Any] = {
        "temperature": args.temp,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "min_tokens_to_keep": args.min_tokens_to_keep,
        "xtc_probability": args.xtc_probability,
        "xtc_threshold": args.xtc_threshold,
        "logit_bias": bias,
        "seed": args.seed,
    }
    for name in ("repetition", "presence", "frequency"):
        data[f"{name}_penalty"] = getattr(args, f"{name}_penalty")
        data[f"{name}_context_size"] = getattr(args, f"{name}_context_size")
    return SamplingParams.from_json(data)


def prompt_text(args: argparse.Namespace) -> str:
    """`--prompt`, or standard input for `-` (UTF-8; one newline at its end is removed)."""
    text: str = args.prompt
    if text == "-":
        if ("image", "-") in args.media:
            raise UsageError("--prompt - and --image - both read standard input; give one of them another way")
        text = _standard_input_text()
    if not text and not args.media:
        raise InvalidValueError("the prompt is empty; give --prompt TEXT, or --prompt - with text on standard input")
    return text


def _standard_input_text() -> str:
    data = standard_input_bytes("the prompt")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValueError(
            f"the prompt on standard input is not UTF-8 (byte {data[error.start]:#04x} at position {error.start}); "
            "convert it, for instance with iconv -f latin1 -t utf-8"
        ) from None
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def standard_input_bytes(what: str) -> bytes:
    if sys.stdin is None:
        raise InvalidValueError(f"standard input is closed, so {what} can't be read from it")
    return sys.stdin.buffer.read()


def check_new_snapshot(path: str, *, overwrite: bool) -> None:
    """Refuse an existing snapshot before minutes are spent on loading; whether it can be made is seen when it is."""
    if not overwrite and is_snapshot(path):
        raise SnapshotError(f"{path} is a snapshot already; resume it, replace it (--overwrite), or give another path")
    if Path(path).exists() and not Path(path).is_dir():
        raise SnapshotError(f"{path} exists and is not a folder; give another path")


def load_options(args: argparse.Namespace) -> LoadOptions:
    return LoadOptions(
        adapter_path=args.adapter_path,
        revision=args.revision,
        offline=args.offline,
        trust_remote_code=args.trust_remote_code,
    )


def load_model(args: argparse.Namespace, console: Console, cancel: CancelToken) -> Model:
    """The model of `--model`, with a bar for downloading and reading, and its identity (for the snapshot) known."""
    name = args.model or (DEFAULT_VISION_MODEL if getattr(args, "media", None) else DEFAULT_MODEL)
    model = load(name, options=load_options(args), on_progress=show_load(console), cancel=cancel)
    model.identify(cancel=cancel)
    console.clear_bar()
    return model


def show_load(console: Console) -> Callable[[LoadProgress], None]:
    labels = {"download": "download", "convert": "convert", "read": "load"}

    def show(progress: LoadProgress) -> None:
        scale = 10**6 if progress.total >= 10**7 else 1
        unit = " MB" if scale > 1 else ""
        console.bar(labels.get(progress.phase, progress.phase) + unit, progress.done // scale, progress.total // scale)

    return show
