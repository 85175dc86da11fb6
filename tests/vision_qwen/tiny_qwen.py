"""Tiny seeded Qwen vision checkpoints with experts, in every layout their weights are published in.

The parity kit has no mixture of experts, and isn't always there; these folders are built from a config alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

KINDS = ("qwen3_vl_moe", "qwen3_5_moe")
LAYOUTS = ("fused_in_out", "fused_out_in", "per_expert", "mlx")

HIDDEN, EXPERTS, EXPERT_SIZE, VOCAB = 32, 4, 24, 128
IMAGE, VIDEO, START, END = 120, 121, 122, 123

_TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_SIZE,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_PROCESSOR: dict[str, Any] = {
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def config(kind: str) -> dict[str, Any]:
    rope = {"mrope_interleaved": True, "rope_theta": 10000.0, "rope_type": "default"}
    if kind == "qwen3_vl_moe":
        text = _TEXT | {
            "model_type": "qwen3_vl_moe_text",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "rope_theta": 10000.0,  # as published: flat, not nested
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default"},
        }
        vision = _VISION | {"deepstack_visual_indexes": [0, 1]}
    else:
        text = _TEXT | {
            "model_type": "qwen3_5_moe_text",
            "full_attention_interval": 3,
            "shared_expert_intermediate_size": 20,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": rope | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5},
        }
        vision = _VISION
    return {
        "model_type": kind,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }


def _shapes(kind: str) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Names and shapes of the language model's and the tower's weights, experts stacked, (out, in)."""
    text: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for number in range(_TEXT["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        text |= {
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}.mlp.gate.weight": (EXPERTS, HIDDEN),
            f"{layer}.mlp.switch_mlp.gate_proj.weight": (EXPERTS, EXPERT_SIZE, HIDDEN),
            f"{layer}.mlp.switch_mlp.up_proj.weight": (EXPERTS, EXPERT_SIZE, HIDDEN),
            f"{layer}.mlp.switch_mlp.down_proj.weight": (EXPERTS, HIDDEN, EXPERT_SIZE),
        }
        if kind == "qwen3_5_moe":
            text |= {
                f"{layer}.mlp.shared_expert_gate.weight": (1, HIDDEN),
                f"{layer}.mlp.shared_expert.gate_proj.weight": (20, HIDDEN),
                f"{layer}.mlp.shared_expert.up_proj.weight": (20, HIDDEN),
                f"{layer}.mlp.shared_expert.down_proj.weight": (HIDDEN, 20),
            }
        if kind == "qwen3_5_moe" and number != 2:
            text |= {
                f"{layer}.linear_attn.A_log": (4,),
                f"{layer}.linear_attn.dt_bias": (4,),
                f"{layer}.linear_attn.conv1d.weight": (128, 1, 4),
                f"{layer}.linear_attn.in_proj_qkv.weight": (128, HIDDEN),
                f"{layer}.linear_attn.in_proj_z.weight": (64, HIDDEN),
                f"{layer}.linear_attn.in_proj_a.weight": (4, HIDDEN),
                f"{layer}.linear_attn.in_proj_b.weight": (4, HIDDEN),
                f"{layer}.linear_attn.norm.weight": (16,),
                f"{layer}.linear_attn.out_proj.weight": (HIDDEN, 64),
            }
        else:
            gated = 2 if kind == "qwen3_5_moe" else 1
            text |= {
                f"{layer}.self_attn.q_proj.weight": (gated * 64, HIDDEN),
                f"{layer}.self_attn.k_proj.weight": (32, HIDDEN),
                f"{layer}.self_attn.v_proj.weight": (32, HIDDEN),
                f"{layer}.self_attn.o_proj.weight": (HIDDEN, 64),
                f"{layer}.self_attn.q_norm.weight": (32,),
                f"{layer}.self_attn.k_norm.weight": (32,),
            }
    tower: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (16, 3, 2, 8, 8),
        "patch_embed.proj.bias": (16,),
        "pos_embed.weight": (16, 16),
    }
    for number in range(_VISION["depth"]):
        block = f"blocks.{number}"
        for name, (out, width) in {
            "attn.qkv": (48, 16),
            "attn.proj": (16, 16),
            "mlp.linear_fc1": (32, 16),
            "mlp.linear_fc2": (16, 32),
        }.items():
            tower |= {f"{block}.{name}.weight": (out, width), f"{block}.{name}.bias": (out,)}
        for name in ("norm1", "norm2"):
            tower |= {f"{block}.{name}.weight": (16,), f"{block}.{name}.bias": (16,)}
    mergers = {"merger": 16}
    if kind == "qwen3_vl_moe":
        mergers |= {"deepstack_merger_list.0": 64, "deepstack_merger_list.1": 64}
    for name, norm in mergers.items():
        tower |= {
            f"{name}.norm.weight": (norm,),
            f"{name}.norm.bias": (norm,),
            f"{name}.linear_fc1.weight": (64, 64),
            f"{name}.linear_fc1.bias": (64,),
            f"{name}.linear_fc2.weight": (HIDDEN, 64),
            f"{name}.linear_fc2.bias": (HIDDEN,),
        }
    return text, tower


def _draw(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    drawn = {}
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 else 1.5 * float(np.prod(shape[1:])) ** -0.5 if "switch" not in name else 0.3
        values = generator.normal(size=shape) * scale
        drawn[name] = (1.0 + 0.1 * values if "norm" in name and name.endswith("weight") else values).astype(np.float32)
    return drawn


def write(folder: Path, kind: str, layout: str, *, seed: int = 0) -> Path:
    """Write a checkpoint; the same seed gives the same model in every layout."""
    folder.mkdir(parents=True, exist_ok=True)
    text_shapes, tower_shapes = _shapes(kind)
    text, tower = _draw(text_shapes, seed), _draw(tower_shapes, seed + 1)
    if layout == "mlx":
        tower["patch_embed.proj.weight"] = np.moveaxis(tower["patch_embed.proj.weight"], 1, -1)
        for name in [name for name in text if name.endswith("conv1d.weight")]:
            text[name] = np.moveaxis(text[name], 1, -1)
        weights = {f"language_model.{name}": value for name, value in text.items()}
        weights |= {f"vision_tower.{name}": value for name, value in tower.items()}
    else:
        if kind == "qwen3_5_moe":  # as published, these norms are stored less one
            shifted = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
            text = {name: value - 1 if name.endswith(shifted) else value for name, value in text.items()}
        for number in range(_TEXT["num_hidden_layers"]):
            _publish_experts(text, f"model.layers.{number}.mlp", layout)
        weights = {name.replace("model.", "model.language_model.", 1): value for name, value in text.items()}
        weights |= {f"model.visual.{name}": value for name, value in tower.items()}
        weights["mtp.norm.weight"] = np.ones(HIDDEN, np.float32)
    save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config(kind)))
    (folder / "preprocessor_config.json").write_text(
        json.dumps(_PROCESSOR | {"size": {"shortest_edge": 1024, "longest_edge": 8192}})
    )
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(_PROCESSOR | {"size": {"shortest_edge": 1024, "longest_edge": 16384}})
    )
    return folder


def _publish_experts(text: dict[str, np.ndarray], prefix: str, layout: str) -> None:
    gate, up, down = (text.pop(f"{prefix}.switch_mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    if layout == "per_expert":
        for number in range(EXPERTS):
            text[f"{prefix}.experts.{number}.gate_proj.weight"] = gate[number]
            text[f"{prefix}.experts.{number}.up_proj.weight"] = up[number]
            text[f"{prefix}.experts.{number}.down_proj.weight"] = down[number]
        return
    fused = np.concatenate([gate, up], axis=1)
    turned = layout == "fused_in_out"
    text[f"{prefix}.experts.gate_up_proj"] = fused.swapaxes(1, 2) if turned else fused
    text[f"{prefix}.experts.down_proj"] = down.swapaxes(1, 2) if turned else down
