"""The family of docs/adding-a-family.md, installed as a package of somebody else's, does all that mlxgen's own do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import write_files
from PIL import Image
from safetensors.numpy import load_file, save_file
from tiny import SPECIAL_TOKENS, make

pytestmark = pytest.mark.installed

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<|image_pad|>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed into it."""
    source, target = tmp_path_factory.mktemp("mosaic-source"), tmp_path_factory.mktemp("mosaic-target")
    write_files("docs/adding-a-family.md", source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "--no-index", "--target", str(target), str(source)],
        check=True,
        cwd=target,
        timeout=120,
    )
    return target


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny `mosaic` checkpoint: the tests' llama, and a matrix from colours to rows."""
    folder = make("llama", tmp_path_factory.mktemp("mosaic-model"))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    top = {key: config[key] for key in ("eos_token_id", "vocab_size")}
    top |= {"model_type": "mosaic", "text_config": config, "image_token_id": SPECIAL_TOKENS.index("<|image_pad|>")}
    (folder / "config.json").write_text(json.dumps(top))
    weights = load_file(folder / "model.safetensors")
    generator = np.random.default_rng(7)
    weights["vision.colours"] = generator.normal(0, 1, (3, config["hidden_size"])).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(1)
    paths = [folder / f"{name}.png" for name in ("a", "b")]
    for path in paths:
        Image.fromarray(generator.integers(0, 256, (24, 32, 3), np.uint8)).save(path)
    return paths


class Command:
    """mlxgen in a process of its own, with the third-party package on its path and nothing else of the clone."""

    def __init__(self, target: Path, cwd: Path) -> None:
        self.cwd = cwd
        self.environment = {**os.environ, "PYTHONPATH": str(target), "MLXGEN_CACHE": str(cwd / "cache")}

    def events(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "mlxgen", *arguments, "--json"],
            env=self.environment,
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def command(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(target, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def whole(command: Command, checkpoint: Path, pictures: list[Path]) -> list[dict[str, Any]]:
    """The events of a run without a stop."""
    return command.events(*generate(checkpoint, "whole.mlxgen", pictures))


def generate(checkpoint: Path, snapshot: str, pictures: list[Path]) -> list[str]:
    flags = ["generate", "--model", str(checkpoint), "--snapshot", snapshot, "--ignore-eos", "--max-tokens", "12"]
    return [*flags, "--prompt", "What colours?", "--image", *map(str, pictures)]


def ids(events: list[dict[str, Any]]) -> list[int]:
    return [event["id"] for event in events if event["event"] == "token"]


def usage(events: list[dict[str, Any]]) -> dict[str, Any]:
    return next(event for event in events if event["event"] == "finished")["usage"]


def test_found_through_its_entry_point_and_sees_the_pictures(
    command: Command, checkpoint: Path, pictures: list[Path], whole: list[dict[str, Any]]
) -> None:
    swapped = command.events(*generate(checkpoint, "swapped.mlxgen", pictures[::-1]))
    assert len(ids(whole)) == len(ids(swapped)) == 12
    assert ids(whole) != ids(swapped)
    assert usage(whole)["images_prepared"] == usage(whole)["images_encoded"] == 2


def test_prepared_then_resumed_without_the_files(
    command: Command, checkpoint: Path, pictures: list[Path], whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    copies = [tmp_path / path.name for path in pictures]
    for copy, path in zip(copies, pictures, strict=True):
        copy.write_bytes(path.read_bytes())
    command.events("prepare", *generate(checkpoint, "prepared.mlxgen", copies)[1:])
    for copy in copies:
        copy.unlink()
    resumed = command.events("resume", "prepared.mlxgen")
    assert (usage(resumed)["images_prepared"], usage(resumed)["images_encoded"]) == (0, 0)
    assert ids(resumed) == ids(whole)


def test_refuses_what_it_does_not_take(command: Command, checkpoint: Path, pictures: list[Path]) -> None:
    arguments = generate(checkpoint, "video.mlxgen", [])
    folder = str(pictures[0].parent)
    events = command.events(*arguments[: arguments.index("--image")], "--video", folder, code=1)
    assert events[-1]["event"] == "error"
    assert "mosaic takes pictures only" in events[-1]["message"]
