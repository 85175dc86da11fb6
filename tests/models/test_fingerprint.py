"""Which model is it: everything that decides what a model says changes its fingerprint, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.utils
import pytest
from tiny import folder, make
from tiny import load as load_tiny

import mlxgen.models.fingerprint as fingerprint
from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import ModelLoadError
from mlxgen.models import LoadOptions, Model, cache_folder, load
from mlxgen.models.fingerprint import file_sha256, hub_blob_sha256

Copy = Callable[..., Path]


def flip_last_byte(path: Path) -> None:
    """Change one weight in place: same name, same size, same header."""
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def age(folder: Path) -> None:
    """Make files look old enough for their hashes to be remembered."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - 100, time.time() - 100))


def test_same_files_elsewhere_are_the_same_model(copy_of: Copy) -> None:
    assert load(copy_of("llama", "a")).fingerprint == load(copy_of("llama", "b")).fingerprint


def test_one_weight_changed_in_place_is_another_model(copy_of: Copy) -> None:
    path = copy_of()
    before = load(path).fingerprint
    flip_last_byte(path / "model.safetensors")
    after = load(path).fingerprint
    assert after.digest != before.digest
    assert after.differences(before) == ("weights/model.safetensors",)


def test_same_size_same_times_is_still_noticed(copy_of: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that restores mtime (rsync, tar) can't make the cache of hashes lie: ctime tells."""
    path = copy_of()
    weights = path / "model.safetensors"
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 0)
    before = load(path).fingerprint
    stamp = weights.stat()
    flip_last_byte(weights)
    os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert weights.stat().st_mtime_ns == stamp.st_mtime_ns
    assert load(path).fingerprint.digest != before.digest


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("config.json", None, "config"),
        ("tokenizer.json", None, "tokenizer"),
        ("tokenizer_config.json", None, "tokenizer"),
        ("chat_template.jinja", "{{ messages }}", "chat_template"),
        ("preprocessor_config.json", "{}", "processor"),
        ("generation_config.json", "{}", "generation_config"),
    ],
)
def test_every_part_counts_and_is_named(name: str, content: str | None, part: str, copy_of: Copy) -> None:
    path = copy_of()
    before = load(path).fingerprint
    file = path / name
    file.write_text(content if content is not None else file.read_text() + "\n")
    assert load(path).fingerprint.differences(before) == (part,)


def test_files_that_dont_matter_dont_count(copy_of: Copy) -> None:
    path = copy_of()
    before = load(path).fingerprint
    (path / "README.md").write_text("hello")
    assert load(path).fingerprint == before


def test_adapter_counts(tmp_path: Path) -> None:
    from models.adapters import write_adapter

    base = load(folder("llama")).fingerprint
    one = load(folder("llama"), options=LoadOptions(adapter_path=write_adapter(tmp_path / "1", seed=1))).fingerprint
    two = load(folder("llama"), options=LoadOptions(adapter_path=write_adapter(tmp_path / "2", seed=2))).fingerprint
    assert one.differences(base) == ("adapter",)
    assert one.differences(two) == ("adapter",)


def test_file_changed_after_loading_is_refused(copy_of: Copy) -> None:
    path = copy_of()
    model = load(path)
    flip_last_byte(path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="has changed since the model was loaded"):
        model.identify()


def test_is_computed_once(copy_of: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(copy_of())
    first = model.fingerprint
    monkeypatch.setattr(fingerprint, "file_sha256", None)
    assert model.fingerprint is first


def test_hashes_are_remembered_for_exactly_that_file(copy_of: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy_of() / "model.safetensors"
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 0)
    digest = file_sha256(path)
    (entry,) = (cache_folder() / "hashes").iterdir()
    assert json.loads(entry.read_text())["sha256"] == digest
    monkeypatch.setattr(fingerprint.hashlib, "sha256", _counted(calls := []))
    assert file_sha256(path) == digest
    assert all(call < 1000 for call in calls)  # only the entry's name was hashed
    flip_last_byte(path)
    assert file_sha256(path) != digest


def _counted(calls: list[int]) -> Callable[..., object]:
    import hashlib

    real = hashlib.sha256

    def sha256(data: bytes = b"") -> object:
        calls.append(len(data))
        return real(data)

    return sha256


def test_file_that_was_just_written_isnt_remembered(copy_of: Copy) -> None:
    """Its times may not change with the next write: file systems tick in milliseconds."""
    file = copy_of() / "config.json"
    file.write_text("{}")
    file_sha256(file)
    assert not (cache_folder() / "hashes").exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"key": 1, "sha256": 2}', "x" * 100])
def test_damaged_cache_entry_is_ignored(content: str, copy_of: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy_of() / "model.safetensors"
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 0)
    digest = file_sha256(path)
    (entry,) = (cache_folder() / "hashes").iterdir()
    entry.write_text(content)
    assert file_sha256(path) == digest


def test_cache_that_cant_be_written_costs_time_only(
    copy_of: Copy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 0)
    assert len(file_sha256(copy_of() / "config.json")) == 64


def test_hub_blob_through_two_links(tmp_path: Path) -> None:
    """huggingface_hub may keep a blob in a store shared by several repositories."""
    name = "ab" * 32
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c"
    for path in (blobs, snapshot, tmp_path / "shared"):
        path.mkdir(parents=True)
    (tmp_path / "shared" / "xet").write_bytes(b"data")
    (blobs / name).symlink_to("../../shared/xet")
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{name}")
    assert hub_blob_sha256(snapshot / "model.safetensors") == name


def test_names_that_only_look_like_blobs_arent_believed(tmp_path: Path) -> None:
    name = "ab" * 32
    other = tmp_path / "elsewhere" / "blobs"
    other.mkdir(parents=True)
    (other / name).write_bytes(b"data")
    (tmp_path / "link").symlink_to(other / name)
    assert hub_blob_sha256(tmp_path / "link") is None
    assert hub_blob_sha256(other / name) is None


def test_stop_while_hashing(copy_of: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_BLOCK_BYTES", 4096)
    model = load(copy_of())
    token = CancelToken()
    token.cancel()
    with pytest.raises(Cancelled):
        model.identify(cancel=token)
    assert len(model.identify().digest) == 64


def test_model_in_memory_is_identified_by_its_arrays(tmp_path: Path) -> None:
    import mlx_lm

    module, tokenizer = load_tiny("llama")
    same, other_tokenizer = mlx_lm.load(str(folder("llama")))
    one, two = Model.from_parts(module, tokenizer).fingerprint, Model.from_parts(same, other_tokenizer).fingerprint
    assert one == two
    same.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    three = Model.from_parts(same, other_tokenizer).fingerprint
    assert three.differences(one) == ("arrays",)
    assert Model.from_parts(*mlx_lm.load(str(make("llama", tmp_path / "s", seed=9)))).fingerprint != one


def test_bfloat16_arrays_are_hashed_bit_by_bit() -> None:
    import mlx_lm

    module, tokenizer = mlx_lm.load(str(folder("llama")))
    full = Model.from_parts(module, tokenizer).fingerprint
    module.set_dtype(mx.bfloat16)
    half = Model.from_parts(module, tokenizer).fingerprint
    assert half.differences(full) == ("arrays",)
    flat = dict(mlx.utils.tree_flatten(module.parameters()))
    assert all(array.dtype == mx.bfloat16 for array in flat.values())


def test_read_only_folder_works(copy_of: Copy) -> None:
    path = copy_of()
    age(path)
    path.chmod(0o500)
    try:
        assert load(path).fingerprint == load(folder("llama")).fingerprint
    finally:
        path.chmod(0o700)
        shutil.rmtree(path)
