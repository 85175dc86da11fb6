"""The adapter with mlx-vlm itself, on families that mlxgen has files of its own for: the tokens must be the kit's."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness import Outcome, StopAt
from mlxgen_vision.mlx_vlm_adapter import catalogue
from mlxgen_vision.mlx_vlm_adapter.family import FAMILY
from mlxgen_vision.mlx_vlm_adapter.model import MlxVlmModel
from parity_kit import build_input, greedy, kit, load_case, load_model, load_tokenizer, needs_kit

from mlxgen.errors import UnsupportedError
from mlxgen.models import Model, load
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.request import ImagePart
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

pytestmark = [
    *needs_kit,
    pytest.mark.skipif(importlib.util.find_spec("mlx_vlm") is None, reason="mlx-vlm isn't installed (mlxgen[mlx-vlm])"),
]

# Families whose pictures mlx-vlm 0.7.10 processes and computes as transformers does, up to a resize's rounding.
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "internvl", "pixtral", "mistral3")
CASES = [(family, name) for family in FAMILIES for name in ("text", "img1", "img2")]


@cache
def foreign(family: str) -> MlxVlmModel:
    loaded = load_model(FAMILY, family, "mlx")
    assert isinstance(loaded, MlxVlmModel)
    return loaded


@pytest.mark.parametrize(("family", "name"), CASES)
def test_tokens_equal_the_reference(family: str, name: str) -> None:
    case = load_case(family, name)
    model = foreign(family)
    inputs = build_input(model, load_tokenizer(family, "mlx"), case)
    assert inputs.token_ids == case.input_ids
    for size in (16, 2048):
        run = greedy(model, inputs, chunk_size=size)
        assert abs(run.last_logits - case.arrays["last_logits"]).max() <= 2e-2
        assert run.tokens == case.tokens


def test_every_family_of_the_kit_that_mlx_vlm_has_is_among_its_model_types() -> None:
    assert set(FAMILIES) <= set(catalogue.model_types())
    assert {"deepseekocr", "glm4v", "kimi_vl", "molmo2"} <= set(catalogue.model_types())
    assert not {"llama", "flux2", "whisper"} & set(catalogue.model_types())


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma4", "in chunks, with another request in between, it gives other logits"),  # masks over a whole picture
        ("llava_next", "it turns .* tokens into .* rows"),
        ("qwen3_5", "update_window"),  # a recurrent state that isn't mlx-lm's
    ],
)
def test_models_that_sessions_would_change_are_refused(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        load_model(FAMILY, family, "mlx")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Any:
    loading = importlib.import_module("mlxgen.models.load")
    monkeypatch.setattr(loading, "vision_families", lambda: dict.fromkeys(FAMILIES, FAMILY))
    return lambda family: load(kit() / family / "mlx")


def job() -> list[Any]:
    files = sorted((kit() / "cases").glob("*.png"))[:2]
    return [ImagePart(files[0]), "then", ImagePart(files[1]), "What differs?"]


GREEDY = ReplyOptions(max_tokens=6, ignore_eos=True)


def new(model: Model) -> Session:
    return Session(model, options=SessionOptions(prefill_step_size=32))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_stop_anywhere_and_resume(forced: Any, family: str, tmp_path: Path) -> None:
    model = forced(family)
    expected, token, whole = Outcome(), StopAt(), new(model)
    expected.take(whole.stream(job(), reply=GREEDY, cancel=token))
    for stop_at in range(0, token.count, 2):
        run, outcome = new(model), Outcome()
        outcome.take(run.stream(job(), reply=GREEDY, cancel=StopAt(stop_at)))
        path = run.save(tmp_path / f"{stop_at}.mlxgen")
        with resume(path, options=ResumeOptions(model=model)) as again:
            outcome.take(again.continue_())
            assert again.ledger == whole.ledger
        assert outcome.values == expected.values


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_two_sessions_token_by_token(forced: Any, family: str) -> None:
    model = forced(family)
    files = sorted((kit() / "cases").glob("*.png"))
    jobs = [job(), [ImagePart(files[1]), "What?"], ["No picture."]]
    alone = []
    for parts in jobs:
        run = new(model)
        run.send(parts, reply=GREEDY)
        alone.append(run.ledger)
    runs = [new(model) for _ in jobs]
    streams = [run.stream(parts, reply=GREEDY) for run, parts in zip(runs, jobs, strict=True)]
    while streams:
        streams = [stream for stream in streams if next(stream, None) is not None]
    assert [run.ledger for run in runs] == alone
