"""A `text_config`, in today's and in the older form, as mlx-lm's model arguments want it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mlxgen.errors import UnsupportedError

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

# And for Gemma4TextConfig. mlx-lm's own defaults are those of one published size.
_GEMMA4_DEFAULTS: Final = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "pad_token_id": 0,
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


def gemma4_arguments(text_config: Mapping[str, Any]) -> dict[str, Any]:
    """For `mlx_lm.models.gemma4_text`: the kinds of the layers, and what full-attention layers have of their own.

    transformers 5.24 saves the latter layer by layer (`per_layer_config`), published configs have it once
    (`global_head_dim`, `num_global_key_value_heads`). Raises `UnsupportedError` where mlx-lm's model can't follow.
    """
    arguments: dict[str, Any] = {**_GEMMA4_DEFAULTS, **_given(text_config)}
    if arguments.get("use_bidirectional_attention") == "all":
        raise UnsupportedError(
            'use_bidirectional_attention is "all": an encoder of whole texts, which can\'t generate; '
            "use a model that can"
        )
    kinds = list(
        arguments.get("layer_types")
        or [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(arguments["num_hidden_layers"])
        ]
    )
    kinds[-1] = "full_attention"
    arguments["layer_types"] = kinds
    arguments.setdefault("final_logit_softcapping", None)
    own = arguments.pop("per_layer_config", None)
    if own is None:
        arguments.setdefault("global_head_dim", 512)
    else:
        arguments |= _full_layers(kinds, own, arguments)
    if not arguments.get("attention_k_eq_v"):
        arguments.pop("num_global_key_value_heads", None)
    return arguments


def _full_layers(kinds: Sequence[str], own: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What all full-attention layers have of their own, told layer by layer."""
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    entries = [dict(own.get(str(index)) or {}) for index in full]
    known = {"head_dim", "num_key_value_heads"} if arguments.get("attention_k_eq_v") else {"head_dim"}
    alike = all(entry == entries[0] for entry in entries) and {int(key) for key in own} <= set(full)
    if not alike or set(entries[0]) - known:
        raise UnsupportedError(
            f"text_config has per_layer_config {dict(own)!r}; mlx-lm's Gemma 4 knows one head_dim for all layers with "
            "full attention, and one num_key_value_heads where attention_k_eq_v is on"
        )
    return {
        "global_head_dim": entries[0].get("head_dim", arguments["head_dim"]),
        "num_global_key_value_heads": entries[0].get("num_key_value_heads"),
    }


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
