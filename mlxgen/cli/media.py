"""`--image`, `--video` and `--fps` as parts of a message, in the order of the command line."""

from __future__ import annotations

import argparse
import glob
import math
import os
from dataclasses import replace
from pathlib import Path

from mlxgen.cli.settings import UsageError, near_name, standard_input_bytes
from mlxgen.errors import MediaError
from mlxgen.request import ImagePart, MediaOptions, Part, VideoPart


def media_options(args: argparse.Namespace) -> MediaOptions:
    """The limits for all media of the command."""
    for name in ("max_frames", "max_pixels", "min_pixels", "max_image_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; give 1 or more")
    if args.max_pixels is not None and args.min_pixels is not None and args.min_pixels > args.max_pixels:
        raise UsageError(f"--min-pixels {args.min_pixels} is more than --max-pixels {args.max_pixels}")
    return MediaOptions(
        min_pixels=args.min_pixels,
        max_pixels=args.max_pixels,
        max_image_size=args.max_image_size,
        max_frames=args.max_frames,
        allow_urls=args.allow_urls,
    )


def media_parts(args: argparse.Namespace) -> list[Part]:
    """Pictures and videos in their order.

    `--fps` counts for the videos before it that have none of their own; before any video, for those that get none.

    Raises `MediaError` for a file that isn't there, before anything else is done.
    """
    options = media_options(args)
    parts: list[Part] = []
    default_fps: float | None = None
    waiting: list[int] = []
    for kind, value in args.media:
        if kind == "fps":
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"--fps is {value}; give frames a second above 0")
            if not waiting:
                default_fps = value
            for index in waiting:
                parts[index] = _with_fps(parts[index], value)
            waiting = []
        elif kind == "image":
            parts += [image_part(source, options) for source in _expanded(value)]
        else:
            for source in _expanded(value):
                waiting.append(len(parts))
                parts.append(video_part(source, options))
    if default_fps is not None:
        for index in waiting:
            parts[index] = _with_fps(parts[index], default_fps)
    return parts


def _with_fps(part: Part, fps: float) -> Part:
    assert isinstance(part, VideoPart)
    return replace(part, options=replace(part.options, fps=fps))


def image_part(source: str, options: MediaOptions) -> ImagePart:
    """A picture from a path, a data URI, an address, or `-` for the bytes on standard input."""
    if source == "-":
        data = standard_input_bytes("the picture")
        if not data:
            raise MediaError("the picture on standard input is empty; pipe a picture's bytes in")
        return ImagePart(data, options)
    _require_file(source)
    return ImagePart(source, options)


def video_part(source: str, options: MediaOptions) -> VideoPart:
    """A video from a file, an animation, or a folder of frames."""
    _require_file(source)
    return VideoPart(source, options)


def _expanded(pattern: str) -> list[str]:
    """The files a pattern stands for, in name order; anything that isn't one stands for itself."""
    if not any(char in pattern for char in "*?[") or _is_remote(pattern) or os.path.lexists(pattern):
        return [pattern]
    found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    if not found:
        raise MediaError(f"no file matches {pattern!r}; check the pattern and the folder")
    return found


def _is_remote(source: str) -> bool:
    return source.startswith(("data:", "http://", "https://"))


def _require_file(source: str) -> None:
    if _is_remote(source):
        return
    path = Path(source).expanduser()
    if path.exists():
        return
    raise MediaError(f"no file {source!r}{near_name(path)}")
