"""Downloads: complete, stopped, resumed, refused, without network."""

from __future__ import annotations

import hashlib
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tiny import LlamaShape, make_llama

import mlxgen.models.download
from mlxgen.cancellation import Cancelled, CancelToken
from mlxgen.errors import ModelLoadError
from mlxgen.models import LoadOptions, LoadProgress, load
from mlxgen.models.fingerprint import file_sha256, hub_blob_sha256
from mlxgen.models.hub import HubRequest, fetch
from models.hub_server import COMMIT, HubServer

REPO = "tiny-org/tiny-llama"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weight file (3 MB) is large enough to be streamed."""
    folder = make_llama(tmp_path_factory.mktemp("source") / "m", LlamaShape(hidden_size=256, intermediate_size=768))
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return folder


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlxgen.models.download, "_RETRY_WAIT_S", 0.05)


def partial_file() -> Path:
    (partial,) = Path(constants.HF_HUB_CACHE).glob("models--*/blobs/*.mlxgen.incomplete")
    return partial


def size_of(source: Path) -> int:
    return (source / "model.safetensors").stat().st_size


def cancel_at(token: CancelToken, num_bytes: int) -> Any:
    def on_progress(progress: LoadProgress) -> None:
        if progress.name == "model.safetensors" and progress.done >= num_bytes:
            token.cancel()

    return on_progress


def test_downloads_into_the_hubs_own_cache_layout(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    seen: list[LoadProgress] = []
    folder = fetch(HubRequest(REPO), on_progress=seen.append)
    assert folder == Path(constants.HF_HUB_CACHE) / "models--tiny-org--tiny-llama" / "snapshots" / COMMIT
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    blob = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert (folder / "model.safetensors").resolve().name == blob
    assert (folder.parent.parent / "refs" / "main").read_text() == COMMIT
    assert not (folder / "modeling_evil.py").exists()
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == seen[-1].total > size_of(source)
    # huggingface_hub itself finds it, without network.
    import huggingface_hub

    assert Path(huggingface_hub.snapshot_download(REPO, local_files_only=True)) == folder


def test_loads_by_name_and_unpacks_like_mlx_lm(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    model = load(REPO)
    module, tokenizer = model
    assert (module, tokenizer) == (model.module, model.tokenizer)
    assert model.name == REPO
    assert model.fingerprint.digest == load(source).fingerprint.digest


def test_code_is_fetched_only_when_trusted(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    assert (fetch(HubRequest(REPO, code=True)) / "modeling_evil.py").exists()


def test_second_fetch_downloads_nothing(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    fetch(HubRequest(REPO))
    hub.requests.clear()
    fetch(HubRequest(REPO))
    assert hub.body_requests("model.safetensors") == []
    assert not [r for r in hub.requests if r.method == "GET" and "/resolve/" in r.path]


def test_stop_in_mid_file_keeps_the_partial_file_and_range_finishes_it(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    hub.block_delay_s = 0.02
    token = CancelToken()
    with pytest.raises(Cancelled) as stopped:
        fetch(HubRequest(REPO), on_progress=cancel_at(token, 500_000), cancel=token)
    assert stopped.value.reason == "requested"
    kept = partial_file().stat().st_size
    assert 300_000 < kept < size_of(source)
    assert partial_file().read_bytes() == (source / "model.safetensors").read_bytes()[:kept]

    hub.requests.clear()
    hub.block_delay_s = 0.0
    folder = fetch(HubRequest(REPO))
    assert [r.range for r in hub.body_requests("model.safetensors")] == [f"bytes={kept}-"]
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert not list(Path(constants.HF_HUB_CACHE).glob("models--*/blobs/*.incomplete"))


def test_stop_doesnt_wait_for_a_dead_line(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    hub.stall_after = 262_144
    token = CancelToken.after(1.0)
    started = time.monotonic()
    with pytest.raises(Cancelled):
        fetch(HubRequest(REPO), cancel=token)
    assert time.monotonic() - started < 2.0
    assert partial_file().stat().st_size == 262_144


def test_cancelled_token_downloads_nothing(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    token = CancelToken()
    token.cancel()
    with pytest.raises(Cancelled):
        load(REPO, cancel=token)
    assert hub.requests == []


def test_broken_connection_goes_on_from_there(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    hub.drop_after, hub.drops = 1_000_000, 2
    folder = fetch(HubRequest(REPO))
    ranges = [r.range for r in hub.body_requests("model.safetensors")]
    assert len(ranges) == 3
    assert ranges[0] is None
    assert all(r is not None for r in ranges[1:])
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_connection_that_never_gets_further_is_an_error_that_keeps_the_file(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    hub.drop_after, hub.drops = 0, 1000
    with pytest.raises(ModelLoadError, match=r"connection broke at byte 0 of .* goes on from there"):
        fetch(HubRequest(REPO))


def test_server_without_range_is_handled(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    hub.ignore_range = True
    hub.drop_after, hub.drops = 1_000_000, 1
    folder = fetch(HubRequest(REPO))
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_damage_in_transit_is_noticed_and_downloaded_again(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    hub.corrupt = 1
    folder = fetch(HubRequest(REPO))
    assert len(hub.body_requests("model.safetensors")) == 2
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_damage_twice_is_an_error(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    hub.corrupt = 2
    with pytest.raises(ModelLoadError, match=r"arrived twice with SHA-256"):
        fetch(HubRequest(REPO))


def test_damaged_partial_file_is_not_trusted(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    hub.block_delay_s = 0.02
    token = CancelToken()
    with pytest.raises(Cancelled):
        fetch(HubRequest(REPO), on_progress=cancel_at(token, 500_000), cancel=token)
    partial = partial_file()
    partial.write_bytes(b"x" + partial.read_bytes()[1:])
    hub.block_delay_s = 0.0
    folder = fetch(HubRequest(REPO))
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("how", ["option", "variable", "server gone", "server broken"])
def test_cached_copy_is_used_without_network(
    how: str, hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, source)
    folder = fetch(HubRequest(REPO))
    hub.requests.clear()
    if how == "variable":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "server gone":
        hub.stop()
    elif how == "server broken":
        hub.status = 500
    assert fetch(HubRequest(REPO, offline=how == "option")) == folder
    if how in ("option", "variable"):
        assert hub.requests == []


def test_offline_without_a_copy_says_so(hub: HubServer) -> None:
    with pytest.raises(ModelLoadError, match=r"isn't .*in the hub's cache .* load it once with network"):
        load(REPO, options=LoadOptions(offline=True))


def test_incomplete_copy_isnt_used_offline(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    hub.stall_after = 65536
    with pytest.raises(Cancelled):
        fetch(HubRequest(REPO), cancel=CancelToken.after(1.0))
    with pytest.raises(ModelLoadError, match=r"completely"):
        fetch(HubRequest(REPO, offline=True))


def test_no_network_and_no_copy(hub: HubServer) -> None:
    hub.stop()
    started = time.monotonic()
    with pytest.raises(ModelLoadError, match=r"can't reach the hub"):
        fetch(HubRequest(REPO), cancel=CancelToken.after(60))
    assert time.monotonic() - started < 30


def test_gated(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source, gated=True)
    with pytest.raises(ModelLoadError, match=r"is gated: ask for access at .*tiny-org/tiny-llama.*hf auth login"):
        load(REPO)


def test_unknown_repo_suggests_a_cached_one(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    fetch(HubRequest(REPO))
    with pytest.raises(ModelLoadError, match=r"no model 'tiny-org/tiny-lama'.*did you mean 'tiny-org/tiny-llama'"):
        load("tiny-org/tiny-lama")


def test_misspelt_built_in_name(hub: HubServer) -> None:
    with pytest.raises(ModelLoadError, match=r"did you mean 'smollm2'"):
        load("smolm2")


def test_unknown_revision(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    with pytest.raises(ModelLoadError, match=r"no revision 'v9'"):
        load(REPO, options=LoadOptions(revision="v9"))


def test_repository_without_config(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    hub.add(REPO, tmp_path / "gguf")
    with pytest.raises(ModelLoadError, match=r"no config\.json, so it isn't a model"):
        load(REPO)


def test_disk_too_small_is_said_before_the_download(
    hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, source)
    monkeypatch.setattr(
        mlxgen.models.download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000_000})()
    )
    with pytest.raises(ModelLoadError, match=r"needs [\d.]+ GB in .*free some space"):
        fetch(HubRequest(REPO))
    assert hub.body_requests("model.safetensors") == []


def test_disk_full_in_mid_file_keeps_what_was_written(hub: HubServer, source: Path) -> None:
    hub.add(REPO, source)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, former[1]))  # writing more fails, as on a full disk
    try:
        with pytest.raises(ModelLoadError, match=r"can't store .*: File too large; free some space.*is kept"):
            fetch(HubRequest(REPO))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    kept = partial_file().stat().st_size
    assert 500_000 < kept <= 1_000_000
    folder = fetch(HubRequest(REPO))
    assert hub.body_requests("model.safetensors")[-1].range == f"bytes={kept}-"
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_blob_name_is_taken_as_hash(hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, source)
    folder = fetch(HubRequest(REPO))
    weights = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert hub_blob_sha256(folder / "model.safetensors") == weights
    assert hub_blob_sha256(folder / "config.json") is None  # a git hash, not SHA-256
    assert file_sha256(folder / "config.json") == hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
