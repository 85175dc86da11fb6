#!/usr/bin/env python3
"""Trains and evaluates the embedded demonstration model: a tiny vision-language model in the Qwen2.5-VL layout.

Recipe (everything follows from `--seed` and the numbers in `RECIPE`; one CPU core, float32):

1. A byte-level BPE vocabulary is trained on generated dialogues.
2. Tower: the vision tower learns dense labels for each 28-pixel cell (kind, colour and motion of the shape centred
   there) through three linear heads that are thrown away afterwards.
3. Language: all weights learn the answers of generated dialogues (cross-entropy on answers and their `<|im_end|>`
   only), first about one or two shapes, then about everything; the dense labels stay as a small auxiliary loss.
4. Weights are rounded to float16, and only then evaluated on held-out questions from another seed.

Run (a fast BLAS matters: with Debian's libopenblas0-pthread, about 40 times, but only when it picks the right kernels;
`OPENBLAS_VERBOSE=2` tells, and `OPENBLAS_CORETYPE`, COOPERLAKE or SKYLAKEX on a recent Xeon, decides):

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=.../openblas-pthread/libblas.so.3 \\
        python scripts/train_demo.py --work FOLDER --export vision/mlxgen_vision/demo_model
    python scripts/train_demo.py --evaluate vision/mlxgen_vision/demo_model

Training goes on from the checkpoint in `--work` when there is one; every step draws from its own seed, so an
interrupted run reads the same data as an uninterrupted one.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import demo_data as data
import demo_forward as forward
import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

RECIPE = {
    "width": 128,
    "tower_steps": 800,
    "tower_rate": 1.5e-3,
    "easy_steps": 200,
    "language_steps": 2200,
    "language_rate": 1.5e-3,
    "auxiliary": 0.1,
    "weight_decay": 0.01,
    "clip": 1.0,
}
# (form of dialogue, share of the steps, dialogues in a step, most turns in a dialogue)
TOWER_FORMS = (("picture", 0.7, 64, 1), ("clip4", 0.3, 28, 1))
FORMS = (
    ("picture", 0.56, 48, 4),
    ("pictures2", 0.12, 24, 4),
    ("pictures3", 0.05, 16, 4),
    ("clip4", 0.14, 24, 4),
    ("clip6", 0.05, 16, 4),
    ("clip8", 0.04, 12, 4),
    ("chat", 0.04, 32, 3),
)
EVALUATION_SEED, NUM_HELD_OUT = 20_260_701, 200
HEADS = {"kind": len(data.KIND_NAMES) + 1, "colour": len(data.COLOUR_NAMES) + 1, "motion": len(data.WAYS) + 1}


# ---------------------------------------------------------------------------------------------- tokenizer and config


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
    width, num_layers = RECIPE["width"], 4
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
    return params


# ---------------------------------------------------------------------------------------------- losses and steps


def dense_loss(params: forward.Params, features: mx.array, labels: mx.array) -> mx.array:
    """Mean cross-entropy of the three cell heads; cells with a shape weigh as much as the many empty ones."""
    flat, target = features.reshape(-1, features.shape[-1]), labels.reshape(-1, len(HEADS))
    weight = mx.where(target[:, 0] > 0, 3.0, 1.0)
    total = mx.array(0.0)
    for index, name in enumerate(HEADS):
        out = flat @ params[f"head.{name}.weight"].T + params[f"head.{name}.bias"]
        total = total + (forward.cross_entropy(out, target[:, index]) * weight).sum() / weight.sum()
    return total


class Trainer:
    """Owns parameters and AdamW moments on the calling thread; a checkpoint of them survives a stop."""

    def __init__(self, work: Path, seed: int) -> None:
        self.work, self.seed = work, seed
        work.mkdir(parents=True, exist_ok=True)
        path = work / "tokenizer.json"
        if not path.exists():
            train_tokenizer(seed).save(str(path))
        self.tokenizer = Tokenizer.from_file(str(path))
        self.encoder = data.Encoder(self.tokenizer)
        self.config = config_of(self.tokenizer)
        self.shape = forward.Shape.of(self.config)
        self.layout = forward.layout_of(self.shape, data.GRID, data.GRID)
        self.step, self.params = 0, initial_params(seed, self.shape)
        self.moments = [{k: mx.zeros_like(v) for k, v in self.params.items()} for _ in range(2)]
        self.log: dict[str, list[float]] = defaultdict(list)
        self.checkpoint = work / "checkpoint.safetensors"
        if self.checkpoint.exists():
            arrays, meta = mx.load(str(self.checkpoint), return_metadata=True)
            self.step = int(meta["step"])
            self.params, *self.moments = (
                {k[2:]: v for k, v in arrays.items() if k.startswith(part)} for part in ("p.", "m.", "v.")
            )
        self.gradient = mx.value_and_grad(self._loss)
        self.update = mx.compile(self._update)

    def save(self) -> None:
        arrays = {
            part + k: v for part, d in zip("pmv", (self.params, *self.moments), strict=True) for k, v in d.items()
        }
        arrays = {f"{k[0]}.{k[1:]}": v for k, v in arrays.items()}
        temporary = self.checkpoint.with_name("checkpoint.new.safetensors")
        mx.save_safetensors(str(temporary), arrays, {"step": str(self.step)})
        temporary.replace(self.checkpoint)

    def _loss(self, params: forward.Params, batch: data.Batch, language: bool) -> tuple[mx.array, mx.array]:
        features, dense = None, mx.array(0.0)
        if len(batch.patches):
            features = forward.tower(params, self.shape, mx.array(batch.patches), self.layout)
            dense = dense_loss(params, features, mx.array(batch.cell_labels))
        if not language:
            return dense, dense
        states = forward.hidden(
            params,
            self.shape,
            mx.array(batch.tokens),
            mx.array(batch.positions),
            features,
            mx.array(batch.feature_index),
        )
        rows = np.flatnonzero(batch.targets.reshape(-1) >= 0)
        chosen = states.reshape(-1, self.shape.width)[mx.array(rows)]
        targets = mx.array(batch.targets.reshape(-1)[rows])
        answer = forward.cross_entropy(forward.logits(params, chosen), targets).mean()
        return answer + RECIPE["auxiliary"] * dense, answer

    @staticmethod
    def _update(
        params: forward.Params,
        gradients: forward.Params,
        first: forward.Params,
        second: forward.Params,
        numbers: mx.array,
    ) -> tuple[forward.Params, forward.Params, forward.Params]:
        """AdamW (0.9, 0.98); `numbers` = rate, gradient scale, both bias corrections."""
        rate, scale, c1, c2 = numbers[0], numbers[1], numbers[2], numbers[3]
        new: forward.Params = {}
        m_new: forward.Params = {}
        v_new: forward.Params = {}
        for name, value in params.items():
            g = gradients[name] * scale
            m_new[name] = 0.9 * first[name] + 0.1 * g
            v_new[name] = 0.98 * second[name] + 0.02 * g * g
            decay = RECIPE["weight_decay"] if value.ndim > 1 else 0.0
            new[name] = value - rate * (m_new[name] * c1 / (mx.sqrt(v_new[name] * c2) + 1e-8) + decay * value)
        return new, m_new, v_new

    def batch(self, step: int) -> tuple[str, bool, data.Batch]:
        """The data of one step: a function of seed and step alone."""
        rng = np.random.default_rng([self.seed, 3, step])
        language = step >= RECIPE["tower_steps"]
        easy = language and step < RECIPE["tower_steps"] + RECIPE["easy_steps"]
        forms = FORMS if language else TOWER_FORMS
        share = np.array([f[1] for f in forms])
        form, _, count, most = forms[int(rng.choice(len(forms), p=share / share.sum()))]
        num_turns = int(rng.integers(1, most + 1))
        # as many turns in every dialogue of a step: less padding; fewer dialogues when they are long
        count = count * 5 // (num_turns + 3) if language else count
        dialogues = [data.make_dialogue(rng, form, num_turns, easy) for _ in range(count)]
        return form, language, self.encoder.batch(dialogues)

    def rate(self) -> float:
        """Warm-up and cosine decay, once for the tower and once for the language stage."""
        tower = int(RECIPE["tower_steps"])
        first = self.step < tower
        done, total = (self.step, tower) if first else (self.step - tower, int(RECIPE["language_steps"]))
        top = RECIPE["tower_rate"] if first else RECIPE["language_rate"]
        return top * min(1.0, (done + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1, done / total))))

    def train_step(self) -> None:
        form, language, batch = self.batch(self.step)
        (_, shown), gradients = self.gradient(self.params, batch, language)
        norm = mx.sqrt(sum((g * g).sum() for g in gradients.values()))  # type: ignore[arg-type]
        mx.eval(norm, shown, gradients)
        scale = min(1.0, RECIPE["clip"] / (norm.item() + 1e-6))
        number = self.step + 1
        numbers = mx.array([self.rate(), scale, 1 / (1 - 0.9**number), 1 / (1 - 0.98**number)])
        self.params, *self.moments = self.update(self.params, gradients, *self.moments, numbers)
        mx.eval(self.params, self.moments)
        self.log[form if language else "tower " + form].append(shown.item())
        self.step += 1

    def run(self, export: Path | None) -> None:
        total = int(RECIPE["tower_steps"] + RECIPE["language_steps"])
        start, cpu, first = time.monotonic(), time.process_time(), self.step
        while self.step < total:
            self.train_step()
            if self.step % 50 == 0:
                parts = "  ".join(f"{k} {np.mean(v[-50:]):.4f}" for k, v in sorted(self.log.items()))
                done = self.step - first
                print(
                    f"step {self.step}/{total}  {(time.monotonic() - start) / done:.2f} s/step "
                    f"({(time.process_time() - cpu) / done:.2f} cpu)  {parts}",
                    flush=True,
                )
                self.log.clear()
            if self.step % 100 == 0 or self.step == total:
                self.save()
            if self.step > RECIPE["tower_steps"] and self.step % 500 == 0:
                print(table(self.held_out(40)), flush=True)
        if export is not None:
            self.export(export)

    def held_out(self, number: int) -> dict[str, tuple[int, int]]:
        return evaluate(self.encoder, self.shape, self.params, number)

    def export(self, folder: Path) -> None:
        from demo_export import write_model

        params = {k: v for k, v in self.params.items() if not k.startswith("head.")}
        write_model(folder, self.tokenizer, self.config, params)


# ---------------------------------------------------------------------------------------------- evaluation


def evaluate(
    encoder: data.Encoder, shape: forward.Shape, params: forward.Params, number: int
) -> dict[str, tuple[int, int]]:
    """Exact matches and questions per kind, each question asked alone about its own held-out picture or clip.

    Greedy decoding gives the right answer exactly when every answer token, `<|im_end|>` included, has the highest logit
    after the right ones before it; so one forward pass per question is enough.
    """
    layout = forward.layout_of(shape, data.GRID, data.GRID)
    right: dict[str, int] = defaultdict(int)
    asked: dict[str, int] = defaultdict(int)
    for index, (form, *_) in enumerate(FORMS):
        rng = np.random.default_rng([EVALUATION_SEED, index])
        dialogues = []
        for _ in range(number):
            whole = data.make_dialogue(rng, form, 9)
            dialogues += [data.Dialogue(whole.media, [turn]) for turn in whole.turns]
        for at in range(0, len(dialogues), 40):
            batch = encoder.batch(dialogues[at : at + 40])
            features = forward.tower(params, shape, mx.array(batch.patches), layout) if len(batch.patches) else None
            states = forward.hidden(
                params,
                shape,
                mx.array(batch.tokens),
                mx.array(batch.positions),
                features,
                mx.array(batch.feature_index),
            )
            best = np.array(mx.argmax(forward.logits(params, states), -1))
            good = ((best == batch.targets) | (batch.targets < 0)).all(1)
            for kinds, ok in zip(batch.kinds, good, strict=True):
                name = kinds[0] if not form.startswith("clip") else f"{kinds[0]} ({form[4:]} frames)"
                asked[name] += 1
                right[name] += int(ok)
    return {name: (right[name], asked[name]) for name in asked}


def table(results: dict[str, tuple[int, int]]) -> str:
    return "\n".join(f"    {name:<28} {a / b:.3f}  ({a}/{b})" for name, (a, b) in results.items())


def evaluate_folder(folder: Path, number: int) -> dict[str, tuple[int, int]]:
    config = json.loads((folder / "config.json").read_text())
    params = {k: v.astype(mx.float32) for k, v in mx.load(str(folder / "model.safetensors")).items()}
    encoder = data.Encoder(Tokenizer.from_file(str(folder / "tokenizer.json")))
    return evaluate(encoder, forward.Shape.of(config), params, number)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train or evaluate the embedded demonstration model.")
    parser.add_argument("--work", type=Path, help="folder for tokenizer and checkpoint; training goes on from there")
    parser.add_argument("--export", type=Path, help="model folder to write when training is done")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="print exact match per kind of question")
    parser.add_argument("--num", type=int, default=NUM_HELD_OUT, help="held-out media per form of dialogue")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    if arguments.evaluate is not None:
        print(table(evaluate_folder(arguments.evaluate, arguments.num)))
    elif arguments.work is not None:
        Trainer(arguments.work, arguments.seed).run(arguments.export)
    else:
        parser.error("give --work FOLDER to train, or --evaluate FOLDER")


if __name__ == "__main__":
    main()
