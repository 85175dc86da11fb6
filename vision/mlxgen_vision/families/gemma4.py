"""Gemma 4, large and small: a tower for pictures of any shape, average pooling, a Gemma 4 text model; also video.

The large ones (`use_bidirectional_attention` "vision") let the tokens of a picture, or of one frame, attend to each
other in both directions, but only in layers with a sliding window, and within it; full layers stay causal. That is what
the models were made for: huggingface/transformers issue 46711 and pull request 46850 ("to match the intended model
behavior for local layers"), vllm-project/vllm pull requests 40534 and 47217. The small ones (E2B, E4B) are causal
throughout; a picture's tokens get the per-layer input of the padding token.

The text model is mlx-lm's. It scales embeddings inside; pictures' features aren't scaled, so a chunk with media goes
through a second view of the same module whose factor is 1. Its masks come in with the caches of the call.

Video: `num_frames` evenly spread frames of a file (32 as published), each of at most 70 tokens with its minute and
second before it; all frames of a folder or list. A frame's time is its number over the rate, as in the published
processor. Files with fewer frames are taken whole, where transformers raises.

Audio isn't taken: the audio tower of a checkpoint is left out.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import MediaError, UnsupportedError
from mlxgen.inputs import Features, MediaKind, MediaSpan, PreparedInput, PreparedMedium
from mlxgen.request import ImagePart, MediaOptions, MediaPart, VideoPart
from mlxgen_vision import checkpoint
from mlxgen_vision.embeddings import chunk_features, place
from mlxgen_vision.families.causal_model import CausalModel
from mlxgen_vision.frames import ArrayReader, SequenceReader
from mlxgen_vision.image import check_options, resize
from mlxgen_vision.layouts import read_split
from mlxgen_vision.masks import BlockMasks, MaskedCache
from mlxgen_vision.preparation import Geometry, Pixels, prepare_image, prepare_video
from mlxgen_vision.processors.gemma4 import FrameSettings, MediaWords, TokenBudget, evenly, read_settings
from mlxgen_vision.spans import locate_runs
from mlxgen_vision.support import VIDEO_CASES, FamilySupport, Parity
from mlxgen_vision.text_config import gemma4_arguments
from mlxgen_vision.towers.gemma4 import Gemma4Vision, Gemma4VisionConfig, gemma4_weights
from mlxgen_vision.video import VideoReader

_log = logging.getLogger(__name__)

# transformers' assumption for frames of which nobody says how many a second they stand for.
ASSUMED_FPS: Final = 24.0

_EMBEDDER: Final = {"embed_vision.": "embed_vision.", "model.embed_vision.": "embed_vision."}
_AUDIO: Final = ("audio_tower.", "embed_audio.")


@dataclass(frozen=True, slots=True)
class Parts:
    """What is loaded from a folder; immutable, shared by all sessions. `both_ways` says that pictures attend so."""

    language: nn.Module
    vision: Gemma4Vision
    tokens: Mapping[MediaKind, int]
    pad_token: int
    both_ways: bool
    image: TokenBudget
    video: FrameSettings
    words: MediaWords


class Gemma4Model(CausalModel):
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    def __init__(self, parts: Parts) -> None:
        super().__init__("gemma4", parts.language, {parts.words.image: "image", parts.words.video: "video"})
        self.parts = parts
        # The same layers and weights, for embeddings that are scaled already.
        self._scaled: Any = copy.copy(parts.language)
        self._scaled.model = copy.copy(self.language.model)
        self._scaled.model.embed_scale = 1.0

    def forward(self, ids: mx.array, *, cache: Sequence[Any], start: int, inputs: PreparedInput | None) -> mx.array:
        """One call of the language model; see `ForwardPass`. Raises `InvalidValueError` if the chunk cuts a picture."""
        num_tokens = int(ids.shape[0])
        features = chunk_features(inputs, start, num_tokens) if inputs is not None else []
        if inputs is None or not features:
            logits: mx.array = self.language(ids[None], cache=list(cache))
            return logits
        text = self.language.model
        # Media have no entry in the tables of per-layer inputs; the models were trained with the padding token's.
        pads = [(first, last, mx.full((last - first, 1), self.parts.pad_token)) for first, last, _ in features]
        text_ids = place(ids[None, :, None], pads)[..., 0]
        hidden = place(text.embed_tokens(text_ids) * text.embed_scale, features)
        caches = list(cache)
        if self.parts.both_ways:
            masks = BlockMasks(start, num_tokens, self.atomic(inputs.spans))
            caches = [
                MaskedCache(own, masks) if layer.layer_type == "sliding_attention" else own
                for layer, own in zip(text.layers, cache, strict=False)  # layers that share keys have no cache
            ]
        return self._scaled(text_ids, cache=caches, input_embeddings=hidden)  # type: ignore[no-any-return]

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: a picture, or one frame of a video, scaled to the budget."""
        check_options(part.options)
        options = part.options
        # The bounds on pixels are the budget's own: applied before it as well, they would cost a second resampling.
        opened = MediaOptions(fps=options.fps, allow_urls=options.allow_urls)
        if isinstance(part, ImagePart):
            budget = self.parts.image

            def arrange(rgb: Pixels) -> tuple[Pixels, Geometry]:
                size = self._size(budget, (rgb.shape[0], rgb.shape[1]), options)
                return resize(rgb, size, budget.resample), {"tokens": list(budget.tokens(*size))}

            source = ImagePart(part.source, opened)
            return (yield from prepare_image(source, arrange, partial=partial, cancel=cancel))

        def plan(reader: VideoReader) -> Geometry:
            return self._plan(reader, options)

        def scale(rgb: Pixels, geometry: Geometry) -> Pixels:
            frame = self.parts.video.budget
            rows, columns = geometry["tokens"]
            return resize(rgb, (rows * frame.side, columns * frame.side), frame.resample)

        clip = VideoPart(part.source, opened)
        return (yield from prepare_video(clip, plan, scale, partial=partial, cancel=cancel))

    def _plan(self, reader: VideoReader, options: MediaOptions) -> Geometry:
        if reader.fps is None:
            _log.warning("%s: no frame rate known, %g a second assumed; set fps", reader.name, ASSUMED_FPS)
        fps = reader.fps or ASSUMED_FPS
        settings = self.parts.video
        if isinstance(reader, SequenceReader | ArrayReader):
            indices = evenly(reader.num_frames, options.max_frames or reader.num_frames)
        else:
            indices = settings.sample(reader.num_frames, fps, options)
        size = self._size(settings.budget, reader.original_size, options)
        return {"indices": indices, "fps": fps, "tokens": list(settings.budget.tokens(*size))}

    def _size(self, budget: TokenBudget, original: tuple[int, int], options: MediaOptions) -> tuple[int, int]:
        size = budget.size(*original, options)
        longest = max(size) // budget.patch
        known = self.parts.vision.vision_tower.config.position_embedding_size
        if longest > known:
            raise MediaError(
                f"a picture of {original[1]}x{original[0]} would be {longest} patches long, the tower knows {known}; "
                "crop it, or give a smaller max_image_size"
            )
        return size

    def render(self, medium: PreparedMedium) -> str:
        """The text that stands for one medium."""
        geometry = medium.geometry
        rows, columns = geometry["tokens"]
        if medium.kind == "image":
            return self.parts.words.picture(rows * columns)
        times_s = [index / geometry["fps"] for index in geometry["indices"]]
        return self.parts.words.frames(times_s, rows * columns)

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        """One span per picture, and per frame."""

        def lengths(medium: PreparedMedium) -> list[int]:
            rows, columns = medium.geometry["tokens"]
            return [rows * columns] * len(medium.frames)

        return locate_runs(token_ids, media, self.parts.tokens, lengths)

    def atomic(self, spans: Sequence[MediaSpan]) -> tuple[tuple[int, int], ...]:
        """Where media attend in both directions: every picture and frame, whose tokens go through together."""
        return tuple((span.start, span.end) for span in spans) if self.parts.both_ways else ()

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One part is one picture, or one frame."""
        budget = self.parts.image if medium.kind == "image" else self.parts.video.budget
        return self.parts.vision.encode(budget.normalisation(medium.frames[part]))


class Gemma4Family:
    """Satisfies `VisionFamily`."""

    name = "gemma4"
    model_types: tuple[str, ...] = ("gemma4",)
    support = FamilySupport(
        models="Gemma 4, large and small (E2B, E4B)",
        prepares="one picture or one frame",
        encodes="a few blocks of the tower, for one picture or one frame",
        video=True,
        parity=(Parity("gemma4", VIDEO_CASES), Parity("gemma4_e", VIDEO_CASES)),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> Gemma4Model:
        """Build text model, tower and projection and give them the folder's weights, whatever its layout."""
        tower = Gemma4VisionConfig.from_dict(config.get("vision_config") or {})
        image, video = read_settings(path)
        for what, budget in (("image", image), ("video", video.budget)):
            if (budget.patch, budget.pool) != (tower.patch_size, tower.pooling_kernel_size):
                raise UnsupportedError(
                    f"the {what} processor makes tokens of {budget.pool}x{budget.pool} patches of {budget.patch} "
                    f"pixels, the tower takes {tower.pooling_kernel_size}x{tower.pooling_kernel_size} of "
                    f"{tower.patch_size}; use the processor settings published with the model"
                )
        split = read_split(path, config, extra=_EMBEDDER, ignore=_AUDIO, cancel=cancel)
        arguments = gemma4_arguments(config.get("text_config") or {})
        arguments["tie_word_embeddings"] = "lm_head.weight" not in split.text
        language = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(arguments))
        checkpoint.fill(language, language.sanitize(split.text), what="the text model", cancel=cancel)
        vision = Gemma4Vision(tower, arguments["hidden_size"])
        checkpoint.fill(vision, gemma4_weights(split.vision, tower), what="the vision tower", cancel=cancel)
        tokens: dict[MediaKind, int] = {
            "image": int(config.get("image_token_id", 258880)),
            "video": int(config.get("video_token_id", 258884)),
        }
        return Gemma4Model(
            Parts(
                language=language,
                vision=vision,
                tokens=tokens,
                pad_token=int(arguments["pad_token_id"]),
                both_ways=arguments.get("use_bidirectional_attention") == "vision",
                image=image,
                video=video,
                words=MediaWords.read(path),
            )
        )


FAMILY = Gemma4Family()
