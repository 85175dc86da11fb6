"""A kill right behind a reply's last token: the resumed run must know that it was the last."""

from __future__ import annotations

import pytest
from harness import PROMPT, SETUPS, Outcome, greedy, model, new_session

from mlxgen.options import ReplyOptions
from mlxgen.resumption import ResumeOptions, resume


def endings() -> dict[str, ReplyOptions]:
    plain = Outcome()
    plain.take(new_session(SETUPS["llama"]).stream(PROMPT, reply=greedy()))
    text = plain.finished.text
    return {
        "length": ReplyOptions(max_tokens=6, ignore_eos=True),
        "length with half a stop string": ReplyOptions(
            max_tokens=6, ignore_eos=True, stop=(plain.text[-1] + "\u2603",)
        ),
        "stop token": ReplyOptions(max_tokens=50, ignore_eos=True, stop_token_ids=(plain.tokens[5].id,)),
        "stop string": ReplyOptions(max_tokens=50, ignore_eos=True, stop=(text[len(text) // 2 :][:3],)),
    }


@pytest.mark.parametrize("how", ["length", "length with half a stop string", "stop token", "stop string"])
def test_a_kill_after_any_record_ends_where_the_uninterrupted_run_ends(how, tmp_path) -> None:
    reply, setup = endings()[how], SETUPS["llama"]
    session, expected = new_session(setup), Outcome()
    path = session.autosave(tmp_path / "whole.mlxgen")
    expected.take(session.stream(PROMPT, reply=reply))
    session.close()
    lines = (path / "journal.log").read_bytes().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line[9:12] == b"tok")
    # One write holds the last token and the finish: what a kill leaves ends before that write or after it.
    last = max(i for i, line in enumerate(lines) if line[9:12] == b"tok")
    for end in [*range(first, last + 1), len(lines)]:
        cut = tmp_path / f"cut{end}.mlxgen"
        cut.mkdir(mode=0o700)
        (cut / "journal.log").write_bytes(b"".join(lines[:end]))
        with resume(cut, options=ResumeOptions(model=model("llama"))) as again:
            if again.unfinished:
                for _ in again.continue_():
                    pass
            assert again.history.reply.ids == [token.id for token in expected.tokens]
            assert again.reply_text == expected.finished.text
            assert again.last_finished.finish_reason == expected.finished.finish_reason


def test_the_last_token_its_marks_and_the_finish_are_one_write(tmp_path, monkeypatch) -> None:
    import os

    writes: list[bytes] = []
    real = os.write

    def recording(fd: int, data: bytes) -> int:
        writes.append(bytes(data))
        return real(fd, data)

    session = new_session(SETUPS["llama"])
    session.autosave(tmp_path / "whole.mlxgen")
    monkeypatch.setattr(os, "write", recording)
    session.send(PROMPT, reply=greedy(4))
    monkeypatch.undo()
    session.close()
    ending = next(data for data in writes if b" finish {" in data)
    assert b" tok [" in ending
    assert b" mark [" in ending
