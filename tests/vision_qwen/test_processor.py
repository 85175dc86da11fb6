"""Sizes, sampling and patches. Expected sizes are from transformers 5.24's own functions, capped per frame."""

from __future__ import annotations

import json

import numpy as np
import pytest
from mlxgen_vision.processors.qwen import PixelBudget, QwenProcessor, smart_resize

from mlxgen.errors import MediaError, UnsupportedError
from mlxgen.request import MediaOptions

PLAIN = MediaOptions()


def processor(path, rule="frame", patch=14, **files):
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return QwenProcessor.read(path, rule, patch=patch, merge=2, temporal=2)


@pytest.mark.parametrize(
    ("size", "factor", "low", "high", "expected"),
    [
        ((1080, 1920), 28, 3136, 12845056, (1092, 1932)),
        ((3000, 4000), 28, 3136, 1003520, (840, 1148)),
        ((10, 10), 28, 3136, 12845056, (56, 56)),
        ((14, 2000), 28, 3136, 12845056, (28, 672)),
        ((5000, 7000), 32, 65536, 16777216, (3456, 4832)),
        ((42, 70), 28, 3136, 12845056, (56, 56)),  # halves round to even
    ],
)
def test_pictures_get_the_reference_size(size, factor, low, high, expected):
    assert smart_resize(size, factor, PixelBudget(low, high)) == expected


def test_an_extreme_aspect_ratio_is_an_error_that_says_what_to_do():
    with pytest.raises(MediaError, match=r"2010 × 10 pixels.*200.*crop"):
        smart_resize((10, 2010), 28, PixelBudget(3136, 12845056))


@pytest.mark.parametrize(
    ("num_frames", "size", "budget", "expected"),
    [
        (768, (1080, 1920), (100352, 602112), (336, 644)),
        (8, (1080, 1920), (100352, 602112), (560, 1008)),
        (768, (2160, 3840), (3136, 12845056), (336, 644)),
    ],
)
def test_frames_share_a_videos_budget(tmp_path, num_frames, size, budget, expected):
    settings = {"size": {"shortest_edge": budget[0], "longest_edge": budget[1]}}
    video = processor(tmp_path, video_preprocessor_config=settings).video
    assert video.size(num_frames, size, PLAIN) == expected


@pytest.mark.parametrize(
    ("num_frames", "size", "expected"),
    [
        (8, (1080, 1920), (640, 1152)),
        (768, (1080, 1920), (128, 224)),
        (5, (720, 1280), (704, 1280)),
        (2, (20, 500), (32, 800)),
        (16, (64, 96), (64, 96)),
        (2, (16, 16), (64, 64)),
        (1, (16, 16), (64, 64)),  # one frame is repeated
    ],
)
def test_a_clip_is_sized_as_a_whole(tmp_path, num_frames, size, expected):
    settings = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "patch_size": 16}
    video = processor(tmp_path, "clip", 16, video_preprocessor_config=settings).video
    assert video.size(num_frames, size, PLAIN) == expected


@pytest.mark.parametrize("rule", ["frame", "clip"])
def test_the_callers_bounds_hold(tmp_path, rule):
    made = processor(tmp_path, rule)
    for image_or_video in (
        lambda options: made.image.size((1000, 1500), options),
        lambda options: made.video.size(16, (1000, 1500), options),
    ):
        small = image_or_video(MediaOptions(max_pixels=50_000))
        assert 25_000 < small[0] * small[1] <= 50_000
        large = image_or_video(MediaOptions(min_pixels=4_000_000))
        assert 4_000_000 <= large[0] * large[1] < 5_000_000
        assert all(side % 28 == 0 for side in (*small, *large))
    assert made.image.size((1000, 1500), MediaOptions(max_image_size=300)) == (196, 308)  # then the model's own rule


def test_the_callers_bounds_replace_the_models(tmp_path):
    made = processor(tmp_path, preprocessor_config={"min_pixels": 3136, "max_pixels": 100_000})
    assert made.image.size((1000, 1000), PLAIN) == (308, 308)
    assert made.image.size((1000, 1000), MediaOptions(max_pixels=1_000_000)) == (980, 980)


@pytest.mark.parametrize(
    ("num_frames", "fps", "options", "expected"),
    [
        (100, 25.0, PLAIN, [0, 14, 28, 42, 57, 71, 85, 99]),  # 4 s at 2 a second
        (101, 25.0, MediaOptions(fps=0.5), [0, 33, 67, 100]),  # never fewer than 4
        (3, 25.0, PLAIN, [0, 2]),
        (1, 25.0, PLAIN, [0]),
        (9, 3.0, MediaOptions(fps=3.0), [0, 1, 2, 3, 5, 6, 7, 8]),  # an even number
        (1000, 25.0, MediaOptions(max_frames=2), [0, 999]),
        (1000, 25.0, MediaOptions(max_frames=1), [0]),
    ],
)
def test_frames_are_sampled_as_qwen_vl_utils_does(tmp_path, num_frames, fps, options, expected):
    assert processor(tmp_path).video.sample(num_frames, fps, options) == expected


def test_a_clip_may_have_an_odd_number_of_frames(tmp_path):
    video = processor(tmp_path, "clip").video
    assert video.sample(9, 3.0, MediaOptions(fps=3.0)) == list(range(9))
    assert len(video.sample(100_000, 25.0, PLAIN)) == 768


def test_old_and_new_files_say_the_same(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    pixels = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3}
    sized = {"size": {"shortest_edge": 3136, "longest_edge": 28224}}
    first = processor(old, preprocessor_config=pixels | {"min_pixels": 3136, "max_pixels": 28224})
    second = processor(new, processor_config={"image_processor": pixels | sized, "video_processor": pixels | sized})
    assert first == second


def test_an_old_folders_video_takes_the_pictures_budget_but_no_more_than_768_tokens_a_frame(tmp_path):
    made = processor(tmp_path, preprocessor_config={"min_pixels": 3136, "max_pixels": 12845056})
    assert made.image.budget == PixelBudget(3136, 12845056)
    assert made.video.budget == PixelBudget(3136, 768 * 28 * 28)


def test_patch_sizes_that_differ_from_the_towers_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"patch_size is 16, the vision tower's 14"):
        processor(tmp_path, preprocessor_config={"patch_size": 16})


def test_patches_hold_their_pixels_channel_first_merge_block_by_merge_block(tmp_path):
    settings = processor(
        tmp_path, preprocessor_config={"image_mean": [0, 0, 0], "image_std": [1, 1, 1], "rescale_factor": 1.0}
    ).image.patches
    frames = [np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8) for seed in (0, 1)]
    patches = settings.patches(frames)
    assert patches.shape == (24, 3 * 2 * 14 * 14)
    order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (0, 4), (0, 5), (1, 4), (1, 5), (2, 0)]
    for number, (row, column) in enumerate(order):
        expected = [f[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14] for f in frames]
        assert np.array_equal(patches[number].reshape(3, 2, 14, 14), np.stack(expected).transpose(3, 0, 1, 2))
    assert np.array_equal(settings.patches(frames[:1]), settings.patches([frames[0], frames[0]]))
