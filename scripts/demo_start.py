"""What the demonstration model is before training: vocabulary, configuration, auxiliary heads, first weights."""

from __future__ import annotations

import math
from typing import Any

import demo_data as data
import demo_forward as forward
import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

WIDTH = 128
HEADS = {"kind": len(data.KIND_NAMES) + 1, "colour": len(data.COLOUR_NAMES) + 1, "motion": len(data.WAYS) + 1}
# Where each picture token lies: its row, its column, and which medium or temporal patch of the dialogue it is from.
# The last two say it for tokens with a shape only (0 = none): what questions about places need to find.
PLACES = {
    "row": data.CELLS,
    "column": data.CELLS,
    "ordinal": 4,
    "shape row": data.CELLS + 1,
    "shape column": data.CELLS + 1,
}


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE with Qwen's special tokens first, so that their ids don't depend on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=8,
        special_tokens=list(data.SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(data.corpus(np.random.default_rng([seed, 1]), 4000), trainer)
    return tokenizer


def config_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json` as current transformers writes it for this family."""
    width, num_layers = WIDTH, 4
    ids = {
        name: tokenizer.token_to_id(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad", "video_pad")
    }
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "dtype": "float16",
        "image_token_id": ids["image_pad"],
        "model_type": "qwen2_5_vl",
        "text_config": {
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
            "hidden_act": "silu",
            "hidden_size": width,
            "initializer_range": 0.02,
            "intermediate_size": 3 * width,
            "layer_types": ["full_attention"] * num_layers,
            "max_position_embeddings": 2048,
            "max_window_layers": num_layers,
            "model_type": "qwen2_5_vl_text",
            "num_attention_heads": 4,
            "num_hidden_layers": num_layers,
            "num_key_value_heads": 2,
            "pad_token_id": None,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"mrope_section": [4, 6, 6], "rope_theta": 8.0, "rope_type": "default"},
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": tokenizer.get_vocab_size(),
        },
        "tie_word_embeddings": False,
        "video_token_id": ids["video_pad"],
        "vision_config": {
            "depth": 4,
            "fullatt_block_indexes": [1, 3],
            "hidden_act": "silu",
            "hidden_size": width,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 2 * width,
            "model_type": "qwen2_5_vl_vision",
            "num_heads": 4,
            "out_hidden_size": width,
            "patch_size": data.PATCH,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
            "spatial_merge_size": data.MERGE,
            "temporal_patch_size": data.TEMPORAL,
            "tokens_per_second": data.TOKENS_PER_SECOND,
            "window_size": data.CANVAS // 2,
        },
        "vision_end_token_id": ids["vision_end"],
        "vision_start_token_id": ids["vision_start"],
    }


def initial_params(seed: int, shape: forward.Shape) -> forward.Params:
    """Normal weights scaled by fan-in (residual outputs smaller), ones for norms, zeros for biases."""
    rng = np.random.default_rng([seed, 2])
    width, vision = shape.width, shape.vision_width
    group = vision * shape.merge**2
    kv = width // shape.heads * shape.kv_heads
    linear = {"visual.merger.mlp.0": (group, group), "visual.merger.mlp.2": (width, group)}
    norms = {"visual.merger.ln_q": vision, "model.norm": width}
    plain = {}
    for i in range(shape.vision_depth):
        p = f"visual.blocks.{i}."
        linear |= {p + "attn.qkv": (3 * vision, vision), p + "attn.proj": (vision, vision)}
        linear |= {p + f"mlp.{n}_proj": (shape.vision_mlp, vision) for n in ("gate", "up")}
        linear |= {p + "mlp.down_proj": (vision, shape.vision_mlp)}
        norms |= {p + "norm1": vision, p + "norm2": vision}
    for i in range(shape.layers):
        p = f"model.layers.{i}."
        linear |= {p + f"self_attn.{n}_proj": (size, width) for n, size in (("q", width), ("k", kv), ("v", kv))}
        plain |= {p + "self_attn.o_proj": (width, width), p + "mlp.down_proj": (width, shape.mlp)}
        plain |= {p + f"mlp.{n}_proj": (shape.mlp, width) for n in ("gate", "up")}
        norms |= {p + "input_layernorm": width, p + "post_attention_layernorm": width}
    plain["lm_head"] = (shape.vocab, width)
    for name, size in HEADS.items():
        linear[f"head.{name}"] = (size, width)

    def normal(name: str, size: tuple[int, ...], scale: float) -> mx.array:
        small = name.endswith(("attn.proj", "o_proj", "down_proj"))
        return mx.array((rng.standard_normal(size) * scale * (0.35 if small else 1.0)).astype(np.float32))

    patch = (vision, 3, data.TEMPORAL, shape.patch, shape.patch)
    params = {
        "visual.patch_embed.proj.weight": normal("", patch, math.prod(patch[1:]) ** -0.5),
        "model.embed_tokens.weight": normal("", (shape.vocab, width), 0.5),
    }
    for name, size in {**linear, **plain}.items():
        params[name + ".weight"] = normal(name, size, size[1] ** -0.5)
    params |= {name + ".bias": mx.zeros(size[0]) for name, size in linear.items()}
    params |= {name + ".weight": mx.ones(size) for name, size in norms.items()}
    for name, size in PLACES.items():
        params[f"head.{name}.weight"] = normal("", (size, width), width**-0.5)
        params[f"head.{name}.bias"] = mx.zeros(size)
    return params
