"""Qwen3-VL, dense and mixture of experts: deepstack, interleaved three-axis positions, time stamps as text.

A video is told frame by frame (temporal patch by temporal patch): `<0.2 seconds>`, then its tokens between a start and
an end of their own. Each temporal patch starts a new block of positions; time is in the text, not on the time axis.
Hidden states of inner tower blocks are added to the first layers' output in the language model, at the rows of the
picture (DeepStack); there mlx-lm's layers are extended by `with_rows`, the rows come with the cache view of the call.

Followed where transformers 5.24 differs from what the published models were trained with:

- No second pair of start and end around all frames of a video: the template's own pair is replaced together with the
  placeholder. transformers 5.10 and later leave it standing. Source: the processor released with Qwen3-VL
  (transformers 4.57), and the layout in Qwen's own `qwen-vl-finetune/qwenvl/data/rope2d.py`
  (`<t1> <vision_start> <frame1> <vision_end> <t2> …`); see also vllm-project/vllm #46817.
- A video of one frame is taken (the frame is repeated, as the last of any odd number is); transformers raises.
- Pictures are resampled horizontally first (see `image.resize`); a video's frames get at most 768 tokens each, as in
  Qwen's `qwen-vl-utils` (see `processors.qwen`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3, qwen3_moe

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen_vision import checkpoint
from mlxgen_vision.checkpoint import Weights
from mlxgen_vision.families.qwen_language import (
    RopeDefaults,
    TextConfig,
    install_rope,
    read_split,
    stack_experts,
    tie_embeddings,
    with_rows,
)
from mlxgen_vision.families.qwen_model import QwenParts, QwenVisionModel
from mlxgen_vision.processors.qwen import QwenProcessor
from mlxgen_vision.support import VIDEO_CASES, FamilySupport, Parity
from mlxgen_vision.towers.qwen3_vl import Qwen3VLTower, Qwen3VLVisionConfig

ROPE: Final = RopeDefaults(theta=5_000_000.0, sections=(24, 20, 20), interleaved=True)


class DeepstackBlock(qwen3.TransformerBlock):  # type: ignore[misc]
    """mlx-lm's layer, which adds the call's rows to its output."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return with_rows(super().__call__(x, mask, cache), cache)


class DeepstackMoeBlock(qwen3_moe.Qwen3MoeDecoderLayer):  # type: ignore[misc]
    """The same for the mixture of experts."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return with_rows(super().__call__(x, mask, cache), cache)


def build_dense(text: TextConfig, num_deepstack: int, *, tied: bool) -> nn.Module:
    """mlx-lm's Qwen3 with the first layers extended."""
    args = qwen3.ModelArgs.from_dict(text.arguments | {"tie_word_embeddings": tied})
    language = qwen3.Model(args)
    language.model.layers[:num_deepstack] = [DeepstackBlock(args) for _ in range(num_deepstack)]
    return language


def build_moe(text: TextConfig, num_deepstack: int, weights: Weights, *, tied: bool) -> nn.Module:
    """mlx-lm's Qwen3 mixture of experts with the first layers extended; `weights` are brought into its layout."""
    defaults = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
    args = qwen3_moe.ModelArgs.from_dict(defaults | text.arguments | {"tie_word_embeddings": tied})
    language = qwen3_moe.Model(args)
    language.model.layers[:num_deepstack] = [DeepstackMoeBlock(args, index) for index in range(num_deepstack)]
    stack_experts(weights, hidden_size=args.hidden_size, expert_size=args.moe_intermediate_size)
    return language


@dataclass(frozen=True, slots=True)
class Qwen3VLFamily:
    name: str = "qwen3_vl"
    model_types: tuple[str, ...] = ("qwen3_vl", "qwen3_vl_moe")
    support = FamilySupport(
        models="Qwen3-VL, dense and mixture of experts",
        prepares="one picture or one frame",
        encodes="a few blocks of the tower, for one picture or two frames",
        video=True,
        parity=(Parity("qwen3_vl", VIDEO_CASES, quantized=("mlx-8bit",)),),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> QwenVisionModel:
        vision = Qwen3VLVisionConfig.from_dict(config.get("vision_config") or {})
        processor = QwenProcessor.read(
            path, "clip", patch=vision.patch_size, merge=vision.merge_size, temporal=vision.temporal_patch_size
        )
        text = TextConfig.of(config, ROPE)
        num_deepstack = len(vision.deepstack)
        if num_deepstack > text.arguments["num_hidden_layers"]:
            raise UnsupportedError(
                f"config.json has {num_deepstack} deepstack levels for {text.arguments['num_hidden_layers']} layers; "
                "use the config published with the model"
            )
        weights = read_split(path, config, cancel=cancel)
        tied = tie_embeddings(config, weights.text)
        if "num_experts" in text.arguments:
            language = build_moe(text, num_deepstack, weights.text, tied=tied)
        else:
            language = build_dense(text, num_deepstack, tied=tied)
        rope = text.multi_axis_rope()
        install_rope(language.layers, rope)
        checkpoint.fill(language, weights.text, what="the language model", cancel=cancel)
        tower = Qwen3VLTower(vision)
        checkpoint.fill(tower, tower.adapt(weights.tower), what="the vision tower", cancel=cancel)
        return QwenVisionModel(
            QwenParts(
                family=self.name,
                language=language,
                rope=rope,
                tower=tower,
                processor=processor,
                image_token=int(config.get("image_token_id", 151655)),
                video_token=int(config.get("video_token_id", 151656)),
                num_deepstack=num_deepstack,
                frames_apart=True,
            )
        )


FAMILY = Qwen3VLFamily()
