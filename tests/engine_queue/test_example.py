"""`examples/ask_again.py` runs, with a tiny model in the place of its own."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import tiny

import mlxgen

EXAMPLE = Path(__file__).parents[2] / "examples" / "ask_again.py"


def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load = mlxgen.load
    monkeypatch.setattr(mlxgen, "load", lambda name: load(str(tiny.folder("llama"))), raising=False)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert out.index("[urgent]") < out.index("[length, then 30 tokens more]")
    story = out.split("\n\n")[-1]
    assert len(story) > 60
