"""What the LLaVA families have in common: a CLIP or SigLIP tower, one of its hidden states, a two-layer projector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.cancellation import CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen.inputs import Features
from mlxgen_vision import checkpoint
from mlxgen_vision.checkpoint import Weights
from mlxgen_vision.towers.clip import ClipTower, clip_config
from mlxgen_vision.towers.images import Readout, encode_images
from mlxgen_vision.towers.projectors import MlpProjector, ProjectorShape
from mlxgen_vision.towers.siglip import SiglipConfig, SiglipTower, siglip_weights

# What transformers' LlavaConfig assumes where there is no vision_config at all: CLIP ViT-L/14 at 336 pixels.
_CLIP_336: Final = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}


@dataclass(frozen=True, slots=True)
class TowerOutput:
    """Which hidden state of the tower goes to the projector: the one after `num_layers` blocks, never normed, without
    its first `skip` tokens."""

    num_layers: int
    skip: int

    @classmethod
    def of(cls, config: Mapping[str, Any], num_layers: int) -> TowerOutput:
        """As `vision_feature_layer` (0 is what goes into the first block, -1 what comes out of the last) and
        `vision_feature_select_strategy` say. Raises `UnsupportedError` for several layers, or one there isn't."""
        layer = config.get("vision_feature_layer", -2)
        if isinstance(layer, list) and len(layer) == 1:
            layer = layer[0]
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise UnsupportedError(
                f"vision_feature_layer is {layer!r}; mlxgen takes one layer of the tower, a whole number"
            )
        count = layer if layer >= 0 else num_layers + 1 + layer
        if not 0 <= count <= num_layers:
            raise UnsupportedError(
                f"vision_feature_layer is {layer}, the tower has {num_layers} layers; config.json is damaged"
            )
        strategy = config.get("vision_feature_select_strategy") or "default"
        if strategy not in ("default", "full"):
            raise UnsupportedError(f"vision_feature_select_strategy is {strategy!r}; it must be 'default' or 'full'")
        return cls(count, 1 if strategy == "default" else 0)


class LlavaVision(nn.Module):  # type: ignore[misc]
    """Tower and projector under the names of the published checkpoints, and the embedding of a line's end where the
    family has one (`image_newline`)."""

    def __init__(self, tower: ClipTower | SiglipTower, projector: ProjectorShape, output: TowerOutput) -> None:
        super().__init__()
        self.vision_tower = tower
        self.multi_modal_projector = MlpProjector(projector)
        self._output = output

    @property
    def image_size(self) -> int:
        """Height and width of what the tower takes, in pixels."""
        return int(self.vision_tower.config.image_size)

    @property
    def side(self) -> int:
        """Patches to a side."""
        return int(self.vision_tower.config.patches_per_side)

    @property
    def num_rows(self) -> int:
        """How many rows come out for one image."""
        return int(self.vision_tower.num_tokens(self.image_size, self.image_size)) - self._output.skip

    def require_grid(self) -> None:
        """Raise `UnsupportedError` unless the rows of an image are its patches, so that they can be laid out again."""
        if self.num_rows != self.side**2:
            raise UnsupportedError(
                f"the tower gives {self.num_rows} rows for {self.side}x{self.side} patches; "
                "vision_feature_select_strategy doesn't fit the tower"
            )

    def encode(self, pixels: np.ndarray[Any, Any]) -> Iterator[Features | None]:
        """Normalised images, float32 (images, height, width, 3), through tower and projector; see `encode_images`."""

        def project(hidden: mx.array) -> mx.array:
            return self.multi_modal_projector(hidden[:, self._output.skip :])

        readout = Readout(project, num_layers=self._output.num_layers, post_norm=False)
        return encode_images(self.vision_tower, pixels, readout)


def build_vision(config: Mapping[str, Any], text_width: int, *, newline: bool = False) -> LlavaVision:
    """An empty module for a `config.json`, with an `image_newline` or without.

    Raises `UnsupportedError` for a tower mlxgen doesn't have.
    """
    given = config.get("vision_config") or _CLIP_336
    kind = given.get("model_type", "clip_vision_model")
    tower: ClipTower | SiglipTower
    if kind == "clip_vision_model":
        tower = ClipTower(clip_config(given))
    elif kind == "siglip_vision_model":
        tower = SiglipTower(SiglipConfig.from_dict(given))
    else:
        raise UnsupportedError(
            f"vision_config has model_type {kind!r}; mlxgen's LLaVA has clip_vision_model and siglip_vision_model"
        )
    shape = tower.config
    projector = ProjectorShape(
        shape.hidden_size,
        text_width,
        hidden_act=config.get("projector_hidden_act") or "gelu",
        bias=config.get("multimodal_projector_bias", True),
    )
    output = TowerOutput.of(config, shape.num_hidden_layers)
    module = LlavaVision(tower, projector, output)
    if newline:
        module.image_newline = mx.zeros((text_width,))
    return module


def fill_vision(module: LlavaVision, weights: Weights, cancel: CancelToken) -> None:
    """Give the module its weights, whatever their layout. Raises `ModelLoadError` if they aren't exactly its own."""
    ready = siglip_weights(weights, "vision_tower.", module.vision_tower.config)
    checkpoint.fill(module, ready, what="the vision tower", cancel=cancel)
