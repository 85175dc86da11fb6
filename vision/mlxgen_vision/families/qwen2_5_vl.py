"""Qwen2.5-VL: a tower with windowed attention, mlx-lm's Qwen2, positions in time measured in seconds.

A video's temporal patches lie `tokens_per_second` × (seconds per temporal patch) positions apart; the product is
truncated only when it has been multiplied by the patch's number (4.57 truncated the seconds first; Qwen's own code and
transformers since PR #48669 don't).

Followed where transformers 5.24 differs from what the published models were trained with:

- Text after a video continues at the largest position so far plus one, on whichever axis that is. transformers 5.24
  ignores the time axis there (PR #43972). Source: Qwen's own fine-tuning code, QwenLM/Qwen3-VL,
  `qwen-vl-finetune/qwenvl/data/rope2d.py`, `get_rope_index_25`; transformers 4.57 does the same.
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
from mlxgen_vision.towers.qwen2_5_vl import Qwen25VLTower, Qwen25VLVisionConfig

ROPE: Final = RopeDefaults(theta=1_000_000.0, sections=(16, 24, 24), interleaved=False)
_TOKENS_PER_SECOND: Final = 2  # of the published 3B, 7B, 32B and 72B models


@dataclass(frozen=True, slots=True)
class Qwen25VLFamily:
    name: str = "qwen2_5_vl"
    model_types: tuple[str, ...] = ("qwen2_5_vl",)
    support = FamilySupport(
        models="Qwen2.5-VL",
        prepares="one picture or one frame",
        encodes="a few blocks of the tower, for one picture or two frames",
        video=True,
        parity=(Parity("qwen2_5_vl", VIDEO_CASES, quantized=("mlx-8bit",)),),
    )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> QwenVisionModel:
        vision_config = config.get("vision_config") or {}
        vision = Qwen25VLVisionConfig.from_dict(vision_config)
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
        tower = Qwen25VLTower(vision)
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
                tokens_per_second=float(vision_config.get("tokens_per_second") or _TOKENS_PER_SECOND),
            )
        )


FAMILY = Qwen25VLFamily()
