"""All that is asked of mlx-vlm: load, process a picture, embed it, run the language model.

Facts of mlx-vlm 0.7.10: `utils.load_model`, `load_processor` and `prepare_inputs`; a model has `language_model` and
`get_input_embeddings(input_ids, pixel_values, mask=…, **what the processor gave)`, whose result has `inputs_embeds`
and what else its language model wants for the prompt; `language_model(ids, inputs_embeds=…, cache=…, **these)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import cache as kinds
from PIL import Image

from mlxgen.cancellation import CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen_vision.mlx_vlm_adapter.isolation import Isolation

Pixels = np.ndarray[Any, Any]

# What embedding may give beside the embeddings themselves. Masks are left out: a model that looks at them where there
# is no padding gives other logits in the trial, and is refused.
TOKENWISE: Final = "per_layer_inputs"
DEEPSTACK: Final = "deepstack_visual_embeds"
DEEPSTACK_MASK: Final = "visual_pos_masks"
_PASSED_OVER: Final = ("attention_mask_4d", "attention_mask")
_POSITIONS: Final = ("position_ids", "rope_deltas")
KNOWN: Final = frozenset((TOKENWISE, DEEPSTACK, DEEPSTACK_MASK, *_PASSED_OVER, *_POSITIONS))

_EVAL_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Embedded:
    """Embeddings (1, n, hidden) of a prompt, and what else embedding gave that isn't None, by mlx-vlm's names."""

    hidden: mx.array
    others: Mapping[str, Any]
    position_ids: mx.array | None


class Bridge:
    """A model loaded by mlx-vlm with its processor. Immutable after load but for what `Isolation` puts back."""

    def __init__(self, model: nn.Module, processor: Any, kind: str) -> None:
        self.model = model
        self.processor = processor
        self.kind = kind
        self.language: nn.Module = model.language_model
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.isolation = Isolation(model)

    @property
    def image_token_index(self) -> int | None:
        for name in ("image_token_index", "image_token_id"):
            value = getattr(self.model.config, name, None)
            if isinstance(value, int):
                return value
        return None

    def process(self, text: str, pictures: Sequence[Pixels]) -> dict[str, Any]:
        """What the processor makes of a prompt: `input_ids` (1, n), `pixel_values`, and others that aren't None."""
        from mlx_vlm.utils import prepare_inputs

        given = prepare_inputs(
            self.processor,
            images=[Image.fromarray(picture) for picture in pictures],
            prompts=text,
            image_token_index=self.image_token_index,
            add_special_tokens=False,
        )
        return {name: value for name, value in given.items() if value is not None}

    def ids(self, text: str) -> list[int]:
        """The ids of a text alone, special tokens in it included, none put in front."""
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]

    def ids_of(self, given: Mapping[str, Any]) -> list[int]:
        """The ids that `process` gave, without the beginning-of-text token that some processors put in front."""
        ids = [int(token) for token in np.array(given["input_ids"]).reshape(-1)]
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return ids[1:] if bos is not None and ids[:1] == [bos] else ids

    def embed(self, inputs: Mapping[str, Any]) -> Embedded:
        """`get_input_embeddings` of what `process` gave, or of {"input_ids": ids} for text. Restores the model."""
        with self.isolation.call():
            return self.embed_in_place(inputs)

    def embed_in_place(self, inputs: Mapping[str, Any]) -> Embedded:
        """The same, leaving on the model what it leaves."""
        rest = {name: value for name, value in inputs.items() if name not in ("input_ids", "pixel_values")}
        mask = rest.pop("attention_mask", None)
        features = self.model.get_input_embeddings(inputs["input_ids"], inputs.get("pixel_values"), mask=mask, **rest)
        others = {
            name: value for name, value in features.to_dict().items() if value is not None and name != "inputs_embeds"
        }
        position_ids = others.get("position_ids")
        if position_ids is None:  # some models leave them on themselves instead
            position_ids = getattr(self.language, "_position_ids", None)
        return Embedded(features.inputs_embeds, others, position_ids)

    def logits(self, ids: mx.array, cache: Sequence[Any], others: Mapping[str, Any]) -> mx.array:
        """Logits (1, n, vocabulary) of ids (1, n), lazily. Restores the model."""
        with self.isolation.call(every_module=ids.shape[1] > 1):
            return self.logits_in_place(ids, cache, others)

    def logits_in_place(self, ids: mx.array, cache: Sequence[Any], others: Mapping[str, Any]) -> mx.array:
        result: mx.array = self.language(ids, cache=list(cache), **others).logits
        return result

    def rope_index(self, ids: mx.array, grids: Mapping[str, mx.array]) -> tuple[mx.array, mx.array]:
        """(position ids, difference) of a whole prompt, (1, n) ids. Restores the model."""
        find = self.language.get_rope_index
        taken = inspect.signature(find).parameters
        with self.isolation.call():
            position_ids, delta = find(ids, **{name: value for name, value in grids.items() if name in taken})
        return position_ids, delta

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches for this model. Raises `UnsupportedError` for a kind that mlx-lm doesn't have."""
        if not hasattr(self.language, "make_cache"):
            return [kinds.KVCache() for _ in self.language.layers]
        return [own_cache(entry, self.kind) for entry in self.language.make_cache()]


def own_cache(entry: Any, kind: str) -> Any:
    """An empty cache of mlx-vlm as the same kind of mlx-lm, which sessions can save and take back."""
    name = type(entry).__name__
    if isinstance(entry, tuple(getattr(kinds, known) for known in ("KVCache", "RotatingKVCache", "ArraysCache"))):
        return entry
    if name in ("KVCache", "SimpleKVCache"):
        return kinds.KVCache()
    if name in ("RotatingKVCache", "BufferedRotatingKVCache"):
        return kinds.RotatingKVCache(max_size=entry.max_size, keep=entry.keep)
    if name == "ArraysCache":
        return kinds.ArraysCache(len(entry.cache))
    if name == "CacheList":
        return kinds.CacheList(*(own_cache(child, kind) for child in entry.caches))
    raise UnsupportedError(f"{kind} through mlx-vlm keeps a {name}, which mlxgen can't save; use mlx-vlm itself for it")


def load_bridge(path: Path, kind: str, cancel: CancelToken) -> Bridge:
    """Load model and processor. Runs no code that comes with the model. Weights are read 256 MB at a time."""
    from mlx_vlm.utils import load_image_processor, load_model, load_processor

    cancel.checkpoint()
    model = load_model(path, lazy=True)
    if not hasattr(model, "language_model") or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedError(
            f"{kind} of mlx-vlm is no language model with embeddings that pictures go into; use mlx-vlm itself for it"
        )
    for group in _groups(model):
        cancel.checkpoint()
        mx.eval(group)
    cancel.checkpoint()
    processor = load_processor(path, add_detokenizer=False, trust_remote_code=False)
    image_processor = load_image_processor(path, trust_remote_code=False)
    if image_processor is not None:
        processor.image_processor = image_processor
    return Bridge(model, processor, kind)


def _groups(model: nn.Module) -> Iterator[list[mx.array]]:
    group: list[mx.array] = []
    size = 0
    for _, array in tree_flatten(model.parameters()):
        group.append(array)
        size += array.nbytes
        if size >= _EVAL_BYTES:
            yield group
            group, size = [], 0
    yield group
