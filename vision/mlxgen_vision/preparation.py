"""Preparing media unit by unit, so that a stop between two units loses nothing; what all families have in common."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import MediaError
from mlxgen.inputs import PreparedMedium
from mlxgen.request import ImagePart, VideoPart
from mlxgen_vision.image import load_image
from mlxgen_vision.source import is_address
from mlxgen_vision.video import VideoReader, open_video

_log = logging.getLogger(__name__)

Pixels = np.ndarray[Any, Any]
Geometry = dict[str, Any]


def content_hash(geometry: Geometry, frames: Sequence[Pixels]) -> str:
    """SHA-256 (hex) of what the model sees: canonical JSON of the geometry, then each frame's shape and pixels."""
    digest = hashlib.sha256(json.dumps(geometry, sort_keys=True, separators=(",", ":")).encode())
    for frame in frames:
        digest.update(f"\n{frame.dtype.str}{frame.shape}".encode())
        digest.update(np.ascontiguousarray(frame).data)
    return digest.hexdigest()


def require_same_source(partial: PreparedMedium | None, source_hash: str, name: str) -> None:
    """Raise `MediaError` if a medium that was begun is to be continued from other content."""
    if partial is not None and partial.source_hash and partial.source_hash != source_hash:
        raise MediaError(
            f"{name} has changed since it was first opened (SHA-256 {partial.source_hash[:12]}…, now "
            f"{source_hash[:12]}…); put the former file back, or start the prompt anew"
        )


def prepare_image(
    part: ImagePart,
    arrange: Callable[[Pixels], tuple[Pixels, Geometry]],
    *,
    partial: PreparedMedium | None,
    cancel: CancelToken,
) -> Generator[PreparedMedium, None, PreparedMedium]:
    """`VisionModel.prepare` for a picture: one unit, which opens and orients it and lets `arrange` make its pixels.

    `arrange` takes uint8 RGB (height, width, 3) and returns the pixels the tower will see, uint8 in any shape, and
    their JSON-able geometry. A complete `partial` is returned as it is and its source isn't opened.
    """
    if partial is not None and partial.prepared:
        return partial
    cancel.checkpoint()
    # No checkpoint from here to the commit, or a stop would find work done that is then done again. Only waiting for a
    # server is not work.
    picture = load_image(part.source, part.options, cancel=cancel if is_address(part.source) else NEVER)
    require_same_source(partial, picture.source_hash, picture.name)
    pixels, geometry = arrange(picture.rgb)
    medium = PreparedMedium(kind="image") if partial is None else partial
    medium.source_hash, medium.source_name = picture.source_hash, picture.name
    medium.geometry, medium.frames, medium.num_frames = geometry, [pixels], 1
    medium.content_hash = content_hash(geometry, [pixels])
    yield medium
    return medium


def prepare_video(
    part: VideoPart,
    plan: Callable[[VideoReader], Geometry],
    arrange: Callable[[Pixels, Geometry], Pixels],
    *,
    partial: PreparedMedium | None,
    cancel: CancelToken,
) -> Generator[PreparedMedium, None, PreparedMedium]:
    """`VisionModel.prepare` for a video: one unit is one frame, decoded and arranged.

    `plan` chooses the frames once, before the first is prepared, and is not asked again when a medium goes on: its
    geometry has "indices", the ascending frame numbers, and whatever else the family keeps, JSON-able. `arrange` turns
    one uint8 RGB frame into what the tower will see. A damaged file that ends early leaves a shorter video: "indices"
    is cut to the frames there are. A complete `partial` is returned as it is and its source isn't opened.
    """
    if partial is not None and partial.prepared:
        return partial
    cancel.checkpoint()
    with open_video(part.source, part.options, cancel=cancel) as reader:
        require_same_source(partial, reader.source_hash, reader.name)
        medium = PreparedMedium(kind="video") if partial is None else partial
        if medium.num_frames is None:
            geometry = plan(reader)
            medium.source_hash, medium.source_name = reader.source_hash, reader.name
            medium.geometry, medium.num_frames = geometry, len(geometry["indices"])
        indices = medium.geometry["indices"]
        for _, rgb in reader.frames(indices, start_at=len(medium.frames), cancel=cancel):
            frame = arrange(rgb, medium.geometry)
            if len(medium.frames) + 1 == medium.num_frames:
                medium.content_hash = content_hash(medium.geometry, [*medium.frames, frame])
            medium.frames.append(frame)
            yield medium
        if not medium.prepared:
            _log.warning("%s: %d of %d frames could be decoded", reader.name, len(medium.frames), len(indices))
            medium.geometry = medium.geometry | {"indices": indices[: len(medium.frames)]}
            medium.content_hash = content_hash(medium.geometry, medium.frames)
            medium.num_frames = len(medium.frames)
    return medium
