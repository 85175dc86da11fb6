"""A stand-in for mlx-vlm on the path, and checkpoints of its one model."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlxgen_vision.mlx_vlm_adapter import catalogue
from mlxgen_vision.mlx_vlm_adapter.family import FAMILY
from safetensors.numpy import load_file, save_file
from tiny import SPECIAL_TOKENS, make

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ IMAGE if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Writes the placeholder itself; leaves pictures out; takes strings only.
TEMPLATES = {
    "parts": TEMPLATE.replace("IMAGE", "'<|image_pad|>'"),
    "text": TEMPLATE.replace("IMAGE", "''"),
    "none": "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}",
}


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "mlx_vlm"]:
        del sys.modules[name]
    for function in (catalogue.version, catalogue.model_types, catalogue.renamed):
        function.cache_clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in instead of mlx-vlm, whether that is installed or not; and the adapter is what loads its model."""
    held = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "mlx_vlm"}
    forget()
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake"))
    monkeypatch.setattr(catalogue.importlib.metadata, "version", lambda name: "0.0.fake")
    loading = importlib.import_module("mlxgen.models.load")  # the package has a function of this name
    monkeypatch.setattr(loading, "vision_families", lambda: dict.fromkeys(FAMILY.model_types, FAMILY))
    yield
    forget()
    sys.modules.update(held)


@pytest.fixture
def no_mlx_vlm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: None)
    yield
    forget()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """checkpoint(fault=…, template=…): the tests' llama with colours and positions, as `toy-vl`."""

    def write(fault: str | None = None, template: str = "parts") -> Path:
        folder = make("llama", tmp_path / f"toy-{fault}-{template}")
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        top = {key: config[key] for key in ("eos_token_id", "vocab_size")}
        top |= {"model_type": "toy-vl", "text_config": config, "image_token_id": SPECIAL_TOKENS.index("<|image_pad|>")}
        (folder / "config.json").write_text(json.dumps(top | ({"fault": fault} if fault else {})))
        weights = load_file(folder / "model.safetensors")
        generator = np.random.default_rng(7)
        hidden = config["hidden_size"]
        weights["vision.weight"] = generator.normal(0, 1, (hidden, 3)).astype(np.float32)
        weights["position_embedding"] = generator.normal(0, 1, (512, hidden)).astype(np.float32)
        save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"chat_template": TEMPLATES[template]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return write
