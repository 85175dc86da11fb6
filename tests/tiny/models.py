"""Checkpoint folders: config from a table, weights from a seeded NumPy generator by each parameter's name and shape."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from tiny.tokenizer import EOS_TOKEN, SPECIAL_TOKENS, VOCAB_SIZE, write_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "eos_token_id": SPECIAL_TOKENS.index(EOS_TOKEN),
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_ATTENTION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    # KVCache; head_dim 32 allows quantised KV with group size 32.
    "llama": {"model_type": "llama", "num_hidden_layers": 2, **_ATTENTION},
    "qwen2": {"model_type": "qwen2", "num_hidden_layers": 2, **_ATTENTION},
    # Two RotatingKVCache of 16 rows, then one KVCache.
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        **_ATTENTION,
        "rope_local_base_freq": 1000.0,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
    },
    # ArraysCache (convolution) and KVCache in turns.
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        **_ATTENTION,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "tie_word_embeddings": True,
    },
    # Three gated-delta layers (ArraysCache) and one of full attention (KVCache).
    "qwen3_5": {
        "model_type": "qwen3_5",
        "num_hidden_layers": 4,
        **_ATTENTION,
        "full_attention_interval": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    # ArraysCache only.
    "mamba2": {
        "model_type": "mamba2",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 4,
    },
    # CacheList(ArraysCache, KVCache) in every layer.
    "falcon_h1": {
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        **_ATTENTION,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "mamba_chunk_size": 32,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
    },
    # Three ChunkedKVCache of 32 tokens and one KVCache.
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            **_ATTENTION,
            **_COMMON,
            "attention_bias": False,
            "attention_chunk_size": 32,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
}
KINDS = tuple(_CONFIGS)


@dataclass(frozen=True)
class LlamaShape:
    """The shape of a llama of any size, for benchmarks and memory estimates."""

    num_hidden_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 96
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 32
    max_position_embeddings: int = 4096
    seed: int = 0


def make(kind: str, folder: Path, *, seed: int = 0, config: dict[str, Any] | None = None) -> Path:
    """Write the checkpoint of `kind` into `folder` (made if missing). `config` entries override the table's."""
    merged = {**_COMMON, **_CONFIGS[kind], **(config or {})}
    _write(merged, Path(folder), seed)
    return Path(folder)


def make_llama(folder: Path, shape: LlamaShape = LlamaShape()) -> Path:
    """Write a llama of any size into `folder`."""
    fields = {name: getattr(shape, name) for name in shape.__dataclass_fields__ if name != "seed"}
    return make("llama", folder, seed=shape.seed, config=fields)


@functools.cache
def folder(kind: str) -> Path:
    """The checkpoint folder of `kind`, built once per test run. Don't change it: copy it first."""
    return make(kind, _root() / kind)


@functools.cache
def load(kind: str) -> tuple[Any, Any]:
    """(module, tokenizer wrapper) as `mlx_lm.load` gives them, shared by all tests of a run."""
    import mlx_lm

    module, tokenizer = mlx_lm.load(str(folder(kind)))
    return module, tokenizer


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="mlxgen-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def _write(config: dict[str, Any], folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(folder)
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    module = architecture.Model(architecture.ModelArgs.from_dict(json.loads(json.dumps(config))))
    gemma = config["model_type"].startswith("gemma")
    tied = not any(name.endswith("lm_head.weight") for name, _ in tree_flatten(module.parameters()))
    weights = {
        name: _weight(name, tuple(value.shape), seed, gemma=gemma, tied=tied)
        for name, value in tree_flatten(module.parameters())
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})


def _weight(name: str, shape: tuple[int, ...], seed: int, *, gemma: bool, tied: bool) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape)
    specials = len(SPECIAL_TOKENS)
    if name.endswith("A_log"):
        value = np.log(rng.uniform(0.05, 1.0, shape))  # slow decay: a recurrent state that remembers
    elif name.endswith("dt_bias"):
        value = rng.uniform(-2.0, 0.0, shape)
    elif name.endswith(".D"):
        value = 1.0 + 0.1 * noise
    elif name.endswith(("embed_tokens.weight", "embeddings.weight")):
        value = noise * 0.3
        if tied:
            value[:specials] *= 0.1
    elif name.endswith("lm_head.weight"):
        value = noise * (2.5 / np.sqrt(shape[-1]))
        value[:specials] *= 0.05
    elif len(shape) == 1:
        value = 0.1 * noise + (1.0 if name.endswith("weight") and not gemma else 0.0)
    else:
        fan_in = int(np.prod(shape[1:])) if "conv" in name else shape[-1]
        value = noise * (1.5 / np.sqrt(fan_in))
    return np.ascontiguousarray(value, dtype=np.float32)
