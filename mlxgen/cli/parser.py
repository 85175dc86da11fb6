"""The command line's flags, named as in mlx-lm and mlx-vlm. Imports nothing heavy: `-h` must be quick."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NoReturn

# What runs without --model: a language model that a package ships, and, where pictures or video are given, the tiny
# vision model that comes with mlxgen. Both are for trying things out.
DEFAULT_MODEL: Final = "smollm2"
DEFAULT_VISION_MODEL: Final = "shapes-vl"
DEFAULT_MAX_TOKENS: Final = 256
DEFAULT_CHAT_TOKENS: Final = 1024
# What a resumed reply can be freed of.
WITHOUT: Final = ("grammar", "stop", "stop-regex", "ban", "thinking-budget")

_EXAMPLES: Final = {
    "": """\
  mlxgen generate --prompt "Why is the sky blue?"
  mlxgen generate --model mlx-community/Qwen2.5-VL-3B-Instruct-4bit --image cat.jpg --prompt "What is this?"
  mlxgen resume                        go on with the run that was interrupted last
  mlxgen chat --model ./my-model
  mlxgen doctor --model ./my-model     prove exact resume and quick stops on this machine""",
    "generate": """\
  mlxgen generate --prompt "Why is the sky blue?" --max-tokens 500
  mlxgen generate --model ./vlm --image a.jpg b.jpg --prompt "What differs?" --snapshot run.mlxgen
  mlxgen generate --model ./vlm --video clip.mp4 --fps 1 --prompt "What happens?"
  cat report.txt | mlxgen generate --system "Summarise." --prompt - --timeout 600
  mlxgen generate --prompt "Tell me a story" --temp 0.8 --seed 7 --json
  mlxgen generate --image a.jpg --prompt "What is this?" --json-schema answer.schema.json
  mlxgen generate --prompt "Tell me a story" --reply-prefix "Once upon a time" --ban "dragon" --stop "The end"

Ctrl-C, SIGTERM and SIGHUP stop at the next checkpoint, save, and print the command that resumes. Ctrl-C twice leaves at
once (what was generated until then can still be resumed).

Exit codes: 0; 1 after an error; 2 for bad usage; 130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP; 124 after --timeout;
141 when the reader of a pipe went away (the run is stopped and saved).""",
    "resume": """\
  mlxgen resume                        the run that was interrupted last
  mlxgen resume run.mlxgen >> reply.txt
  mlxgen resume run.mlxgen --from-start
  mlxgen resume run.mlxgen --max-tokens 200
  mlxgen resume run.mlxgen --without stop --ban "dragon"

Prints only text that is new: appended to what the interrupted command printed it is the whole reply, byte by byte.""",
    "chat": """\
  mlxgen chat
  mlxgen chat --model ./my-model --system "Answer in French." --temp 0.7
  mlxgen chat --resume talk.mlxgen

Ctrl-C stops the answer and keeps it; the next line is a new turn. /help lists the commands.""",
    "prepare": """\
  mlxgen prepare --model ./vlm --image scans/*.png --prompt "Summarise." --snapshot tonight.mlxgen
  mlxgen resume tonight.mlxgen         tomorrow: nothing is opened, resized or encoded again""",
    "snapshots": """\
  mlxgen snapshots list
  mlxgen snapshots show run.mlxgen --preview seen.png
  mlxgen snapshots remove run.mlxgen""",
    "cache": """\
  mlxgen cache info
  mlxgen cache verify
  mlxgen cache clear

Prompts and pictures of earlier commands are kept in the cache folder (2 GB at most, those that weren't used longest go
first), so that they aren't computed again. MLXGEN_PREFIX_CACHE_BUDGET=8G changes how much, 0 keeps nothing.""",
    "families": """\
  mlxgen families                      which vision models run, where they stop, what was compared
  mlxgen families --json""",
    "doctor": """\
  mlxgen doctor                        the environment
  mlxgen doctor --model ./my-model     also prove exact resume, stop latency and snapshot speed""",
}


class Parser(argparse.ArgumentParser):
    """Examples first; usage errors in one line; no abbreviated flags, which would change meaning when one is added."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})
        self.examples = ""

    def format_help(self) -> str:
        help_text = super().format_help()
        return f"examples:\n{self.examples}\n\n{help_text}" if self.examples else help_text

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += "; one that begins with - is written --flag=VALUE"
        self.exit(2, f"mlxgen: error: {message} (see: {self.prog} -h)\n")


def build_parser() -> Parser:
    """The parser of the whole command line; the chosen command's name is in `command`."""
    parser = Parser(prog="mlxgen", description="Generation that stops anywhere and goes on from exactly there.")
    parser.examples = _EXAMPLES[""]
    parser.add_argument("--version", action="version", version=f"mlxgen {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _generate(_command(commands, "generate", "reply to one prompt"))
    _chat(_command(commands, "chat", "talk in the terminal"))
    _resume(_command(commands, "resume", "go on with an interrupted run"))
    _prepare(_command(commands, "prepare", "read and encode pictures and video now, generate later"))
    _snapshots(_command(commands, "snapshots", "list, show and remove snapshots"))
    _cache(_command(commands, "cache", "show, check and clear what is kept of earlier prompts and pictures"))
    _families(_command(commands, "families", "list the vision-language models that run here"))
    _doctor(_command(commands, "doctor", "check this machine, and prove the promises on it"))
    return parser


def _version() -> str:
    try:
        return version("mlxgen")
    except PackageNotFoundError:
        return "(not installed)"


def _command(commands: Any, name: str, summary: str) -> Parser:
    parser: Parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.examples = _EXAMPLES[name]
    return parser


# -- commands ------------------------------------------------------------------------------------------------------


def _generate(parser: Parser) -> None:
    _model_flags(parser)
    _prompt_flags(parser, required=True)
    _media_flags(parser)
    _sampling_flags(parser, DEFAULT_MAX_TOKENS)
    _steering_flags(parser)
    _session_flags(parser)
    _snapshot_flags(
        parser,
        "snapshot to keep (default: one in the cache folder, removed when the reply is complete unless it was resumed)",
    )
    _output_flags(parser, timeout=True)


def _resume(parser: Parser) -> None:
    parser.add_argument("path", nargs="?", metavar="PATH", help="snapshot (default: the last interrupted one)")
    parser.add_argument("--from-start", action="store_true", help="print the reply's text so far first")
    parser.add_argument("--model", metavar="MODEL", help="where the model is now, if it was moved; it must be the same")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--no-prefix-cache", action="store_true", help="keep nothing of the prompt for later")
    group = parser.add_argument_group("other settings (what isn't given stays as it was)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="so many more tokens (-1: no limit)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    _constraint_flags(group)
    group.add_argument(
        "--without", action="append", default=[], choices=WITHOUT, help="go on without what it had of these; repeatable"
    )
    _output_flags(parser, timeout=True)


def _chat(parser: Parser) -> None:
    _model_flags(parser)
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="system prompt")
    _media_limits(parser)
    _sampling_flags(parser, DEFAULT_CHAT_TOKENS)
    _steering_flags(parser)
    _session_flags(parser, raw=False)
    parser.add_argument(
        "--resume", metavar="PATH", help="go on with this conversation, with its model and its cache settings"
    )
    _snapshot_flags(parser, "where the conversation is kept (default: in the cache folder)")
    parser.add_argument("--quiet", action="store_true", help="no progress, no statistics")


def _prepare(parser: Parser) -> None:
    _model_flags(parser)
    _prompt_flags(parser, required=True)
    _media_flags(parser)
    _sampling_flags(parser, DEFAULT_MAX_TOKENS)
    _steering_flags(parser)
    _session_flags(parser)
    _snapshot_flags(parser, "snapshot to write", required=True)
    _output_flags(parser, timeout=True)


def _snapshots(parser: Parser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    listing = actions.add_parser("list", help="the snapshots in a folder, newest first")
    listing.add_argument("folder", nargs="?", metavar="FOLDER", help="default: the cache folder's")
    listing.add_argument("--json", action="store_true", help="one JSON object per line")
    show = actions.add_parser("show", help="what is in a snapshot, and whether it is sound")
    show.add_argument("path", metavar="PATH")
    show.add_argument("--preview", metavar="OUT.png", help="draw what the model really saw of pictures and video")
    show.add_argument("--json", action="store_true", help="one JSON object")
    remove = actions.add_parser("remove", help="delete snapshots that no process is using")
    remove.add_argument("paths", nargs="*", metavar="PATH")
    remove.add_argument("--all", action="store_true", help="all in the cache folder")


def _cache(parser: Parser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    info = actions.add_parser("info", help="how much of which models is kept, and where")
    info.add_argument("--json", action="store_true", help="one JSON object")
    actions.add_parser("clear", help="delete all of it")
    verify = actions.add_parser("verify", help="read every file and check it; damaged ones are removed")
    verify.add_argument("--json", action="store_true", help="one JSON object")


def _families(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object per line")


def _doctor(parser: Parser) -> None:
    _model_flags(parser)
    parser.add_argument("--resume-folder", help=argparse.SUPPRESS)  # what doctor runs in its second process
    parser.add_argument("--quiet", action="store_true", help="only what is broken")


# -- groups of flags ---------------------------------------------------------------------------------------------------


def _model_flags(parser: Parser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help=f"folder, name on the hub, or built in: {DEFAULT_MODEL} (default), {DEFAULT_VISION_MODEL} (for pictures)",
    )
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit on the hub")
    group.add_argument("--adapter-path", metavar="FOLDER", help="LoRA adapter")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    group.add_argument("--offline", action="store_true", help="never ask the network")


def _prompt_flags(parser: Parser, *, required: bool) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument("--prompt", "-p", required=required, metavar="TEXT", help="- reads it from standard input")
    group.add_argument("--system", "--system-prompt", metavar="TEXT", help="system prompt")


class _Media(argparse.Action):
    """Collects `--image`, `--video` and `--fps` in one list, in the order of the command line."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        collected = list(getattr(namespace, self.dest) or [])
        kind = (option or "").lstrip("-")
        for value in values if isinstance(values, list) else [values]:
            collected.append((kind, value))
        setattr(namespace, self.dest, collected)


def _media_flags(parser: Parser) -> None:
    group = parser.add_argument_group("pictures and video (in this order before the prompt's text)")
    shared: dict[str, Any] = {"dest": "media", "action": _Media, "default": []}
    group.add_argument(
        "--image",
        **shared,
        nargs="+",
        metavar="FILE",
        help="path, pattern, data URI, or - for standard input; repeatable",
    )
    group.add_argument(
        "--video",
        **shared,
        nargs="+",
        metavar="FILE",
        help="video file, animation, or folder of frames (used whole, in name order); repeatable",
    )
    group.add_argument(
        "--fps",
        **shared,
        type=float,
        metavar="N",
        help="frames a second: to take from the video before it; or that a folder of frames stands for",
    )
    _media_limits(parser, group)


def _media_limits(parser: Parser, group: Any = None) -> None:
    group = parser.add_argument_group("pictures and video") if group is None else group
    group.add_argument("--max-frames", type=int, metavar="N", help="frames of a video at most")
    group.add_argument("--max-pixels", type=int, metavar="N", help="pixels of a picture or frame at most")
    group.add_argument("--min-pixels", type=int, metavar="N", help="pixels of a picture or frame at least")
    group.add_argument("--max-image-size", type=int, metavar="N", help="longer side of a picture at most, in pixels")
    group.add_argument("--allow-urls", action="store_true", help="fetch pictures from http(s) addresses")


def _sampling_flags(parser: Parser, max_tokens: int) -> None:
    group = parser.add_argument_group("reply")
    group.add_argument(
        "--max-tokens", "-m", type=int, default=max_tokens, metavar="N", help="(default: %(default)s; -1: no limit)"
    )
    group.add_argument("--temp", "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--min-tokens-to-keep", type=int, default=1, metavar="N")
    group.add_argument("--xtc-probability", type=float, default=0.0, metavar="P")
    group.add_argument("--xtc-threshold", type=float, default=0.1, metavar="P")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same reply (default: a new one)")
    for name in ("repetition", "presence", "frequency"):
        group.add_argument(f"--{name}-penalty", type=float, metavar="X")
        group.add_argument(
            f"--{name}-context-size", type=int, default=20, metavar="N", help="last tokens it looks at (default: 20)"
        )
    group.add_argument("--logit-bias", type=_json_object, metavar="JSON", help="for instance '{\"1234\": -100}'")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--stop-token-id", action="append", type=int, default=[], metavar="ID", help="repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-text token")
    group.add_argument("--logprobs", action="store_true", help="log-probability of every token (in --json)")


def _steering_flags(parser: Parser) -> None:
    group = parser.add_argument_group("what the reply may be (a value that begins with - is written --flag=VALUE)")
    group.add_argument("--reply-prefix", metavar="TEXT", help="the reply begins with this text (in chat: every reply)")
    group.add_argument(
        "--heal", action="store_true", help="let a word that is cut at the end of prompt or prefix go on naturally"
    )
    _constraint_flags(group)
    group.add_argument(
        "--stop-after-thinking", action="store_true", help="end where the first section of thinking ends"
    )
    group.add_argument("--sections", action="store_true", help="tell thinking and tool calls apart (in --json)")


def _constraint_flags(group: Any) -> None:
    shapes = group.add_mutually_exclusive_group()
    shapes.add_argument("--json-schema", metavar="FILE", help="the reply is JSON that fits this schema")
    shapes.add_argument("--regex", metavar="PATTERN", help="the whole reply matches this regular expression")
    shapes.add_argument("--grammar", metavar="FILE", help="the reply follows this Lark grammar")
    group.add_argument(
        "--stop-regex", action="append", metavar="PATTERN", help="end before what this pattern matches; repeatable"
    )
    group.add_argument("--ban", action="append", metavar="TEXT", help="text that the reply may not contain; repeatable")
    group.add_argument("--thinking-budget", type=int, metavar="N", help="tokens of thinking, then it is made to answer")


def _session_flags(parser: Parser, *, raw: bool = True) -> None:
    group = parser.add_argument_group("prefill and cache")
    group.add_argument("--prefill-step-size", type=int, metavar="N", help="prompt tokens per step (default: 2048)")
    group.add_argument("--max-stop-latency", type=float, metavar="SECONDS", help="choose a step size to stop this fast")
    group.add_argument("--max-kv-size", type=int, metavar="N", help="tokens the cache keeps; older ones are forgotten")
    group.add_argument("--kv-bits", type=int, metavar="N", help="quantise the cache: 2, 4 or 8 bits")
    group.add_argument("--kv-group-size", type=int, default=64, metavar="N", help="(default: %(default)s)")
    group.add_argument(
        "--quantized-kv-start",
        type=int,
        default=5000,
        metavar="N",
        help="from this many tokens on (%(default)s)",
    )
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="prefill in full, and keep nothing of the prompt for later"
    )
    group.add_argument(
        "--chat-template-config", type=_json_object, metavar="JSON", help="for instance '{\"enable_thinking\": false}'"
    )
    if raw:
        group.add_argument(
            "--ignore-chat-template", action="store_true", help="take the prompt as it is, special tokens included"
        )


def _snapshot_flags(parser: Parser, summary: str, *, required: bool = False) -> None:
    group = parser.add_argument_group("snapshot")
    group.add_argument("--snapshot", required=required, metavar="PATH", help=summary)
    group.add_argument("--overwrite", action="store_true", help="replace the snapshot that is there")


def _output_flags(parser: Parser, *, timeout: bool) -> None:
    group = parser.add_argument_group("output")
    if timeout:
        group.add_argument(
            "--timeout", type=_seconds, metavar="SECONDS", help="stop and save after so long (loading included)"
        )
    group.add_argument("--json", action="store_true", help="one event per line on standard output")
    group.add_argument("--quiet", action="store_true", help="no progress, no statistics")


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds; give 0 or more")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a JSON object like {{...}}")
    return value


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line. Exits (2, or 0 after -h) where argparse does."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.error("give a command: generate, chat, resume, prepare, snapshots, cache, families or doctor")
    return parsed
