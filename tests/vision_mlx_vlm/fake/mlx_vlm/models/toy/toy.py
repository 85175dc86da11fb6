"""Colours through one matrix, put in the place of image tokens."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .language import LanguageModel


class Features:
    def __init__(self, **values):
        self.values = values
        self.inputs_embeds = values["inputs_embeds"]

    def to_dict(self):
        return self.values


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = SimpleNamespace(image_token_id=config["image_token_id"])
        self.fault = config.get("fault")
        self.language_model = LanguageModel(config)
        self.vision_tower = nn.Linear(3, config["text_config"]["hidden_size"], bias=False)

    def sanitize(self, weights):
        named = {"position_embedding": "language_model.position_embedding", "vision.weight": "vision_tower.weight"}
        return {named.get(name, f"language_model.llama.{name}"): value for name, value in weights.items()}

    def get_input_embeddings(self, input_ids, pixel_values=None, mask=None, **others):
        hidden = self.language_model.llama.model.embed_tokens(input_ids)
        if pixel_values is None:
            return Features(inputs_embeds=hidden)
        ids = np.array(input_ids)[0]
        places = np.flatnonzero(ids == (-200 if self.fault == "negative" else self.config.image_token_id))
        rows = self.vision_tower(pixel_values.reshape(-1, 3))
        places = places[: len(places) - (1 if self.fault == "mismatch" else 0)]
        hidden[0, mx.array(places)] = rows[: len(places)]
        position_ids, deltas = self.language_model.get_rope_index(input_ids, others.get("image_grid_thw"))
        self.language_model._position_ids = position_ids
        self.language_model._rope_deltas = deltas
        extra = {"cross_attention_states": hidden} if self.fault == "whole" else {}
        return Features(inputs_embeds=hidden, position_ids=position_ids, rope_deltas=deltas, **extra)
