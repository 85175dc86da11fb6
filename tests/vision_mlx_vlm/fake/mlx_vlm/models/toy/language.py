"""A Llama with learned positions beside its own: all tokens of a picture stand at one, and state says where we are."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama

NUM_POSITIONS = 512


@dataclass
class Output:
    logits: mx.array


class LanguageModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fault = config.get("fault")
        self.image_token = config["image_token_id"]
        self.llama = llama.Model(llama.ModelArgs.from_dict(config["text_config"]))
        self.position_embedding = mx.zeros((NUM_POSITIONS, config["text_config"]["hidden_size"]))
        self._position_ids = None
        self._rope_deltas = None
        self._log = []

    @property
    def layers(self):
        return self.llama.layers

    def make_cache(self):
        from mlx_lm.models.cache import ChunkedKVCache, KVCache

        kind = (lambda: ChunkedKVCache(64)) if self.fault == "cache" else KVCache
        return [kind() for _ in self.layers]

    def get_rope_index(self, input_ids, image_grid_thw=None, attention_mask=None):
        ids = np.array(input_ids)[0]
        positions, at = [], 0
        for number, token in enumerate(ids):
            inside = token == self.image_token and number and ids[number - 1] == self.image_token
            at += 0 if inside else 1
            positions.append(at - 1)
        found = np.broadcast_to(np.array(positions), (3, 1, len(ids)))
        return mx.array(found), mx.array([[at - len(ids)]])

    def __call__(self, inputs, inputs_embeds=None, cache=None, **others):
        position_ids = others.get("position_ids")
        offset = cache[0].offset
        count = inputs.shape[1]
        if position_ids is None or self.fault == "state":
            if self._position_ids is not None and offset + count <= self._position_ids.shape[-1]:
                position_ids = self._position_ids[..., offset : offset + count]
            elif self._rope_deltas is not None:
                position_ids = (mx.arange(offset, offset + count) + self._rope_deltas)[None]
            else:
                position_ids = mx.arange(offset, offset + count)[None, None]
        elif position_ids.shape[-1] > count:
            position_ids = position_ids[..., offset : offset + count]
        if others.get("rope_deltas") is not None:
            self._rope_deltas = others["rope_deltas"]
        self._log.append(count)
        hidden = self.llama.model.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
        hidden = hidden + self.position_embedding[position_ids.reshape(-1, count)[:1]]
        return Output(self.llama(inputs, cache=cache, input_embeddings=hidden))
