"""The SigLIP vision transformer.

The architecture is that of "Sigmoid Loss for Language Image Pre-Training" (arXiv:2303.15343): a patch convolution,
learned absolute positions, pre-norm blocks with full attention and tanh-GELU, a final layer norm; no class token.
Modules are named as in the published checkpoints (`encoder.layers.N.self_attn.q_proj`, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.errors import UnsupportedError
from mlxgen_vision.checkpoint import Weights, channel_last
from mlxgen_vision.towers.activations import activation


@dataclass(frozen=True, slots=True)
class SiglipConfig:
    """The shape of a tower; the defaults are those published configs leave out (transformers' `SiglipVisionConfig`)."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], **defaults: Any) -> SiglipConfig:
        """Take the known keys of a `vision_config`; `defaults` are for families that leave out other values.

        Raises `UnsupportedError` for an activation or a head count the tower can't have.
        """
        known = {item.name for item in fields(cls)}
        values = {**defaults, **{key: value for key, value in config.items() if key in known and value is not None}}
        made = cls(**values)
        activation(made.hidden_act)  # an unknown one is refused here, before any weight is read
        if made.hidden_size % made.num_attention_heads:
            raise UnsupportedError(
                f"vision_config has hidden_size {made.hidden_size}, not a multiple of its "
                f"{made.num_attention_heads} attention heads; the config is damaged"
            )
        return made

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    def block_flops(self, num_patches: int) -> float:
        """Floating-point operations of one block for one image of `num_patches` patches."""
        products = 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size
        return 2.0 * num_patches * products + 4.0 * num_patches**2 * self.hidden_size


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def __call__(self, x: mx.array) -> mx.array:
        batch, length, width = x.shape
        head_dim = width // self.num_heads

        def heads(y: mx.array) -> mx.array:
            y = y.reshape(batch, length, self.num_heads, head_dim).transpose(0, 2, 1, 3)
            # The fused kernels know widths 64, 80 and 128 only; without one the so400m tower (72 wide, 4096 patches)
            # would hold all its scores at once. Zeros change neither the scores nor the columns that are kept.
            pad = (80 if head_dim <= 80 else 128) - head_dim if 64 < head_dim < 128 else 0
            return mx.pad(y, [(0, 0), (0, 0), (0, 0), (0, pad)]) if pad else y

        out = mx.fast.scaled_dot_product_attention(
            heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x)), scale=head_dim**-0.5
        )
        return self.out_proj(out[..., :head_dim].transpose(0, 2, 1, 3).reshape(batch, length, width))  # type: ignore[no-any-return]


class MLP(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self._activation = activation(config.hidden_act)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(self._activation(self.fc1(x)))  # type: ignore[no-any-return]


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = Attention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def __call__(self, x: mx.array) -> mx.array:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Embeddings(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.position_embedding = nn.Embedding(config.patches_per_side**2, config.hidden_size)
        self._side = config.patches_per_side

    def __call__(self, pixels: mx.array) -> mx.array:
        patches = self.patch_embedding(pixels)
        count, rows, columns, width = patches.shape
        positions = mx.array(grid_positions(rows, columns, self._side))
        return patches.reshape(count, rows * columns, width) + self.position_embedding(positions)  # type: ignore[no-any-return]


class Encoder(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.layers = [Block(config) for _ in range(config.num_hidden_layers)]


class SiglipTower(nn.Module):  # type: ignore[misc]
    """An `images.ImageTower`. Immutable after load, shared by all sessions; a call holds its own hidden states only."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @property
    def dtype(self) -> mx.Dtype:
        """What the tower computes in: the dtype of the patch convolution, which no published checkpoint quantises."""
        return self.embeddings.patch_embedding.weight.dtype  # type: ignore[no-any-return]

    @property
    def blocks(self) -> Sequence[Callable[[mx.array], mx.array]]:
        return self.encoder.layers

    def num_tokens(self, height: int, width: int) -> int:
        return (height // self.config.patch_size) * (width // self.config.patch_size)

    def embed(self, pixels: mx.array) -> mx.array:
        return self.embeddings(pixels)

    def final_norm(self, hidden: mx.array) -> mx.array:
        return self.post_layernorm(hidden)  # type: ignore[no-any-return]


def siglip_weights(weights: Weights, prefix: str, config: SiglipConfig) -> Weights:
    """A tower's weights under `prefix`, ready for the module: the convolution channel-last, unused entries dropped.

    Old checkpoints store the position indices as a buffer; SigLIP's pooling head is never part of a language model.
    """
    unused = (f"{prefix}head.", f"{prefix}embeddings.position_ids")
    kept = {name: array for name, array in weights.items() if not name.startswith(unused)}
    name = f"{prefix}embeddings.patch_embedding.weight"
    if name in kept:
        side = config.patch_size
        kept[name] = channel_last(kept[name], channels=config.num_channels, kernel=(side, side))
    return kept


def grid_positions(rows: int, columns: int, side: int) -> np.ndarray[Any, Any]:
    """The learned position of every patch of a (rows, columns) grid, row by row, int32; the table is side by side.

    A full grid takes the table as it is; another one spreads over the table (a patch at fraction i/rows of the
    height takes row floor(i * side / rows)). The rule of Idefics2's variable-resolution SigLIP, in exact integers
    where the original compares float32 fractions with float32 boundaries.
    """
    across = np.arange(columns, dtype=np.int32) * side // columns
    down = np.arange(rows, dtype=np.int32) * side // rows
    return (down[:, None] * side + across[None, :]).reshape(-1).astype(np.int32)
