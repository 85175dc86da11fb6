"""The tiny vision-language model that comes with this package, for demonstration."""

from __future__ import annotations

from pathlib import Path


def demo_model_folder() -> Path:
    """The folder of `shapes-vl`, in Qwen2.5-VL's layout; its MODEL_CARD.md says what it can and can't do."""
    return Path(__file__).parent / "demo_model"
