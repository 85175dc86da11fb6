"""Which model types the installed mlx-vlm has a vision-language model for, without importing it (it takes seconds)."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Final

PACKAGE: Final = "mlx_vlm"
INSTALL: Final = "pip install 'mlxgen[mlx-vlm]'"


@functools.cache
def version() -> str | None:
    """The installed mlx-vlm's version; None without one."""
    if _folder() is None:
        return None
    try:
        return importlib.metadata.version("mlx-vlm")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


@functools.cache
def model_types() -> tuple[str, ...]:
    """The `model_type`s, sorted; () without mlx-vlm.

    A package of `mlx_vlm.models` counts if it has a language model and a part that sees. Whether
    the adapter can use it is known when it is loaded.
    """
    folder = _folder()
    if folder is None:
        return ()
    found = {path.name for path in (folder / "models").iterdir() if path.is_dir() and _takes_pictures(path)}
    return tuple(sorted(found | {other for other, name in renamed().items() if name in found}))


@functools.cache
def renamed() -> dict[str, str]:
    """Model types that mlx-vlm loads with the package of another name."""
    folder = _folder()
    if folder is None:
        return {}
    for node in ast.parse((folder / "utils.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["MODEL_REMAPPING"]:
            names = ast.literal_eval(node.value)
            return {str(other): str(name) for other, name in names.items()}
    return {}


def _folder() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else None


# How a package of 0.7.10 shows that it reads text and sees: the names it gives its parts, its own or another's.
_LANGUAGE: Final = re.compile(r"\bLanguageModel\b")
_VISION: Final = re.compile(r"VisionModel|vision_tower|vision_model|vision_encoder|embed_vision|\bvisual\b")


def _takes_pictures(package: Path) -> bool:
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in package.glob("*.py"))
    seen = _VISION.search(text) is not None
    return seen and _LANGUAGE.search(text) is not None and ("pixel_values" in text or "from .." in text)
