"""PaddleOCR-VL's vision tower: SigLIP's blocks with rotary positions besides learned ones, for pictures of any shape.

After transformers' `modeling_paddleocr_vl.py`; modules are named as in the published checkpoints. Patches come merge
block by merge block, so that the projector's squares of patches are neighbours; attention doesn't mind the order. The
square table of learned positions is resampled to each picture's grid, bilinear with centres aligned, without
antialiasing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.inputs import Features
from mlxgen_vision.checkpoint import Weights, patch_matrix
from mlxgen_vision.towers.blocks import block_flops, run_blocks
from mlxgen_vision.towers.qwen_vit import GridRotation, attend, patch_coordinates
from mlxgen_vision.towers.siglip import MLP, SiglipConfig
from mlxgen_vision.towers.siglip2 import resampling_matrix

# What transformers' PaddleOCRVisionConfig assumes where a published config is silent.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


@dataclass(frozen=True, slots=True)
class PaddleOCRVisionConfig:
    """The tower's shape: SigLIP's, and how many patches a side become one token of width `out_hidden_size`."""

    siglip: SiglipConfig
    merge_size: int
    theta: float
    out_hidden_size: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], out_hidden_size: int) -> PaddleOCRVisionConfig:
        """From a `vision_config`. Raises `UnsupportedError` as `SiglipConfig.from_dict` does."""
        rope = config.get("rope_parameters") or {}
        return cls(
            siglip=SiglipConfig.from_dict(config, **_DEFAULTS),
            merge_size=int(config.get("spatial_merge_size") or 2),
            theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            out_hidden_size=out_hidden_size,
        )


class _Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def __call__(self, x: mx.array, rotation: GridRotation) -> mx.array:
        query, key, value = (
            project(x).reshape(x.shape[0], self.num_heads, -1) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attend(rotation(query), rotation(key), value))  # type: ignore[no-any-return]


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = _Attention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def __call__(self, x: mx.array, rotation: GridRotation) -> mx.array:
        x = x + self.self_attn(self.layer_norm1(x), rotation)
        return x + self.mlp(self.layer_norm2(x))


class _Embeddings(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(config.num_channels * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding(config.patches_per_side**2, config.hidden_size)
        self._side = config.patches_per_side

    def __call__(self, patches: mx.array, rows: int, columns: int, order: mx.array) -> mx.array:
        """(patches, values) in merge-block order; `order` names each one's place row by row."""
        hidden = self.patch_embedding(patches)
        side = self._side
        table = self.position_embedding(mx.arange(side**2)).astype(mx.float32)
        down = mx.array(resampling_matrix(rows, side, antialias=False)) @ table.reshape(side, -1)
        places = mx.array(resampling_matrix(columns, side, antialias=False)) @ down.reshape(rows, side, -1)
        return hidden + places.reshape(rows * columns, -1)[order].astype(hidden.dtype)  # type: ignore[no-any-return]


class _Encoder(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.layers = [_Block(config) for _ in range(config.num_hidden_layers)]


class _Projector(nn.Module):  # type: ignore[misc]
    """Norms patches, joins each merge block, two layers: (patches, width) -> (tokens, text width)."""

    def __init__(self, config: PaddleOCRVisionConfig) -> None:
        super().__init__()
        self._merged = config.siglip.hidden_size * config.merge_size**2
        self.pre_norm = nn.LayerNorm(config.siglip.hidden_size, eps=1e-5)
        self.linear_1 = nn.Linear(self._merged, self._merged)
        self.linear_2 = nn.Linear(self._merged, config.out_hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        merged = self.pre_norm(x).reshape(-1, self._merged)
        return self.linear_2(nn.gelu(self.linear_1(merged)))  # type: ignore[no-any-return]


class PaddleOCRTower(nn.Module):  # type: ignore[misc]
    """See `qwen_vit.Tower`."""

    def __init__(self, config: PaddleOCRVisionConfig) -> None:
        super().__init__()
        self._config = config
        self.embeddings = _Embeddings(config.siglip)
        self.encoder = _Encoder(config.siglip)
        self.post_layernorm = nn.LayerNorm(config.siglip.hidden_size, eps=config.siglip.layer_norm_eps)
        self.projector = _Projector(config)

    def adapt(self, weights: Weights) -> Weights:
        """The patch convolution as a matrix, fused projections apart; what has no counterpart here is left out.

        Left out are SigLIP's pooling head, and a table of positions from before rotary ones that no version reads.
        """
        unused = ("head.", "embeddings.packing_position_embedding.", "embeddings.position_ids")
        adapted = {name: array for name, array in weights.items() if not name.startswith(unused)}
        for name in [name for name in adapted if ".self_attn.qkv." in name]:
            for which, part in zip("qkv", mx.split(adapted.pop(name), 3), strict=True):
                adapted[name.replace(".qkv.", f".{which}_proj.")] = part
        name = "embeddings.patch_embedding.weight"
        if name in adapted and f"{name.removesuffix('weight')}scales" not in adapted:
            side = self._config.siglip.patch_size
            adapted[name] = patch_matrix(adapted[name], channels=self._config.siglip.num_channels, kernel=(side, side))
        return adapted

    def encode(self, patches: np.ndarray[Any, Any], rows: int, columns: int) -> Iterator[Features | None]:
        config = self._config.siglip
        coordinates = patch_coordinates(rows, columns, self._config.merge_size)
        rotation = GridRotation.of(coordinates, config.hidden_size // config.num_attention_heads, self._config.theta)
        order = mx.array(coordinates[:, 0] * columns + coordinates[:, 1])
        pixels = mx.array(patches).astype(self.post_layernorm.weight.dtype)
        mlp_weights = 2 * config.hidden_size * config.intermediate_size
        cost = block_flops(rows * columns, config.hidden_size, mlp_weights, rows * columns)
        return run_blocks(
            self.embeddings(pixels, rows, columns, order),
            [cost] * config.num_hidden_layers,
            lambda number, x: (self.encoder.layers[number](x, rotation), {}),
            lambda hidden: self.projector(self.post_layernorm(hidden)),
        )
