"""Random programs of turns with pictures, stops, rewinds, forks, edits and resumes; see `harness.programs`."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from harness.programs import Program, random_step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vision_harness.jobs import image, new_session, reply, sources

from mlxgen.cache import CacheOptions


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "qwen3_5", "gemma3", "gemma4_e", "lfm2_vl", "llava_onevision", "paligemma"]
)
@settings(
    max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(
    program=st.lists(st.integers(0, 2**32).map(lambda seed: random_step(random.Random(seed))), min_size=4, max_size=8)
)
def test_any_program_with_pictures_equals_the_replay_of_its_passes(family, program) -> None:
    with tempfile.TemporaryDirectory() as folder:
        media = sources(Path(folder) / "media")
        prompts = [[image(media, "A"), "What?"], [image(media, "B"), "And ", image(media, "C"), "?"], "No."]
        session = new_session(family, cache=CacheOptions(mark_every=8))
        Program(session, reply(), Path(folder), prompt=prompts.__getitem__).run(program)
