"""Models: found, downloaded, checked, loaded, identified, and measured against the machine's memory."""

from mlxgen.models.cachedir import cache_folder
from mlxgen.models.families import vision_families
from mlxgen.models.fingerprint import Fingerprint
from mlxgen.models.hub import LoadProgress
from mlxgen.models.load import LoadOptions, load, supported_model_types
from mlxgen.models.memory import (
    MemoryEstimate,
    RunSize,
    available_bytes,
    check_fits,
    estimate_run,
    estimate_weights,
    wired_limit,
)
from mlxgen.models.model import Model, TextForward

__all__ = [
    "Fingerprint",
    "LoadOptions",
    "LoadProgress",
    "MemoryEstimate",
    "Model",
    "RunSize",
    "TextForward",
    "available_bytes",
    "cache_folder",
    "check_fits",
    "estimate_run",
    "estimate_weights",
    "load",
    "supported_model_types",
    "vision_families",
    "wired_limit",
]
