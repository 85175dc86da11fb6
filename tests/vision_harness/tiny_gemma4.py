"""Tiny Gemma 4, as the larger ones (keys that are values, attention both ways) and as the smaller (layers sharing keys,
per-layer inputs, bounded matrices)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vision_harness.tiny_family import TinyFamily

_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] | trim }}{% else %}<|{{ part['type'] }}|>{% endif %}"
    "{% endfor %}{% endif %}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
_TEXT = {
    "model_type": "gemma4_text",
    "sliding_window": 24,
    "global_head_dim": 64,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_LARGE = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}
_SMALL = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "use_double_wide_mlp": True,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "position_embedding_size": 32,
}
_CUT = {"patch_size": 8, "pooling_kernel_size": 2}


def _config(text: dict[str, Any], vision: str) -> Callable[[Sequence[str], dict[str, Any]], dict[str, Any]]:
    def config(vocabulary: Sequence[str], common: dict[str, Any]) -> dict[str, Any]:
        return {
            "model_type": "gemma4",
            "tie_word_embeddings": True,
            "image_token_id": vocabulary.index("<|image|>"),
            "video_token_id": vocabulary.index("<|video|>"),
            "vision_config": _VISION | {vision: True},
            "text_config": common | _TEXT | text | {"vocab_size_per_layer_input": len(vocabulary)},
        }

    return config


def _modules(config: dict[str, Any]) -> dict[str, Any]:
    from mlx_lm.models import gemma4_text
    from mlxgen_vision.text_config import gemma4_arguments
    from mlxgen_vision.towers.gemma4 import Gemma4Vision, Gemma4VisionConfig

    arguments = gemma4_arguments(config["text_config"])
    vision = Gemma4Vision(Gemma4VisionConfig.from_dict(config["vision_config"]), arguments["hidden_size"])
    return {"language_model.": gemma4_text.Model(gemma4_text.ModelArgs.from_dict(arguments)), "": vision}


def _family(text: dict[str, Any], vision: str) -> TinyFamily:
    return TinyFamily(
        specials=("<pad>", "<eos>", "<bos>", "<|image>", "<image|>", "<|image|>", "<|video|>", "<|turn>", "<turn|>"),
        template=_TEMPLATE,
        eos="<eos>",
        processor={
            "image_processor": _CUT | {"max_soft_tokens": 12},
            "video_processor": _CUT | {"max_soft_tokens": 6, "num_frames": 4},
        },
        config=_config(text, vision),
        modules=_modules,
        video=True,
        tokenizer={
            "bos_token": "<bos>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
        },
    )


FAMILIES = {"gemma4": _family(_LARGE, "standardize"), "gemma4_e": _family(_SMALL, "use_clipped_linears")}
