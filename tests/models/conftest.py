from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from tiny import folder

from models.hub_server import HubServer


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees, or leaves anything in, the user's caches."""
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path / "mlxgen-cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of a tiny model's folder, to be damaged."""

    def copy(kind: str = "llama", name: str | None = None) -> Path:
        return Path(shutil.copytree(folder(kind), tmp_path / (name or kind)))

    return copy


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """Change entries of a JSON file; None removes one."""

    def edit(path: Path, **entries: Any) -> None:
        value = json.loads(path.read_text())
        value.update(entries)
        path.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))

    return edit


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub on this machine that huggingface_hub talks to instead of the real one."""
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        huggingface_hub.close_session()
        yield server
    huggingface_hub.close_session()
