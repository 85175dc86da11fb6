"""The language models of the Qwen vision families: mlx-lm's, from any form of config and any layout of weights.

Two things are added to them at load, neither of which holds state: three-axis rotary embeddings (`mrope`), and for
Qwen3-VL decoder layers that add a chunk's deepstack rows to their output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from mlxgen.cancellation import CancelToken
from mlxgen.errors import ModelLoadError, UnsupportedError
from mlxgen_vision import checkpoint
from mlxgen_vision.checkpoint import Weights
from mlxgen_vision.mrope import MultiAxisRope

# Prefixes in every published layout. The bare "model." is the language model's in the layout of transformers 4 up to
# 4.51 (and of Qwen2-VL and Qwen2.5-VL today), where the tower is "visual.".
_TEXT_PREFIXES: Final = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.": "model.",
    "lm_head.": "lm_head.",
}
_TOWER_PREFIXES: Final = {"model.visual.": "", "visual.": "", "vision_tower.": ""}

_REQUIRED: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps", "vocab_size")

# Weights with no counterpart: rotary tables old versions saved, and the multi-token-prediction head of Qwen3.5.
_IGNORED: Final = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "mtp.")


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """What a family's configs leave out."""

    theta: float
    sections: tuple[int, int, int]
    interleaved: bool
    partial: float = 1.0


@dataclass(frozen=True, slots=True)
class TextConfig:
    """A text config in mlx-lm's terms: `arguments` for its `ModelArgs`, and what its rotary embedding lacks."""

    arguments: dict[str, Any]
    rope: dict[str, Any]
    sections: tuple[int, ...]
    interleaved: bool
    rotary_dims: int

    @classmethod
    def of(cls, config: Mapping[str, Any], defaults: RopeDefaults) -> TextConfig:
        """From a whole config.json: nested or flat, with `rope_parameters` or with `rope_theta` and `rope_scaling`.

        Raises `ModelLoadError` for a config without the model's shape, `UnsupportedError` for sliding-window layers,
        which no published Qwen vision model has switched on.
        """
        text = {**config, **(config.get("text_config") or {})}
        missing = [name for name in _REQUIRED if not text.get(name)]
        if missing:
            raise ModelLoadError(f"config.json lacks {', '.join(missing)} of the language model; download it again")
        rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
        kind = str(rope.pop("rope_type", None) or rope.pop("type", None) or "default")
        rope.pop("type", None)
        theta = float(rope.get("rope_theta") or text.get("rope_theta") or defaults.theta)
        partial = float(rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or defaults.partial)
        rope |= {"type": "default" if kind == "mrope" else kind, "rope_theta": theta, "partial_rotary_factor": partial}
        layers = int(text["num_hidden_layers"])
        if text.get("use_sliding_window") and int(text.get("max_window_layers") or 0) < layers:
            raise UnsupportedError(
                f"config.json turns on a sliding window from layer {text.get('max_window_layers')} of {layers}; "
                "set use_sliding_window to false"
            )
        head_dim = int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
        arguments = {key: value for key, value in text.items() if value is not None}
        arguments |= {
            "head_dim": head_dim,
            "rope_theta": theta,
            "rope_scaling": None,
            "rope_parameters": {"type": "default", "rope_theta": theta, "partial_rotary_factor": partial},
            "num_key_value_heads": int(text.get("num_key_value_heads") or text["num_attention_heads"]),
        }
        return cls(
            arguments=arguments,
            rope=rope,
            sections=tuple(int(size) for size in rope.get("mrope_section") or defaults.sections),
            interleaved=defaults.interleaved,
            rotary_dims=int(head_dim * partial),
        )

    def multi_axis_rope(self) -> MultiAxisRope:
        """The rotary embedding all layers share."""
        plain = initialize_rope(
            self.rotary_dims,
            base=self.rope["rope_theta"],
            traditional=False,
            scaling_config=self.rope,
            max_position_embeddings=self.arguments.get("max_position_embeddings"),
        )
        return MultiAxisRope(plain, self.sections, interleaved=self.interleaved)


def install_rope(layers: Sequence[nn.Module], rope: MultiAxisRope) -> None:
    """Give every attention layer the three-axis rotary embedding in place of mlx-lm's."""
    for layer in layers:
        attention = getattr(layer, "self_attn", None)
        if attention is not None:
            attention.rope = rope


def with_rows(hidden: mx.array, cache: Any) -> mx.array:
    """A layer's output plus the rows the forward pass put into the layer's `CacheView`, if it did."""
    rows = getattr(cache, "rows", None)
    return hidden if rows is None else hidden + rows


@dataclass(slots=True)
class SplitWeights:
    """A checkpoint's weights, sorted and under the names of the modules that take them."""

    text: Weights
    tower: Weights


def read_split(path: Path, config: Mapping[str, Any], *, cancel: CancelToken) -> SplitWeights:
    """Read a folder and tell language model and tower apart, in any published layout. Nothing may be left over."""
    checkpoint.check_quantization(config)
    weights = checkpoint.read_weights(path, cancel=cancel)
    tower = checkpoint.take(weights, _TOWER_PREFIXES)
    text = checkpoint.take(weights, _TEXT_PREFIXES)
    checkpoint.require_empty(weights, ignore=_IGNORED)
    for part in (tower, text):
        for name in [name for name in part if any(ignored in name for ignored in _IGNORED)]:
            del part[name]
    return SplitWeights(text, tower)


def tie_embeddings(config: Mapping[str, Any], text: Weights) -> bool:
    """Whether the output projection is the embedding table; if so, a projection that was saved as well is dropped.

    A checkpoint without a projection is tied whatever its config says, because the published ones disagree on where
    `tie_word_embeddings` stands.
    """
    nested = (config.get("text_config") or {}).get("tie_word_embeddings", False)
    if "lm_head.weight" in text and not config.get("tie_word_embeddings", nested):
        return False
    for name in [name for name in text if name.startswith("lm_head.")]:
        del text[name]
    return True


def stack_experts(text: Weights, *, hidden_size: int, expert_size: int) -> None:
    """Bring the expert weights of any layout into mlx-lm's `mlp.switch_mlp.{gate,up,down}_proj`, in place.

    Known are: one weight per expert; `experts.gate_up_proj` and `experts.down_proj` for all experts, each matrix
    (out, in) or (in, out), told apart by its shape; and what mlx-lm itself saves, quantised or not.
    Raises `ModelLoadError` for expert weights of another kind or shape.
    """
    for prefix in sorted({name.split(".experts.")[0] for name in text if ".mlp.experts." in name}):
        if f"{prefix}.experts.gate_up_proj" in text and f"{prefix}.experts.down_proj" in text:
            _split_fused(text, prefix, hidden_size, expert_size)
        _stack_single(text, prefix)


def _split_fused(text: Weights, prefix: str, hidden_size: int, expert_size: int) -> None:
    gate_up, down = (text.pop(f"{prefix}.experts.{name}") for name in ("gate_up_proj", "down_proj"))
    # Where the down projection is square the other one tells: they can't both be.
    told_by_down = hidden_size != expert_size
    turned = down.shape[1] == expert_size if told_by_down else gate_up.shape[1] == hidden_size
    if turned:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    shapes = tuple(gate_up.shape[1:]), tuple(down.shape[1:])
    wanted = (2 * expert_size, hidden_size), (hidden_size, expert_size)
    if shapes != wanted:
        raise ModelLoadError(
            f"the experts of {prefix!r} have matrices of {shapes}, config.json wants {wanted}; "
            "config.json and weights don't match, download both again"
        )
    text[f"{prefix}.switch_mlp.gate_proj.weight"] = gate_up[:, :expert_size]
    text[f"{prefix}.switch_mlp.up_proj.weight"] = gate_up[:, expert_size:]
    text[f"{prefix}.switch_mlp.down_proj.weight"] = down


def _stack_single(text: Weights, prefix: str) -> None:
    grouped: dict[str, dict[int, mx.array]] = {}
    for name in [name for name in text if name.startswith(f"{prefix}.experts.")]:
        number, _, rest = name[len(f"{prefix}.experts.") :].partition(".")
        if not number.isdecimal():
            raise ModelLoadError(f"{name!r} is no expert weight mlxgen knows; use another conversion of the model")
        grouped.setdefault(rest, {})[int(number)] = text.pop(name)
    for rest, arrays in grouped.items():
        text[f"{prefix}.switch_mlp.{rest}"] = mx.stack([arrays[number] for number in sorted(arrays)])
