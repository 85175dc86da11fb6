"""Tiny LLaVA, LLaVA-NeXT and LLaVA-OneVision: towers of three patches a side, tiles of 24 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vision_harness.tiny_family import TinyFamily

_TEMPLATE = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}USER: {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<{{ part['type'] }}>{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'user' %} ASSISTANT:{% else %}</s>{% endif %}{% endfor %}"
)
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 8,
}
_CLIP = _TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3}
_SIGLIP = _TOWER | {"model_type": "siglip_vision_model"}
_GRIDS = [[24, 48], [48, 24], [48, 48]]
_LAST = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
_SQUARE = {"size": {"height": 24, "width": 24}}


def _family(text_kind: str, whole: dict[str, Any], processor: dict[str, Any], *, newline: bool = True) -> TinyFamily:
    def config(vocabulary: Sequence[str], text: dict[str, Any]) -> dict[str, Any]:
        rope = {"rope_theta": 10000.0, "rope_type": "default"}
        tokens = {f"{kind}_token_index": vocabulary.index(f"<{kind}>") for kind in ("image", "video")}
        text = text | {"model_type": text_kind, "sliding_window": None, "rope_parameters": rope}
        return whole | tokens | {"text_config": text}

    def modules(config: dict[str, Any]) -> dict[str, Any]:
        from mlxgen_vision.families.llava_vision import build_vision
        from mlxgen_vision.text_models import build_text_model

        text = config["text_config"]
        vision = build_vision(config, text["hidden_size"], newline=newline)
        return {"language_model.": build_text_model(text, default_kind=text_kind, tied=False), "": vision}

    return TinyFamily(
        specials=("<pad>", "</s>", "<s>", "<image>", "<video>"),
        template=_TEMPLATE,
        eos="</s>",
        processor=processor,
        config=config,
        modules=modules,
        video="video_processor" in processor,
    )


FAMILIES = {
    "llava": _family(
        "llama",
        {"vision_config": _CLIP},
        {"image_processor": {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}},
        newline=False,
    ),
    "llava_next": _family(
        "mistral",
        {"vision_config": _CLIP},
        {"image_processor": {"size": {"shortest_edge": 24}, "image_grid_pinpoints": _GRIDS}},
    ),
    "llava_onevision": _family(
        "qwen2",
        {"vision_config": _SIGLIP, "vision_aspect_ratio": "anyres_max_1", **_LAST},
        {"image_processor": _SQUARE | {"image_grid_pinpoints": _GRIDS}, "video_processor": _SQUARE},
    ),
}
