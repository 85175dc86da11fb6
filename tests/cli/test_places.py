"""Going back, editing, forking and branching in the chat: what the conversation is afterwards, and what is kept."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from cli.commands import LONG, llama, snapshots
from cli.talking import Terminal, talk, turns
from mlxgen_vision.demo_pictures import example_picture

import mlxgen
from mlxgen.cli.overview import look

SAMPLED = ("--temp", "1.0", "--seed", "5")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "talk.mlxgen"


def answers(path: Path) -> list[str]:
    return [text for role, text in turns(path) if role == "assistant"]


def asked(path: Path) -> list[str]:
    return [text for role, text in turns(path) if role == "user"]


# -- going back --------------------------------------------------------------------------------------------------------


def test_rewind(capfdbinary: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"a\nb\nc\n/rewind 2\n/rewind\n/rewind\n/rewind 2\n/rewind 0\n/rewind nowhere\n/turns\n/retry\n"
    code, _, err = talk(capfdbinary, monkeypatch, lines, "--snapshot", str(path))
    assert code == 0
    assert "took back 2 of your turns, from this one on: b" in err
    assert "took back the last answer; /retry answers again" in err
    assert "doesn't end with an answer; /rewind N" in err
    assert "can't take back 2 turns of 1; give 1 to 1" in err
    assert "can't take back 0 turns of 1" in err
    assert "no mark 'nowhere' in this conversation; /mark NAME sets one" in err
    assert "\n1  a\n" in err
    assert asked(path) == ["a"]
    assert len(answers(path)) == 1


def test_marks_also_in_another_process(capfdbinary: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"a\n/mark start\nb\n/mark\n/mark 7\nc\n/rewind start\nd\n/rewind m1\n"
    _, _, err = talk(capfdbinary, monkeypatch, lines, "--snapshot", str(path))
    assert "/rewind start comes back here" in err
    assert "/rewind m1 comes back here" in err
    assert "'7' can't be a name; give a letter" in err
    assert "back at start: 1 of your turns" in err
    assert "no mark 'm1' in this conversation; the marks there are: m0, start" in err
    assert asked(path) == ["a", "d"]
    _, _, err = talk(capfdbinary, monkeypatch, b"/rewind start\n/rewind m0\ne\n", "--resume", str(path), model=False)
    assert "no mark 'start' in this conversation; the marks there are: m0" in err
    assert asked(path) == ["a", "e"]


def test_edit(capfdbinary: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, direct, _ = talk(capfdbinary, monkeypatch, b"good day\n")
    lines = b"/edit x\nhello\nbye\n/edit 1 good day\n"
    _, _, err = talk(capfdbinary, monkeypatch, lines, "--snapshot", str(path))
    assert "there is no turn to edit" in err
    assert "turn 1 was: hello" in err
    assert turns(path) == [("user", "good day"), ("assistant", direct.removesuffix("\n"))]
    lines = b"/edit\n/edit 1\n/edit 9 lives\n/edit the  last\n"
    _, _, err = talk(capfdbinary, monkeypatch, lines, "--resume", str(path), model=False)
    assert err.count("/edit needs the new text") == 2
    assert "there is no turn 9; give 1 to 1 (a text that begins with a number: /edit 1 9 lives)" in err
    assert asked(path) == ["the  last"]


# -- forks -------------------------------------------------------------------------------------------------------------


def test_forks_beside_a_named_snapshot(capfdbinary: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"a\n/fork idea\nb\n/switch main\nc\n/switch\n/fork idea\n/fork 1st\n/switch nowhere\n/switch idea\nd\n"
    code, _, err = talk(capfdbinary, monkeypatch, lines, "--snapshot", str(path))
    beside = path.with_name("talk-idea.mlxgen")
    assert code == 0
    assert f"this is 'idea' now, kept in {beside}; /switch main goes back" in err
    assert "\n  idea: 2 turns, the last: b\n* main: 2 turns, the last: c\n" in err
    assert "there is a conversation 'idea' already" in err
    assert "'1st' can't be a name" in err
    assert "no conversation 'nowhere'; there are: main, idea" in err
    assert asked(path) == ["a", "c"]
    assert asked(beside) == ["a", "b", "d"]
    assert answers(path)[0] == answers(beside)[0]
    lines_of_leaving = [line for line in err.splitlines() if "is kept; go on with" in line]
    assert [re.search(r"conversation '(\w+)'.*--resume (\S+)$", line).groups() for line in lines_of_leaving] == [
        ("main", str(path)),
        ("idea", str(beside)),
    ]
    # The same name again would overwrite it.
    _, _, err = talk(capfdbinary, monkeypatch, b"/fork idea\n/fork\n", "--resume", str(path), model=False)
    assert f"{beside} exists already; give the fork another name" in err
    assert asked(path.with_name("talk-fork1.mlxgen")) == ["a", "c"]


def test_a_fork_answers_like_the_original(capfdbinary: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(capfdbinary, monkeypatch, b"a\n/fork idea\nb\n/switch main\nb\n", "--snapshot", str(path), *SAMPLED)
    assert turns(path) == turns(path.with_name("talk-idea.mlxgen"))


def test_forks_in_the_cache_folder(capfdbinary: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, err = talk(capfdbinary, monkeypatch, b"/fork\n/fork\n/switch main\nhello\n/fork\nbye\n")
    # Where nothing was said nothing is kept.
    kept = [cache / name for name in snapshots(cache)]
    assert sorted(asked(one) for one in kept) == [["hello"], ["hello", "bye"]]
    assert err.count("is kept; go on with") == 2


def test_a_fork_keeps_its_pictures(path: Path, cache: Path, tmp_path: Path) -> None:
    """Killed right after /fork, and the picture is gone: the fork has it."""
    picture = tmp_path / "two.png"
    example_picture("two").save(picture)
    terminal = Terminal(["chat", "--model", "shapes-vl", "--snapshot", str(path), "--max-tokens", "12"])
    try:
        terminal.wait_for(b"> ")
        terminal.type(f"/image {picture}\n".encode())
        terminal.wait_for(b"\n> ")
        terminal.type(b"Describe the picture.\n")
        terminal.wait_for(b"green square")
        terminal.wait_for(b"\n> ")
        terminal.type(b"/fork idea\n")
        terminal.wait_for(b"idea> ")
        terminal.process.kill()
    finally:
        terminal.close()
    picture.unlink()
    with mlxgen.resume(path.with_name("talk-idea.mlxgen")) as session:
        session.rewind()
        assert session.send().text == "A red circle and a green square."
        assert session.last_finished is not None


# -- branches ----------------------------------------------------------------------------------------------------------


def test_branches_are_what_retries_would_be(capfdbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retries = tmp_path / "retries.mlxgen"
    _, expected, _ = talk(
        capfdbinary, monkeypatch, b"hello\n/retry\n/retry\n/retry\n", "--snapshot", str(retries), *SAMPLED
    )
    for choice, num_retries in ((b"3\n", 3), (b"x\n9\n\n", 1)):
        path = tmp_path / f"{num_retries}.mlxgen"
        lines = b"hello\n/branch 3\n" + choice + b"bye\n"
        _, shown, err = talk(capfdbinary, monkeypatch, lines, "--snapshot", str(path), *SAMPLED)
        assert shown.startswith(expected)
        assert f"kept answer {num_retries}\n" in err
        assert err.count("is none of them; give 1 to 3") == (2 if num_retries == 1 else 0)
        assert asked(path) == ["hello", "bye"]
        other = tmp_path / f"retried{num_retries}.mlxgen"
        lines = b"hello\n" + b"/retry\n" * num_retries
        talk(capfdbinary, monkeypatch, lines, "--snapshot", str(other), *SAMPLED)
        assert answers(path)[:1] == answers(other)


def test_a_branch_where_there_is_no_answer_yet(capfdbinary: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"hello\n/rewind\n/branch 2\n2\n/continue\n"
    _, shown, _ = talk(capfdbinary, monkeypatch, lines, "--snapshot", str(path), *SAMPLED)
    assert asked(path) == ["hello"]
    (answer,) = answers(path)
    assert shown.endswith(answer[-3:] + ("" if answer.endswith("\n") else "\n"))
    assert len(look(path).history.turns[1].reply.tokens) > 6


def test_no_choice_keeps_none(capfdbinary: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, err = talk(capfdbinary, monkeypatch, b"hello\n/branch 2\n", "--snapshot", str(path), *SAMPLED)
    assert "(none was kept; the conversation is as it was)" in err
    _, first, _ = talk(capfdbinary, monkeypatch, b"hello\n", *SAMPLED)
    assert turns(path) == [("user", "hello"), ("assistant", first.removesuffix("\n"))]


def test_what_a_branch_needs(capfdbinary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"/branch 3\nhello\n/branch\n/branch 1\n/branch 65\n/branch x\n"
    _, _, err = talk(capfdbinary, monkeypatch, lines, *SAMPLED)
    assert "there is no turn to answer yet" in err
    assert err.count("/branch needs how many answers, from 2 to 64: /branch 3") == 4
    _, _, err = talk(capfdbinary, monkeypatch, b"hello\n/branch 3\n")
    assert "with --temp 0 all 3 answers would be the same; begin the chat with --temp 0.8, say" in err


def test_ctrl_c_in_a_branch_and_at_the_question(path: Path, cache: Path) -> None:
    args = ["chat", "--model", llama(), "--ignore-eos", "--snapshot", str(path), *SAMPLED]
    terminal = Terminal([*args, "--max-tokens", str(LONG)])
    try:
        terminal.wait_for(b"> ")
        terminal.type(b"hello\n")
        terminal.wait_for(rb"prompt +100%")
        terminal.wait_for(rb"\x1b\[K[^\r]{30,}")
        terminal.type(b"\x03")
        terminal.wait_for(rb"/continue goes on")
        terminal.wait_for(b"> ")
        before = turns(path)
        terminal.type(b"/branch 3\n")
        terminal.wait_for(rb"answer 1 of 3")
        terminal.wait_for(rb"\x1b\[K[^\r]{30,}")
        terminal.type(b"\x03")
        terminal.wait_for(rb"none was kept")
        terminal.wait_for(b"> ")
        assert turns(path) == before
        # The stopped answer is still there to go on with.
        terminal.type(b"/continue\n")
        terminal.wait_for(rb"/continue\r\n[^\r]{30,}")
        terminal.type(b"\x03")
        terminal.wait_for(rb"/continue goes on")
        terminal.wait_for(b"> ")
        longer = turns(path)
        assert len(longer[1][1]) > len(before[1][1])
        assert longer[1][1].startswith(before[1][1])
        terminal.type(b"/branch 2\n")
        terminal.wait_for(rb"answer 1 of 2")
        terminal.wait_for(rb"\x1b\[K[^\r]{30,}")
        terminal.process.kill()
    finally:
        terminal.close()
    assert turns(path) == longer


def test_a_choice_is_kept_at_once(path: Path, cache: Path) -> None:
    args = ["chat", "--model", llama(), "--ignore-eos", "--snapshot", str(path), *SAMPLED, "--max-tokens", "6"]
    terminal = Terminal(args)
    try:
        terminal.wait_for(b"> ")
        terminal.type(b"hello\n")
        terminal.wait_for(b"\n> ")
        before = turns(path)
        terminal.type(b"/branch 2\n")
        terminal.wait_for(b"keep which")
        terminal.type(b"\x03")
        terminal.wait_for(rb"none was kept")
        terminal.wait_for(b"\n> ")
        assert turns(path) == before
        terminal.type(b"/branch 2\n")
        terminal.wait_for(b"keep which")
        terminal.type(b"2\n")
        terminal.wait_for(b"kept answer 2")
        terminal.process.send_signal(signal.SIGKILL)
    finally:
        terminal.close()
    after = turns(path)
    assert [role for role, _ in after] == ["user", "assistant"]
    assert after != before


def test_sigterm_at_the_question_leaves_the_conversation_as_it_was(path: Path, cache: Path) -> None:
    terminal = Terminal(
        ["chat", "--model", llama(), "--ignore-eos", "--snapshot", str(path), *SAMPLED, "--max-tokens", "6"]
    )
    try:
        terminal.wait_for(b"> ")
        terminal.type(b"hello\n")
        terminal.wait_for(b"\n> ")
        before = turns(path)
        terminal.type(b"/branch 2\n")
        terminal.wait_for(b"keep which")
        terminal.process.terminate()
        terminal.wait_for(rb"chat --resume")
    finally:
        code = terminal.close()
    assert code == 143
    assert turns(path) == before
    history = (cache.parent / "chat_history").read_text().splitlines()
    assert history == ["hello", "/branch 2"]
