"""LFM2-VL: a SigLIP 2 tower for pictures of any shape, 2 × 2 patches to a token, an LFM2 of convolutions and attention.

A large picture is cut into tiles of one size, each between a label and the next, and usually shown once more whole; a
small one is shown whole only. Tiles and the whole go through the tower independently of each other, in their own
shapes: nothing is padded or masked.

The text model is mlx-lm's; its short convolutions keep a recurrent state, which can't be trimmed. Pictures attend
causally, as all else.

The tiles' labels are `row_R_col_C`, as in transformers 5; 4.57 exchanged the two (see `processors/lfm2_vl.py`), and
repeated the text between two pictures.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import lfm2

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen.inputs import Features, MediaSpan, PreparedMedium
from mlxgen.request import ImagePart, MediaOptions, MediaPart
from mlxgen_vision import checkpoint
from mlxgen_vision.families.causal_model import CausalModel
from mlxgen_vision.image import check_options, resize
from mlxgen_vision.layouts import read_split
from mlxgen_vision.preparation import Geometry, Pixels, prepare_image
from mlxgen_vision.processors.lfm2_vl import Views, ViewSettings, ViewWords
from mlxgen_vision.spans import locate_runs
from mlxgen_vision.support import FamilySupport, Parity
from mlxgen_vision.towers.activations import activation
from mlxgen_vision.towers.images import Readout, encode_images
from mlxgen_vision.towers.pixel_shuffle import merge_squares
from mlxgen_vision.towers.siglip2 import Siglip2Tower, siglip2_config, siglip2_weights

# What transformers' Lfm2Config assumes where a published config is silent.
_TEXT_DEFAULTS: Final = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}


def lfm2_arguments(text_config: Mapping[str, Any]) -> dict[str, Any]:
    """For `mlx_lm.models.lfm2`. Raises `UnsupportedError` for other text models, and rotary scaling it doesn't know."""
    arguments: dict[str, Any] = {**_TEXT_DEFAULTS, **{k: v for k, v in text_config.items() if v is not None}}
    kind = arguments.setdefault("model_type", "lfm2")
    rope_type = (arguments.get("rope_parameters") or {}).get("rope_type", "default")
    if kind != "lfm2" or rope_type != "default":
        raise UnsupportedError(
            f"text_config has model_type {kind!r} and rope type {rope_type!r}; LFM2-VL's text model here is lfm2 "
            "without rotary scaling"
        )
    if "layer_types" not in arguments:
        arguments.setdefault("full_attn_idxs", list(range(arguments["num_hidden_layers"])))
    return arguments | {"block_dim": arguments["hidden_size"]}


class UnshuffleProjector(nn.Module):  # type: ignore[misc]
    """Squares of patches to one row, a norm, two layers: (images, patches, width) -> (images, tokens, text width)."""

    def __init__(self, config: Mapping[str, Any], vision_width: int, text_width: int) -> None:
        super().__init__()
        self.factor = int(config.get("downsample_factor") or 2)
        width, bias = vision_width * self.factor**2, bool(config.get("projector_bias", True))
        hidden = int(config.get("projector_hidden_size") or 2560)
        self._normed = bool(config.get("projector_use_layernorm", True))
        if self._normed:
            self.layer_norm = nn.LayerNorm(width)
        self.linear_1 = nn.Linear(width, hidden, bias=bias)
        self.linear_2 = nn.Linear(hidden, text_width, bias=bias)
        self._activation = activation(str(config.get("projector_hidden_act") or "gelu"))

    def __call__(self, x: mx.array, rows: int, columns: int) -> mx.array:
        merged = merge_squares(x, rows, columns, self.factor)
        merged = self.layer_norm(merged) if self._normed else merged
        return self.linear_2(self._activation(self.linear_1(merged)))  # type: ignore[no-any-return]


class Lfm2Vision(nn.Module):  # type: ignore[misc]
    """The tower and its projector, under the names of the published checkpoints."""

    def __init__(self, config: Mapping[str, Any], text_width: int) -> None:
        super().__init__()
        tower = siglip2_config(config.get("vision_config") or {})
        self.vision_tower = Siglip2Tower(tower)
        self.multi_modal_projector = UnshuffleProjector(config, tower.hidden_size, text_width)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is loaded from a folder; immutable, shared by all sessions."""

    language: nn.Module
    vision: Lfm2Vision
    settings: ViewSettings
    words: ViewWords
    image_token: int


class Lfm2VLModel(CausalModel):
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    def __init__(self, parts: Parts) -> None:
        super().__init__("lfm2_vl", parts.language, {parts.words.image: "image"})
        self.parts = parts

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: the picture opened, and all its views scaled."""
        if not isinstance(part, ImagePart):
            raise UnsupportedError("LFM2-VL takes pictures only; give frames of the video as pictures")
        check_options(part.options)

        def arrange(rgb: Pixels) -> tuple[Pixels, Geometry]:
            views = self.parts.settings.views((rgb.shape[0], rgb.shape[1]), part.options)
            canvas = self.parts.settings.canvas(rgb, views, resize)
            return canvas, {"grid": list(views.grid), "whole": None if views.whole is None else list(views.whole)}

        # The bounds on pixels are the rule's own: applied before it as well, they would cost a second resampling.
        opened = ImagePart(part.source, MediaOptions(allow_urls=part.options.allow_urls))
        return (yield from prepare_image(opened, arrange, partial=partial, cancel=cancel))

    def render(self, medium: PreparedMedium) -> str:
        """The text that stands for one picture."""
        return self.parts.words.text(_views(medium), self._runs(medium))

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        """One span per view."""
        return locate_runs(token_ids, media, {"image": self.parts.image_token}, self._runs)

    def _runs(self, medium: PreparedMedium) -> list[int]:
        views, settings = _views(medium), self.parts.settings
        tiles = [settings.tile_tokens] * (views.grid[0] * views.grid[1])
        return tiles if views.whole is None else [*tiles, settings.tokens(views.whole)]

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One part is one picture: its tiles, a few of them at a time, then the whole."""
        settings, vision = self.parts.settings, self.parts.vision
        groups = settings.groups(medium.frames[part], _views(medium))
        pieces: list[mx.array] = []
        for number, group in enumerate(groups):
            rows, columns = group.shape[1] // settings.patch, group.shape[2] // settings.patch
            readout = Readout(partial(vision.multi_modal_projector, rows=rows, columns=columns))
            for step in encode_images(vision.vision_tower, settings.normalisation(group), readout):
                if step is not None:
                    pieces.append(step["features"])
                if step is None or number + 1 < len(groups):
                    yield None
        features = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
        mx.eval(features)
        yield {"features": features}


def _views(medium: PreparedMedium) -> Views:
    grid, whole = medium.geometry["grid"], medium.geometry["whole"]
    return Views((grid[0], grid[1]), None if whole is None else (whole[0], whole[1]))


class Lfm2VLFamily:
    """Satisfies `VisionFamily`."""

    name = "lfm2_vl"
    model_types: tuple[str, ...] = ("lfm2_vl", "lfm2-vl")
    support = FamilySupport(
        models="LFM2-VL, LFM2.5-VL",
        prepares="one picture with all its views",
        encodes="a few blocks of the tower, for a few tiles",
        parity=(Parity("lfm2_vl"),),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> Lfm2VLModel:
        """Build text model, tower and projector and give them the folder's weights, whatever its layout."""
        settings = ViewSettings.read(path)
        arguments = lfm2_arguments(config.get("text_config") or {})
        vision = Lfm2Vision(config, arguments["hidden_size"])
        patch, factor = vision.vision_tower.config.patch_size, vision.multi_modal_projector.factor
        if (settings.patch, settings.factor) != (patch, factor):
            raise UnsupportedError(
                f"the image processor makes tokens of {settings.factor}x{settings.factor} patches of {settings.patch} "
                f"pixels, the model takes {factor}x{factor} of {patch}; use the processor settings published with the "
                "model"
            )
        split = read_split(path, config, cancel=cancel)
        if not config.get("tie_embedding", config.get("tie_word_embeddings", True)):
            raise UnsupportedError("tie_word_embeddings is false; mlx-lm's LFM2 has no output projection of its own")
        split.text.pop("lm_head.weight", None)  # tied: a copy of the embeddings
        language = lfm2.Model(lfm2.ModelArgs.from_dict(arguments))
        checkpoint.fill(language, language.sanitize(split.text), what="the text model", cancel=cancel)
        weights = siglip2_weights(split.vision, "vision_tower.")
        checkpoint.fill(vision, weights, what="the vision tower", cancel=cancel)
        image_token = config.get("image_token_id", config.get("image_token_index", 396))
        return Lfm2VLModel(Parts(language, vision, settings, ViewWords.read(path), int(image_token)))


FAMILY = Lfm2VLFamily()
