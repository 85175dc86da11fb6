"""Tiny PaddleOCR-VL: pictures of 4 to 36 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vision_harness.tiny_family import TinyFamily

# Of the published shape: a turn's pictures come before its words, and only lists of parts are understood.
_PARTS = "{%% for part in message['content'] %%}{%% if part['type'] == '%s' %%}%s{%% endif %%}{%% endfor %%}"
_TEXT = _PARTS % ("text", "{{ part['text'] }}")
_TEMPLATE = (
    "<|begin_of_sentence|>{% for message in messages %}{% if message['role'] == 'assistant' %}Assistant: "
    + _TEXT
    + "</s>{% else %}User: "
    + _PARTS % ("image", "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>")
    + _TEXT
    + "\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}


def _config(vocabulary: Sequence[str], text: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [4, 6, 6]}
    return {
        "image_token_id": vocabulary.index("<|IMAGE_PLACEHOLDER|>"),
        "vision_config": _VISION,
        "text_config": text | {"model_type": "paddleocr_vl_text", "rope_parameters": rope},
    }


def _modules(config: dict[str, Any]) -> dict[str, Any]:
    from mlx_lm.models import llama
    from mlxgen_vision.families.paddleocr_vl import ROPE
    from mlxgen_vision.families.qwen_language import TextConfig
    from mlxgen_vision.towers.paddleocr_vl import PaddleOCRTower, PaddleOCRVisionConfig

    arguments = TextConfig.of(config, ROPE).arguments | {"model_type": "llama", "tie_word_embeddings": False}
    tower = PaddleOCRTower(PaddleOCRVisionConfig.from_dict(_VISION, arguments["hidden_size"]))
    return {"language_model.": llama.Model(llama.ModelArgs.from_dict(arguments)), "visual.": tower}


FAMILIES = {
    "paddleocr_vl": TinyFamily(
        specials=("<unk>", "</s>", "<|begin_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>")
        + ("<|IMAGE_END|>",),
        template=_TEMPLATE,
        eos="</s>",
        processor={
            "image_processor": {
                "patch_size": 14,
                "merge_size": 2,
                "temporal_patch_size": 1,
                "resample": 3,
                "size": {"shortest_edge": 3136, "longest_edge": 28224},
            }
        },
        config=_config,
        modules=_modules,
        tokenizer={"image_token": "<|IMAGE_PLACEHOLDER|>"},
    )
}
