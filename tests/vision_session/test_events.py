"""What a progress bar is told of pictures and frames, over stops and turns."""

from __future__ import annotations

import pytest
from vision_harness.jobs import Counts, counting, image, model, new_session, reply, sources

from mlxgen.events import InputProgress
from mlxgen.request import MediaOptions, VideoPart
from mlxgen.resumption import ResumeOptions, resume

FAMILY = "qwen2_5_vl"


def inputs(events):
    return [(e.kind, e.phase, e.index, e.total) for e in events if isinstance(e, InputProgress)]


@pytest.fixture
def folder(tmp_path):
    return sources(tmp_path / "media")


def test_pictures_and_frames_are_counted_over_the_whole_prompt(folder) -> None:
    session = new_session(FAMILY, counting(model(FAMILY), Counts()))
    video, short = VideoPart(folder / "V"), VideoPart(folder / "V", MediaOptions(max_frames=2))
    events = inputs(session.stream([image(folder, "A"), video, image(folder, "B"), short, "?"], reply=reply(2)))
    frames = [("frame", "prepare", i, 4) for i in range(4)], [("frame", "prepare", i, 6) for i in (4, 5)]
    prepared = [("image", "prepare", 0, 2), *frames[0], ("image", "prepare", 1, 2), *frames[1]]
    encoded = [(kind, "encode", index, 6 if kind == "frame" else 2) for kind, _, index, _ in prepared]
    assert events == prepared + encoded
    # The next turn counts its own.
    assert inputs(session.stream([image(folder, "C"), image(folder, "D"), "?"], reply=reply(2))) == [
        ("image", phase, index, 2) for phase in ("prepare", "encode") for index in (0, 1)
    ]


def test_a_resumed_run_goes_on_counting(folder, tmp_path) -> None:
    prompt = [*[image(folder, name) for name in "ABCD"], "?"]
    session = new_session(FAMILY)
    events = session.stream(prompt, reply=reply(2))
    assert inputs(next(events) for _ in range(2)) == [("image", "prepare", index, 4) for index in (0, 1)]
    path = session.save(tmp_path / "a.mlxgen")
    with resume(path, options=ResumeOptions(model=counting(model(FAMILY), Counts()))) as again:
        rest = inputs(again.continue_())
    assert rest == [("image", "prepare", i, 4) for i in (2, 3)] + [("image", "encode", i, 4) for i in range(4)]
