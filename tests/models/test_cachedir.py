"""Where the cache folder is on each system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlxgen.errors import ModelLoadError
from mlxgen.models.cachedir import cache_folder, make_cache_folder


def test_variable_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


@pytest.mark.parametrize(
    ("platform", "xdg", "expected"),
    [
        ("darwin", "/xdg", "home/Library/Caches/mlxgen"),
        ("linux", "/xdg", "/xdg/mlxgen"),
        ("linux", None, "home/.cache/mlxgen"),
        ("linux", "relative", "home/.cache/mlxgen"),
    ],
)
def test_default(
    platform: str, xdg: str | None, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MLXGEN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == tmp_path / expected


def test_made_private() -> None:
    folder = make_cache_folder("a", "b")
    assert folder == cache_folder() / "a" / "b"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_unwritable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path / "file" / "x"))
    with pytest.raises(ModelLoadError, match=r"set MLXGEN_CACHE to a folder you can write to"):
        make_cache_folder("a")
