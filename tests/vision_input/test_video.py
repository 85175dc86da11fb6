from __future__ import annotations

import io
import os
import struct
import wave
from pathlib import Path
from typing import Any

import av
import mlxgen_vision.frames
import mlxgen_vision.video_file
import numpy as np
import pytest
from mlxgen_vision.animation import durations_s
from mlxgen_vision.limits import MediaLimits
from mlxgen_vision.video import VideoReader, open_video, sample_by_fps, sample_uniform
from PIL import Image
from vision_input.inputs import encoded, greys, number_of, pattern, quarters, video

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import InvalidValueError, MediaError
from mlxgen.request import MediaOptions

PLAIN = MediaOptions()

KINDS = [
    ("libx264", "mp4", {"g": "10", "bf": "2"}),
    ("libx264", "matroska", {"g": "10", "bf": "2"}),
    ("libx264", "mpegts", {"g": "10", "bf": "2"}),
    ("libx264", "avi", {"g": "10", "bf": "2"}),
    ("libx264", "h264", {"g": "10"}),
    ("libx265", "mp4", {"x265-params": "log-level=none:keyint=10"}),
    ("libvpx-vp9", "webm", {"g": "10"}),
    ("libsvtav1", "mp4", {"g": "10", "preset": "10"}),
    ("mjpeg", "mov", {}),
    ("mjpeg", "avi", {}),
    ("mpeg4", "mpegts", {"b": "4000000"}),
]


def numbers(reader: VideoReader, indices: Any, **rest: Any) -> list[tuple[int, int]]:
    return [(index, number_of(rgb)) for index, rgb in reader.frames(list(indices), **rest)]


@pytest.mark.parametrize(("codec", "container", "options"), KINDS, ids=[f"{c}-{f}" for c, f, _ in KINDS])
def test_every_codec_gives_the_frames_asked_for(codec: str, container: str, options: dict[str, str]) -> None:
    data = video(greys(29), codec=codec, container=container, options=options)
    with open_video(data, PLAIN) as reader:
        assert reader.num_frames == 29
        assert reader.size == reader.original_size == (48, 64)
        assert reader.fps == (25.0 if container == "h264" else pytest.approx(30.0, rel=0.01))
        assert numbers(reader, range(29)) == [(i, i) for i in range(29)]
        assert numbers(reader, [0, 3, 3, 17, 28]) == [(0, 0), (3, 3), (3, 3), (17, 17), (28, 28)]
        assert numbers(reader, [0, 3, 17, 28], start_at=2) == [(17, 17), (28, 28)]
        assert numbers(reader, []) == []
        assert (reader.note is not None) == (container == "h264")


MOVING_KINDS = [
    {"g": "12", "bf": "3"},
    {"x264-params": "open-gop=1:keyint=12:scenecut=0"},
    {"x264-params": "intra-refresh=1:keyint=12:bframes=0:scenecut=0"},  # keyframes that aren't clean
]


@pytest.mark.parametrize("options", MOVING_KINDS, ids=["closed", "open", "intra-refresh"])
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_resuming_anywhere_gives_the_same_pixels(options: dict[str, str], container: str) -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 60, (40, 96, 128, 3), dtype=np.uint8)
    data = video(
        [np.roll(pattern(96, 128), 3 * i, 1) // 2 + noise[i] for i in range(40)], options=options, container=container
    )
    with av.open(io.BytesIO(data)) as plain:
        truth = [frame.to_ndarray(format="rgb24") for frame in plain.decode(video=0)]
    plan = [0, 1, 5, 11, 12, 13, 14, 23, 24, 25, 31, 39]
    for start in range(len(plan)):
        with open_video(data, PLAIN) as reader:
            found = list(reader.frames(plan, start_at=start))
        assert [index for index, _ in found] == plan[start:]
        for index, rgb in found:
            assert (rgb == truth[index]).all(), (start, index)


def test_resuming_decodes_from_the_nearest_keyframe_and_converts_only_what_is_asked(monkeypatch: Any) -> None:
    data = video(greys(31) * 4, options={"g": "20", "bf": "0", "sc_threshold": "0"})
    decoded: list[int] = []
    converted: list[int] = []
    reader_class: Any = mlxgen_vision.video_file.FileReader
    run, to_rgb = reader_class._run, reader_class._to_rgb

    def counted(self: Any, key: int | None, cancel: CancelToken) -> Any:
        for item in run(self, key, cancel):
            decoded.append(item[0])
            yield item

    def convert(self: Any, frame: Any) -> Any:
        converted.append(1)
        return to_rgb(self, frame)

    monkeypatch.setattr(reader_class, "_run", counted)
    monkeypatch.setattr(reader_class, "_to_rgb", convert)
    with open_video(data, PLAIN) as reader:
        decoded.clear()
        assert len(list(reader.frames([0, 10, 105], start_at=2))) == 1
    assert len(decoded) <= 8  # from 100, not from 0
    assert len(converted) == 1


def test_a_stop_comes_before_each_frame_and_leaves_the_reader_usable() -> None:
    data = video(greys(20), options={"g": "5"})
    token = CancelToken()
    with open_video(data, PLAIN) as reader:
        seen = []

        def read() -> None:
            for index, _ in reader.frames(range(20), cancel=token):
                seen.append(index)
                if index == 7:
                    token.cancel()

        with pytest.raises(Cancelled):
            read()
        assert seen == list(range(8))
        assert numbers(reader, range(20), start_at=8) == [(i, i) for i in range(8, 20)]
    with pytest.raises(Cancelled):
        open_video(data, PLAIN, cancel=token)


ROTATIONS = [
    (90, False, False),
    (180, False, False),
    (-90, False, False),
    (0, True, False),
    (0, False, True),
    (90, True, False),
]


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_rotation_metadata_is_applied(rotation: tuple[float, bool, bool]) -> None:
    """FFmpeg's matrix for (degrees, hflip, vflip): the decoded frame is turned counterclockwise, then flipped."""
    stored = quarters(48, 80)
    expected = np.rot90(stored, int(rotation[0]) // 90)
    expected = expected[:, ::-1] if rotation[1] else expected
    expected = expected[::-1] if rotation[2] else expected
    with open_video(video([stored] * 3, rotation=rotation), PLAIN) as reader:
        assert reader.size == expected.shape[:2]
        frames = [rgb for _, rgb in reader.frames([0, 2])]
    assert len(frames) == 2
    for rgb in frames:
        assert np.abs(rgb.astype(int) - expected).mean() < 12


def test_variable_frame_rate_uses_the_time_stamps() -> None:
    times = [0, 1, 2, 3, 30, 60, 61, 90]
    for container in ("mp4", "matroska"):
        with open_video(video(greys(8), container=container, times=times), PLAIN) as reader:
            assert reader.timestamps_s == pytest.approx([t / 30 for t in times], abs=0.002)
            assert reader.num_frames == 8
            assert reader.fps is not None
            chosen = sample_by_fps(8, reader.fps, 1.0, timestamps_s=reader.timestamps_s)
            assert numbers(reader, range(8)) == [(i, i) for i in range(8)]
        assert chosen[0] == 0
        assert 4 in chosen  # one second in comes frame 4; counting frames alone would give 2


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_few_and_odd_numbers_of_frames(count: int) -> None:
    for container in ("mp4", "matroska", "mpegts"):
        with open_video(video(greys(count), container=container), PLAIN) as reader:
            assert reader.num_frames == count
            assert numbers(reader, range(count)) == [(i, i) for i in range(count)]


def test_a_file_without_duration_or_count() -> None:
    class Unseekable(io.BytesIO):
        def seekable(self) -> bool:
            return False

    out = Unseekable()
    target: Any = av.open(out, "w", format="matroska", options={"live": "1"})
    stream = target.add_stream("libx264", rate=30)
    stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
    for i, rgb in enumerate(greys(10)):
        frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
        frame.pts = i
        target.mux(stream.encode(frame))
    target.mux(stream.encode())
    target.close()
    data = out.getvalue()
    with av.open(io.BytesIO(data)) as plain:
        assert plain.duration is None
        assert plain.streams.video[0].frames == 0
    with open_video(data, PLAIN) as reader:
        assert reader.num_frames == 10
        assert reader.duration_s == pytest.approx(1 / 3, abs=0.01)
        assert numbers(reader, range(10)) == [(i, i) for i in range(10)]


def test_truncated_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noisy = [rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(30)]
    path = tmp_path / "cut.mp4"
    data = video(noisy, options={"g": "5"})
    path.write_bytes(data[: len(data) // 2])  # its index is at the end
    with pytest.raises(MediaError, match="truncated or damaged") as caught:
        open_video(path, PLAIN)
    assert str(path) in str(caught.value)


def _damaged_in_the_middle() -> bytes:
    """An MP4 whose frames 10 to 19 are overwritten, its index intact."""
    rng = np.random.default_rng(0)
    data = bytearray(
        video([rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(20)], codec="mjpeg", container="mov")
    )
    with av.open(io.BytesIO(bytes(data))) as plain:
        places = [(p.pos, p.size) for p in plain.demux(video=0) if p.size]
    for position, size in places[10:]:
        assert position is not None
        data[position : position + size] = bytes(size)
    return bytes(data)


def test_damage_in_mid_stream_keeps_the_frames_before_it_and_says_so() -> None:
    with open_video(_damaged_in_the_middle(), PLAIN) as reader:
        assert reader.num_frames == 20
        given = [index for index, _ in reader.frames(range(20))]
        assert given == list(range(10))
        assert "frames from 10 on are missing" in str(reader.note)


def test_truncated_fragments_keep_the_frames_before_the_cut() -> None:
    rng = np.random.default_rng(0)
    noisy = [rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(30)]
    data = video(noisy, container="matroska", options={"g": "5"})
    with open_video(data[: len(data) * 2 // 3], PLAIN) as reader:
        given = len(list(reader.frames(range(reader.num_frames))))
    assert 10 <= given < 30


def test_files_that_are_no_videos(tmp_path: Path) -> None:
    sound = io.BytesIO()
    with wave.open(sound, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(8000)
        writer.writeframes(bytes(4000))
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{tmp_path}/x.ts\n#EXT-X-ENDLIST\n".encode()
    (tmp_path / "x.ts").write_bytes(video(greys(5), container="mpegts"))
    concat = f"ffconcat version 1.0\nfile {tmp_path}/x.ts\n".encode()
    cases = [
        (sound.getvalue(), "only sound"),
        (playlist, "not a video"),
        (concat, "not a video"),
        (b"hello, this is text", "text that starts"),
        (b"", "empty"),
        (encoded(pattern(8, 8), "PNG"), "still PNG picture"),
        (encoded(pattern(8, 8), "JPEG"), "still JPEG picture"),
        (Image.fromarray(pattern(8, 8)), "isn't a video"),
    ]
    for source, said in cases:
        with pytest.raises(MediaError, match=said):
            open_video(source, PLAIN)
    with pytest.raises(MediaError, match="did you mean"):
        open_video(tmp_path / "y.ts", PLAIN)
    (tmp_path / "empty.mp4").touch()
    with pytest.raises(MediaError, match="an empty file"):
        open_video(tmp_path / "empty.mp4", PLAIN)


def test_an_unknown_codec_is_named() -> None:
    for container, known, unknown in (("mp4", b"avc1", b"zzzz"), ("matroska", b"V_MPEG4/ISO/AVC", b"V_MPEG4/ISO/ZZZ")):
        data = video(greys(5), container=container).replace(known, unknown)
        with pytest.raises(MediaError, match=unknown.decode()):
            open_video(data, PLAIN)


def test_no_frames_in_a_container() -> None:
    data = bytearray(video(greys(3)))
    for box, entries in ((b"stsz", 8), (b"stts", 4), (b"stsc", 4), (b"stco", 4), (b"ctts", 4), (b"stss", 4)):
        at = data.find(box)
        if at >= 0:
            data[at + 4 + entries : at + 8 + entries] = bytes(4)
    with pytest.raises(MediaError, match=r"no frames in it|damaged"):
        open_video(bytes(data), PLAIN)


def test_limits_and_bounds_hold_for_videos() -> None:
    data = video(greys(4, 96, 128))
    with pytest.raises(MediaError, match="more than the limit of 10,000"):
        open_video(data, PLAIN, limits=MediaLimits(max_source_pixels=10_000))
    with open_video(data, MediaOptions(max_image_size=64)) as reader:
        assert reader.original_size == (96, 128)
        assert reader.size == (48, 64)
        assert [rgb.shape for _, rgb in reader.frames([0, 3])] == [(48, 64, 3)] * 2


def test_odd_sizes() -> None:
    frames = [quarters(37, 53)] * 2
    out = io.BytesIO()
    target: Any = av.open(out, "w", format="matroska")
    stream = target.add_stream("ffv1", rate=30)
    stream.width, stream.height, stream.pix_fmt = 53, 37, "bgr0"
    for i, rgb in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
        frame.pts = i
        target.mux(stream.encode(frame))
    target.mux(stream.encode())
    target.close()
    with open_video(out.getvalue(), PLAIN) as reader:
        assert all((rgb == frames[0]).all() for _, rgb in reader.frames([0, 1]))


def test_a_path_is_read_from_the_file_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "v.mp4"
    path.write_bytes(video(greys(6)))
    with open_video(path, PLAIN) as reader, open_video(path.read_bytes(), PLAIN) as other:
        assert reader.source_hash == other.source_hash
        assert reader.name == str(path)
        assert numbers(reader, range(6)) == numbers(other, range(6))
    reader.close()
    if os.path.isdir("/proc/self/fd"):
        links = [
            os.readlink(f"/proc/self/fd/{n}")
            for n in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{n}")
        ]
        assert str(path) not in links


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animations_are_videos_with_durations(kind: str) -> None:
    frames = [Image.fromarray(rgb) for rgb in greys(6, 8, 10)]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(
        frames[0], kind, save_all=True, append_images=frames[1:], duration=[100, 200, 300, 400, 500, 0], **options
    )
    with open_video(data, PLAIN) as reader:
        assert reader.num_frames == 6
        assert reader.timestamps_s == pytest.approx([0, 0.1, 0.3, 0.6, 1.0, 1.5])
        assert reader.duration_s == pytest.approx(1.6)  # no time at all counts as 0.1 s
        assert reader.fps == pytest.approx(6 / 1.6)
        assert numbers(reader, range(6)) == [(i, i) for i in range(6)]
        assert numbers(reader, [1, 4], start_at=1) == [(4, 4)]
        assert numbers(reader, [0, 5]) == [(0, 0), (5, 5)]


def test_transparent_animation_frames_are_composited_on_white() -> None:
    frames = []
    for n in range(3):
        rgba = np.zeros((6, 6, 4), np.uint8)
        rgba[n, n] = (200, 0, 0, 255)
        frames.append(Image.fromarray(rgba))
    for kind in ("PNG", "WEBP", "GIF"):
        options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {"disposal": 2}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)
        with open_video(data, PLAIN) as reader:
            for index, rgb in reader.frames(range(3)):
                expected = np.full((6, 6, 3), 255)
                expected[index, index] = (200, 0, 0)
                assert np.abs(rgb.astype(int) - expected).max() <= 8, (kind, index)


def test_a_default_image_is_not_a_frame() -> None:
    default = Image.fromarray(np.full((8, 10, 3), 255, np.uint8))
    frames = [Image.fromarray(rgb) for rgb in greys(3, 8, 10)]
    data = encoded(default, "PNG", save_all=True, append_images=frames, default_image=True, duration=100)
    with open_video(data, PLAIN) as reader:
        assert numbers(reader, range(reader.num_frames)) == [(0, 0), (1, 1), (2, 2)]


def test_a_cut_animation_keeps_its_first_frames() -> None:
    rng = np.random.default_rng(0)
    frames = [Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(8)]
    for kind in ("GIF", "PNG", "WEBP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
        try:
            reader = open_video(data[: len(data) * 6 // 10], PLAIN)
        except MediaError:
            assert kind == "WEBP"  # its decoder refuses the whole file
            continue
        with reader:
            given = list(reader.frames(range(reader.num_frames)))
            assert 3 <= len(given) < 8
            assert len(given) == reader.num_frames or "missing" in str(reader.note)


def test_durations_of_damaged_headers_end_early() -> None:
    frames = [Image.fromarray(rgb) for rgb in greys(4, 8, 8)]
    for kind, name in (("GIF", "GIF"), ("PNG", "PNG"), ("WEBP", "WebP")):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
        assert durations_s(data, name) == pytest.approx([0.1] * 4)
        for length in range(len(data)):
            assert len(durations_s(data[:length], name)) <= 4


def test_pages_of_a_tiff() -> None:
    frames = [Image.fromarray(rgb) for rgb in greys(3, 8, 10)]
    data = encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    with open_video(data, MediaOptions(fps=2.0)) as reader:
        assert (reader.num_frames, reader.fps, reader.duration_s) == (3, 2.0, 1.5)
        assert numbers(reader, range(3)) == [(0, 0), (1, 1), (2, 2)]
    with open_video(data, PLAIN) as reader:
        assert (reader.fps, reader.duration_s, reader.timestamps_s) == (None, None, None)


def test_folders_lists_and_arrays(tmp_path: Path, monkeypatch: Any) -> None:
    frames = greys(12, 8, 10)
    for n, rgb in enumerate(frames):
        (tmp_path / f"frame{n}.png").write_bytes(encoded(rgb, "PNG"))
    mixed = [frames[0], Image.fromarray(frames[1]), tmp_path / "frame2.png", encoded(frames[3], "PNG")]
    for source, count in ((tmp_path, 12), (str(tmp_path), 12), (frames, 12), (tuple(mixed), 4), (np.stack(frames), 12)):
        with open_video(source, MediaOptions(fps=4)) as reader:
            assert (reader.num_frames, reader.fps, reader.size) == (count, 4, (8, 10))
            assert reader.duration_s == count / 4
            assert numbers(reader, range(count)) == [(i, i) for i in range(count)]
    loaded = []
    real = mlxgen_vision.frames.load_opened
    monkeypatch.setattr(
        mlxgen_vision.frames, "load_opened", lambda o, *a, **k: loaded.append(o.name) or real(o, *a, **k)
    )
    with open_video(tmp_path, PLAIN) as reader:
        assert reader.fps is None
        assert numbers(reader, [0, 4, 8], start_at=1) == [(4, 4), (8, 8)]
    assert [Path(name).name for name in loaded] == ["frame4.png", "frame8.png"]


def test_frames_that_do_not_fit_together(tmp_path: Path) -> None:
    with open_video([pattern(8, 10), pattern(8, 10), pattern(9, 10)], PLAIN) as reader:
        with pytest.raises(MediaError, match="frame 2 is 10x9, the first is 10x8"):
            list(reader.frames(range(3)))
        assert len(list(reader.frames([0, 1]))) == 2
    for source in (
        [],
        (),
        [[pattern(4, 4)]],
        tmp_path,
        np.zeros((0, 4, 4, 3), np.uint8),
        np.zeros((4, 4, 3), np.uint8),
    ):
        with pytest.raises(MediaError):
            open_video(source, PLAIN)
    (tmp_path / "a.png").write_bytes(encoded(pattern(8, 8), "PNG"))
    (tmp_path / "b.png").write_bytes(encoded(pattern(8, 8), "PNG")[:60])
    with open_video(tmp_path, PLAIN) as reader, pytest.raises(MediaError, match=r"b\.png"):
        list(reader.frames([0, 1]))


def test_wrong_indices_are_refused_before_anything_is_decoded() -> None:
    with open_video(greys(5), PLAIN) as reader:
        for wrong in ([5], [-1], [2, 1]):
            with pytest.raises(InvalidValueError):
                reader.frames(wrong)
        with pytest.raises(InvalidValueError):
            reader.frames([0, 1], start_at=3)


def test_sampling() -> None:
    assert sample_uniform(10, 4) == [0, 2, 5, 7]
    assert sample_uniform(3, 9) == [0, 1, 2]
    assert sample_by_fps(90, 30.0, 2.0) == [0, 15, 30, 45, 60, 75]
    assert sample_by_fps(90, 29.97, 2.0, max_frames=3) == [0, 30, 60]
    assert sample_by_fps(1, 30.0, 2.0) == [0]
    assert sample_by_fps(10, 5.0, 100.0) == list(range(10))
    for num_frames, rate, fps in ((90, 30.0, 2.0), (100, 25.0, 3.0), (7, 30.0, 8.0), (250, 23.976, 1.0)):
        times = [i / rate for i in range(num_frames)]
        assert sample_by_fps(num_frames, rate, fps, timestamps_s=times) == sample_by_fps(num_frames, rate, fps)
    # 3 s of 10 frames each, then one frame that stays for 3 s
    times = [i / 10 for i in range(31)]
    assert sample_by_fps(31, 31 / 6, 1.0, timestamps_s=times) == [0, 10, 20, 30]
    for wrong in ((0, 30.0, 1.0), (5, 0.0, 1.0), (5, 30.0, -1.0)):
        with pytest.raises(InvalidValueError):
            sample_by_fps(*wrong)


def test_a_crafted_display_matrix_that_is_no_quarter_turn_is_noted() -> None:
    data = bytearray(video(greys(3), rotation=(90, False, False)))
    at = data.find(b"tkhd") + 44
    struct.pack_into(">iiiiiiiii", data, at, 46341, 46341, 0, -46341, 46341, 0, 0, 0, 1 << 30)
    with open_video(bytes(data), PLAIN) as reader:
        assert reader.size == (48, 64)
        assert "90 degrees" in str(reader.note)
