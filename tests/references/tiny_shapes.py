"""Names and shapes of every weight of a checkpoint, from its config.json, in the layout the models are published in.

Written out rather than read from another program, so that a checkpoint can be built with NumPy alone. That they are
complete and right is checked where the references are made: transformers loads them with nothing missing or left over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]
Config = Mapping[str, Any]


def shapes(config: Config) -> Shapes:
    """Of the family `config["model_type"]` names."""
    kind = config["model_type"]
    text, vision = config["text_config"], config["vision_config"]
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        found = _text(text, "model.", bias=True) | _qwen_tower(kind, vision, "visual.", text["hidden_size"])
    elif kind.startswith("qwen3_vl"):
        found = _text(text, "model.language_model.", norms=("q_norm", "k_norm"))
        found |= _qwen_tower(kind, vision, "model.visual.", text["hidden_size"])
    elif kind.startswith("qwen3_5"):
        found = _hybrid_text(text, "model.language_model.")
        found |= _qwen_tower(kind, vision, "model.visual.", text["hidden_size"])
    elif kind == "gemma3":
        found = _text(text, "language_model.model.", norms=("q_norm", "k_norm"))
        for layer in _layers(text, "language_model.model."):
            found |= {
                f"{layer}.{name}_feedforward_layernorm.weight": (text["hidden_size"],) for name in ("pre", "post")
            }
        found |= _siglip(vision, "vision_tower.vision_model.")
        found["multi_modal_projector.mm_input_projection_weight"] = (vision["hidden_size"], text["hidden_size"])
        found["multi_modal_projector.mm_soft_emb_norm.weight"] = (vision["hidden_size"],)
    elif kind == "gemma4":
        found = _gemma4_text(text, "model.language_model.") | _gemma4_tower(vision, "model.vision_tower.")
        found["model.embed_vision.embedding_projection.weight"] = (text["hidden_size"], vision["hidden_size"])
    elif kind == "lfm2_vl":
        found = _lfm2_text(text, "model.language_model.") | _siglip2(vision, "model.vision_tower.vision_model.")
        joined, size = vision["hidden_size"] * config["downsample_factor"] ** 2, config["projector_hidden_size"]
        projector = "model.multi_modal_projector."
        found |= _norm(f"{projector}layer_norm", joined) | _linear(f"{projector}linear_1", size, joined)
        found |= _linear(f"{projector}linear_2", text["hidden_size"], size)
    elif kind == "paddleocr_vl":
        found = _text(text, "model.") | _siglip(vision, "visual.vision_model.")
        joined = vision["hidden_size"] * vision["spatial_merge_size"] ** 2
        found |= _norm("mlp_AR.pre_norm", vision["hidden_size"]) | _linear("mlp_AR.linear_1", joined, joined)
        found |= _linear("mlp_AR.linear_2", text["hidden_size"], joined)
    elif kind.startswith("llava"):
        found = _text(text, "language_model.model.", bias=text["model_type"] == "qwen2") | _llava(config)
    elif kind == "paligemma":
        found = _text(text, "language_model.model.")
        for layer in _layers(text, "language_model.model.") if text["model_type"] == "gemma2" else ():
            found |= {
                f"{layer}.{name}_feedforward_layernorm.weight": (text["hidden_size"],) for name in ("pre", "post")
            }
        found |= _siglip(vision, "vision_tower.vision_model.")
        found |= _linear("multi_modal_projector.linear", text["hidden_size"], vision["hidden_size"])
    elif kind in ("mistral3", "internvl"):
        norms = ("q_norm", "k_norm") if text["model_type"].startswith("qwen3") else ()
        found = _text(text, "language_model.model.", norms=norms)
        found |= _pixtral(config) if kind == "mistral3" else _intern_vit(config)
    else:
        found = _text(text, "model.text_model.") | _siglip(vision, "model.vision_model.")
        joined = vision["hidden_size"] * config["scale_factor"] ** 2
        found["model.connector.modality_projection.proj.weight"] = (text["hidden_size"], joined)
    if not config["tie_word_embeddings"]:
        prefix = "language_model." if kind in ("mistral3", "internvl") or kind.startswith("llava") else ""
        found[f"{prefix}lm_head.weight"] = (text["vocab_size"], text["hidden_size"])
    return found


def _layers(text: Config, prefix: str) -> list[str]:
    return [f"{prefix}layers.{number}" for number in range(text["num_hidden_layers"])]


def _linear(name: str, out: int, width: int) -> Shapes:
    return {f"{name}.weight": (out, width), f"{name}.bias": (out,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _head_dim(text: Config) -> int:
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def _attention(text: Config, layer: str, *, gated: bool = False) -> Shapes:
    width, head = text["hidden_size"], _head_dim(text)
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    return {
        f"{layer}.self_attn.q_proj.weight": (2 * queries if gated else queries, width),
        f"{layer}.self_attn.k_proj.weight": (keys, width),
        f"{layer}.self_attn.v_proj.weight": (keys, width),
        f"{layer}.self_attn.o_proj.weight": (width, queries),
    }


def _dense(prefix: str, size: int, width: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (size, width),
        f"{prefix}.up_proj.weight": (size, width),
        f"{prefix}.down_proj.weight": (width, size),
    }


def _mlp(text: Config, layer: str) -> Shapes:
    width = text["hidden_size"]
    if "num_experts" not in text:
        return _dense(f"{layer}.mlp", text["intermediate_size"], width)
    experts, size = text["num_experts"], text["moe_intermediate_size"]
    found: Shapes = {f"{layer}.mlp.gate.weight": (experts, width)}
    if "shared_expert_intermediate_size" in text:
        shared = text["shared_expert_intermediate_size"]
        found |= _dense(f"{layer}.mlp.shared_expert", shared, width)
        found[f"{layer}.mlp.shared_expert_gate.weight"] = (1, width)
        # Qwen3.5: every expert's matrices as (out, in).
        return found | {
            f"{layer}.mlp.experts.gate_up_proj": (experts, 2 * size, width),
            f"{layer}.mlp.experts.down_proj": (experts, width, size),
        }
    if text["model_type"] == "qwen3_moe":  # one by one
        for number in range(experts):
            found |= _dense(f"{layer}.mlp.experts.{number}", size, width)
        return found
    # Qwen3-VL: as (in, out).
    return found | {
        f"{layer}.mlp.experts.gate_up_proj": (experts, width, 2 * size),
        f"{layer}.mlp.experts.down_proj": (experts, size, width),
    }


def _text(text: Config, prefix: str, *, bias: bool = False, norms: tuple[str, ...] = ()) -> Shapes:
    width, head = text["hidden_size"], _head_dim(text)
    found: Shapes = {f"{prefix}embed_tokens.weight": (text["vocab_size"], width), f"{prefix}norm.weight": (width,)}
    for layer in _layers(text, prefix):
        attention = _attention(text, layer)
        found |= attention | _mlp(text, layer)
        found |= {f"{layer}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        found |= {f"{layer}.self_attn.{name}.weight": (head,) for name in norms}
        for name in ("q", "k", "v") if bias else ():
            out = attention[f"{layer}.self_attn.{name}_proj.weight"][0]
            found[f"{layer}.self_attn.{name}_proj.bias"] = (out,)
    return found


def _hybrid_text(text: Config, prefix: str) -> Shapes:
    """Qwen3.5: gated delta nets, and a gated attention every `full_attention_interval` layers."""
    width, head = text["hidden_size"], _head_dim(text)
    found: Shapes = {f"{prefix}embed_tokens.weight": (text["vocab_size"], width), f"{prefix}norm.weight": (width,)}
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    for number, layer in enumerate(_layers(text, prefix)):
        found |= _mlp(text, layer)
        found |= {f"{layer}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        if (number + 1) % text["full_attention_interval"] == 0:
            found |= _attention(text, layer, gated=True)
            found |= {f"{layer}.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
            continue
        net, heads = f"{layer}.linear_attn", text["linear_num_value_heads"]
        found |= {
            f"{net}.A_log": (heads,),
            f"{net}.dt_bias": (heads,),
            f"{net}.conv1d.weight": (2 * keys + values, 1, text["linear_conv_kernel_dim"]),
            f"{net}.in_proj_qkv.weight": (2 * keys + values, width),
            f"{net}.in_proj_z.weight": (values, width),
            f"{net}.in_proj_a.weight": (heads, width),
            f"{net}.in_proj_b.weight": (heads, width),
            f"{net}.norm.weight": (text["linear_value_head_dim"],),
            f"{net}.out_proj.weight": (width, values),
        }
    return found


def _qwen_tower(kind: str, vision: Config, prefix: str, text_width: int) -> Shapes:
    old = kind == "qwen2_vl"
    width = vision["embed_dim"] if old else vision["hidden_size"]
    size = int(width * vision["mlp_ratio"]) if old else vision["intermediate_size"]
    patch, merged = vision["patch_size"], width * vision["spatial_merge_size"] ** 2
    found: Shapes = {f"{prefix}patch_embed.proj.weight": (width, 3, vision["temporal_patch_size"], patch, patch)}
    for number in range(vision["depth"]):
        block = f"{prefix}blocks.{number}"
        found |= _linear(f"{block}.attn.qkv", 3 * width, width) | _linear(f"{block}.attn.proj", width, width)
        if kind == "qwen2_5_vl":
            found |= {f"{block}.{name}.weight": (width,) for name in ("norm1", "norm2")}
            found |= _linear(f"{block}.mlp.gate_proj", size, width) | _linear(f"{block}.mlp.up_proj", size, width)
            found |= _linear(f"{block}.mlp.down_proj", width, size)
            continue
        found |= _norm(f"{block}.norm1", width) | _norm(f"{block}.norm2", width)
        first, second = ("fc1", "fc2") if old else ("linear_fc1", "linear_fc2")
        found |= _linear(f"{block}.mlp.{first}", size, width) | _linear(f"{block}.mlp.{second}", width, size)
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        found |= _norm(f"{prefix}merger.ln_q", width) if old else {f"{prefix}merger.ln_q.weight": (width,)}
        return (
            found
            | _linear(f"{prefix}merger.mlp.0", merged, merged)
            | _linear(f"{prefix}merger.mlp.2", text_width, merged)
        )
    found[f"{prefix}patch_embed.proj.bias"] = (width,)
    found[f"{prefix}pos_embed.weight"] = (vision["num_position_embeddings"], width)
    mergers = {f"{prefix}merger": width}
    levels = vision.get("deepstack_visual_indexes") or ()
    mergers |= {f"{prefix}deepstack_merger_list.{level}": merged for level in range(len(levels))}
    for merger, normed in mergers.items():
        found |= _norm(f"{merger}.norm", normed)
        found |= _linear(f"{merger}.linear_fc1", merged, merged) | _linear(f"{merger}.linear_fc2", text_width, merged)
    return found


def _gemma4_text(text: Config, prefix: str) -> Shapes:
    """Gemma 4: norms before and after, a factor to each layer, experts or per-layer inputs in some sizes."""
    width, extra = text["hidden_size"], text["hidden_size_per_layer_input"]
    found: Shapes = {f"{prefix}embed_tokens.weight": (text["vocab_size"], width), f"{prefix}norm.weight": (width,)}
    first_shared = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    for number, layer in enumerate(_layers(text, prefix)):
        full, shared = text["layer_types"][number] == "full_attention", number >= first_shared
        head = text["global_head_dim"] if full else text["head_dim"]
        same = full and text["attention_k_eq_v"]
        keys = text["num_global_key_value_heads"] if same else text["num_key_value_heads"]
        shape = {**text, "head_dim": head, "num_key_value_heads": keys}
        attention = _attention(shape, layer) | {f"{layer}.self_attn.{which}_norm.weight": (head,) for which in "qk"}
        gone = [f".{name}" for name in ("k_proj", "v_proj", "k_norm") if shared or (same and name == "v_proj")]
        found |= {name: size for name, size in attention.items() if not any(part in name for part in gone)}
        wide = 2 if shared and text["use_double_wide_mlp"] else 1
        found |= _dense(f"{layer}.mlp", wide * text["intermediate_size"], width)
        norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        found |= {f"{layer}.{name}_layernorm.weight": (width,) for name in norms}
        found[f"{layer}.layer_scalar"] = (1,)
        if text["enable_moe_block"]:
            experts, size = text["num_experts"], text["moe_intermediate_size"]
            inner = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
            found |= {f"{layer}.{name}.weight": (width,) for name in inner}
            found |= {f"{layer}.router.proj.weight": (experts, width), f"{layer}.router.scale": (width,)}
            found |= {
                f"{layer}.router.per_expert_scale": (experts,),
                f"{layer}.experts.gate_up_proj": (experts, 2 * size, width),
                f"{layer}.experts.down_proj": (experts, width, size),
            }
        if extra:
            found |= {
                f"{layer}.per_layer_input_gate.weight": (extra, width),
                f"{layer}.per_layer_projection.weight": (width, extra),
                f"{layer}.post_per_layer_input_norm.weight": (width,),
            }
    if extra:
        packed = text["num_hidden_layers"] * extra
        found[f"{prefix}embed_tokens_per_layer.weight"] = (text["vocab_size_per_layer_input"], packed)
        found[f"{prefix}per_layer_model_projection.weight"] = (packed, width)
        found[f"{prefix}per_layer_projection_norm.weight"] = (extra,)
    return found


def _gemma4_tower(vision: Config, prefix: str) -> Shapes:
    width, size, head = vision["hidden_size"], vision["intermediate_size"], vision["head_dim"]
    found: Shapes = {
        f"{prefix}patch_embedder.input_proj.weight": (width, 3 * vision["patch_size"] ** 2),
        f"{prefix}patch_embedder.position_embedding_table": (2, vision["position_embedding_size"], width),
    }
    for number in range(vision["num_hidden_layers"]):
        layer = f"{prefix}encoder.layers.{number}"
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        found |= {f"{layer}.{name}_layernorm.weight": (width,) for name in norms}
        found |= {f"{layer}.self_attn.{which}_norm.weight": (head,) for which in "qk"}
        queries, keys = vision["num_attention_heads"] * head, vision["num_key_value_heads"] * head
        matrices = {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (size, width),
            "mlp.up_proj": (size, width),
            "mlp.down_proj": (width, size),
        }
        found |= {f"{layer}.{name}.linear.weight": shape for name, shape in matrices.items()}
        if vision["use_clipped_linears"]:
            bounds = ("input_min", "input_max", "output_min", "output_max")
            found |= {f"{layer}.{name}.{bound}": () for name in matrices for bound in bounds}
    if vision["standardize"]:
        found |= {f"{prefix}std_bias": (width,), f"{prefix}std_scale": (width,)}
    return found


def _lfm2_text(text: Config, prefix: str) -> Shapes:
    """LFM2: short convolutions, and attention in some layers."""
    width, head = text["hidden_size"], _head_dim(text)
    found: Shapes = {f"{prefix}embed_tokens.weight": (text["vocab_size"], width)}
    found[f"{prefix}embedding_norm.weight"] = (width,)
    for number, layer in enumerate(_layers(text, prefix)):
        found |= {f"{layer}.{name}_norm.weight": (width,) for name in ("operator", "ffn")}
        size = text["block_ff_dim"]
        found |= {f"{layer}.feed_forward.{name}.weight": (size, width) for name in ("w1", "w3")}
        found[f"{layer}.feed_forward.w2.weight"] = (width, size)
        if number in text["full_attn_idxs"]:
            attention = _attention(text, layer)
            found |= {name.replace("o_proj", "out_proj"): shape for name, shape in attention.items()}
            found |= {f"{layer}.self_attn.{which}_layernorm.weight": (head,) for which in "qk"}
            continue
        found |= {
            f"{layer}.conv.conv.weight": (width, 1, text["conv_L_cache"]),
            f"{layer}.conv.in_proj.weight": (3 * width, width),
            f"{layer}.conv.out_proj.weight": (width, width),
        }
    return found


def _siglip2(vision: Config, prefix: str) -> Shapes:
    """SigLIP for pictures of any shape: the patch convolution is a matrix."""
    side, patch = int(vision["num_patches"] ** 0.5), vision["patch_size"]
    found = _siglip({**vision, "image_size": side * patch}, prefix)
    found[f"{prefix}embeddings.patch_embedding.weight"] = (vision["hidden_size"], 3 * patch**2)
    return found


def _siglip(vision: Config, prefix: str) -> Shapes:
    width, size, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    found: Shapes = {
        f"{prefix}embeddings.patch_embedding.weight": (width, 3, patch, patch),
        f"{prefix}embeddings.patch_embedding.bias": (width,),
        f"{prefix}embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2, width),
    }
    for number in range(vision["num_hidden_layers"]):
        layer = f"{prefix}encoder.layers.{number}"
        found |= _norm(f"{layer}.layer_norm1", width) | _norm(f"{layer}.layer_norm2", width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= _linear(f"{layer}.self_attn.{name}", width, width)
        found |= _linear(f"{layer}.mlp.fc1", size, width) | _linear(f"{layer}.mlp.fc2", width, size)
    return found | _norm(f"{prefix}post_layernorm", width)


def _llava(config: Config) -> Shapes:
    """CLIP's tower or SigLIP's, two layers, and the end of a line where there are tiles."""
    vision, width = config["vision_config"], config["text_config"]["hidden_size"]
    tower, size = "vision_tower.vision_model.", vision["hidden_size"]
    found = _siglip(vision, tower)
    if vision["model_type"] == "clip_vision_model":
        found.pop(f"{tower}embeddings.patch_embedding.bias")
        (positions, _) = found[f"{tower}embeddings.position_embedding.weight"]
        found[f"{tower}embeddings.position_embedding.weight"] = (positions + 1, size)
        found[f"{tower}embeddings.class_embedding"] = (size,)
        found |= _norm(f"{tower}pre_layrnorm", size)
    if config["model_type"] != "llava":
        found["image_newline"] = (width,)
    projector = "multi_modal_projector."
    return found | _linear(f"{projector}linear_1", width, size) | _linear(f"{projector}linear_2", width, width)


def _pixtral(config: Config) -> Shapes:
    """Pixtral's tower, and Mistral 3's projector."""
    vision, text_width = config["vision_config"], config["text_config"]["hidden_size"]
    width, size, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    tower = "vision_tower."
    found: Shapes = {f"{tower}patch_conv.weight": (width, 3, patch, patch), f"{tower}ln_pre.weight": (width,)}
    for number in range(vision["num_hidden_layers"]):
        layer = f"{tower}transformer.layers.{number}"
        found |= {f"{layer}.attention.{name}_proj.weight": (width, width) for name in ("q", "k", "v", "o")}
        found |= {f"{layer}.{name}_norm.weight": (width,) for name in ("attention", "ffn")}
        found |= _dense(f"{layer}.feed_forward", size, width)
    merged = width * config["spatial_merge_size"] ** 2
    return found | {
        "multi_modal_projector.norm.weight": (width,),
        "multi_modal_projector.patch_merger.merging_layer.weight": (width, merged),
        "multi_modal_projector.linear_1.weight": (text_width, width),
        "multi_modal_projector.linear_2.weight": (text_width, text_width),
    }


def _intern_vit(config: Config) -> Shapes:
    """InternVL's 6B tower (RMS norms, on queries and keys too, no biases there), and its projector."""
    vision, text_width = config["vision_config"], config["text_config"]["hidden_size"]
    width, size, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"][0]
    tower, num_patches = "vision_tower.", (vision["image_size"][0] // patch) ** 2
    found: Shapes = {
        f"{tower}embeddings.cls_token": (1, 1, width),
        f"{tower}embeddings.position_embeddings": (1, num_patches + 1, width),
        f"{tower}embeddings.patch_embeddings.projection.weight": (width, 3, patch, patch),
        f"{tower}embeddings.patch_embeddings.projection.bias": (width,),
    }
    for number in range(vision["num_hidden_layers"]):
        layer = f"{tower}encoder.layer.{number}"
        found |= {f"{layer}.attention.{name}_proj.weight": (width, width) for name in ("q", "k", "v")}
        found |= {f"{layer}.attention.{name}_norm.weight": (width,) for name in ("q", "k")}
        found |= _linear(f"{layer}.attention.projection_layer", width, width)
        found |= {f"{layer}.layernorm_{name}.weight": (width,) for name in ("before", "after")}
        found |= {f"{layer}.lambda_{which}": (width,) for which in (1, 2)}
        found |= _linear(f"{layer}.mlp.fc1", size, width) | _linear(f"{layer}.mlp.fc2", width, size)
    merged = width * round(1 / config["downsample_ratio"]) ** 2
    projector = "multi_modal_projector."
    found |= _norm(f"{projector}layer_norm", merged) | _linear(f"{projector}linear_1", text_width, merged)
    return found | _linear(f"{projector}linear_2", text_width, text_width)
