"""The adapter with a stand-in for mlx-vlm: what it finds out, what it isolates, what it refuses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cli.commands import call
from harness import Outcome, StopAt
from mlxgen_vision.mlx_vlm_adapter import catalogue
from mlxgen_vision.mlx_vlm_adapter.family import FAMILY
from mlxgen_vision.mlx_vlm_adapter.isolation import Isolation
from PIL import Image

from mlxgen.errors import MlxgenError, PlaceholderError, TemplateError, UnsupportedError
from mlxgen.inputs import VisionFamily, VisionModel
from mlxgen.models import load
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.request import ImagePart, VideoPart
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

GREEDY = ReplyOptions(max_tokens=5, ignore_eos=True)


def picture(seed: int, height: int = 30, width: int = 40) -> ImagePart:
    return ImagePart(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def session(model: Any) -> Session:
    return Session(model, options=SessionOptions(prefill_step_size=16))


def ids(run: Session, parts: list[Any]) -> list[int]:
    run.send(parts, reply=GREEDY)
    return run.ledger


def test_catalogue_reads_the_installed_package_without_importing_it(fake: None) -> None:
    import sys

    assert catalogue.model_types() == ("toy", "toy-vl")
    assert catalogue.renamed() == {"toy-vl": "toy"}
    assert "mlx_vlm" not in sys.modules
    assert isinstance(FAMILY, VisionFamily)
    assert FAMILY.status.startswith("0.0.fake has 2 model types with pictures")


def test_without_mlx_vlm_there_is_nothing_but_advice(no_mlx_vlm: None) -> None:
    assert FAMILY.model_types == ()
    assert FAMILY.advice.endswith("pip install 'mlxgen[mlx-vlm]'")
    assert FAMILY.status.startswith("not installed; pip install 'mlxgen[mlx-vlm]'")


def test_loads_says_what_is_coarser_and_sees_pictures(
    fake: None, checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mlxgen_vision"):
        model = load(checkpoint())
    assert "toy-vl runs through mlx-vlm 0.0.fake: stops between pictures, not inside the tower" in caplog.text
    assert isinstance(model.vision, VisionModel)
    assert model.vision.manners.num_axes == 3
    assert model.vision.manners.max_pictures is None
    first, second = (ids(session(model), [picture(seed), "What?"]) for seed in (1, 2))
    assert first != second


def test_stop_at_every_checkpoint_and_resume_without_the_prepared_files(
    fake: None, checkpoint: Any, tmp_path: Path
) -> None:
    model = load(checkpoint())
    files = [tmp_path / "a.png", tmp_path / "b.png"]

    def begin() -> tuple[Session, list[Any]]:
        for seed, file in enumerate(files):
            Image.fromarray(picture(seed, 30 + seed, 40).source).save(file)
        return session(model), [ImagePart(files[0]), "then", ImagePart(files[1]), "What differs?"]

    expected, token = Outcome(), StopAt()
    whole, parts = begin()
    expected.take(whole.stream(parts, reply=GREEDY, cancel=token))
    for stop_at in range(token.count):
        (run, parts), outcome = begin(), Outcome()
        outcome.take(run.stream(parts, reply=GREEDY, cancel=StopAt(stop_at)))
        path = run.save(tmp_path / f"{stop_at}.mlxgen")
        for file, medium in zip(files, run.media, strict=False):
            if medium.prepared:
                file.unlink()
        with resume(path, options=ResumeOptions(model=model)) as again:
            outcome.take(again.continue_())
            assert again.ledger == whole.ledger
        assert outcome.finished.text == expected.finished.text


def test_two_sessions_token_by_token_and_a_second_turn_give_what_each_gives_alone(fake: None, checkpoint: Any) -> None:
    model = load(checkpoint())
    jobs = [[picture(1), "What?"], [picture(2), "and", picture(3), "What else?"], ["No picture."]]
    alone = [ids(session(model), job) for job in jobs]
    runs = [session(model) for _ in jobs]
    streams = [run.stream(job, reply=GREEDY) for run, job in zip(runs, jobs, strict=True)]
    while streams:
        streams = [stream for stream in streams if next(stream, None) is not None]
    assert [run.ledger for run in runs] == alone
    more = [session(model) for _ in range(2)]
    for run in more:
        ids(run, jobs[0])
    ids(runs[2], ["Something between."])
    assert ids(more[0], [picture(4), "And now?"]) == ids(more[1], [picture(4), "And now?"])


def test_nothing_of_a_request_stays_on_the_model(fake: None, checkpoint: Any) -> None:
    model = load(checkpoint())
    inner = model.vision.bridge.language
    ids(session(model), [picture(1), "What?"])
    assert (inner._position_ids, inner._rope_deltas, inner._log) == (None, None, [])
    assert set(model.vision.bridge.isolation.changing) == {"LanguageModel"}
    inner.fail = True

    def broken(*args: Any, **others: Any) -> Any:
        inner._rope_deltas = mx.array([1])
        raise ValueError("in the middle")

    type(inner).get_rope_index, kept = broken, type(inner).get_rope_index
    try:
        with pytest.raises(ValueError, match="in the middle"):
            model.vision.bridge.rope_index(mx.array([[1]]), {})
    finally:
        type(inner).get_rope_index = kept
    assert inner._rope_deltas is None


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("state", "in chunks, with another request in between, it gives other logits"),
        ("mismatch", "a picture fills only some of the tokens that stand for it"),
        ("whole", "its language model wants cross_attention_states of the whole prompt"),
        ("negative", "it marks pictures by -200, which is no token"),
        ("cache", "toy through mlx-vlm keeps a ChunkedKVCache, which mlxgen can't save"),
    ],
)
def test_faults_are_refused_at_load_in_one_line(fake: None, checkpoint: Any, fault: str, reason: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        load(checkpoint(fault))
    assert reason in str(caught.value)
    assert "use mlx-vlm itself for it" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pictures_that_are_processed_together_are_taken_one_at_a_time(fake: None, checkpoint: Any) -> None:
    model = load(checkpoint("joint"))
    assert model.vision.notice.endswith("; 1 picture in a prompt")
    assert ids(session(model), [picture(1), "What?"])
    with pytest.raises(UnsupportedError, match="2 pictures in one prompt for toy.*give 1, or use mlx-vlm itself"):
        ids(session(model), [picture(1), picture(2), "What?"])


def test_templates_that_leave_pictures_out_get_the_placeholder_as_text(fake: None, checkpoint: Any) -> None:
    as_parts, as_text = load(checkpoint()), load(checkpoint(template="text"))
    assert as_text.vision.manners.placeholder.style == "text"
    typed = "<|image_pad|> typed by the user stays text."
    first, second = (ids(session(model), [picture(1), typed]) for model in (as_parts, as_text))
    assert len(second) == len(first) + 1  # the end of the line behind the placeholder
    for model in (as_parts, as_text):
        assert ids(session(model), ["Words alone"])


def test_templates_that_take_strings_only(fake: None, checkpoint: Any) -> None:
    model = load(checkpoint(template="none"))
    assert ids(session(model), ["Words alone"])
    with pytest.raises(TemplateError, match="takes no pictures; give the whole prompt yourself, with <|image_pad|>"):
        ids(session(model), [picture(1), "What?"])
    raw = Session(model, options=SessionOptions(raw=True))
    assert ids(raw, [picture(1), "<|image_pad|>What?"])


def test_placeholders_and_pictures_must_be_as_many(fake: None, checkpoint: Any) -> None:
    model = load(checkpoint())
    raw = Session(model, options=SessionOptions(raw=True))
    with pytest.raises(PlaceholderError, match="has 2 placeholders"):
        ids(raw, [picture(1), "<|image_pad|> and <|image_pad|>"])


def test_video_is_refused(fake: None, checkpoint: Any, tmp_path: Path) -> None:
    model = load(checkpoint())
    with pytest.raises(MlxgenError, match="toy through mlx-vlm takes pictures only; give frames of the video"):
        ids(session(model), [VideoPart(np.zeros((2, 8, 8, 3), np.uint8)), "What?"])


def test_isolation_puts_back_everything_a_module_can_hold() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.ones(2)
            self.names = ["a"]
            self.seen = {"a": 1}
            self.count = 0
            self.found = None

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [Part(), Part()]

    whole = Whole()
    isolation = Isolation(whole)
    first = whole.parts[0]
    weight = first.weight
    with pytest.raises(KeyError), isolation.call():
        first.weight = mx.zeros(2)
        first.names.append("b")
        first.seen["b"] = 2
        first.count, first.found, first.new = 3, mx.array(1), "x"
        raise KeyError
    assert first.weight is weight
    assert (first.names, first.seen, first.count, first.found) == (["a"], {"a": 1}, 0, None)
    assert not hasattr(first, "new")
    assert isolation.changing == ["Part"]
    with isolation.call(every_module=False):
        first.count, whole.parts[1].count = 5, 5
    assert (first.count, whole.parts[1].count) == (0, 5), "one pass over a token looks at what changes"
    isolation.restore()
    assert whole.parts[1].count == 0


def test_doctor_and_the_command_line_say_so(
    fake: None, checkpoint: Any, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mlxgen.cli.proofs.prove", lambda *arguments: iter(()))
    folder = str(checkpoint())
    told = "toy-vl runs through mlx-vlm 0.0.fake: stops between pictures, not inside the tower"
    result = call(capfdbinary, "doctor", "--model", folder)
    assert result.code == 0
    assert f"       vision family: {told}" in result.out.decode()
    result = call(capfdbinary, "generate", "--model", folder, "--prompt", "Hi", "--max-tokens", "2")
    assert told in result.err
