"""Gemma 3: a SigLIP tower over one square picture, average pooling, a Gemma 3 text model.

A picture's tokens attend to each other in both directions, as the models were trained (Google's gemma_pytorch, and
transformers); mlx-lm's text model is causal throughout, so a chunk with pictures in it runs mlx-lm's layers here, with
masks made for that call. A chunk without one is mlx-lm's own call.

Features are not scaled by the square root of the width, token embeddings are. The factor is rounded to bfloat16 as in
mlx-lm and in training, where transformers takes the precision of the weights (the same for bfloat16 checkpoints).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gemma3_text

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen.inputs import Features, MediaSpan, PreparedInput, PreparedMedium
from mlxgen.request import ImagePart, MediaPart
from mlxgen_vision import checkpoint
from mlxgen_vision.embeddings import chunk_features, place
from mlxgen_vision.image import resize
from mlxgen_vision.masks import BlockMasks
from mlxgen_vision.preparation import Geometry, Pixels, prepare_image
from mlxgen_vision.processors.gemma3 import ImageWords, SquareSettings, square_images
from mlxgen_vision.processors.settings import special_word
from mlxgen_vision.spans import RunLayout, expand_placeholders, template_parts
from mlxgen_vision.support import FamilySupport, Parity
from mlxgen_vision.text_config import gemma3_arguments
from mlxgen_vision.towers.images import Readout, encode_images
from mlxgen_vision.towers.siglip import SiglipConfig, SiglipTower, siglip_weights

_TEXT: Final = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
_VISION: Final = {
    "vision_tower.vision_model.": "vision_tower.",
    "vision_tower.": "vision_tower.",
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "multi_modal_projector.": "multi_modal_projector.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


class PoolingProjector(nn.Module):  # type: ignore[misc]
    """Averages squares of patches, norms, projects: (images, patches, width) -> (images, tokens, text width)."""

    def __init__(self, tower: SiglipConfig, text_width: int, num_tokens: int) -> None:
        super().__init__()
        self.side = int(num_tokens**0.5)
        if self.side**2 != num_tokens or tower.patches_per_side % self.side:
            raise UnsupportedError(
                f"{tower.patches_per_side}x{tower.patches_per_side} patches can't be averaged to mm_tokens_per_image "
                f"{num_tokens}; config.json contradicts itself"
            )
        self.mm_input_projection_weight = mx.zeros((tower.hidden_size, text_width))
        self.mm_soft_emb_norm = gemma3_text.RMSNorm(tower.hidden_size, eps=tower.layer_norm_eps)

    def __call__(self, x: mx.array) -> mx.array:
        count, length, width = x.shape
        across = int(length**0.5) // self.side
        pooled = x.reshape(count, self.side, across, self.side, across, width).mean(axis=(2, 4))
        normed = self.mm_soft_emb_norm(pooled.reshape(count, self.side**2, width))
        return normed @ self.mm_input_projection_weight  # type: ignore[no-any-return]


class Gemma3Vision(nn.Module):  # type: ignore[misc]
    """The tower and its projector, under the names of the published checkpoints."""

    def __init__(self, tower: SiglipConfig, text_width: int, num_tokens: int) -> None:
        super().__init__()
        self.vision_tower = SiglipTower(tower)
        self.multi_modal_projector = PoolingProjector(tower, text_width, num_tokens)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is loaded from a folder; immutable, shared by all sessions."""

    language: nn.Module
    vision: Gemma3Vision
    settings: SquareSettings
    words: ImageWords
    image_token: int
    num_tokens: int


class Gemma3Model:
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    family = "gemma3"

    def __init__(self, parts: Parts) -> None:
        self.language: Any = parts.language
        self.vision = parts.vision
        self.settings = parts.settings
        self.words = parts.words
        self.runs = RunLayout(parts.image_token, parts.num_tokens, lambda medium: 1 + int(medium.geometry["num_crops"]))

    def forward(self, ids: mx.array, *, cache: Sequence[Any], start: int, inputs: PreparedInput | None) -> mx.array:
        """One call of the language model; see `ForwardPass`. Raises `InvalidValueError` if the chunk cuts a picture."""
        features = chunk_features(inputs, start, ids.shape[0]) if inputs is not None else []
        if inputs is None or not features:
            logits: mx.array = self.language(ids[None], cache=cache)
            return logits
        masks = BlockMasks(start, ids.shape[0], self.atomic(inputs.spans))
        text = self.language.model
        embeddings = text.embed_tokens(ids[None])
        scale = mx.array(text.args.hidden_size**0.5, mx.bfloat16).astype(embeddings.dtype)
        hidden = place(embeddings * scale, features)
        for layer, layer_cache in zip(text.layers, cache, strict=True):
            window = text.window_size if layer.self_attn.is_sliding else None
            hidden = layer(hidden, masks.mask(layer_cache, window), layer_cache)
        hidden = text.norm(hidden)
        if self.language.tie_word_embeddings:
            return text.embed_tokens.as_linear(hidden)  # type: ignore[no-any-return]
        return self.language.lm_head(hidden)  # type: ignore[no-any-return]

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: the picture opened and scaled, with its crops where the settings ask for them."""
        if not isinstance(part, ImagePart):
            raise UnsupportedError("Gemma 3 takes pictures only; give frames of the video as pictures")

        def arrange(rgb: Pixels) -> tuple[Pixels, Geometry]:
            images = square_images(rgb, self.settings, resize)
            return images, {"num_crops": len(images) - 1}

        return (yield from prepare_image(part, arrange, partial=partial, cancel=cancel))

    def expand(self, text: str, media: Sequence[PreparedMedium]) -> str:
        return expand_placeholders(text, media, {self.words.begin: "image"}, self.render)

    def render(self, medium: PreparedMedium) -> str:
        """The text that stands for one picture."""
        return self.words.text(medium.geometry["num_crops"], self.runs.num_tokens)

    def content_for_template(self, parts: Sequence[Any]) -> Any:
        return template_parts(parts)

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        return self.runs.locate(token_ids, media)

    def positions(
        self, token_ids: Sequence[int], media: Sequence[PreparedMedium], spans: Sequence[MediaSpan]
    ) -> tuple[np.ndarray[Any, Any] | None, int]:
        return None, 0

    def atomic(self, spans: Sequence[MediaSpan]) -> tuple[tuple[int, int], ...]:
        """Every picture's block (and every crop's): its tokens see each other, so they go through together."""
        return tuple((span.start, span.end) for span in spans)

    def num_parts(self, medium: PreparedMedium) -> int:
        return 1

    def frames_of_part(self, medium: PreparedMedium, part: int) -> int:
        return 1

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One part is one picture, with its crops."""
        return self.encode_pixels(self.settings.normalisation(medium.frames[part]))

    def encode_pixels(self, pixels: np.ndarray[Any, Any]) -> Iterator[Features | None]:
        """Normalised images, float32 (images, height, width, 3), through tower and projector."""
        return encode_images(self.vision.vision_tower, pixels, Readout(self.vision.multi_modal_projector))


class Gemma3Family:
    """Satisfies `VisionFamily`."""

    name = "gemma3"
    model_types: tuple[str, ...] = ("gemma3",)
    support = FamilySupport(
        models="Gemma 3 (4B and larger)",
        parity=(Parity("gemma3", quantized=("mlx-8bit",)),),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> Gemma3Model:
        """Build text model, tower and projector and give them the folder's weights, whatever its layout."""
        checkpoint.check_quantization(config)
        tower = SiglipConfig.from_dict(config.get("vision_config") or {})
        num_tokens = int(config.get("mm_tokens_per_image") or 256)
        settings = SquareSettings.read(path)
        if (settings.height, settings.width) != (tower.image_size, tower.image_size):
            raise UnsupportedError(
                f"the image processor makes {settings.height}x{settings.width} pixels, the tower takes "
                f"{tower.image_size}x{tower.image_size}; use the processor settings published with the model"
            )
        promised = checkpoint.read_json(path / "processor_config.json").get("image_seq_length", num_tokens)
        if promised != num_tokens:
            raise UnsupportedError(
                f"processor_config.json has image_seq_length {promised}, config.json mm_tokens_per_image {num_tokens}; "
                "use the processor settings published with the model"
            )
        weights = checkpoint.read_weights(path, cancel=cancel)
        text = checkpoint.take(weights, _TEXT)
        vision = checkpoint.take(weights, _VISION)
        checkpoint.require_empty(weights)

        arguments = gemma3_arguments(config.get("text_config") or {})
        language = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(arguments))
        checkpoint.fill(language, language.sanitize(text), what="the text model", cancel=cancel)

        module = Gemma3Vision(tower, arguments["hidden_size"], num_tokens)
        checkpoint.fill(module, siglip_weights(vision, "vision_tower.", tower), what="the vision tower", cancel=cancel)
        image_token = config.get("image_token_index", config.get("image_token_id", 262144))
        return Gemma3Model(Parts(language, module, settings, _words(path), int(image_token), num_tokens))


def _words(path: Path) -> ImageWords:
    """The token strings, as the tokenizer's settings name them."""
    usual = ImageWords()
    return ImageWords(
        begin=special_word(path, "boi_token", usual.begin),
        soft=special_word(path, "image_token", usual.soft),
        end=special_word(path, "eoi_token", usual.end),
    )


FAMILY = Gemma3Family()
