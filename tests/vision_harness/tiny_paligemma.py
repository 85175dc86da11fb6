"""Tiny PaliGemma 2: nine tokens to a picture, a Gemma 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxgen_vision.processors.paligemma import TEMPLATE

from vision_harness.tiny_family import TinyFamily

_TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 8,
}


def _config(vocabulary: Sequence[str], text: dict[str, Any]) -> dict[str, Any]:
    text = text | {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 32,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
    }
    return {
        "image_token_index": vocabulary.index("<image>"),
        "tie_word_embeddings": True,
        "vision_config": _TOWER,
        "text_config": text,
    }


def _modules(config: dict[str, Any]) -> dict[str, Any]:
    from mlxgen_vision.families.paligemma import PaliGemmaVision, build_language
    from mlxgen_vision.towers.siglip import SiglipConfig

    vision = PaliGemmaVision(SiglipConfig.from_dict(_TOWER), config["text_config"]["hidden_size"])
    return {"language_model.": build_language(config["text_config"]), "": vision}


FAMILIES = {
    "paligemma": TinyFamily(
        specials=("<pad>", "<eos>", "<bos>", "<image>"),
        template=TEMPLATE,
        eos="<eos>",
        processor={"image_processor": {"size": {"height": 24, "width": 24}, "resample": 3}},
        config=_config,
        modules=_modules,
        tokenizer={"bos_token": "<bos>"},
    )
}
