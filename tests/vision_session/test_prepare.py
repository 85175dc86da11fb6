"""The public `prepare`: stopped at each of its checkpoints, and continued with what was finished."""

from __future__ import annotations

import numpy as np
import pytest
from harness import StopAt
from vision_harness import tiny_vlm
from vision_harness.jobs import Counts, counted, counting, image, job, model, new_session, options, reply, sources

from mlxgen import Cancelled, InvalidValueError, Message, PreparedInput, PrepareRequest, TokenIterator, prepare

FAMILIES = pytest.mark.parametrize("family", tiny_vlm.FAMILIES)
EVERY = 19


def request(family, using, folder):
    return PrepareRequest(using, (Message("user", tuple(job(family, folder))),))


def equal(one: PreparedInput, other: PreparedInput) -> bool:
    return (
        one.token_ids == other.token_ids
        and one.spans == other.spans
        and one.rope_delta == other.rope_delta
        and one.atomic == other.atomic
        and np.array_equal(one.position_ids, other.position_ids)
        and [m.content_hash for m in one.media] == [m.content_hash for m in other.media]
        and all(
            np.array_equal(np.asarray(a[name]), np.asarray(b[name]))
            for m, n in zip(one.media, other.media, strict=True)
            for a, b in zip(m.features, n.features, strict=True)
            for name in a
        )
    )


@FAMILIES
def test_stopped_anywhere_and_continued_it_gives_the_same(family, tmp_path) -> None:
    folder, whole, token = sources(tmp_path / "media"), Counts(), StopAt()
    with counted(whole):
        expected = prepare(request(family, counting(model(family), whole), folder), cancel=token)
    assert expected.complete
    for stop_at in range(tiny_vlm.FAMILIES.index(family), token.count, EVERY):
        counts = Counts()
        with counted(counts):
            with pytest.raises(Cancelled) as stop:
                prepare(request(family, counting(model(family), counts), folder), cancel=StopAt(stop_at))
            partial = stop.value.partial
            with pytest.raises(InvalidValueError, match="isn't complete"):
                TokenIterator.from_input(model(family), partial)
            result = prepare(request(family, counting(model(family), counts), folder), partial=partial)
        assert equal(result, expected)
        assert counts == whole, "nothing twice"


@FAMILIES
def test_a_prepared_input_gives_what_a_session_gives(family, tmp_path) -> None:
    folder = sources(tmp_path / "media")
    prepared = prepare(request(family, model(family), folder))
    session = new_session(family)
    finished = session.send(job(family, folder), reply=reply())
    assert finished.finish_reason == "length"
    step_size = options(family).prefill_step_size
    iterator = TokenIterator.from_input(model(family), prepared, options=reply().decode_options(6), step_size=step_size)
    assert [(t.id, t.logprob) for t in iterator] == [(t.id, t.logprob) for t in session.state.history.reply.tokens]
    assert iterator.sequence.ledger == session.ledger


def test_a_partial_of_another_request_is_refused(tmp_path) -> None:
    family, folder = "qwen2_5_vl", sources(tmp_path / "media")
    with pytest.raises(Cancelled) as stop:
        prepare(request(family, model(family), folder), cancel=StopAt(3))
    other = PrepareRequest(model(family), (Message("user", (image(folder, "A"), "?")),))
    with pytest.raises(InvalidValueError, match="pass the request it is of"):
        prepare(other, partial=stop.value.partial)


def test_text_alone_needs_no_media(tmp_path) -> None:
    prepared = prepare(PrepareRequest(model("gemma3"), (Message("user", ("Hello",)),)))
    assert prepared.complete
    assert prepared.media == []
    tokens = list(TokenIterator.from_input(model("gemma3"), prepared, options=reply().decode_options(3)))
    assert len(tokens) == 3
    cancel = StopAt(0)
    with pytest.raises(Cancelled) as stop:
        prepare(PrepareRequest(model("gemma3"), (Message("user", ("Hello",)),)), cancel=cancel)
    with pytest.raises(InvalidValueError, match="no token ids"):
        TokenIterator.from_input(model("gemma3"), stop.value.partial)
