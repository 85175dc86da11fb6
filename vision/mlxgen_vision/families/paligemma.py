"""PaliGemma 1 and 2: a SigLIP tower's normed state, one layer, a Gemma whose prompt attends in both directions.

The prompt is a prefix: its pictures and its text see each other in both directions, the reply is causal (big_vision's
`paligemma.py`: `mask_ar` 0 for picture and prefix, 1 for the suffix; transformers alike). So a prompt's tokens belong
together like a picture's in Gemma 3: they go through in one pass, and share a cache only with the same prompt. In a
conversation, which the models weren't trained on, each turn with pictures is a prefix from its first picture on, and
sees all before it; the turns between are causal.

The last token of a prompt is fed by a pass of its own, like everywhere in mlxgen, and yet the others see it: the pass
before it computes its keys and values in every layer, and doesn't keep them.

Gemma 2's sliding window of 4096 tokens isn't applied. big_vision didn't in training, and says so in
`models/ppp/gemma.py`; nor does mlx-lm. transformers does, which shows beyond 4096 tokens only. Gemma 1's gate is GELU
in its tanh form (big_vision: `nn.gelu`, transformers: `gelu_pytorch_tanh`), where mlx-lm has the exact one.

Positions count from 1 in transformers and from 0 here, which is the same to rotary embeddings. Features aren't scaled
by the square root of the width, token embeddings are. transformers refuses a prompt without a picture; here it is
Gemma's own causal pass.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gemma, gemma2
from mlx_lm.models.cache import QuantizedKVCache

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen.inputs import Features, MediaSpan, PreparedInput, PreparedMedium
from mlxgen.request import ImagePart, MediaPart
from mlxgen_vision import checkpoint
from mlxgen_vision.embeddings import chunk_features, place
from mlxgen_vision.image import resize
from mlxgen_vision.layouts import read_split
from mlxgen_vision.prefix import PrefixPass, PrefixSpan, prefix_spans
from mlxgen_vision.preparation import Geometry, Pixels, prepare_image
from mlxgen_vision.processors.paligemma import TEMPLATE, SquareSettings, expand
from mlxgen_vision.spans import locate_runs, template_parts
from mlxgen_vision.support import FamilySupport, Parity
from mlxgen_vision.towers.activations import gelu_tanh
from mlxgen_vision.towers.images import Readout, encode_images
from mlxgen_vision.towers.siglip import SiglipConfig, SiglipTower, siglip_weights

# What transformers' PaliGemmaConfig and its text configs assume where a published config is silent.
_TOWER: Final = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_TEXT: Final = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "head_dim": 256, "vocab_size": 256000}
_GEMMA: Final = _TEXT | {
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}
_GEMMA2: Final = _TEXT | {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


class TanhGatedMLP(gemma.MLP):  # type: ignore[misc]
    """Gemma 1's feed-forward with the activation it was trained with."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(gelu_tanh(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class LinearProjector(nn.Module):  # type: ignore[misc]
    """(..., vision width) -> (..., text width)."""

    def __init__(self, vision_width: int, text_width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(vision_width, text_width)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x)  # type: ignore[no-any-return]


class PaliGemmaVision(nn.Module):  # type: ignore[misc]
    """Tower and projector under the names of the published checkpoints."""

    def __init__(self, tower: SiglipConfig, text_width: int) -> None:
        super().__init__()
        self.vision_tower = SiglipTower(tower)
        self.multi_modal_projector = LinearProjector(tower.hidden_size, text_width)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is loaded from a folder; immutable, shared by all sessions."""

    language: nn.Module
    vision: PaliGemmaVision
    settings: SquareSettings
    image_token: int


class PaliGemmaModel:
    """Satisfies `VisionModel`. Immutable after load; nothing of a request is kept here."""

    family = "paligemma"

    def __init__(self, parts: Parts) -> None:
        self.language: Any = parts.language
        self.vision = parts.vision
        self.settings = parts.settings
        self.image_token = parts.image_token
        self.num_tokens = parts.vision.vision_tower.num_tokens(parts.settings.side, parts.settings.side)

    def forward(self, ids: mx.array, *, cache: Sequence[Any], start: int, inputs: PreparedInput | None) -> mx.array:
        """One call of the language model; see `ForwardPass`. Raises `InvalidValueError` if the chunk cuts a prefix
        anywhere but before its last token, `UnsupportedError` for a quantised cache."""
        if any(isinstance(layer, QuantizedKVCache) for layer in cache):
            raise UnsupportedError("PaliGemma's attention can't read a quantised cache; leave out kv_bits")
        spans = () if inputs is None else inputs.spans
        prefix = PrefixPass.of(spans, start, ids.shape[0])
        if inputs is None or prefix is None:
            logits: mx.array = self.language(ids[None], cache=cache)
            return logits
        text = self.language.model
        ids = prefix.complete(ids)
        # The placeholder's id may lie beyond the vocabulary, where there is no row to be looked up.
        known = mx.minimum(ids, text.vocab_size - 1)
        embeddings = text.embed_tokens(known[None]) * (text.args.hidden_size**0.5)
        hidden = place(embeddings, chunk_features(inputs, start, ids.shape[0]))
        for layer, layer_cache in zip(text.layers, cache, strict=True):
            hidden = layer(hidden, prefix.mask(layer_cache), prefix.view(layer_cache))
        logits = text.embed_tokens.as_linear(text.norm(hidden[:, : prefix.num_tokens]))
        cap = getattr(self.language, "final_logit_softcapping", None)
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """One unit: the picture opened and scaled to the tower's square."""
        if not isinstance(part, ImagePart):
            raise UnsupportedError("PaliGemma takes pictures only; give frames of the video as pictures")

        def arrange(rgb: Pixels) -> tuple[Pixels, Geometry]:
            return self.settings.square(rgb, resize), {}

        return (yield from prepare_image(part, arrange, partial=partial, cancel=cancel))

    def expand(self, text: str, media: Sequence[PreparedMedium]) -> str:
        return expand(text, media, self.num_tokens)

    def content_for_template(self, parts: Sequence[Any]) -> Any:
        return template_parts(parts)

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        """One `PrefixSpan` to a picture; pictures may touch."""
        spans = locate_runs(token_ids, media, {"image": self.image_token}, lambda medium: [self.num_tokens])
        return prefix_spans(token_ids, spans)

    def positions(
        self, token_ids: Sequence[int], media: Sequence[PreparedMedium], spans: Sequence[MediaSpan]
    ) -> tuple[np.ndarray[Any, Any] | None, int]:
        return None, 0

    def atomic(self, spans: Sequence[MediaSpan]) -> tuple[tuple[int, int], ...]:
        """Every prefix, pictures and text: its tokens see each other, so they go through together."""
        return tuple(dict.fromkeys(span.prefix for span in spans if isinstance(span, PrefixSpan)))

    def num_parts(self, medium: PreparedMedium) -> int:
        return 1

    def frames_of_part(self, medium: PreparedMedium, part: int) -> int:
        return 1

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """One part is one picture."""
        return self.encode_pixels(self.settings.normalisation(medium.frames[part][None]))

    def encode_pixels(self, pixels: np.ndarray[Any, Any]) -> Iterator[Features | None]:
        """Normalised images, float32 (images, side, side, 3), through tower and projector."""
        return encode_images(self.vision.vision_tower, pixels, Readout(self.vision.multi_modal_projector))


def build_language(text_config: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's Gemma 1 or 2 for a `text_config`, without weights. Raises `UnsupportedError` for another text model."""
    kind = text_config.get("model_type") or "gemma"
    given = {key: value for key, value in text_config.items() if value is not None}
    rope = text_config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        given["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default" or text_config.get("rope_scaling"):
        raise UnsupportedError("text_config scales its rotary positions; PaliGemma's published models don't")
    if kind == "gemma2":
        if None in (text_config.get("attn_logit_softcapping", 50.0), text_config.get("final_logit_softcapping", 30.0)):
            raise UnsupportedError("text_config turns Gemma 2's soft caps off; PaliGemma 2 was trained with them")
        return gemma2.Model(gemma2.ModelArgs.from_dict({**_GEMMA2, **given, "model_type": kind}))
    if kind != "gemma":
        raise UnsupportedError(f"text_config has model_type {kind!r}; PaliGemma has gemma or gemma2")
    language = gemma.Model(gemma.ModelArgs.from_dict({**_GEMMA, **given, "model_type": kind}))
    for layer in language.layers:
        layer.mlp = TanhGatedMLP(language.args.hidden_size, language.args.intermediate_size)
    return language


class PaliGemmaFamily:
    """Satisfies `VisionFamily`."""

    name = "paligemma"
    model_types: tuple[str, ...] = ("paligemma",)
    support = FamilySupport(
        models="PaliGemma 1 and 2",
        parity=(Parity("paligemma", ("img1", "img2")),),
        note="other words to the same picture are another prompt from its first token on; no kv_bits",
    )
    # The published tokenizers put <bos> in front of everything, where the models were trained with it behind the
    # pictures; and there is no chat template.
    tokenizer_config: Final[Mapping[str, Any]] = {"add_bos_token": False, "chat_template": TEMPLATE}

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> PaliGemmaModel:
        """Build text model, tower and projector and give them the folder's weights, whatever its layout."""
        tower = SiglipConfig.from_dict(config.get("vision_config") or {}, **(_TOWER | {"patch_size": 14}))
        settings = SquareSettings.read(path, tower.image_size)
        language = build_language(config.get("text_config") or {})
        weights = read_split(path, config, cancel=cancel)
        if not config.get("tie_word_embeddings", True):
            raise UnsupportedError(
                "config.json has tie_word_embeddings false; PaliGemma's output is its embedding table"
            )
        for name in [name for name in weights.text if name.startswith("lm_head.")]:
            del weights.text[name]  # some exports hold the table twice
        checkpoint.fill(language, weights.text, what="the text model", cancel=cancel)
        vision = PaliGemmaVision(tower, int(language.args.hidden_size))
        ready = siglip_weights(weights.vision, "vision_tower.", tower)
        checkpoint.fill(vision, ready, what="the vision tower", cancel=cancel)
        image_token = config.get("image_token_index", config.get("image_token_id", 256000))
        return PaliGemmaModel(Parts(language, vision, settings, int(image_token)))


FAMILY = PaliGemmaFamily()
