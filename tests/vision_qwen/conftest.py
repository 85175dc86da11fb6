"""What several of this room's tests load once."""

from __future__ import annotations

import importlib
from functools import cache

import numpy as np
import pytest
from parity_kit import load_model

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


def family(name: str):
    return importlib.import_module(f"mlxgen_vision.families.{name}").FAMILY


@cache
def _model(name: str, layout: str):
    return load_model(family(name), name, layout)


@pytest.fixture(scope="session")
def load():
    """Load a kit checkpoint, once per test run."""
    return _model


@pytest.fixture(scope="session")
def picture():
    """Smooth noise of a given size and seed, uint8 RGB."""

    def make(height: int, width: int, seed: int = 0) -> np.ndarray:
        coarse = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
        return np.ascontiguousarray(coarse.repeat(8, axis=0).repeat(8, axis=1)[:height, :width])

    return make
