"""Sources that are missing or changed when their turn comes; the session stays usable."""

from __future__ import annotations

import shutil

import pytest
from harness import Outcome, StopAt
from PIL import Image
from vision_harness.jobs import Counts, counting, image, job, model, new_session, pixels, reply, sources

from mlxgen.errors import MediaError
from mlxgen.events import InputProgress
from mlxgen.request import ImagePart, VideoPart
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

FAMILY = "qwen2_5_vl"


def stopped_after(num_units, folder, path):
    """A snapshot of the job stopped when so many pictures and frames were prepared."""
    session = new_session(FAMILY)
    prepared = 0
    for event in session.stream(job(FAMILY, folder), reply=reply()):
        prepared += isinstance(event, InputProgress) and event.phase == "prepare"
        if prepared == num_units:
            break
    return session.save(path)


def change(path, seed=99):
    """Other content of the same size."""
    Image.fromarray(pixels(*reversed(Image.open(path).size), seed)).save(path)


@pytest.mark.parametrize("how", ["missing", "changed"])
@pytest.mark.parametrize(("num_units", "name"), [(1, "B.png"), (2, "C.png"), (3, "V"), (4, "V")])
def test_a_source_still_to_be_prepared_must_be_there_unchanged(num_units, name, how, tmp_path) -> None:
    whole = Outcome()
    whole.take(new_session(FAMILY).stream(job(FAMILY, sources(tmp_path / "other")), reply=reply()))
    folder = sources(tmp_path / "media")
    path = stopped_after(num_units, folder, tmp_path / "a.mlxgen")
    source = folder / name
    kept = tmp_path / "kept"
    shutil.copytree(source, kept) if source.is_dir() else shutil.copy(source, kept)
    if how == "changed":
        change(source / "3.png" if source.is_dir() else source)
    elif source.is_dir():
        shutil.rmtree(source)
    else:
        source.unlink()
    with resume(path, options=ResumeOptions(model=model(FAMILY))) as session:
        with pytest.raises(MediaError, match=str(source)) as caught:
            list(session.continue_())
        assert ("no such file" if how == "missing" else "changed") in str(caught.value)
        # Put back, the same reply goes on.
        if source.is_dir():
            shutil.rmtree(source)
        shutil.copytree(kept, source) if kept.is_dir() else shutil.copy(kept, source)
        outcome = Outcome()
        outcome.take(session.continue_())
        assert outcome.values == whole.values


def test_after_a_missing_picture_the_turn_can_be_undone_and_others_asked(tmp_path) -> None:
    folder = sources(tmp_path / "media")
    session = new_session(FAMILY)
    with pytest.raises(MediaError, match=r"nothing\.png"):
        session.send([ImagePart(folder / "nothing.png"), "What?"], reply=reply())
    session.undo()
    finished = session.send([image(folder, "A"), "What?"], reply=reply())
    expected = new_session(FAMILY).send([image(folder, "A"), "What?"], reply=reply())
    assert finished.text == expected.text


def test_a_picture_changed_between_add_and_reply_is_refused(tmp_path) -> None:
    folder = sources(tmp_path / "media")
    session = new_session(FAMILY)
    session.add([image(folder, "A"), VideoPart(folder / "V"), "What?"])
    change(folder / "A.png")
    with pytest.raises(MediaError, match=r"A\.png has changed"):
        session.send(reply=reply())
    shutil.copy(sources(tmp_path / "again") / "A.png", folder / "A.png")
    change(folder / "V" / "0.png")
    with pytest.raises(MediaError, match="V has changed"):
        session.send(reply=reply())


def test_what_was_in_memory_and_not_prepared_is_named_after_a_restart(tmp_path) -> None:
    folder = sources(tmp_path / "media")
    data = (folder / "B.png").read_bytes()
    session = new_session(FAMILY)
    session.send([image(folder, "A"), ImagePart(data), "What?"], reply=reply(), cancel=StopAt(1))
    assert [medium.prepared for medium in session.state.media] == [True, False]
    path = session.save(tmp_path / "a.mlxgen")
    with resume(path, options=ResumeOptions(model=counting(model(FAMILY), Counts()))) as again:
        with pytest.raises(MediaError, match=r"medium 2 \(<bytes>\) was passed in memory"):
            list(again.continue_())
        again.undo()
        finished = again.send([image(folder, "A"), ImagePart(data), "What?"], reply=reply())
    assert finished.usage.images_prepared == 2
    assert finished.usage.images_encoded == 2


def test_prepared_pictures_from_memory_survive_a_restart(tmp_path) -> None:
    folder = sources(tmp_path / "media")
    parts = [ImagePart((folder / "B.png").read_bytes()), ImagePart(pixels(60, 90, 0)), "What?"]
    whole, outcome = Outcome(), Outcome()
    whole.take(new_session(FAMILY).stream(parts, reply=reply()))
    session = Session(model(FAMILY), options=new_session(FAMILY).options)
    outcome.take(session.stream(parts, reply=reply(), cancel=StopAt(4)))
    path = session.save(tmp_path / "a.mlxgen")
    del session, parts
    with resume(path, options=ResumeOptions(model=model(FAMILY))) as again:
        outcome.take(again.continue_())
    assert outcome.values == whole.values
