"""What the vision transformers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 have in common.

A part (an image, or one temporal patch of a video) is a grid of patches, listed merge block by merge block: the
`merge` × `merge` patches that become one token are neighbours in the list. Attention carries a two-axis rotary
embedding, half of the frequencies for rows and half for columns. A temporal patch attends within itself only, so parts
are encoded independently of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.inputs import Features
from mlxgen_vision.checkpoint import Weights, patch_matrix
from mlxgen_vision.towers.blocks import fused_attention


def patch_coordinates(rows: int, columns: int, merge: int) -> np.ndarray[Any, Any]:
    """Row and column of every patch of a grid, int64 (rows * columns, 2), in merge-block order."""
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    blocks = grid.reshape(rows // merge, merge, columns // merge, merge, 2)
    return blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class GridRotation:
    """A part's rotation, float32 (patches, 1, head_dim): x * cos + (x with its halves exchanged) * sin.

    Both halves of `cos` are the cosines; of `sin`, the first half is the negative sines, the second the sines.
    """

    cos: mx.array
    sin: mx.array

    @classmethod
    def of(cls, coordinates: np.ndarray[Any, Any], head_dim: int, theta: float) -> GridRotation:
        """From rows and columns (patches, 2): each takes half of the head's frequencies, rows first."""
        half = head_dim // 2
        inverse = 1.0 / np.float32(theta) ** (np.arange(0, half, 2, dtype=np.float32) / np.float32(half))
        angles = coordinates.astype(np.float32)[:, :, None] * inverse.astype(np.float32)
        return cls.of_angles(angles.reshape(len(coordinates), -1))

    @classmethod
    def of_angles(cls, angles: np.ndarray[Any, Any]) -> GridRotation:
        """From the angles of a head's pairs, float32 (patches, head_dim / 2); a pair is (i, i + head_dim / 2)."""
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return cls(mx.array(np.concatenate([cos, cos], axis=-1)), mx.array(np.concatenate([-sin, sin], axis=-1)))

    def __call__(self, x: mx.array) -> mx.array:
        """Rotate (patches, heads, head_dim), in float32, back in the type it came in."""
        wide = x.astype(mx.float32)
        half = x.shape[-1] // 2
        rotated = wide * self.cos + mx.concatenate([wide[..., half:], wide[..., :half]], axis=-1) * self.sin
        return rotated.astype(x.dtype)


@dataclass(frozen=True, slots=True)
class Windows:
    """Which patches attend to each other, when they are listed window by window and windows of one length together.

    Nothing is padded or masked that way, and no block has to gather anything.

    `order` int64 (patches,) names the patch in each place of that list, `groups` are the (number of windows, length) in
    it.
    """

    order: np.ndarray[Any, Any]
    groups: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, members: Sequence[Sequence[int]]) -> Windows:
        by_length = sorted(members, key=len, reverse=True)
        groups = [(len(list(windows)), length) for length, windows in groupby(by_length, key=len)]
        return cls(np.concatenate([np.asarray(window, dtype=np.int64) for window in by_length]), tuple(groups))


def attend(query: mx.array, key: mx.array, value: mx.array, windows: Windows | None = None) -> mx.array:
    """Softmax attention over (patches, heads, head_dim): all with all, or within windows, patches in their order."""
    num_patches, num_heads, head_dim = query.shape
    pieces: list[mx.array] = []
    start = 0
    for count, length in ((1, num_patches),) if windows is None else windows.groups:
        end = start + count * length
        heads = [
            x[start:end].reshape(count, length, num_heads, head_dim).transpose(0, 2, 1, 3) for x in (query, key, value)
        ]
        out = fused_attention(heads[0], heads[1], heads[2], head_dim**-0.5)
        pieces.append(out.transpose(0, 2, 1, 3).reshape(count * length, num_heads * head_dim))
        start = end
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)


class PatchEmbedding(nn.Module):  # type: ignore[misc]
    """The patch convolution, whose stride is its kernel, as the matrix product it is."""

    def __init__(self, patch_dims: int, hidden_size: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(patch_dims, hidden_size, bias=bias)

    def __call__(self, patches: mx.array) -> mx.array:
        values = self.proj.scales if "scales" in self.proj else self.proj.weight
        return self.proj(patches.astype(values.dtype))  # type: ignore[no-any-return]


def adapt_patch_embedding(weights: Weights, *, channels: int, temporal: int, patch: int) -> Weights:
    """A tower's weights with the patch convolution as the matrix `PatchEmbedding` wants, from either channel order."""
    name = "patch_embed.proj.weight"
    if name not in weights:
        return weights
    kernel = (temporal, patch, patch)
    return weights | {name: patch_matrix(weights[name], channels=channels, kernel=kernel)}


class VisionAttention(nn.Module):  # type: ignore[misc]
    """Multi-head attention over a part's patches, (patches, hidden)."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def __call__(self, x: mx.array, rotation: GridRotation, windows: Windows | None = None) -> mx.array:
        query, key, value = mx.split(self.qkv(x).reshape(x.shape[0], 3, self.num_heads, -1), 3, axis=1)
        out = attend(rotation(query[:, 0]), rotation(key[:, 0]), value[:, 0], windows)
        return self.proj(out)  # type: ignore[no-any-return]


class Tower(Protocol):
    """A vision tower of the Qwen families. Immutable after load."""

    def adapt(self, weights: Weights) -> Weights:
        """Any published layout's weights as this module wants them."""
        ...

    def encode(self, patches: np.ndarray[Any, Any], rows: int, columns: int) -> Iterator[Features | None]:
        """Features of one part from its patches, float32 (rows * columns, channels * temporal * patch * patch).

        Yields None after each step but the last, then {"features": (tokens, hidden of the language model), ...}.
        """
        ...
