"""SigLIP 2's tower for pictures of any shape (NaFlex): SigLIP's blocks over patches with resampled learned positions.

"SigLIP 2: Multilingual Vision-Language Encoders" (arXiv:2502.14786). The patch embedding is a matrix over a patch's
values, channel fastest; the square table of positions is resampled to each picture's grid, bilinear with antialiasing
and centres aligned, as `torch.nn.functional.interpolate` does it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.errors import UnsupportedError
from mlxgen_vision.checkpoint import Weights
from mlxgen_vision.towers.siglip import SiglipConfig, SiglipTower


def siglip2_config(config: Mapping[str, Any]) -> SiglipConfig:
    """From a `vision_config` with `num_patches`, the size of the position table.

    Raises `UnsupportedError` if that isn't square.
    """
    num_patches, patch = int(config.get("num_patches") or 256), int(config.get("patch_size") or 16)
    side = math.isqrt(num_patches)
    if side**2 != num_patches:
        raise UnsupportedError(f"vision_config has num_patches {num_patches}; a square number is needed")
    return SiglipConfig.from_dict(dict(config) | {"patch_size": patch, "image_size": side * patch})


def resampling_matrix(length: int, side: int, *, antialias: bool = True) -> np.ndarray[Any, Any]:
    """How much each of `side` entries counts for each of `length` places, float32 (length, side); rows sum to 1.

    Triangles around each place's centre, with `antialias` as wide as the entries are dense. Without it, or where there
    are fewer entries than places, this is linear interpolation.
    """
    scale = np.float32(side / length)
    centres = (np.arange(length, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    apart = np.abs(np.arange(side, dtype=np.float32)[None] - centres[:, None])
    weights = np.clip(1 - apart / (max(scale, np.float32(1)) if antialias else 1), 0, None)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)  # type: ignore[no-any-return]


class _Embeddings(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(config.num_channels * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding(config.patches_per_side**2, config.hidden_size)
        self._side, self._patch = config.patches_per_side, config.patch_size

    def __call__(self, pixels: mx.array) -> mx.array:
        count, height, width, channels = pixels.shape
        side = self._patch
        rows, columns = height // side, width // side
        patches = pixels.reshape(count, rows, side, columns, side, channels).transpose(0, 1, 3, 2, 4, 5)
        hidden = self.patch_embedding(patches.reshape(count, rows * columns, -1))
        table = self.position_embedding(mx.arange(self._side**2)).astype(mx.float32)
        down = mx.array(resampling_matrix(rows, self._side)) @ table.reshape(self._side, -1)
        places = mx.array(resampling_matrix(columns, self._side)) @ down.reshape(rows, self._side, -1)
        return hidden + places.reshape(rows * columns, -1).astype(hidden.dtype)  # type: ignore[no-any-return]


class Siglip2Tower(SiglipTower):
    """An `images.ImageTower`. Immutable after load, shared by all sessions; a call holds its own hidden states only."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__(config)
        self.embeddings = _Embeddings(config)

    @property
    def dtype(self) -> mx.Dtype:
        """What the tower computes in."""
        return self.post_layernorm.weight.dtype  # type: ignore[no-any-return]


def siglip2_weights(weights: Weights, prefix: str) -> Weights:
    """A tower's weights under `prefix` without the pooling head, which is never part of a language model."""
    return {name: array for name, array in weights.items() if not name.startswith(f"{prefix}head.")}
