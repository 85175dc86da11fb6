"""Idefics3: a SigLIP tower over square tiles, pixel shuffle, a Llama.

Positions of the patches: patch i of a full tile takes position i, as Idefics3 was trained. transformers 4.55 to 4.57
shrank the coordinates first and got 0, 0, 1, 2, … (huggingface/transformers issue 41190, pull request 41371);
transformers 5 is right again. For 27 patches a side the float boundaries of the very first implementation put one index
elsewhere; here, as in transformers 5, a full grid is always the identity.

The tiles are full squares whatever the picture, so there is no padding to mask, in the tower or in the text.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen.inputs import Features, MediaKind, MediaSpan, PreparedInput, PreparedMedium
from mlxgen.request import ImagePart, MediaPart
from mlxgen_vision import checkpoint
from mlxgen_vision.embeddings import chunk_features, place
from mlxgen_vision.image import resize
from mlxgen_vision.preparation import Geometry, Pixels, prepare_image
from mlxgen_vision.processors.idefics3 import IMAGE, TilingSettings, image_text, tile_image
from mlxgen_vision.spans import RunLayout, expand_placeholders, template_parts
from mlxgen_vision.support import FamilySupport, Parity
from mlxgen_vision.text_config import llama_arguments
from mlxgen_vision.towers.images import Readout, encode_images
from mlxgen_vision.towers.pixel_shuffle import PixelShuffleConnector
from mlxgen_vision.towers.siglip import SiglipConfig, SiglipTower, siglip_weights

# What transformers' Idefics3VisionConfig assumes where a published config is silent.
_TOWER_DEFAULTS: Final = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}

_TEXT: Final = {
    "model.text_model.": "model.",
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
_VISION: Final = {
    "model.vision_model.": "vision_model.",
    "vision_model.": "vision_model.",
    "model.connector.": "connector.",
    "connector.": "connector.",
}


class TiledVision(nn.Module):  # type: ignore[misc]
    """The tower and its connector, under the names of the published checkpoints."""

    def __init__(self, tower: SiglipConfig, text_width: int, scale_factor: int) -> None:
        super().__init__()
        self.vision_model = SiglipTower(tower)
        self.connector = PixelShuffleConnector(tower.hidden_size, text_width, scale_factor)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is loaded from a folder; immutable, shared by all sessions."""

    language: nn.Module
    vision: TiledVision
    image_token: int
    scale_factor: int


class Idefics3Model:
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    placeholders: Mapping[str, MediaKind] = {IMAGE: "image"}

    def __init__(self, family: str, parts: Parts, tiling: TilingSettings) -> None:
        self.family = family
        self.language: Any = parts.language
        self.vision = parts.vision
        self.tiling = tiling
        side = tiling.tile // parts.vision.vision_model.config.patch_size // parts.scale_factor
        self.runs = RunLayout(parts.image_token, side * side, self.num_runs)

    def forward(self, ids: mx.array, *, cache: Sequence[Any], start: int, inputs: PreparedInput | None) -> mx.array:
        """One call of the language model; see `ForwardPass`."""
        features = chunk_features(inputs, start, ids.shape[0]) if inputs is not None else []
        if not features:
            logits: mx.array = self.language(ids[None], cache=cache)
            return logits
        hidden = place(self.language.model.embed_tokens(ids[None]), features)
        return self.language(ids[None], cache=cache, input_embeddings=hidden)  # type: ignore[no-any-return]

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: the picture opened, scaled and cut into tiles."""
        if not isinstance(part, ImagePart):
            raise UnsupportedError(f"{self.family} takes pictures only; give frames of the video as pictures")
        options = part.options

        def arrange(rgb: Pixels) -> tuple[Pixels, Geometry]:
            tiles = tile_image(rgb, self.tiling.limited(options, rgb.shape[0], rgb.shape[1]), resize)
            return tiles.pixels, {"rows": tiles.rows, "columns": tiles.columns, "num_tiles": len(tiles.pixels)}

        return (yield from prepare_image(part, arrange, partial=partial, cancel=cancel))

    def expand(self, text: str, media: Sequence[PreparedMedium]) -> str:
        return expand_placeholders(text, media, self.placeholders, self.render)

    def render(self, medium: PreparedMedium) -> str:
        """The text that stands for one medium."""
        return image_text(medium.geometry["rows"], medium.geometry["columns"], self.runs.num_tokens)

    def num_runs(self, medium: PreparedMedium) -> int:
        """How many runs of image tokens a medium takes: one to a tile."""
        return int(medium.geometry["num_tiles"])

    def content_for_template(self, parts: Sequence[Any]) -> Any:
        return template_parts(parts)

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        return self.runs.locate(token_ids, media)

    def positions(
        self, token_ids: Sequence[int], media: Sequence[PreparedMedium], spans: Sequence[MediaSpan]
    ) -> tuple[np.ndarray[Any, Any] | None, int]:
        return None, 0

    def atomic(self, spans: Sequence[MediaSpan]) -> tuple[tuple[int, int], ...]:
        return ()

    def num_parts(self, medium: PreparedMedium) -> int:
        return 1

    def frames_of_part(self, medium: PreparedMedium, part: int) -> int:
        return 1

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One part is one picture with all its tiles, a few of them at a time."""
        return self.encode_tiles(self.tiling.normalisation(medium.frames[part]))

    def encode_tiles(self, tiles: np.ndarray[Any, Any]) -> Iterator[Features | None]:
        """Normalised tiles, float32 (tiles, height, width, 3), through tower and connector."""
        return encode_images(self.vision.vision_model, tiles, Readout(self.vision.connector))


def load_parts(path: Path, config: Mapping[str, Any], cancel: CancelToken) -> Parts:
    """Build text model, tower and connector and give them the folder's weights, whatever its layout."""
    checkpoint.check_quantization(config)
    tower = SiglipConfig.from_dict(config.get("vision_config") or {}, **_TOWER_DEFAULTS)
    weights = checkpoint.read_weights(path, cancel=cancel)
    text = checkpoint.take(weights, _TEXT)
    vision = checkpoint.take(weights, _VISION)
    checkpoint.require_empty(weights)

    arguments = llama_arguments(config.get("text_config") or {})
    arguments["tie_word_embeddings"] = "lm_head.weight" not in text
    language = llama.Model(llama.ModelArgs.from_dict(arguments))
    checkpoint.fill(language, language.sanitize(text), what="the text model", cancel=cancel)

    scale_factor = int(config.get("scale_factor") or 2)
    module = TiledVision(tower, arguments["hidden_size"], scale_factor)
    checkpoint.fill(module, siglip_weights(vision, "vision_model.", tower), what="the vision tower", cancel=cancel)
    return Parts(language, module, int(config.get("image_token_id", 128257)), scale_factor)


def check_tokens_per_tile(path: Path, num_tokens: int) -> None:
    """Raise `UnsupportedError` if the processor's settings promise another number of tokens to a tile."""
    promised = checkpoint.read_json(path / "processor_config.json").get("image_seq_len", num_tokens)
    if promised != num_tokens:
        raise UnsupportedError(
            f"processor_config.json has image_seq_len {promised}, but tile, patch size and scale factor make "
            f"{num_tokens} tokens of a tile; use the processor settings published with the model"
        )


class Idefics3Family:
    """Satisfies `VisionFamily`."""

    name = "idefics3"
    model_types: tuple[str, ...] = ("idefics3",)
    support = FamilySupport(
        models="Idefics3",
        prepares="one picture, cut into tiles",
        encodes="a few blocks of the tower, for a few tiles",
        parity=(Parity("idefics3"),),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> Idefics3Model:
        """See `VisionFamily.load`. Raises `ModelLoadError` or `UnsupportedError`."""
        tiling = TilingSettings.read(path)
        model = Idefics3Model(self.name, load_parts(path, config, cancel), tiling)
        check_tokens_per_tile(path, model.runs.num_tokens)
        return model


FAMILY = Idefics3Family()
