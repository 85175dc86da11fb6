"""The reference's resize, rounding for rounding: torchvision's antialiased uint8 resampling, in NumPy.

The same filters and the same order of passes as Pillow's; only the weights are held in 16 bits instead of 22. The kit
stores no pixels for tiled pictures, so this is how tests reach the reference's pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np


def _lanczos(x: float) -> float:
    if not -3 < x < 3:
        return 0.0
    if x == 0:
        return 1.0
    return 3 * math.sin(math.pi * x) * math.sin(math.pi * x / 3) / (math.pi * x) ** 2


def _triangle(x: float) -> float:
    return max(0.0, 1 - abs(x))


def _cubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


_FILTERS: dict[str, tuple[Callable[[float], float], float]] = {
    "lanczos": (_lanczos, 3.0),
    "bicubic": (_cubic, 2.0),
    "bilinear": (_triangle, 1.0),
}


def _along_rows(rgb: np.ndarray, length: int, resample: str) -> np.ndarray:
    function, radius = _FILTERS[resample]
    old = rgb.shape[1]
    if old == length:
        return rgb
    scale = old / length
    support, inverse = (radius * scale, 1 / scale) if scale >= 1 else (radius, 1.0)
    rows = []
    for index in range(length):
        centre = scale * (index + 0.5)
        first = max(int(centre - support + 0.5), 0)
        last = min(int(centre + support + 0.5), old)
        weights = np.array([function((at - centre + 0.5) * inverse) for at in range(first, last)])
        rows.append((first, weights / weights.sum()))
    largest = max(float(weights.max()) for _, weights in rows)
    precision = 0
    while precision < 22 and int(0.5 + largest * (1 << (precision + 1))) < 1 << 15:
        precision += 1
    out = np.empty((rgb.shape[0], length, 3), np.uint8)
    for index, (first, weights) in enumerate(rows):
        whole = np.trunc(weights * (1 << precision) + np.where(weights < 0, -0.5, 0.5)).astype(np.int64)
        window = rgb[:, first : first + len(whole)].astype(np.int64)
        total = (window * whole[None, :, None]).sum(axis=1) + (1 << (precision - 1))
        out[:, index] = np.clip(total >> precision, 0, 255)
    return out


def resize(rgb: np.ndarray, size: tuple[int, int], resample: str) -> np.ndarray:
    """As `mlxgen_vision.image.resize`: uint8 (height, width, 3) to `size` = (height, width), horizontally first."""
    wide = _along_rows(rgb, size[1], resample)
    return np.ascontiguousarray(_along_rows(wide.transpose(1, 0, 2), size[0], resample).transpose(1, 0, 2))
