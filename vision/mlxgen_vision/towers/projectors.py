"""What stands between a tower and the language model, where several families have the same."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxgen_vision.towers.activations import activation


@dataclass(frozen=True, slots=True)
class ProjectorShape:
    """Widths in and out; `bias` of both layers; `hidden_act` as a config's `projector_hidden_act` names it."""

    vision_width: int
    text_width: int
    hidden_act: str = "gelu"
    bias: bool = True


class MlpProjector(nn.Module):  # type: ignore[misc]
    """Two layers with an activation between them, under the names LLaVA 1.5 introduced.

    (..., vision width) -> (..., text width). Raises `UnsupportedError` for an activation nobody publishes.
    """

    def __init__(self, shape: ProjectorShape) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(shape.vision_width, shape.text_width, bias=shape.bias)
        self.linear_2 = nn.Linear(shape.text_width, shape.text_width, bias=shape.bias)
        self._activation = activation(shape.hidden_act)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_2(self._activation(self.linear_1(x)))  # type: ignore[no-any-return]
