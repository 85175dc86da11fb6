"""Vision families through entry points: chosen by model type and tower, and a broken package does no harm."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from tiny import load as load_tiny

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import ModelLoadError, UnsupportedError
from mlxgen.models import TextForward, load, vision_families
from mlxgen.models.described import describe_families
from mlxgen.models.families import installed_families

Copy = Callable[..., Path]
Edit = Callable[..., None]


class FakeVision:
    family = "fake"

    def __init__(self) -> None:
        self.language = load_tiny("llama")[0]
        self.forward = TextForward(self.language)


class FakeFamily:
    def __init__(self, name: str, *model_types: str) -> None:
        self.name = name
        self.model_types = model_types
        self.loaded: list[Path] = []

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> FakeVision:
        self.loaded.append(path)
        return FakeVision()


def _forget() -> None:
    installed_families.cache_clear()
    vision_families.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """install(name=object): entry points of the group, all in one importable module; a missing object can't load."""
    module = types.ModuleType("fake_families")
    monkeypatch.setitem(sys.modules, "fake_families", module)
    entries: list[importlib.metadata.EntryPoint] = []

    def add(**objects: Any) -> None:
        for name, value in objects.items():
            if value is not None:
                setattr(module, name, value)
            entries.append(importlib.metadata.EntryPoint(name, f"fake_families:{name}", "mlxgen.families"))

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [e for e in entries if e.group == group])
    _forget()
    yield add
    _forget()


def with_tower(path: Path) -> Path:
    import numpy as np

    weights = load_file(path / "model.safetensors")
    weights["vision_tower.patch_embed.weight"] = np.zeros((2, 2), np.float32)
    save_file(weights, path / "model.safetensors", metadata={"format": "mlx"})
    return path


def test_family_loads_a_checkpoint_with_a_tower(install: Callable[..., None], copy_of: Copy, edit_json: Edit) -> None:
    family = FakeFamily("fake", "fake_vl")
    install(fake=family)
    path = with_tower(copy_of())
    edit_json(path / "config.json", model_type="fake_vl")
    model = load(path)
    assert family.loaded == [path]
    assert model.vision is not None
    assert model.forward is model.vision.forward
    assert model.module is model.vision.language
    assert model.num_bytes > 0


def test_family_is_preferred_to_mlx_lm_only_for_checkpoints_with_a_tower(
    install: Callable[..., None], copy_of: Copy, edit_json: Edit
) -> None:
    family = FakeFamily("fake", "qwen3_5")
    install(fake=family)
    assert load(copy_of("qwen3_5", "text")).vision is None
    assert family.loaded == []
    assert load(with_tower(copy_of("qwen3_5", "pictures"))).vision is not None


def test_without_a_family_mlx_lm_drops_the_tower_and_the_log_says_so(
    install: Callable[..., None], copy_of: Copy, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(with_tower(copy_of("qwen3_5"))).vision is None
    assert "no vision family for 'qwen3_5' is installed: text only" in caplog.text


def test_family_without_the_towers_weights(install: Callable[..., None], copy_of: Copy, edit_json: Edit) -> None:
    install(fake=FakeFamily("fake", "fake_vl"))
    path = copy_of()
    edit_json(path / "config.json", model_type="fake_vl")
    with pytest.raises(ModelLoadError, match=r"without the weights of its vision tower"):
        load(path)


def test_broken_packages_are_left_out_with_a_warning(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    good = FakeFamily("good", "good_vl")
    install(missing=None, not_a_family=object(), a_class=FakeFamily, good=good)
    with caplog.at_level(logging.WARNING, logger="mlxgen"):
        assert dict(vision_families()) == {"good_vl": good}
    text = caplog.text
    assert all(f"vision family {name!r}" in text for name in ("missing", "not_a_family", "a_class"))


def test_text_models_dont_even_look_for_families(
    install: Callable[..., None], copy_of: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(**options: Any) -> Any:
        raise AssertionError("entry points were read")

    monkeypatch.setattr(importlib.metadata, "entry_points", forbidden)
    assert load(copy_of()).vision is None


def test_two_families_for_one_type(install: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    first, second = FakeFamily("first", "x_vl"), FakeFamily("second", "x_vl")
    install(b=second, a=first)
    with caplog.at_level(logging.WARNING, logger="mlxgen"):
        assert vision_families()["x_vl"] is first
    assert "also claims model_type 'x_vl'" in caplog.text


def test_errors_of_a_family_name_it(install: Callable[..., None], copy_of: Copy, edit_json: Edit) -> None:
    class Failing(FakeFamily):
        def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> FakeVision:
            raise KeyError("visual.merger")

    install(fake=Failing("failing", "fake_vl"))
    path = with_tower(copy_of())
    edit_json(path / "config.json", model_type="fake_vl")
    with pytest.raises(ModelLoadError, match=r"vision family 'failing'.*KeyError: 'visual\.merger'"):
        load(path)


class Adapter(FakeFamily):
    fallback = True
    advice = "others through an adapter: pip install more"


def test_unknown_type_names_what_is_supported_and_the_adapter_in_one_line(
    install: Callable[..., None], copy_of: Copy, edit_json: Edit
) -> None:
    install(fake=FakeFamily("fake", "fake_vl"), other=Adapter("other"))
    path = copy_of()
    edit_json(path / "config.json", model_type="fake_v")
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    message = str(caught.value)
    assert re.search(
        r"model type 'fake_v' .*isn't supported; closest: fake_vl.*text types of mlx-lm and 1 vision types are "
        r"\(families fake; see mlxgen families\); others through an adapter: pip install more$",
        message,
    )
    assert "\n" not in message


def test_fallback_gets_what_nobody_else_claims_and_says_nothing_of_the_rest(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    own, adapter = FakeFamily("own", "x_vl"), Adapter("adapter", "x_vl", "y_vl")
    install(a_first=adapter, z_last=own)
    assert dict(vision_families()) == {"x_vl": own, "y_vl": adapter}
    assert [(one.name, one.model_types) for one in describe_families()] == [("own", ("x_vl",)), ("adapter", ("y_vl",))]
    assert caplog.text == ""


def test_what_a_fallback_refuses_loads_as_text_where_mlx_lm_can(
    install: Callable[..., None], copy_of: Copy, edit_json: Edit, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Adapter):
        def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> FakeVision:
            raise UnsupportedError("the adapter can't")

    install(other=Refusing("other", "qwen3_5", "strange_vl"))
    assert load(with_tower(copy_of("qwen3_5"))).vision is None
    assert "the adapter can't: text only" in caplog.text
    path = copy_of(name="strange")
    edit_json(path / "config.json", model_type="strange_vl")
    with pytest.raises(UnsupportedError, match=r"the adapter can't"):
        load(path)


def test_families_describe_themselves_in_mappings_or_objects_or_not_at_all(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    mapped, silent, wrong = FakeFamily("mapped", "a"), FakeFamily("silent", "b"), FakeFamily("wrong", "c")
    compared = {"checkpoint": "tiny", "cases": ["img1"], "layouts": ["hf"]}
    mapped.support = {"models": "Mapped 1", "video": True, "layouts": ["hf"], "parity": [compared]}  # type: ignore[attr-defined]
    wrong.support = {"video": "often"}  # type: ignore[attr-defined]
    install(mapped=mapped, silent=silent, wrong=wrong)
    one, two, three = describe_families()
    assert (one.models, one.video, one.layouts, one.prepares) == ("Mapped 1", True, ("hf",), "")
    assert [(each.checkpoint, each.cases, each.layouts) for each in one.parity] == [("tiny", ("img1",), ("hf",))]
    assert (two.video, two.layouts, two.parity) == (None, (), ())
    assert three.video is None
    assert "its support can't be read: video is 'often'" in caplog.text
