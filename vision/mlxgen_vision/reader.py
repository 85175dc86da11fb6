"""What every source of video frames looks like, and how frames are chosen from it."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Self

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import InvalidValueError
from mlxgen_vision.pixels import Rgb


class VideoReader(ABC):
    """An open video. Owned by who opened it (`close()` or `with`); used by one thread at a time; nothing survives it.

    `num_frames` counts what the file announces, by its packets or headers; a damaged file may give fewer. `fps` is the
    average rate, or None where nothing tells it (folders, lists and arrays without the `fps` option, pages of a TIFF).
    `timestamps_s` are the times the frames are shown at, from 0, or None with `fps`. `duration_s` includes the last
    frame's time. `original_size` is (height, width) after rotation; `size` is that of the frames given out, within the
    options' bounds. `note` says what was left out or assumed so far, or None.
    """

    name: str
    source_hash: str
    num_frames: int
    fps: float | None
    timestamps_s: tuple[float, ...] | None
    duration_s: float | None
    original_size: tuple[int, int]
    size: tuple[int, int]

    def __init__(self) -> None:
        self._notes: list[str] = []

    @property
    def note(self) -> str | None:
        return "; ".join(dict.fromkeys(self._notes)) or None

    def frames(
        self, indices: Sequence[int], *, start_at: int = 0, cancel: CancelToken = NEVER
    ) -> Iterator[tuple[int, Rgb]]:
        """Yield (index, uint8 (h, w, 3)) for `indices[start_at:]`, which must be in range and never descend.

        One frame is decoded at a time, after a checkpoint; memory is bounded by one frame. Frames in between are not
        converted to RGB, and not decoded at all where a later keyframe can be sought. Frame i has the same pixels
        whatever `start_at` and the other indices are. A damaged file ends the iteration early, and `note` then says
        where (one whose first frame can't be decoded was refused on opening).
        """
        plan = list(indices)
        for before, after in pairwise([0, *plan]):
            if after < before or after >= self.num_frames:
                raise InvalidValueError(
                    f"frame index {after}; indices must ascend within 0..{self.num_frames - 1} of {self.name}"
                )
        if not 0 <= start_at <= len(plan):
            raise InvalidValueError(f"start_at is {start_at}; it must be within 0..{len(plan)}, the number of indices")
        return self._frames(plan[start_at:], cancel)

    @abstractmethod
    def _frames(self, indices: list[int], cancel: CancelToken) -> Iterator[tuple[int, Rgb]]: ...

    def close(self) -> None:  # noqa: B027  a folder or array has nothing to close
        """Give the file and the decoder back. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def sample_uniform(num_frames: int, count: int) -> list[int]:
    """`count` indices spread evenly over `num_frames`: floor(i * num_frames / count). All frames if there are fewer."""
    if num_frames < 1 or count < 1:
        raise InvalidValueError(f"can't choose {count} of {num_frames} frames; both must be at least 1")
    count = min(count, num_frames)
    return [i * num_frames // count for i in range(count)]


def sample_by_fps(
    num_frames: int,
    source_fps: float,
    fps: float,
    *,
    max_frames: int | None = None,
    timestamps_s: Sequence[float] | None = None,
) -> list[int]:
    """The indices of about `fps` frames a second, at least one, at most `max_frames`, never one twice.

    The count is floor(num_frames / source_fps * fps); the frames are then spread evenly. With `timestamps_s` (a
    variable frame rate) they are spread evenly in time instead: the frame shown at each moment. For a constant rate
    both agree.
    """
    if source_fps <= 0 or fps <= 0:
        raise InvalidValueError(f"frame rates of {source_fps:g} and {fps:g} a second; both must be more than 0")
    # A hair is added so that 90 frames at 30 fps are 3 s in floating point too.
    count = max(1, int(num_frames / source_fps * fps + 1e-6))
    if max_frames is not None:
        count = min(count, max_frames)
    if timestamps_s is None:
        return sample_uniform(num_frames, count)
    if len(timestamps_s) != num_frames:
        raise InvalidValueError(f"{len(timestamps_s)} time stamps for {num_frames} frames; they must be as many")
    count = min(count, num_frames)
    step = num_frames / source_fps / count
    at = [bisect.bisect_right(timestamps_s, i * step + 1e-6) - 1 for i in range(count)]
    return sorted({max(0, index) for index in at})
