"""PaddleOCR-VL's picture rule: Qwen2-VL's, but a side shorter than a token grows to one before anything else.

After transformers' `image_processing_paddleocr_vl.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mlxgen.request import MediaOptions
from mlxgen_vision.image import bounded_size
from mlxgen_vision.processors import settings as processor_settings
from mlxgen_vision.processors.qwen import ImageSettings, PixelBudget, QwenProcessor, Size, smart_resize

# What transformers' processor assumes where a folder's settings are silent, in pixels.
_BUDGET: Final = PixelBudget(384 * 384, 1536 * 1536)


@dataclass(frozen=True, slots=True)
class TextLineSettings(ImageSettings):
    """How pictures are resized and cut; pictures of single lines of text are this model's daily bread."""

    def size(self, original: Size, options: MediaOptions) -> Size:
        """The (height, width) a picture is resized to."""
        height, width = bounded_size(original, MediaOptions(max_image_size=options.max_image_size))
        side = self.patches.factor
        if height < side:
            height, width = side, round(width * side / height)
        if width < side:
            height, width = round(height * side / width), side
        return smart_resize((height, width), side, self.budget.limited(options))


def read_processor(path: Path, *, patch: int, merge: int) -> QwenProcessor:
    """The folder's settings. Raises `UnsupportedError` if they have other patches than the tower."""
    processor = QwenProcessor.read(path, "frame", patch=patch, merge=merge, temporal=1)
    budget = PixelBudget.of(processor_settings.image_settings(path), _BUDGET)
    return replace(processor, image=TextLineSettings(processor.image.patches, budget))
