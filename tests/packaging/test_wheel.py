"""What is in the wheel. With MLXGEN_WHEEL set that one is looked at (and should be the one installed), else one is
built."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import mlxgen_vision
import pytest
from documents import ROOT

import mlxgen

pytestmark = pytest.mark.installed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    given = os.environ.get("MLXGEN_WHEEL")
    if given:
        return zipfile.ZipFile(given)
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, "--no-build-isolation", "-w", str(folder), str(ROOT)], check=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def tracked(folder: Path, prefix: str) -> set[str]:
    """Every file of a package in the source tree, but for what Python leaves there."""
    return {
        f"{prefix}/{path.relative_to(folder).as_posix()}"
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def test_both_packages_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = tracked(ROOT / "mlxgen", "mlxgen") | tracked(ROOT / "vision" / "mlxgen_vision", "mlxgen_vision")
    assert names == expected
    assert {"mlxgen/py.typed", "mlxgen_vision/py.typed"} <= names


def test_the_demonstration_model_is_in_it(wheel: zipfile.ZipFile) -> None:
    folder = ROOT / "vision" / "mlxgen_vision" / "demo_model"
    names = set(wheel.namelist())
    found = {name for name in names if name.startswith("mlxgen_vision/demo_model/")}
    assert bool(found) == folder.is_dir()
    if found:
        assert {f"mlxgen_vision/demo_model/{name}" for name in ("config.json", "model.safetensors")} <= found
        assert sum(wheel.getinfo(name).file_size for name in found) <= 10 * 10**6


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    points = ConfigParser(delimiters=("=",))
    points.optionxform = str  # type: ignore[assignment,method-assign]
    points.read_string(wheel.read(path).decode())
    assert dict(points["console_scripts"]) == {"mlxgen": "mlxgen.cli.main:main"}
    families = dict(points["mlxgen.families"])
    assert set(families) >= {"gemma3", "idefics3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "smolvlm"}
    assert set(families) >= {"internvl", "mistral3", "pixtral"}
    for target in families.values():
        assert f"{target.partition(':')[0].replace('.', '/')}.py" in wheel.namelist()


def test_metadata_and_license(wheel: zipfile.ZipFile) -> None:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(path).decode())
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == {"cpu", "cuda", "demo", "dev", "grammar", "heic", "mlx-vlm"}
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())
    body = metadata.get_payload()
    assert isinstance(body, str)
    assert body.startswith("# mlxgen")


def test_no_torch_and_no_opencv_are_asked_for(wheel: zipfile.ZipFile) -> None:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(path).decode())
    needed = {
        requirement.split(">")[0].split("=")[0].split("[")[0] for requirement in metadata.get_all("Requires-Dist")
    }
    assert not needed & {"torch", "torchvision", "opencv-python", "mlx-vlm"}


def test_these_tests_run_against_what_they_say() -> None:
    """From the wheel, if there is one; its packages must not come from the source tree then."""
    from_source = [ROOT in Path(package.__file__ or "").parents for package in (mlxgen, mlxgen_vision)]
    assert from_source in ([True, True], [False, False])
    if os.environ.get("MLXGEN_WHEEL"):
        assert from_source == [False, False]
