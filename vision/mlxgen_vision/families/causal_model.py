"""`VisionModel` as far as it is the same for every family with a plain causal text model.

A family's model inherits it and adds `prepare`, `encode`, `locate` and `render`. Its own text model takes embeddings
(`input_embeddings`), has one-axis positions, and pictures attend causally.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxgen.inputs import MediaKind, MediaSpan, PreparedInput, PreparedMedium
from mlxgen_vision.embeddings import chunk_features, place
from mlxgen_vision.spans import expand_placeholders, template_parts


class CausalModel(ABC):
    """Immutable after load; nothing of a request is kept here.

    `placeholders` are the strings of the chat template that stand for media. A part is a picture, or one frame.
    """

    def __init__(self, family: str, language: Any, placeholders: Mapping[str, MediaKind]) -> None:
        self.family = family
        self.language = language
        self.placeholders = placeholders

    def forward(self, ids: mx.array, *, cache: Sequence[Any], start: int, inputs: PreparedInput | None) -> mx.array:
        """One call of the language model; see `ForwardPass`."""
        features = chunk_features(inputs, start, ids.shape[0]) if inputs is not None else []
        if not features:
            logits: mx.array = self.language(ids[None], cache=cache)
            return logits
        hidden = place(self.language.model.embed_tokens(ids[None]), features)
        return self.language(ids[None], cache=cache, input_embeddings=hidden)  # type: ignore[no-any-return]

    def expand(self, text: str, media: Sequence[PreparedMedium]) -> str:
        return expand_placeholders(text, media, self.placeholders, self.render)

    @abstractmethod
    def render(self, medium: PreparedMedium) -> str:
        """The text that stands for one medium."""

    def content_for_template(self, parts: Sequence[Any]) -> Any:
        return template_parts(parts)

    def positions(
        self, token_ids: Sequence[int], media: Sequence[PreparedMedium], spans: Sequence[MediaSpan]
    ) -> tuple[np.ndarray[Any, Any] | None, int]:
        return None, 0

    def atomic(self, spans: Sequence[MediaSpan]) -> tuple[tuple[int, int], ...]:
        return ()

    def num_parts(self, medium: PreparedMedium) -> int:
        return len(medium.frames)

    def frames_of_part(self, medium: PreparedMedium, part: int) -> int:
        return 1
