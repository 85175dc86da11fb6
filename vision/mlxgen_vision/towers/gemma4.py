"""Gemma 4's vision tower: patches of a picture of any shape, two-axis positions learned and rotary, average pooling.

After transformers' `modeling_gemma4.py`; modules are named as in the published checkpoints. Norms stand before and
after attention and MLP; queries, keys and values are normed per head, so scores aren't scaled. `use_clipped_linears`
(the small models) bounds what goes into and comes out of every matrix by numbers that are part of the checkpoint.
Pooling and `standardize` compute in float32, because the width's square root may leave float16's range.
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
from mlxgen_vision.towers.blocks import block_flops, fused_attention, run_blocks
from mlxgen_vision.towers.qwen_vit import GridRotation

_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, slots=True)
class Gemma4VisionConfig:
    """The tower's shape; the defaults are those published configs leave out (transformers' `Gemma4VisionConfig`)."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    pooling_kernel_size: int = 3
    patch_size: int = 16
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False
    theta: float = 100.0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Gemma4VisionConfig:
        """From a `vision_config`. Raises `UnsupportedError` for what no published model has."""
        rope = config.get("rope_parameters") or {}
        if config.get("attention_bias") or rope.get("rope_type", "axial") not in ("axial", "default"):
            raise UnsupportedError(
                f"vision_config has attention_bias {config.get('attention_bias')} and rope type "
                f"{rope.get('rope_type')!r}; Gemma 4's tower has no bias and axial positions"
            )
        known = {key: config[key] for key in cls.__dataclass_fields__ if config.get(key) is not None}
        made = cls(**known | {"theta": float(rope.get("rope_theta", 100.0))})
        activation(made.hidden_activation)
        if made.head_dim % 4 or made.num_attention_heads % made.num_key_value_heads:
            raise UnsupportedError(
                f"vision_config has head_dim {made.head_dim} and {made.num_attention_heads} heads over "
                f"{made.num_key_value_heads}; a multiple of 4, and of the second number, are needed"
            )
        return made


class ClippedLinear(nn.Module):  # type: ignore[misc]
    """A matrix whose inputs and outputs may be bounded."""

    def __init__(self, input_dims: int, output_dims: int, *, clipped: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(input_dims, output_dims, bias=False)
        self._clipped = clipped
        if clipped:
            for name in _BOUNDS:
                self[name] = mx.array(0.0)

    def __call__(self, x: mx.array) -> mx.array:
        if not self._clipped:
            return self.linear(x)  # type: ignore[no-any-return]
        low, high, out_low, out_high = (self[name].astype(x.dtype) for name in _BOUNDS)
        return mx.clip(self.linear(mx.clip(x, low, high)), out_low, out_high)


class _Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim, self._eps = config.head_dim, config.rms_norm_eps
        width, clipped = config.hidden_size, config.use_clipped_linears
        self.q_proj = ClippedLinear(width, self._heads * self._head_dim, clipped=clipped)
        self.k_proj = ClippedLinear(width, self._kv_heads * self._head_dim, clipped=clipped)
        self.v_proj = ClippedLinear(width, self._kv_heads * self._head_dim, clipped=clipped)
        self.o_proj = ClippedLinear(self._heads * self._head_dim, width, clipped=clipped)
        self.q_norm = nn.RMSNorm(self._head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self._head_dim, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, rotation: GridRotation) -> mx.array:
        num_patches = x.shape[0]

        def rotated(heads: mx.array) -> mx.array:
            # Each half of a head turns by its own axis, and is exchanged within itself.
            return rotation(heads.reshape(*heads.shape[:2], 2, -1)).reshape(heads.shape)

        query = rotated(self.q_norm(self.q_proj(x).reshape(num_patches, self._heads, self._head_dim)))
        key = rotated(self.k_norm(self.k_proj(x).reshape(num_patches, self._kv_heads, self._head_dim)))
        value = mx.fast.rms_norm(
            self.v_proj(x).reshape(num_patches, self._kv_heads, self._head_dim), None, eps=self._eps
        )
        query, key, value = (part.transpose(1, 0, 2)[None] for part in (query, key, value))
        out = fused_attention(query, key, value, 1.0)
        return self.o_proj(out[0].transpose(1, 0, 2).reshape(num_patches, -1))


class _Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        width, inner, clipped = config.hidden_size, config.intermediate_size, config.use_clipped_linears
        self.gate_proj = ClippedLinear(width, inner, clipped=clipped)
        self.up_proj = ClippedLinear(width, inner, clipped=clipped)
        self.down_proj = ClippedLinear(inner, width, clipped=clipped)
        self._act = activation(config.hidden_activation)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = _Mlp(config)
        self.post_feedforward_layernorm = nn.RMSNorm(width, eps=eps)

    def __call__(self, x: mx.array, rotation: GridRotation) -> mx.array:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotation))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))  # type: ignore[no-any-return]


class _PatchEmbedder(nn.Module):  # type: ignore[misc]
    """Patches (rows, columns, values) to (rows * columns, width), with a learned vector for the column and the row."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        self.input_proj = nn.Linear(3 * config.patch_size**2, config.hidden_size, bias=False)
        self.position_embedding_table = mx.zeros((2, config.position_embedding_size, config.hidden_size))

    def __call__(self, patches: np.ndarray[Any, Any]) -> mx.array:
        rows, columns, _ = patches.shape
        table = self.position_embedding_table
        positions = table[0, :columns][None] + table[1, :rows][:, None]
        hidden = self.input_proj((2 * (mx.array(patches) - 0.5)).astype(table.dtype)) + positions
        return hidden.reshape(rows * columns, -1)  # type: ignore[no-any-return]


class _Encoder(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        self.layers = [_Block(config) for _ in range(config.num_hidden_layers)]


class Gemma4Tower(nn.Module):  # type: ignore[misc]
    """Immutable after load, shared by all sessions; one call holds its own hidden states and nothing else."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedder = _PatchEmbedder(config)
        self.encoder = _Encoder(config)
        if config.standardize:
            self.std_bias = mx.zeros((config.hidden_size,))
            self.std_scale = mx.ones((config.hidden_size,))

    def pool(self, hidden: mx.array, rows: int, columns: int) -> mx.array:
        """(rows * columns, width) of patches to (tokens, width), row by row, standardised where the model is."""
        side, width = self.config.pooling_kernel_size, self.config.hidden_size
        wide = hidden.astype(mx.float32).reshape(rows // side, side, columns // side, side, width)
        pooled = wide.mean(axis=(1, 3)).reshape(-1, width).astype(hidden.dtype)
        scaled = pooled.astype(mx.float32) * width**0.5
        if self.config.standardize:
            scaled = (scaled - self.std_bias.astype(mx.float32)) * self.std_scale.astype(mx.float32)
        return scaled.astype(hidden.dtype)  # type: ignore[no-any-return]


class _Embedder(nn.Module):  # type: ignore[misc]
    """Norms a token's features and projects them to the text model's width."""

    def __init__(self, config: Gemma4VisionConfig, text_width: int) -> None:
        super().__init__()
        self.embedding_projection = nn.Linear(config.hidden_size, text_width, bias=False)
        self._eps = config.rms_norm_eps

    def __call__(self, x: mx.array) -> mx.array:
        return self.embedding_projection(mx.fast.rms_norm(x, None, eps=self._eps))  # type: ignore[no-any-return]


class Gemma4Vision(nn.Module):  # type: ignore[misc]
    """The tower and its projection, under the names of the published checkpoints."""

    def __init__(self, config: Gemma4VisionConfig, text_width: int) -> None:
        super().__init__()
        self.vision_tower = Gemma4Tower(config)
        self.embed_vision = _Embedder(config, text_width)

    def encode(self, pixels: np.ndarray[Any, Any]) -> Iterator[Features | None]:
        """One normalised picture, float32 (height, width, 3) of whole tokens, a few blocks per step.

        Yields None after every step but the last, then {"features": (tokens, text width)}, evaluated.
        """
        config, tower = self.vision_tower.config, self.vision_tower
        side = config.patch_size
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        patches = pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(rows, columns, -1)
        rotation = axis_rotation(rows, columns, config.head_dim, config.theta)

        def block(number: int, x: mx.array) -> tuple[mx.array, Features]:
            return tower.encoder.layers[number](x, rotation), {}

        num_patches, mlp_weights = rows * columns, 3 * config.hidden_size * config.intermediate_size
        cost = block_flops(num_patches, config.hidden_size, mlp_weights, num_patches)
        return run_blocks(
            tower.patch_embedder(patches),
            [cost] * config.num_hidden_layers,
            block,
            lambda hidden: self.embed_vision(tower.pool(hidden, rows, columns)),
        )


def axis_rotation(rows: int, columns: int, head_dim: int, theta: float) -> GridRotation:
    """A grid's rotation for heads as (patches, heads, 2, head_dim / 2): the first half by column, the second by row."""
    half = head_dim // 2
    inverse = 1.0 / np.float32(theta) ** (np.arange(0, half, 2, dtype=np.float32) / np.float32(half))
    down, across = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
    places = np.stack([across, down], axis=1).astype(np.float32)
    return GridRotation.of_angles(places[:, :, None] * inverse.astype(np.float32))


def gemma4_weights(weights: Weights, config: Gemma4VisionConfig) -> Weights:
    """A tower's weights without bounds that its config turns off."""
    if config.use_clipped_linears:
        return weights
    return {name: array for name, array in weights.items() if not name.endswith(_BOUNDS)}
