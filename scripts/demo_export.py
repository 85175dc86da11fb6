"""Writes the trained demonstration model as a folder any loader of Qwen2.5-VL checkpoints reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import demo_data as data
import mlx.core as mx
from tokenizers import Tokenizer

# System line first unless the conversation brings its own; media where they stand in the message; one line per turn.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.first and message.role != 'system' -%}"
    "{{ '<|im_start|>system\\n" + data.SYSTEM + "<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' or 'video' in part -%}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part -%}{{ part.text }}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
# Every square picture becomes 112 x 112. The limits leave room around 112 * 112 because the resize rule takes square
# roots and rounds down: with both at exactly 12544, rounding would make 84 x 84 of some sizes.
MIN_PIXELS, MAX_PIXELS = 12_400, 12_700


def write_model(folder: Path, tokenizer: Tokenizer, config: dict[str, Any], params: dict[str, mx.array]) -> None:
    """Writes config, float16 weights, tokenizer, chat template, preprocessor and generation settings into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.astype(mx.float16) for name, value in sorted(params.items())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    named = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    end = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    image = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "merge_size": data.MERGE,
        "patch_size": data.PATCH,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "temporal_patch_size": data.TEMPORAL,
    }
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": end,
            "pad_token_id": end[1],
        },
        "tokenizer_config.json": {
            "add_prefix_space": False,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "extra_special_tokens": named,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": config["text_config"]["max_position_embeddings"],
            "pad_token": "<|endoftext|>",
            "processor_class": "Qwen2_5_VLProcessor",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
            **named,
        },
        "preprocessor_config.json": {
            **image,
            "image_processor_type": "Qwen2VLImageProcessor",
            "max_pixels": MAX_PIXELS,
            "min_pixels": MIN_PIXELS,
            "processor_class": "Qwen2_5_VLProcessor",
        },
        "processor_config.json": {
            "image_processor": {**image, "image_processor_type": "Qwen2VLImageProcessor", "size": size},
            "processor_class": "Qwen2_5_VLProcessor",
            "video_processor": {
                **image,
                "do_sample_frames": True,
                "fps": 2,
                "max_frames": 8,
                "min_frames": 4,
                "size": size,
                "video_processor_type": "Qwen2VLVideoProcessor",
            },
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


CARD = """# The embedded demonstration model

A vision-language model of {parameters:,} parameters in the Qwen2.5-VL checkpoint layout ({megabytes:.1f} MB in
float16). It exists so that stopping and resuming can be shown at once, without a download. It is a toy: it knows
coloured shapes on a light card and clips of one moving shape, and nothing else.

## What it answers

Exact match of the whole greedy answer, end mark included, on held-out pictures, clips and questions (another seed than
the training data), each question asked alone; measured on the float16 weights as shipped.

Claimed (90% or more):

{claimed}

Not claimed (measured all the same):

{rest}

"Worded freely" means wordings, lower case and missing marks that only the last part of the training had.

## Limits

- Shapes: {kinds}. Colours: {colours}. One to four shapes, each in its own quarter of the picture; a single one
  may lie anywhere. Light background. About a photograph it will say something about shapes all the same.
- Pictures are resized; it was trained on 112 x 112 pixels (16 picture tokens), that is, on square pictures only.
- Clips: one shape, 4 to 8 frames at 2 or 4 frames a second; it moves left, right, up or down, or rests.
- It was trained on English questions close to the ones in `scripts/demo_data.py`, dialogues of up to four turns,
  pictures in the first turn only. It does not know any other language, fact or task.

## Recipe

`scripts/train_demo.py`, which explains the stages, in float32 with MLX on one CPU core; AdamW (0.9, 0.98). All data is
generated; there is no other training data. The numbers:

{recipe}

Licence: Apache-2.0, as the package.
"""


def write_card(folder: Path, recipe: dict[str, Any], results: dict[str, tuple[int, int]]) -> None:
    """Writes `MODEL_CARD.md`: the measured accuracies, what is claimed of them, the limits and the recipe."""
    weights = folder / "model.safetensors"
    rows = {name: f"| {name} | {right / asked:.3f} | {right}/{asked} |" for name, (right, asked) in results.items()}
    head = "| question | exact match | right |\n|---|---|---|\n"
    good = [name for name, (right, asked) in results.items() if right >= 0.9 * asked]
    text = CARD.format(
        parameters=sum(value.size for value in mx.load(str(weights)).values()),
        megabytes=weights.stat().st_size / 1e6,
        claimed=head + "\n".join(rows[name] for name in good),
        rest=head + "\n".join(row for name, row in rows.items() if name not in good),
        kinds=", ".join(data.KIND_NAMES),
        colours=", ".join(data.COLOUR_NAMES),
        recipe="\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in recipe.items()),
    )
    (folder / "MODEL_CARD.md").write_text(text)
