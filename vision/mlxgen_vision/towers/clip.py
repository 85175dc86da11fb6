"""The CLIP vision transformer.

The architecture is that of "Learning Transferable Visual Models From Natural Language Supervision" (arXiv:2103.00020):
a patch convolution without bias, a class token in front of the patches, learned absolute positions, a layer norm before
the blocks, pre-norm blocks with full attention and the sigmoid form of GELU. Its blocks are SigLIP's. Modules are named
as in the published checkpoints, their spelling of `pre_layrnorm` included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from mlxgen.errors import UnsupportedError
from mlxgen_vision.towers.siglip import Encoder, SiglipConfig

# What transformers' CLIPVisionConfig assumes where a config is silent.
_DEFAULTS: Final = {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}


def clip_config(config: Mapping[str, Any]) -> SiglipConfig:
    """The shape of a tower from a `vision_config`. Raises `UnsupportedError`, see `SiglipConfig.from_dict`."""
    return SiglipConfig.from_dict(config, **_DEFAULTS)


class Embeddings(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.class_embedding = mx.zeros((config.hidden_size,))
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size, bias=False
        )
        self.position_embedding = nn.Embedding(1 + config.patches_per_side**2, config.hidden_size)

    def __call__(self, pixels: mx.array) -> mx.array:
        patches = self.patch_embedding(pixels)
        count, rows, columns, width = patches.shape
        positions = self.position_embedding(mx.arange(1 + rows * columns))
        first = mx.broadcast_to(self.class_embedding.astype(patches.dtype), (count, 1, width))
        return mx.concatenate([first, patches.reshape(count, rows * columns, width)], axis=1) + positions  # type: ignore[no-any-return]


class ClipTower(nn.Module):  # type: ignore[misc]
    """An `images.ImageTower`. Immutable after load, shared by all sessions; a call holds its own hidden states only."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
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
        return 1 + (height // self.config.patch_size) * (width // self.config.patch_size)

    def embed(self, pixels: mx.array) -> mx.array:
        """(images, side, side, channels) -> (images, 1 + patches, width), the class token first.

        Raises `UnsupportedError` for another size than the positions were learned for.
        """
        side = self.config.image_size
        if pixels.shape[1:3] != (side, side):
            raise UnsupportedError(
                f"the vision tower takes {side}x{side} pixels, not {pixels.shape[1]}x{pixels.shape[2]}"
            )
        return self.pre_layrnorm(self.embeddings(pixels))  # type: ignore[no-any-return]

    def final_norm(self, hidden: mx.array) -> mx.array:
        return self.post_layernorm(hidden)  # type: ignore[no-any-return]
