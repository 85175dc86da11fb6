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

import demo_data as data
import demo_forward as forward
import mlx.core as mx
import numpy as np
from demo_encoding import Batch, Encoder
from demo_export import write_card, write_model
from demo_start import HEADS, PLACES, config_of, initial_params, train_tokenizer
from tokenizers import Tokenizer

RECIPE = {
    "tower_steps": 800,
    "tower_rate": 1.5e-3,
    "easy_steps": 200,
    "language_steps": 2200,
    "language_rate": 1.5e-3,
    "auxiliary": 0.1,
    "place_from": 1300,
    "place": 0.3,
    "focus_from": 1600,
    "tower_share": 0.3,
    "freely_from": 2200,
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
# Share of the steps by form, late in training (stage 1) and last (stage 2)
SHARES = {
    1: {
        "picture": 0.64,
        "pictures2": 0.11,
        "pictures3": 0.0,
        "clip4": 0.15,
        "clip6": 0.03,
        "clip8": 0.03,
        "chat": 0.04,
    },
    2: {"picture": 0.5, "pictures2": 0.24, "pictures3": 0.0, "clip4": 0.13, "clip6": 0.05, "clip8": 0.05, "chat": 0.03},
}
EVALUATION_SEED, NUM_HELD_OUT = 20_260_701, 200


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


def is_clip(batch: Batch) -> bool:
    return any(kind in ("direction", "clip caption", "clip shape", "clip colour") for kind in batch.kinds[0])


def place_loss(params: forward.Params, states: mx.array, batch: Batch, late: bool) -> mx.array:
    """Mean cross-entropy of where each picture token lies, read from the text model's states after two layers.

    The tower's rotary positions are relative, so only the text model, by M-RoPE distances to the fixed words before a
    picture, can find out where on the canvas a token is; answers alone teach that far more slowly.
    """
    index = batch.feature_index
    rows, columns = np.nonzero(index >= 0)
    number = index[rows, columns]
    cell, patch = number % data.PICTURE_TOKENS, number // data.PICTURE_TOKENS
    first = np.full(len(index), patch.max() + 1)
    np.minimum.at(first, rows, patch)
    labels = {"row": cell // data.CELLS, "column": cell % data.CELLS, "ordinal": patch - first[rows]}
    shown = batch.cell_labels.reshape(-1, len(HEADS))[number, 0] > 0
    labels |= {f"shape {name}": np.where(shown, labels[name] + 1, 0) for name in ("row", "column")}
    weight = mx.array(np.where(shown, 3.0, 1.0).astype(np.float32))
    chosen = states.reshape(-1, states.shape[-1])[mx.array(rows * index.shape[1] + columns)]
    chosen = forward.rms_norm(chosen, mx.array(1.0), 1e-6)
    total = mx.array(0.0)
    for name in list(PLACES)[: None if late else 3]:
        out = chosen @ params[f"head.{name}.weight"].T + params[f"head.{name}.bias"]
        loss = forward.cross_entropy(out, mx.array(labels[name].astype(np.int32)))
        total = total + ((loss * weight).sum() / weight.sum() if name.startswith("shape") else loss.mean())
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
        self.encoder = Encoder(self.tokenizer)
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
            for part, values in zip("pmv", (self.params, *self.moments), strict=True):
                values.update({k[2:]: v for k, v in arrays.items() if k.startswith(part + ".")})
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

    def _loss(self, params: forward.Params, batch: Batch, language: bool) -> tuple[mx.array, ...]:
        features, dense = None, mx.array(0.0)
        if len(batch.patches):
            features = forward.tower(params, self.shape, mx.array(batch.patches), self.layout)
            if language and self._spare_tower(batch):
                features = mx.stop_gradient(features)
            else:
                dense = dense_loss(params, features, mx.array(batch.cell_labels))
        if not language:
            return dense, dense, mx.array(0.0)
        taps: list[mx.array] = []
        states = forward.hidden(
            params,
            self.shape,
            mx.array(batch.tokens),
            mx.array(batch.positions),
            features,
            mx.array(batch.feature_index),
            taps,
        )
        rows = np.flatnonzero(batch.targets.reshape(-1) >= 0)
        chosen = states.reshape(-1, self.shape.width)[mx.array(rows)]
        targets = mx.array(batch.targets.reshape(-1)[rows])
        answer = forward.cross_entropy(forward.logits(params, chosen), targets).mean()
        late_clip = self.step >= RECIPE["focus_from"] and is_clip(batch)
        loss = answer + RECIPE["auxiliary"] * (3 if late_clip else 1) * dense
        if features is None or self.step < RECIPE["place_from"]:
            return loss, answer, mx.array(0.0)
        place = place_loss(params, taps[1], batch, self.step >= RECIPE["focus_from"])
        return loss + RECIPE["place"] * place, answer, place

    def _spare_tower(self, batch: Batch) -> bool:
        """Late in training most picture steps leave the tower alone: it knows pictures by then, and that saves time."""
        if self.step < RECIPE["focus_from"] or is_clip(batch):
            return False
        return bool(np.random.default_rng([self.seed, 4, self.step]).random() >= RECIPE["tower_share"])

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

    def batch(self, step: int) -> tuple[str, bool, Batch]:
        """The data of one step: a function of seed and step alone."""
        rng = np.random.default_rng([self.seed, 3, step])
        language = step >= RECIPE["tower_steps"]
        easy = language and step < RECIPE["tower_steps"] + RECIPE["easy_steps"]
        focus = step >= RECIPE["focus_from"]
        stage = int(focus) + int(step >= RECIPE["freely_from"])
        forms = FORMS if language else TOWER_FORMS
        share = np.array([SHARES[stage][f[0]] if stage else f[1] for f in forms])
        form, _, count_of_step, most = forms[int(rng.choice(len(forms), p=share / share.sum()))]
        num_turns = int(rng.integers(1, most + 1))
        # as many turns in every dialogue of a step: less padding; fewer dialogues when they are long
        count = count_of_step * 5 // (num_turns + 3) if language else count_of_step
        if focus:
            # the first turns of a long dialogue are a short one, so long ones teach most per token; small, quick steps
            num_turns, count = most, max(4, count_of_step * 5 // 12)
        dialogues = [data.make_dialogue(rng, form, num_turns, easy, stage) for _ in range(count)]
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
        (_, shown, place), gradients = self.gradient(self.params, batch, language)
        norm = mx.sqrt(sum((g * g).sum() for g in gradients.values()))  # type: ignore[arg-type]
        mx.eval(norm, shown, place, gradients)
        scale = min(1.0, RECIPE["clip"] / (norm.item() + 1e-6))
        number = self.step + 1
        numbers = mx.array([self.rate(), scale, 1 / (1 - 0.9**number), 1 / (1 - 0.98**number)])
        self.params, *self.moments = self.update(self.params, gradients, *self.moments, numbers)
        mx.eval(self.params, self.moments)
        self.log[form if language else "tower " + form].append(shown.item())
        if language:
            self.log["place"].append(place.item())
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
        params = {k: v for k, v in self.params.items() if not k.startswith("head.")}
        write_model(folder, self.tokenizer, self.config, params)
        results = evaluate_folder(folder, NUM_HELD_OUT)
        print(table(results), flush=True)
        write_card(folder, {**RECIPE, "seed": self.seed, "held-out seed": EVALUATION_SEED}, results)


# ---------------------------------------------------------------------------------------------- evaluation


def evaluate(encoder: Encoder, shape: forward.Shape, params: forward.Params, number: int) -> dict[str, tuple[int, int]]:
    """Exact matches and questions per kind, each question asked alone about its own held-out picture or clip.

    Greedy decoding gives the right answer exactly when every answer token, `<|im_end|>` included, has the highest logit
    after the right ones before it; so one forward pass per question is enough.
    """
    layout = forward.layout_of(shape, data.GRID, data.GRID)
    right: dict[str, int] = defaultdict(int)
    asked: dict[str, int] = defaultdict(int)
    sets = [(form, index, 0) for index, (form, *_) in enumerate(FORMS)]
    sets += [("picture", 100, 2), ("clip4", 103, 2)]
    for form, index, stage in sets:
        rng = np.random.default_rng([EVALUATION_SEED, index])
        dialogues = []
        for _ in range(number):
            whole = data.make_dialogue(rng, form, 9, stage=stage)
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
                name = kinds[0] if not form.startswith("clip") else f"{kinds[0]}, {form[4:]} frames"
                name += ", worded freely" if stage else ""
                asked[name] += 1
                right[name] += int(ok)
    return {name: (right[name], asked[name]) for name in asked}


def table(results: dict[str, tuple[int, int]]) -> str:
    return "\n".join(f"    {name:<40} {a / b:.3f}  ({a}/{b})" for name, (a, b) in results.items())


def evaluate_folder(folder: Path, number: int) -> dict[str, tuple[int, int]]:
    config = json.loads((folder / "config.json").read_text())
    params = {k: v.astype(mx.float32) for k, v in mx.load(str(folder / "model.safetensors")).items()}
    encoder = Encoder(Tokenizer.from_file(str(folder / "tokenizer.json")))
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
