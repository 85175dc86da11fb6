"""Seeded checkpoints of every family, built from NumPy alone: the same weights wherever and whenever they are built.

    write_checkpoint(folder, "qwen2_5_vl")

writes config.json, model.safetensors (float32, the layout the models are published in), tokenizer.json and the
processor's settings. Each weight comes from `numpy.random.RandomState`, whose streams NumPy promises never to change,
seeded by the family's seed and the weight's name.

The rows of the output projection that belong to end, padding and picture tokens are zero: their logit is exactly 0 and
never the largest, so no reply ends early.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from references.tiny_shapes import shapes

MERGES = (
    ("Ġ", "t"),
    ("h", "e"),
    ("i", "n"),
    ("Ġ", "a"),
    ("Ġt", "he"),
    ("e", "r"),
    ("o", "n"),
    ("s", "er"),
    ("u", "ser"),
)
EOS, PAD = "<eos>", "<pad>"

QWEN_WORDS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
GEMMA_WORDS = (
    "<bos>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<start_of_turn>",
    "<end_of_turn>",
)
TILE_WORDS = (
    "<|im_start|>",
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    "<video>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
GRID_WORDS = ("<bos>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
GEMMA4_WORDS = (
    *("<bos>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>", "<|video|>"),
    *("<|audio>", "<|audio|>", "<audio|>"),
)
LFM2_WORDS = (
    *("<|startoftext|>", "<|im_start|>", "<|im_end|>", "<image>"),
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7)),
)
PADDLE_WORDS = ("<|begin_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>")
LLAVA_WORDS = ("<image>", "<video>")
INTERN_WORDS = ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")


@dataclass(frozen=True, slots=True)
class Family:
    """What a checkpoint is built from. `text` and `vision` are config sections without what the tokenizer decides.

    `image` and `video` are the processors' settings; `names` are the token strings a tokenizer_config.json gives names
    to; `seed` is one at which no case comes close to a tie between two tokens.
    """

    kind: str
    words: tuple[str, ...]
    text: dict[str, Any]
    vision: dict[str, Any]
    image: dict[str, Any]
    video: dict[str, Any] | None
    names: dict[str, str]
    seed: int
    top: dict[str, Any] = field(default_factory=dict)
    tied: bool = False

    def token(self, word: str) -> int:
        return (PAD, EOS, *self.words).index(word)

    @property
    def vocab_size(self) -> int:
        return 2 + len(self.words) + 256 + len(MERGES)

    def config(self) -> dict[str, Any]:
        """config.json."""
        common = {"pad_token_id": self.token(PAD), "eos_token_id": self.token(EOS), "tie_word_embeddings": self.tied}
        common |= {"bos_token_id": self.token("<bos>") if "<bos>" in self.words else None}
        text = {"vocab_size": self.vocab_size, "max_position_embeddings": 8192, **common, **self.text}
        if self.kind.startswith("qwen"):
            ids = {
                f"{name}_token_id": self.token(f"<|{word}|>")
                for name, word in (
                    ("image", "image_pad"),
                    ("video", "video_pad"),
                    ("vision_start", "vision_start"),
                    ("vision_end", "vision_end"),
                )
            }
        elif self.kind == "gemma3":
            ids = {
                "image_token_index": self.token("<image_soft_token>"),
                "boi_token_index": self.token("<start_of_image>"),
                "eoi_token_index": self.token("<end_of_image>"),
            }
        elif self.kind == "paddleocr_vl":
            ids = {"image_token_id": self.token("<|IMAGE_PLACEHOLDER|>")}
            ids |= {f"vision_{end}_token_id": self.token(f"<|IMAGE_{end.upper()}|>") for end in ("start", "end")}
        elif self.kind == "gemma4":
            words = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"}
            words |= {"boi": "<|image>", "eoi": "<image|>", "boa": "<|audio>"}
            ids = {f"{name}_token_id": self.token(word) for name, word in words.items()}
        elif self.kind == "mistral3":
            ids = {"image_token_index": self.token("[IMG]")}
        elif self.kind == "paligemma":
            ids = {"image_token_index": self.token("<image>")}
        elif self.kind.startswith("llava"):
            ids = {f"{name}_token_index": self.token(f"<{name}>") for name in ("image", "video")}
        else:
            word = "<IMG_CONTEXT>" if self.kind == "internvl" else "<image>"
            ids = {"image_token_id": self.token(word)}
        return {
            "model_type": self.kind,
            "architectures": [_ARCHITECTURES[self.kind]],
            "dtype": "float32",
            **common,
            **ids,
            **self.top,
            "text_config": text,
            "vision_config": self.vision,
        }

    def silent_tokens(self) -> list[int]:
        """The tokens whose logit is always zero."""
        words = {EOS, PAD, "<|image_pad|>", "<|video_pad|>", "<image_soft_token>", "<image>", "<video>"}
        words |= {"[IMG]", "<IMG_CONTEXT>", "<|IMAGE_PLACEHOLDER|>", "<|image|>", "<|audio|>", "<|video|>"}
        return sorted(self.token(word) for word in words & {EOS, PAD, *self.words})


_ARCHITECTURES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "paddleocr_vl": "PaddleOCRVLForConditionalGeneration",
}


def tokenizer_of(family: Family) -> Tokenizer:
    """Byte-level BPE whose vocabulary is written down, not trained: special words, 256 bytes, a few merges."""
    entries = [
        PAD,
        EOS,
        *family.words,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *("".join(pair) for pair in MERGES),
    ]
    tokenizer = Tokenizer(models.BPE(vocab={entry: at for at, entry in enumerate(entries)}, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in (PAD, EOS, *family.words)]
    )
    return tokenizer


def draw_weights(family: Family) -> dict[str, np.ndarray]:
    """Every weight, float32, by its name in the published layout."""
    weights: dict[str, np.ndarray] = {}
    for name, shape in shapes(family.config()).items():
        stream = np.random.RandomState(zlib.crc32(f"{family.seed} {name}".encode()))
        values = stream.standard_normal(shape)
        if name.endswith(("_min", "_max")):
            values = np.array(-1.5 if name.endswith("_min") else 1.5)  # some values are beyond
        elif name.endswith(("layer_scalar", "std_scale", "router.scale", "per_expert_scale")):
            values = 1.0 + 0.1 * values
        elif "embed_tokens_per_layer" in name:
            values *= 0.5
        elif "embed_tokens" in name:
            # A tied table has to be small, or every token's likeliest successor is itself.
            values *= 0.04 if family.tied else 0.5
        elif "pos_embed" in name or "position_embedding" in name:
            values *= 0.2
        elif len(shape) > 1:
            turned = ("experts" in name and family.kind == "qwen3_vl_moe") or "mm_input_projection" in name
            values *= 1.2 / np.sqrt(shape[-2] if turned else np.prod(shape[1:]) if "experts" not in name else shape[-1])
        elif name == "image_newline":
            values *= 0.5
        elif "lambda" in name:
            values = 0.5 + 0.1 * values
        elif name.endswith(("norm.weight", "ln_pre.weight")) or (
            "norm" in name.split(".")[-2] and name.endswith("weight")
        ):
            values = 0.1 * values + (0.0 if _norm_is_stored_less_one(family.kind, name) else 1.0)
        elif name.endswith(("A_log", "dt_bias")):
            values = 0.5 * values
        else:
            values *= 0.1
        weights[name] = values.astype(np.float32)
    table = next(name for name in weights if ("embed_tokens" if family.tied else "lm_head") in name)
    weights[table][family.silent_tokens()] = 0.0
    return weights


def _norm_is_stored_less_one(kind: str, name: str) -> bool:
    if kind in ("gemma3", "paligemma"):
        return not name.startswith("vision_tower.")
    return kind.startswith("qwen3_5") and ".visual." not in name and ".linear_attn." not in name


def weight_sum(weights: dict[str, np.ndarray]) -> float:
    """A number that tells whether two sets of weights are the same."""
    return float(
        sum(
            np.abs(array.astype(np.float64)).sum() * (1 + zlib.crc32(name.encode()) % 7)
            for name, array in weights.items()
        )
    )


def write_checkpoint(folder: Path, family: Family) -> dict[str, np.ndarray]:
    """Write a folder that mlxgen, transformers and mlx-vlm load; returns the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = draw_weights(family)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer_of(family).save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "processor_class": family.top.get("processor_class", _PROCESSORS[family.kind]),
        **({"bos_token": "<bos>"} if "<bos>" in family.words else {}),
        **family.names,
    }
    processor: dict[str, Any] = {"processor_class": _PROCESSORS[family.kind]}
    if family.kind == "gemma3":
        processor["image_seq_length"] = family.top["mm_tokens_per_image"]
    elif family.kind == "mistral3":
        processor |= {"patch_size": family.vision["patch_size"], "spatial_merge_size": family.top["spatial_merge_size"]}
    elif family.kind == "internvl":
        processor["image_seq_length"] = family.top["image_seq_length"]
    elif family.kind.startswith("llava"):
        processor |= llava_processor(family)
    elif not family.kind.startswith(("qwen", "paddle", "gemma4", "lfm2", "paligemma")):
        side = family.vision["image_size"] // family.vision["patch_size"] // family.top["scale_factor"]
        processor["image_seq_len"] = side * side
    files: dict[str, Any] = {
        "config.json": family.config(),
        "tokenizer_config.json": tokenizer_config,
        "preprocessor_config.json": family.image | {"processor_class": _PROCESSORS[family.kind]},
        "processor_config.json": processor,
    }
    if family.video is not None:
        files["video_preprocessor_config.json"] = family.video
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    return weights


def llava_processor(family: Family) -> dict[str, Any]:
    """What the processors of the LLaVA families are told of the model."""
    strategy = family.top["vision_feature_select_strategy"]
    if family.kind == "llava_onevision":
        patches = (family.vision["image_size"] // family.vision["patch_size"]) ** 2
        aspect_ratio = family.top["vision_aspect_ratio"]
        own: dict[str, Any] = {"num_image_tokens": patches, "vision_aspect_ratio": aspect_ratio}
    else:
        own = {"patch_size": family.vision["patch_size"], "num_additional_image_tokens": 1}
    return {"vision_feature_select_strategy": strategy, **own}


_PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
    "gemma3": "Gemma3Processor",
    "idefics3": "Idefics3Processor",
    "smolvlm": "SmolVLMProcessor",
    "mistral3": "PixtralProcessor",
    "llava": "LlavaProcessor",
    "llava_next": "LlavaNextProcessor",
    "llava_onevision": "LlavaOnevisionProcessor",
    "paligemma": "PaliGemmaProcessor",
    "internvl": "InternVLProcessor",
    "gemma4": "Gemma4Processor",
    "lfm2_vl": "Lfm2VlProcessor",
    "paddleocr_vl": "PaddleOCRVLProcessor",
}
