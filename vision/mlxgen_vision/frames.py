"""Videos that come as pictures: folders, lists, arrays; and animations (GIF, PNG, WebP, pages of a TIFF)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final

import numpy as np

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import MediaError
from mlxgen.request import MediaOptions
from mlxgen_vision import animation
from mlxgen_vision.decode import damaged, decode, open_picture
from mlxgen_vision.image import announced_size, bounded_size, load_opened, resize, upright
from mlxgen_vision.limits import MediaLimits, check_size
from mlxgen_vision.pixels import Rgb, rgb_from_array
from mlxgen_vision.reader import VideoReader
from mlxgen_vision.source import FrameSource, OpenedSource, read_frame

_UNBOUNDED: Final = MediaOptions()


class _PictureReader(VideoReader):
    """Common to all of them: every frame can be asked for by its index and has the first one's size.

    Its size, needed to plan, is read from the first frame's header, so that opening a video again decodes nothing
    twice; where the header doesn't tell, that frame is decoded on opening and kept until frames are asked for.
    """

    def __init__(self, opened: OpenedSource, options: MediaOptions, limits: MediaLimits) -> None:
        super().__init__()
        self.name = opened.name
        self.source_hash = opened.source_hash
        self._options = options
        self._limits = limits
        self._first: Rgb | None = None

    def _measure(self, cancel: CancelToken) -> None:
        """Find frame 0's size; to be called at the end of a subclass's `__init__`."""
        cancel.checkpoint()
        announced = self._announced_size(cancel)
        if announced is None:
            cancel.checkpoint()
            self._first = self._decode(0, cancel)
            announced = (self._first.shape[0], self._first.shape[1])
        self.original_size = announced
        self.size = bounded_size(self.original_size, self._options)

    def _set_durations(self, durations_s: list[float]) -> None:
        self.duration_s = sum(durations_s)
        self.fps = len(durations_s) / self.duration_s
        self.timestamps_s = tuple(accumulate(durations_s[:-1], initial=0.0))

    def _set_rate(self, fps: float | None) -> None:
        self.fps = fps
        self.duration_s = None if fps is None else self.num_frames / fps
        self.timestamps_s = None if fps is None else tuple(i / fps for i in range(self.num_frames))

    def _frames(self, indices: list[int], cancel: CancelToken) -> Iterator[tuple[int, Rgb]]:
        for index in indices:
            cancel.checkpoint()
            rgb, self._first = (self._first if index == 0 else None), None
            if rgb is None:
                rgb = self._decode_or_end(index, cancel)
            if rgb is None:
                return
            if rgb.shape[:2] != self.original_size:
                raise MediaError(
                    f"{self.name}: frame {index} is {rgb.shape[1]}x{rgb.shape[0]}, the first is "
                    f"{self.original_size[1]}x{self.original_size[0]}; all frames of a video must have one size"
                )
            yield index, (resize(rgb, self.size, "bicubic") if self.size != self.original_size else rgb)

    def _decode_or_end(self, index: int, cancel: CancelToken) -> Rgb | None:
        """A frame, or None where the file ends before it should."""
        return self._decode(index, cancel)

    def _announced_size(self, cancel: CancelToken) -> tuple[int, int] | None:
        """Frame 0's (height, width) after orientation if that is known without decoding it."""
        return None

    def _decode(self, index: int, cancel: CancelToken) -> Rgb:
        raise NotImplementedError


class SequenceReader(_PictureReader):
    """A folder or list of pictures. Each is opened when its turn comes; a damaged one is an error that names it."""

    def __init__(
        self, opened: OpenedSource, options: MediaOptions, *, limits: MediaLimits, cancel: CancelToken = NEVER
    ) -> None:
        super().__init__(opened, options, limits)
        assert isinstance(opened.data, tuple)
        self._sources: tuple[FrameSource, ...] = opened.data
        self.num_frames = len(self._sources)
        self._set_rate(options.fps)
        self._measure(cancel)

    def _announced_size(self, cancel: CancelToken) -> tuple[int, int] | None:
        return announced_size(read_frame(self._sources[0], limits=self._limits, cancel=cancel), limits=self._limits)

    def _decode(self, index: int, cancel: CancelToken) -> Rgb:
        # One unit: the checkpoint was before it.
        loaded = load_opened(read_frame(self._sources[index], limits=self._limits), _UNBOUNDED, limits=self._limits)
        if loaded.note:
            self._notes.append(f"{self._sources[index].name}: {loaded.note}")
        return loaded.rgb


class ArrayReader(_PictureReader):
    """An array of shape (frames, h, w), or (frames, h, w, channels)."""

    def __init__(
        self, opened: OpenedSource, options: MediaOptions, *, limits: MediaLimits, cancel: CancelToken = NEVER
    ) -> None:
        super().__init__(opened, options, limits)
        assert isinstance(opened.data, np.ndarray)
        self._array: np.ndarray[Any, Any] = opened.data
        if self._array.ndim != 4:
            raise MediaError(f"{self.name}: not the shape of a video; give (frames, height, width, 1, 3 or 4)")
        if not len(self._array):
            raise MediaError(f"{self.name}: no frames; a video needs at least one")
        check_size(self._array.shape[2], self._array.shape[1], self.name, limits)
        self.num_frames = len(self._array)
        self._set_rate(options.fps)
        self._measure(cancel)

    def _announced_size(self, cancel: CancelToken) -> tuple[int, int] | None:
        return (int(self._array.shape[1]), int(self._array.shape[2]))

    def _decode(self, index: int, cancel: CancelToken) -> Rgb:
        return rgb_from_array(self._array[index], f"frame {index} of {self.name}")


class AnimationReader(_PictureReader):
    """A GIF, animated PNG or WebP, or a TIFF of several pages; each frame composed over the ones before it.

    A frame can only be composed after all before it, so resuming composes those again (without converting them).
    """

    def __init__(
        self, opened: OpenedSource, options: MediaOptions, *, limits: MediaLimits, cancel: CancelToken = NEVER
    ) -> None:
        super().__init__(opened, options, limits)
        assert isinstance(opened.data, bytes)
        self._data = opened.data
        self._image, self._kind = open_picture(self._data, self.name, limits)
        durations = animation.durations_s(self._data, self._kind)
        if self._kind == "TIFF":
            self.num_frames = self._num_pages()
            self._set_rate(options.fps)
        else:
            self.num_frames = len(durations)
        if self.num_frames < 1 or (self.num_frames == 1 and self._kind == "TIFF"):
            raise MediaError(f"{self.name}: a still {self._kind} picture, not a video; give it as an image")
        if durations:
            self._set_durations(durations)
        # A PNG's default image needn't be one of the animation's frames.
        self._skipped = 1 if getattr(self._image, "default_image", False) else 0
        self._measure(cancel)

    def _num_pages(self) -> int:
        try:
            return int(getattr(self._image, "n_frames", 1))
        except Exception as error:
            raise damaged(self.name, self._kind, error) from error

    def _decode(self, index: int, cancel: CancelToken) -> Rgb:
        target = index + self._skipped
        if self._image.tell() > target:
            self._reopen()
        while self._image.tell() < target:
            cancel.checkpoint()
            self._advance()
        decode(self._image, self.name, self._kind, self._limits)
        notes: list[str | None] = []
        rgb = upright(self._image, self.name, notes)
        self._notes += [note for note in notes if note]
        return rgb

    def _advance(self) -> None:
        try:
            self._image.seek(self._image.tell() + 1)
            self._image.load()
        except Exception as error:
            raise damaged(self.name, self._kind, error) from error
        check_size(self._image.width, self._image.height, self.name, self._limits)

    def _decode_or_end(self, index: int, cancel: CancelToken) -> Rgb | None:
        try:
            return self._decode(index, cancel)
        except MediaError as error:
            if index == 0:
                raise
            self._notes.append(f"frames from {index} on are missing: {error}")
            return None

    def _reopen(self) -> None:
        self._image.close()
        self._image, _ = open_picture(self._data, self.name, self._limits)

    def close(self) -> None:
        self._image.close()
