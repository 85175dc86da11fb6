"""A turn that can't be part of any prompt must not be part of the next one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import SETUPS, StopAt, greedy, model, new_session

from mlxgen.errors import ContextLengthError, InvalidValueError, NotResumableError
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.session import Session


def test_a_prompt_that_is_too_long_is_taken_back_and_the_next_one_works() -> None:
    session = Session(replace(model("llama"), context_length=50))
    with pytest.raises(ContextLengthError, match="context 50"):
        session.send("word " * 100, reply=greedy(2))
    assert session.turns == ()
    assert session.send("short", reply=greedy(2)).finish_reason == "length"


def test_an_empty_raw_prompt_is_taken_back() -> None:
    session = Session(model("llama"), options=SessionOptions(raw=True))
    with pytest.raises(InvalidValueError, match="empty"):
        session.send("", reply=greedy(2))
    assert session.turns == ()


def test_a_reply_that_was_stopped_before_its_first_token_leaves_no_second_turn() -> None:
    session = new_session(SETUPS["llama"])
    session.send("One", reply=greedy(3), cancel=StopAt(0))
    session.send(reply=greedy(3), cancel=StopAt(0))
    session.send(reply=greedy(3))
    assert [turn.role for turn in session.turns] == ["system", "user", "assistant"]
    session.drop_reply()
    assert not session.unfinished


def test_going_on_with_a_foreign_processor_is_refused_while_saving(tmp_path) -> None:
    session = new_session(SETUPS["llama"])
    session.autosave(tmp_path / "s.mlxgen")
    session.send("One", reply=greedy(3), cancel=StopAt(4))
    with pytest.raises(NotResumableError):
        session.continue_(reply=ReplyOptions(max_tokens=2, processors=(lambda tokens, logits: logits,)))
    session.close()


def test_overwriting_leaves_one_whole_snapshot_at_any_moment(tmp_path, monkeypatch) -> None:
    from mlxgen.resumption import ResumeOptions, resume
    from mlxgen.snapshot.durable import Folder

    session = new_session(SETUPS["llama"])
    text = session.send("One", reply=greedy(4)).text
    path = session.save(tmp_path / "s.mlxgen")
    real, calls = Folder.remove, []

    def dies(self, name):
        calls.append(name)
        raise SystemExit("killed")

    monkeypatch.setattr(Folder, "remove", dies)
    with pytest.raises(SystemExit):
        session.save(path, overwrite=True)
    assert calls
    monkeypatch.setattr(Folder, "remove", real)
    with resume(path, options=ResumeOptions(model=model("llama"))) as again:
        assert again.reply_text == text


def test_a_model_loaded_on_one_thread_runs_on_another(tmp_path) -> None:
    """Tables of rotary frequencies are built lazily; evaluated at load, they belong to no thread."""
    import threading

    from tiny import make

    from mlxgen.models import load

    scaling = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
    scaling["original_max_position_embeddings"] = 256
    make("llama", tmp_path, config={"rope_scaling": scaling})
    fresh = load(str(tmp_path))
    results: list[object] = []

    def run() -> None:
        import mlx.core as mx

        try:
            results.append(Session(fresh).send("Hi", reply=greedy(2)).finish_reason)
        except Exception as error:
            results.append(error)
        mx.clear_streams()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results == ["length"]


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "quantized"])
def test_an_interrupt_between_going_back_and_its_record_changes_nothing(name, monkeypatch) -> None:
    """The worst place: the sequence has the new prompt already, the history doesn't."""
    from mlxgen.state import SessionState

    setup, real = SETUPS[name], SessionState.append

    def interrupted(self, *records):
        if any(record.type == "prompt" for record in records):
            raise KeyboardInterrupt
        return real(self, *records)

    expected, session = new_session(setup), new_session(setup)
    for one in (expected, session):
        one.send("One two three four five", reply=greedy(4))
    monkeypatch.setattr(SessionState, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.send("a longer one, with some more words in it", reply=greedy(4))
    monkeypatch.undo()
    session.undo()
    for one in (expected, session):
        list(one.continue_())
        one.send("third", reply=greedy(4))
    assert session.history.ids == expected.history.ids
    assert session.ledger == expected.ledger
    assert session.reply_text == expected.reply_text
