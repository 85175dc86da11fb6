"""A model whose passes are watched, and an engine for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_queue.rig import Bench

from mlxgen.engine import Engine


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def engine(bench: Bench) -> Iterator[Engine]:
    with Engine(bench.model) as engine:
        yield engine
