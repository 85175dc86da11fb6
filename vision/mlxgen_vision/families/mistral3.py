"""Mistral 3 (Mistral Small 3.1 and 3.2, Ministral 3, Devstral Small 2): Pixtral's tower, squares of patches merged.

What Pixtral's file says about pictures holds here too; a token stands for 2 × 2 patches, so a picture's sides are
multiples of 28 pixels. A picture of a single token works here; transformers 5.24 fails on one.

The text model is mlx-lm's Mistral, or for Ministral 3 the one whose queries are scaled with the position.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen_vision import checkpoint, layouts
from mlxgen_vision.families.pixtral import IMAGE_TOKEN, GridModel, GridParts, require_last_layer
from mlxgen_vision.processors.pixtral import GridSettings, GridWords
from mlxgen_vision.support import FamilySupport, Parity
from mlxgen_vision.text_models import load_text_model
from mlxgen_vision.towers.pixtral import PatchMerger, PixtralConfig, PixtralTower, pixtral_weights
from mlxgen_vision.towers.projectors import MlpProjector, ProjectorShape

# What transformers' Mistral3Config assumes where a published config is silent.
_TOWER_DEFAULTS: Final = {"patch_size": 14}
_TEXT_DEFAULTS: Final = {
    "model_type": "mistral",
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
    "vocab_size": 131072,
}


class MergingProjector(MlpProjector):
    """Norms the patches, merges squares of them, projects: (patches, width) -> (tokens, text width)."""

    def __init__(self, shape: ProjectorShape, factor: int, eps: float) -> None:
        super().__init__(shape)
        self.norm = nn.RMSNorm(shape.vision_width, eps=eps)
        self.patch_merger = PatchMerger(shape.vision_width, factor)

    def merge(self, x: mx.array, rows: int, columns: int) -> mx.array:
        return self(self.patch_merger(self.norm(x), rows, columns))


class Mistral3Vision(nn.Module):  # type: ignore[misc]
    """A `GridVision` with a row of features for every square of patches."""

    def __init__(self, tower: PixtralConfig, projector: MergingProjector) -> None:
        super().__init__()
        self.vision_tower = PixtralTower(tower)
        self.multi_modal_projector = projector

    def project(self, x: mx.array, rows: int, columns: int) -> mx.array:
        return self.multi_modal_projector.merge(x, rows, columns)


class Mistral3Family:
    """Satisfies `VisionFamily`."""

    name = "mistral3"
    model_types: tuple[str, ...] = ("mistral3",)
    support = FamilySupport(
        models="Mistral Small 3.1 and 3.2, Ministral 3",
        parity=(Parity("mistral3"),),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> GridModel:
        """See `VisionFamily.load`. Raises `ModelLoadError` or `UnsupportedError`."""
        require_last_layer(config)
        merge = int(config.get("spatial_merge_size") or 2)
        tower = PixtralConfig.from_dict(config.get("vision_config") or {}, **_TOWER_DEFAULTS)
        settings = GridSettings.read(path, patch=tower.patch_size, merge=merge)
        weights = layouts.read_split(path, config, cancel=cancel)
        text = config.get("text_config") or {}
        if text.get("model_type", "mistral") == "mistral":
            text = _TEXT_DEFAULTS | text
        language = load_text_model(text, weights.text, default_kind="mistral", cancel=cancel)
        shape = ProjectorShape(
            tower.hidden_size,
            language.args.hidden_size,
            hidden_act=str(config.get("projector_hidden_act") or "gelu"),
            bias=bool(config.get("multimodal_projector_bias", False)),
        )
        vision = Mistral3Vision(tower, MergingProjector(shape, merge, language.args.rms_norm_eps))
        ready = pixtral_weights(weights.vision, "vision_tower.", tower)
        checkpoint.fill(vision, ready, what="the vision tower", cancel=cancel)
        image_token = int(config.get("image_token_index", config.get("image_token_id", IMAGE_TOKEN)))
        return GridModel(self.name, GridParts(language, vision, settings, GridWords.read(path), image_token))


FAMILY = Mistral3Family()
