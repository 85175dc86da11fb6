"""mlx-lm's text models as language models of vision families, from a `text_config` in today's and in the older form.

For families whose text model is a plain causal one that takes embeddings. What a config leaves out is what transformers
assumes for the text model's type; the output projection is tied to the embeddings exactly if the checkpoint has none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import mlx.nn as nn
from mlx_lm.models import llama, ministral3, qwen2, qwen3, qwen3_moe

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen_vision import checkpoint
from mlxgen_vision.checkpoint import Weights

_log = logging.getLogger(__name__)

_COMMON: Final = {"num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
_LLAMA: Final = _COMMON | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}
_MISTRAL: Final = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN: Final = _COMMON | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_MINISTRAL3: Final = _MISTRAL | {
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_QWEN3_MOE: Final = _QWEN | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """mlx-lm's module for a text `model_type`, and what transformers' config class assumes."""

    module: ModuleType
    defaults: Mapping[str, Any]
    nested_rope: bool = False


_KINDS: Final = {
    "llama": _Kind(llama, _LLAMA),
    "mistral": _Kind(llama, _MISTRAL),
    "ministral3": _Kind(ministral3, _MINISTRAL3, nested_rope=True),
    "qwen2": _Kind(qwen2, _QWEN),
    "qwen3": _Kind(qwen3, _QWEN | {"head_dim": 128}),
    "qwen3_moe": _Kind(qwen3_moe, _QWEN3_MOE),
}


def text_arguments(text_config: Mapping[str, Any], kind: str, *, tied: bool) -> dict[str, Any]:
    """The arguments of mlx-lm's model for a `text_config` of `model_type` `kind`: flat rotary settings, no gaps.

    Raises `UnsupportedError` for a kind that isn't known here, and for Qwen's sliding windows, which mlx-lm's models
    don't have.
    """
    known = _kind(kind)
    # A null switches a setting off (a sliding window); a missing key means what transformers assumes.
    arguments = {key: value for key, value in {**known.defaults, **text_config}.items() if value is not None}
    if "num_experts" in known.defaults:  # transformers 5 saves it under another name
        arguments["num_experts"] = arguments.pop("num_local_experts", arguments["num_experts"])
    if not known.nested_rope:
        rope = dict(arguments.pop("rope_parameters", None) or {})
        arguments["rope_theta"] = float(rope.pop("rope_theta", None) or arguments["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            arguments["rope_scaling"] = rope
    layers = int(arguments["num_hidden_layers"])
    if arguments.get("use_sliding_window") and int(arguments.get("max_window_layers", 28)) < layers:
        raise UnsupportedError(
            f"text_config turns on a sliding window from layer {arguments.get('max_window_layers', 28)} of {layers}; "
            "set use_sliding_window to false"
        )
    arguments.setdefault("num_key_value_heads", arguments["num_attention_heads"])
    arguments.setdefault("head_dim", arguments["hidden_size"] // arguments["num_attention_heads"])
    return arguments | {"model_type": kind, "tie_word_embeddings": tied}


def build_text_model(text_config: Mapping[str, Any], *, default_kind: str, tied: bool) -> nn.Module:
    """mlx-lm's model for `text_config`, without weights. `default_kind` is the `model_type` of one that names none.

    Raises `UnsupportedError` for a kind that isn't known here.
    """
    kind = str(text_config.get("model_type") or default_kind)
    module = _kind(kind).module
    arguments = text_arguments(text_config, kind, tied=tied)
    window, reach = arguments.get("sliding_window"), arguments["max_position_embeddings"]
    if kind == "mistral" and window and window < reach:
        _log.warning(
            "the text model attends to the last %d tokens only, mlx-lm's to all: beyond %d tokens results differ",
            window,
            window,
        )
    return module.Model(module.ModelArgs.from_dict(arguments))


def load_text_model(
    text_config: Mapping[str, Any], weights: Weights, *, default_kind: str, cancel: CancelToken = NEVER
) -> nn.Module:
    """`build_text_model` with `weights`, named `model.…` and `lm_head.…`; without the latter the embeddings project.

    Raises `ModelLoadError` as well, if config and weights don't fit.
    """
    model = build_text_model(text_config, default_kind=default_kind, tied="lm_head.weight" not in weights)
    checkpoint.fill(model, model.sanitize(weights), what="the text model", cancel=cancel)
    return model


def _kind(kind: str) -> _Kind:
    if kind not in _KINDS:
        raise UnsupportedError(
            f"text_config has model_type {kind!r}; text models known here are {', '.join(sorted(_KINDS))}"
        )
    return _KINDS[kind]
