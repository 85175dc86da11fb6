"""Tiny seeded vision-language checkpoints of every family, written as folders that `mlxgen.load` takes.

Weights come from a seeded NumPy generator by each parameter's name and shape, in the layout mlx-community publishes.
They are scaled so that what a model says depends on every picture and on all the text before. Head widths of 32 let
KV caches be quantised in groups of 32.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from mlx.utils import tree_flatten
from safetensors.numpy import save_file
from tiny.tokenizer import MERGES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vision_harness import tiny_gemma4, tiny_internvl, tiny_lfm2, tiny_llava, tiny_mistral, tiny_paddle, tiny_paligemma
from vision_harness.tiny_family import TinyFamily

_OTHERS: dict[str, TinyFamily] = {**tiny_mistral.FAMILIES, **tiny_gemma4.FAMILIES}
_OTHERS |= tiny_internvl.FAMILIES
_OTHERS |= tiny_llava.FAMILIES
_OTHERS |= tiny_paligemma.FAMILIES
_OTHERS |= tiny_lfm2.FAMILIES
_OTHERS |= tiny_paddle.FAMILIES

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "smolvlm", "idefics3", "gemma3", *_OTHERS)
WITH_VIDEO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "smolvlm")
NOT_IN_KIT = ("paddleocr_vl",)  # of the parity kit's checkpoints
WITH_WINDOWS = ("gemma3", "gemma4", "gemma4_e")  # rings, which can't be quantised
UNQUANTISED = (*WITH_WINDOWS, "paligemma")
WITH_VIDEO = (*WITH_VIDEO, *(name for name, made in _OTHERS.items() if made.video))

_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_ROWS = tuple(f"<row_{row}_col_{column}>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4))
_TILED = ("<pad>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>")
_SPECIALS = {
    "qwen": (*_QWEN, "<|video_pad|>"),
    "tiled": (*_TILED, "<video>", *_ROWS),
    "gemma": ("<pad>", "<eos>", "<bos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
    + ("<start_of_turn>", "<end_of_turn>"),
    **{name: made.specials for name, made in _OTHERS.items()},
}
_TEMPLATES = {
    "qwen": "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "tiled": "<|im_start|>{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<{{ part['type'] }}>{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    "gemma": "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    **{name: made.template for name, made in _OTHERS.items()},
}
_EOS = {"qwen": "<|im_end|>", "tiled": "<end_of_utterance>", "gemma": "<eos>"}
_EOS |= {name: made.eos for name, made in _OTHERS.items()}

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_QWEN_VISION: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
}


def style(family: str) -> str:
    if family in _OTHERS:
        return family
    return {"smolvlm": "tiled", "idefics3": "tiled", "gemma3": "gemma"}.get(family, "qwen")


def _vocabulary(kind: str) -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*_SPECIALS[kind], *alphabet, *("".join(pair) for pair in MERGES)]


def _write_tokenizer(folder: Path, kind: str) -> None:
    vocabulary = {entry: index for index, entry in enumerate(_vocabulary(kind))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS[kind]])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _EOS[kind],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": _TEMPLATES[kind],
    }
    if kind == "gemma":
        config |= {"bos_token": "<bos>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        config |= {"image_token": "<image_soft_token>"}
    config |= _OTHERS[kind].tokenizer if kind in _OTHERS else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def config_of(family: str) -> dict[str, Any]:
    """The family's config.json, as current transformers writes it."""
    kind = style(family)
    vocabulary = _vocabulary(kind)
    text = _TEXT | {"vocab_size": len(vocabulary), "eos_token_id": vocabulary.index(_EOS[kind])}
    whole: dict[str, Any] = {"model_type": family, "tie_word_embeddings": False}
    rope: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default"}
    if family in _OTHERS:
        return whole | _OTHERS[family].config(vocabulary, text)
    if kind == "tiled":
        whole |= {"image_token_id": vocabulary.index("<image>"), "scale_factor": 2, "vision_config": _SIGLIP}
        text |= {"model_type": "llama", "rope_parameters": rope}
    elif kind == "gemma":
        whole |= {"image_token_index": vocabulary.index("<image_soft_token>"), "mm_tokens_per_image": 16}
        whole |= {"vision_config": _SIGLIP, "tie_word_embeddings": True}
        text |= {
            "model_type": "gemma3_text",
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 24,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        }
    else:
        whole |= {"image_token_id": vocabulary.index("<|image_pad|>")}
        whole |= {"video_token_id": vocabulary.index("<|video_pad|>")}
        vision = _QWEN_VISION | {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 64}
        text |= {"rope_parameters": rope | {"mrope_section": [4, 6, 6]}}
        if family == "qwen2_vl":
            vision = _QWEN_VISION | {"embed_dim": 16, "mlp_ratio": 2, "hidden_size": 64}
        elif family == "qwen2_5_vl":
            vision |= {"window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        else:
            vision |= {"num_position_embeddings": 16}
            text |= {"rope_parameters": rope | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}}
        if family == "qwen3_vl":
            text |= {"num_hidden_layers": 3}
            vision |= {"deepstack_visual_indexes": [0, 1]}
        elif family == "qwen3_5":
            interleaved = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
            text |= {
                "num_hidden_layers": 3,
                "full_attention_interval": 3,
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "linear_conv_kernel_dim": 4,
                "rope_parameters": rope | interleaved,
            }
        whole |= {"vision_config": vision}
    return whole | {"text_config": text}


def _processor(family: str) -> dict[str, Any]:
    kind = style(family)
    if family in _OTHERS:
        return _OTHERS[family].processor
    if kind == "gemma":
        return {"image_processor": {"size": {"height": 64, "width": 64}, "resample": 2}}
    if kind == "tiled":
        common = {"max_image_size": {"longest_edge": 64}, "resample": 1}
        return {
            "image_processor": common | {"size": {"longest_edge": 128}, "do_image_splitting": True},
            "video_processor": common | {"size": {"longest_edge": 64}, "fps": 1, "num_frames": 4},
        }
    common = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "resample": 3}
    clip = {"shortest_edge": 3136, "longest_edge": 28224 if family in ("qwen2_vl", "qwen2_5_vl") else 112896}
    return {
        "image_processor": common | {"size": {"shortest_edge": 3136, "longest_edge": 28224}},
        "video_processor": common | {"size": clip, "fps": 2, "max_frames": 768},
    }


def _modules(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """The family's modules by the prefix their weights get."""
    if family in _OTHERS:
        return _OTHERS[family].modules(config)
    from mlx_lm.models import gemma3_text, llama, qwen2, qwen3, qwen3_5
    from mlxgen_vision.families import gemma3, idefics3, qwen_language
    from mlxgen_vision.text_config import gemma3_arguments, llama_arguments
    from mlxgen_vision.towers import qwen2_5_vl, qwen2_vl, qwen3_vl
    from mlxgen_vision.towers.siglip import SiglipConfig

    if style(family) == "tiled":
        arguments = llama_arguments(config["text_config"])
        vision = idefics3.TiledVision(SiglipConfig.from_dict(_SIGLIP), arguments["hidden_size"], 2)
        return {"language_model.": llama.Model(llama.ModelArgs.from_dict(arguments)), "": vision}
    if family == "gemma3":
        arguments = gemma3_arguments(config["text_config"])
        vision = gemma3.Gemma3Vision(SiglipConfig.from_dict(_SIGLIP), arguments["hidden_size"], 16)
        return {"language_model.": gemma3_text.Model(gemma3_text.ModelArgs.from_dict(arguments)), "": vision}
    rope = qwen_language.RopeDefaults(10000.0, (6, 5, 5), interleaved=True)
    arguments = qwen_language.TextConfig.of(config, rope).arguments
    tower, language = {
        "qwen2_vl": (qwen2_vl.Qwen2VLTower(qwen2_vl.Qwen2VLVisionConfig.from_dict(config["vision_config"])), qwen2),
        "qwen2_5_vl": (
            qwen2_5_vl.Qwen25VLTower(qwen2_5_vl.Qwen25VLVisionConfig.from_dict(config["vision_config"])),
            qwen2,
        ),
    }.get(family, (qwen3_vl.Qwen3VLTower(qwen3_vl.Qwen3VLVisionConfig.from_dict(config["vision_config"])), qwen3))
    if family == "qwen3_5":
        text = qwen3_5.TextModel(qwen3_5.TextModelArgs.from_dict(arguments))
    else:
        text = language.Model(language.ModelArgs.from_dict(arguments))
    return {"language_model.": text, "vision_tower.": tower}


def _weight(
    name: str, shape: tuple[int, ...], seed: int, *, gemma: bool, tied: bool, num_specials: int, embedding: float
) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape)
    language = name.startswith("language_model.")
    if name.endswith("A_log"):
        value = np.log(rng.uniform(0.05, 1.0, shape))  # slow decay: a recurrent state that remembers
    elif name.endswith("dt_bias"):
        value = rng.uniform(-2.0, 0.0, shape)
    elif name.endswith(("_min", "_max")):
        return np.array(-1.5 if name.endswith("_min") else 1.5, np.float32)  # some values are beyond
    elif name.endswith(("layer_scalar", "std_scale")):
        value = 1.0 + 0.1 * noise
    elif name.endswith("embed_tokens.weight"):
        value = noise * embedding
        if tied:
            value[:num_specials] *= 0.1
    elif name.endswith("lm_head.weight"):
        value = noise * (2.5 / np.sqrt(shape[-1]))
        value[:num_specials] *= 0.05
    elif len(shape) == 1:
        scale_is_one = name.endswith("weight") and "bias" not in name and not (gemma and language)
        value = 0.1 * noise + (1.0 if scale_is_one else 0.0)
    else:
        fan_in = int(np.prod(shape[1:])) if "conv" in name or "patch_embedding" in name else shape[-1]
        value = noise * (1.5 / np.sqrt(fan_in))
    return np.ascontiguousarray(value, dtype=np.float32)


def write(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Write the family's checkpoint into `folder` (made if missing)."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, config = style(family), config_of(family)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps(_processor(family)))
    _write_tokenizer(folder, kind)
    weights = {
        prefix + name: _weight(
            prefix + name,
            tuple(value.shape),
            seed,
            gemma=kind in ("gemma", "paligemma"),
            tied=config["tie_word_embeddings"],
            num_specials=len(_SPECIALS[kind]),
            # Gemma 2's layers add little to what goes in; with more of that, the last token would be said for ever.
            embedding=0.06 if kind == "paligemma" else 0.3,
        )
        for prefix, module in _modules(family, config).items()
        for name, value in tree_flatten(module.parameters())
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


@functools.cache
def folder(family: str) -> Path:
    """The family's checkpoint, built once per test run. Don't change it."""
    return write(_root() / family, family)


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="mlxgen-tiny-vlm-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
