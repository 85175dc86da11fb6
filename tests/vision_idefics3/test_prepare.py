"""`prepare` unit by unit: stopped anywhere, gone on, and what identifies a medium."""

from __future__ import annotations

import numpy as np
import pytest
from mlx_lm.models import llama
from mlxgen_vision import preparation
from mlxgen_vision.families import smolvlm
from mlxgen_vision.families.idefics3 import Idefics3Model, Parts, TiledVision
from mlxgen_vision.families.smolvlm import SmolVLMModel
from mlxgen_vision.frames import ArrayReader
from mlxgen_vision.limits import DEFAULT_LIMITS
from mlxgen_vision.processors.idefics3 import TilingSettings
from mlxgen_vision.processors.settings import Normalisation
from mlxgen_vision.processors.smolvlm import FrameSettings
from mlxgen_vision.source import open_source
from mlxgen_vision.towers.siglip import SiglipConfig
from PIL import Image

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import MediaError, PlaceholderError, UnsupportedError
from mlxgen.inputs import PreparedMedium
from mlxgen.request import ImagePart, MediaOptions, VideoPart

IMAGE_TOKEN = 4


def make_parts() -> Parts:
    tower = SiglipConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=16, patch_size=4
    )
    language = llama.Model(llama.ModelArgs("llama", 16, 1, 16, 1, 1e-5, 32))
    return Parts(language, TiledVision(tower, 16, 2), IMAGE_TOKEN, 2)


@pytest.fixture(scope="module")
def model() -> SmolVLMModel:
    tiling = TilingSettings(16, 32, True, "lanczos", Normalisation())
    frames = FrameSettings(16, 16, "lanczos", 1.0, 6, Normalisation())
    return SmolVLMModel(make_parts(), tiling, frames, template_has_video=True)


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def finish(model, part, partial=None) -> tuple[PreparedMedium, int]:
    units, count = model.prepare(part, partial=partial), 0
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value, count
        count += 1


def stop_after(model, part, num_units) -> PreparedMedium:
    """Cancel while the consumer handles unit `num_units`; the medium as it was yielded then."""
    token = CancelToken()
    units = model.prepare(part, cancel=token)
    for _ in range(num_units):
        medium = next(units)
    token.cancel()
    with pytest.raises(Cancelled):
        next(units)
    return medium


def test_a_cancelled_token_opens_nothing(model, tmp_path):
    token = CancelToken()
    token.cancel()
    for part in (ImagePart(tmp_path / "no such.png"), VideoPart(tmp_path / "no such.mp4")):
        with pytest.raises(Cancelled):
            next(model.prepare(part, cancel=token))


def test_a_picture_is_one_unit_with_all_its_tiles(model):
    medium, count = finish(model, ImagePart(noise(1, 20, 30)))
    assert count == 1
    assert medium.prepared
    assert medium.frames[0].shape == (5, 16, 16, 3)
    assert medium.frames[0].dtype == np.uint8
    assert medium.geometry == {"rows": 2, "columns": 2, "num_tiles": 5}
    assert (model.num_parts(medium), model.frames_of_part(medium, 0)) == (1, 1)


def test_a_complete_medium_is_not_opened_again(model, tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(noise(1, 20, 30)).save(path)
    medium, _ = finish(model, ImagePart(path))
    path.unlink()
    assert finish(model, ImagePart(path), partial=medium) == (medium, 0)


def test_content_identifies_what_the_model_sees(model):
    one = finish(model, ImagePart(noise(1, 20, 30)))[0].content_hash
    assert finish(model, ImagePart(Image.fromarray(noise(1, 20, 30))))[0].content_hash == one
    assert finish(model, ImagePart(noise(2, 20, 30)))[0].content_hash != one
    assert finish(model, ImagePart(noise(1, 20, 30), MediaOptions(max_image_size=16)))[0].content_hash != one
    assert len(one) == 64


def test_a_video_goes_on_where_it_was_stopped(model):
    part = VideoPart(noise(3, 5, 12, 20), MediaOptions(fps=2.0))
    whole, count = finish(model, part)
    assert count == 5
    for stopped_at in range(1, 5):
        medium = stop_after(model, part, stopped_at)
        assert len(medium.frames) == stopped_at
        assert not medium.prepared
        resumed, rest = finish(model, part, partial=medium)
        assert rest == 5 - stopped_at
        assert resumed.content_hash == whole.content_hash
        assert all(np.array_equal(a, b) for a, b in zip(resumed.frames, whole.frames, strict=True))


def test_the_plan_of_a_begun_video_is_kept(model):
    frames = noise(3, 6, 12, 20)
    medium = stop_after(model, VideoPart(frames, MediaOptions(fps=2.0, max_frames=3)), 1)
    resumed, rest = finish(model, VideoPart(frames, MediaOptions(fps=2.0)), partial=medium)
    assert (rest, resumed.geometry["indices"]) == (2, [0, 2, 5])


def test_a_begun_video_is_continued_from_the_same_frames_only(model):
    medium = stop_after(model, VideoPart(noise(3, 5, 12, 20), MediaOptions(fps=2.0)), 2)
    with pytest.raises(MediaError, match="has changed"):
        finish(model, VideoPart(noise(4, 5, 12, 20), MediaOptions(fps=2.0)), partial=medium)


def test_frames_become_squares_and_parts(model):
    medium, _ = finish(model, VideoPart(noise(3, 5, 12, 20), MediaOptions(fps=2.0)))
    assert [frame.shape for frame in medium.frames] == [(16, 16, 3)] * 5
    assert medium.geometry == {"indices": [0, 1, 2, 3, 4], "fps": 2.0, "duration_s": 2.5}
    assert model.num_parts(medium) == 5
    *_, last = model.encode(medium, 3)
    assert last["features"].shape == (4, 16)
    text = model.expand("<video>?", [medium])
    assert text.startswith("You are provided the following series of five frames from a 0:00:02 [H:MM:SS] video.")
    assert text.count("<image>") == 5 * 4
    assert "Frame from 00:02:" in text


def test_an_animation_is_sampled_like_a_video(model, tmp_path):
    path = tmp_path / "a.gif"
    first, *others = (Image.fromarray(frame).quantize() for frame in noise(5, 12, 16, 16))
    first.save(path, save_all=True, append_images=others, duration=250, loop=0)
    medium, _ = finish(model, VideoPart(path))
    assert medium.geometry == {"indices": [0, 5, 11], "fps": 4.0, "duration_s": 3.0}


def test_a_damaged_video_ends_early_and_is_complete_then(model, monkeypatch, caplog):
    class Damaged(ArrayReader):
        def _frames(self, indices, cancel):
            for index, rgb in super()._frames(indices, cancel):
                if index == 3:
                    return
                yield index, rgb

    def opened(source, options, *, cancel):
        return Damaged(open_source(source, kind="video"), options, limits=DEFAULT_LIMITS)

    monkeypatch.setattr(preparation, "open_video", opened)
    part = VideoPart(noise(3, 5, 12, 20), MediaOptions(fps=2.0))
    medium, count = finish(model, part)
    assert count == 3
    assert medium.prepared
    assert (medium.num_frames, medium.geometry["indices"]) == (3, [0, 1, 2])
    assert "3 of 5 frames" in caplog.text
    assert "series of three frames from a 0:00:02" in model.expand("<video>", [medium])
    resumed, rest = finish(model, part, partial=stop_after(model, part, 2))
    assert (rest, resumed.content_hash) == (1, medium.content_hash)


def test_frames_without_a_rate_are_reported(model, caplog):
    medium, _ = finish(model, VideoPart(noise(6, 2, 16, 16)))
    assert medium.geometry["fps"] == smolvlm.ASSUMED_FPS
    assert "no frame rate known" in caplog.text


def test_idefics3_takes_no_video():
    model = Idefics3Model("idefics3", make_parts(), TilingSettings(16, 32, True, "lanczos", Normalisation()))
    with pytest.raises(UnsupportedError, match="pictures only"):
        next(model.prepare(VideoPart(noise(1, 2, 8, 8))))


def test_placeholders_and_media_must_match(model):
    picture, _ = finish(model, ImagePart(noise(1, 16, 16)))
    video, _ = finish(model, VideoPart(noise(3, 2, 12, 20), MediaOptions(fps=1.0)))
    with pytest.raises(PlaceholderError, match="2 placeholders"):
        model.expand("<image> and <image>", [picture])
    with pytest.raises(PlaceholderError, match="0 placeholders"):
        model.expand("nothing here", [picture])
    with pytest.raises(PlaceholderError, match="placeholder 2 is <image>"):
        model.expand("<image><image>", [picture, video])
    assert model.expand("no media", []) == "no media"


def test_spans_are_found_or_refused(model):
    picture, _ = finish(model, ImagePart(noise(1, 16, 32)))
    run = [IMAGE_TOKEN] * 4
    ids = [1, *run, 2, *run, 3, *run, 5]
    spans = model.locate(ids, [picture])
    assert [(span.start, span.end, span.medium, span.row_start, span.row_end) for span in spans] == [
        (1, 5, 0, 0, 4),
        (6, 10, 0, 4, 8),
        (11, 15, 0, 8, 12),
    ]
    with pytest.raises(PlaceholderError, match="3 image tokens"):
        model.locate([1, *run[1:], 2, *run, 3, *run], [picture])
    with pytest.raises(PlaceholderError, match="2 runs"):
        model.locate([1, *run, 2, *run], [picture])
    with pytest.raises(PlaceholderError, match="3 runs"):
        model.locate(ids, [])


def test_a_template_that_knows_no_videos_gets_their_placeholder_as_text():
    tiling = TilingSettings(16, 32, True, "lanczos", Normalisation())
    frames = FrameSettings(16, 16, "lanczos", 1.0, 6, Normalisation())
    parts = ["See ", ImagePart("a.png"), VideoPart("b.mp4")]
    known = SmolVLMModel(make_parts(), tiling, frames, template_has_video=True)
    assert [item["type"] for item in known.content_for_template(parts)] == ["text", "image", "video"]
    old = SmolVLMModel(make_parts(), tiling, frames, template_has_video=False)
    assert old.content_for_template(parts)[2] == {"type": "text", "text": "<video>"}
