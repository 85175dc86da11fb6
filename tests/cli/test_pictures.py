"""Pictures and video on the command line: order, patterns, prepared once, previewed."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli.commands import call, of
from PIL import Image

from mlxgen.cli.media import media_parts
from mlxgen.cli.parser import parse
from mlxgen.cli.settings import UsageError
from mlxgen.errors import MediaError
from mlxgen.request import ImagePart, VideoPart


def parts_of(*flags: str) -> list[Any]:
    return media_parts(parse(["generate", "--prompt", "x", *flags]))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.png", "c.jpg", "clip.mp4", "other.gif", "x[1].png"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def test_order_of_the_command_line(files: Path) -> None:
    parts = parts_of("--image", "b.png", "--video", "clip.mp4", "--image", "a.png", "c.jpg")
    assert [(type(part), part.source) for part in parts] == [
        (ImagePart, "b.png"),
        (VideoPart, "clip.mp4"),
        (ImagePart, "a.png"),
        (ImagePart, "c.jpg"),
    ]


def test_patterns_in_name_order_but_names_first(files: Path) -> None:
    assert [part.source for part in parts_of("--image", "*.png")] == ["a.png", "b.png", "x[1].png"]
    assert [part.source for part in parts_of("--image", "x[1].png")] == ["x[1].png"]
    with pytest.raises(MediaError, match=r"no file matches '\*\.tiff'"):
        parts_of("--image", "*.tiff")


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        (["--video", "clip.mp4", "--fps", "2"], [2.0]),
        (["--fps", "2", "--video", "clip.mp4"], [2.0]),
        (["--video", "clip.mp4", "--fps", "1", "--video", "other.gif", "--fps", "3"], [1.0, 3.0]),
        (["--video", "clip.mp4", "other.gif", "--fps", "4"], [4.0, 4.0]),
        (["--fps", "5", "--video", "clip.mp4", "--fps", "1", "--video", "other.gif"], [1.0, 5.0]),
        (["--video", "clip.mp4"], [None]),
    ],
)
def test_fps_belongs_to_the_video_before_it(files: Path, flags: list[str], rates: list[float | None]) -> None:
    assert [part.options.fps for part in parts_of(*flags)] == rates


def test_limits_are_for_all_and_checked(files: Path) -> None:
    part = parts_of("--image", "a.png", "--max-pixels", "5000", "--min-pixels", "100", "--max-image-size", "64")[0]
    assert (part.options.max_pixels, part.options.min_pixels, part.options.max_image_size) == (5000, 100, 64)
    assert not part.options.allow_urls
    for flags in (["--max-pixels", "0"], ["--max-frames", "-1"], ["--min-pixels", "9", "--max-pixels", "8"]):
        with pytest.raises(UsageError):
            parts_of("--image", "a.png", *flags)
    for rate in ("0", "-1", "nan", "inf"):
        with pytest.raises(UsageError, match="--fps"):
            parts_of("--video", "clip.mp4", f"--fps={rate}")


def test_bytes_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"picture")))
    assert parts_of("--image", "-")[0].source == b"picture"
    with pytest.raises(MediaError, match="empty"):
        parts_of("--image", "-")


def test_missing_file_names_the_nearest(files: Path) -> None:
    with pytest.raises(MediaError, match=r"did you mean 'clip\.mp4'"):
        parts_of("--video", "clib.mp4")
    with pytest.raises(MediaError, match="there is no folder"):
        parts_of("--image", "nowhere/a.png")


needs_kit = pytest.mark.skipif(
    not os.environ.get("MLXGEN_PARITY"), reason="MLXGEN_PARITY isn't set: no small vision-language model to run"
)


def picture(path: Path, size: tuple[int, int], seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)


@needs_kit
@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_prepared_once_then_the_files_may_go(capfdbinary: Any, tmp_path: Path, family: str) -> None:
    model = os.path.join(os.environ["MLXGEN_PARITY"], family, "hf")
    for number, size in enumerate([(96, 64), (60, 90)]):
        picture(tmp_path / f"{number}.png", size, number)
    common = (*("--model", model, "--prompt", "What is this?", "--max-tokens", "6", "--ignore-eos"),)
    media = ("--image", str(tmp_path / "*.png"))
    whole = call(capfdbinary, "generate", *common, *media, "--json")
    assert whole.code == 0, whole.err
    expected = [(phase, index) for phase, index in (("prepare", 0), ("prepare", 1), ("encode", 0), ("encode", 1))]
    inputs = of(whole.events, "input")
    assert [(event["phase"], event["index"]) for event in inputs] == expected
    assert {event["kind"] for event in inputs} == {"image"}

    path = str(tmp_path / "tonight.mlxgen")
    prepared = call(capfdbinary, "prepare", *common, *media, "--json", "--snapshot", path)
    assert prepared.code == 0
    assert of(prepared.events, "input") == inputs
    assert of(prepared.events, "prefill") == []
    usage = of(prepared.events, "finished")[0]["usage"]
    assert (usage["images_prepared"], usage["images_encoded"], usage["prefilled_tokens"]) == (2, 2, 0)
    for file in tmp_path.glob("*.png"):
        file.unlink()

    sheet = tmp_path / "seen.jpg"
    shown = call(capfdbinary, "snapshots", "show", path, "--json", "--preview", str(sheet))
    assert shown.code == 0, shown.err
    content = json.loads(shown.out)
    assert content["phase"] == "prefill"
    assert [(medium["prepared"], medium["encoded"]) for medium in content["media"]] == [(True, True)] * 2
    assert all(shape[-1] == 3 for medium in content["media"] for shape in medium["shapes"])
    with Image.open(sheet) as drawn:
        assert drawn.width > 192
        # Two noisy pictures on a white ground: neither blank nor full.
        assert 0.02 < np.mean(np.asarray(drawn.convert("L")) < 200) < 0.9
    text = call(capfdbinary, "snapshots", "show", path).out.decode()
    assert "1 of 1 prepared" in text

    resumed = call(capfdbinary, "resume", path, "--json")
    assert resumed.code == 0, resumed.err
    assert of(resumed.events, "input") == []
    assert of(resumed.events, "token") == of(whole.events, "token")


def test_namespace_of_chat_has_the_limits() -> None:
    args = parse(["chat", "--max-pixels", "77"])
    assert isinstance(args, argparse.Namespace)
    assert args.max_pixels == 77
