"""LLaVA-NeXT (LLaVA 1.6): LLaVA with a larger view of each picture beside the whole one, in tiles.

Which grid, what is padded and which patches are left out again: `processors/anyres.py`. Each line of the larger view
ends with a learned `image_newline`. Every picture of a prompt is tiled, however many there are (transformers' rule).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen.inputs import Features, MediaSpan, PreparedMedium
from mlxgen.request import ImagePart, MediaPart
from mlxgen_vision.families.causal_model import CausalModel
from mlxgen_vision.families.llava import Parts, load_parts
from mlxgen_vision.image import resize
from mlxgen_vision.preparation import Geometry, Pixels, prepare_image
from mlxgen_vision.processors.anyres import AnyResSettings, Window, unpadded, views
from mlxgen_vision.processors.llava import IMAGE
from mlxgen_vision.spans import locate_runs
from mlxgen_vision.support import FamilySupport, Parity
from mlxgen_vision.towers.anyres import large_view, with_line_ends

_GRIDS: Final = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


class LlavaNextModel(CausalModel):
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    def __init__(self, parts: Parts, settings: AnyResSettings) -> None:
        super().__init__("llava_next", parts.language, {IMAGE: "image"})
        self.vision = parts.vision
        self.image_token = parts.image_token
        self.settings = settings

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: the picture opened, scaled twice and cut into tiles."""
        if not isinstance(part, ImagePart):
            raise UnsupportedError("LLaVA-NeXT takes pictures only; give frames of the video as pictures")

        def arrange(rgb: Pixels) -> tuple[Pixels, Geometry]:
            size = (rgb.shape[0], rgb.shape[1])
            return views(rgb, self.settings, resize), {"size": list(size), "grid": list(self.settings.grid(size))}

        return (yield from prepare_image(part, arrange, partial=partial, cancel=cancel))

    def render(self, medium: PreparedMedium) -> str:
        return IMAGE * self.num_rows(medium.geometry)

    def num_rows(self, geometry: Mapping[str, Any]) -> int:
        """How many tokens a picture takes: its whole view, and the larger one with the ends of its lines."""
        window = self.window(geometry)
        return self.vision.num_rows + window.rows * (window.columns + 1)

    def window(self, geometry: Mapping[str, Any]) -> Window:
        height, width = geometry["size"]
        rows, columns = geometry["grid"]
        return unpadded((height, width), rows * self.vision.side, columns * self.vision.side)

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        """One span to a picture; pictures may touch."""

        def lengths(medium: PreparedMedium) -> list[int]:
            return [self.num_rows(medium.geometry)]

        return locate_runs(token_ids, media, {"image": self.image_token}, lengths)

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One part is one picture with all its tiles, a few of them at a time."""
        return self.encode_views(self.settings.normalisation(medium.frames[part]), medium.geometry)

    def encode_views(self, pixels: np.ndarray[Any, Any], geometry: Mapping[str, Any]) -> Iterator[Features | None]:
        """Normalised views, float32 (1 + tiles, side, side, 3), through tower and projector, and put in order."""
        for step in self.vision.encode(pixels):
            yield None if step is None else self.arranged(step["features"], geometry)

    def arranged(self, rows: mx.array, geometry: Mapping[str, Any]) -> Features:
        """What the language model gets of the rows of all views."""
        each = rows.reshape(-1, self.vision.num_rows, rows.shape[-1])
        view = self.window(geometry).cut(large_view(each[1:], tuple(geometry["grid"]), self.vision.side))
        features = mx.concatenate([each[0], with_line_ends(view, self.vision.image_newline)])
        mx.eval(features)
        return {"features": features}


class LlavaNextFamily:
    """Satisfies `VisionFamily`."""

    name = "llava_next"
    model_types: tuple[str, ...] = ("llava_next",)
    support = FamilySupport(
        models="LLaVA-NeXT (1.6)",
        prepares="one picture, cut into tiles",
        encodes="a few blocks of the tower, for a few tiles",
        parity=(Parity("llava_next"),),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> LlavaNextModel:
        """See `VisionFamily.load`. Raises `ModelLoadError` or `UnsupportedError`."""
        parts = load_parts(path, config, newline=True, cancel=cancel)
        parts.vision.require_grid()
        return LlavaNextModel(parts, AnyResSettings.read(path, config, parts.vision.image_size, _GRIDS))


FAMILY = LlavaNextFamily()
