"""Preparing and encoding unit by unit: what is counted, kept, continued and refused."""

from __future__ import annotations

import json
import shutil

import av
import numpy as np
import pytest
from mlxgen_vision.processors import qwen_media
from parity_kit import encode, prepare
from PIL import Image
from vision_qwen import tiny_qwen
from vision_qwen.conftest import family

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import InvalidValueError, MediaError, PlaceholderError
from mlxgen.inputs import PreparedMedium
from mlxgen.request import ImagePart, MediaOptions, VideoPart


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny_qwen.write(tmp_path_factory.mktemp("tiny"), "qwen3_vl_moe", "mlx")
    return family("qwen3_vl").load(path, json.loads((path / "config.json").read_text()))


@pytest.fixture
def frames(tmp_path, picture):
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in range(5):
        Image.fromarray(picture(40, 56, number)).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def film(tmp_path, picture):
    path = tmp_path / "film.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(30):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture(48, 64, number), format="rgb24")))
        file.mux(stream.encode())
    return path


def test_a_picture_is_one_unit(model, picture):
    units = model.prepare(ImagePart(picture(40, 56)))
    medium = next(units)
    assert medium.prepared
    assert medium.kind == "image"
    assert [frame.dtype for frame in medium.frames] == [np.uint8]
    assert medium.frames[0].shape == (*(8 * side for side in medium.geometry["grid"][1:]), 3)
    with pytest.raises(StopIteration):
        next(units)
    json.dumps(medium.geometry)


def test_a_folder_of_frames_is_used_whole_and_the_last_is_repeated_to_an_even_number(model, frames):
    medium = prepare(model, VideoPart(frames, MediaOptions(fps=2.0)))
    assert medium.num_frames == 5
    assert medium.geometry["indices"] == [0, 1, 2, 3, 4]
    assert medium.geometry["grid"][0] == model.num_parts(medium) == 3
    assert medium.geometry["timestamps"] == [0.25, 1.25, 2.0]
    assert medium.geometry["second_per_grid"] == 1.0
    assert [model.frames_of_part(medium, part) for part in range(3)] == [2, 2, 1]
    encode(model, medium)
    size = medium.geometry["grid"][1] * medium.geometry["grid"][2] // 4
    assert [part["features"].shape for part in medium.features] == [(size, tiny_qwen.HIDDEN)] * 3
    json.dumps(medium.geometry)


def test_frames_can_be_limited(model, frames):
    medium = prepare(model, VideoPart(frames, MediaOptions(fps=2.0, max_frames=3)))
    assert medium.geometry["indices"] == [0, 2, 4]
    assert medium.geometry["second_per_grid"] == pytest.approx(2 / (3 / 5 * 2.0))


def test_one_frame_is_a_video_too(model, picture):
    medium = prepare(model, VideoPart([picture(40, 56)]))
    assert medium.geometry["grid"][0] == 1
    assert medium.geometry["timestamps"] == [0.0]
    assert encode(model, medium) >= 1


def test_a_file_is_sampled(model, film):
    medium = prepare(model, VideoPart(film, MediaOptions(fps=2.0)))
    assert medium.geometry["indices"] == [0, 6, 12, 17, 23, 29]  # 3 s at 2 a second
    assert medium.geometry["timestamps"] == pytest.approx([0.3, 1.45, 2.6])
    assert medium.geometry["second_per_grid"] == pytest.approx(1.0)
    text = model.expand("<|vision_start|><|video_pad|><|vision_end|>?", [medium])
    assert text.startswith("<0.3 seconds><|vision_start|><|video_pad|>")
    assert text.count("<|vision_start|>") == text.count("<|vision_end|>") == text.count("seconds") == 3
    assert text.endswith("<|video_pad|><|vision_end|>?")


def test_a_stop_keeps_every_finished_frame_and_a_second_call_goes_on(model, frames, monkeypatch):
    resized: list[int] = []
    real = qwen_media.resize
    monkeypatch.setattr(qwen_media, "resize", lambda *args: (resized.append(1), real(*args))[1])
    part = VideoPart(frames, MediaOptions(fps=2.0))
    whole = prepare(model, part)
    assert len(resized) == 5
    for stop_after in (1, 2, 4):
        resized.clear()
        cancel = CancelToken()
        medium = PreparedMedium("video")
        units = model.prepare(part, partial=medium, cancel=cancel)
        for _ in range(stop_after):
            next(units)
        cancel.cancel()
        with pytest.raises(Cancelled):
            next(units)
        assert len(medium.frames) == len(resized) == stop_after
        assert not medium.prepared
        again = prepare(model, part, partial=medium)
        assert len(resized) == 5
        assert again.content_hash == whole.content_hash
        assert again.geometry == whole.geometry
        assert all(np.array_equal(a, b) for a, b in zip(again.frames, whole.frames, strict=True))


def test_a_token_that_is_cancelled_already_opens_nothing(model, tmp_path):
    cancel = CancelToken()
    cancel.cancel()
    for part in (ImagePart(tmp_path / "missing.png"), VideoPart(tmp_path / "missing.mp4")):
        with pytest.raises(Cancelled):
            next(model.prepare(part, cancel=cancel))


def test_a_complete_medium_needs_no_source(model, frames):
    part = VideoPart(frames, MediaOptions(fps=2.0))
    medium = prepare(model, part)
    shutil.rmtree(frames)
    units = model.prepare(part, partial=medium)
    with pytest.raises(StopIteration) as end:
        next(units)
    assert end.value.value is medium


def test_an_incomplete_medium_is_only_continued_from_the_same_content(model, frames, picture):
    part = VideoPart(frames, MediaOptions(fps=2.0))
    medium = next(model.prepare(part))
    Image.fromarray(picture(40, 56, 99)).save(frames / "4.png")
    with pytest.raises(MediaError, match="frames"):
        next(model.prepare(part, partial=medium))


def test_what_the_model_sees_is_the_identity(model, frames, picture):
    part = VideoPart(frames, MediaOptions(fps=2.0))
    medium = prepare(model, part)
    assert prepare(model, part).content_hash == medium.content_hash
    hashes = {
        medium.content_hash,
        prepare(model, VideoPart(frames, MediaOptions(fps=4.0))).content_hash,
        prepare(model, VideoPart([picture(40, 56, n) for n in (4, 3, 2, 1, 0)], MediaOptions(fps=2.0))).content_hash,
        prepare(model, ImagePart(picture(40, 56))).content_hash,
        prepare(model, ImagePart(picture(40, 56, 1))).content_hash,
    }
    assert len(hashes) == 5


def test_a_file_that_breaks_off_gives_the_frames_it_has(model, film, tmp_path, caplog):
    broken = tmp_path / "broken.mkv"
    with av.open(str(film)) as source, av.open(str(broken), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    data = bytearray(broken.read_bytes())
    data[len(data) * 2 // 3 :] = bytes(len(data) - len(data) * 2 // 3)
    broken.write_bytes(data)
    medium = prepare(model, VideoPart(broken, MediaOptions(fps=10.0)))
    assert medium.prepared
    assert 0 < len(medium.frames) < 30
    steps = -(-len(medium.frames) // 2)
    assert medium.geometry["grid"][0] == len(medium.geometry["timestamps"]) == steps
    assert len(medium.geometry["indices"]) == len(medium.geometry["sha256"]) == len(medium.frames)
    encode(model, medium)


def test_encoding_an_unfinished_medium_is_refused(model, frames):
    medium = next(model.prepare(VideoPart(frames)))
    with pytest.raises(InvalidValueError, match="prepar"):
        model.encode(medium, 0)


def test_placeholders_and_media_must_agree(model, picture, frames):
    image, video = prepare(model, ImagePart(picture(40, 56))), prepare(model, VideoPart(frames))
    assert model.expand("no picture", []) == "no picture"
    for text, media in (
        ("<|image_pad|>", []),
        ("<|image_pad|>", [image, image]),
        ("nothing", [image]),
        ("<|image_pad|>", [video]),
        ("<|vision_start|><|video_pad|><|vision_end|><|image_pad|>", [image, video]),
    ):
        with pytest.raises(PlaceholderError):
            model.expand(text, media)
    assert model.expand("<|image_pad|> <|video_pad|>", [image, video]).count("<|video_pad|>") == 3 * 8


def test_spans_are_found_in_order_and_checked(model, picture, frames):
    image, video = prepare(model, ImagePart(picture(40, 56))), prepare(model, VideoPart(frames))
    rows = image.geometry["grid"][1] * image.geometry["grid"][2] // 4
    size = video.geometry["grid"][1] * video.geometry["grid"][2] // 4
    pad, film = tiny_qwen.IMAGE, tiny_qwen.VIDEO
    ids = [1, *[pad] * rows, *[pad] * rows, 2, *[film] * size, 3, *[film] * size, *[film] * size]
    spans = model.locate(ids, [image, image, video])
    assert [(span.start, span.medium, span.row_start) for span in spans] == [
        (1, 0, 0),
        (1 + rows, 1, 0),
        (2 + 2 * rows, 2, 0),
        (3 + 2 * rows + size, 2, size),
        (3 + 2 * rows + 2 * size, 2, 2 * size),
    ]
    assert all(span.end - span.start == span.row_end - span.row_start for span in spans)
    for wrong_ids, media in (
        (ids, [image, image]),
        (ids, [image, video, image]),
        (ids[:-1], [image, image, video]),
        ([1, *[pad] * (rows - 1), 2], [image]),
        ([1, 2], [image]),
    ):
        with pytest.raises(PlaceholderError):
            model.locate(wrong_ids, media)
    assert model.locate([1, 2], []) == ()
    assert model.positions([1, 2], [], ()) == (None, 0)
