"""Write docs/families.md from what the families say of themselves: python scripts/families_doc.py [OUT]."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mlxgen.cli.families import compared, media
from mlxgen.models.described import Description, describe_families

ROOT: Final = Path(__file__).resolve().parent.parent
TARGET: Final = ROOT / "docs" / "families.md"
VISION: Final = ROOT / "vision" / "mlxgen_vision"
ROOMS: Final = ("families", "processors", "towers")

HEAD: Final = """\
# Vision families

<!-- Written by scripts/families_doc.py from what each family says of itself. Don't edit: `mlxgen families` says the
same, for what is installed. -->

Layouts: `hf` is what transformers 5 saves, `hub` what was published for transformers 4, `mlx` what mlx-community
publishes. Each is read with quantised weights too. A checkpoint is taken between two of the units named here; what is
done when a run stops is kept.

| family | models | `model_type` | takes | unit of prepare | unit of encode | layouts |
|---|---|---|---|---|---|---|
"""

COMPARED: Final = """
## What was compared

On tiny checkpoints with random weights, in float32: token ids identical, features and last logits of the prompt within
1e-4 of transformers 5.24 (2e-4 for Qwen3.5) with its pixels, 24 greedy tokens equal. Where transformers departs from
what a model was trained with, the training is followed; the family's file says so. `mlx-8bit` has no reference: its
tokens equal those of the same weights dequantised.

| family | checkpoint: cases and layouts |
|---|---|
"""

LINES: Final = """
## Lines of code

Of a family's own files (called like it, or used by no other family), and of others that it uses in `families/`,
`processors/` and `towers/`. Files that every family uses (opening, resizing, placeholders, weights) aren't counted.

| family | own | shared |
|---|---|---|
"""


def document(families: tuple[Description, ...]) -> str:
    """The whole file, for families that come with mlxgen."""
    own = [family for family in families if family.package == "mlxgen"]
    native = [family for family in own if not family.fallback]
    rows = [
        _row(
            family.name,
            family.models,
            ", ".join(f"`{kind}`" for kind in family.model_types),
            media(family),
            family.prepares,
            family.encodes,
            ", ".join(family.layouts),
        )
        for family in native
    ]
    checks = [
        _row(family.name, "; ".join(compared(one) for one in family.parity) or "no stored reference")
        for family in native
    ]
    notes = [f"- {family.name}: {family.note}\n" for family in native if family.note]
    others = [
        f"\n## Everything else: {family.name}\n\n{family.models}. Prepare: {family.prepares}; encode: {family.encodes}."
        f" {family.note[:1].upper()}{family.note[1:]}.\n"
        for family in own
        if family.fallback
    ]
    counts = [_row(name, str(mine), str(shared)) for name, mine, shared in lines_of_code(native)]
    return "".join([HEAD, *rows, *(["\n", *notes] if notes else []), *others, COMPARED, *checks, LINES, *counts])


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def lines_of_code(families: list[Description]) -> Iterator[tuple[str, int, int]]:
    """(family, lines of its own files, lines of other families' files that it uses)."""
    used = {family.name: _files(f"families/{family.name}") for family in families}
    for name, files in used.items():
        others = set().union(*(more for other, more in used.items() if other != name))
        own = {file for file in files if file not in others or file.partition("/")[2] == name}
        yield name, _count(own), _count(files - own)


def _files(module: str, found: frozenset[str] = frozenset()) -> set[str]:
    """The module and all it imports from the three rooms."""
    if module in found:
        return set()
    files = {module}
    for node in ast.walk(ast.parse((VISION / f"{module}.py").read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        package, _, rest = node.module.partition(".")
        if package != "mlxgen_vision" or rest.partition(".")[0] not in ROOMS:
            continue
        names = [alias.name for alias in node.names] if rest in ROOMS else [rest.partition(".")[2]]
        for name in names:
            files |= _files(f"{rest.partition('.')[0]}/{name}", found | files)
    return files


def _count(modules: set[str]) -> int:
    return sum(len((VISION / f"{module}.py").read_text(encoding="utf-8").splitlines()) for module in modules)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(document(describe_families()), encoding="utf-8")
