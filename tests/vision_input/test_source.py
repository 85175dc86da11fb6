from __future__ import annotations

import base64
import errno
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlxgen_vision.image import load_image
from mlxgen_vision.limits import MediaLimits
from mlxgen_vision.signature import identify
from mlxgen_vision.source import natural_key, open_source, read_frame
from PIL import Image
from vision_input.inputs import encoded, pattern, video

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import MediaError
from mlxgen.request import MediaOptions

PLAIN = MediaOptions()
PICTURE = pattern(9, 7)
DATA = encoded(PICTURE, "PNG")


def loads(source: Any) -> None:
    assert (load_image(source, PLAIN).rgb == PICTURE).all()


def test_every_form_of_the_same_picture(tmp_path: Path) -> None:
    path = tmp_path / "ü 1.png"
    path.write_bytes(DATA)
    text = base64.b64encode(DATA).decode()
    wrapped = "\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    late = io.BytesIO(DATA)
    late.read()
    for source in (path, str(path), DATA, bytearray(DATA), memoryview(DATA), late, Image.fromarray(PICTURE), PICTURE):
        loads(source)
    for source in (text, wrapped, text.rstrip("="), f"data:image/png;base64,{text}", f"DATA:;base64,{text}"):
        loads(source)
    loads("data:image/png," + "".join(f"%{byte:02x}" for byte in DATA))
    with open(path, "rb") as file:
        loads(file)


def test_a_stream_that_cannot_seek_is_read_from_where_it_is() -> None:
    read, write = os.pipe()
    os.write(write, DATA)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        loads(file)


def test_base64_of_a_jpeg_is_not_taken_for_a_path() -> None:
    text = base64.b64encode(encoded(np.zeros((8, 8, 3), np.uint8), "JPEG")).decode()
    assert text.startswith("/9j/")
    assert load_image(text, PLAIN).rgb.shape == (8, 8, 3)
    with pytest.raises(MediaError, match="base64"):
        load_image(text[: len(text) // 2] + "!" + text[len(text) // 2 :], PLAIN)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"just some words\n", "text that starts 'just some words"),
        (b"<!doctype html><html>404", "web page"),
        (b'<?xml version="1.0"?><svg/>', "SVG"),
        (b"%PDF-1.7\n", "PDF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x00\x01\x02\x03" * 50, "unknown kind"),
        (b"\x00\x00\x01\x00\x01\x00" + bytes(60), "ICO"),
    ],
)
def test_files_that_are_no_pictures_say_what_they_are(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(content)
    with pytest.raises(MediaError, match=said) as caught:
        load_image(path, PLAIN)
    assert str(path) in str(caught.value)


def test_a_video_given_as_an_image_says_so() -> None:
    with pytest.raises(MediaError, match="give it as a video"):
        load_image(video([np.zeros((32, 32, 3), np.uint8)] * 2), PLAIN)


def test_a_missing_path_suggests_the_closest(tmp_path: Path) -> None:
    folder = tmp_path / "holiday"
    folder.mkdir()
    (folder / "Beach-01.png").write_bytes(DATA)
    with pytest.raises(MediaError, match=r"did you mean .*Beach-01.png"):
        load_image(folder / "beach_01.png", PLAIN)
    with pytest.raises(MediaError, match=r"did you mean .*holiday"):
        load_image(tmp_path / "holidays" / "Beach-01.png", PLAIN)
    with pytest.raises(MediaError, match="no such file; check the path"):
        load_image(folder / "zzz", PLAIN)
    for strange in ("x" * 5000, "a\0b", "", "  "):
        with pytest.raises(MediaError):
            load_image(strange, PLAIN)


def test_folders_devices_pipes_and_odd_types(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(DATA)
    with pytest.raises(MediaError, match=r"a folder, not a picture; give one of its pictures \('a\.png'"):
        load_image(tmp_path, PLAIN)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(MediaError, match="neither a file nor a folder"):
            load_image(path, PLAIN)
    for strange in (None, 5, {"path": "a.png"}, [DATA], io.StringIO("text")):
        with pytest.raises(MediaError):
            load_image(strange, PLAIN)


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(DATA)

    def refuse(*args: Any, **rest: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("mlxgen_vision.source.open", refuse, raising=False)  # root may read everything
    with pytest.raises(MediaError, match="Permission denied"):
        load_image(path, PLAIN)


def test_more_bytes_than_the_limit_are_not_read() -> None:
    class Endless(io.RawIOBase):
        given = 0

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            self.given += size
            return bytes(size)

    endless = Endless()
    with pytest.raises(MediaError, match="more than the limit of 10,000,000"):
        load_image(endless, PLAIN, limits=MediaLimits(max_source_bytes=10_000_000))
    assert endless.given < 12_000_000
    with pytest.raises(MediaError, match="more than the limit"):
        load_image(DATA, PLAIN, limits=MediaLimits(max_source_bytes=len(DATA) - 1))


def test_a_stop_comes_between_blocks() -> None:
    token = CancelToken()

    class Slow(io.RawIOBase):
        blocks = 0

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            self.blocks += 1
            if self.blocks == 3:
                token.cancel("deadline")
            return bytes(size)

    slow = Slow()
    with pytest.raises(Cancelled, match="deadline"):
        load_image(slow, PLAIN, cancel=token)
    assert slow.blocks == 3


def test_the_position_of_a_picture_file_does_not_matter_but_its_content_does(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(DATA)
    (tmp_path / "b.png").write_bytes(DATA)
    assert load_image(tmp_path / "a.png", PLAIN).source_hash == load_image(tmp_path / "b.png", PLAIN).source_hash


def test_a_folder_is_hashed_in_natural_order_and_watched_for_changes(tmp_path: Path) -> None:
    for n in (10, 9, 1):
        (tmp_path / f"f{n}.png").write_bytes(encoded(np.full((4, 4, 3), n, np.uint8), "PNG"))
    (tmp_path / ".DS_Store").write_bytes(b"x")
    (tmp_path / "Thumbs.db").write_bytes(b"x")
    opened = open_source(tmp_path, kind="video")
    assert isinstance(opened.data, tuple)
    assert [Path(frame.name).name for frame in opened.data] == ["f1.png", "f9.png", "f10.png"]
    as_list = open_source([tmp_path / "f1.png", str(tmp_path / "f9.png"), tmp_path / "f10.png"], kind="video")
    assert as_list.source_hash == opened.source_hash
    shuffled = open_source([tmp_path / "f9.png", tmp_path / "f1.png", tmp_path / "f10.png"], kind="video")
    assert shuffled.source_hash != opened.source_hash
    (tmp_path / "f9.png").write_bytes(DATA)
    with pytest.raises(MediaError, match=r"f9\.png: the file was changed"):
        read_frame(opened.data[1])
    (tmp_path / "notes.txt").write_bytes(b"x")
    with pytest.raises(MediaError, match=r"'notes\.txt' in the folder isn't a picture"):
        open_source(tmp_path, kind="video")


def test_natural_order() -> None:
    names = ["f10.png", "f2.png", "F1.png", "f2a.png", "2", "10", "1b", "a"]
    assert sorted(names, key=natural_key) == ["1b", "2", "10", "a", "F1.png", "f2.png", "f2a.png", "f10.png"]


def test_signatures() -> None:
    assert identify(b"\x00\x00\x00\x1cftypmif1\x00\x00\x00\x00mif1avifmiaf").name == "AVIF"
    assert identify(b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic").name == "HEIC"
    assert identify(b"\x00\x00\x00\x18ftypisom\x00\x00\x00\x00isommp42").category == "video"
    assert identify(b"BMW is a make of cars").category == "text"
    assert identify("é".encode()[:1]).category == "unknown"


def test_heic_names_the_extra_or_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "pillow_heif":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MediaError, match=r"pip install 'mlxgen\[heic\]'"):
        load_image(b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + bytes(100), PLAIN)


def test_heic_is_turned_once() -> None:
    pillow_heif = pytest.importorskip("pillow_heif", reason="pillow-heif isn't installed (pip install 'mlxgen[heic]')")
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = np.zeros((32, 64, 3), np.uint8)
    picture[:, :20] = (255, 0, 0)
    out = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(picture)).save(out, exif=exif.tobytes(), quality=90)
    rgb = load_image(out.getvalue(), PLAIN).rgb
    assert rgb.shape in ((32, 64, 3), (64, 32, 3))
    assert rgb[0, 0, 0] > 240
    with pytest.raises(MediaError):
        load_image(out.getvalue()[:400], PLAIN)
