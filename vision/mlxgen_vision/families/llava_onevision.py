"""LLaVA-OneVision: a SigLIP tower's last state, a Qwen2; a picture alone in tiles, pictures among others one view each.

Which form a picture has depends on the whole prompt: alone it is tiled as in LLaVA-NeXT, at most about nine tiles'
worth of patches; two or more (in whatever turns) are one padded view each. That is how it was trained (LLaVA-NeXT's
`train.py`: "pad" where a sample has several images) and what transformers makes of a conversation. Since a session may
get its second picture later, each picture is prepared and encoded in both forms. In a raw session, where a turn's text
is expanded before the next is known, the pictures of the turn decide.

The tower's state is the one before the final norm, as transformers 5 has it and the training code had
(`siglip_encoder.py`: last layer deleted, `hidden_states[-1]`); transformers 4.57 took the normed one.

Video frames are pooled to half the patches a side; one `image_newline` ends the video. Pictures don't count as several
because of a video.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.inputs import Features, MediaKind, MediaSpan, PreparedMedium
from mlxgen.request import ImagePart, MediaPart
from mlxgen_vision.families.causal_model import CausalModel
from mlxgen_vision.families.llava import Defaults, Parts, load_parts
from mlxgen_vision.frames import ArrayReader, SequenceReader
from mlxgen_vision.image import resize
from mlxgen_vision.preparation import Geometry, Pixels, prepare_image, prepare_video
from mlxgen_vision.processors.anyres import AnyResSettings, Window, unpadded
from mlxgen_vision.processors.llava import IMAGE
from mlxgen_vision.processors.llava_onevision import (
    FrameSettings,
    max_tiles,
    picture_views,
    reduced,
    sampled_frames,
    spread,
)
from mlxgen_vision.spans import expand_placeholders, locate_runs, token_runs
from mlxgen_vision.support import VIDEO_CASES, FamilySupport, Parity
from mlxgen_vision.towers.anyres import large_view, resample, with_line_ends
from mlxgen_vision.video import VideoReader

_log = logging.getLogger(__name__)

VIDEO: Final = "<video>"

_MULTIPLES: Final = range(1, 7)
# What transformers' LlavaOnevisionConfig assumes where a published config is silent.
_DEFAULTS: Final = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
_TEXT_DEFAULTS: Final = Defaults(text_kind="qwen2", image_token=151646)
_VIDEO_TOKEN: Final = 151647


@dataclass(frozen=True, slots=True)
class Settings:
    """How media are prepared, and at most how many tiles' worth of patches a picture may take."""

    picture: AnyResSettings
    frame: FrameSettings
    max_tiles: int


class LlavaOnevisionModel(CausalModel):
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    def __init__(self, parts: Parts, video_token: int, settings: Settings) -> None:
        super().__init__("llava_onevision", parts.language, {IMAGE: "image", VIDEO: "video"})
        self.vision = parts.vision
        self.tokens: Mapping[MediaKind, int] = {"image": parts.image_token, "video": video_token}
        self.settings = settings

    # -- from a source to pixels

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: a picture in both of its forms, or one frame of a video scaled to a square."""
        if isinstance(part, ImagePart):

            def views(rgb: Pixels) -> tuple[Pixels, Geometry]:
                size, picture = (rgb.shape[0], rgb.shape[1]), self.settings.picture
                return picture_views(rgb, picture, resize), {"size": list(size), "grid": list(picture.grid(size))}

            return (yield from prepare_image(part, views, partial=partial, cancel=cancel))
        settings = self.settings.frame.limited(part.options)

        def plan(reader: VideoReader) -> Geometry:
            if isinstance(reader, SequenceReader | ArrayReader):
                return {"indices": spread(reader.num_frames, part.options.max_frames or reader.num_frames)}
            if reader.fps is None:
                _log.warning("%s: no frame rate known; frames are spread over all of it", reader.name)
                return {"indices": spread(reader.num_frames, settings.max_frames)}
            return {"indices": sampled_frames(reader.num_frames, reader.fps, settings)}

        def frame(rgb: Pixels, geometry: Geometry) -> Pixels:
            return resize(rgb, (settings.side, settings.side), settings.resample)

        return (yield from prepare_video(part, plan, frame, partial=partial, cancel=cancel))

    # -- in the prompt

    def expand(self, text: str, media: Sequence[PreparedMedium]) -> str:
        alone = sum(medium.kind == "image" for medium in media) == 1
        return expand_placeholders(text, media, self.placeholders, lambda medium: self.render(medium, alone=alone))

    def render(self, medium: PreparedMedium, *, alone: bool = False) -> str:
        """The text that stands for one medium; `alone` says whether a picture is the prompt's only one."""
        return (VIDEO if medium.kind == "video" else IMAGE) * self.num_tokens(medium, alone=alone)

    def num_tokens(self, medium: PreparedMedium, *, alone: bool) -> int:
        if medium.kind == "video":
            return len(medium.frames) * self.pooled_side**2 + 1
        return self.num_tiled_rows(medium.geometry) if alone else self.num_padded_rows

    @property
    def num_padded_rows(self) -> int:
        """Tokens of a picture among others: its patches and the end of a line."""
        return self.vision.num_rows + 1

    def num_tiled_rows(self, geometry: Mapping[str, Any]) -> int:
        """Tokens of a picture alone: the whole, and the larger view with the ends of its lines."""
        rows, columns = self.view_size(geometry)
        return self.vision.num_rows + rows * (columns + 1)

    @property
    def pooled_side(self) -> int:
        return (self.vision.side + 1) // 2

    def window(self, geometry: Mapping[str, Any]) -> Window:
        height, width = geometry["size"]
        rows, columns = geometry["grid"]
        return unpadded((height, width), rows * self.vision.side, columns * self.vision.side)

    def view_size(self, geometry: Mapping[str, Any]) -> tuple[int, int]:
        """(rows, columns) of a picture's larger view."""
        return reduced(self.window(geometry), self.vision.side, self.settings.max_tiles)

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        """One span to a picture or video; they may touch. The rows of a tiled picture come after those of its padded
        form, for which nothing stands then."""
        tiled = self._tiled(token_ids, media)
        lengths = iter([self.num_tokens(medium, alone=alone) for medium, alone in zip(media, tiled, strict=True)])
        spans = locate_runs(token_ids, media, self.tokens, lambda medium: [next(lengths)])
        first = self.num_padded_rows
        return tuple(
            replace(span, row_start=first + span.row_start, row_end=first + span.row_end)
            if tiled[span.medium]
            else span
            for span in spans
        )

    def _tiled(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> list[bool]:
        """Which media are pictures in tiles: the lengths of the runs tell."""
        pictures = [number for number, medium in enumerate(media) if medium.kind == "image"]
        runs = [end - start for start, end in token_runs(token_ids, self.tokens["image"])]
        lengths = [self.num_tiled_rows(media[number].geometry) for number in pictures]
        found = tiled_pictures(runs, lengths, self.num_padded_rows)
        tiled = [False] * len(media)
        for number, own in zip(pictures, found, strict=True):
            tiled[number] = own
        return tiled

    # -- from pixels to features: both forms of a picture, the frames of a video

    def num_parts(self, medium: PreparedMedium) -> int:
        return 2 if medium.kind == "image" else len(medium.frames)

    def frames_of_part(self, medium: PreparedMedium, part: int) -> int:
        return 0 if medium.kind == "image" and part == 0 else 1

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One part is a picture padded to a square, a picture with all its tiles, or one frame."""
        if medium.kind == "video":
            frame = self.settings.frame.normalisation(medium.frames[part][None])
            yield from self.encode_frame(frame, last=part + 1 == len(medium.frames))
        elif part == 0:
            yield from self.encode_padded(self.settings.picture.normalisation(medium.frames[0][:1]))
        else:
            yield from self.encode_views(self.settings.picture.normalisation(medium.frames[0][1:]), medium.geometry)

    def encode_padded(self, pixels: np.ndarray[Any, Any]) -> Iterator[Features | None]:
        """A picture among others, normalised, float32 (1, side, side, 3)."""
        for step in self.vision.encode(pixels):
            yield None if step is None else self._ended(step["features"])

    def encode_views(self, pixels: np.ndarray[Any, Any], geometry: Mapping[str, Any]) -> Iterator[Features | None]:
        """A picture alone: normalised views, float32 (1 + tiles, side, side, 3)."""
        for step in self.vision.encode(pixels):
            yield None if step is None else self._arranged(step["features"], geometry)

    def encode_frame(self, pixels: np.ndarray[Any, Any], *, last: bool) -> Iterator[Features | None]:
        """A frame, normalised, float32 (1, side, side, 3); the last one's rows end the video."""
        for step in self.vision.encode(pixels):
            yield None if step is None else self._pooled(step["features"], last)

    def _arranged(self, rows: mx.array, geometry: Mapping[str, Any]) -> Features:
        each = rows.reshape(-1, self.vision.num_rows, rows.shape[-1])
        window, size = self.window(geometry), self.view_size(geometry)
        view = window.cut(large_view(each[1:], tuple(geometry["grid"]), self.vision.side))
        if size != (window.rows, window.columns):
            view = resample(view, *size)
        return _evaluated(mx.concatenate([each[0], with_line_ends(view, self.vision.image_newline)]))

    def _pooled(self, rows: mx.array, last: bool) -> Features:
        side, width = self.vision.side, rows.shape[-1]
        pooled = resample(rows.reshape(side, side, width), self.pooled_side, self.pooled_side).reshape(-1, width)
        return self._ended(pooled) if last else _evaluated(pooled)

    def _ended(self, rows: mx.array) -> Features:
        return _evaluated(mx.concatenate([rows, self.vision.image_newline.astype(rows.dtype)[None]]))


def _evaluated(rows: mx.array) -> Features:
    mx.eval(rows)
    return {"features": rows}


def tiled_pictures(runs: Sequence[int], tiled: Sequence[int], padded: int) -> list[bool]:
    """For each picture whether it is in tiles, so that the lengths of all make up `runs`, in order.

    `tiled` are the pictures' lengths in tiles, `padded` is everyone's as one of several. A run is several padded
    pictures or one in tiles; where it could be either, padded ones. Where nothing fits, all are padded, or the only one
    tiled, and whoever counts the tokens will say so.
    """
    todo: list[tuple[int, list[bool]]] = [(0, [])]
    while todo:
        run, found = todo.pop()
        if run == len(runs):
            if len(found) == len(tiled):
                return found
            continue
        if len(found) < len(tiled) and tiled[len(found)] == runs[run]:
            todo.append((run + 1, [*found, True]))
        count, left = divmod(runs[run], padded)
        if not left and len(found) + count <= len(tiled):
            todo.append((run + 1, found + [False] * count))
    return [len(tiled) == 1] * len(tiled)


class LlavaOnevisionFamily:
    """Satisfies `VisionFamily`."""

    name = "llava_onevision"
    model_types: tuple[str, ...] = ("llava_onevision",)
    support = FamilySupport(
        models="LLaVA-OneVision",
        prepares="one picture, whole and in tiles, or one frame",
        encodes="a few blocks of the tower, for a few tiles or one frame",
        video=True,
        parity=(Parity("llava_onevision", VIDEO_CASES),),
        note="with a second picture both are shown in another form than one alone, so the prompt is read again",
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> LlavaOnevisionModel:
        """See `VisionFamily.load`. Raises `ModelLoadError` or `UnsupportedError`."""
        parts = load_parts(path, {**_DEFAULTS, **config}, defaults=_TEXT_DEFAULTS, newline=True, cancel=cancel)
        parts.vision.require_grid()
        side = parts.vision.image_size
        grids = [(rows * side, columns * side) for rows in _MULTIPLES for columns in _MULTIPLES]
        settings = Settings(
            AnyResSettings.read(path, config, side, grids),
            FrameSettings.read(path, side),
            max_tiles(str(config.get("vision_aspect_ratio") or "anyres_max_9")),
        )
        video_token = config.get("video_token_index", config.get("video_token_id", _VIDEO_TOKEN))
        return LlavaOnevisionModel(parts, int(video_token), settings)


FAMILY = LlavaOnevisionFamily()
