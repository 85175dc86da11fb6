"""What a user does, in processes of their own and away from the source tree: the command, a stop, a resume, a family
found through its entry point. Runs from an installed wheel too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from PIL import Image
from vision_harness import tiny_vlm

pytestmark = pytest.mark.installed

MLXGEN = str(Path(sys.executable).with_name("mlxgen"))


def run(folder: Path, *arguments: str, stop_after: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and events of one command; `stop_after` so many tokens it gets a Ctrl-C."""
    environment = {**os.environ, "MLXGEN_CACHE": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        [MLXGEN, *arguments, "--json"], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    events: list[dict[str, Any]] = []
    for line in process.stdout:
        events.append(json.loads(line))
        if stop_after is not None and len(tokens(events)) == stop_after and events[-1]["event"] == "token":
            process.send_signal(signal.SIGINT)
    errors = process.stderr.read().decode()
    code = process.wait(timeout=120)
    assert code in (0, 130), errors
    return code, events


def tokens(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "token"]


def finished(events: list[dict[str, Any]]) -> dict[str, Any]:
    return next(event for event in events if event["event"] == "finished")


def test_interrupted_and_resumed_by_the_installed_command(tmp_path: Path) -> None:
    common = ["generate", "--model", str(tiny.folder("llama")), "--prompt", "hello there", "--ignore-eos"]
    common += ["--temp", "1", "--seed", "3", "--max-tokens", "600"]
    code, first = run(tmp_path, *common, "--snapshot", "run.mlxgen", stop_after=5)
    assert code == 130
    assert finished(first)["cancel_reason"] == "interrupt"
    code, second = run(tmp_path, "resume", "run.mlxgen")
    assert code == 0
    _, whole = run(tmp_path, *common, "--snapshot", "whole.mlxgen")
    assert [event["id"] for event in tokens(first) + tokens(second)] == [event["id"] for event in tokens(whole)]
    assert finished(second)["text"] == finished(whole)["text"]
    assert finished(second)["usage"]["generated_tokens"] == 600 - len(tokens(first))


def test_a_vision_family_through_its_entry_point(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    model = str(tiny_vlm.folder("qwen3_vl"))
    common = ["--model", model, "--image", "a.png", "--prompt", "What is it?", "--max-tokens", "6", "--ignore-eos"]
    _, whole = run(tmp_path, "generate", *common, "--snapshot", "whole.mlxgen")
    assert finished(whole)["usage"]["images_encoded"] == 1
    run(tmp_path, "prepare", *common, "--snapshot", "prepared.mlxgen")
    (tmp_path / "a.png").unlink()
    _, resumed = run(tmp_path, "resume", "prepared.mlxgen")
    assert finished(resumed)["usage"]["images_prepared"] == 0
    assert [event["id"] for event in tokens(resumed)] == [event["id"] for event in tokens(whole)]
