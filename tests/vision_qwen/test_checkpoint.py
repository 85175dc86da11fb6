"""Weights: what is read, what is refused, in one line each."""

from __future__ import annotations

import json
import struct

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlxgen_vision import checkpoint
from mlxgen_vision.checkpoint import fill, patch_matrix, read_header, read_weights, require_empty, take, weight_files
from mlxgen_vision.families.qwen_language import tie_embeddings
from parity_kit import (
    build_input,
    greedy,
    kit,
    load_case,
    load_tokenizer,
    needs_kit,
)
from safetensors.numpy import load_file, save_file
from vision_qwen import tiny_qwen
from vision_qwen.conftest import family

from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import ModelLoadError, UnsupportedError


def file(path, header, data=b"\0" * 16):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(shape=(2, 2), offsets=(0, 16), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_sound_header_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(
        {"b": np.zeros((2, 3), np.float32), "a": np.ones(4, np.uint8), "empty": np.zeros((0, 5), np.float32)}, path
    )
    header = read_header(path)
    assert header["b"].shape == (2, 3)
    assert header["a"].dtype == "U8"
    assert header["empty"].start == header["empty"].end


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry((2**32, 2**32))},
        {"a": entry((2**31, 0), (0, 0)), "b": entry()},
        {"a": entry((3, 2))},
        {"a": entry((-2, -2))},
        {"a": entry((2, True))},
        {"a": entry((2, 2.0))},
        {"a": entry((2,), (0, 8)), "b": entry((2,), (0, 8))},  # overlap, and bytes left over
        {"a": entry((2,), (0, 8))},  # bytes left over
        {"a": entry((1,), (0, 4)), "b": entry((2,), (8, 16))},  # gap
        {"a": entry((2, 2), (16, 0))},
        {"a": entry((2, 2), (0, 16, 16))},
        {"a": {"dtype": "F32", "shape": [2, 2]}},
        {"a": [1]},
        b'{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "a": 1}',
        b"[1, 2]",
        b"{",
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_an_unsound_header_is_refused_before_mlx_sees_it(tmp_path, header):
    with pytest.raises(ModelLoadError, match=r"^/\S+ is not a sound safetensors file: .*; download it again$"):
        read_header(file(tmp_path / "model.safetensors", header))


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((8, 8), np.float32)}, path)
    whole = path.read_bytes()
    for length in (0, 7, 9, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError):
            read_header(path)


def test_a_type_mlx_reads_as_something_else_is_refused(tmp_path):
    path = file(tmp_path / "model.safetensors", {"a": entry((16,), dtype="F8_E4M3")})
    with pytest.raises(UnsupportedError, match="F8_E4M3"):
        read_header(path)


def test_a_folder_without_weights_says_what_it_has(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no model\*.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"pytorch_model.bin.*convert"):
        weight_files(tmp_path)


def test_a_download_that_was_stopped_is_named(tmp_path):
    save_file({"a": np.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002.safetensors; finish the download"):
        weight_files(tmp_path)


def test_a_weight_in_two_files_is_refused(tmp_path):
    for number in (1, 2):
        save_file({"a": np.zeros(1, np.float32)}, tmp_path / f"model-{number}.safetensors")
    with pytest.raises(ModelLoadError, match="'a', which another weight file holds too"):
        read_weights(tmp_path)


def test_weights_are_taken_by_the_longest_prefix_and_nothing_is_left():
    array = mx.zeros(1)
    weights = {"model.a": array, "model.visual.b": array, "mtp.c": array}
    assert set(take(weights, {"model.visual.": ""})) == {"b"}
    assert set(take(weights, {"model.": "m.", "model.x.": "x."})) == {"m.a"}
    with pytest.raises(ModelLoadError, match=r"mtp\.c"):
        require_empty(weights)
    require_empty(weights, ignore=("mtp.",))
    with pytest.raises(ModelLoadError, match="two weights"):
        take({"x.a": array, "y.a": array}, {"x.": "", "y.": ""})


def test_a_patch_convolution_is_the_same_matrix_in_either_layout():
    first = mx.random.normal((5, 3, 2, 4, 4), key=mx.random.key(0))
    matrix = patch_matrix(first, channels=3, kernel=(2, 4, 4))
    assert mx.array_equal(matrix, first.reshape(5, -1))
    assert mx.array_equal(patch_matrix(mx.moveaxis(first, 1, -1), channels=3, kernel=(2, 4, 4)), matrix)
    assert mx.array_equal(patch_matrix(matrix, channels=3, kernel=(2, 4, 4)), matrix)
    with pytest.raises(ModelLoadError, match=r"\(5, 3, 2, 4, 4\)"):
        patch_matrix(first, channels=3, kernel=(2, 4, 5))


def test_a_module_gets_exactly_its_weights():
    def weights():
        return {"weight": mx.ones((3, 2)), "bias": mx.zeros(3)}

    module = nn.Linear(2, 3)
    fill(module, weights(), what="it")
    assert mx.array_equal(module.weight, mx.ones((3, 2)))
    assert not module.training
    for wrong, message in (
        ({"weight": mx.ones((3, 2))}, "it lacks 1 weights, first 'bias'"),
        (weights() | {"extra": mx.zeros(1)}, "has 1 that don't belong, first 'extra'"),
        (weights() | {"bias": mx.zeros(4)}, r"'bias' has shape \(4,\), config.json wants \(3,\)"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            fill(nn.Linear(2, 3), wrong, what="it")


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (4, 64), (8, 128)])
def test_quantisation_follows_from_the_arrays(bits, group_size):
    table = mx.random.normal((6, 128), key=mx.random.key(0))
    packed, scales, biases = mx.quantize(table, group_size=group_size, bits=bits)
    for layer in (nn.Linear(128, 6, bias=False), nn.Embedding(6, 128)):
        holder = nn.Module()
        holder.layer = layer
        fill(holder, {"layer.weight": packed, "layer.scales": scales, "layer.biases": biases}, what="it")
        assert (holder.layer.bits, holder.layer.group_size) == (bits, group_size)


def test_foreign_quantisation_is_refused(tmp_path):
    config = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    with pytest.raises(UnsupportedError, match=r"'awq'.*MLX conversion"):
        checkpoint.check_quantization(config)
    checkpoint.check_quantization({"quantization": {"bits": 8}, "quantization_config": {"bits": 8, "mode": "affine"}})


def test_loading_stops_between_reads(monkeypatch):
    monkeypatch.setattr(checkpoint, "_EVAL_BYTES", 10)
    read: list[int] = []
    real = mx.eval
    cancel = CancelToken()

    def counted(*arrays):
        read.append(1)
        real(*arrays)
        if len(read) == 2:
            cancel.cancel()

    monkeypatch.setattr(checkpoint.mx, "eval", counted)
    with pytest.raises(Cancelled):
        fill(nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(6)]), _six(), what="it", cancel=cancel)
    assert len(read) == 2


def _six():
    return {f"layers.{number}.weight": mx.ones((2, 2)) for number in range(6)}


@pytest.mark.parametrize(
    ("config", "saved", "tied"),
    [
        ({"tie_word_embeddings": False}, True, False),
        ({"tie_word_embeddings": True}, True, True),
        ({"text_config": {"tie_word_embeddings": True}}, True, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True, False),
        ({}, True, False),
        ({"tie_word_embeddings": False}, False, True),
    ],
)
def test_the_output_projection_is_tied_where_config_or_weights_say_so(config, saved, tied):
    text = {"model.norm.weight": mx.zeros(1)} | ({"lm_head.weight": mx.zeros(1)} if saved else {})
    assert tie_embeddings(config, text) is tied
    assert ("lm_head.weight" in text) is not tied


def test_damaged_folders_of_a_family_are_named(tmp_path):
    path = tiny_qwen.write(tmp_path / "whole", "qwen3_vl_moe", "mlx")
    config = json.loads((path / "config.json").read_text())
    loader = family("qwen3_vl")
    weights = load_file(path / "model.safetensors")
    for change, message in (
        ({"vision_tower.unknown.weight": np.zeros(1, np.float32)}, "the vision tower has 1 that don't belong"),
        ({"audio_tower.weight": np.zeros(1, np.float32)}, "have no place in this model, first 'audio_tower.weight'"),
        ({"vision_tower.pos_embed.weight": None}, "the vision tower lacks 1 weights, first 'pos_embed.weight'"),
        ({"language_model.model.norm.weight": np.zeros(7, np.float32)}, "the language model: 'model.norm.weight'"),
    ):
        changed = {name: value for name, value in (weights | change).items() if value is not None}
        save_file(changed, path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=message):
            loader.load(path, config)
    text = {key: value for key, value in config["text_config"].items() if key != "hidden_size"}
    with pytest.raises(ModelLoadError, match="lacks hidden_size"):
        loader.load(path, config | {"text_config": text})


@needs_kit[0]
@needs_kit[1]
@pytest.mark.parametrize("name", ["text", "img2", "vid1"])
@pytest.mark.parametrize("family_name", ["qwen2_5_vl", "qwen3_vl"])
def test_an_8_bit_checkpoint_says_what_its_dequantised_weights_say(load, tmp_path, family_name, name):
    packed = load(family_name, "mlx-8bit")
    assert isinstance(packed.language.model.embed_tokens, nn.QuantizedEmbedding)
    source = kit() / family_name / "mlx-8bit"
    arrays = mx.load(str(source / "model.safetensors"))
    for name_of in [key for key in arrays if key.endswith(".scales")]:
        stem = name_of.removesuffix(".scales")
        parts = [arrays.pop(f"{stem}.{part}") for part in ("weight", "scales", "biases")]
        arrays[f"{stem}.weight"] = mx.dequantize(*parts, group_size=32, bits=8)
    for path in source.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors.index.json").unlink()
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    plain = family(family_name).load(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    case = load_case(family_name, name)
    tokenizer = load_tokenizer(family_name, "mlx-8bit")
    runs = [greedy(model, build_input(model, tokenizer, case)) for model in (packed, plain)]
    assert np.abs(runs[0].last_logits - runs[1].last_logits).max() <= 1e-4
    assert runs[0].tokens == runs[1].tokens
