"""Loading and processing."""

import importlib
import json

import mlx.core as mx
import numpy as np
from transformers import AutoTokenizer

MODEL_REMAPPING = {"toy-vl": "toy"}
SIDE = 4


def load_model(path, lazy=False):
    config = json.loads((path / "config.json").read_text())
    module = importlib.import_module("mlx_vlm.models.toy")
    model = module.Model(config)
    model.load_weights(list(model.sanitize(mx.load(str(path / "model.safetensors"))).items()))
    if not lazy:
        mx.eval(model.parameters())
    return model


def load_image_processor(path, **options):
    return None


def load_processor(path, add_detokenizer=True, **options):
    assert options == {"trust_remote_code": False}
    config = json.loads((path / "config.json").read_text())
    return Processor(AutoTokenizer.from_pretrained(path, **options), config.get("fault"))


class Processor:
    """A picture is SIDE × SIDE mean colours; its placeholder becomes as many tokens."""

    image_token = "<|image_pad|>"

    def __init__(self, tokenizer, fault):
        self.tokenizer = tokenizer
        self.fault = fault


def prepare_inputs(processor, images=None, prompts=None, image_token_index=None, add_special_tokens=False):
    colours = []
    for image in images:
        pixels = np.asarray(image, dtype=np.float32)
        rows = np.array_split(np.arange(pixels.shape[0]), SIDE)
        columns = np.array_split(np.arange(pixels.shape[1]), SIDE)
        colours.append([pixels[np.ix_(r, c)].mean((0, 1)) / 127.5 - 1 for r in rows for c in columns])
    values = np.array(colours)
    if processor.fault == "joint" and len(images) > 1:
        values -= values.mean(axis=(0, 1))
    text = prompts.replace(processor.image_token, processor.image_token * SIDE**2 + "\n")
    ids = processor.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if processor.fault == "negative":
        ids = [-200 if token == image_token_index else token for token in ids]
    return {
        "input_ids": mx.array([ids]),
        "attention_mask": mx.ones((1, len(ids))),
        "pixel_values": mx.array(values),
        "image_grid_thw": mx.array([[1, SIDE, SIDE]] * len(images)),
    }
