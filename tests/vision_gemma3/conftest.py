"""What several of this room's tests load once."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from mlxgen_vision.families import gemma3
from parity_kit import load_model


@cache
def model(layout: str) -> gemma3.Gemma3Model:
    loaded = load_model(gemma3.FAMILY, "gemma3", layout)
    assert isinstance(loaded, gemma3.Gemma3Model)
    return loaded


@pytest.fixture
def load():
    """Load the kit's checkpoint of a layout, once per test run."""
    return model


@pytest.fixture
def picture():
    """Noise of a given size and seed, uint8 RGB."""

    def make(height: int, width: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)

    return make
