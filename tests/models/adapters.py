"""A LoRA adapter for the tiny llama, as mlx_lm.lora writes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_adapter(folder: Path, *, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    weights = {}
    for layer in (0, 1):
        for name, (rows, columns) in {"q_proj": (64, 64), "v_proj": (64, 32)}.items():
            prefix = f"model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_a"] = rng.standard_normal((rows, 4)).astype(np.float32)
            weights[f"{prefix}.lora_b"] = rng.standard_normal((4, columns)).astype(np.float32)
    save_file(weights, folder / "adapters.safetensors")
    parameters = {"rank": 4, "scale": 0.5, "dropout": 0.1, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
