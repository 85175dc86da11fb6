"""PaddleOCR-VL in every layout: as published, as transformers 5 saves it, as converters for MLX name it.

That the published layout gives transformers' results is shown in `references/test_references.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlxgen_vision.families import paddleocr_vl
from parity_kit import build_input, greedy, prepare
from references.cases import picture
from references.tiny_checkpoints import tokenizer_of, write_checkpoint
from references.tiny_families import FAMILIES

from mlxgen.errors import MediaError, ModelLoadError, PlaceholderError, UnsupportedError
from mlxgen.request import ImagePart, MediaOptions, VideoPart

FAMILY = FAMILIES["paddleocr_vl"]
PROMPT = "<|begin_of_sentence|>User: <|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>OCR:\nAssistant: "
Weights = dict[str, mx.array]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("paddle") / "published"
    write_checkpoint(folder, FAMILY)
    return folder


def load(folder: Path) -> paddleocr_vl.PaddleOCRVLModel:
    return paddleocr_vl.FAMILY.load(folder, json.loads((folder / "config.json").read_text()))


def with_weights(published: Path, folder: Path, weights: Weights) -> Path:
    shutil.copytree(published, folder)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def weights_of(folder: Path) -> Weights:
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


def logits(model: paddleocr_vl.PaddleOCRVLModel, prompt: str = PROMPT) -> np.ndarray:
    medium = prepare(model, ImagePart(picture("plain")))
    text = model.expand(prompt, [medium])
    ids = tokenizer_of(FAMILY).encode(text, add_special_tokens=False).ids
    spans = model.locate(ids, [medium])
    assert [(span.end - span.start, span.row_start) for span in spans] == [(20, 0)]
    case = type("Case", (), {"prompt": prompt, "add_special_tokens": False, "parts": ()})()
    run = greedy(model, build_input(model, tokenizer_of(FAMILY), case, media=[medium]), num_tokens=1)
    return run.last_logits


def renamed(weights: Weights, *pairs: tuple[str, str]) -> Weights:
    """Each weight under its new prefix, the first that fits."""
    made = {}
    for name, array in weights.items():
        old, new = next((pair for pair in pairs if name.startswith(pair[0])), ("", ""))
        made[new + name[len(old) :]] = array
    assert made.keys() != weights.keys()
    return made


def for_mlx(weights: Weights) -> Weights:
    """Names and shapes of mlx-vlm: one matrix for queries, keys and values, convolutions channel-last."""
    made = renamed(
        weights,
        ("visual.vision_model.encoder.", "visual."),
        ("visual.vision_model.", "visual."),
        ("mlp_AR.", "visual.projector."),
        ("model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    )
    for name in [name for name in made if name.startswith("visual.") and ".q_proj." in name]:
        parts = [made.pop(name.replace(".q_proj.", f".{which}_proj.")) for which in "qkv"]
        made[name.replace(".q_proj.", ".qkv.")] = mx.concatenate(parts)
    convolution = "visual.embeddings.patch_embedding.weight"
    made[convolution] = mx.contiguous(made[convolution].transpose(0, 2, 3, 1))
    return made


def test_every_layout_is_the_same_model(published, tmp_path):
    plain = weights_of(published)
    expected = logits(load(published))
    inside = renamed(
        plain, ("visual.", "model.visual."), ("mlp_AR.", "model.projector."), ("model.", "model.language_model.")
    )
    converted = for_mlx(plain)
    for number, weights in enumerate((inside, converted)):
        folder = with_weights(published, tmp_path / str(number), weights)
        assert np.array_equal(logits(load(folder)), expected)


def test_a_flat_config_is_the_nested_one(published, tmp_path):
    """As published: the text model's numbers at the top."""
    shutil.copytree(published, tmp_path / "flat")
    config = json.loads((published / "config.json").read_text())
    text = config.pop("text_config")
    text.pop("model_type")
    (tmp_path / "flat" / "config.json").write_text(json.dumps(text | config))
    assert np.array_equal(logits(load(tmp_path / "flat")), logits(load(published)))


def test_what_no_version_reads_is_left_out(published, tmp_path):
    tower = "visual.vision_model."
    surplus = {
        f"{tower}embeddings.packing_position_embedding.weight": mx.zeros((8, 32)),
        f"{tower}head.probe": mx.zeros((1, 1, 32)),
        f"{tower}head.attention.in_proj_weight": mx.zeros((96, 32)),
    }
    folder = with_weights(published, tmp_path / "surplus", weights_of(published) | surplus)
    assert np.array_equal(logits(load(folder)), logits(load(published)))
    other = with_weights(published, tmp_path / "other", weights_of(published) | {"adapter.weight": mx.zeros((2, 2))})
    with pytest.raises(ModelLoadError, match="no place in this model"):
        load(other)


def test_a_quantised_conversion_equals_its_weights_dequantised(published, tmp_path):
    packed, plain = {}, {}
    for name, weight in for_mlx(weights_of(published)).items():
        packed[name] = plain[name] = weight
        if weight.ndim == 2 and weight.shape[-1] % 32 == 0:
            stem = name.removesuffix(".weight")
            parts = mx.quantize(weight, group_size=32, bits=8)
            packed |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
            plain[name] = mx.dequantize(*parts, group_size=32, bits=8)
    assert "visual.layers.0.self_attn.qkv.scales" in packed
    folders = [with_weights(published, tmp_path / n, w) for n, w in (("packed", packed), ("plain", plain))]
    apart = np.abs(logits(load(folders[0])) - logits(load(folders[1]))).max()
    assert apart <= 1e-4


def test_start_and_end_are_written_whether_or_not_the_template_did(published):
    model = load(published)
    bare = PROMPT.replace("<|IMAGE_START|>", "").replace("<|IMAGE_END|>", "")
    medium = prepare(model, ImagePart(picture("plain")))
    assert model.expand(bare, [medium]) == model.expand(PROMPT, [medium])
    with pytest.raises(PlaceholderError, match="1 placeholders"):
        model.expand(PROMPT, [medium, medium])
    with pytest.raises(PlaceholderError, match="no medium for it"):
        model.locate([FAMILY.token("<|IMAGE_PLACEHOLDER|>")] * 21, [medium])


def test_a_short_side_grows_to_a_token_first(published):
    """As `smart_resize` of transformers' `image_processing_paddleocr_vl.py`."""
    settings = load(published).parts.processor.image
    plain = MediaOptions()
    assert settings.size((12, 600), plain) == (28, 952)
    assert settings.size((1, 190), plain) == (28, 1876)
    assert settings.size((600, 12), plain) == (952, 28)
    assert settings.size((100, 130), plain) == (112, 140)
    assert settings.size((100, 130), MediaOptions(max_pixels=5000)) == (56, 56)
    with pytest.raises(MediaError, match="over 200 times"):
        settings.size((1, 201), plain)


def test_videos_and_settings_of_another_model_are_refused(published, tmp_path):
    with pytest.raises(UnsupportedError, match="takes pictures only"):
        next(load(published).prepare(VideoPart(np.zeros((2, 8, 8, 3), np.uint8))))
    shutil.copytree(published, tmp_path / "merge")
    config = json.loads((published / "config.json").read_text())
    config["vision_config"]["spatial_merge_size"] = 4
    (tmp_path / "merge" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="merge_size"):
        load(tmp_path / "merge")
