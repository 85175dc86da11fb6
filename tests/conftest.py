"""For all tests: prompts are prefilled in full wherever a test doesn't ask for a prefix cache.

Many tests count forward passes of fresh sessions on a model object they share.
"""

from __future__ import annotations

import pytest

import mlxgen.prefixcache.options


@pytest.fixture(autouse=True)
def no_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose prefix cache isn't configured keep nothing; nor do the commands that tests start."""
    monkeypatch.setattr(mlxgen.prefixcache.options, "default_memory_bytes", lambda: 0)
    monkeypatch.setenv("MLXGEN_PREFIX_CACHE_BUDGET", "0")
