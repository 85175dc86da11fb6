"""Qwen2-VL's vision tower: full attention in every block, layer norms, quick-GELU.

Qwen2-VL technical report (arXiv:2409.12191); module names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

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
class Qwen2VLVisionConfig:
    """The tower's shape. `out_hidden_size` is the language model's width (the config calls it `hidden_size`)."""

    depth: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    out_hidden_size: int
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    channels: int = 3
    theta: float = 10000.0
    hidden_act: str = "quick_gelu"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen2VLVisionConfig:
        """From a `vision_config`; what older ones leave out is what transformers' `Qwen2VLVisionConfig` assumes."""
        embed_dim = int(config.get("embed_dim", 1280))
        return cls(
            depth=int(config.get("depth", 32)),
            hidden_size=embed_dim,
            num_heads=int(config.get("num_heads", 16)),
            mlp_size=int(embed_dim * config.get("mlp_ratio", 4)),
            out_hidden_size=int(config.get("hidden_size", 3584)),
            patch_size=int(config.get("patch_size", 14)),
            temporal_patch_size=int(config.get("temporal_patch_size", 2)),
            merge_size=int(config.get("spatial_merge_size", 2)),
            channels=int(config.get("in_channels", config.get("in_chans", 3))),
            theta=float((config.get("rope_parameters") or {}).get("rope_theta", 10000.0)),
            hidden_act=str(config.get("hidden_act", "quick_gelu")),
        )


class _Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Qwen2VLVisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.mlp_size)
        self.fc2 = nn.Linear(config.mlp_size, config.hidden_size)
        self._act = activation(config.hidden_act)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(self._act(self.fc1(x)))  # type: ignore[no-any-return]


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Qwen2VLVisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = VisionAttention(config.hidden_size, config.num_heads)
        self.mlp = _Mlp(config)

    def __call__(self, x: mx.array, rotation: GridRotation) -> mx.array:
        x = x + self.attn(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class _Merger(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Qwen2VLVisionConfig) -> None:
        super().__init__()
        self._merged = config.hidden_size * config.merge_size**2
        self.ln_q = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.mlp = [nn.Linear(self._merged, self._merged), nn.GELU(), nn.Linear(self._merged, config.out_hidden_size)]

    def __call__(self, x: mx.array) -> mx.array:
        x = self.ln_q(x).reshape(-1, self._merged)
        for layer in self.mlp:
            x = layer(x)
        return x


class Qwen2VLTower(nn.Module):  # type: ignore[misc]
    """See `qwen_vit.Tower`."""

    def __init__(self, config: Qwen2VLVisionConfig) -> None:
        super().__init__()
        self._config = config
        patch_dims = config.channels * config.temporal_patch_size * config.patch_size**2
        self.patch_embed = PatchEmbedding(patch_dims, config.hidden_size, bias=False)
        self.blocks = [_Block(config) for _ in range(config.depth)]
        self.merger = _Merger(config)

    def adapt(self, weights: Weights) -> Weights:
        config = self._config
        return adapt_patch_embedding(
            weights, channels=config.channels, temporal=config.temporal_patch_size, patch=config.patch_size
        )

    def encode(self, patches: np.ndarray[Any, Any], rows: int, columns: int) -> Iterator[Features | None]:
        config = self._config
        coordinates = patch_coordinates(rows, columns, config.merge_size)
        rotation = GridRotation.of(coordinates, config.hidden_size // config.num_heads, config.theta)
        mlp_weights = 2 * config.hidden_size * config.mlp_size
        cost = block_flops(rows * columns, config.hidden_size, mlp_weights, rows * columns)
        return run_blocks(
            self.patch_embed(mx.array(patches)),
            [cost] * config.depth,
            lambda number, x: (self.blocks[number](x, rotation), {}),
            self.merger,
        )
