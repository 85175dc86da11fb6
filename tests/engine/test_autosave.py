"""Snapshots while a session lives on: what they cost, what goes wrong on disks, and everything that rewinds."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from harness import PROMPT, SETUPS, Outcome, StopAt, counted, greedy, model, new_session, sampled

from mlxgen.errors import InvalidValueError, SnapshotError, SnapshotLockedError
from mlxgen.events import PrefillProgress, Token
from mlxgen.models import load
from mlxgen.persist import AutosavePolicy
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session

EVERY_TOKEN = AutosavePolicy(every_s=0.0, every_tokens=1, max_share=1e9)
AT_RUN_ENDS = AutosavePolicy(every_s=1e9, every_tokens=10**9)


def again(path, name="llama", **options):
    return resume(path, options=ResumeOptions(model=model(SETUPS[name].kind), **options))


def size_of(path: Path, prefix: str) -> int:
    return sum(p.stat().st_size for p in path.iterdir() if p.name.startswith(prefix))


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "ring"])
def test_a_save_writes_what_is_new(name, tmp_path) -> None:
    session = new_session(SETUPS[name])
    path = session.autosave(tmp_path / "a.mlxgen", policy=AT_RUN_ENDS)
    session.send(PROMPT, reply=greedy(8))
    written = []
    for _ in range(6):
        before = {p.name: p.stat().st_size for p in path.iterdir()}
        journal = (path / "journal.log").stat().st_size
        for _ in session.continue_():
            pass
        fresh = [p for p in path.iterdir() if p.name not in before and p.suffix == ".safetensors"]
        written.append(sum(p.stat().st_size for p in fresh))
        assert (path / "journal.log").stat().st_size - journal < 8 * 120 + 1500
    assert max(written) < 1.3 * min(written), "the same for the last eight tokens as for the first"
    session.close()
    with again(path, name) as other:
        assert other.notes == ()
        assert other.position == 56


def test_nothing_new_writes_no_arrays(tmp_path) -> None:
    session = new_session(SETUPS["qwen3_5"])
    path = session.autosave(tmp_path / "a.mlxgen")
    session.send(PROMPT, reply=greedy(4))
    session.save()
    before = {p.name for p in path.glob("*.safetensors")}
    session.save()
    session.close()
    assert {p.name for p in path.glob("*.safetensors")} == before


@pytest.mark.parametrize("name", ["llama", "quantized-later", "gemma3-window", "falcon_h1-list"])
def test_saving_at_every_token_changes_nothing_and_each_save_resumes(name, tmp_path) -> None:
    setup, reply = SETUPS[name], sampled(8)
    expected = Outcome()
    expected.take(new_session(setup).stream(PROMPT, reply=reply))
    session, outcome = new_session(setup), Outcome()
    path = session.autosave(tmp_path / "a.mlxgen", policy=EVERY_TOKEN)
    copies = []
    for event in session.stream(PROMPT, reply=reply):
        if isinstance(event, Token):
            outcome.tokens.append(event)
        if isinstance(event, Token | PrefillProgress):
            session._keeper._writer.wait()
            copies.append(shutil.copytree(path, tmp_path / f"{len(copies)}.mlxgen"))
    assert outcome.values == expected.values
    assert session.warnings == ()
    session.close()
    using, forward = counted(setup.kind)
    for copy in copies[1::2]:
        forward.lengths.clear()
        with resume(copy, options=ResumeOptions(model=using)) as other:
            assert other.notes == ()
            assert forward.num_tokens <= 2, "next to nothing is fed again"
            rest, before = Outcome(), other.position
            if other.unfinished:
                rest.take(other.continue_())
            assert rest.values == expected.values[before:]


# -- disks that fail ---------------------------------------------------------------------------------------------------


class FullDisk:
    """`os.write` raises ENOSPC for every file while `full`; after having written a part of it, as disks do."""

    def __init__(self, monkeypatch) -> None:
        self.full = False
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, fd, data):
        if self.full:
            if len(data) > 10:
                self._write(fd, bytes(data[:5]))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(fd, data)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_full_disk_never_stops_the_generation_and_later_saves_catch_up(name, tmp_path, monkeypatch) -> None:
    setup, reply = SETUPS[name], sampled(14)
    expected = Outcome()
    expected.take(new_session(setup).stream(PROMPT, reply=reply))
    disk = FullDisk(monkeypatch)
    session, outcome = new_session(setup), Outcome()
    path = session.autosave(tmp_path / "a.mlxgen", policy=EVERY_TOKEN)
    for event in session.stream(PROMPT, reply=reply):
        if isinstance(event, Token):
            outcome.tokens.append(event)
            if event.index == 3:
                session._keeper._writer.wait()
                last_good = shutil.copytree(path, tmp_path / "good.mlxgen")
                disk.full = True
            if event.index == 8:
                during = shutil.copytree(path, tmp_path / "during.mlxgen", ignore=shutil.ignore_patterns(".tmp-*"))
                disk.full = False
    assert outcome.values == expected.values
    texts = [warning for warning in session.warnings if "isn't being saved" in warning]
    assert len(texts) == len(set(texts)) >= 1
    assert "free some disk space" in texts[0]
    path = session.save()
    session.close()
    disk.full = False
    for snapshot in (last_good, during, path):
        with again(snapshot, name) as other:
            rest, before = Outcome(), other.position
            if other.unfinished:
                rest.take(other.continue_())
            assert rest.values == expected.values[before:]
            assert other.reply_text == expected.finished.text


def test_an_explicit_save_on_a_full_disk_is_an_error_and_the_session_lives(tmp_path, monkeypatch) -> None:
    disk = FullDisk(monkeypatch)
    session = new_session(SETUPS["llama"])
    session.send(PROMPT, reply=greedy(4))
    disk.full = True
    with pytest.raises(SnapshotError, match="free some disk space"):
        session.save(tmp_path / "a.mlxgen")
    assert not (tmp_path / "a.mlxgen" / "journal.log").exists()
    disk.full = False
    session.save(tmp_path / "a.mlxgen")
    kept = new_session(SETUPS["llama"])
    kept.autosave(tmp_path / "b.mlxgen")
    kept.send(PROMPT, reply=greedy(4))
    disk.full = True
    kept.send("More", reply=greedy(4))
    with pytest.raises(SnapshotError, match="isn't saved"):
        kept.save()
    disk.full = False
    kept.save()
    ledger = kept.ledger
    kept.close()
    with again(tmp_path / "b.mlxgen") as other:
        assert (other.ledger, other.notes) == (ledger, ())


def test_a_full_disk_at_the_end_loses_arrays_but_no_sense(tmp_path, monkeypatch) -> None:
    disk = FullDisk(monkeypatch)
    session = new_session(SETUPS["qwen3_5"])
    path = session.autosave(tmp_path / "a.mlxgen", policy=AT_RUN_ENDS)
    session.send(PROMPT, reply=greedy(4))
    text = session.reply_text
    disk.full = True
    session.send("More", reply=greedy(4))
    session.close()
    disk.full = False
    with again(path, "qwen3_5") as other:
        assert other.reply_text == text
        assert other.send("More", reply=greedy(4)).finish_reason == "length"


def test_a_folder_that_can_t_be_written_is_a_clear_error(tmp_path, monkeypatch) -> None:
    session = new_session(SETUPS["llama"])
    session.send("Hi", reply=greedy(2))

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(SnapshotError, match="make the folder writable for you, or use another path"):
        session.save(tmp_path / "a.mlxgen")
    monkeypatch.undo()
    for taken in ("file", "folder"):
        target = tmp_path / taken
        target.write_text("mine") if taken == "file" else (target.mkdir(), (target / "x").write_text("mine"))
        for overwrite in (False, True):
            with pytest.raises(SnapshotError, match="use another path"):
                session.save(target, overwrite=overwrite)
    assert session.send("More", reply=greedy(2)).finish_reason == "length"


# -- rewinds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETUPS)
def test_undo_and_another_turn_then_resume(name, tmp_path) -> None:
    setup = SETUPS[name]
    session = new_session(setup)
    path = session.autosave(tmp_path / "a.mlxgen", policy=EVERY_TOKEN)
    session.send(PROMPT, reply=sampled(6))
    session.send("A second question, which is wrong.", reply=sampled(5), cancel=StopAt(5))
    session.undo()
    copies = [shutil.copytree(path, tmp_path / "undone.mlxgen")]
    session.send("The right one?", reply=sampled(6), cancel=StopAt(5))
    copies.append(shutil.copytree(path, tmp_path / "stopped.mlxgen"))
    rest = Outcome()
    rest.take(session.continue_())
    ledger, passes = session.ledger, session.sequence.passes
    session.close()
    with again(copies[0], name) as other:
        assert len(other.turns) == 3
        other.send("The right one?", reply=sampled(6))
        assert (other.ledger, other.sequence.passes) == (ledger, passes)
    with again(copies[1], name) as other:
        outcome = Outcome()
        outcome.take(other.continue_())
        assert outcome.values == rest.values
        assert (other.ledger, other.sequence.passes) == (ledger, passes)
    for manifest in copies[1].glob("manifest-*"):
        manifest.unlink()
    with again(copies[1], name) as other:  # from the journal alone: rewinds are run again, too
        assert (other.ledger, other.sequence.passes) == (ledger, passes)
        follow = other.send("And?", reply=sampled(4)).text
    with again(path, name) as other:
        assert other.send("And?", reply=sampled(4)).text == follow


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "quantized-later"])
def test_a_reply_whose_successor_was_undone_goes_on_in_its_own_place(name, tmp_path) -> None:
    setup = SETUPS[name]
    expected = Outcome()
    expected.take(new_session(setup).stream(PROMPT, reply=greedy(12)))
    session, outcome = new_session(setup), Outcome()
    outcome.take(session.stream(PROMPT, reply=greedy(6)))
    session.send("Something else entirely", reply=greedy(5))
    session.undo()
    path = session.save(tmp_path / "a.mlxgen")
    in_memory, resumed = replace_tokens(outcome), replace_tokens(outcome)
    in_memory.take(session.continue_())
    assert [t.id for t in in_memory.tokens] == [t.id for t in expected.tokens]
    assert in_memory.finished.text == expected.finished.text
    with again(path, name) as other:
        resumed.take(other.continue_())
    assert resumed.values == in_memory.values


def replace_tokens(outcome: Outcome) -> Outcome:
    return Outcome(list(outcome.tokens))


THINKING = (
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last %}{% set text = 'an answer' %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + text + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_template_that_rewrites_earlier_turns(kind, tmp_path) -> None:
    """As Qwen 3 drops old thinking: what is shared is kept, the rest computed anew, saved and resumed like that."""
    folder = Path(shutil.copytree(tiny.folder(kind), tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": THINKING}))
    using = load(str(folder))
    setup = replace(SETUPS["llama"], kind=kind)
    session = Session(using, options=setup.session_options)
    path = session.autosave(tmp_path / "a.mlxgen", policy=EVERY_TOKEN)
    session.send(PROMPT, reply=sampled(6))
    session.send("Next?", reply=sampled(6), cancel=StopAt(4))
    copy = shutil.copytree(path, tmp_path / "copy.mlxgen")
    assert "an answer" in using.tokenizer.decode(session.ledger)
    if kind == "llama":
        assert any(r.type == "prompt" and 0 < r.data["keep"] < 60 for r in session.history.records[1:])
    whole = Outcome()
    whole.take(session.continue_())
    with resume(copy, options=ResumeOptions(model=using)) as other:
        outcome = Outcome()
        outcome.take(other.continue_())
        assert outcome.values == whole.values
    fresh = Session(using, options=setup.session_options)
    fresh.add(PROMPT)
    assert fresh.send("Next?", reply=sampled(2)).finish_reason == "length"
    session.close()


def test_quantisation_that_sets_in_between_two_saves(tmp_path) -> None:
    setup = replace(SETUPS["quantized-later"], cache=replace(SETUPS["quantized-later"].cache, quantized_kv_start=72))
    expected = Outcome()
    expected.take(new_session(setup).stream(PROMPT, reply=sampled(14)))
    session, outcome = new_session(setup), Outcome()
    path = session.autosave(tmp_path / "a.mlxgen", policy=EVERY_TOKEN)
    kinds = set()
    for event in session.stream(PROMPT, reply=sampled(14)):
        if isinstance(event, Token):
            outcome.tokens.append(event)
            session._keeper._writer.wait()
            copy = shutil.copytree(path, tmp_path / f"{event.index}.mlxgen")
            newest = max(copy.glob("manifest-*"))
            kinds |= {leaf["kind"] for leaf in json.loads(newest.read_bytes())["body"]["cache"]["leaves"]}
    assert kinds == {"kv", "quantized"}
    assert outcome.values == expected.values
    session.close()
    for index in range(0, 14, 3):
        with resume(tmp_path / f"{index}.mlxgen", options=ResumeOptions(model=model("llama"))) as other:
            assert other.notes == ()
            rest, before = Outcome(), other.position
            if other.unfinished:
                rest.take(other.continue_())
            assert rest.values == expected.values[before:]


# -- places and locks --------------------------------------------------------------------------------------------------


def test_two_places_are_two_snapshots(tmp_path) -> None:
    session = new_session(SETUPS["llama"])
    first = session.autosave(tmp_path / "a.mlxgen")
    session.send(PROMPT, reply=greedy(8), cancel=StopAt(8))
    second = session.save(tmp_path / "b.mlxgen")
    session.continue_().close()
    with pytest.raises(InvalidValueError, match="saved to"):
        session.autosave(tmp_path / "c.mlxgen")
    with pytest.raises(SnapshotError, match="is a snapshot already"):
        session.save(second)
    with again(second) as other:
        outcome = Outcome()
        outcome.take(other.continue_())
    session.save(second, overwrite=True)
    rest = Outcome()
    rest.take(session.continue_())
    assert rest.values == outcome.values
    assert session.snapshot_path == first
    session.close()


def test_the_lock_is_held_while_it_is_saved_and_given_back(tmp_path) -> None:
    session = new_session(SETUPS["llama"])
    path = session.autosave(tmp_path / "a.mlxgen")
    session.send(PROMPT, reply=greedy(4))
    with pytest.raises(SnapshotLockedError, match=f"process {os.getpid()}"):
        again(path)
    session.close()
    session.close()
    one = again(path)
    with pytest.raises(SnapshotLockedError):
        again(path)
    del one
    gc.collect()
    two = again(path)
    events = two.stream("More", reply=greedy(50))
    next(events)
    del two, events
    gc.collect()
    with again(path) as three:
        assert three.turns[-1].reply is not None
    script = f"""
        import sys
        from mlxgen.snapshot.store import SnapshotStore
        store = SnapshotStore.open({str(path)!r})
        print("locked", flush=True)
        sys.stdin.read()
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(SnapshotLockedError, match=f"process {other.pid}"):
        again(path)
    other.communicate()
    again(path).close()


# -- moments -----------------------------------------------------------------------------------------------------------


def test_a_snapshot_of_an_empty_session(tmp_path) -> None:
    path = new_session(SETUPS["qwen3_5"]).save(tmp_path / "a.mlxgen")
    with again(path, "qwen3_5") as other:
        assert (other.ledger, other.notes, other.unfinished) == ([], (), False)
        text = other.send(PROMPT, reply=greedy(4)).text
    assert text == new_session(SETUPS["qwen3_5"]).send(PROMPT, reply=greedy(4)).text
    bare = Session(model("llama")).save(tmp_path / "b.mlxgen")
    with again(bare) as other, pytest.raises(InvalidValueError):
        other.continue_()


def test_a_turn_without_a_reply_and_a_stop_before_the_prompt(tmp_path) -> None:
    session = new_session(SETUPS["lfm2"])
    session.add(PROMPT)
    path = session.save(tmp_path / "a.mlxgen")
    with again(path, "lfm2") as other:
        text = other.send(None, reply=greedy(4)).text
    stopped = new_session(SETUPS["lfm2"])
    stopped.send(PROMPT, reply=greedy(4), cancel=StopAt(0))
    path = stopped.save(tmp_path / "b.mlxgen")
    with again(path, "lfm2") as other:
        assert other.unfinished
        outcome = Outcome()
        outcome.take(other.continue_())
        assert outcome.finished.text == text


def test_a_finished_session_resumes_as_finished_and_goes_on(tmp_path) -> None:
    session = new_session(SETUPS["gemma3-window"])
    session.send(PROMPT, reply=sampled(5))
    path = session.save(tmp_path / "a.mlxgen")
    using, forward = counted("gemma3")
    with resume(path, options=ResumeOptions(model=using)) as other:
        assert other.last_finished.text == session.reply_text
        assert not other.unfinished
        assert forward.lengths == []
        outcome, expected = Outcome(), Outcome()
        outcome.take(other.continue_())
        expected.take(session.continue_())
        assert outcome.values == expected.values


@pytest.mark.parametrize("name", ["llama", "ring", "qwen3_5", "quantized-later"])
def test_ten_resumes_in_a_row_are_one_run(name, tmp_path) -> None:
    setup, reply = SETUPS[name], sampled(24)
    expected = Outcome()
    expected.take(new_session(setup).stream(PROMPT, reply=reply))
    session, outcome = new_session(setup), Outcome()
    outcome.take(session.stream(PROMPT, reply=reply, cancel=StopAt(2)))
    path = session.save(tmp_path / "a.mlxgen")
    using, forward = counted(setup.kind)
    for cycle in range(10):
        with resume(path, options=ResumeOptions(model=using)) as other:
            assert other.notes == ()
            if cycle == 4:
                other.close()  # opened and closed: nothing changes
                continue
            outcome.take(other.continue_(cancel=StopAt(None if cycle == 9 else 2 + cycle % 2)))
    assert outcome.values == expected.values
    assert outcome.finished.text == expected.finished.text
    assert forward.num_tokens + 32 == len(other.history.ids) - 1, "nothing twice over all of them"


def test_resuming_is_cancellable_and_leaves_the_snapshot_as_it_was(tmp_path) -> None:
    from mlxgen.cancellation import Cancelled

    session = new_session(SETUPS["llama"])
    session.send(PROMPT, reply=sampled(6))
    path = session.save(tmp_path / "a.mlxgen")
    before = {p.name: p.read_bytes() for p in path.iterdir() if p.name != "lock"}
    for stop_at in range(3):
        try:
            resume(path, options=ResumeOptions(model=model("llama")), cancel=StopAt(stop_at)).close()
            assert stop_at
        except Cancelled:
            assert {p.name: p.read_bytes() for p in path.iterdir() if p.name != "lock"} == before
    with again(path) as other:
        assert other.reply_text == session.reply_text
