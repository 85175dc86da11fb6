"""Vision families, found through the entry-point group `mlxgen.families`."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mlxgen.inputs import VisionFamily

_log = logging.getLogger(__name__)

GROUP: Final = "mlxgen.families"
_OWN_DISTRIBUTION: Final = "mlxgen"


@dataclass(frozen=True, slots=True)
class InstalledFamily:
    """A family that could be imported, the package it came with, and the model types it says it loads.

    `fallback` families (those with a true attribute of that name) get what no other family claims.
    """

    family: VisionFamily
    package: str
    model_types: tuple[str, ...]
    fallback: bool


@functools.cache
def installed_families() -> tuple[InstalledFamily, ...]:
    """All families of the entry-point group: mlxgen's own, then others by package and name, fallbacks last.

    A family that can't be imported is left out with a logged warning: somebody else's broken package must not keep
    text models from loading.
    """
    found: list[InstalledFamily] = []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=_rank):
        try:
            family = entry.load()
            if isinstance(family, type) or not isinstance(family, VisionFamily):
                raise TypeError(f"{entry.value} is no VisionFamily object (it needs name, model_types and load)")
            fallback = bool(getattr(family, "fallback", False))
            found.append(InstalledFamily(family, _owner(entry), tuple(family.model_types), fallback))
        except Exception as error:
            _log.warning(
                "vision family %r (%s) is left out: %s: %s", entry.name, _owner(entry), type(error).__name__, error
            )
    return tuple(sorted(found, key=lambda installed: installed.fallback))


@functools.cache
def vision_families() -> Mapping[str, VisionFamily]:
    """The installed vision families by the `model_type` each one loads. Looked up once per process, at the first call.

    Where two claim one `model_type`, mlxgen's own wins, then the first by name, and the log says so; a fallback family
    gets only what is left.
    """
    chosen: dict[str, VisionFamily] = {}
    for installed in installed_families():
        for model_type in installed.model_types:
            if model_type not in chosen:
                chosen[model_type] = installed.family
            elif not installed.fallback:
                _log.warning(
                    "vision family %r (%s) also claims model_type %r; using %r",
                    installed.family.name,
                    installed.package,
                    model_type,
                    chosen[model_type].name,
                )
    return chosen


def _owner(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown package"


def _rank(entry: importlib.metadata.EntryPoint) -> tuple[bool, str, str]:
    owner = _owner(entry)
    return owner != _OWN_DISTRIBUTION, owner, entry.name


# Modules of mlx_lm.models that hold parts, not models.
_NOT_MODELS: Final = frozenset(
    (
        *("activations", "base", "bitlinear_layers", "cache", "gated_delta"),
        *("mla", "pipeline", "rope_utils", "ssm", "switch_layers"),
    )
)


@functools.cache
def text_model_types() -> frozenset[str]:
    """Every `model_type` the installed mlx-lm builds."""
    import mlx_lm.models
    from mlx_lm.utils import MODEL_REMAPPING

    modules = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    return frozenset((modules - _NOT_MODELS) | set(MODEL_REMAPPING))
