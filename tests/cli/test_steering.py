"""Grammars, banned strings, stop patterns, prefixes, thinking budgets: flags, their errors, and runs that go on."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli.commands import Process, call, generate_args, llama, of, snapshots
from cli.talking import talk, turns
from steering_text.scripted import THINKING_TEMPLATE, sectioned

import mlxgen
from mlxgen.constraints import healing_at_end

SAMPLED = ("--temp", "0.9", "--seed", "2")
COLOURS = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "array",
    "items": {"enum": ["red", "green", "blue"]},
    "minItems": 90,
    "maxItems": 90,
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a schema and a grammar; the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colours.json").write_text(json.dumps(COLOURS))
    (tmp_path / "list.lark").write_text('start: item ("," item){80}\nitem: /[a-f]{2,4}/\n')
    return tmp_path


def one_line(err: str) -> str:
    (line,) = err.splitlines()
    assert line.startswith("mlxgen: error: ")
    return line


# -- what they do ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "fits"),
    [
        (("--json-schema", "colours.json"), lambda text: len(json.loads(text)) == 90),
        (("--regex", "[a-d]{3}-[0-9]{2}"), lambda text: re.fullmatch("[a-d]{3}-[0-9]{2}", text)),
        (("--grammar", "list.lark"), lambda text: re.fullmatch("([a-f]{2,4}(,|$)){81}", text)),
    ],
)
def test_the_reply_has_the_shape(capfdbinary: Any, files: Path, flags: tuple[str, ...], fits: Any) -> None:
    result = call(capfdbinary, *generate_args("--json", *flags, *SAMPLED, max_tokens=2000, ignore_eos=False))
    finished = of(result.events, "finished")[0]
    assert fits(finished["text"])
    assert finished["finish_reason"] == "stop"
    assert finished["stop"]["kind"] == "grammar"
    assert finished["stop"]["char_index"] == len(finished["text"])


def test_stop_pattern(capfdbinary: Any) -> None:
    whole = call(capfdbinary, *generate_args("--json", *SAMPLED)).events[-1]["text"]
    pattern = "[a-z] ?[a-z]"
    match = re.search(pattern, whole)
    finished = call(capfdbinary, *generate_args("--json", *SAMPLED, "--stop-regex", "qqq", "--stop-regex", pattern))
    stopped = finished.events[-1]
    assert stopped["text"] == whole[: match.start()]
    assert stopped["finish_reason"] == "stop"
    assert (stopped["stop"]["kind"], stopped["stop"]["value"]) == ("regex", pattern)
    assert stopped["stop"]["char_index"] == match.start()


def test_banned_strings_are_never_shown(capfdbinary: Any) -> None:
    whole = call(capfdbinary, *generate_args("--json", *SAMPLED, max_tokens=120)).events[-1]["text"]
    bans = ("st", "in", " t", "e")
    assert any(banned in whole for banned in bans)
    flags = [flag for banned in bans for flag in ("--ban", banned)]
    events = call(capfdbinary, *generate_args("--json", *SAMPLED, *flags, max_tokens=120)).events
    back = of(events, "backtrack")
    assert back
    assert all(set(event) == {"event", "index", "banned"} and event["banned"] in bans for event in back)
    text = events[-1]["text"]
    assert not any(banned in text for banned in bans)
    assert "".join(event["text"] for event in of(events, "token")) == text
    shown = call(capfdbinary, *generate_args(*SAMPLED, *flags, max_tokens=120))
    assert shown.out.decode().removesuffix("\n") == text.removesuffix("\n")


def test_a_prefix_is_part_of_the_answer(capfdbinary: Any, tmp_path: Path) -> None:
    prefix = "Once upon a time"
    events = call(capfdbinary, *generate_args("--json", "--reply-prefix", prefix, max_tokens=9)).events
    started, finished = events[0], events[-1]
    assert started["text"] == prefix
    assert started["position"] > 0
    assert [event["index"] for event in of(events, "token")] == [started["position"] + i for i in range(9)]
    assert finished["text"] == prefix + "".join(event["text"] for event in of(events, "token"))
    assert finished["usage"]["generated_tokens"] == 9
    # The same from the library.
    session = mlxgen.Session(mlxgen.load(llama()))
    session.add("hello there")
    session.append_text(prefix)
    *_, last = session.continue_(reply=mlxgen.ReplyOptions(max_tokens=9, ignore_eos=True))
    assert last.text == finished["text"]
    shown = call(capfdbinary, *generate_args("--reply-prefix", prefix, max_tokens=9))
    assert shown.out.decode().removesuffix("\n") == finished["text"].removesuffix("\n")


def test_a_prepared_prefix(capfdbinary: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "run.mlxgen")
    flags = ("--reply-prefix", "Well, ", *SAMPLED)
    whole = call(capfdbinary, *generate_args(*flags))
    prepared = call(capfdbinary, "prepare", *generate_args("--json", *flags, "--snapshot", path)[1:])
    assert of(prepared.events, "started")[0]["text"] == "Well, "
    shown = json.loads(call(capfdbinary, "snapshots", "show", path, "--json").out)
    assert shown["phase"] == "prefill"
    assert call(capfdbinary, "resume", path, "--from-start").out == whole.out


def test_healing(capfdbinary: Any) -> None:
    """What is taken off a cut prompt is written again by the first tokens, and not shown twice."""
    prompt = "one of th"
    tokenizer = tiny.load("llama")[1]
    removed = healing_at_end(tokenizer, tokenizer.encode(prompt, add_special_tokens=False)).text
    assert removed
    assert prompt.endswith(removed)
    raw = ("--ignore-chat-template", "--json")
    healed = call(capfdbinary, *generate_args(*raw, "--heal", prompt=prompt, max_tokens=8)).events
    said = tokenizer.decode([event["id"] for event in of(healed, "token")])
    assert said == removed + healed[-1]["text"]


def test_thinking(capfdbinary: Any) -> None:
    thinker = str(sectioned(THINKING_TEMPLATE).path)
    args = ["generate", "--model", thinker, "--prompt", "x", "--ignore-eos", "--max-tokens", "30", "--json"]
    events = call(capfdbinary, *args, "--thinking-budget", "7", "--sections").events
    sections = of(events, "section")
    assert [(event["kind"], event["began"]) for event in sections] == [("thinking", True), ("thinking", False)]
    assert set(sections[0]) == {"event", "kind", "began", "index", "char_index"}
    tokens = of(events, "token")
    assert [event["section"] for event in tokens[:7]] == ["thinking"] * 7
    assert tokens[-1]["section"] == "answer"
    finished = events[-1]
    assert [section["kind"] for section in finished["sections"]] == ["thinking", "answer"]
    assert "</think>" in finished["text"]
    ended = call(capfdbinary, *args, "--thinking-budget", "7", "--stop-after-thinking").events[-1]
    assert ended["stop"]["kind"] == "thinking"
    assert ended["text"].endswith("</think>")


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ("--json-schema", "colours.json"),
        ("--regex", "[a-z ]{400}"),
        ("--grammar", "list.lark"),
        ("--ban", "e", "--ban", "st", "--ban", " t", "--ignore-eos", "--stop-regex", "zq+[^z]*z"),
        ("--reply-prefix", "Once upon a time", "--ignore-eos"),
        ("--heal", "--reply-prefix", "It is one of th", "--ignore-eos"),
    ],
    ids=lambda flags: flags[0].strip("-"),
)
def test_text_of_two_processes_joins(capfdbinary: Any, files: Path, flags: tuple[str, ...]) -> None:
    args = ["generate", "--model", llama(), "--prompt", "hello there", "--max-tokens", "400", *SAMPLED, *flags]
    whole = call(capfdbinary, *args)
    process = Process([*args, "--snapshot", "run.mlxgen"], text=True)
    first = process.popen.stdout.read(20)
    process.signal(signal.SIGINT)
    stopped = process.finish()
    first += stopped.out
    assert stopped.code == 130
    assert len(first) < len(whole.out)
    again = call(capfdbinary, "resume", "run.mlxgen")
    assert first + again.out == whole.out
    assert call(capfdbinary, "resume", "run.mlxgen", "--from-start").out == whole.out


def test_killed_in_a_grammar(capfdbinary: Any, files: Path) -> None:
    args = ["generate", "--model", llama(), "--prompt", "x", "--max-tokens", "2000", "--json-schema", "colours.json"]
    whole = call(capfdbinary, *args, *SAMPLED)
    process = Process([*args, *SAMPLED, "--json", "--snapshot", "run.mlxgen"])
    process.narrow()
    process.tokens(20)
    process.signal(signal.SIGKILL)
    assert process.finish().code == -signal.SIGKILL
    (files / "colours.json").unlink()  # the snapshot has it
    assert call(capfdbinary, "resume", "run.mlxgen", "--from-start").out == whole.out


def test_resumed_with_other_settings(capfdbinary: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "run.mlxgen")
    whole = call(capfdbinary, *generate_args("--json")).events[-1]["text"]
    stop = whole[12:15]
    stopped = call(capfdbinary, *generate_args("--json", "--stop", stop, "--snapshot", path)).events
    assert of(stopped, "finished")[0]["text"] == whole[: whole.index(stop)]
    # Freed of it, the rest of the forty tokens.
    freed = call(capfdbinary, "resume", path, "--without", "stop", "--json").events
    assert of(freed, "finished")[0]["text"] == whole
    assert of(freed, "finished")[0]["usage"]["generated_tokens"] < 40
    # It has them all now.
    more = call(capfdbinary, "resume", path, "--ban", "e")
    assert more.code == 1
    assert "has all of its 40 tokens; give --max-tokens N" in one_line(more.err.splitlines()[-1])
    banned = call(capfdbinary, "resume", path, "--ban", "e", "--max-tokens", "60", "--json").events
    new = of(banned, "finished")[0]["text"].removeprefix(whole)
    assert len(new) > 20
    assert "e" not in new
    # What isn't named stays: the ban.
    still = call(capfdbinary, "resume", path, "--max-tokens", "60", "--stop-regex", "[0-9]", "--json").events
    assert not re.search("[e0-9]", of(still, "finished")[0]["text"].removeprefix(whole + new))


def test_a_prefix_that_the_grammar_forbids(capfdbinary: Any, files: Path) -> None:
    flags = ("--json-schema", "colours.json", "--reply-prefix", "Hm", "--snapshot", "run.mlxgen")
    result = call(capfdbinary, *generate_args(*flags, ignore_eos=False))
    assert result.code == 1
    kept, error = result.err.splitlines()
    assert "what was done is kept" in kept
    assert "doesn't follow the JSON schema" in one_line(error)
    freed = call(capfdbinary, "resume", "run.mlxgen", "--without", "grammar", "--from-start")
    assert freed.code == 0
    assert freed.out.startswith(b"Hm")


# -- in the chat -------------------------------------------------------------------------------------------------------


def test_every_answer_of_a_chat_begins_with_the_prefix(
    capfdbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "talk.mlxgen"
    lines = b"a\nb\n/retry\n/branch 2\n2\n/edit c\n"
    args = ("--reply-prefix", "Yes:", "--ban", "e", "--snapshot", str(path), *SAMPLED)
    _, out, _ = talk(capfdbinary, monkeypatch, lines, *args)
    replies = [text for role, text in turns(path) if role == "assistant"]
    assert len(replies) == 2
    assert all(text.startswith("Yes:") and "e" not in text.removeprefix("Yes:") for text in replies)
    assert out.count("Yes:") == 6


def test_a_grammar_in_a_chat(capfdbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "talk.mlxgen"
    args = ("--regex", "(yes|no)!", "--snapshot", str(path))
    talk(capfdbinary, monkeypatch, b"a\nb\n", *args, ignore_eos=False)
    assert all(text in ("yes!", "no!") for role, text in turns(path) if role == "assistant")


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--json-schema", "colour.json"), 1, "no file 'colour.json'; did you mean 'colours.json'?"),
        (("--json-schema", "no/such/x.json"), 1, "no file 'no/such/x.json': there is no folder 'no/such'"),
        (("--grammar", "."), 1, "can't read '.': Is a directory"),
        (("--json-schema", "list.lark"), 1, "list.lark: the JSON schema isn't JSON"),
        (("--json-schema", "latin.json"), 1, "latin.json is not UTF-8 (byte 0xe9 at position 1)"),
        (("--json-schema", "seven.json"), 1, "seven.json: a JSON schema is an object, not int"),
        (("--json-schema", "odd.json"), 1, "the JSON schema isn't valid"),
        (("--grammar", "colours.json"), 1, "the Lark grammar isn't valid"),
        (("--regex", "a(b"), 1, "the regular expression isn't valid"),
        (("--regex", "a", "--grammar", "list.lark"), 2, "--grammar: not allowed with argument --regex"),
        (("--regex", "-?[0-9]+"), 2, "one that begins with - is written --flag=VALUE"),
        (("--regex=a", "--heal"), 2, "leave one of the two out"),
        (("--regex=a", "--ignore-eos"), 2, "leave one of the two out"),
        (("--stop-regex", "(x"), 2, "stop pattern '(x' isn't a valid regular expression"),
        (("--stop-regex", "x*"), 2, "matches the empty text"),
        (("--ban", ""), 2, "banned string '' is empty"),
        (("--ban", os.fsdecode(b"caf\xe9")), 2, "--ban has bytes that aren't UTF-8 (at character 3)"),
        (("--reply-prefix", ""), 2, "--reply-prefix is empty"),
        (("--reply-prefix", os.fsdecode(b"caf\xe9")), 2, "--reply-prefix has bytes that aren't UTF-8"),
        (("--thinking-budget", "-1"), 2, "thinking_budget is -1"),
        (("--thinking-budget", "9"), 1, "has no thinking sections"),
        (("--stop-after-thinking",), 1, "has no thinking sections"),
    ],
)
def test_errors(capfdbinary: Any, files: Path, cache: Path, flags: tuple[str, ...], code: int, message: str) -> None:
    (files / "latin.json").write_bytes(b'"\xe9"')
    (files / "seven.json").write_text("7")
    (files / "odd.json").write_text('{"type": "colour"}')
    result = call(capfdbinary, *generate_args(*flags, ignore_eos=False))
    assert message in one_line(result.err)
    assert result.code == code
    assert result.out == b""
    assert snapshots(cache) == []
    chat = call(capfdbinary, "chat", "--model", llama(), *flags)
    assert message in one_line(chat.err)
    assert chat.code == code
    assert snapshots(cache) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--without", "everything"), "invalid choice: 'everything'"),
        (("--ban", ""), "banned string '' is empty"),
        (("--max-tokens", "-2"), "--max-tokens is -2"),
        (("--thinking-budget", "-1"), "thinking_budget is -1"),
    ],
)
def test_errors_of_resume(capfdbinary: Any, flags: tuple[str, ...], message: str) -> None:
    result = call(capfdbinary, "resume", "nowhere.mlxgen", *flags)
    assert message in one_line(result.err)
    assert result.code == 2


def test_without_the_package(capfdbinary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxgen.cli.settings.find_spec", lambda name: None)
    monkeypatch.setattr("mlxgen.cli.generate.load_model", lambda *args: pytest.fail("said before a model is loaded"))
    result = call(capfdbinary, *generate_args("--regex", "a"))
    assert result.code == 1
    assert 'pip install "mlxgen[grammar]"' in one_line(result.err)
