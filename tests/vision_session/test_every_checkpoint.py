"""Stop a job with pictures and a video at each checkpoint in turn, and go on without the sources that were prepared."""

from __future__ import annotations

import os

import pytest
from harness import Outcome, StopAt
from vision_harness import tiny_vlm
from vision_harness.jobs import Counts, counted, counting, job, model, new_session, remove_prepared, reply, sources

from mlxgen.cache import CacheOptions
from mlxgen.resumption import ResumeOptions, resume

CACHES = {
    "plain": CacheOptions(),
    "ring": CacheOptions(max_kv_size=40),
    "quantized": CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=0),
    "quantized-later": CacheOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=40),
}
# The fast run takes some of the stops, others for each family; `-m slow` takes all.
EVERY = 9
CASES = [(family, "plain") for family in tiny_vlm.FAMILIES]
CACHE_CASES = [(family, name) for family in tiny_vlm.FAMILIES for name in ("ring", "quantized", "quantized-later")]
CACHE_CASES = [case for case in CACHE_CASES if case[0] not in tiny_vlm.UNQUANTISED or case[1] == "ring"]


class Uninterrupted:
    """The run all others are compared with."""

    def __init__(self, family, cache, folder, layout=None):
        self.layout = layout
        self.counts, self.outcome, token = Counts(), Outcome(), StopAt()
        with counted(self.counts):
            session = new_session(family, counting(model(family, layout), self.counts), CACHES[cache])
            self.outcome.take(session.stream(job(family, sources(folder)), reply=reply(), cancel=token))
        self.ledger, self.num_checkpoints = session.ledger, token.count
        assert all(count == 1 for count in self.counts.encoded.values())


def stop_and_resume(family, cache, stop_at, expected, tmp_path):
    folder = sources(tmp_path / f"media{stop_at}")
    counts, outcome = Counts(), Outcome()
    with counted(counts):
        session = new_session(family, counting(model(family, expected.layout), counts), CACHES[cache])
        stopped = outcome.take(session.stream(job(family, folder), reply=reply(), cancel=StopAt(stop_at)))
        assert stopped.finish_reason == "cancelled"
        path = session.save(tmp_path / f"{stop_at}.mlxgen")
        remove_prepared(session)
        del session
        with resume(path, options=ResumeOptions(model=counting(model(family, expected.layout), counts))) as again:
            outcome.take(again.continue_())
            assert again.ledger == expected.ledger
    assert outcome.values == expected.outcome.values
    assert outcome.finished.text == expected.outcome.finished.text
    assert counts == expected.counts, "nothing is decoded, resized, prepared, encoded or fed twice"


@pytest.mark.parametrize(("family", "cache"), CASES)
def test_stopping_anywhere_and_resuming_without_the_prepared_files_changes_nothing(family, cache, tmp_path) -> None:
    expected = Uninterrupted(family, cache, tmp_path / "whole")
    for stop_at in range(tiny_vlm.FAMILIES.index(family), expected.num_checkpoints, EVERY):
        stop_and_resume(family, cache, stop_at, expected, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "cache"), [*CASES, *CACHE_CASES])
def test_stopping_at_every_checkpoint_changes_nothing(family, cache, tmp_path) -> None:
    expected = Uninterrupted(family, cache, tmp_path / "whole")
    # Until the first pass there is nothing in the caches that could be of another kind.
    first = 0 if cache == "plain" else max(0, expected.num_checkpoints - expected.counts.num_passes - 1)
    for stop_at in range(first, expected.num_checkpoints):
        stop_and_resume(family, cache, stop_at, expected, tmp_path)


@pytest.mark.parametrize(("family", "cache"), CACHE_CASES)
def test_bounded_and_quantised_caches_go_on_exactly(family, cache, tmp_path) -> None:
    """In prefill and decode, where the caches are."""
    expected = Uninterrupted(family, cache, tmp_path / "whole")
    for stop_at in (expected.num_checkpoints - 9, expected.num_checkpoints - 7, expected.num_checkpoints - 3):
        stop_and_resume(family, cache, stop_at, expected, tmp_path)


@pytest.mark.parity
@pytest.mark.skipif("MLXGEN_PARITY" not in os.environ, reason="MLXGEN_PARITY doesn't name the parity kit's folder")
@pytest.mark.parametrize("family", [family for family in tiny_vlm.FAMILIES if family not in tiny_vlm.NOT_IN_KIT])
def test_the_kits_checkpoints_go_on_exactly_too(family, tmp_path) -> None:
    expected = Uninterrupted(family, "plain", tmp_path / "whole", "hf")
    for stop_at in range(tiny_vlm.FAMILIES.index(family), expected.num_checkpoints, 25):
        stop_and_resume(family, "plain", stop_at, expected, tmp_path)
