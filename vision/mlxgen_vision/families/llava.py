"""LLaVA 1.5 and what was published under its name: one square view of a picture, all its patches.

The tower's last block but one is read, without its final norm and without the class token (haotian-liu/LLaVA,
`clip_encoder.py`: `mm_vision_select_layer` -2, select feature "patch"). Towers are CLIP or SigLIP, text models whatever
`text_models` knows; a checkpoint of this model type with a Pixtral tower is the `pixtral` family's.

LLaVA's own code pads pictures to a square (`image_aspect_ratio` "pad"). The settings published with the converted
checkpoints say otherwise (`do_center_crop`, no `do_pad`): the middle is cut out. The settings are followed; `do_pad` in
preprocessor_config.json turns the padding on, as in transformers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen.inputs import Features, MediaSpan, PreparedMedium, VisionModel
from mlxgen.request import ImagePart, MediaPart
from mlxgen_vision.families import pixtral
from mlxgen_vision.families.causal_model import CausalModel
from mlxgen_vision.families.llava_vision import LlavaVision, build_vision, fill_vision
from mlxgen_vision.image import resize
from mlxgen_vision.layouts import read_split
from mlxgen_vision.preparation import Geometry, Pixels, prepare_image
from mlxgen_vision.processors.llava import IMAGE, SquareSettings, square_image
from mlxgen_vision.spans import locate_runs
from mlxgen_vision.support import FamilySupport, Parity
from mlxgen_vision.text_models import load_text_model


@dataclass(frozen=True, slots=True)
class Parts:
    """What is loaded from a folder; immutable, shared by all sessions."""

    language: nn.Module
    vision: LlavaVision
    image_token: int


class LlavaModel(CausalModel):
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    def __init__(self, parts: Parts, settings: SquareSettings) -> None:
        super().__init__("llava", parts.language, {IMAGE: "image"})
        self.vision = parts.vision
        self.image_token = parts.image_token
        self.settings = settings

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: the picture opened and scaled to the tower's square."""
        if not isinstance(part, ImagePart):
            raise UnsupportedError("LLaVA takes pictures only; give frames of the video as pictures")

        def arrange(rgb: Pixels) -> tuple[Pixels, Geometry]:
            return square_image(rgb, self.settings, resize), {}

        return (yield from prepare_image(part, arrange, partial=partial, cancel=cancel))

    def render(self, medium: PreparedMedium) -> str:
        return IMAGE * self.vision.num_rows

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        """One span to a picture; pictures may touch."""
        return locate_runs(token_ids, media, {"image": self.image_token}, lambda medium: [self.vision.num_rows])

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One part is one picture."""
        return self.encode_pixels(self.settings.normalisation(medium.frames[part][None]))

    def encode_pixels(self, pixels: np.ndarray[Any, Any]) -> Iterator[Features | None]:
        """Normalised images, float32 (images, side, side, 3), through tower and projector."""
        return self.vision.encode(pixels)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a config means that is silent about its text model's type, and about the placeholder's id."""

    text_kind: str = "llama"
    image_token: int = 32000


def load_parts(
    path: Path,
    config: Mapping[str, Any],
    *,
    defaults: Defaults = Defaults(),
    newline: bool = False,
    cancel: CancelToken,
) -> Parts:
    """Build text model, tower and projector and give them the folder's weights, whatever its layout.

    `newline` says that the family has an `image_newline`. Raises `ModelLoadError` or `UnsupportedError`.
    """
    extra = {"image_newline": "image_newline", "model.image_newline": "image_newline"} if newline else None
    weights = read_split(path, config, extra=extra, cancel=cancel)
    text_config = config.get("text_config") or {}
    language = load_text_model(text_config, weights.text, default_kind=defaults.text_kind, cancel=cancel)
    vision = build_vision(config, int(language.args.hidden_size), newline=newline)
    fill_vision(vision, weights.vision, cancel)
    token = config.get("image_token_index", config.get("image_token_id", defaults.image_token))
    return Parts(language, vision, int(token))


class LlavaFamily:
    """Satisfies `VisionFamily`."""

    name = "llava"
    model_types: tuple[str, ...] = ("llava",)
    support = FamilySupport(
        models="LLaVA 1.5",
        parity=(Parity("llava"),),
        note="a LLaVA with Pixtral's tower is loaded as Pixtral",
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> VisionModel:
        """See `VisionFamily.load`. Raises `ModelLoadError` or `UnsupportedError`."""
        if (config.get("vision_config") or {}).get("model_type") == "pixtral":
            return pixtral.FAMILY.load(path, config, cancel=cancel)
        parts = load_parts(path, config, cancel=cancel)
        return LlavaModel(parts, SquareSettings.read(path, parts.vision.image_size))


FAMILY = LlavaFamily()
