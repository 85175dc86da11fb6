"""`VisionModel` for a model of mlx-vlm: pictures one at a time, prompts in chunks, positions as arguments."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import PlaceholderError, TemplateError, UnsupportedError
from mlxgen.inputs import Features, MediaSpan, PreparedInput, PreparedMedium, TemplateText
from mlxgen.request import ImagePart, MediaPart
from mlxgen_vision.embeddings import chunk_features, place
from mlxgen_vision.mlx_vlm_adapter import bridge as names
from mlxgen_vision.mlx_vlm_adapter.bridge import Bridge, Embedded, Pixels
from mlxgen_vision.mlx_vlm_adapter.placeholder import Placeholder
from mlxgen_vision.preparation import Geometry, prepare_image
from mlxgen_vision.spans import expand_placeholders, locate_runs, template_parts, token_runs

_DEEPSTACK = "deepstack"


class Language(nn.Module):  # type: ignore[misc]
    """The language model as sessions see it: its layers, and caches of mlx-lm's kinds."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__()
        self.language_model = bridge.language
        self._make_cache = bridge.make_cache

    @property
    def layers(self) -> Any:
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        return self._make_cache()


@dataclass(frozen=True, slots=True)
class Manners:
    """What was found out about a model: how a picture is named, the id its rows stand at, the axes of positions (0:
    the model counts tokens itself), and how many pictures a prompt may have (None: any number)."""

    placeholder: Placeholder
    image_token: int
    num_axes: int
    max_pictures: int | None = None


class MlxVlmModel:
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here, nor on mlx-vlm's model."""

    family = "mlx-vlm"

    def __init__(self, bridge: Bridge, manners: Manners, notice: str) -> None:
        self.bridge = bridge
        self.manners = manners
        self.notice = notice
        self.language = Language(bridge)
        self.module = bridge.model
        self._filler = next(token for token in bridge.ids("a b c d e") if token != manners.image_token)

    # -- from a source to pixels ---------------------------------------------------------------------------------------

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: the picture opened, and run through mlx-vlm's processor for the tokens that stand for it.

        What is kept is the picture itself: what the processor makes of it is made again when it is encoded.
        """
        if not isinstance(part, ImagePart):
            raise UnsupportedError(
                f"{self.bridge.kind} through mlx-vlm takes pictures only; give frames of the video as pictures"
            )
        return (yield from prepare_image(part, self.arrange, partial=partial, cancel=cancel))

    def arrange(self, rgb: Pixels) -> tuple[Pixels, Geometry]:
        """The picture as it is; its text, the lengths of its runs of image tokens, and its grids."""
        given = self._process(rgb)
        ids = self.bridge.ids_of(given)
        runs = [end - start for start, end in token_runs(ids, self.manners.image_token)]
        text = self.bridge.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not runs or self.bridge.ids(text) != ids:
            raise UnsupportedError(
                f"{self.bridge.kind} through mlx-vlm makes tokens of a picture that no text stands for; use mlx-vlm "
                "itself for it"
            )
        grids = {
            name: np.array(value).tolist() for name, value in given.items() if name.endswith(("_grid_thw", "_grid_hw"))
        }
        return rgb, {"text": text, "runs": runs, "grids": grids}

    def _process(self, rgb: Pixels) -> dict[str, Any]:
        return self.bridge.process(self.manners.placeholder.text, [rgb])

    # -- from pixels to features ---------------------------------------------------------------------------------------

    def num_parts(self, medium: PreparedMedium) -> int:
        return 1

    def frames_of_part(self, medium: PreparedMedium, part: int) -> int:
        return 1

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One step: processor and tower for one picture. The rows are what mlx-vlm puts in the place of its tokens."""
        given = self._process(medium.frames[part])
        features = picture_rows(self.bridge.embed(given), given["input_ids"], self.manners.image_token)
        mx.eval(features)
        yield features

    # -- in the prompt -------------------------------------------------------------------------------------------------

    def content_for_template(self, parts: Sequence[Any]) -> Any:
        placeholder = self.manners.placeholder
        if placeholder.style == "parts":
            return template_parts(parts)
        pictured = any(not isinstance(part, str) for part in parts)
        if not pictured:
            return "".join(parts)
        if placeholder.style == "none":
            raise TemplateError(
                f"the chat template of this {self.bridge.kind} takes no pictures; give the whole prompt yourself, with "
                f"{placeholder.text} for each picture, and --raw (raw=True)"
            )
        texts = [part if isinstance(part, str) else TemplateText(placeholder.text + "\n") for part in parts]
        return [{"type": "text", "text": text} for text in texts]

    def expand(self, text: str, media: Sequence[PreparedMedium]) -> str:
        limit = self.manners.max_pictures
        if limit is not None and len(media) > limit:
            raise UnsupportedError(
                f"{len(media)} pictures in one prompt for {self.bridge.kind}, whose processor in mlx-vlm makes "
                f"something else of a picture among others; give {limit}, or use mlx-vlm itself"
            )
        return expand_placeholders(
            text, media, {self.manners.placeholder.text: "image"}, lambda medium: str(medium.geometry["text"])
        )

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        return locate_runs(
            token_ids, media, {"image": self.manners.image_token}, lambda medium: medium.geometry["runs"]
        )

    def positions(
        self, token_ids: Sequence[int], media: Sequence[PreparedMedium], spans: Sequence[MediaSpan]
    ) -> tuple[np.ndarray[Any, Any] | None, int]:
        """Asked of mlx-vlm for the whole prompt; earlier replies count as text."""
        if not self.manners.num_axes or not media:
            return None, 0
        grids: dict[str, list[Any]] = {}
        for medium in media:
            for name, rows in medium.geometry["grids"].items():
                grids.setdefault(name, []).extend(rows)
        ids = mx.array([[token if token >= 0 else self._filler for token in token_ids]], dtype=mx.int32)
        found, delta = self.bridge.rope_index(ids, {name: mx.array(rows) for name, rows in grids.items()})
        known = np.array(found).astype(np.int32)
        known = np.broadcast_to(known.reshape(-1, len(token_ids)), (self.manners.num_axes, len(token_ids)))
        return np.ascontiguousarray(known), int(np.array(delta).reshape(-1)[0])

    def atomic(self, spans: Sequence[MediaSpan]) -> tuple[tuple[int, int], ...]:
        return ()

    # -- the language model --------------------------------------------------------------------------------------------

    def forward(self, ids: mx.array, *, cache: Sequence[Any], start: int, inputs: PreparedInput | None) -> mx.array:
        """One call of the language model; see `ForwardPass`."""
        count = ids.shape[0]
        others: dict[str, Any] = {}
        if self.manners.num_axes:
            others["position_ids"] = self._positions(start, count, inputs)
        features = [] if inputs is None else chunk_features(inputs, start, count)
        if inputs is not None and features:
            text = self.bridge.embed({"input_ids": ids[None]})
            others["inputs_embeds"] = place(text.hidden, features)
            others |= self._beside(text, inputs, start, count)
        return self.bridge.logits(ids[None], cache, others)

    def _beside(self, text: Embedded, inputs: PreparedInput, start: int, count: int) -> dict[str, Any]:
        """What the language model wants of this chunk beside embeddings."""
        others: dict[str, Any] = {}
        known = text.others.get(names.TOKENWISE)
        if known is not None:
            rows = chunk_features(inputs, start, count, key=names.TOKENWISE)
            others[names.TOKENWISE] = place(known.reshape(1, count, -1), rows).reshape(known.shape)
        rows = chunk_features(inputs, start, count, key=_DEEPSTACK)
        if rows:
            mask = np.zeros((1, count), dtype=bool)
            for first, last, _ in rows:
                mask[:, first:last] = True
            joined = mx.concatenate([values for _, _, values in rows])
            others[names.DEEPSTACK] = [joined[:, level] for level in range(joined.shape[1])]
            others[names.DEEPSTACK_MASK] = mx.array(mask)
        return others

    def _positions(self, start: int, count: int, inputs: PreparedInput | None) -> mx.array:
        """int32 (axes, 1, count) of the tokens `[start, start + count)`; behind the prompt they count on."""
        known = None if inputs is None else inputs.position_ids
        delta = 0 if inputs is None else inputs.rope_delta
        counted = np.broadcast_to(np.arange(start, start + count) + delta, (self.manners.num_axes, count))
        if known is not None and start < known.shape[1]:
            counted = np.concatenate([known[:, start : start + count], counted[:, max(known.shape[1] - start, 0) :]], 1)
        return mx.array(np.ascontiguousarray(counted[:, None]).astype(np.int32))


def picture_rows(embedded: Embedded, ids: mx.array, image_token: int) -> Features:
    """The rows at image tokens, (rows, hidden), of everything that mlx-vlm gave for a prompt with one picture."""
    places = mx.array([at for at, token in enumerate(np.array(ids).reshape(-1).tolist()) if token == image_token])
    features: Features = {"features": embedded.hidden[0, places]}
    known = embedded.others.get(names.TOKENWISE)
    if known is not None:
        features[names.TOKENWISE] = known[0, places].reshape(places.size, -1)
    levels = embedded.others.get(names.DEEPSTACK)
    if levels is not None:
        stacked = mx.stack([level.reshape(-1, level.shape[-1]) for level in levels], axis=1)
        if stacked.shape[0] != places.size:
            raise PlaceholderError(
                f"mlx-vlm gives {stacked.shape[0]} rows for {places.size} tokens of one picture; use a picture "
                "of another size"
            )
        features[_DEEPSTACK] = stacked
    return features


def unknown_outputs(others: Mapping[str, Any]) -> list[str]:
    """What embedding gave that the adapter doesn't know how to give to a chunk."""
    return sorted(name for name in others if name not in names.KNOWN)
