"""SmolVLM and SmolVLM2: Idefics3 with a small Llama, and video as a series of frames with their times in words.

What Idefics3's file says about patch positions holds here too. Video frames are scaled with Lanczos as published, see
`processors/smolvlm.py`. A frame's time is its number over the average rate, as in the published processor. Pictures and
videos may stand in one prompt; transformers 5.24 can't do that (both write `pixel_values`).
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.inputs import Features, MediaKind, PreparedMedium, TemplateText
from mlxgen.request import MediaPart, VideoPart
from mlxgen_vision.families.idefics3 import Idefics3Model, Parts, check_tokens_per_tile, load_parts
from mlxgen_vision.frames import ArrayReader, SequenceReader
from mlxgen_vision.image import resize
from mlxgen_vision.preparation import Geometry, Pixels, prepare_video
from mlxgen_vision.processors.idefics3 import IMAGE, TilingSettings
from mlxgen_vision.processors.smolvlm import (
    VIDEO,
    FrameSettings,
    given_frames,
    sampled_frames,
    square_frame,
    video_text,
)
from mlxgen_vision.spans import template_parts
from mlxgen_vision.support import PICTURE_CASES, FamilySupport, Parity
from mlxgen_vision.video import VideoReader

_log = logging.getLogger(__name__)

# transformers' assumption for frames of which nobody says how many a second they stand for.
ASSUMED_FPS: Final = 24.0


class SmolVLMModel(Idefics3Model):
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    placeholders: Mapping[str, MediaKind] = {IMAGE: "image", VIDEO: "video"}

    def __init__(
        self, parts: Parts, tiling: TilingSettings, frames: FrameSettings, *, template_has_video: bool
    ) -> None:
        super().__init__("smolvlm", parts, tiling)
        self.frames = frames
        self._template_has_video = template_has_video

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: a picture cut into tiles, or one frame of a video scaled to a square."""
        if not isinstance(part, VideoPart):
            return (yield from super().prepare(part, partial=partial, cancel=cancel))
        settings = self.frames.limited(part.options)

        def plan(reader: VideoReader) -> Geometry:
            if reader.fps is None:
                _log.warning("%s: no frame rate known, %g a second assumed; set fps", reader.name, ASSUMED_FPS)
            fps = reader.fps or ASSUMED_FPS
            if isinstance(reader, SequenceReader | ArrayReader):
                indices = given_frames(reader.num_frames, part.options.max_frames)
            else:
                indices = sampled_frames(reader.num_frames, fps, settings)
            return {"indices": indices, "fps": fps, "duration_s": reader.num_frames / fps}

        def arrange(rgb: Pixels, geometry: Geometry) -> Pixels:
            return square_frame(rgb, settings, resize)

        return (yield from prepare_video(part, plan, arrange, partial=partial, cancel=cancel))

    def render(self, medium: PreparedMedium) -> str:
        if medium.kind == "image":
            return super().render(medium)
        geometry = medium.geometry
        times_s = [index / geometry["fps"] for index in geometry["indices"]]
        return video_text(times_s, geometry["duration_s"], self.runs.num_tokens)

    def num_runs(self, medium: PreparedMedium) -> int:
        return super().num_runs(medium) if medium.kind == "image" else len(medium.geometry["indices"])

    def content_for_template(self, parts: Sequence[Any]) -> Any:
        """As in Idefics3; a template from before it knew videos gets the placeholder as text, which reads the same."""
        content = template_parts(parts)
        if self._template_has_video:
            return content
        return [{"type": "text", "text": TemplateText(VIDEO)} if item["type"] == "video" else item for item in content]

    def num_parts(self, medium: PreparedMedium) -> int:
        return len(medium.frames)

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One part is one picture with all its tiles, or one frame."""
        if medium.kind == "image":
            return super().encode(medium, part)
        return self.encode_tiles(self.frames.normalisation(medium.frames[part][None]))


def _template_has_video(path: Path) -> bool:
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    texts = [(path / name).read_text(encoding="utf-8") for name in names if (path / name).is_file()]
    return any(VIDEO in text for text in texts if "chat_template" in text or "message" in text)


class SmolVLMFamily:
    """Satisfies `VisionFamily`."""

    name = "smolvlm"
    model_types: tuple[str, ...] = ("smolvlm",)
    support = FamilySupport(
        models="SmolVLM, SmolVLM2",
        prepares="one picture, cut into tiles, or one frame",
        encodes="a few blocks of the tower, for a few tiles or one frame",
        video=True,
        parity=(Parity("smolvlm", (*PICTURE_CASES, "vid1")),),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> SmolVLMModel:
        """See `VisionFamily.load`. Raises `ModelLoadError` or `UnsupportedError`."""
        tiling, frames = TilingSettings.read(path), FrameSettings.read(path)
        parts = load_parts(path, config, cancel)
        model = SmolVLMModel(parts, tiling, frames, template_has_video=_template_has_video(path))
        check_tokens_per_tile(path, model.runs.num_tokens)
        return model


FAMILY = SmolVLMFamily()
