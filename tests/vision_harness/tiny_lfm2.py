"""Tiny LFM2-VL: pictures in tiles of 4 tokens and once more whole, a text model of convolutions and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vision_harness.tiny_family import TinyFamily

_LABELS = tuple(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4))
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "num_patches": 16,
}


def _config(vocabulary: Sequence[str], text: dict[str, Any]) -> dict[str, Any]:
    own = {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
    }
    return {
        "tie_word_embeddings": True,
        "image_token_id": vocabulary.index("<image>"),
        "projector_hidden_size": 48,
        "vision_config": _VISION,
        "text_config": text | own,
    }


def _modules(config: dict[str, Any]) -> dict[str, Any]:
    from mlx_lm.models import lfm2
    from mlxgen_vision.families.lfm2_vl import Lfm2Vision, lfm2_arguments

    arguments = lfm2_arguments(config["text_config"])
    vision = Lfm2Vision(config, arguments["hidden_size"])
    return {"language_model.": lfm2.Model(lfm2.ModelArgs.from_dict(arguments)), "": vision}


FAMILIES = {
    "lfm2_vl": TinyFamily(
        specials=("<pad>", "<|im_end|>", "<|startoftext|>", "<image>", "<|image_start|>", "<|image_end|>")
        + ("<|img_thumbnail|>", "<|im_start|>", *_LABELS),
        template=_TEMPLATE,
        eos="<|im_end|>",
        processor={
            "image_processor": {
                "encoder_patch_size": 8,
                "downsample_factor": 2,
                "min_image_tokens": 2,
                "max_image_tokens": 6,
                "tile_size": 32,
                "max_tiles": 4,
                "resample": 2,
            }
        },
        config=_config,
        modules=_modules,
        tokenizer={"bos_token": "<|startoftext|>", "image_token": "<image>"},
    )
}
