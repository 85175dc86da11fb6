"""Pixtral's vision tower: pictures of any shape, two-axis rotary positions, full attention within a picture.

"Pixtral 12B" (arXiv:2410.07073); module names are those of the published checkpoints. Rows and columns rotate by
different frequencies: of the head's, rows take the 1st, 3rd, 5th, …, columns the 2nd, 4th, 6th, …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.errors import UnsupportedError
from mlxgen.inputs import Features
from mlxgen_vision.checkpoint import Weights, channel_last
from mlxgen_vision.towers.activations import activation
from mlxgen_vision.towers.blocks import block_flops, fused_attention, run_blocks
from mlxgen_vision.towers.qwen_vit import GridRotation, patch_coordinates

_EPS: Final = 1e-5  # of every norm in the tower, not in the config

# (patches, width), rows and columns of the picture's grid -> (tokens, text width)
Project = Callable[[mx.array, int, int], mx.array]


@dataclass(frozen=True, slots=True)
class PixtralConfig:
    """The tower's shape; the defaults are those published configs leave out (transformers' `PixtralVisionConfig`)."""

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    patch_size: int = 16
    hidden_act: str = "gelu"
    theta: float = 10000.0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], **defaults: Any) -> PixtralConfig:
        """Take the known keys of a `vision_config`, old and new; `defaults` are for families that leave out others.

        Raises `UnsupportedError` for an activation nobody publishes, patches that aren't square, heads that can't be
        split over two axes, or rotary settings of another kind.
        """
        usual = cls()
        given = {**defaults, **{key: value for key, value in config.items() if value is not None}}
        rope = given.get("rope_parameters") or {}
        if rope.get("rope_type", "axial") not in ("axial", "default"):
            raise UnsupportedError(f"the vision tower's rope_type is {rope['rope_type']!r}; Pixtral's is 'axial'")
        patch = given.get("patch_size", usual.patch_size)
        sides = set(patch) if isinstance(patch, list) else {patch}
        if len(sides) != 1:
            raise UnsupportedError(f"the vision tower's patch_size is {patch}; patches must be square")
        numbers = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels")
        made = cls(
            **{name: int(given[name]) for name in numbers if name in given},
            patch_size=int(sides.pop()),
            hidden_act=str(given.get("hidden_act", usual.hidden_act)),
            theta=float(rope.get("rope_theta") or given.get("rope_theta") or usual.theta),
        )
        activation(made.hidden_act)  # an unknown one is refused here, before any weight is read
        if made.hidden_size % (4 * made.num_attention_heads):
            raise UnsupportedError(
                f"vision_config has hidden_size {made.hidden_size} for {made.num_attention_heads} attention heads; "
                "two-axis positions take heads of a multiple of 4"
            )
        return made

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def rotation(self, rows: int, columns: int) -> GridRotation:
        """The rotation of every patch of a grid, row by row."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        inverse = np.float32(1.0) / np.float32(self.theta) ** exponents
        coordinates = patch_coordinates(rows, columns, 1).astype(np.float32)
        by_row, by_column = coordinates[:, :1] * inverse[0::2], coordinates[:, 1:] * inverse[1::2]
        return GridRotation.of_angles(np.concatenate([by_row, by_column], axis=-1))


class _Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def __call__(self, x: mx.array, rotation: GridRotation) -> mx.array:
        num_patches, width = x.shape
        query, key, value = (
            layer(x).reshape(num_patches, self.num_heads, -1) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = [y.transpose(1, 0, 2)[None] for y in (rotation(query), rotation(key), value)]
        out = fused_attention(heads[0], heads[1], heads[2], (width // self.num_heads) ** -0.5)
        return self.o_proj(out[0].transpose(1, 0, 2).reshape(num_patches, width))  # type: ignore[no-any-return]


class _FeedForward(nn.Module):  # type: ignore[misc]
    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self._activation = activation(config.hidden_act)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=_EPS)
        self.attention = _Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=_EPS)
        self.feed_forward = _FeedForward(config)

    def __call__(self, x: mx.array, rotation: GridRotation) -> mx.array:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class _Transformer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.layers = [_Block(config) for _ in range(config.num_hidden_layers)]


class PixtralTower(nn.Module):  # type: ignore[misc]
    """Immutable after load, shared by all sessions; one call holds its own hidden states and nothing else."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.config = config
        side = config.patch_size
        self.patch_conv = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=side, stride=side, bias=False)
        self.ln_pre = nn.RMSNorm(config.hidden_size, eps=_EPS)
        self.transformer = _Transformer(config)

    def encode(self, pixels: np.ndarray[Any, Any], project: Project) -> Iterator[Features | None]:
        """One normalised picture, float32 (height, width, channels), both sides multiples of the patch size.

        `project` makes the features of what comes out of the last block. Yields None after every step but the last,
        then {"features": …}, evaluated.
        """
        config = self.config
        embedded = self.patch_conv(mx.array(pixels[None]).astype(self.patch_conv.weight.dtype))
        _, rows, columns, width = embedded.shape
        rotation = config.rotation(rows, columns)
        layers = self.transformer.layers
        cost = block_flops(rows * columns, width, 3 * width * config.intermediate_size, rows * columns)
        return run_blocks(
            self.ln_pre(embedded.reshape(rows * columns, width)),
            [cost] * len(layers),
            lambda number, x: (layers[number](x, rotation), {}),
            lambda x: project(x, rows, columns),
        )


def pixtral_weights(weights: Weights, prefix: str, config: PixtralConfig) -> Weights:
    """A tower's weights under `prefix` with the patch convolution channel-last, from either layout."""
    name = f"{prefix}patch_conv.weight"
    if name not in weights:
        return weights
    side = config.patch_size
    return weights | {name: channel_last(weights[name], channels=config.num_channels, kernel=(side, side))}


class PatchMerger(nn.Module):  # type: ignore[misc]
    """Joins each `factor` × `factor` square of patches, channel by channel, and projects it back to the tower's width.

    (rows * columns, width) -> (rows * columns / factor², width), under Mistral 3's names.
    """

    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.merging_layer = nn.Linear(width * factor**2, width, bias=False)

    def __call__(self, x: mx.array, rows: int, columns: int) -> mx.array:
        factor, width = self.factor, x.shape[-1]
        squares = x.reshape(rows // factor, factor, columns // factor, factor, width).transpose(0, 2, 4, 1, 3)
        return self.merging_layer(squares.reshape(-1, width * factor**2))  # type: ignore[no-any-return]
