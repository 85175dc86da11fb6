"""Video files through FFmpeg's libraries (PyAV): counted by their packets, decoded from the nearest keyframe."""

from __future__ import annotations

import bisect
import io
import re
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, BinaryIO, Final, cast

import av
import av.error
import numpy as np
from av.sidedata.sidedata import Type as SideDataType

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import MediaError
from mlxgen.request import MediaOptions
from mlxgen_vision.image import bounded_size, resize
from mlxgen_vision.limits import MediaLimits, check_size
from mlxgen_vision.pixels import Rgb, composite_on_white, orient
from mlxgen_vision.reader import VideoReader
from mlxgen_vision.signature import NUM_BYTES, TRANSPORT_STREAM, identify
from mlxgen_vision.source import OpenedSource

# No playlist formats (HLS, DASH, concat): they make the library open other files and addresses.
_FORMATS: Final = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,ivf,h264,hevc,obu,m4v,mjpeg,nut,mxf,"
    "mp3,wav,flac,aac,aiff,caf"
)
# Containers whose keyframe marks and seeking can be relied on; the others are decoded from the start.
_INDEXED: Final = ("mov", "matroska")
# Bare streams of a codec: no times in them, and the library makes a rate up.
_BARE: Final = ("h264", "hevc", "m4v", "mjpeg", "mpegvideo", "obu")
_ATTACHED_PICTURE: Final = 0x400
_BUFFER_BYTES: Final = 256 * 1024
_MAX_RATE: Final = 1000.0
_SEARCHED_BYTES: Final = 1024 * 1024
# The sample description of an MP4's first video track, or a Matroska codec id.
_CODEC_NAME: Final = re.compile(rb"vmhd.{1,600}?stsd.{12}([ -~]{4})|(V_[A-Z0-9/_]+)", re.DOTALL)
# (a, b, c, d) of a display matrix, signs only -> the EXIF orientation that means the same turn.
_TURNS: Final = {
    (1, 0, 0, 1): 1,
    (-1, 0, 0, 1): 2,
    (-1, 0, 0, -1): 3,
    (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5,
    (0, 1, -1, 0): 6,
    (0, -1, -1, 0): 7,
    (0, -1, 1, 0): 8,
}

_Decoded = tuple[int, Any]  # the time stamp (or position) it is shown at, and PyAV's frame
_IDR_AFTER_START_CODE: Final = re.compile(rb"\x00\x00\x01[\x05\x25\x45\x65]")


class _SeekFailed(Exception):
    """The container landed behind the keyframe that was asked for."""


class FileReader(VideoReader):
    """A video file. Holds the open file and one decoder; keeps at most one frame that was decoded ahead.

    Frame i is the one shown at the i-th time stamp in order of showing. Decoding for it always starts at the last clean
    keyframe at or before it, whatever was decoded before, so that a resumed run gets the same pixels as one that wasn't
    interrupted.
    """

    def __init__(
        self, opened: OpenedSource, options: MediaOptions, *, limits: MediaLimits, cancel: CancelToken = NEVER
    ) -> None:
        super().__init__()
        self.name = opened.name
        self.source_hash = opened.source_hash
        self._limits = limits
        is_bytes = isinstance(opened.data, bytes)
        self._file: BinaryIO = io.BytesIO(cast(bytes, opened.data)) if is_bytes else cast(BinaryIO, opened.data)
        self._container: Any = None
        self._stream: Any = None
        self._decoded: Iterator[_Decoded] | None = None
        self._run_key: int | None = None
        self._held: _Decoded | None = None
        self._ahead: _Decoded | None = None
        self._orientation = 1
        self._frame_size: tuple[int, int] | None = None
        try:
            self._open()
            self._count(cancel)
            self._measure(options, cancel)
        except BaseException:
            self.close()
            raise

    # -- opening ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the container at its start, anew if it was open, and choose the stream."""
        self._close_container()
        self._file.seek(0)
        # A short transport stream isn't recognised by the library itself.
        hint = "mpegts" if identify(self._head()).name == TRANSPORT_STREAM else None
        try:
            self._container = av.open(
                self._file,
                format=hint,
                options={"format_whitelist": _FORMATS},
                metadata_errors="replace",
                buffer_size=_BUFFER_BYTES,
            )
        except Exception as error:
            raise self._not_a_video(error) from error
        streams = [s for s in self._container.streams.video if not int(s.disposition) & _ATTACHED_PICTURE]
        if not streams:
            has_sound = bool(self._container.streams.audio)
            raise MediaError(f"{self.name}: {'only sound, no picture' if has_sound else 'no video stream'} in it")
        self._stream = streams[0]
        context = self._stream.codec_context
        if context is None:
            codec = self._codec_name()
            raise MediaError(f"{self.name}: its video codec ({codec}) can't be decoded here; convert it to H.264 first")
        if context.width and context.height:
            check_size(context.width, context.height, self.name, self._limits)
        context.options = {"max_pixels": str(self._limits.max_source_pixels)}
        # Not several frames at once: on a damaged file the outcome would then depend on which thread was faster.
        context.thread_type = "SLICE"

    def _not_a_video(self, error: Exception) -> MediaError:
        signature = identify(self._head())
        if signature.category == "video":
            return MediaError(f"{self.name}: a truncated or damaged file ({_detail(error)}); copy or download it again")
        return MediaError(f"{self.name}: not a video that can be read: its content is {signature.name}")

    def _head(self) -> bytes:
        self._file.seek(0)
        head = self._file.read(NUM_BYTES)
        self._file.seek(0)
        return head

    def _codec_name(self) -> str:
        """The codec's name as the file writes it, for a message about one that the library has no name for."""
        length = self._file.seek(0, io.SEEK_END)
        for start in (0, max(0, length - _SEARCHED_BYTES)):
            self._file.seek(start)
            found = _CODEC_NAME.search(self._file.read(_SEARCHED_BYTES))
            if found:
                return (found[1] or found[2]).decode("ascii", "replace").strip()
        return "of unknown name"

    def _count(self, cancel: CancelToken) -> None:
        """Read all packets once, without decoding, for the number of frames, their times and the keyframes."""
        times, keys, key_dts = array("q"), array("q"), array("q")
        complete = True
        container = self._container.format.name.split(",")[0]
        try:
            for packet in self._container.demux(self._stream):
                cancel.checkpoint()
                if packet.size == 0 or packet.is_discard:
                    continue
                if packet.pts is None:
                    complete = False
                times.append(packet.pts or 0)
                if packet.is_keyframe and packet.pts is not None and self._is_clean(packet):
                    keys.append(packet.pts)
                    # Matroska's index is by time of showing, that of MP4 by time of decoding.
                    key_dts.append(packet.pts if packet.dts is None or container == "matroska" else packet.dts)
        except Exception as error:  # PyAV raises IndexError where a damaged file grows streams
            self._notes.append(f"the file is truncated or damaged ({_detail(error)})")
        if not times:
            raise MediaError(f"{self.name}: no frames in it; was it recorded or copied completely?")
        ordered = sorted(times)
        complete = complete and all(a < b for a, b in pairwise(ordered))
        self.num_frames = len(ordered)
        # Elsewhere time stamps may be made up, but then decoding starts at the start, and counting is safe.
        self._by_time = complete and container in _INDEXED
        self._times = ordered if self._by_time else list(range(len(ordered)))
        self._keys: list[tuple[int, int]] = sorted(zip(keys, key_dts, strict=True)) if self._by_time else []
        self._set_times(ordered if complete else [])
        if container in _BARE and self.fps:
            self._notes.append(f"a bare {container} stream without a frame rate: {self.fps:g} a second assumed")

    def _is_clean(self, packet: Any) -> bool:
        """Whether a picture marked as a keyframe refreshes everything at once.

        H.264 streams may mark the start of a gradual refresh, where decoding gives a few damaged frames first; only an
        IDR picture is sure. The other codecs' keyframes are clean for all frames shown from there on.
        """
        context = self._stream.codec_context
        return context.name != "h264" or _has_idr(bytes(packet), context.extradata or b"")

    def _set_times(self, times: list[int]) -> None:
        base = float(self._stream.time_base or 0)
        seconds = [(t - times[0]) * base for t in times] if base else []
        span = seconds[-1] if seconds else 0.0
        counted = (self.num_frames - 1) / span if span > 0 else 0.0
        stated = float(self._stream.average_rate or self._stream.guessed_rate or 0)
        rate = stated if 0 < stated <= _MAX_RATE and (not counted or stated / 2 < counted < stated * 2) else counted
        self.fps = rate or None
        if not seconds and rate:
            seconds = [i / rate for i in range(self.num_frames)]
        self.timestamps_s = tuple(seconds) if rate else None
        self.duration_s = seconds[-1] + 1 / rate if rate else None

    def _measure(self, options: MediaOptions, cancel: CancelToken) -> None:
        """Decode the first frame for what only a frame tells: the true size and the rotation."""
        frame = self._frame_at(0, cancel)
        if frame is None:
            raise MediaError(
                f"{self.name}: not one frame can be decoded; {self._notes[-1] if self._notes else 'damaged'}"
            )
        self._orientation, known = _orientation(frame)
        if not known:
            self._notes.append("its rotation is not a multiple of 90 degrees: taken as upright")
        self._frame_size = (frame.height, frame.width)
        swap = self._orientation >= 5
        self.original_size = (frame.width, frame.height) if swap else (frame.height, frame.width)
        self.size = bounded_size(self.original_size, options)

    # -- frames ----------------------------------------------------------------------------------------------------

    def _frames(self, indices: list[int], cancel: CancelToken) -> Iterator[tuple[int, Rgb]]:
        self._stop_run()
        for index in indices:
            cancel.checkpoint()
            frame = self._frame_at(index, cancel)
            if frame is None:
                self._notes.append(f"frames from {index} on are missing: the file ends or is damaged there")
                return
            yield index, self._to_rgb(frame)

    def _frame_at(self, index: int, cancel: CancelToken) -> Any:
        """The decoded frame that is shown at time stamp `index`, or None if the file ends or fails before it."""
        key = self._keyframe_before(self._times[index])
        if self._decoded is None or key != self._run_key:
            self._start_run(key, cancel)
        try:
            return self._advance_to(index)
        except _SeekFailed:
            self._keys = []
            self._start_run(None, cancel)
            return self._advance_to(index)

    def _advance_to(self, index: int) -> Any:
        assert self._decoded is not None
        target = self._times[index]
        while self._held is None or self._held[0] < target:
            if self._ahead is None:
                self._ahead = next(self._decoded, None)
            if self._ahead is None:
                # A frame may be stored in two packets (its two fields): then the second stands for no frame of its own.
                whole = self._held is not None and not self._failed and self._held[0] >= self._times[index - 1]
                return self._held[1] if self._held is not None and whole else None
            if self._held is not None and self._ahead[0] > target:
                break  # nothing new is shown at that time
            self._held, self._ahead = self._ahead, None
        return self._held[1]

    def _keyframe_before(self, time: int) -> int | None:
        at = bisect.bisect_right(self._keys, time, key=lambda entry: entry[0])
        return self._keys[at - 1][0] if at else None

    def _start_run(self, key: int | None, cancel: CancelToken) -> None:
        """Begin decoding at a keyframe's time, or (None) at the very start."""
        self._stop_run()
        self._run_key = key
        self._decoded = self._run(key, cancel)

    def _stop_run(self) -> None:
        self._decoded = self._held = self._ahead = self._run_key = None
        self._failed = False

    def _run(self, key: int | None, cancel: CancelToken) -> Iterator[_Decoded]:
        """Decoded frames, each with its time, in order of showing from a keyframe to the end of the file or damage."""
        key_dts = None
        position = 0 if key is None else bisect.bisect_left(self._times, key)
        try:
            if key is None:
                self._open()
            else:
                key_dts = self._keys[bisect.bisect_left(self._keys, key, key=lambda entry: entry[0])][1]
                self._container.seek(key_dts, stream=self._stream, backward=True)
            for packet in self._container.demux(self._stream):
                cancel.checkpoint()
                if key_dts is not None:
                    if packet.pts != key or not packet.is_keyframe:
                        continue
                    key_dts = None
                for frame in packet.decode():
                    if frame.is_corrupt:
                        raise av.error.InvalidDataError(0, "a damaged frame")
                    yield self._time_of(frame, position), frame
                    position += 1
        except MediaError:
            raise
        except Exception as error:
            if key_dts is not None:
                raise _SeekFailed from error
            self._failed = True
            self._notes.append(f"the file is truncated or damaged ({_detail(error)})")
        if key_dts is not None:
            raise _SeekFailed

    def _time_of(self, frame: Any, position: int) -> int:
        if self._by_time and frame.pts is not None:
            return int(frame.pts)
        return self._times[min(position, self.num_frames - 1)]

    def _to_rgb(self, frame: Any) -> Rgb:
        check_size(frame.width, frame.height, self.name, self._limits)
        if (frame.height, frame.width) != self._frame_size and self._frame_size is not None:
            self._notes.append(f"its size changes to {frame.width}x{frame.height}; scaled to that of the first frame")
            frame = frame.reformat(width=self._frame_size[1], height=self._frame_size[0])
        if any(component.is_alpha for component in frame.format.components):
            rgba = frame.to_ndarray(format="rgba")
            rgb = composite_on_white(rgba[:, :, :3], rgba[:, :, 3])
        else:
            rgb = frame.to_ndarray(format="rgb24")
        rgb = orient(rgb, self._orientation)
        return resize(rgb, self.size, "bicubic") if self.size != self.original_size else rgb

    # -- closing ---------------------------------------------------------------------------------------------------

    def _close_container(self) -> None:
        if self._container is not None:
            self._container.close()
            self._container = None

    def close(self) -> None:
        self._stop_run()
        self._close_container()
        self._file.close()


def _has_idr(packet: bytes, extradata: bytes) -> bool:
    """Whether an H.264 packet, with lengths (`extradata` starts with 1) or start codes, has an IDR slice in it."""
    if extradata[:1] != b"\x01":
        return _IDR_AFTER_START_CODE.search(packet) is not None
    size = (extradata[4] & 3) + 1 if len(extradata) > 4 else 4
    at = 0
    while at + size < len(packet):
        if packet[at + size] & 31 == 5:
            return True
        at += size + int.from_bytes(packet[at : at + size], "big")
    return False


def _orientation(frame: Any) -> tuple[int, bool]:
    """(the EXIF orientation that a frame's display matrix stands for, whether it is a quarter turn or mirror)."""
    data = frame.side_data.get(SideDataType.DISPLAYMATRIX)
    if data is None:
        return 1, True
    matrix = np.frombuffer(bytes(data), np.int32)
    entries = [int(matrix[i]) for i in (0, 1, 3, 4)]
    limit = max(abs(e) for e in entries) / 64 or 1.0
    signs = tuple(0 if abs(e) < limit else (1 if e > 0 else -1) for e in entries)
    turn = _TURNS.get(cast(tuple[int, int, int, int], signs))
    return (1, False) if turn is None else (turn, True)


def _detail(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:160]
