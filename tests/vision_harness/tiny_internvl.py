"""A tiny InternVL: tiles of 4 tokens, at most 4 of them and the whole; a Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vision_harness.tiny_family import TinyFamily

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<IMG_CONTEXT>\n{% elif part['type'] == 'video' %}<video>\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": [32, 32],
    "patch_size": [8, 8],
    "attention_bias": True,
}


def _config(vocabulary: Sequence[str], text: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    token = vocabulary.index("<IMG_CONTEXT>")
    return {
        "image_token_id": token,
        "vision_config": _VISION,
        "text_config": text | {"model_type": "qwen3", "rope_parameters": rope},
    }


def _modules(config: dict[str, Any]) -> dict[str, Any]:
    from mlxgen_vision.families.internvl import build_vision
    from mlxgen_vision.text_models import build_text_model

    text = config["text_config"]
    vision, _ = build_vision(config, text["hidden_size"])
    return {"language_model.": build_text_model(text, default_kind="qwen3", tied=False), "": vision}


_SQUARE = {"size": {"height": 32, "width": 32}, "resample": 3}

FAMILIES = {
    "internvl": TinyFamily(
        specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        template=_TEMPLATE,
        eos="<|im_end|>",
        processor={"image_processor": _SQUARE | {"max_patches": 4}, "video_processor": _SQUARE},
        config=_config,
        modules=_modules,
        video=True,
    )
}
