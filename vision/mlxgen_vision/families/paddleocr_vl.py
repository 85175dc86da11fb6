"""PaddleOCR-VL: a SigLIP tower with rotary positions, an ERNIE 4.5 text model, Qwen2-VL's three-axis positions.

ERNIE 4.5's layers are Llama's, and mlx-lm's Llama takes embeddings, so that is the text model; its rotary embedding is
replaced by the three-axis one (halves rotate, as in Qwen2-VL; mlx-lm's own ERNIE rotates neighbours and is for text
checkpoints).

A picture's tokens always stand between a start and an end. Published templates write both around the placeholder,
unless the tokenizer names the bare placeholder `image_token`, which takes the place of all three there; then start and
end are added here.

Pictures only: the checkpoints have a token for videos, but neither their processor nor transformers takes any.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mlx_lm.models import llama

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen.inputs import PreparedMedium
from mlxgen.request import ImagePart, MediaPart
from mlxgen_vision import checkpoint
from mlxgen_vision.families.qwen_language import RopeDefaults, TextConfig, install_rope, tie_embeddings
from mlxgen_vision.families.qwen_model import QwenParts, QwenVisionModel
from mlxgen_vision.processors.paddleocr_vl import read_processor
from mlxgen_vision.processors.settings import special_word
from mlxgen_vision.support import FamilySupport
from mlxgen_vision.towers.paddleocr_vl import PaddleOCRTower, PaddleOCRVisionConfig

ROPE: Final = RopeDefaults(theta=500_000.0, sections=(16, 24, 24), interleaved=False)
START: Final = "<|IMAGE_START|>"
END: Final = "<|IMAGE_END|>"

# As transformers 5 saves them, as published (and read by transformers 4), as mlx-community names them.
_TOWER: Final = {
    "model.visual.vision_model.": "",
    "model.projector.": "projector.",
    "visual.vision_model.": "",
    "mlp_AR.": "projector.",
    "visual.": "",
    "visual.layers.": "encoder.layers.",
}
_TEXT: Final = {
    "model.language_model.": "model.",
    "model.": "model.",
    "language_model.model.": "model.",
    "lm_head.": "lm_head.",
    "language_model.lm_head.": "lm_head.",
}


class PaddleOCRVLModel(QwenVisionModel):
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    def __init__(self, parts: QwenParts, placeholder: str) -> None:
        super().__init__(parts)
        self._placeholder = placeholder
        # The longer form first: what a template wrote around the placeholder is written by `_render`.
        self._placeholders = {f"{START}{placeholder}{END}": "image", placeholder: "image"}

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: a picture, resized to what the tower takes."""
        if not isinstance(part, ImagePart):
            raise UnsupportedError("PaddleOCR-VL takes pictures only; give frames of the video as pictures")
        return (yield from super().prepare(part, partial=partial, cancel=cancel))

    def _render(self, medium: PreparedMedium) -> str:
        _, rows, columns = self._merged(medium)
        return f"{START}{self._placeholder * (rows * columns)}{END}"


@dataclass(frozen=True, slots=True)
class PaddleOCRVLFamily:
    name: str = "paddleocr_vl"
    model_types: tuple[str, ...] = ("paddleocr_vl",)
    support = FamilySupport(
        models="PaddleOCR-VL",
        note="compared with transformers on a seeded checkpoint of its own, in the published layout",
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> PaddleOCRVLModel:
        """Build text model, tower and projector and give them the folder's weights, whatever its layout."""
        text = TextConfig.of(config, ROPE)
        vision = PaddleOCRVisionConfig.from_dict(config.get("vision_config") or {}, text.arguments["hidden_size"])
        processor = read_processor(path, patch=vision.siglip.patch_size, merge=vision.merge_size)
        checkpoint.check_quantization(config)
        weights = checkpoint.read_weights(path, cancel=cancel)
        tower_weights = checkpoint.take(weights, _TOWER)
        text_weights = checkpoint.take(weights, _TEXT)
        checkpoint.require_empty(weights)

        bias = bool(text.arguments.get("use_bias", False))
        own = {"model_type": "llama", "attention_bias": bias, "mlp_bias": bias}
        own["tie_word_embeddings"] = tie_embeddings(config, text_weights)
        language = llama.Model(llama.ModelArgs.from_dict(text.arguments | own))
        rope = text.multi_axis_rope()
        install_rope(language.layers, rope)
        checkpoint.fill(language, text_weights, what="the text model", cancel=cancel)
        tower = PaddleOCRTower(vision)
        checkpoint.fill(tower, tower.adapt(tower_weights), what="the vision tower", cancel=cancel)
        parts = QwenParts(
            family=self.name,
            language=language,
            rope=rope,
            tower=tower,
            processor=processor,
            image_token=int(config.get("image_token_id", 100295)),
            video_token=int(config.get("video_token_id", 100296)),
        )
        return PaddleOCRVLModel(parts, special_word(path, "image_token", "<|IMAGE_PLACEHOLDER|>"))


FAMILY = PaddleOCRVLFamily()
