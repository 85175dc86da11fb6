"""Reading a folder's processor settings, in the form of today's transformers and in the older one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxgen.errors import ModelLoadError, UnsupportedError
from mlxgen_vision.checkpoint import read_json
from mlxgen_vision.image import Resample

Settings = dict[str, Any]

# Pillow's numbers, as `resample` in the published files.
_RESAMPLE: Final[dict[int, Resample]] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def image_settings(path: Path) -> Settings:
    """`preprocessor_config.json`, overlaid by the `image_processor` section of `processor_config.json`.

    transformers 5 saves the second only; published folders have the first; converted ones may have both, and then
    transformers 5 believes the section.
    """
    return read_json(path / "preprocessor_config.json") | _section(path, "image_processor")


def video_settings(path: Path) -> Settings:
    """`video_preprocessor_config.json`, overlaid by the `video_processor` section of `processor_config.json`."""
    return read_json(path / "video_preprocessor_config.json") | _section(path, "video_processor")


def _section(path: Path, name: str) -> Settings:
    section = read_json(path / "processor_config.json").get(name) or {}
    if not isinstance(section, dict):
        raise ModelLoadError(f"{path / 'processor_config.json'}: {name} is not an object; download the model again")
    return section


def special_word(path: Path, key: str, default: str) -> str:
    """A special token's string, as the folder's `tokenizer_config.json` names it under `key`."""
    value = read_json(path / "tokenizer_config.json").get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else default


def edge(settings: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """`{"longest_edge": n}` or plain `n` under `key`."""
    value = settings.get(key)
    if isinstance(value, Mapping):
        value = value.get("longest_edge")
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedError(
            f"the processor's {key} is {settings.get(key)!r}; a longest_edge of 1 or more pixels is needed"
        )
    return value


@dataclass(frozen=True, slots=True)
class Normalisation:
    """uint8 pixels to what a tower was trained on: `(x * rescale - mean) / std` per channel."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale: float = 1 / 255

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Normalisation:
        """As `do_rescale`, `rescale_factor`, `do_normalize`, `image_mean` and `image_std` say."""
        normalise = settings.get("do_normalize", True)
        mean = _channels(settings.get("image_mean"), cls().mean) if normalise else (0.0, 0.0, 0.0)
        std = _channels(settings.get("image_std"), cls().std) if normalise else (1.0, 1.0, 1.0)
        factor = settings.get("rescale_factor") or 1 / 255
        return cls(mean=mean, std=std, rescale=float(factor) if settings.get("do_rescale", True) else 1.0)

    def __call__(self, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """(..., 3) uint8 to float32, in one multiply-free pass as transformers' torchvision processors round it."""
        mean = np.asarray(self.mean, np.float32) / np.float32(self.rescale)
        std = np.asarray(self.std, np.float32) / np.float32(self.rescale)
        return (pixels.astype(np.float32) - mean) / std  # type: ignore[no-any-return]


def _channels(value: Any, default: tuple[float, ...]) -> tuple[float, ...]:
    if value is None:
        return default
    if isinstance(value, int | float):
        return (float(value),) * 3
    if not isinstance(value, Sequence) or len(value) != 3:
        raise UnsupportedError(f"image_mean or image_std is {value!r}; three numbers, one per channel, are needed")
    return tuple(float(item) for item in value)


def resample(settings: Mapping[str, Any], default: Resample) -> Resample:
    """The resize filter's name."""
    value = settings.get("resample")
    if value is None:
        return default
    if value not in _RESAMPLE:
        known = ", ".join(f"{number} ({name})" for number, name in _RESAMPLE.items())
        raise UnsupportedError(f"the processor's resample is {value!r}; filters known here: {known}")
    return _RESAMPLE[value]
