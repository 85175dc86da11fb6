"""Qwen3-VL's and Qwen3.5's vision tower: learned positions on top of rotary ones, and deepstack outputs.

Qwen3-VL technical report (arXiv:2511.21631) and DeepStack (arXiv:2406.04334); module names are those of the published
checkpoints. The learned positions are a square table, resampled to each picture's grid (bilinear, corners aligned).
Qwen3-VL hands the hidden states of some inner blocks to the first layers of the language model, each through a merger
of its own: "deepstack_0", "deepstack_1", ... beside "features". Qwen3.5 has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.errors import UnsupportedError
from mlxgen.inputs import Features
from mlxgen_vision.checkpoint import Weights
from mlxgen_vision.towers.activations import activation
from mlxgen_vision.towers.blocks import block_flops, run_blocks
from mlxgen_vision.towers.qwen_vit import (
    GridRotation,
    PatchEmbedding,
    VisionAttention,
    adapt_patch_embedding,
    patch_coordinates,
)


@dataclass(frozen=True, slots=True)
class Qwen3VLVisionConfig:
    """The tower's shape. `deepstack` are the blocks whose output the language model gets besides the last one's."""

    depth: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    out_hidden_size: int
    num_positions: int
    deepstack: tuple[int, ...] = ()
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    channels: int = 3
    theta: float = 10000.0
    hidden_act: str = "gelu_pytorch_tanh"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen3VLVisionConfig:
        """From a `vision_config`; what it leaves out is what transformers' `Qwen3VLVisionConfig` assumes.

        Raises `UnsupportedError` if the position table isn't square.
        """
        num_positions = int(config.get("num_position_embeddings", 2304))
        if math.isqrt(num_positions) ** 2 != num_positions:
            raise UnsupportedError(f"num_position_embeddings is {num_positions}; a square number is needed")
        return cls(
            depth=int(config.get("depth", 27)),
            hidden_size=int(config.get("hidden_size", 1152)),
            num_heads=int(config.get("num_heads", 16)),
            mlp_size=int(config.get("intermediate_size", 4304)),
            out_hidden_size=int(config.get("out_hidden_size", 3584)),
            num_positions=num_positions,
            deepstack=tuple(int(index) for index in config.get("deepstack_visual_indexes") or ()),
            patch_size=int(config.get("patch_size", 16)),
            temporal_patch_size=int(config.get("temporal_patch_size", 2)),
            merge_size=int(config.get("spatial_merge_size", 2)),
            channels=int(config.get("in_channels", 3)),
            theta=float((config.get("rope_parameters") or {}).get("rope_theta", 10000.0)),
            hidden_act=str(config.get("hidden_act", "gelu_pytorch_tanh")),
        )


def resampling_taps(
    coordinates: np.ndarray[Any, Any], size: tuple[int, int], side: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Four entries of a `side` × `side` table and their weights for every patch: int32 and float32 (patches, 4).

    Bilinear with aligned corners: the first and last row (column) of a grid fall on those of the table.
    """
    axes = []
    for axis in (0, 1):
        steps = np.float32(max(size[axis] - 1, 1))
        source = coordinates[:, axis].astype(np.float32) * np.float32(side - 1) / steps
        low = np.floor(source)
        fraction = source - low
        low = low.astype(np.int32)
        axes.append(((low, np.float32(1) - fraction), (np.minimum(low + 1, side - 1), fraction)))
    taps = [(row * side + column, a * b) for row, a in axes[0] for column, b in axes[1]]
    return np.stack([index for index, _ in taps], axis=1), np.stack([weight for _, weight in taps], axis=1)


class _Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.mlp_size)
        self.linear_fc2 = nn.Linear(config.mlp_size, config.hidden_size)
        self._act = activation(config.hidden_act)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_fc2(self._act(self.linear_fc1(x)))  # type: ignore[no-any-return]


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = VisionAttention(config.hidden_size, config.num_heads)
        self.mlp = _Mlp(config)

    def __call__(self, x: mx.array, rotation: GridRotation) -> mx.array:
        x = x + self.attn(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class _Merger(nn.Module):  # type: ignore[misc]
    """Joins the patches of a merge block into one token; normalises before joining, for deepstack after."""

    def __init__(self, config: Qwen3VLVisionConfig, *, norm_after: bool) -> None:
        super().__init__()
        self._merged = config.hidden_size * config.merge_size**2
        self._norm_after = norm_after
        self.norm = nn.LayerNorm(self._merged if norm_after else config.hidden_size, eps=1e-6)
        self.linear_fc1 = nn.Linear(self._merged, self._merged)
        self.linear_fc2 = nn.Linear(self._merged, config.out_hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.norm(x.reshape(-1, self._merged)) if self._norm_after else self.norm(x).reshape(-1, self._merged)
        return self.linear_fc2(nn.gelu(self.linear_fc1(x)))  # type: ignore[no-any-return]


class Qwen3VLTower(nn.Module):  # type: ignore[misc]
    """See `qwen_vit.Tower`."""

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self._config = config
        patch_dims = config.channels * config.temporal_patch_size * config.patch_size**2
        self.patch_embed = PatchEmbedding(patch_dims, config.hidden_size, bias=True)
        self.pos_embed = nn.Embedding(config.num_positions, config.hidden_size)
        self.blocks = [_Block(config) for _ in range(config.depth)]
        self.merger = _Merger(config, norm_after=False)
        if config.deepstack:
            self.deepstack_merger_list = [_Merger(config, norm_after=True) for _ in config.deepstack]

    def adapt(self, weights: Weights) -> Weights:
        config = self._config
        return adapt_patch_embedding(
            weights, channels=config.channels, temporal=config.temporal_patch_size, patch=config.patch_size
        )

    def encode(self, patches: np.ndarray[Any, Any], rows: int, columns: int) -> Iterator[Features | None]:
        config = self._config
        coordinates = patch_coordinates(rows, columns, config.merge_size)
        rotation = GridRotation.of(coordinates, config.hidden_size // config.num_heads, config.theta)
        indices, weights = resampling_taps(coordinates, (rows, columns), math.isqrt(config.num_positions))
        positions = mx.zeros((rows * columns, config.hidden_size))
        for tap in range(4):
            table_rows = self.pos_embed(mx.array(indices[:, tap])).astype(mx.float32)
            positions = positions + table_rows * mx.array(weights[:, tap : tap + 1])
        hidden = self.patch_embed(mx.array(patches))

        def block(number: int, x: mx.array) -> tuple[mx.array, Features]:
            x = self.blocks[number](x, rotation)
            if number not in config.deepstack:
                return x, {}
            level = config.deepstack.index(number)
            return x, {f"deepstack_{level}": self.deepstack_merger_list[level](x)}

        mlp_weights = 2 * config.hidden_size * config.mlp_size
        cost = block_flops(rows * columns, config.hidden_size, mlp_weights, rows * columns)
        return run_blocks(hidden + positions.astype(hidden.dtype), [cost] * config.depth, block, self.merger)
