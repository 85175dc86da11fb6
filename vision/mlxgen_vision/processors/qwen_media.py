"""Preparing pictures and videos for the Qwen families, one unit at a time."""

from __future__ import annotations

import bisect
import hashlib
import logging
from collections.abc import Generator
from typing import Any

import numpy as np

from mlxgen.cancellation import CancelToken
from mlxgen.inputs import PreparedMedium
from mlxgen.request import ImagePart, MediaOptions, VideoPart
from mlxgen_vision import preparation
from mlxgen_vision.frames import ArrayReader, SequenceReader
from mlxgen_vision.image import check_options, resize
from mlxgen_vision.processors.qwen import ImageSettings, Pixels, Size, VideoSettings, spread
from mlxgen_vision.video import VideoReader, open_video

_log = logging.getLogger(__name__)


def prepare_image(
    part: ImagePart, settings: ImageSettings, *, partial: PreparedMedium | None, cancel: CancelToken
) -> Generator[PreparedMedium, None, PreparedMedium]:
    """One unit: the picture opened, upright, and resized once, straight to the size the tower takes."""
    check_options(part.options)

    def arrange(rgb: Pixels) -> tuple[Pixels, dict[str, Any]]:
        original: Size = (rgb.shape[0], rgb.shape[1])
        size = settings.size(original, part.options)
        geometry = {"grid": [1, *settings.patches.grid(size)]}
        return resize(rgb, size, settings.patches.resample), geometry

    # The bounds on pixels are the resize rule's own: applied before it as well, they would cost a second resampling.
    opened = ImagePart(part.source, MediaOptions(allow_urls=part.options.allow_urls))
    return (yield from preparation.prepare_image(opened, arrange, partial=partial, cancel=cancel))


def prepare_video(
    part: VideoPart, settings: VideoSettings, *, partial: PreparedMedium | None, cancel: CancelToken
) -> Generator[PreparedMedium, None, PreparedMedium]:
    """One unit per frame. Which frames, and their size, is settled when the video is first opened, and kept.

    The geometry holds the grid, the frames' indices, the time stamp of each temporal patch, the seconds from one to the
    next, and each frame's SHA-256 (so that finishing a long video doesn't hash all of it at once). A file that ends
    early gives the frames it has; the log says so.
    """
    check_options(part.options)
    if partial is not None and partial.prepared:
        return partial
    cancel.checkpoint()
    opened = MediaOptions(fps=part.options.fps, allow_urls=part.options.allow_urls)
    with open_video(part.source, opened, cancel=cancel) as reader:
        preparation.require_same_source(partial, reader.source_hash, reader.name)
        medium = PreparedMedium(kind="video") if partial is None else partial
        if medium.num_frames is None:
            geometry = _plan(reader, settings, part.options)
            medium.source_hash, medium.source_name = reader.source_hash, reader.name
            medium.geometry, medium.num_frames = geometry, len(geometry["indices"])
        indices: list[int] = medium.geometry["indices"]
        height, width = medium.geometry["size"]
        for _, rgb in reader.frames(indices, start_at=len(medium.frames), cancel=cancel):
            frame = resize(rgb, (height, width), settings.patches.resample)
            digest = hashlib.sha256(frame.tobytes()).hexdigest()
            medium.geometry["sha256"].append(digest)
            medium.frames.append(frame)
            if len(medium.frames) == medium.num_frames:
                medium.content_hash = preparation.content_hash(medium.geometry, [])
            yield medium
        if not medium.prepared:
            _log.warning("%s: %d of %d frames; %s", reader.name, len(medium.frames), len(indices), reader.note)
            _shorten(medium, settings)
    return medium


def _plan(reader: VideoReader, settings: VideoSettings, options: MediaOptions) -> dict[str, Any]:
    """Which frames to take, at what size, and when they are shown."""
    temporal = settings.patches.temporal
    # Frames whose rate nobody told are taken to stand at the rate the model samples at.
    fps = reader.fps or settings.fps
    if reader.fps is None or isinstance(reader, SequenceReader | ArrayReader):
        indices = spread(reader.num_frames, min(options.max_frames or reader.num_frames, reader.num_frames))
    else:
        indices = settings.sample(reader.num_frames, fps, options)
    variable = _variable_times(reader)
    if variable is None:
        times = [index / fps for index in indices]
    else:
        moments = np.linspace(0.0, variable[-1], len(indices))
        indices = [max(bisect.bisect_right(variable, float(moment) + 1e-6) - 1, 0) for moment in moments]
        times = [variable[index] for index in indices]
    padded = [*times, *[times[-1]] * (-len(times) % temporal)]
    size = settings.size(len(indices), reader.original_size, options)
    return {
        "grid": [len(padded) // temporal, *settings.patches.grid(size)],
        "size": list(size),
        "indices": indices,
        # A temporal patch stands halfway between its first and its last frame.
        "timestamps": [(padded[at] + padded[at + temporal - 1]) / 2 for at in range(0, len(padded), temporal)],
        "second_per_grid": temporal / (len(indices) / reader.num_frames * fps),
        "sha256": [],
    }


def _variable_times(reader: VideoReader) -> tuple[float, ...] | None:
    """The frames' times if they are off an even rhythm by over half a frame; otherwise None, and index / fps is meant.

    The models saw index / fps; for a constant rate a container's rounded times would only change a last digit.
    """
    times = reader.timestamps_s
    if times is None or not reader.fps or isinstance(reader, SequenceReader | ArrayReader):
        return None
    even = np.arange(len(times)) / reader.fps
    return times if np.abs(np.asarray(times) - even).max() > 0.5 / reader.fps else None


def _shorten(medium: PreparedMedium, settings: VideoSettings) -> None:
    """Complete a medium whose file ended before the plan did."""
    num_frames, geometry = len(medium.frames), medium.geometry
    steps = -(-num_frames // settings.patches.temporal)
    geometry["grid"][0] = steps
    geometry["indices"] = geometry["indices"][:num_frames]
    geometry["timestamps"] = geometry["timestamps"][:steps]
    medium.num_frames = num_frames
    medium.content_hash = preparation.content_hash(geometry, [])
