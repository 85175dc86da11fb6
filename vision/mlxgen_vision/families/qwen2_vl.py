"""Qwen2-VL: a tower with full attention, mlx-lm's Qwen2, three-axis positions in three runs of frequencies.

Followed where transformers 5.24 differs from what the published models were trained with:

- Text after a video continues at the largest position so far plus one, on whichever axis that is. transformers 5.24
  ignores the time axis there (PR #43972). Source: Qwen's own fine-tuning code, QwenLM/Qwen3-VL,
  `qwen-vl-finetune/qwenvl/data/rope2d.py`, `get_rope_index_2`; transformers 4.57 does the same.
- Pictures are resampled horizontally first (see `image.resize`), which Pillow 13 no longer does.
- Videos are sampled and sized as Qwen's `qwen-vl-utils` does it (see `processors.qwen`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mlx_lm.models import qwen2

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen_vision import checkpoint
from mlxgen_vision.families.qwen_language import RopeDefaults, TextConfig, install_rope, read_split, tie_embeddings
from mlxgen_vision.families.qwen_model import QwenParts, QwenVisionModel
from mlxgen_vision.processors.qwen import QwenProcessor
from mlxgen_vision.support import VIDEO_CASES, FamilySupport, Parity
from mlxgen_vision.towers.qwen2_vl import Qwen2VLTower, Qwen2VLVisionConfig

ROPE: Final = RopeDefaults(theta=1_000_000.0, sections=(16, 24, 24), interleaved=False)


@dataclass(frozen=True, slots=True)
class Qwen2VLFamily:
    name: str = "qwen2_vl"
    model_types: tuple[str, ...] = ("qwen2_vl",)
    support = FamilySupport(
        models="Qwen2-VL",
        prepares="one picture or one frame",
        encodes="a few blocks of the tower, for one picture or two frames",
        video=True,
        parity=(Parity("qwen2_vl", VIDEO_CASES),),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> QwenVisionModel:
        vision = Qwen2VLVisionConfig.from_dict(config.get("vision_config") or {})
        processor = QwenProcessor.read(
            path, "frame", patch=vision.patch_size, merge=vision.merge_size, temporal=vision.temporal_patch_size
        )
        text = TextConfig.of(config, ROPE)
        weights = read_split(path, config, cancel=cancel)
        tied = tie_embeddings(config, weights.text)
        language = qwen2.Model(qwen2.ModelArgs.from_dict(text.arguments | {"tie_word_embeddings": tied}))
        rope = text.multi_axis_rope()
        install_rope(language.layers, rope)
        checkpoint.fill(language, weights.text, what="the language model", cancel=cancel)
        tower = Qwen2VLTower(vision)
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
            )
        )


FAMILY = Qwen2VLFamily()
