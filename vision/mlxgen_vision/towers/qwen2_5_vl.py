"""Qwen2.5-VL's vision tower: windowed attention in most blocks, full attention in a few, RMS norms, SwiGLU.

Qwen2.5-VL technical report (arXiv:2502.13923); module names are those of the published checkpoints. Windows are squares
of merge blocks, cut from the grid's top left corner; the last row and column of windows may be smaller.
"""

from __future__ import annotations

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
    Windows,
    adapt_patch_embedding,
    patch_coordinates,
)


@dataclass(frozen=True, slots=True)
class Qwen25VLVisionConfig:
    """The tower's shape. `window_size` in pixels; `full_attention` are the blocks without windows."""

    depth: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    out_hidden_size: int
    window_size: int = 112
    full_attention: tuple[int, ...] = (7, 15, 23, 31)
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    channels: int = 3
    theta: float = 10000.0
    hidden_act: str = "silu"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen25VLVisionConfig:
        """From a `vision_config`; what older ones leave out is what the published 3B, 7B and 72B models share.

        Raises `UnsupportedError` if a window holds no merge block.
        """
        made = cls(
            depth=int(config.get("depth", 32)),
            hidden_size=int(config.get("hidden_size", 1280)),
            num_heads=int(config.get("num_heads", 16)),
            mlp_size=int(config.get("intermediate_size", 3420)),
            out_hidden_size=int(config.get("out_hidden_size", 3584)),
            window_size=int(config.get("window_size", 112)),
            full_attention=tuple(int(index) for index in config.get("fullatt_block_indexes", (7, 15, 23, 31))),
            patch_size=int(config.get("patch_size", 14)),
            temporal_patch_size=int(config.get("temporal_patch_size", 2)),
            merge_size=int(config.get("spatial_merge_size", 2)),
            channels=int(config.get("in_channels", config.get("in_chans", 3))),
            theta=float((config.get("rope_parameters") or {}).get("rope_theta", 10000.0)),
            hidden_act=str(config.get("hidden_act", "silu")),
        )
        if made.window_side < 1:
            block = made.patch_size * made.merge_size
            raise UnsupportedError(
                f"window_size is {made.window_size} pixels; at least one merge block, {block}, is needed"
            )
        return made

    @property
    def window_side(self) -> int:
        """A window's rows and columns in patches: whole merge blocks, truncated as the reference does."""
        return self.window_size // self.merge_size // self.patch_size * self.merge_size


def window_members(coordinates: np.ndarray[Any, Any], side: int) -> list[list[int]]:
    """The patches of each window of `side` × `side` patches, from every patch's row and column."""
    members: dict[tuple[int, int], list[int]] = {}
    for number, (row, column) in enumerate((coordinates // side).tolist()):
        members.setdefault((row, column), []).append(number)
    return list(members.values())


class _Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Qwen25VLVisionConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size)
        self._act = activation(config.hidden_act)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Qwen25VLVisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attn = VisionAttention(config.hidden_size, config.num_heads)
        self.mlp = _Mlp(config)

    def __call__(self, x: mx.array, rotation: GridRotation, windows: Windows | None) -> mx.array:
        x = x + self.attn(self.norm1(x), rotation, windows)
        return x + self.mlp(self.norm2(x))


class _Merger(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Qwen25VLVisionConfig) -> None:
        super().__init__()
        self._merged = config.hidden_size * config.merge_size**2
        self.ln_q = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mlp = [nn.Linear(self._merged, self._merged), nn.GELU(), nn.Linear(self._merged, config.out_hidden_size)]

    def __call__(self, x: mx.array) -> mx.array:
        x = self.ln_q(x).reshape(-1, self._merged)
        for layer in self.mlp:
            x = layer(x)
        return x


class Qwen25VLTower(nn.Module):  # type: ignore[misc]
    """See `qwen_vit.Tower`."""

    def __init__(self, config: Qwen25VLVisionConfig) -> None:
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
        side = config.window_side
        windows = Windows.of(window_members(coordinates, side))
        # All blocks see the patches window by window; attention over all of them doesn't mind. Windows consist of whole
        # merge blocks, so it is enough to put the tokens back at the end.
        rotation = GridRotation.of(coordinates[windows.order], config.hidden_size // config.num_heads, config.theta)
        back = mx.array(np.argsort(windows.order[:: config.merge_size**2]))
        per_block = [None if number in config.full_attention else windows for number in range(config.depth)]
        mlp_weights = 3 * config.hidden_size * config.mlp_size
        costs = [
            block_flops(
                rows * columns, config.hidden_size, mlp_weights, rows * columns if window is None else side * side
            )
            for window in per_block
        ]
        return run_blocks(
            self.patch_embed(mx.array(patches[windows.order])),
            costs,
            lambda number, x: (self.blocks[number](x, rotation, per_block[number]), {}),
            lambda x: self.merger(x)[back],
        )
