"""LoRA adapters: applied, without dropout, and every wrong folder explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import folder

from mlxgen.errors import ModelLoadError
from mlxgen.models import LoadOptions, Model, load
from models.adapters import write_adapter

Edit = Callable[..., None]


def load_with(adapter: Path) -> Model:
    return load(folder("llama"), options=LoadOptions(adapter_path=adapter))


def logits(model: Model) -> Any:
    return np.array(model.module(mx.array([[5, 6, 7]])))


def test_adapter_changes_the_output_and_dropout_is_off(tmp_path: Path) -> None:
    adapted = load_with(write_adapter(tmp_path / "adapter"))
    assert adapted.adapter_path == tmp_path / "adapter"
    assert not np.allclose(logits(adapted), logits(load(folder("llama"))), atol=1e-3)
    assert np.array_equal(logits(adapted), logits(adapted))


def test_equals_the_weights_merged_by_hand(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    adapter = write_adapter(tmp_path / "adapter")
    parts = load_file(adapter / "adapters.safetensors")
    model = load(folder("llama"))
    for layer in (0, 1):
        for name in ("q_proj", "v_proj"):
            linear = getattr(model.module.layers[layer].self_attn, name)
            prefix = f"model.layers.{layer}.self_attn.{name}"
            linear.weight = linear.weight + mx.array(0.5 * (parts[f"{prefix}.lora_a"] @ parts[f"{prefix}.lora_b"]).T)
    assert np.allclose(logits(load_with(adapter)), logits(model), atol=1e-3)


def test_missing_folder(tmp_path: Path) -> None:
    write_adapter(tmp_path / "my-adapter")
    with pytest.raises(ModelLoadError, match=r"adapter folder .* doesn't exist; did you mean '.*my-adapter'"):
        load_with(tmp_path / "my-adaptor")


def test_file_instead_of_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"is a file; give the folder"):
        load_with(write_adapter(tmp_path / "adapter") / "adapters.safetensors")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_missing_file(name: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    (adapter / name).unlink()
    with pytest.raises(ModelLoadError, match=rf"lacks {name}"):
        load_with(adapter)


def test_peft_adapter(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    (adapter / "adapters.safetensors").rename(adapter / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match=r"PEFT's layout; mlx-lm's is needed"):
        load_with(adapter)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"num_layers": None}, "num_layers is None"),
        ({"lora_parameters": None}, "lora_parameters is None"),
        ({"lora_parameters": {"rank": 10**9, "scale": 1.0, "dropout": 0.0}}, "rank is 1000000000"),
        ({"lora_parameters": {"rank": 8, "scale": 1.0, "dropout": 0.0}}, "doesn't fit the model.*shape"),
        ({"lora_parameters": {"rank": 4}}, "doesn't fit the model"),
    ],
)
def test_wrong_config(entries: dict[str, Any], problem: str, tmp_path: Path, edit_json: Edit) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    edit_json(adapter / "adapter_config.json", **entries)
    with pytest.raises(ModelLoadError, match=problem):
        load_with(adapter)


def test_damaged_weights(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    data = (adapter / "adapters.safetensors").read_bytes()
    (adapter / "adapters.safetensors").write_bytes(data[:-4])
    with pytest.raises(ModelLoadError, match=r"not a valid safetensors file"):
        load_with(adapter)
