"""The README's examples run as they stand there, its commands parse, and what it points to exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from documents import ROOT, Block, blocks
from PIL import Image

import mlxgen
from mlxgen.cli.parser import build_parser

DOCUMENTS = ("README.md", "docs/adding-a-family.md", "docs/architecture.md", "docs/snapshot-format.md")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Tiny models under the names that the README loads; which of them were asked for."""
    from vision_harness import tiny_vlm

    folders = {
        "smollm2": lambda: tiny.folder("llama"),
        "mlx-community/Qwen2.5-VL-3B-Instruct-4bit": lambda: tiny_vlm.folder("qwen2_5_vl"),
    }
    asked: list[str] = []
    load = mlxgen.load

    def load_tiny(name: str) -> Any:
        asked.append(name)
        return load(folders[name]())

    monkeypatch.setattr(mlxgen, "load", load_tiny, raising=False)
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(3)
    for name in ("cat.jpg", "dog.jpg"):
        Image.fromarray(generator.integers(0, 256, (64, 48, 3), np.uint8)).save(name)
    return asked


def examples(note: str) -> list[Block]:
    return [block for block in blocks("README.md") if block.note == f"run: {note}"]


def run(found: list[Block]) -> dict[str, Any]:
    """Run blocks one after another in one namespace; errors show the README's own lines."""
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in found:
        exec(compile("\n" * (block.line - 1) + block.code, str(ROOT / "README.md"), "exec"), namespace)
    return namespace


def test_every_python_example_is_run() -> None:
    assert len(blocks("README.md")) > 10
    for block in blocks("README.md"):
        if block.language == "python":
            assert block.note in ("run: text", "run: pictures"), f"README.md line {block.line}"


def test_the_text_examples(stand_ins: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run(examples("text"))
    assert stand_ins == ["smollm2", "smollm2"]
    assert "cancelled " in capsys.readouterr().out
    assert Path("talk.mlxgen").is_dir()
    assert found["answer"].usage.reused_tokens > 0


def test_the_picture_example(stand_ins: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(examples("pictures"))
    assert stand_ins == ["mlx-community/Qwen2.5-VL-3B-Instruct-4bit"]
    lines = capsys.readouterr().out.split("\n")
    assert lines[:4] == ["prepare 1 of 2", "prepare 2 of 2", "encode 1 of 2", "encode 2 of 2"]
    assert "".join(lines[4:])


def commands(document: str) -> Iterator[tuple[str, list[str]]]:
    for block in blocks(document):
        if block.language == "sh":
            for line in block.code.splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["mlxgen"]:
                    yield line, words[1:]


def test_every_command_parses() -> None:
    seen = set()
    for document in DOCUMENTS:
        for line, words in commands(document):
            try:
                seen.add(build_parser().parse_args(words).command)
            except SystemExit:
                pytest.fail(f"{document}: {line}")
    assert seen == {"generate", "resume", "chat", "doctor", "prepare", "snapshots"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_pointed_to_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    here = (ROOT / document).parent
    missing = [
        target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target and not (here / target).exists()
    ]
    paths = re.findall(r"`((?:mlxgen|vision|tests|scripts|docs|\.ci)/[\w./*-]+)`", text)
    missing += [path for path in paths if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing
    assert paths or document == "docs/snapshot-format.md"


def test_exit_codes_are_those_of_the_program() -> None:
    from mlxgen.cli import exitcodes

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| exit code |") :].split("\n\n")[0]
    told = {int(number) for row in table.splitlines()[2:] for number in re.findall(r"\d+", row.split("|")[1])}
    reasons = ("interrupt", "terminate", "hangup", "deadline", "disconnect")
    known = {exitcodes.OK, exitcodes.ERROR, exitcodes.USAGE} | {exitcodes.of_cancel_reason(why) for why in reasons}
    assert told == known
