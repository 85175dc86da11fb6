"""Text settings in old, new and sparse forms give mlx-lm the same arguments."""

from __future__ import annotations

from mlxgen_vision.text_config import gemma3_arguments, llama_arguments

LINEAR = {"factor": 8.0, "rope_type": "linear"}


def test_gemma3_old_new_and_sparse():
    sparse = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    old = sparse | {"rope_scaling": LINEAR, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    new = sparse | {
        "rope_parameters": {
            "full_attention": LINEAR | {"rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4,
    }
    wanted = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        "sliding_window": 1024,
        "rope_scaling": LINEAR,
    }
    for config in (old, new, sparse | {"rope_scaling": LINEAR}):
        made = gemma3_arguments(config)
        assert {key: made[key] for key in wanted} == wanted
    assert "rope_scaling" not in gemma3_arguments(sparse)


def test_gemma3_other_patterns():
    assert gemma3_arguments({"layer_types": ["sliding_attention", "full_attention"]})["sliding_window_pattern"] == 2
    assert gemma3_arguments({"_sliding_window_pattern": 4})["sliding_window_pattern"] == 4


def test_llama_old_new_and_sparse():
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    old = llama_arguments({"rope_theta": 5e5, "rope_scaling": scaling, "num_key_value_heads": 8})
    new = llama_arguments({"rope_parameters": scaling | {"rope_theta": 5e5}, "num_key_value_heads": 8})
    for made in (old, new):
        assert (made["rope_theta"], made["rope_scaling"], made["hidden_size"]) == (5e5, scaling, 4096)
    plain = llama_arguments({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}})
    assert plain["rope_theta"] == 1e5
    assert "rope_scaling" not in plain
    assert llama_arguments({"rope_scaling": None})["rope_theta"] == 1e4
