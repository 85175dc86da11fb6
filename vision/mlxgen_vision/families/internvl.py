"""InternVL 3 and 3.5, as published for transformers: InternViT over square tiles, pixel shuffle, a Qwen text model.

The text model is Qwen2 (InternVL 3) or Qwen3, dense or mixture of experts (InternVL 3.5), mlx-lm's in each case; with
pictures it attends causally. For tiles, frames and words, and where they come from, see `processors/internvl.py`.

OpenGVLab's own checkpoints (`internvl_chat`) have other names and settings and aren't read here; those called "-HF" are
the same models. Videos of different lengths may stand in one prompt; transformers 5.24 can't do that.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen.inputs import Features, MediaSpan, PreparedMedium
from mlxgen.request import ImagePart, MediaOptions, MediaPart, VideoPart
from mlxgen_vision import checkpoint, layouts
from mlxgen_vision.families.causal_model import CausalModel
from mlxgen_vision.frames import ArrayReader, SequenceReader
from mlxgen_vision.image import check_options, resize
from mlxgen_vision.preparation import Geometry, Pixels, prepare_image, prepare_video
from mlxgen_vision.processors.internvl import FrameSettings, TileSettings, TileWords, middle_frames, tile_image
from mlxgen_vision.spans import locate_runs
from mlxgen_vision.support import VIDEO_CASES, FamilySupport, Parity
from mlxgen_vision.text_models import load_text_model
from mlxgen_vision.towers.images import Readout, encode_images
from mlxgen_vision.towers.internvl import InternVLConfig, InternVLTower, ShuffleProjector, internvl_weights
from mlxgen_vision.towers.projectors import ProjectorShape
from mlxgen_vision.video import VideoReader

_log = logging.getLogger(__name__)

# For frames of which nobody says how many a second they stand for.
ASSUMED_FPS: Final = 24.0


class InternVLVision(nn.Module):  # type: ignore[misc]
    """The tower and its projector, under the names of the published checkpoints."""

    def __init__(self, tower: InternVLConfig, projector: ShuffleProjector) -> None:
        super().__init__()
        self.vision_tower = InternVLTower(tower)
        self.multi_modal_projector = projector

    def project(self, hidden: mx.array) -> mx.array:
        """All but the class token, which comes first."""
        return self.multi_modal_projector(hidden[:, 1:])


@dataclass(frozen=True, slots=True)
class Parts:
    """What is loaded from a folder; immutable, shared by all sessions."""

    language: nn.Module
    vision: InternVLVision
    image_token: int


@dataclass(frozen=True, slots=True)
class Rules:
    """How media become pixels and text."""

    tiles: TileSettings
    frames: FrameSettings
    words: TileWords


class InternVLModel(CausalModel):
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    def __init__(self, parts: Parts, rules: Rules) -> None:
        super().__init__("internvl", parts.language, {rules.words.image: "image", rules.words.video: "video"})
        self.vision = parts.vision
        self.image_token = parts.image_token
        self.rules = rules

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: a picture cut into tiles, or one frame of a video scaled to a square."""
        options = part.options
        check_options(options)
        # The caller's bounds on size act on the number of tiles; on the picture, they would cost a second resampling.
        opened = MediaOptions(fps=options.fps, allow_urls=options.allow_urls)
        if isinstance(part, ImagePart):
            tiles = self.rules.tiles.limited(options)

            def arrange(rgb: Pixels) -> tuple[Pixels, Geometry]:
                pixels, rows, columns = tile_image(rgb, tiles, resize)
                return pixels, {"rows": rows, "columns": columns, "num_tiles": len(pixels)}

            picture = ImagePart(part.source, opened)
            return (yield from prepare_image(picture, arrange, partial=partial, cancel=cancel))
        frames = self.rules.frames

        def plan(reader: VideoReader) -> Geometry:
            if isinstance(reader, SequenceReader | ArrayReader):
                return {"indices": middle_frames(reader.num_frames, options.max_frames or reader.num_frames)}
            if reader.fps is None:
                _log.warning("%s: no frame rate known, %g a second assumed; set fps", reader.name, ASSUMED_FPS)
            return {"indices": frames.sampled(reader.num_frames, reader.fps or ASSUMED_FPS, options)}

        def square(rgb: Pixels, geometry: Geometry) -> Pixels:
            return resize(rgb, (frames.square.side, frames.square.side), frames.square.resample)

        video = VideoPart(part.source, opened)
        return (yield from prepare_video(video, plan, square, partial=partial, cancel=cancel))

    def render(self, medium: PreparedMedium) -> str:
        words = self.rules.words
        if medium.kind == "image":
            return words.run(medium.geometry["num_tiles"])
        return words.series(len(medium.geometry["indices"]))

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        """One span to a picture with all its tiles, or to a frame."""
        num_tokens = self.rules.words.num_tokens

        def lengths(medium: PreparedMedium) -> list[int]:
            if medium.kind == "image":
                return [medium.geometry["num_tiles"] * num_tokens]
            return [num_tokens] * len(medium.geometry["indices"])

        return locate_runs(token_ids, media, {"image": self.image_token, "video": self.image_token}, lengths)

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One part is one picture with all its tiles, or one frame."""
        if medium.kind == "image":
            return self.encode_tiles(self.rules.tiles.square.normalisation(medium.frames[part]))
        return self.encode_tiles(self.rules.frames.square.normalisation(medium.frames[part][None]))

    def encode_tiles(self, tiles: np.ndarray[Any, Any]) -> Iterator[Features | None]:
        """Normalised tiles, float32 (tiles, side, side, 3), through tower and projector."""
        return encode_images(self.vision.vision_tower, tiles, Readout(self.vision.project))


def build_vision(config: Mapping[str, Any], text_width: int) -> tuple[InternVLVision, int]:
    """The empty module for a `config.json`, and how many tokens a tile becomes.

    Raises `UnsupportedError` for a tower, a layer or a ratio that doesn't fit.
    """
    tower = InternVLConfig.from_dict(config.get("vision_config") or {})
    if config.get("vision_feature_layer", -1) not in (-1, [-1]):
        raise UnsupportedError(
            f"config.json has vision_feature_layer {config['vision_feature_layer']!r}; InternVL's is -1, the last"
        )
    strategy = config.get("vision_feature_select_strategy") or "default"
    ratio = float(config.get("downsample_ratio") or 0.5)
    factor = int(1 / ratio)
    side = tower.patches_per_side
    if strategy != "default" or side % factor:
        raise UnsupportedError(
            f"config.json has {side}x{side} patches, downsample_ratio {ratio:g} and vision_feature_select_strategy "
            f"{strategy!r}; patches without the class token ('default') must make whole squares of {factor}x{factor}"
        )
    shape = ProjectorShape(
        tower.hidden_size * factor**2, text_width, hidden_act=str(config.get("projector_hidden_act") or "gelu")
    )
    return InternVLVision(tower, ShuffleProjector(shape, factor)), (side // factor) ** 2


class InternVLFamily:
    """Satisfies `VisionFamily`."""

    name = "internvl"
    model_types: tuple[str, ...] = ("internvl",)
    support = FamilySupport(
        models='InternVL 3 and 3.5 (those called "-hf")',
        prepares="one picture, cut into tiles, or one frame",
        encodes="a few blocks of the tower, for a few tiles or one frame",
        video=True,
        parity=(Parity("internvl", VIDEO_CASES), Parity("internvl_q2", VIDEO_CASES, ("hf", "hub"))),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> InternVLModel:
        """See `VisionFamily.load`. Raises `ModelLoadError` or `UnsupportedError`."""
        weights = layouts.read_split(path, config, cancel=cancel)
        language = load_text_model(config.get("text_config") or {}, weights.text, default_kind="qwen2", cancel=cancel)
        vision, num_tokens = build_vision(config, language.args.hidden_size)
        promised = checkpoint.read_json(path / "processor_config.json").get("image_seq_length", num_tokens)
        if promised != num_tokens:
            raise UnsupportedError(
                f"processor_config.json has image_seq_length {promised}, but the model makes {num_tokens} tokens of a "
                "tile; use the processor settings published with the model"
            )
        tower = vision.vision_tower.config
        rules = Rules(
            TileSettings.read(path, tower.image_size),
            FrameSettings.read(path, tower.image_size),
            TileWords.read(path, num_tokens),
        )
        ready = internvl_weights(weights.vision, "vision_tower.", tower)
        checkpoint.fill(vision, ready, what="the vision tower", cancel=cancel)
        return InternVLModel(Parts(language, vision, int(config.get("image_token_id", 151667))), rules)


FAMILY = InternVLFamily()
