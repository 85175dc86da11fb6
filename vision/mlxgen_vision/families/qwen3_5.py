"""Qwen3.5, dense and mixture of experts: Qwen3-VL's tower without deepstack, a language model with recurrent layers.

Three of four layers are gated delta nets, whose state has no positions; the others rotate a quarter of their head by
interleaved three-axis positions. Videos are told as in Qwen3-VL: time stamps as text, each temporal patch between a
start and an end of its own, and no second pair around them all. That last point is inferred from Qwen3-VL, whose
processor class Qwen3.5 uses (see `qwen3_vl`); transformers 5.10 and later keep the outer pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mlx_lm.models import qwen3_5

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen_vision import checkpoint
from mlxgen_vision.families.qwen_language import (
    RopeDefaults,
    TextConfig,
    install_rope,
    read_split,
    stack_experts,
    tie_embeddings,
)
from mlxgen_vision.families.qwen_model import QwenParts, QwenVisionModel
from mlxgen_vision.processors.qwen import QwenProcessor
from mlxgen_vision.support import VIDEO_CASES, FamilySupport, Parity
from mlxgen_vision.towers.qwen3_vl import Qwen3VLTower, Qwen3VLVisionConfig

ROPE: Final = RopeDefaults(theta=10_000_000.0, sections=(11, 11, 10), interleaved=True, partial=0.25)


@dataclass(frozen=True, slots=True)
class Qwen35Family:
    name: str = "qwen3_5"
    model_types: tuple[str, ...] = ("qwen3_5", "qwen3_5_moe")
    support = FamilySupport(
        models="Qwen3.5, dense and mixture of experts",
        prepares="one picture or one frame",
        encodes="a few blocks of the tower, for one picture or two frames",
        video=True,
        parity=(Parity("qwen3_5", VIDEO_CASES),),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> QwenVisionModel:
        vision = Qwen3VLVisionConfig.from_dict(config.get("vision_config") or {})
        processor = QwenProcessor.read(
            path, "clip", patch=vision.patch_size, merge=vision.merge_size, temporal=vision.temporal_patch_size
        )
        text = TextConfig.of(config, ROPE)
        weights = read_split(path, config, cancel=cancel)
        tied = tie_embeddings(config, weights.text)
        args = qwen3_5.TextModelArgs.from_dict(text.arguments | {"tie_word_embeddings": tied})
        language = qwen3_5.TextModel(args)
        rope = text.multi_axis_rope()
        install_rope(language.layers, rope)
        if args.num_experts:
            stack_experts(weights.text, hidden_size=args.hidden_size, expert_size=args.moe_intermediate_size)
        # mlx-lm adds one to the norms and turns the convolutions of checkpoints that it hasn't converted itself.
        checkpoint.fill(language, language.sanitize(weights.text), what="the language model", cancel=cancel)
        tower = Qwen3VLTower(vision)
        checkpoint.fill(tower, tower.adapt(weights.tower), what="the vision tower", cancel=cancel)
        return QwenVisionModel(
            QwenParts(
                family=self.name,
                language=language,
                rope=rope,
                tower=tower,
                processor=processor,
                image_token=int(config.get("image_token_id", 248056)),
                video_token=int(config.get("video_token_id", 248057)),
                num_deepstack=len(vision.deepstack),
                frames_apart=True,
            )
        )


FAMILY = Qwen35Family()
