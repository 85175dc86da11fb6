"""Where the weights stand in checkpoints with a `vision_tower`, a `multi_modal_projector` and a `language_model`.

The layout of LLaVA and of most families after it: as transformers saves them today, as they were published for
transformers 4, and as converters for MLX name them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mlxgen.cancellation import CancelToken
from mlxgen_vision import checkpoint
from mlxgen_vision.checkpoint import Weights

_TEXT: Final = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
_VISION: Final = {
    "vision_tower.vision_model.": "vision_tower.",
    "vision_tower.": "vision_tower.",
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "multi_modal_projector.": "multi_modal_projector.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


@dataclass(slots=True)
class SplitWeights:
    """A checkpoint's weights, sorted: `text` as mlx-lm's models name them, `vision` under `vision_tower.` and
    `multi_modal_projector.` (and what a family has besides)."""

    text: Weights
    vision: Weights


def read_split(
    path: Path,
    config: Mapping[str, Any],
    *,
    extra: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    cancel: CancelToken,
) -> SplitWeights:
    """Read a folder and tell language model and vision apart, in any published layout. Nothing may be left over.

    `extra` maps further prefixes of vision weights to their new ones, `ignore` are parts of names of weights that have
    no counterpart. Raises `ModelLoadError`, or `UnsupportedError` for a checkpoint that wasn't quantised by MLX.
    """
    checkpoint.check_quantization(config)
    weights = checkpoint.read_weights(path, cancel=cancel)
    vision = checkpoint.take(weights, {**_VISION, **(extra or {})})
    text = checkpoint.take(weights, _TEXT)
    checkpoint.require_empty(weights, ignore=ignore)
    for part in (vision, text):
        for name in [name for name in part if any(ignored in name for ignored in ignore)]:
            del part[name]
    return SplitWeights(text, vision)
