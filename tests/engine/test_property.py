"""Random programs of turns, stops, rewinds, forks, edits and resumes, against a model that only replays passes."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from harness import SETUPS, greedy, new_session, sampled
from harness.programs import Program, random_step, steered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

REPLIES = (greedy(5), sampled(5), steered(6))


@pytest.mark.parametrize("name", ["llama", "gemma3-window", "qwen3_5", "quantized-later", "falcon_h1-list", "ring"])
@settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(
    program=st.lists(st.integers(0, 2**32).map(lambda seed: random_step(random.Random(seed))), min_size=4, max_size=9),
    how=st.integers(0, 2),
)
def test_any_program_equals_the_replay_of_its_passes(name, program, how) -> None:
    setup = SETUPS[name]
    setup = replace(setup, cache=replace(setup.cache, mark_every=8))
    with tempfile.TemporaryDirectory() as folder:
        Program(new_session(setup), REPLIES[how], Path(folder)).run(program)
