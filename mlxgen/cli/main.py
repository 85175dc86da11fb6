"""The `mlxgen` command: parse, install the signal handlers, run one command, turn what it raises into an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata
from typing import NoReturn

from mlxgen.cancellation import Cancelled, CancelToken, cancel_on_interrupt
from mlxgen.cli import exitcodes
from mlxgen.cli.console import Console, ConsoleHandler
from mlxgen.cli.parser import parse
from mlxgen.errors import MlxgenError

DEBUG_VARIABLE = "MLXGEN_DEBUG"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Must be called on the main thread (it installs signal handlers)."""
    args = parse(sys.argv[1:] if arguments is None else arguments)
    token = CancelToken()
    try:
        # Before anything heavy is imported: a Ctrl-C in the first second is a requested stop like any other.
        with cancel_on_interrupt(token):
            return _run(args, token)
    except KeyboardInterrupt:
        _leave_now(exitcodes.of_cancel_reason("interrupt"))
    except SystemExit as stop:
        _leave_now(stop.code if isinstance(stop.code, int) else exitcodes.ERROR)


def _run(args: argparse.Namespace, signalled: CancelToken) -> int:
    timeout = getattr(args, "timeout", None)
    cancel = signalled if timeout is None else CancelToken.after(timeout, parent=signalled)
    as_json = getattr(args, "json", False)
    console = Console(
        quiet=getattr(args, "quiet", False), bars=not as_json, on_closed=lambda: signalled.cancel("disconnect")
    )
    try:
        with _quiet_libraries(console):
            command = import_module(f"mlxgen.cli.{args.command}")
            code: int = command.run(args, console, cancel)
    except Cancelled as stop:
        # Before there was anything to save: while downloading, say.
        console.clear_bar()
        return exitcodes.of_cancel_reason(stop.reason)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also what Rust extensions raise, which isn't an Exception
        return _report(error, console, as_json=as_json)
    finally:
        console.clear_bar()
    return exitcodes.CLOSED_PIPE if console.output_closed and code == exitcodes.OK else code


def _report(error: BaseException, console: Console, *, as_json: bool) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    message = told(error)
    if as_json:
        from mlxgen.cli.output import JsonOutput

        JsonOutput(console).error(error, message)
    console.important(f"error: {message}")
    return exitcodes.USAGE if type(error).__name__ == "UsageError" else exitcodes.ERROR


def told(error: BaseException) -> str:
    """An error in one line; for one that isn't mlxgen's own, also where to report it."""
    text = " ".join(str(error).split())
    if isinstance(error, MlxgenError):
        return text
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] in ("mlx", "mlx_lm"):
        return f"{error.name} can't be imported ({text}); install mlxgen again, or see mlxgen doctor"
    return (
        f"unexpected {type(error).__name__}: {text[:500]}; please report it{_tracker()} with the output of the same "
        f"command under {DEBUG_VARIABLE}=1"
    )


def _tracker() -> str:
    try:
        urls = dict(line.split(", ", 1) for line in metadata("mlxgen").get_all("Project-URL") or [])
    except (PackageNotFoundError, ValueError):
        return ""
    return f" at {urls['Issues']}" if "Issues" in urls else ""


@contextmanager
def _quiet_libraries(console: Console) -> Iterator[None]:
    """Silence what libraries say (deprecations, missing frameworks): no user can act on it. Show mlxgen's warnings."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    handler = ConsoleHandler(console)
    nothing = logging.NullHandler()
    loggers = [logging.getLogger(name) for name in ("mlxgen", "mlxgen_vision")]
    for logger in loggers:
        logger.addHandler(handler)
    logging.getLogger().addHandler(nothing)
    with warnings.catch_warnings():
        if not sys.warnoptions and not os.environ.get(DEBUG_VARIABLE):
            warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
            logging.getLogger().removeHandler(nothing)


def _leave_now(code: int) -> NoReturn:
    """The second press: out at once, without waiting for a save, or for a reader who doesn't read (so no flush).

    The journal has every token that was shown.
    """
    os._exit(code)
