"""The families' tiny checkpoints: small in every number, and otherwise as published (norms, biases, tying, forms).

Where a number of the published models is also a default somewhere, another is used here, so that a config that isn't
read can't go unnoticed.
"""

from __future__ import annotations

from typing import Any

from references import tiny_any_shape
from references.tiny_checkpoints import (
    GEMMA_WORDS,
    GRID_WORDS,
    INTERN_WORDS,
    LLAVA_WORDS,
    QWEN_WORDS,
    TILE_WORDS,
    Family,
)
from references.tiny_settings import CLIP, HALF, IMAGENET, STEPS, qwen_processor, qwen_text

_QWEN_NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
_TILE_NAMES = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "video_token": "<video>",
}


def _qwen_old(kind: str, seed: int, text: dict[str, Any], vision: dict[str, Any]) -> Family:
    """Qwen2-VL and Qwen2.5-VL: patches of 14 pixels, a video's budget per frame."""
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    return Family(
        kind=kind,
        words=QWEN_WORDS,
        text=qwen_text(rope_theta=20000.0, rope_scaling=rope, **text),
        vision={"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision},
        image=qwen_processor(14, 4, 24, CLIP) | {"image_processor_type": "Qwen2VLImageProcessor"},
        video=qwen_processor(14, 4, 12, CLIP)
        | {"video_processor_type": "Qwen2VLVideoProcessor", "max_video_tokens": 60},
        names=_QWEN_NAMES,
        seed=seed,
    )


def _qwen_new(kind: str, seed: int, text: dict[str, Any], deepstack: list[int], *, tied: bool = False) -> Family:
    """Qwen3-VL and Qwen3.5: patches of 16 pixels, a video's budget for the whole clip."""
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 48,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 49,
        "deepstack_visual_indexes": deepstack,
        "hidden_act": "gelu_pytorch_tanh",
    }
    return Family(
        kind=kind,
        words=QWEN_WORDS,
        text=text,
        vision=vision,
        image=qwen_processor(16, 4, 24, HALF) | {"image_processor_type": "Qwen2VLImageProcessor"},
        video=qwen_processor(16, 6, 48, HALF)
        | {"video_processor_type": "Qwen3VLVideoProcessor", "max_video_tokens": 10},
        names=_QWEN_NAMES,
        seed=seed,
        tied=tied,
    )


_QWEN3_ROPE = {
    "head_dim": 16,
    "rope_theta": 30000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 30000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}


def _gemma3(seed: int, **image: Any) -> Family:
    return Family(
        kind="gemma3",
        words=GEMMA_WORDS,
        text={
            "model_type": "gemma3_text",
            "hidden_size": 64,
            "intermediate_size": 80,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 24,
            "sliding_window_pattern": 6,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 5000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "rms_norm_eps": 1e-6,
        },
        vision={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 96,
            "patch_size": 12,
            "vision_use_head": False,
        },
        image={
            **STEPS,
            **HALF,
            "size": {"height": 96, "width": 96},
            "resample": 2,
            "image_processor_type": "Gemma3ImageProcessor",
            **image,
        },
        video=None,
        names={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        seed=seed,
        top={"mm_tokens_per_image": 16},
        tied=True,
    )


def _tiled(kind: str, seed: int, *, scale: int, edge: int, video: dict[str, Any]) -> Family:
    return Family(
        kind=kind,
        words=TILE_WORDS,
        text={
            "model_type": "llama",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_theta": 70000.0,
            "rms_norm_eps": 1e-5,
        },
        vision={
            "model_type": kind if kind == "idefics3" else "smolvlm_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
        },
        image={
            **STEPS,
            **HALF,
            "do_image_splitting": True,
            "do_pad": True,
            "resample": 1,
            "size": {"longest_edge": edge},
            "max_image_size": {"longest_edge": 64},
            "image_processor_type": "Idefics3ImageProcessor" if kind == "idefics3" else "SmolVLMImageProcessor",
            **video,
        },
        video=None,
        names=_TILE_NAMES,
        seed=seed,
        top={"scale_factor": scale},
    )


def _mistral3(seed: int) -> Family:
    """With the text model of Ministral 3: stretched rotary embeddings, queries that grow with the position."""
    return Family(
        kind="mistral3",
        words=GRID_WORDS,
        text={
            "model_type": "ministral3",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "rms_norm_eps": 1e-4,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 48,
                "beta_fast": 16.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
        vision={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 300,
            "patch_size": 10,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 3000.0},
        },
        image={
            **STEPS,
            **CLIP,
            "do_pad": True,
            "resample": 3,
            "size": {"longest_edge": 300},
            "patch_size": {"height": 10, "width": 10},
            "image_processor_type": "PixtralImageProcessor",
        },
        video=None,
        names={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        seed=seed,
        top={"spatial_merge_size": 2, "multimodal_projector_bias": False, "projector_hidden_act": "gelu"},
    )


def _internvl(seed: int) -> Family:
    """With the 6B tower's kind of norms, and a mixture of experts."""
    square = {**STEPS, **IMAGENET, "resample": 3, "size": {"height": 48, "width": 48}}
    return Family(
        kind="internvl",
        words=INTERN_WORDS,
        text={
            "model_type": "qwen3_moe",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "rope_theta": 70000.0,
            "rms_norm_eps": 1e-5,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **_EXPERTS,
        },
        vision={
            "model_type": "internvl_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": [48, 48],
            "patch_size": [12, 12],
            "layer_norm_eps": 1e-5,
            "norm_type": "rms_norm",
            "use_qk_norm": True,
            "attention_bias": False,
            "hidden_act": "gelu",
        },
        image={
            **square,
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 7,
            "image_processor_type": "GotOcr2ImageProcessor",
        },
        video={**square, "video_processor_type": "InternVLVideoProcessor"},
        names={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        seed=seed,
        top={"image_seq_length": 4, "downsample_ratio": 0.5, "vision_feature_select_strategy": "default"},
    )


_LLAVA_TEXT = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rope_theta": 70000.0,
    "rms_norm_eps": 1e-5,
}
_LLAVA_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 60,
    "patch_size": 12,
}


def _llava(kind: str, seed: int, text: str, image: dict[str, Any], **top: Any) -> Family:
    """A tower of five patches a side: CLIP, read before its last block, or SigLIP, read behind it."""
    newest = kind == "llava_onevision"
    square = {**STEPS, **(HALF if newest else CLIP), "resample": 3}
    own = {"model_type": "siglip_vision_model", "vision_use_head": False} if newest else {"projection_dim": 32}
    return Family(
        kind=kind,
        words=LLAVA_WORDS,
        text={**_LLAVA_TEXT, "model_type": text, **({} if text == "qwen2" else {"sliding_window": None})},
        vision={"model_type": "clip_vision_model", **_LLAVA_TOWER, **own},
        image={**square, **image},
        video={**square, "size": {"height": 60, "width": 60}, "do_sample_frames": False} if newest else None,
        names={"image_token": "<image>", "video_token": "<video>"},
        seed=seed,
        top={
            "vision_feature_layer": -1 if newest else -2,
            "vision_feature_select_strategy": "full" if newest else "default",
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
            **top,
        },
    )


_CROP = {"size": {"shortest_edge": 60}, "crop_size": {"height": 60, "width": 60}, "do_center_crop": True}
_NEXT_GRIDS = [[60, 120], [120, 60], [120, 120], [180, 60], [60, 180]]
_ONEVISION_GRIDS = [[60 * rows, 60 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]


def _paligemma(kind: str, seed: int) -> Family:
    """PaliGemma 1 or 2, by its text model's type."""
    text = {**qwen_text(), "model_type": kind, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}
    if kind == "gemma2":
        text |= {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}
    return Family(
        kind="paligemma",
        words=("<bos>", "<image>"),
        text={key: value for key, value in text.items() if key != "hidden_act"},
        vision={"model_type": "siglip_vision_model", "vision_use_head": False, **_LLAVA_TOWER},
        image={
            **STEPS,
            **HALF,
            "size": {"height": 60, "width": 60},
            "resample": 3,
            "image_seq_length": 25,
            "image_processor_type": "SiglipImageProcessor",
        },
        video=None,
        names={"image_token": "<image>"},
        seed=seed,
        top={"projection_dim": 64, "hidden_size": 64},
        tied=True,
    )


FAMILIES: dict[str, Family] = {
    "qwen2_vl": _qwen_old(
        "qwen2_vl",
        2,
        {"num_hidden_layers": 2},
        {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 3},
    ),
    "qwen2_5_vl": _qwen_old(
        "qwen2_5_vl",
        1,
        {},
        {
            "depth": 4,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 48,
            "window_size": 95,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 4,
        },
    ),
    "qwen3_vl": _qwen_new("qwen3_vl", 12, qwen_text(model_type="qwen3_vl_text", **_QWEN3_ROPE), [0, 2], tied=True),
    "qwen3_vl_moe": _qwen_new(
        "qwen3_vl_moe",
        4,
        qwen_text(model_type="qwen3_vl_moe_text", decoder_sparse_step=1, mlp_only_layers=[], **_QWEN3_ROPE, **_EXPERTS),
        [0, 1, 2],
    ),
    "qwen3_5": _qwen_new("qwen3_5", 2, qwen_text(model_type="qwen3_5_text", **_HYBRID), []),
    "qwen3_5_moe": _qwen_new(
        "qwen3_5_moe",
        6,
        qwen_text(model_type="qwen3_5_moe_text", shared_expert_intermediate_size=28, **_HYBRID, **_EXPERTS),
        [],
    ),
    "idefics3": _tiled("idefics3", 1, scale=2, edge=192, video={}),
    "smolvlm": _tiled(
        "smolvlm",
        9,
        scale=4,
        edge=256,
        video={"video_sampling": {"fps": 1, "max_frames": 6, "video_size": {"longest_edge": 128}}},
    ),
    "gemma3": _gemma3(19),
    "gemma3_pan_and_scan": _gemma3(
        2,
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=30,
        pan_and_scan_max_num_crops=3,
        pan_and_scan_min_ratio_to_activate=1.3,
    ),
    "llava": _llava("llava", 3, "llama", _CROP),
    "llava_pad": _llava("llava", 1, "llama", {**_CROP, "do_pad": True}),
    "llava_next": _llava(
        "llava_next",
        1,
        "mistral",
        {**_CROP, "image_grid_pinpoints": _NEXT_GRIDS},
        image_grid_pinpoints=_NEXT_GRIDS,
    ),
    "llava_onevision": _llava(
        "llava_onevision",
        3,
        "qwen2",
        {"size": {"height": 60, "width": 60}, "image_grid_pinpoints": _ONEVISION_GRIDS},
        image_grid_pinpoints=_ONEVISION_GRIDS,
        vision_aspect_ratio="anyres_max_4",
    ),
    "paligemma": _paligemma("gemma", 1),
    "paligemma2": _paligemma("gemma2", 1),
    "mistral3": _mistral3(1),
    "internvl": _internvl(3),
    **tiny_any_shape.FAMILIES,
}
