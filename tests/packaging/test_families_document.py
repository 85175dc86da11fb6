"""What families say of themselves is what the tests compare, and docs/families.md is what they say."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cli.commands import call
from documents import ROOT
from parity_kit import kit, layouts, needs_kit

from mlxgen.models.described import describe_families

OWN = tuple(family for family in describe_families() if family.package == "mlxgen" and not family.fallback)


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"read_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def parameters(function: Any) -> list[dict[str, Any]]:
    """Every combination of values that the function is parametrised with."""
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    choices: list[list[dict[str, Any]]] = []
    for mark in marks:
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        choices.append([dict(zip(names, row if len(names) > 1 else (row,), strict=True)) for row in mark.args[1]])
    return [{key: value for one in chosen for key, value in one.items()} for chosen in itertools.product(*choices)]


def compared_by_tests() -> dict[str, dict[str, set[str]]]:
    """Checkpoint → layout → cases, from the parametrisation of all parity tests that take a layout and a case."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in sorted((ROOT / "tests").glob("vision_*/test_parity.py")):
        only = set(re.findall(r'case_names\("(\w+)"\)', path.read_text(encoding="utf-8")))
        for _, function in inspect.getmembers(module(path), inspect.isfunction):
            for chosen in parameters(function):
                if "layout" in chosen and "name" in chosen:
                    if "family" not in chosen:
                        assert len(only) == 1, f"{path}: which family is it?"
                    family = chosen.get("family", next(iter(only), ""))
                    found.setdefault(family, {}).setdefault(chosen["layout"], set()).add(chosen["name"])
    return found


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_kit)])
def test_what_families_say_was_compared_is_what_the_parity_tests_run(mark: None) -> None:
    said = {
        one.checkpoint: {layout: set(one.cases) for layout in one.layouts} for family in OWN for one in family.parity
    }
    assert said == compared_by_tests()


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_kit)])
def test_every_checkpoint_of_the_kit_is_some_familys_in_every_layout(mark: None) -> None:
    said = {one.checkpoint: (*one.layouts, *one.quantized) for family in OWN for one in family.parity}
    folders = {path.parent.parent.name for path in kit().glob("*/hf/config.json")}
    assert said == {name: tuple(layouts(name, quantized=True)) for name in sorted(folders)}
    for family in OWN:
        for one in family.parity:
            config = (
                json.loads((kit() / one.checkpoint / "mlx" / "config.json").read_text())
                if (kit() / one.checkpoint / "mlx").is_dir()
                else json.loads((kit() / one.checkpoint / "hf" / "config.json").read_text())
            )
            assert config["model_type"] in family.model_types


def test_quantised_checkpoints_that_families_name_are_loaded_by_a_test() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("vision_*/*.py"))
    named = {one.checkpoint for family in OWN for one in family.parity if one.quantized}
    assert named
    assert "mlx-8bit" in texts
    assert all(f'"{name}"' in texts for name in named)


def test_every_family_says_what_it_is() -> None:
    for family in OWN:
        assert family.models, family.name
        assert family.prepares, family.name
        assert family.encodes, family.name
        assert family.layouts, family.name
        assert family.video is not None, family.name
        assert not family.video or "frame" in family.prepares, family.name


def test_the_document_is_what_the_families_say() -> None:
    generated = module(ROOT / "scripts" / "families_doc.py").document(describe_families())
    written = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    mark = "## Lines of code"
    remedy = "docs/families.md is stale; run python scripts/families_doc.py"
    assert written.partition(mark)[0] == generated.partition(mark)[0], remedy
    counts = [
        dict(re.findall(r"^\| (\w+) \| (\d+) \|", text.partition(mark)[2], re.M)) for text in (written, generated)
    ]
    assert counts[0].keys() == counts[1].keys(), remedy
    for name, count in counts[0].items():  # so that not every edit of a family is an edit of the document
        assert abs(int(count) - int(counts[1][name])) <= max(20, int(count) // 5), remedy


def test_the_command_says_the_same(capfdbinary: Any) -> None:
    shown = [json.loads(line) for line in call(capfdbinary, "families", "--json").out.splitlines()]
    assert [entry["name"] for entry in shown if entry["package"] == "mlxgen" and not entry["fallback"]] == [
        family.name for family in OWN
    ]
    text = call(capfdbinary, "families").out.decode()
    for family in OWN:
        assert f"{family.name}: {family.models}\n" in text
        assert f"encode: {family.encodes}\n" in text
