"""One video, from wherever it comes: a file, an animation, a folder or list of frames, an array."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import MediaError
from mlxgen.request import MediaOptions
from mlxgen_vision.frames import AnimationReader, ArrayReader, SequenceReader
from mlxgen_vision.image import check_options
from mlxgen_vision.limits import DEFAULT_LIMITS, MediaLimits
from mlxgen_vision.reader import VideoReader, sample_by_fps, sample_uniform
from mlxgen_vision.signature import NUM_BYTES, identify
from mlxgen_vision.source import open_source
from mlxgen_vision.video_file import FileReader

__all__ = ["VideoReader", "open_video", "sample_by_fps", "sample_uniform"]


def open_video(
    source: Any, options: MediaOptions, *, limits: MediaLimits = DEFAULT_LIMITS, cancel: CancelToken = NEVER
) -> VideoReader:
    """Open a video file, an animation, a folder or list of frames, or an array (frames, h, w, channels).

    Everything about it is known on return (count, rate, times, size); a file's first frame was decoded for that, a
    folder's only where its header doesn't tell its size. Checkpoints come between blocks and packets read. Raises
    `MediaError` for a missing, damaged, empty or sound-only file, an unknown codec, a still picture, or frames that
    differ in size.
    """
    check_options(options)
    opened = open_source(source, kind="video", allow_urls=options.allow_urls, limits=limits, cancel=cancel)
    try:
        if isinstance(opened.data, tuple):
            return SequenceReader(opened, options, limits=limits, cancel=cancel)
        if isinstance(opened.data, np.ndarray):
            return ArrayReader(opened, options, limits=limits, cancel=cancel)
        if isinstance(opened.data, Image.Image):
            raise MediaError(f"{opened.name}: a PIL image isn't a video; give the file itself, or a list of frames")
        if isinstance(opened.data, bytes) and identify(opened.data[:NUM_BYTES]).category == "picture":
            return AnimationReader(opened, options, limits=limits, cancel=cancel)
        return FileReader(opened, options, limits=limits, cancel=cancel)
    except BaseException:
        opened.close()
        raise
