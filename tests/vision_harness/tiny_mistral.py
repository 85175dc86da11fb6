"""Tiny Pixtral and Mistral 3: pictures of 3 to 5 tokens a side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vision_harness.tiny_family import TinyFamily

_TEMPLATE = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST]"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}[IMG]{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}[/INST]"
    "{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
)
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
}


def _config(vocabulary: Sequence[str], text: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    text = text | {"model_type": "mistral", "sliding_window": None, "rope_parameters": rope}
    return {"image_token_index": vocabulary.index("[IMG]"), "vision_config": _VISION, "text_config": text}


def _pixtral(config: dict[str, Any]) -> dict[str, Any]:
    from mlxgen_vision.families.pixtral import PixtralVision
    from mlxgen_vision.text_models import build_text_model
    from mlxgen_vision.towers.pixtral import PixtralConfig
    from mlxgen_vision.towers.projectors import ProjectorShape

    text = config["text_config"]
    vision = PixtralVision(PixtralConfig.from_dict(_VISION), ProjectorShape(32, text["hidden_size"]))
    return {"language_model.": build_text_model(text, default_kind="mistral", tied=False), "": vision}


def _mistral3(config: dict[str, Any]) -> dict[str, Any]:
    from mlxgen_vision.families.mistral3 import MergingProjector, Mistral3Vision
    from mlxgen_vision.text_models import build_text_model
    from mlxgen_vision.towers.pixtral import PixtralConfig
    from mlxgen_vision.towers.projectors import ProjectorShape

    text = config["text_config"]
    projector = MergingProjector(ProjectorShape(32, text["hidden_size"], bias=False), 2, text["rms_norm_eps"])
    vision = Mistral3Vision(PixtralConfig.from_dict(_VISION), projector)
    return {"language_model.": build_text_model(text, default_kind="mistral", tied=False), "": vision}


def _family(longest_edge: int, modules: Any) -> TinyFamily:
    return TinyFamily(
        specials=("<pad>", "</s>", "<s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        template=_TEMPLATE,
        eos="</s>",
        processor={"image_processor": {"size": {"longest_edge": longest_edge}, "resample": 3}},
        config=_config,
        modules=modules,
    )


FAMILIES = {"pixtral": _family(40, _pixtral), "mistral3": _family(80, _mistral3)}
