"""InternVL's vision tower (InternViT): one fixed square, a class token, learned positions, scaled residual branches.

"InternVL: Scaling up Vision Foundation Models" (arXiv:2312.14238). Module names are those of the checkpoints published
for transformers. The 300M tower has layer norms, the 6B tower RMS norms, on queries and keys too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from mlxgen.errors import UnsupportedError
from mlxgen_vision.checkpoint import Weights, channel_last
from mlxgen_vision.towers import blocks
from mlxgen_vision.towers.activations import activation
from mlxgen_vision.towers.pixel_shuffle import pixel_shuffle
from mlxgen_vision.towers.projectors import MlpProjector, ProjectorShape

_NORMS: Final[dict[str, Callable[..., nn.Module]]] = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}


@dataclass(frozen=True, slots=True)
class InternVLConfig:
    """The tower's shape; the defaults are those published configs leave out (transformers' `InternVLVisionConfig`).

    `image_size` and `patch_size` are the sides of squares, in pixels.
    """

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 448
    patch_size: int = 14
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    norm_type: str = "layer_norm"
    attention_bias: bool = False
    use_qk_norm: bool = False
    use_mean_pooling: bool = True
    use_absolute_position_embeddings: bool = True

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> InternVLConfig:
        """Take the known keys of a `vision_config`.

        Raises `UnsupportedError` for sides that aren't those of squares, and for norms, activations or head counts the
        tower can't have.
        """
        known = {item.name for item in fields(cls)}
        values = {key: value for key, value in config.items() if key in known and value is not None}
        for name in ("image_size", "patch_size"):
            sides = values.get(name)
            if isinstance(sides, list):
                if len(set(sides)) != 1:
                    raise UnsupportedError(f"vision_config has {name} {sides}; the tower takes squares")
                values[name] = int(sides[0])
        made = cls(**values)
        activation(made.hidden_act)  # an unknown one is refused here, before any weight is read
        if made.norm_type not in _NORMS:
            raise UnsupportedError(f"vision_config has norm_type {made.norm_type!r}; mlxgen knows {', '.join(_NORMS)}")
        if made.hidden_size % made.num_attention_heads:
            raise UnsupportedError(
                f"vision_config has hidden_size {made.hidden_size}, not a multiple of its "
                f"{made.num_attention_heads} attention heads; the config is damaged"
            )
        return made

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    def block_flops(self, num_tokens: int) -> float:
        """Floating-point operations of one block for one image of `num_tokens` tokens."""
        return blocks.block_flops(
            num_tokens, self.hidden_size, 2 * self.hidden_size * self.intermediate_size, num_tokens
        )

    def norm(self) -> nn.Module:
        return _NORMS[self.norm_type](self.hidden_size, eps=self.layer_norm_eps)


class _Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: InternVLConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, width, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, width, bias=config.attention_bias)
        self.projection_layer = nn.Linear(width, width)
        if config.use_qk_norm:  # over all heads together
            self.q_norm = nn.RMSNorm(width, eps=1e-6)
            self.k_norm = nn.RMSNorm(width, eps=1e-6)

    def __call__(self, x: mx.array) -> mx.array:
        count, length, width = x.shape
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if "q_norm" in self:
            query, key = self.q_norm(query), self.k_norm(key)
        heads = [y.reshape(count, length, self.num_heads, -1).transpose(0, 2, 1, 3) for y in (query, key, value)]
        out = blocks.fused_attention(heads[0], heads[1], heads[2], (width // self.num_heads) ** -0.5)
        return self.projection_layer(out.transpose(0, 2, 1, 3).reshape(count, length, width))  # type: ignore[no-any-return]


class _Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, config: InternVLConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self._activation = activation(config.hidden_act)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(self._activation(self.fc1(x)))  # type: ignore[no-any-return]


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, config: InternVLConfig) -> None:
        super().__init__()
        self.layernorm_before = config.norm()
        self.attention = _Attention(config)
        self.lambda_1 = mx.ones((config.hidden_size,))
        self.layernorm_after = config.norm()
        self.mlp = _Mlp(config)
        self.lambda_2 = mx.ones((config.hidden_size,))

    def __call__(self, x: mx.array) -> mx.array:
        x = x + self.lambda_1 * self.attention(self.layernorm_before(x))
        return x + self.lambda_2 * self.mlp(self.layernorm_after(x))


class _PatchEmbeddings(nn.Module):  # type: ignore[misc]
    def __init__(self, config: InternVLConfig) -> None:
        super().__init__()
        side = config.patch_size
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=side, stride=side)


class _Embeddings(nn.Module):  # type: ignore[misc]
    def __init__(self, config: InternVLConfig) -> None:
        super().__init__()
        self.cls_token = mx.zeros((1, 1, config.hidden_size))
        self.patch_embeddings = _PatchEmbeddings(config)
        if config.use_absolute_position_embeddings:
            self.position_embeddings = mx.zeros((1, config.patches_per_side**2 + 1, config.hidden_size))

    def __call__(self, pixels: mx.array) -> mx.array:
        patches = self.patch_embeddings.projection(pixels)
        count, rows, columns, width = patches.shape
        first = mx.broadcast_to(self.cls_token, (count, 1, width))
        x = mx.concatenate([first, patches.reshape(count, rows * columns, width)], axis=1)
        return x + self.position_embeddings if "position_embeddings" in self else x


class _Encoder(nn.Module):  # type: ignore[misc]
    def __init__(self, config: InternVLConfig) -> None:
        super().__init__()
        self.layer = [_Block(config) for _ in range(config.num_hidden_layers)]


class InternVLTower(nn.Module):  # type: ignore[misc]
    """An `images.ImageTower`. Immutable after load, shared by all sessions; a call holds its own hidden states only."""

    def __init__(self, config: InternVLConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        if not config.use_mean_pooling:
            self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    @property
    def dtype(self) -> mx.Dtype:
        """What the tower computes in: the dtype of the patch convolution, which no published checkpoint quantises."""
        return self.embeddings.patch_embeddings.projection.weight.dtype  # type: ignore[no-any-return]

    @property
    def blocks(self) -> Sequence[Callable[[mx.array], mx.array]]:
        return self.encoder.layer

    def num_tokens(self, height: int, width: int) -> int:
        """The patches and the class token."""
        return (height // self.config.patch_size) * (width // self.config.patch_size) + 1

    def embed(self, pixels: mx.array) -> mx.array:
        return self.embeddings(pixels)

    def final_norm(self, hidden: mx.array) -> mx.array:
        return self.layernorm(hidden) if "layernorm" in self else hidden


class ShuffleProjector(MlpProjector):
    """Merges squares of patches, norms, projects: (images, patches, width) -> (images, tokens, text width).

    `shape.vision_width` is that of the merged patches.
    """

    def __init__(self, shape: ProjectorShape, factor: int) -> None:
        super().__init__(shape)
        self.layer_norm = nn.LayerNorm(shape.vision_width)
        self._factor = factor

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(self.layer_norm(pixel_shuffle(x, self._factor)))


def internvl_weights(weights: Weights, prefix: str, config: InternVLConfig) -> Weights:
    """A tower's weights under `prefix`, ready for the module: the convolution channel-last, no mask token, which only
    the tower's own training used."""
    kept = {name: array for name, array in weights.items() if name != f"{prefix}embeddings.mask_token"}
    name = f"{prefix}embeddings.patch_embeddings.projection.weight"
    if name in kept:
        side = config.patch_size
        kept[name] = channel_last(kept[name], channels=config.num_channels, kernel=(side, side))
    return kept
