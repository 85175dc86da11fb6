"""`mlxgen cache`: what is kept of earlier prompts and pictures. Needs no model; may run beside other commands."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from typing import Any

from mlxgen.cancellation import CancelToken
from mlxgen.cli import exitcodes
from mlxgen.cli.console import Console
from mlxgen.cli.prefixes import prefix_budget_bytes, prefix_folder
from mlxgen.errors import SnapshotError
from mlxgen.prefixcache.disk import StoredFile, clear, read_file, stored_files


def run(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    if args.action == "info":
        return _info(args, console)
    if args.action == "clear":
        count = clear(prefix_folder())
        console.note(f"{count} files removed from {prefix_folder()}")
        return exitcodes.OK
    return _verify(args, console, cancel)


def _info(args: argparse.Namespace, console: Console) -> int:
    root, files = prefix_folder(), stored_files(prefix_folder())
    said: dict[str, Any] = {
        "folder": str(root),
        "budget_bytes": prefix_budget_bytes(),
        "size_bytes": sum(file.num_bytes for file in files),
        "models": [_model(name, files) for name in sorted({file.path.parent.name for file in files})],
    }
    if args.json:
        console.write(json.dumps(said) + "\n")
        return exitcodes.OK
    console.write(f"{root}: {_megabytes(said['size_bytes'])} of {_megabytes(said['budget_bytes'])}\n")
    for model in said["models"]:
        counts = f"{model['blocks']} blocks of prompts, {model['features']} pictures"
        console.write(f"{model['model']}: {_megabytes(model['size_bytes'])}, {counts}\n")
    return exitcodes.OK


def _model(folder: str, files: list[StoredFile]) -> dict[str, Any]:
    own = [file for file in files if file.path.parent.name == folder]
    kinds = Counter(file.name.partition("-")[0] for file in own)
    return {
        "model": folder.rpartition("-")[0],
        "folder": folder,
        "size_bytes": sum(file.num_bytes for file in own),
        "blocks": kinds["block"],
        "features": kinds["features"],
    }


def _verify(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    """Read everything; exit code 1 if something was damaged (it is gone then, and will be computed again)."""
    files = stored_files(prefix_folder())
    damaged: list[str] = []
    for number, file in enumerate(files):
        cancel.checkpoint()
        console.bar("verify", number, len(files))
        try:
            read_file(file.path)
        except SnapshotError as error:
            damaged.append(str(error))
            with contextlib.suppress(OSError):
                file.path.unlink(missing_ok=True)
    console.clear_bar()
    if args.json:
        console.write(json.dumps({"num_files": len(files), "damaged": damaged}) + "\n")
    else:
        for problem in damaged:
            console.write(problem.replace("; remove it", "; removed") + "\n")
        console.write(f"{len(files)} files read, {len(damaged)} were damaged\n")
    return exitcodes.ERROR if damaged else exitcodes.OK


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 10**9 else f"{num_bytes / 1e9:.2f} GB"
