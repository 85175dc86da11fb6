"""Positions of text, pictures and videos on three axes (time, row, column): M-RoPE, in plain NumPy.

A text token has the same position on all three axes. A visual block starts at the next free position and spreads over
a grid from there; whatever follows continues at the largest position so far plus one. That is Qwen's rule for training
(QwenLM/Qwen3-VL, `qwen-vl-finetune/qwenvl/data/rope2d.py`, `get_rope_index_2`, `_25` and `_3`); transformers 5.24
departs from it after a video of Qwen2-VL and Qwen2.5-VL, where it ignores the time axis (PR #43972).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxgen.errors import PlaceholderError

PositionIds = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class GridBlock:
    """The tokens `[start, end)` of one picture, video or video frame, laid out as `steps` × `rows` × `columns`.

    `time_scale` is by how many positions consecutive steps lie apart on the time axis (it may be fractional; the
    product is truncated).
    """

    start: int
    end: int
    steps: int
    rows: int
    columns: int
    time_scale: float = 1.0


def mrope_positions(num_tokens: int, blocks: Sequence[GridBlock]) -> tuple[PositionIds, int]:
    """Positions int32 (3, num_tokens) of the whole sequence, and the rope delta of what follows it.

    Token n after the sequence has position `num_tokens + n + delta` on every axis. `blocks` are in order and don't
    overlap; everything between them is text. Raises `PlaceholderError` if a block's grid isn't its length.
    """
    positions = np.empty((3, num_tokens), dtype=np.int32)
    done = 0
    following = 0
    for block in blocks:
        if block.start < done or block.end > num_tokens:
            raise PlaceholderError(f"a visual block covers tokens [{block.start}, {block.end}) of {num_tokens}")
        if block.steps * block.rows * block.columns != block.end - block.start:
            raise PlaceholderError(
                f"a grid of {block.steps} × {block.rows} × {block.columns} takes "
                f"{block.steps * block.rows * block.columns} tokens, the prompt has {block.end - block.start} for it"
            )
        following = _text(positions, done, block.start, following)
        # In float32, like the reference: where a fractional interval's multiple falls just below an integer, the
        # precision decides which position a step gets.
        times = (np.arange(block.steps, dtype=np.float32) * np.float32(block.time_scale)).astype(np.int32)
        grid = np.meshgrid(times, np.arange(block.rows), np.arange(block.columns), indexing="ij")
        where = positions[:, block.start : block.end]
        where[:] = np.stack(grid).reshape(3, -1) + following
        following = int(where.max()) + 1 if where.size else following
        done = block.end
    following = _text(positions, done, num_tokens, following)
    return positions, following - num_tokens


def _text(positions: PositionIds, start: int, end: int, following: int) -> int:
    positions[:, start:end] = np.arange(following, following + end - start, dtype=np.int32)
    return following + end - start
