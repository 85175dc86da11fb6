"""Settings that several families' tiny checkpoints share."""

from __future__ import annotations

from typing import Any

CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
STEPS = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
}


def qwen_text(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        **more,
    }


def qwen_processor(patch: int, smallest: int, largest: int, statistics: dict[str, Any]) -> dict[str, Any]:
    """`smallest` and `largest` in tokens."""
    block = (2 * patch) ** 2
    return {
        **STEPS,
        **statistics,
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "resample": 3,
        "size": {"shortest_edge": smallest * block, "longest_edge": largest * block},
    }
