"""Pixtral: a tower for pictures of any shape, one token to a patch, a token at each row's end; a Mistral text model.

The published checkpoint (mistral-community/pixtral-12b) is a LLaVA by its `model_type`; MLX conversions call it
`pixtral`. Sizes and pixels are transformers', see `processors/pixtral.py` for what is open about the training.

Each picture goes through the tower alone. transformers joins all pictures of a prompt in one sequence with a mask
between them, which is the same.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen.inputs import Features, MediaSpan, PreparedMedium
from mlxgen.request import ImagePart, MediaOptions, MediaPart
from mlxgen_vision import checkpoint, layouts
from mlxgen_vision.families.causal_model import CausalModel
from mlxgen_vision.image import check_options, resize
from mlxgen_vision.preparation import Geometry, Pixels, prepare_image
from mlxgen_vision.processors.pixtral import GridSettings, GridWords
from mlxgen_vision.spans import locate_runs, template_parts
from mlxgen_vision.support import FamilySupport, Parity
from mlxgen_vision.text_models import load_text_model
from mlxgen_vision.towers.pixtral import PixtralConfig, PixtralTower, pixtral_weights
from mlxgen_vision.towers.projectors import MlpProjector, ProjectorShape

IMAGE_TOKEN: Final = 10  # where config.json names none


class GridVision(Protocol):
    """A tower and its projector, under the names of the published checkpoints."""

    vision_tower: PixtralTower

    def project(self, x: mx.array, rows: int, columns: int) -> mx.array: ...


class PixtralVision(nn.Module):  # type: ignore[misc]
    """A `GridVision` with a row of features for every patch."""

    def __init__(self, tower: PixtralConfig, projector: ProjectorShape) -> None:
        super().__init__()
        self.vision_tower = PixtralTower(tower)
        self.multi_modal_projector = MlpProjector(projector)

    def project(self, x: mx.array, rows: int, columns: int) -> mx.array:
        return self.multi_modal_projector(x)


@dataclass(frozen=True, slots=True)
class GridParts:
    """What is loaded from a folder; immutable, shared by all sessions."""

    language: nn.Module
    vision: GridVision
    settings: GridSettings
    words: GridWords
    image_token: int


class GridModel(CausalModel):
    """Satisfies `VisionModel`, for Pixtral and Mistral 3. Immutable after load; nothing of a request is kept here."""

    def __init__(self, family: str, parts: GridParts) -> None:
        super().__init__(family, parts.language, {parts.words.image: "image"})
        self.vision = parts.vision
        self.settings = parts.settings
        self.words = parts.words
        self.image_token = parts.image_token

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: the picture opened and resized once, straight to a whole number of tokens."""
        if not isinstance(part, ImagePart):
            raise UnsupportedError(f"{self.family} takes pictures only; give frames of the video as pictures")
        options, settings = part.options, self.settings
        check_options(options)

        def arrange(rgb: Pixels) -> tuple[Pixels, Geometry]:
            rows, columns = settings.grid(rgb.shape[0], rgb.shape[1], options)
            size = (rows * settings.token, columns * settings.token)
            return resize(rgb, size, settings.resample), {"rows": rows, "columns": columns}

        # The caller's bounds are part of the size rule; applied before it as well, they would cost a second resampling.
        opened = ImagePart(part.source, MediaOptions(allow_urls=options.allow_urls))
        return (yield from prepare_image(opened, arrange, partial=partial, cancel=cancel))

    def render(self, medium: PreparedMedium) -> str:
        return self.words.text(medium.geometry["rows"], medium.geometry["columns"])

    def content_for_template(self, parts: Sequence[Any]) -> Any:
        """A text alone is a string: published templates join replies to strings. Beside pictures its words stand under
        "content" too, where the template first published with Pixtral looks for them (vllm-project/vllm pull request
        11891)."""
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
        return [item | {"content": item["text"]} if item["type"] == "text" else item for item in template_parts(parts)]

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        """One span to a row of a picture."""

        def rows(medium: PreparedMedium) -> list[int]:
            return [medium.geometry["columns"]] * medium.geometry["rows"]

        return locate_runs(token_ids, media, {"image": self.image_token}, rows)

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One part is one picture."""
        return self.encode_pixels(self.settings.normalisation(medium.frames[part]))

    def encode_pixels(self, pixels: np.ndarray[Any, Any]) -> Iterator[Features | None]:
        """A normalised picture, float32 (height, width, 3), through tower and projector."""
        return self.vision.vision_tower.encode(pixels, self.vision.project)


def require_last_layer(config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` unless the features are all patches of the tower's last layer."""
    for name, wanted in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "full")):
        if config.get(name, wanted) not in (wanted, [wanted]):
            raise UnsupportedError(
                f"config.json has {name} {config[name]!r}; with a Pixtral tower it must be {wanted!r}"
            )


class PixtralFamily:
    """Satisfies `VisionFamily`."""

    name = "pixtral"
    model_types: tuple[str, ...] = ("pixtral",)
    support = FamilySupport(
        models="Pixtral",
        parity=(Parity("pixtral"),),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> GridModel:
        """See `VisionFamily.load`. Raises `ModelLoadError` or `UnsupportedError`."""
        require_last_layer(config)
        tower = PixtralConfig.from_dict(config.get("vision_config") or {})
        settings = GridSettings.read(path, patch=tower.patch_size, merge=1)
        weights = layouts.read_split(path, config, cancel=cancel)
        language = load_text_model(config.get("text_config") or {}, weights.text, default_kind="mistral", cancel=cancel)
        shape = ProjectorShape(
            tower.hidden_size,
            language.args.hidden_size,
            hidden_act=str(config.get("projector_hidden_act") or "gelu"),
            bias=bool(config.get("multimodal_projector_bias", True)),
        )
        vision = PixtralVision(tower, shape)
        ready = pixtral_weights(weights.vision, "vision_tower.", tower)
        checkpoint.fill(vision, ready, what="the vision tower", cancel=cancel)
        image_token = int(config.get("image_token_index", config.get("image_token_id", IMAGE_TOKEN)))
        return GridModel(self.name, GridParts(language, vision, settings, GridWords.read(path), image_token))


FAMILY = PixtralFamily()
