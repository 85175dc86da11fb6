"""From the parsed command line to the options of the library, everything checked before a model is loaded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from mlxgen.cache import CacheOptions
from mlxgen.cancellation import CancelToken
from mlxgen.cli.console import Console
from mlxgen.cli.parser import DEFAULT_MODEL, DEFAULT_VISION_MODEL
from mlxgen.errors import InvalidValueError, MlxgenError, SnapshotError
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
    def make() -> ReplyOptions:
        options = ReplyOptions(
            max_tokens=max_tokens(args.max_tokens),
            sampling=_sampling(args),
            stop=tuple(args.stop),
            stop_token_ids=tuple(args.stop_token_id),
            ignore_eos=args.ignore_eos,
            logprobs=args.logprobs,
        )
        options.validate(_ANY_VOCABULARY)
        return options

    return usage_checked(make)


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
