"""A `text_config`, in today's and in the older form, as mlx-lm's model arguments want it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# What transformers' LlamaConfig assumes where a published config is silent.
_LLAMA_DEFAULTS: Final = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}

# The same for Gemma3TextConfig; google/gemma-3-*-it publishes little more than widths and depth.
_GEMMA3_DEFAULTS: Final = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


def llama_arguments(text_config: Mapping[str, Any]) -> dict[str, Any]:
    """For `mlx_lm.models.llama`: flat `rope_theta` and `rope_scaling`, and every default filled in.

    The default of `rms_norm_eps` is Idefics3's own (transformers' `Idefics3Config`).
    """
    arguments = _LLAMA_DEFAULTS | _given(text_config)
    return arguments | _flat_rope(text_config.get("rope_parameters"), "rope_theta", "rope_scaling")


def gemma3_arguments(text_config: Mapping[str, Any]) -> dict[str, Any]:
    """For `mlx_lm.models.gemma3_text`: rotary bases and scaling per layer kind, and the pattern of sliding layers."""
    arguments = _GEMMA3_DEFAULTS | _given(text_config)
    nested = text_config.get("rope_parameters") or {}
    arguments |= _flat_rope(nested.get("full_attention"), "rope_theta", "rope_scaling")
    arguments |= _flat_rope(nested.get("sliding_attention"), "rope_local_base_freq", None)
    arguments.setdefault("sliding_window_pattern", _pattern(text_config))
    return arguments


def _given(text_config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in text_config.items() if value is not None}


def _flat_rope(parameters: Mapping[str, Any] | None, base: str, scaling: str | None) -> dict[str, Any]:
    if not parameters:
        return {}
    flat = {base: parameters["rope_theta"]} if "rope_theta" in parameters else {}
    if scaling is not None and parameters.get("rope_type", "default") != "default":
        flat[scaling] = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return flat


def _pattern(text_config: Mapping[str, Any]) -> int:
    kinds = text_config.get("layer_types")
    if kinds and "full_attention" in kinds:
        return int(kinds.index("full_attention")) + 1
    return int(text_config.get("_sliding_window_pattern") or 6)
