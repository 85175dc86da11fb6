"""Dialogues as arrays: rendered as the chat template does, tokens, M-RoPE positions, patches and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from demo_data import CELLS, GRID, MERGE, PATCH, PICTURE_TOKENS, SYSTEM, TEMPORAL, Dialogue, Floats, Ints, Medium
from numpy.typing import NDArray
from tokenizers import Tokenizer

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


@dataclass
class Batch:
    """Dialogues of one form, padded to the same length: what one training or evaluation step reads."""

    patches: Floats  # (num_temporal_patches, GRID*GRID, 1176)
    cell_labels: Ints  # (num_temporal_patches, PICTURE_TOKENS, 3)
    tokens: Ints  # (rows, length)
    positions: Ints  # (3, rows, length)
    feature_index: Ints  # (rows, length): row in the flattened picture features, -1 for text
    targets: Ints  # (rows, length): next token where it is part of an answer, else -1
    kinds: list[list[str]] = field(default_factory=list)
    turn_of: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int32))  # which answer a target belongs to


def patches_of(frames: Sequence[NDArray[np.uint8]]) -> Floats:
    """Normalised patches (grid_t, patches, 1176): cells of 2 x 2 patches together, values as (channel, time, y, x)."""
    pixels = (np.stack(frames).astype(np.float32) / 255 - MEAN) / STD
    if len(frames) % TEMPORAL:
        pixels = np.concatenate([pixels, pixels[-1:]])
    grid_t = len(pixels) // TEMPORAL
    split = pixels.reshape(grid_t, TEMPORAL, CELLS, MERGE, PATCH, CELLS, MERGE, PATCH, 3)
    return split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(grid_t, GRID * GRID, -1)


@dataclass
class Encoder:
    """Renders dialogues as the chat template does, into tokens, M-RoPE positions and targets."""

    tokenizer: Tokenizer
    cache: dict[str, list[int]] = field(default_factory=dict)

    def ids(self, text: str) -> list[int]:
        if text not in self.cache:
            self.cache[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.cache[text]

    def segments(self, dialogue: Dialogue) -> list[tuple[str, Medium | None, int]]:
        """(text, medium, answer number or -1) in order; joined, the texts are exactly what the template renders."""
        parts: list[tuple[str, Medium | None, int]] = [(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n", None, -1)]
        for number, turn in enumerate(dialogue.turns):
            parts.append(("<|im_start|>user\n", None, -1))
            for medium in dialogue.media if number == 0 else ():
                parts.append(("<|vision_start|>", None, -1))
                pad = "<|video_pad|>" if medium.is_clip else "<|image_pad|>"
                parts.append((pad * (len(medium.labels) * PICTURE_TOKENS), medium, -1))
                parts.append(("<|vision_end|>", None, -1))
            parts.append((f"{turn.question}<|im_end|>\n<|im_start|>assistant\n", None, -1))
            parts.append((f"{turn.answer}<|im_end|>", None, number))
            parts.append(("\n", None, -1))
        return parts

    def batch(self, dialogues: Sequence[Dialogue]) -> Batch:
        rows = [self._row(dialogue) for dialogue in dialogues]
        length = max(len(row[0]) for row in rows)
        tokens = np.zeros((len(rows), length), np.int32)
        targets, features, turn_of = (np.full((len(rows), length), -1, np.int32) for _ in range(3))
        positions = np.zeros((3, len(rows), length), np.int32)
        offset = 0
        for i, (ids, place, index, answer) in enumerate(rows):
            n = len(ids)
            tokens[i, :n], positions[:, i, :n] = ids, place
            features[i, :n] = np.where(index >= 0, index + offset, -1)
            offset += int((index >= 0).sum())
            in_answer = answer[1:] >= 0
            targets[i, : n - 1] = np.where(in_answer, ids[1:], -1)
            turn_of[i, : n - 1] = answer[1:]
        media = [medium for dialogue in dialogues for medium in dialogue.media]
        patches = [patches_of(m.frames if m.is_clip else m.frames * TEMPORAL) for m in media]
        return Batch(
            np.concatenate(patches) if media else np.zeros((0, GRID * GRID, 1176), np.float32),
            np.concatenate([m.labels.reshape(-1, PICTURE_TOKENS, 3) for m in media])
            if media
            else np.zeros((0, PICTURE_TOKENS, 3), np.int32),
            tokens,
            positions,
            features,
            targets,
            [[turn.kind for turn in dialogue.turns] for dialogue in dialogues],
            turn_of,
        )

    def _row(self, dialogue: Dialogue) -> tuple[Ints, Ints, Ints, Ints]:
        ids: list[int] = []
        answers: list[int] = []
        index: list[int] = []
        places: list[Ints] = []
        start = num_features = 0
        for text, medium, answer in self.segments(dialogue):
            new = self.ids(text)
            ids += new
            answers += [answer] * len(new)
            if medium is None:
                index += [-1] * len(new)
                place = np.broadcast_to(np.arange(len(new), dtype=np.int32), (3, len(new)))
            else:
                index += range(num_features, num_features + len(new))
                num_features += len(new)
                t, h, w = np.indices((len(medium.labels), CELLS, CELLS), dtype=np.int32).reshape(3, -1)
                place = np.stack([t * medium.time_step, h, w])
            places.append(place + np.int32(start))
            # text after a medium goes on behind the largest of its three positions
            start = int(places[-1].max()) + 1
        return (
            np.array(ids, np.int32),
            np.concatenate(places, 1),
            np.array(index, np.int32),
            np.array(answers, np.int32),
        )
