"""Every vision family against what transformers computed on the same tiny weights, pictures and prompts.

`scripts/make_references.py` made the files and says where transformers departs from how the models were trained. The
checkpoints are rebuilt here from the same seeds; pictures go through mlxgen's own opening, resizing, cutting and
tokenising.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from parity_kit import Case, build_input, greedy

from mlxgen.request import ImagePart, MediaOptions, VideoPart
from references import prompts
from references.cases import VIDEOS, picture, video
from references.tiny_checkpoints import tokenizer_of, weight_sum, write_checkpoint
from references.tiny_families import FAMILIES

HERE = Path(__file__).parent
EVERYTHING = [(family, name) for family, made in FAMILIES.items() for name in prompts.case_names(made.kind)]
# The linear attention's two ways of computing, by chunks and by steps, round differently.
CHUNK_TOLERANCE = 1e-4


@cache
def _arrays(family: str) -> dict[str, np.ndarray]:
    with np.load(HERE / f"{family}.npz") as archive:
        return dict(archive)


@pytest.fixture(scope="session")
def load(tmp_path_factory):
    """Build a family's checkpoint and load it, once per test run."""

    @cache
    def make(name: str):
        family = FAMILIES[name]
        folder = tmp_path_factory.mktemp(name)
        weights = write_checkpoint(folder, family)
        reference = float(_arrays(name)["weight_sum"])
        assert weight_sum(weights) == pytest.approx(reference, rel=1e-9), "not the weights the reference was made with"
        module = {"qwen3_vl_moe": "qwen3_vl", "qwen3_5_moe": "qwen3_5"}.get(family.kind, family.kind)
        loader = importlib.import_module(f"mlxgen_vision.families.{module}").FAMILY
        assert family.kind in loader.model_types
        return loader.load(folder, family.config()), tokenizer_of(family)

    return make


def _case(family: str, name: str) -> Case:
    arrays = {
        key.removeprefix(f"{name}/"): value for key, value in _arrays(family).items() if key.startswith(f"{name}/")
    }
    kind = FAMILIES[family].kind
    parts = [
        ImagePart(picture(source))
        if medium == "image"
        else VideoPart(video(source), MediaOptions(fps=VIDEOS[source].fps))
        for medium, source in prompts.media(name)
    ]
    return Case(
        family=family,
        name=name,
        prompt=prompts.prompt(kind, name),
        messages=None,
        add_special_tokens=False,
        parts=tuple(parts),
        input_ids=arrays["input_ids"].tolist(),
        tokens=arrays["tokens"].tolist(),
        flags=(),
        grids={},
        arrays=arrays,
    )


def _grids(inputs, kind: str) -> list[list[int]]:
    return [medium.geometry["grid"] for medium in inputs.media if medium.kind == kind]


def _features(inputs) -> np.ndarray:
    """The rows of all media in the order of their placeholders."""
    rows = []
    for span in sorted(inputs.spans, key=lambda span: span.start):
        parts = mx.concatenate([part["features"] for part in inputs.media[span.medium].features])
        rows.append(np.array(parts[span.row_start : span.row_end]))
    return np.concatenate(rows)


@pytest.mark.parametrize(("family", "name"), EVERYTHING)
def test_ids_grids_positions_features_logits_and_tokens_equal_the_reference(load, family, name):
    model, tokenizer = load(family)
    case = _case(family, name)
    inputs = build_input(model, tokenizer, case)
    assert inputs.token_ids == case.input_ids
    for kind, key in (("image", "grids"), ("video", "video_grids")):
        if key in case.arrays:
            assert _grids(inputs, kind) == case.arrays[key].tolist()
    if "position_ids" in case.arrays:
        length = len(inputs.token_ids)
        ours = np.tile(np.arange(length), (3, 1)) if inputs.position_ids is None else inputs.position_ids
        assert np.array_equal(ours, case.arrays["position_ids"])
        assert inputs.rope_delta == case.arrays["position_ids"].max() + 1 - length
    assert ("features" in case.arrays) == bool(case.parts)
    if case.parts:
        features = _features(inputs)
        assert np.abs(features[case.arrays["feature_rows"]] - case.arrays["features"]).max() <= 1e-3
    runs = [greedy(model, inputs, chunk_size=size) for size in (16, 2048)]
    for run in runs:
        assert np.abs(run.last_logits - case.arrays["last_logits"]).max() <= 1e-3
        assert run.tokens == case.tokens
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= CHUNK_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_the_references_can_tell_models_apart(load, family):
    """A picture turned upside down must show, or equality would prove little."""
    model, tokenizer = load(family)
    case = _case(family, "two")
    turned = [ImagePart(np.ascontiguousarray(part.source[::-1])) for part in case.parts]
    changed = Case(**{name: getattr(case, name) for name in Case.__dataclass_fields__} | {"parts": tuple(turned)})
    inputs = build_input(model, tokenizer, changed)
    assert inputs.token_ids == case.input_ids
    run = greedy(model, inputs, num_tokens=1, caches=make_prompt_cache(model.language))
    assert np.abs(run.last_logits - case.arrays["last_logits"]).max() >= 1e-2
