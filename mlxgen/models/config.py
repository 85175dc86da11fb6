"""A model folder's config.json: read, and checked for numbers that would end the process, before anything is built."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlxgen.errors import ModelLoadError

_MAX_CONFIG_BYTES: Final = 16 * 2**20

# Smallest and largest value believed for entries that decide how much is built. The largest are about ten times what
# any published model has. `num_hidden_layers=10**6` alone ends the process: every layer is a Python object tree.
_LIMITS: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "num_blocks", "encoder_layers"), (1, 2_000)
    ),
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "model_dim"), (1, 2**18)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "mlp_dim"), (0, 2**22)),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), (1, 2**14)),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), (0, 2**14)),
    **dict.fromkeys(("head_dim", "state_size", "conv_kernel"), (1, 2**16)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, 2**14)),
    **dict.fromkeys(("patch_size", "temporal_patch_size", "image_size", "spatial_merge_size"), (1, 2**16)),
    "num_channels": (1, 64),
    "in_channels": (1, 64),
    "vocab_size": (1, 2**24),
    "max_position_embeddings": (1, 2**31 - 1),
    "sliding_window": (0, 2**31 - 1),
    "attention_chunk_size": (0, 2**31 - 1),
}
_MODEL_TYPE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as an object with a `model_type`, its sizes within limits; else `ModelLoadError`."""
    path = folder / "config.json"
    config = read_json_object(path)
    check_config(config, where=str(path))
    return config


def read_json_object(path: Path) -> dict[str, Any]:
    """A small JSON file that must hold an object; `ModelLoadError` says what is wrong with it."""
    try:
        size = path.stat().st_size
        if size > _MAX_CONFIG_BYTES:
            raise ModelLoadError(f"{path} has {size} bytes, more than the {_MAX_CONFIG_BYTES} such a file may have")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not JSON ({error}); download or copy it again") from error
    except OSError as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"can't read {path}: {error.strerror or error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}, not an object; download or copy it again")
    return value


def check_config(config: Mapping[str, Any], *, where: str) -> None:
    """Raise `ModelLoadError` unless `model_type` is a plain name and every size is a whole number within its limits."""
    model_type = config.get("model_type")
    if model_type is None:
        raise ModelLoadError(
            f"{where} has no model_type; it isn't a language model's config in the Hugging Face layout"
        )
    if not isinstance(model_type, str) or not _MODEL_TYPE.fullmatch(model_type):
        raise ModelLoadError(f"{where}: model_type is {model_type!r}, not a name of letters, digits, '_', '.' and '-'")
    _check_sizes(config, where, "")


def _check_sizes(config: Mapping[str, Any], where: str, prefix: str) -> None:
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_sizes(value, where, f"{prefix}{key}.")
        elif key in _LIMITS:
            low, high = _LIMITS[key]
            for number in value if isinstance(value, list) else [value]:
                if not _in_range(number, low, high):
                    raise ModelLoadError(
                        f"{where}: {prefix}{key} is {number!r}; a whole number from {low} to {high} was expected"
                    )


def _in_range(number: Any, low: int, high: int) -> bool:
    if number is None:  # the architecture's own default
        return True
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return False
    return number == int(number) and low <= number <= high


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: its `text_config` (or `llm_config`) where there is one, else all of it."""
    for key in ("text_config", "llm_config", "language_config"):
        nested = config.get(key)
        if isinstance(nested, Mapping) and nested:
            return nested
    return config


def context_length(config: Mapping[str, Any]) -> int | None:
    """How many tokens the model was made for, or None where the config doesn't say (recurrent models)."""
    for source in (text_config(config), config):
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"):
            value = source.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def eos_token_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """The ids that end a reply according to the config; empty when it doesn't say."""
    for source in (config, text_config(config)):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = frozenset(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
        if found:
            return found
    return frozenset()
