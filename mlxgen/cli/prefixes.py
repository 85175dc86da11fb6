"""What commands keep of prompts and pictures for later commands: where, and how much."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mlxgen.cli.cached import bytes_of_variable
from mlxgen.models import Model
from mlxgen.models.cachedir import cache_folder
from mlxgen.prefixcache import PrefixCacheOptions, prefix_cache

DEFAULT_BUDGET_BYTES: Final = 2 * 2**30
BUDGET_VARIABLE: Final = "MLXGEN_PREFIX_CACHE_BUDGET"


def prefix_folder() -> Path:
    """Where it is (it may not exist yet)."""
    return cache_folder() / "prefix"


def prefix_budget_bytes() -> int:
    """`$MLXGEN_PREFIX_CACHE_BUDGET` (bytes, or a number with K, M, G or T), else 2 GiB."""
    return bytes_of_variable(BUDGET_VARIABLE, DEFAULT_BUDGET_BYTES)


def keep_prefixes(model: Model, *, off: bool) -> None:
    """Find on the disk what earlier commands prefilled and encoded, and leave there what this one does; or neither."""
    memory_bytes, disk_bytes = (0, 0) if off else (None, prefix_budget_bytes())
    prefix_cache(model).configure(PrefixCacheOptions(memory_bytes, disk_bytes, prefix_folder()))
