"""`mlxgen snapshots`: list, show, remove. Reading takes no lock, so a snapshot can be looked at while it is written."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from mlxgen.cancellation import CancelToken
from mlxgen.cli import cached, exitcodes
from mlxgen.cli.console import Console, printable
from mlxgen.cli.overview import MediumOverview, Overview, look
from mlxgen.cli.preview import draw_preview, prepared_sizes
from mlxgen.cli.recorded import recorded_reply
from mlxgen.cli.settings import UsageError
from mlxgen.errors import MlxgenError, SnapshotError
from mlxgen.options import ReplyOptions

_PROMPT_LENGTH = 40


def run(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    if args.action == "list":
        return _list(args, console, cancel)
    if args.action == "show":
        return _show(args, console, cancel)
    return _remove(args, console)


# -- list ------------------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    folder = cached.snapshots_folder() if args.folder is None else Path(args.folder)
    if args.folder is not None and not folder.is_dir():
        raise SnapshotError(f"no folder {args.folder!r}; check the path")
    paths = cached.snapshot_paths(folder)
    if not paths and not args.json:
        console.note(f"no snapshots in {folder}")
    for path in paths:
        cancel.checkpoint()
        entry = _entry(path)
        console.write((json.dumps(entry) if args.json else _row(entry)) + "\n")
    return exitcodes.OK


def _entry(path: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"snapshot": str(path), "changed": cached.last_change(path)}
    try:
        overview = look(path)
    except MlxgenError as error:
        return entry | {"phase": "damaged", "problem": str(error)}
    turn = overview.last_user_turn
    return entry | {
        "size_bytes": overview.size_bytes,
        "model": overview.model,
        "phase": overview.phase,
        "position": overview.position,
        "prompt": "" if turn is None else turn.text[:200],
    }


def _row(entry: dict[str, Any]) -> str:
    path = Path(entry["snapshot"])
    start = f"{path.name}  {_age(entry['changed']):>8}  {entry['phase']:<8}"
    if "problem" in entry:
        return f"{start}  {printable(entry['problem'], 100)}"
    model = printable(entry["model"].rstrip("/").rpartition("/")[2], 30)
    prompt = printable(entry["prompt"], _PROMPT_LENGTH)
    return f"{start}  {_size(entry['size_bytes']):>8}  {entry['position']:>5} tokens  {model}  {prompt}"


def _age(changed_s: float) -> str:
    seconds = max(0.0, time.time() - changed_s)
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {name}"
    return f"{int(seconds)} s"


def _size(num_bytes: int) -> str:
    for name, length in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= length:
            return f"{num_bytes / length:.1f} {name}"
    return f"{num_bytes} B"


# -- show ------------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    """Print what is in one snapshot; exit code 1 if something in it is damaged."""
    overview = look(args.path)
    cancel.checkpoint()
    problems = [*overview.view.notes, *overview.view.verify()]
    sizes = {} if problems else prepared_sizes(overview)
    if args.json:
        console.write(json.dumps(_as_json(overview, sizes, problems)) + "\n")
    else:
        console.write("".join(f"{line}\n" for line in _lines(overview, sizes, problems)))
    if args.preview is not None:
        count = draw_preview(overview, Path(args.preview))
        console.note(f"{count} pictures and frames drawn to {args.preview}")
    return exitcodes.ERROR if problems else exitcodes.OK


def _as_json(overview: Overview, sizes: dict[int, list[tuple[int, ...]]], problems: list[str]) -> dict[str, Any]:
    text = recorded_reply(overview.history)
    return {
        "snapshot": str(overview.path),
        "model": overview.model,
        "phase": overview.phase,
        "position": overview.position,
        "size_bytes": overview.size_bytes,
        "reply": None if text is None else text.text,
        "turns": [
            {"role": turn.role, "text": turn.text, "tokens": None if turn.reply is None else len(turn.reply.tokens)}
            for turn in overview.history.turns
        ],
        "media": [
            {
                "kind": medium.kind,
                "name": medium.name,
                "prepared": medium.prepared,
                "encoded": medium.encoded,
                "content_hash": medium.content_hash,
                "shapes": [list(shape) for shape in sizes.get(index, [])],
            }
            for index, medium in enumerate(overview.media)
        ],
        "files": [
            {"name": entry.name, "kind": entry.kind, "bytes": entry.bytes, "xxh3": entry.xxh3}
            for entry in overview.files
        ],
        "problems": problems,
    }


def _lines(overview: Overview, sizes: dict[int, list[tuple[int, ...]]], problems: list[str]) -> Iterator[str]:
    history = overview.history
    written = datetime.fromtimestamp(cached.last_change(overview.path)).strftime("%Y-%m-%d %H:%M:%S")
    yield f"snapshot  {overview.path} ({_size(overview.size_bytes)}, written {written})"
    yield f"model     {printable(overview.model, 200)} (fingerprint {history.model.get('digest', '?')[:12]})"
    yield f"phase     {_progress(overview)}"
    body = {} if overview.view.manifest is None else overview.view.manifest.body
    if "versions" in body:
        versions = ", ".join(f"{name} {number}" for name, number in body["versions"].items())
        yield f"written by {versions} on {body.get('device', '?')}"
    if history.reply is not None:
        yield f"options   {_options(history.reply.options)}"
    for number, turn in enumerate(history.turns, 1):
        parts = [part if isinstance(part, str) else f"[{_label(overview, part)}] " for part in turn.parts]
        shown = printable("".join(parts), 200)
        if turn.reply is not None:
            shown = f"{len(turn.reply.tokens)} tokens, {_ending(turn.reply.finish)}"
        yield f"turn {number:<4} {turn.role}: {shown}"
    reply = recorded_reply(history)
    if reply is not None and reply.text:
        yield f"reply     {printable(reply.text, 400)}"
    for index, medium in enumerate(overview.media):
        yield f"medium {index + 1:<2} {_medium_line(medium, sizes.get(index, []))}"
    for entry in overview.files:
        yield f"file      {entry.name} ({_size(entry.bytes)}){_rows(entry.meta)}"
    yield from (f"problem   {problem}" for problem in problems)
    if not problems:
        yield "sound: every file was read and checked"


def _progress(overview: Overview) -> str:
    reply = overview.history.reply
    if overview.phase not in ("decode", "finished") or reply is None:
        return overview.phase
    limit = "" if reply.limit is None else f" of {reply.limit}"
    return f"{overview.phase}, {overview.position}{limit} tokens"


def _options(options: dict[str, Any]) -> str:
    """The temperature, and what differs from the defaults."""
    default = ReplyOptions().to_json()
    usual = default["sampling"] | default
    given = dict(options.get("sampling", {})) | options
    shown = {key: value for key, value in given.items() if key != "sampling" and usual.get(key) != value}
    shown = {"temperature": given.get("temperature", 0.0)} | shown
    return ", ".join(f"{key} {printable(str(value), 100)}" for key, value in shown.items())


def _ending(finish: dict[str, Any] | None) -> str:
    if finish is None:
        return "not ended (killed, or being written)"
    reason = finish.get("reason")
    return f"stopped ({finish.get('cancel_reason')})" if reason == "cancelled" else f"ended ({reason})"


def _label(overview: Overview, index: int) -> str:
    return f"{overview.media[index].kind} {index + 1}"


def _medium_line(medium: MediumOverview, shapes: list[tuple[int, ...]]) -> str:
    total = "?" if medium.num_frames is None else medium.num_frames
    sizes = ", ".join(sorted({_shape(shape) for shape in shapes}))
    state = "encoded" if medium.encoded else f"{medium.num_encoded} of {medium.num_parts or '?'} parts encoded"
    prepared = f"{medium.num_prepared} of {total} prepared"
    return f"{medium.kind} {printable(medium.name, 200)}: {prepared}{f' ({sizes})' if sizes else ''}, {state}"


def _shape(shape: tuple[int, ...]) -> str:
    *tiles, height, width, _ = shape
    return f"{'×'.join(map(str, tiles))} tiles of {width}×{height}" if tiles else f"{width}×{height}"


def _rows(meta: dict[str, Any]) -> str:
    return f": tokens {meta['start']} to {meta['end']}" if "start" in meta and "end" in meta else ""


# -- remove ----------------------------------------------------------------------------------------------------------


def _remove(args: argparse.Namespace, console: Console) -> int:
    """Remove every one that can be; exit code 1 if one couldn't."""
    if bool(args.paths) == args.all:
        raise UsageError("give the paths of snapshots, or --all for those in the cache folder")
    paths = cached.snapshot_paths(cached.snapshots_folder()) if args.all else [Path(path) for path in args.paths]
    failed = 0
    for path in paths:
        try:
            cached.remove(path)
            console.note(f"removed {path}")
        except MlxgenError as error:
            failed += 1
            console.important(f"error: {error}")
    return exitcodes.ERROR if failed else exitcodes.OK
