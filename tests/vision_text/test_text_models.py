"""A text_config in every form as mlx-lm's arguments; which weights tie the output; LLaVA's layouts."""

from __future__ import annotations

import logging

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama, ministral3, qwen2, qwen3, qwen3_moe
from mlxgen_vision.layouts import read_split
from mlxgen_vision.text_models import build_text_model, load_text_model, text_arguments
from mlxgen_vision.towers.projectors import MlpProjector, ProjectorShape

from mlxgen.cancellation import NEVER
from mlxgen.errors import ModelLoadError, UnsupportedError

SMALL = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def test_rotary_settings_of_both_forms_become_the_same():
    old = SMALL | {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    new = SMALL | {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 4.0}}
    assert text_arguments(old, "qwen2", tied=False) == text_arguments(new, "qwen2", tied=False)
    plain = text_arguments(
        SMALL | {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}, "llama", tied=True
    )
    assert (plain["rope_theta"], plain["tie_word_embeddings"]) == (5000.0, True)
    assert "rope_scaling" not in plain


def test_a_missing_setting_is_transformers_default_and_a_null_is_none():
    missing = text_arguments({}, "mistral", tied=False)
    assert (missing["num_key_value_heads"], missing["head_dim"], missing["sliding_window"]) == (8, 128, 4096)
    assert "sliding_window" not in text_arguments({"sliding_window": None}, "mistral", tied=False)
    assert text_arguments({"num_attention_heads": 16}, "llama", tied=False)["num_key_value_heads"] == 16


@pytest.mark.parametrize(
    ("kind", "module"),
    [("llama", llama), ("mistral", llama), ("ministral3", ministral3), ("qwen2", qwen2), ("qwen3", qwen3)],
)
def test_every_kind_takes_embeddings_and_gives_logits(kind, module):
    model = build_text_model(SMALL | {"model_type": kind, "sliding_window": None}, default_kind="llama", tied=False)
    assert type(model) is module.Model
    hidden = model.model.embed_tokens(mx.array([[1, 2, 3]]))
    assert mx.array_equal(model(mx.array([[1, 2, 3]])), model(mx.array([[7, 7, 7]]), input_embeddings=hidden))


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_a_mixture_of_experts_with_experts_saved_one_by_one(name):
    config = SMALL | {"model_type": "qwen3_moe", name: 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    made = build_text_model(config, default_kind="llama", tied=False)
    assert type(made) is qwen3_moe.Model
    weights = {}
    for key, value in tree_flatten(made.parameters()):
        stem, _, layer = key.partition("switch_mlp.")
        if layer:
            weights |= {f"{stem}experts.{number}.{layer}": value[number] for number in range(3)}
        else:
            weights[key] = value
    loaded = load_text_model(config, weights, default_kind="llama")
    assert mx.array_equal(made(mx.array([[1, 2, 3]])), loaded(mx.array([[1, 2, 3]])))


def test_the_output_is_tied_exactly_if_the_checkpoint_has_none():
    made = build_text_model(SMALL | {"model_type": "qwen3"}, default_kind="llama", tied=False)
    weights = dict(tree_flatten(made.parameters()))
    config = SMALL | {"model_type": "qwen3", "tie_word_embeddings": True}
    assert "lm_head" in load_text_model(config, dict(weights), default_kind="llama")
    del weights["lm_head.weight"]
    config["tie_word_embeddings"] = False
    assert "lm_head" not in load_text_model(config, dict(weights), default_kind="llama")
    del weights["model.norm.weight"]
    with pytest.raises(ModelLoadError, match="the text model lacks 1 weights, first 'model.norm.weight'"):
        load_text_model(config, weights, default_kind="llama")


def test_what_mlx_lms_models_do_not_have(caplog):
    with pytest.raises(UnsupportedError, match="model_type 'mamba'; text models known here are llama, ministral3"):
        build_text_model({"model_type": "mamba"}, default_kind="llama", tied=False)
    with pytest.raises(UnsupportedError, match="sliding window from layer 1 of 2"):
        text_arguments(SMALL | {"use_sliding_window": True, "max_window_layers": 1}, "qwen2", tied=False)
    with caplog.at_level(logging.WARNING):
        build_text_model(SMALL | {"sliding_window": None}, default_kind="mistral", tied=False)
        assert not caplog.records
        build_text_model(SMALL | {"sliding_window": 512}, default_kind="mistral", tied=False)
    assert "beyond 512 tokens results differ" in caplog.text


LAYOUTS = {
    "today": ("model.language_model.", "lm_head.", "model.vision_tower.", "model.multi_modal_projector."),
    "transformers 4": ("language_model.model.", "language_model.lm_head.", "vision_tower.", "multi_modal_projector."),
    "old CLIP": (
        "language_model.model.",
        "language_model.lm_head.",
        "vision_tower.vision_model.",
        "multi_modal_projector.",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_and_vision_are_told_apart_in_every_layout(tmp_path, layout):
    text, head, tower, projector = LAYOUTS[layout]
    weights = {f"{text}norm.weight": 1.0, f"{head}weight": 2.0, f"{tower}ln.weight": 3.0, f"{projector}l.bias": 4.0}
    weights |= {"image_newline": 5.0, f"{text}layers.0.self_attn.rotary_emb.inv_freq": 6.0}
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), {name: mx.array([value]) for name, value in weights.items()}
    )
    split = read_split(tmp_path, {}, extra={"image_newline": "image_newline"}, ignore=("inv_freq",), cancel=NEVER)
    assert {name: value.item() for name, value in split.text.items()} == {
        "model.norm.weight": 1.0,
        "lm_head.weight": 2.0,
    }
    expected = {"vision_tower.ln.weight": 3.0, "multi_modal_projector.l.bias": 4.0, "image_newline": 5.0}
    assert {name: value.item() for name, value in split.vision.items()} == expected
    with pytest.raises(ModelLoadError, match="1 weights of the checkpoint have no place.*'image_newline'"):
        read_split(tmp_path, {}, ignore=("inv_freq",), cancel=NEVER)
    with pytest.raises(UnsupportedError, match="quantised with 'fp8'"):
        read_split(tmp_path, {"quantization_config": {"quant_method": "fp8"}}, cancel=NEVER)


def test_projectors_have_the_activation_their_config_names():
    assert "bias" not in MlpProjector(ProjectorShape(4, 6, bias=False)).linear_1
    assert MlpProjector(ProjectorShape(4, 6))(mx.zeros((2, 3, 4))).shape == (2, 3, 6)
    with pytest.raises(UnsupportedError, match="'relu6'"):
        MlpProjector(ProjectorShape(4, 6, hidden_act="relu6"))
