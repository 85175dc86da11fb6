"""Tiny checkpoints of families that take pictures in their own shape: Gemma 4, LFM2-VL, PaddleOCR-VL."""

from __future__ import annotations

from typing import Any

from references.tiny_checkpoints import GEMMA4_WORDS, LFM2_WORDS, PADDLE_WORDS, Family
from references.tiny_settings import CLIP, HALF, STEPS, qwen_processor, qwen_text


def _gemma4(seed: int, text: dict[str, Any], **vision: bool) -> Family:
    """Gemma 4: what the larger and the smaller ones have of their own is in `text` and `vision`."""
    own = {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 20,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 25.0,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 500000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    }
    shape = {"patch_size": 4, "pooling_kernel_size": 2}
    tower = {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "position_embedding_size": 160,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
    }
    names = {"boi": "<|image>", "image": "<|image|>", "eoi": "<image|>"}
    names |= {"boa": "<|audio>", "audio": "<|audio|>", "eoa": "<audio|>"}
    return Family(
        kind="gemma4",
        words=GEMMA4_WORDS,
        text=qwen_text(rms_norm_eps=1e-5) | own | text,
        vision=tower | shape | {"use_clipped_linears": False, "standardize": False} | vision,
        image={
            **(STEPS | {"do_normalize": False}),
            **shape,
            "resample": 3,
            "max_soft_tokens": 70,
            "image_processor_type": "Gemma4ImageProcessor",
        },
        video={
            **STEPS,
            **shape,
            "resample": 3,
            "max_soft_tokens": 70,
            "num_frames": 8,
            "video_processor_type": "Gemma4VideoProcessor",
        },
        names={f"{name}_token": word for name, word in names.items()},
        seed=seed,
        top={"audio_config": None},
        tied=True,
    )


# As the 26B: experts beside the dense layer, keys that are values where attention is full.
_GEMMA4_LARGE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
# As E2B and E4B.
_GEMMA4_SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 277,
    "use_double_wide_mlp": True,
}


def _lfm2_vl(seed: int) -> Family:
    """LFM2-VL: tiles of 16 tokens, convolutions in every second layer."""
    text = {
        "model_type": "lfm2",
        "block_ff_dim": 80,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-6,
        "conv_L_cache": 4,
        "conv_bias": False,
        "full_attn_idxs": [1, 3],
        "num_hidden_layers": 4,
        "rope_theta": 30000.0,
    }
    return Family(
        kind="lfm2_vl",
        words=LFM2_WORDS,
        text=qwen_text() | text,
        vision={
            "model_type": "siglip2_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_patches": 25,
            "patch_size": 8,
            "hidden_act": "gelu_pytorch_tanh",
            "vision_use_head": False,
        },
        image={
            **STEPS,
            **HALF,
            "resample": 2,
            "encoder_patch_size": 8,
            "downsample_factor": 2,
            "min_image_tokens": 4,
            "max_image_tokens": 24,
            "tile_size": 64,
            "min_tiles": 2,
            "max_tiles": 6,
            "max_pixels_tolerance": 1.5,
            "use_thumbnail": True,
            "do_image_splitting": True,
            "image_processor_type": "Lfm2VlImageProcessorFast",
        },
        video=None,
        names={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
        seed=seed,
        top={"downsample_factor": 2, "projector_hidden_size": 40, "projector_hidden_act": "gelu"},
        tied=True,
    )


def _paddleocr(seed: int) -> Family:
    """PaddleOCR-VL: Qwen2-VL's budget and positions, SigLIP's tower, no merging over time."""
    rope = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3]}
    return Family(
        kind="paddleocr_vl",
        words=PADDLE_WORDS,
        text=qwen_text(
            model_type="paddleocr_vl_text", head_dim=16, rope_theta=20000.0, rope_scaling=rope, use_bias=False
        ),
        vision={
            "model_type": "paddleocr_vl_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 98,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "hidden_act": "gelu_pytorch_tanh",
        },
        image=qwen_processor(14, 4, 24, CLIP)
        | {"image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1},
        video=None,
        names={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        seed=seed,
    )


FAMILIES: dict[str, Family] = {
    "gemma4": _gemma4(5, _GEMMA4_LARGE, standardize=True),
    "gemma4_e": _gemma4(4, _GEMMA4_SMALL, use_clipped_linears=True),
    "lfm2_vl": _lfm2_vl(7),
    "paddleocr_vl": _paddleocr(1),
}
