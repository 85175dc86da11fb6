"""Pictures in the queue: an urgent job comes between two blocks of a tower; nothing is prepared or encoded twice."""

from __future__ import annotations

import time
from dataclasses import replace

from harness import Outcome
from vision_harness.jobs import Counts, counted, counting, job, model, new_session, reply, sources

from mlxgen.engine import Engine
from mlxgen.events import InputProgress
from mlxgen.models import Model

FAMILY = "qwen2_5_vl"


class Hooked:
    """Calls `on_step` whenever the tower has run a few blocks, and says in `log` what was done."""

    def __init__(self, inner, log) -> None:
        self.inner, self.log, self.on_step = inner, log, lambda: None

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def encode(self, medium, part):
        for step in self.inner.encode(medium, part):
            self.log.append("features" if step is not None else "blocks")
            self.on_step()
            yield step


def hooked(counts: Counts) -> tuple[Model, Hooked, list[str]]:
    base, log = counting(model(FAMILY), counts), []
    vision = Hooked(base.vision, log)

    def forward(ids, **rest):
        log.append("pass")
        return base.forward(ids, **rest)

    return replace(base, vision=vision, forward=forward), vision, log


def alone(folder) -> tuple[list, Counts]:
    counts, outcome = Counts(), Outcome()
    with counted(counts):
        outcome.take(new_session(FAMILY, counting(model(FAMILY), counts)).stream(job(FAMILY, folder), reply=reply()))
    return outcome.values, counts


def test_an_urgent_job_comes_between_two_blocks_of_the_tower(tmp_path) -> None:
    folder, counts = sources(tmp_path / "media"), Counts()
    expected, expected_counts = alone(folder)
    using, vision, log = hooked(counts)
    urgent = []
    with counted(counts), Engine(using) as engine:

        def submit() -> None:
            if not urgent:
                log.append("submitted")
                urgent.append(engine.submit(new_session(FAMILY, using), "Quick!", priority=1, reply=reply(3)))

        vision.on_step = submit
        calm = engine.submit(new_session(FAMILY, using), job(FAMILY, folder), reply=reply())
        events = list(calm)
        assert urgent[0].result(60).usage.generated_tokens == 3
    at = log.index("submitted")
    assert log[at - 1] == "blocks", "in the middle of the first picture"
    assert set(log[at + 1 : at + 5]) == {"pass"}
    assert log[at + 5 :].count("blocks") > 2
    first_encoded = next(e for e in events if isinstance(e, InputProgress) and e.phase == "encode")
    assert first_encoded.index == 0
    outcome = Outcome()
    outcome.take(iter(events))
    assert outcome.values == expected
    assert counts.encoded == expected_counts.encoded
    assert counts.prepared == expected_counts.prepared


def test_a_pause_at_every_unit_of_the_pictures(tmp_path) -> None:
    """Between two blocks too: the picture that was being encoded begins anew, finished ones don't."""
    folder, counts = sources(tmp_path / "media"), Counts()
    expected, expected_counts = alone(folder)
    using, vision, log = hooked(counts)
    with counted(counts), Engine(using) as engine:
        calm = engine.submit(new_session(FAMILY, using), job(FAMILY, folder), reply=reply())
        paused = 0

        def pause() -> None:
            nonlocal paused
            if len(log) in (1, 4, 9):
                paused += 1
                calm.pause()

        vision.on_step = pause
        calm._run.box.open_wide()
        while not calm.done:
            if calm.state == "paused":
                calm.resume()
            time.sleep(0.001)
        outcome = Outcome()
        finished = outcome.take(iter(calm))
    assert paused == 3
    assert outcome.values == expected
    assert counts.encoded == expected_counts.encoded
    assert counts.prepared == expected_counts.prepared
    assert finished.usage.images_encoded == 3
    assert finished.usage.images_prepared == 3
