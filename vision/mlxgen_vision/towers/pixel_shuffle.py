"""Space-to-depth on patch features: fewer and wider rows for the language model."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxgen.errors import UnsupportedError


def pixel_shuffle(x: mx.array, factor: int) -> mx.array:
    """Merge each `factor` x `factor` square of patches into one row, its patches row by row along the width.

    (images, side * side, width) -> (images, (side / factor)^2, width * factor^2), for square grids. The order inside a
    row is that of Idefics3's connector (huggingface/transformers, modeling_idefics3.py).
    """
    length = x.shape[1]
    side = int(length**0.5)
    if side * side != length or side % factor:
        raise UnsupportedError(
            f"{length} patches can't be merged {factor} by {factor}; the model's tile size, patch size and scale "
            "factor don't fit together"
        )
    return merge_squares(x, side, side, factor)


def merge_squares(x: mx.array, rows: int, columns: int, factor: int) -> mx.array:
    """The same for a grid of any shape: (images, rows * columns, width) -> (images, rows * columns / factor^2, ...)."""
    count, _, width = x.shape
    x = x.reshape(count, rows // factor, factor, columns // factor, factor, width).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(count, -1, factor * factor * width)


class PixelShuffleConnector(nn.Module):  # type: ignore[misc]
    """Pixel shuffle and one bias-free projection, under the names Idefics3 and SmolVLM publish."""

    def __init__(self, vision_width: int, text_width: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.modality_projection = _Projection(vision_width * factor * factor, text_width)

    def __call__(self, x: mx.array) -> mx.array:
        return self.modality_projection.proj(pixel_shuffle(x, self.factor))  # type: ignore[no-any-return]


class _Projection(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, text_width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, text_width, bias=False)
