"""Gemma 3's pictures: squares, crops, and what a chunk of a prompt may cut."""

from __future__ import annotations

import json

import numpy as np
import pytest
from mlxgen_vision.families.gemma3 import PoolingProjector
from mlxgen_vision.image import resize
from mlxgen_vision.processors.gemma3 import ImageWords, PanAndScan, SquareSettings, crop_boxes, square_images
from mlxgen_vision.processors.settings import Normalisation
from mlxgen_vision.towers.siglip import SiglipConfig
from parity_kit import image_part, load_tokenizer, needs_kit, prepare
from PIL import Image

from mlxgen.errors import UnsupportedError
from mlxgen.request import VideoPart

SIZES = [(100, 100), (100, 119), (100, 120), (100, 251), (50, 400), (39, 400), (251, 100), (400, 45), (41, 82)]
RULE = PanAndScan(40, 4, 1.2)


def with_kit(test):
    for mark in needs_kit:
        test = mark(test)
    return test


@pytest.mark.parametrize("size", SIZES)
def test_crops_equal_transformers(picture, size):
    processor = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    theirs = processor.Gemma3ImageProcessorPil(
        size={"height": 112, "width": 112},
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=RULE.min_crop,
        pan_and_scan_max_num_crops=RULE.max_crops,
        pan_and_scan_min_ratio_to_activate=RULE.min_ratio,
    )
    rgb = picture(*size)
    made = theirs(images=[Image.fromarray(rgb)])
    ours = square_images(rgb, SquareSettings(112, 112, "bilinear", Normalisation(), RULE), resize)
    assert made["num_crops"] == [len(ours) - 1] == [len(crop_boxes(*size, RULE))]
    pixels = np.array(made["pixel_values"]).transpose(0, 2, 3, 1)
    # Up to a step of Pillow 13, which takes the vertical pass first where a picture gets relatively lower.
    assert np.abs(pixels * 127.5 + 127.5 - ours).max() <= 1.01


def test_settings_are_read_in_old_and_new_forms(tmp_path):
    image = {"size": {"height": 896, "width": 896}, "resample": 2, "do_pan_and_scan": None}
    old, new, on = (tmp_path / name for name in ("old", "new", "on"))
    for folder in (old, new, on):
        folder.mkdir()
    (old / "preprocessor_config.json").write_text(json.dumps(image))
    (new / "processor_config.json").write_text(json.dumps({"image_processor": image, "image_seq_length": 256}))
    (on / "preprocessor_config.json").write_text(
        json.dumps(image | {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 3})
    )
    assert SquareSettings.read(old) == SquareSettings.read(new)
    assert SquareSettings.read(old) == SquareSettings(896, 896, "bilinear", Normalisation(), None)
    assert SquareSettings.read(on).pan_and_scan == PanAndScan(256, 3, 1.2)
    (on / "preprocessor_config.json").write_text(json.dumps(image | {"size": {"longest_edge": 896}}))
    with pytest.raises(UnsupportedError, match="one height and width"):
        SquareSettings.read(on)


def test_words():
    words = ImageWords("<b>", "<i>", "<e>")
    block = "\n\n<b><i><i><e>\n\n"
    assert words.text(0, 2) == block
    assert words.text(2, 2) == (
        f"Here is the original image {block} and here are some crops to help you see better {block} {block}"
    )


def test_a_projector_that_does_not_fit_is_refused():
    with pytest.raises(UnsupportedError, match="mm_tokens_per_image 9"):
        PoolingProjector(SiglipConfig(image_size=128, patch_size=16), 8, 9)


@with_kit
@pytest.mark.parametrize("name", ["A", "B"])
def test_crops_have_blocks_of_their_own(load, name):
    """With pan and scan on, every crop is a run of tokens, a span and an atomic block."""
    model = load("hf")
    plain = model.settings
    try:
        model.settings = SquareSettings(112, 112, "bilinear", Normalisation(), RULE)
        medium = prepare(model, image_part(name))
    finally:
        model.settings = plain
    assert medium.geometry == {"num_crops": 2}
    assert medium.frames[0].shape == (3, 112, 112, 3)
    ids = load_tokenizer("gemma3", "hf").encode(model.expand("<start_of_image>!", [medium])).ids
    spans = model.locate(ids, [medium])
    assert [(span.row_start, span.row_end) for span in spans] == [(0, 16), (16, 32), (32, 48)]
    assert len(model.atomic(spans)) == 3
    *_, last = model.encode(medium, 0)
    assert last["features"].shape == (48, 64)


@with_kit
def test_no_video(load):
    with pytest.raises(UnsupportedError, match="pictures only"):
        next(load("hf").prepare(VideoPart("a.mp4")))
