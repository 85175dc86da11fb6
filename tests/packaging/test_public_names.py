"""`import mlxgen`: its names, where they live, and that it costs nothing until they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import mlxgen

pytestmark = pytest.mark.installed

HEAVY = ("mlx", "mlx_lm", "transformers", "numpy", "PIL", "av", "huggingface_hub")
CORE = {"load", "Session", "TokenIterator", "CancelToken", "prepare", "resume", "stream_generate", "generate"}


def test_every_name_can_be_imported_from_where_it_is_said_to_be() -> None:
    for name in mlxgen.__all__:
        value = getattr(mlxgen, name)
        home = mlxgen._HOME[name]
        assert value is getattr(import_module(home), name), name
        assert not isinstance(value, ModuleType), f"{name} is a module: a submodule of that name shadows it"
        module = getattr(value, "__module__", home)
        assert module == home or module.startswith((f"{home}.", "typing", "types")), f"{name} is of {module}"


def test_all_is_complete_and_in_order() -> None:
    assert set(mlxgen.__all__) == set(mlxgen._HOME) == set(dir(mlxgen))
    assert len(set(mlxgen.__all__)) == len(mlxgen.__all__)
    # Constants, then classes, then functions, each by the alphabet (as the linter sorts it).
    assert mlxgen.__all__ == sorted(mlxgen.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert set(mlxgen.__all__) > CORE


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(mlxgen.__file__).read_text(encoding="utf-8"))
    declared = {
        alias.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared == mlxgen._HOME


def test_errors_and_events_are_all_public() -> None:
    from mlxgen import errors, events

    assert {name for name, value in vars(errors).items() if isinstance(value, type)} <= set(mlxgen.__all__)
    own = {name for name, value in vars(events).items() if getattr(value, "__module__", None) == events.__name__}
    assert {name for name in own if name[0].isupper()} <= set(mlxgen.__all__)


def test_no_submodule_has_the_name_of_a_function() -> None:
    modules = {path.stem for path in Path(mlxgen.__file__).parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & set(mlxgen.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mlxgen.nonsense  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import mlxgen",
        "from mlxgen import CancelToken, Finished, MlxgenError, ImagePart, cancel_on_interrupt",
        "from mlxgen.cli.main import main\ntry: main(['-h'])\nexcept SystemExit: pass",
        "from mlxgen.cli.main import main\ntry: main(['generate', '--nonsense'])\nexcept SystemExit: pass",
        "import mlxgen_vision",
    ],
)
def test_is_quick_because_nothing_heavy_is_imported(code: str, tmp_path: Path) -> None:
    check = f"{code}\nimport sys\nprint(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
