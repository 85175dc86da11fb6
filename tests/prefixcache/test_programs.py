"""Random programs over sessions that share a prefix cache: after every step each is what its recorded passes make."""

from __future__ import annotations

import random

import pytest
from harness import SETUPS, sampled
from harness.programs import Program, random_step
from prefixcache.rig import own_model, session

from mlxgen.prefixcache import prefix_cache


@pytest.mark.parametrize("name", SETUPS)
def test_random_programs(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)
    setup = SETUPS[name]
    mine, _ = own_model(setup.kind, disk_bytes=2**26, folder=tmp_path / "prefix")
    for seed in range(2):
        rng = random.Random(f"{name} {seed}")
        program = Program(session(mine, setup), sampled(4), tmp_path / f"{seed}")
        (tmp_path / f"{seed}").mkdir()
        program.run([random_step(rng) for _ in range(6)])
        if seed == 0:  # the next finds what is on the disk, too
            prefix_cache(mine).flush(20)
            prefix_cache(mine).clear()
    info = prefix_cache(mine).info()
    assert info.num_hits >= 1
    assert info.num_read > 0
    assert info.warnings == ()
