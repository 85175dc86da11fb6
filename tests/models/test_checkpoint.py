"""Safetensors headers: what MLX would believe, and we don't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import folder

from mlxgen.errors import ModelLoadError
from mlxgen.models.checkpoint import checked_tensors, has_vision_weights, parse_header, read_header, weight_files


def entry(dtype: str = "F32", shape: Any = (2,), start: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def parse(tensors: Any, data_bytes: int = 8) -> Any:
    return parse_header(json.dumps(tensors).encode(), data_bytes, where="x.safetensors")


def test_reads_names_shapes_and_sizes() -> None:
    tensors = read_header(folder("llama") / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    assert (embedding.dtype, embedding.shape, embedding.num_bytes) == ("F32", (307, 64), 307 * 64 * 4)


def test_metadata_and_empty_tensors_are_fine() -> None:
    parsed = parse({"__metadata__": {"format": "mlx"}, "a": entry(), "empty": entry(shape=(0, 5), start=8, end=8)})
    assert set(parsed) == {"a", "empty"}


@pytest.mark.parametrize(
    ("tensors", "data_bytes", "problem"),
    [
        ({"a": entry(shape=(2**31 - 1, 2**31 - 1, 4, 2))}, 8, "takes .* bytes"),  # wraps past 64 bits
        ({"a": entry(shape=(2**40,))}, 8, "dimensions are integers from 0"),
        ({"a": entry(shape=(-2,))}, 8, "dimensions are integers from 0"),
        ({"a": entry(shape=(2.0,))}, 8, "dimensions are integers"),
        ({"a": entry(shape=(True, 2))}, 8, "dimensions are integers"),
        ({"a": entry(dtype="F33")}, 8, "dtype 'F33', which MLX can't read"),
        ({"a": entry(start=-8, end=0)}, 8, "not -8 to 0"),
        ({"a": entry(start="0")}, 8, "two integers"),
        ({"a": entry(end=12)}, 12, "takes 8 bytes"),
        ({"a": entry(), "b": entry(start=12, end=20)}, 20, "gap or overlap"),
        ({"a": entry(), "b": entry(start=4, end=12)}, 12, "gap or overlap"),
        ({"a": entry()}, 9, "followed by bytes of no tensor"),
        ({"a": entry()}, 7, "truncated"),
        ({"a": {"dtype": "F32"}}, 8, "lacks dtype, shape or data_offsets"),
        ({"a": {**entry(), "extra": 1}}, 8, "has more than these"),
        ({"a": []}, 8, "lacks dtype"),
        ([], 0, "JSON list, not an object"),
    ],
)
def test_refuses(tensors: Any, data_bytes: int, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        parse(tensors, data_bytes)


def test_refuses_a_name_that_occurs_twice() -> None:
    text = f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}'
    with pytest.raises(ModelLoadError, match="'a' occurs twice"):
        parse_header(text.encode(), 8, where="x")


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 100_000, b""])
def test_refuses_what_isnt_json(text: bytes) -> None:
    with pytest.raises(ModelLoadError, match="not JSON"):
        parse_header(text, 0, where="x")


@pytest.mark.parametrize("damage", ["empty", "short", "long header", "cut"])
def test_refuses_a_damaged_file(damage: str, tmp_path: Path) -> None:
    data = (folder("llama") / "model.safetensors").read_bytes()
    broken = {
        "empty": b"",
        "short": data[:5],
        "long header": (2**60).to_bytes(8, "little") + data[8:],
        "cut": data[:-10_000],
    }[damage]
    (tmp_path / "model.safetensors").write_bytes(broken)
    with pytest.raises(ModelLoadError, match="not a valid safetensors file"):
        read_header(tmp_path / "model.safetensors")


def test_index_that_names_missing_shards(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelLoadError, match=r"lacks 1 weight file.*model-00002-of-00002\.safetensors"):
        weight_files(tmp_path)


def test_index_that_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="not a usable index"):
        weight_files(tmp_path)


def test_other_formats_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"no weights.*found pytorch_model\.bin.*mlx_lm\.convert"):
        weight_files(tmp_path)


def test_vision_weights_are_told_from_text_weights() -> None:
    assert not has_vision_weights(checked_tensors(folder("llama")))
    assert not has_vision_weights(checked_tensors(folder("qwen3_5")))
    assert has_vision_weights(["model.visual.blocks.0.attn.qkv.weight"])
    assert has_vision_weights(["vision_tower.encoder.layers.0.mlp.fc1.weight"])
