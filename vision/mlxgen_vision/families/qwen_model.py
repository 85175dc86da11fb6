"""`VisionModel` for the Qwen families: what they share. Each family's file says in what it differs."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import InvalidValueError
from mlxgen.inputs import Features, MediaKind, MediaSpan, PreparedInput, PreparedMedium
from mlxgen.request import ImagePart, MediaPart
from mlxgen_vision.embeddings import chunk_features, place
from mlxgen_vision.mrope import MultiAxisRope, chunk_positions, positioned
from mlxgen_vision.positions import GridBlock, mrope_positions
from mlxgen_vision.processors.qwen import QwenProcessor
from mlxgen_vision.processors.qwen_media import prepare_image, prepare_video
from mlxgen_vision.spans import expand_placeholders, locate_runs, template_parts
from mlxgen_vision.towers.qwen_vit import Tower

IMAGE_PAD: Final = "<|image_pad|>"
VIDEO_PAD: Final = "<|video_pad|>"
VISION_START: Final = "<|vision_start|>"
VISION_END: Final = "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class QwenParts:
    """What a family's `load` puts together. Immutable, shared by all sessions.

    `num_deepstack` is how many layers of the language model take features of their own. `frames_apart` says that a
    video's temporal patches are separate runs of tokens with time stamps before them (Qwen3-VL, Qwen3.5);
    `tokens_per_second` scales the time axis of videos that are one run (None: one position per temporal patch).
    """

    family: str
    language: nn.Module
    rope: MultiAxisRope
    tower: Tower
    processor: QwenProcessor
    image_token: int
    video_token: int
    num_deepstack: int = 0
    frames_apart: bool = False
    tokens_per_second: float | None = None


class QwenVisionModel:
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    def __init__(self, parts: QwenParts) -> None:
        self.family = parts.family
        self.language: Any = parts.language
        self.tower = parts.tower
        self.parts = parts
        self._placeholders: Mapping[str, MediaKind] = {IMAGE_PAD: "image", VIDEO_PAD: "video"}
        if parts.frames_apart:
            # The longer form first: a template's start and end belong to the frames, not around all of them.
            around = f"{VISION_START}{VIDEO_PAD}{VISION_END}"
            self._placeholders = {around: "video", **self._placeholders}

    def forward(self, ids: mx.array, *, cache: Sequence[Any], start: int, inputs: PreparedInput | None) -> mx.array:
        """One call of the language model; see `ForwardPass`."""
        num_tokens = int(ids.shape[0])
        features = [] if inputs is None else chunk_features(inputs, start, num_tokens)
        embeddings: mx.array | None = None
        rows: list[mx.array | None] = []
        if inputs is not None and features:
            embeddings = place(self.language.model.embed_tokens(ids[None]), features)
            for level in range(self.parts.num_deepstack):
                found = chunk_features(inputs, start, num_tokens, key=f"deepstack_{level}")
                rows.append(place(mx.zeros_like(embeddings), found) if found else None)
        positions = chunk_positions(inputs, start, num_tokens)
        caches = positioned(cache, self.parts.rope, positions, range(start, start + num_tokens), rows)
        logits: mx.array = self.language(ids[None], cache=caches, input_embeddings=embeddings)
        return logits

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: a picture, or one frame of a video, resized to what the tower takes."""
        processor = self.parts.processor
        if isinstance(part, ImagePart):
            return (yield from prepare_image(part, processor.image, partial=partial, cancel=cancel))
        return (yield from prepare_video(part, processor.video, partial=partial, cancel=cancel))

    def expand(self, text: str, media: Sequence[PreparedMedium]) -> str:
        return expand_placeholders(text, media, self._placeholders, self._render)

    def content_for_template(self, parts: Sequence[Any]) -> Any:
        return template_parts(parts)

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        """One span per picture and video; per temporal patch where frames stand apart."""
        tokens: dict[MediaKind, int] = {"image": self.parts.image_token, "video": self.parts.video_token}
        return locate_runs(token_ids, media, tokens, lambda medium: [end - start for start, end in self._runs(medium)])

    def positions(
        self, token_ids: Sequence[int], media: Sequence[PreparedMedium], spans: Sequence[MediaSpan]
    ) -> tuple[np.ndarray[Any, Any] | None, int]:
        """Three-axis positions; None without media, because text has its place in the sequence on every axis."""
        if not spans:
            return None, 0
        blocks = [self._block(media[span.medium], span) for span in sorted(spans, key=lambda span: span.start)]
        return mrope_positions(len(token_ids), blocks)

    def atomic(self, spans: Sequence[MediaSpan]) -> tuple[tuple[int, int], ...]:
        return ()

    def num_parts(self, medium: PreparedMedium) -> int:
        return int(medium.geometry["grid"][0])

    def frames_of_part(self, medium: PreparedMedium, part: int) -> int:
        temporal = self._temporal(medium)
        return min(temporal, len(medium.frames) - part * temporal)

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One picture, or one temporal patch of a video, a few tower blocks at a time."""
        if not medium.prepared or not 0 <= part < self.num_parts(medium):
            raise InvalidValueError(
                f"part {part} of {medium.source_name or medium.kind} can't be encoded; prepare it first"
            )
        temporal = self._temporal(medium)
        frames = medium.frames[part * temporal : (part + 1) * temporal]
        settings = self.parts.processor.image if medium.kind == "image" else self.parts.processor.video
        _, rows, columns = medium.geometry["grid"]
        return self.tower.encode(settings.patches.patches(frames), rows, columns)

    def _temporal(self, medium: PreparedMedium) -> int:
        return self.parts.processor.video.patches.temporal if medium.kind == "video" else 1

    def _merged(self, medium: PreparedMedium) -> tuple[int, int, int]:
        """Temporal patches, rows and columns of a medium's tokens."""
        steps, rows, columns = medium.geometry["grid"]
        merge = self.parts.processor.image.patches.merge
        return steps, rows // merge, columns // merge

    def _runs(self, medium: PreparedMedium) -> list[tuple[int, int]]:
        """The feature rows each run of a medium's tokens stands for."""
        steps, rows, columns = self._merged(medium)
        size = rows * columns
        if self.parts.frames_apart:
            return [(step * size, (step + 1) * size) for step in range(steps)]
        return [(0, steps * size)]

    def _render(self, medium: PreparedMedium) -> str:
        runs = [end - start for start, end in self._runs(medium)]
        if medium.kind == "image":
            return IMAGE_PAD * runs[0]
        if not self.parts.frames_apart:
            return VIDEO_PAD * runs[0]
        times: Sequence[float] = medium.geometry["timestamps"]
        return "".join(
            f"<{time:.1f} seconds>{VISION_START}{VIDEO_PAD * run}{VISION_END}"
            for time, run in zip(times, runs, strict=True)
        )

    def _block(self, medium: PreparedMedium, span: MediaSpan) -> GridBlock:
        steps, rows, columns = self._merged(medium)
        if medium.kind == "image" or self.parts.frames_apart:
            return GridBlock(span.start, span.end, 1, rows, columns)
        scale = 1.0
        if self.parts.tokens_per_second is not None:
            scale = self.parts.tokens_per_second * float(medium.geometry["second_per_grid"])
        return GridBlock(span.start, span.end, steps, rows, columns, scale)
