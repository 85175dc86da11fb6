"""Thinking sections, budgets for them, and tool calls, as typed events; cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import SETUPS, StopAt
from scripted import (
    MARKERS,
    THINKING_TEMPLATE,
    TOOL_TEMPLATE,
    Heard,
    Talker,
    cut_everywhere,
    left_everywhere,
    says,
    sectioned,
)
from tiny.tokenizer import build_tokenizer

from mlxgen.errors import MlxgenError, SnapshotError
from mlxgen.events import Backtrack, Section, SectionText, Token, ToolCall
from mlxgen.options import ReplyOptions
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.sections import SectionMarkers, SectionTracker, ToolText

CALL = '{"name":"f","arguments":{"a":1}}'
WORDS = f"<think>so\n</think>I see. <tool_call>{CALL}</tool_call> It is."
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def plain(max_tokens: int | None = 200, **options: Any) -> ReplyOptions:
    return ReplyOptions(max_tokens=max_tokens, ignore_eos=True, **{"sections": True, **options})


def exactly(talker: Talker, text: str, **options: Any) -> ReplyOptions:
    return plain(len(talker.encode(text)), **options)


def spread(template: str = TOOL_TEMPLATE) -> Talker:
    """A model whose markers are several tokens each: mlx-lm finds them by the template only."""
    return says(sectioned(template, ("<|channel>", "<channel|>")), "")


# -- events -----------------------------------------------------------------------------------------------------------


def test_sections_and_calls_are_typed_events() -> None:
    talker = says(sectioned(), WORDS)
    heard = talker.run(exactly(talker, WORDS))
    ids = talker.encode(WORDS)
    at = {marker: ids.index(talker.encode(marker)[0]) for marker in MARKERS}
    places = {marker: WORDS.index(marker) for marker in MARKERS}
    assert heard.of(Section, ToolCall) == [
        Section("thinking", True, 0, len("<think>")),
        Section("thinking", False, at["</think>"], places["</think>"]),
        Section("tool_call", True, at["<tool_call>"], places["<tool_call>"] + len("<tool_call>")),
        Section("tool_call", False, at["</tool_call>"], places["</tool_call>"]),
        ToolCall("f", {"a": 1}, at["</tool_call>"], CALL),
    ]
    for event in heard.of(Token):
        thinking = event.index <= at["</think>"]
        calling = at["<tool_call>"] <= event.index <= at["</tool_call>"]
        assert event.section == ("thinking" if thinking else "tool_call" if calling else "answer")
    # Each stands directly behind its token.
    for position, event in enumerate(heard.events):
        if not isinstance(event, Token):
            before = next(e for e in reversed(heard.events[:position]) if isinstance(e, Token))
            assert before.index == event.index
    assert heard.finished.text == WORDS
    assert heard.finished.sections == (
        SectionText("thinking", "so\n"),
        SectionText("answer", "I see. "),
        SectionText("tool_call", CALL),
        SectionText("answer", " It is."),
    )
    assert heard.finished.tool_calls == tuple(heard.of(ToolCall))


def test_nothing_is_said_of_sections_unless_asked_for() -> None:
    talker = says(sectioned(), WORDS)
    heard = talker.run(exactly(talker, WORDS, sections=False))
    assert heard.of(Section, ToolCall) == []
    assert {event.section for event in heard.of(Token)} == {None}
    assert (heard.finished.sections, heard.finished.tool_calls) == ((), ())


@pytest.mark.parametrize("options", [{}, {"ban": ("I see",)}, {"stop_regex": ("z{9}",), "stop": ("It is no",)}])
def test_stopping_anywhere_changes_nothing(options, tmp_path) -> None:
    talker = says(sectioned(), WORDS)
    reply = exactly(talker, WORDS, **options)
    assert bool(talker.run(reply).of(Backtrack)) == ("ban" in options)
    cut_everywhere(talker, reply, every=2 if options else 1)
    cut_everywhere(talker, reply, tmp_path, every=9)


def test_leaving_the_loop_loses_no_token_and_finished_has_the_rest() -> None:
    talker = says(sectioned(), WORDS)

    def check(heard: Heard, whole: Heard) -> None:
        assert heard.of(Token) == whole.of(Token)
        assert heard.outcome[1:] == whole.outcome[1:]

    left_everywhere(talker, exactly(talker, WORDS), check)


def test_what_may_be_taken_back_is_not_told_yet() -> None:
    """A tool call inside of what may become a banned string: its events wait until that is settled."""
    talker = says(sectioned(), WORDS)
    reply = exactly(talker, WORDS, ban=("</tool_call> It was",))
    heard = talker.run(reply)
    closed = next(e for e in heard.events if isinstance(e, ToolCall))
    known = [e for e in heard.events[: heard.events.index(closed)] if isinstance(e, Token)]
    assert known[-1].index > closed.index
    assert heard.of(Section, ToolCall) == talker.run(exactly(talker, WORDS)).of(Section, ToolCall)
    cut_everywhere(talker, reply, every=3)
    gone = talker.run(exactly(talker, WORDS, ban=("</tool_call> It is",)))
    assert gone.of(Backtrack)
    assert gone.of(ToolCall) == []
    assert [e.kind for e in gone.of(Section)] == ["thinking", "thinking", "tool_call"]


def test_sections_from_the_middle_on() -> None:
    """Asked for only when the reply goes on: the section that is open is told first."""
    talker = says(sectioned(), WORDS)
    for cut in (2, 3, 4, 5, 6, 9, 16, 29):
        session, heard = talker.session(), Heard()
        heard.take(session.stream("Say it.", reply=plain(100, sections=False), cancel=StopAt(cut)))
        told, so_far = len(heard.events), session.position
        heard.take(session.continue_(reply=plain(len(talker.encode(WORDS)) - so_far)))
        later = [e for e in heard.events[told:] if isinstance(e, Section)]
        if 0 < so_far < talker.encode(WORDS).index(talker.encode("</think>")[0]) + 1:
            assert later[0] == Section("thinking", True, 0, len("<think>"))
        assert heard.finished.text == WORDS == heard.text
        assert heard.finished.sections == talker.run(exactly(talker, WORDS)).finished.sections


# -- a section that the prompt opens ----------------------------------------------------------------------------------


def test_a_thinking_section_that_the_prompt_opens(tmp_path) -> None:
    words = "so\n</think>As I see."
    talker = says(sectioned(THINKING_TEMPLATE), words)
    reply = exactly(talker, words)
    heard = talker.run(reply)
    assert heard.events[0] == Section("thinking", True, 0, 0)
    assert heard.finished.sections == (SectionText("thinking", "so\n"), SectionText("answer", "As I see."))
    cut_everywhere(talker, reply)
    cut_everywhere(talker, reply, tmp_path, every=2)


def test_an_earlier_reply_that_was_stopped_while_thinking_opens_nothing() -> None:
    talker = says(sectioned(), WORDS)
    session = talker.session()
    session.send("Say it.", reply=plain(3))
    assert session.reply_text.startswith("<think>so")
    second = Heard()
    second.take(session.stream("Go on.", reply=plain(3)))
    assert second.of(Token)[0].section == "answer"
    assert second.of(Section) == []


def test_where_a_prompt_ends() -> None:
    markers = SectionMarkers({}, "normal", (7,), (8, 9))
    assert markers.opened_by([1, 7, 2], {3})
    assert not markers.opened_by([1, 7, 2, 8, 9], {3})
    assert markers.opened_by([8, 9, 7], {3})
    assert markers.opened_by([7, 8, 1, 9], {3})
    assert not markers.opened_by([7, 3, 1], {3})
    assert not markers.opened_by([], {3})
    assert not SectionMarkers({}, "normal", (), ()).opened_by([1], {3})


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 3, 5, 50])
def test_after_so_many_tokens_thinking_is_closed(budget, tmp_path) -> None:
    words = "<think>one and two and three</think>So."
    talker = says(sectioned(), words)
    reply = plain(20, thinking_budget=budget)
    heard = talker.run(reply)
    ended = next(e for e in heard.of(Section) if not e.began)
    thought = heard.of(Token)[1 : ended.index]
    own = talker.encode(words).index(talker.encode("</think>")[0]) - 1
    assert len(thought) == min(budget, own)
    assert heard.ids[ended.index] == talker.encode("</think>")[0]
    assert talker.using.tokenizer.decode(heard.ids).startswith(heard.finished.text)
    # The closing tokens are the model's own past for what comes: every pass is as if it had said them.
    assert all(event.section == "answer" for event in heard.of(Token)[ended.index + 1 :])
    cut_everywhere(talker, reply)
    cut_everywhere(talker, reply, tmp_path, every=3)


@pytest.mark.parametrize("name", ["ring", "quantized", "lfm2"])
def test_a_budget_with_any_cache(name) -> None:
    """The token before the closing ones is fed by a decode pass, stopped there or not."""
    setup = SETUPS[name]
    talker = says(sectioned(kind=setup.kind), "<think>one and two and three and four</think>So.", setup)
    reply = plain(20, thinking_budget=4)
    cut_everywhere(talker, reply, every=2)


def test_a_budget_of_a_section_that_the_prompt_opens(tmp_path) -> None:
    talker = says(sectioned(THINKING_TEMPLATE), "one and two and three</think>So.")
    for budget in (0, 2):
        reply = plain(12, thinking_budget=budget)
        heard = talker.run(reply)
        assert heard.ids[budget] == talker.encode("</think>")[0]
        cut_everywhere(talker, reply)
        cut_everywhere(talker, reply, tmp_path / str(budget), every=3)


def test_a_kill_after_any_record_with_a_budget(tmp_path) -> None:
    talker = says(sectioned(), "<think>one and two and three</think>So it is.")
    reply = plain(12, thinking_budget=3, ban=("and two",), stop=("So",))
    whole = talker.run(reply)
    session = talker.session()
    path = session.autosave(tmp_path / "whole.mlxgen")
    session.send("Say it.", reply=reply)
    session.close()
    lines = (path / "journal.log").read_bytes().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line[9:14] == b"reply") + 1
    assert any(line[9:15] == b"append" for line in lines)
    for end in range(first, len(lines) + 1):
        cut = tmp_path / f"cut{end}.mlxgen"
        cut.mkdir(mode=0o700)
        (cut / "journal.log").write_bytes(b"".join(lines[:end]))
        with resume(cut, options=ResumeOptions(model=talker.using)) as again:
            before, heard = again.reply_text, Heard()
            if again.unfinished:
                heard.take(again.continue_())
            assert again.history.reply.ids == whole.ids
            assert again.reply_text == before + heard.text == whole.finished.text
            assert again.last_finished.stop == whole.finished.stop


def test_the_end_of_a_budget_is_the_end_of_thinking() -> None:
    talker = says(sectioned(), "<think>one and two and three</think>So.")
    reply = plain(20, thinking_budget=3, stop_after_thinking=True)
    end = talker.run(reply).finished
    assert end.stop.kind == "thinking"
    assert end.text.endswith("</think>")
    cut_everywhere(talker, reply)


def test_a_budget_does_not_cut_a_character() -> None:
    talker = says(sectioned(), "<think>你好</think>So.")
    budget = next(n for n in range(1, 9) if "\ufffd" in talker.using.tokenizer.decode(talker.encode("你好")[:n]))
    heard = talker.run(plain(16, thinking_budget=budget))
    assert heard.finished.text.startswith("<think>你</think>")


def test_a_budget_over_several_sections() -> None:
    words = "<think>one</think>a<think>two and three</think>b"
    talker = says(sectioned(), words)
    first = len(talker.encode("one"))
    heard = talker.run(plain(14, thinking_budget=first + 1))
    assert heard.finished.text.startswith("<think>one</think>a<think>")
    began = heard.of(Section)[2]
    ended = heard.of(Section)[3]
    assert (began.began, ended.began) == (True, False)
    assert ended.index - began.index == 2


def test_another_budget_when_the_reply_goes_on() -> None:
    talker = says(sectioned(), "<think>one and two and three</think>So.")
    session, heard = talker.session(), Heard()
    heard.take(session.stream("Say it.", reply=plain(20, thinking_budget=50), cancel=StopAt(7)))
    position = session.position
    assert position > 3
    heard.take(session.continue_(reply=plain(8, thinking_budget=2)))
    assert heard.ids[position] == talker.encode("</think>")[0]


# -- markers of several tokens ----------------------------------------------------------------------------------------


def test_markers_of_several_tokens(tmp_path) -> None:
    """Gemma 4's way: `<|channel>thought` is two tokens or more; its text is held back until it is whole."""
    words = "<|channel>thought one and two<channel|>So <|channel> it is."
    talker = says(sectioned(TOOL_TEMPLATE, ("<|channel>", "<channel|>")), words)
    reply = exactly(talker, words)
    heard = talker.run(reply)
    opened = len(talker.encode("<|channel>thought"))
    assert opened > 1
    assert [e.text for e in heard.of(Token)[: opened - 1]] == [""] * (opened - 1)
    assert heard.of(Token)[opened - 1].text == "<|channel>thought"
    assert heard.of(Token)[opened - 1].section == "thinking"
    assert heard.finished.sections == (
        SectionText("thinking", " one and two"),
        SectionText("answer", "So <|channel> it is."),
    )
    assert heard.finished.text == words
    cut_everywhere(talker, reply)
    budget = plain(14, thinking_budget=2)
    cut_everywhere(talker, budget)
    cut_everywhere(talker, budget, tmp_path, every=3)
    assert talker.encode("<channel|>")[0] == talker.run(budget).ids[opened + 2]


class Spelled:
    """A tokenizer wrapper as mlx-lm makes it, for a model whose every marker takes several tokens."""

    has_thinking = has_tool_calling = True
    think_start, think_end = "[THINK]", "[/THINK]"
    tool_call_start, tool_call_end = "[CALL]", ""
    think_start_tokens, think_end_tokens = (1, 2), (1, 3)
    tool_call_start_tokens, tool_call_end_tokens = (4, 5), ()
    tool_parser = staticmethod(json.loads)


def test_the_tracker_finds_markers_in_any_pieces() -> None:
    text = 'a[THINK]b[/THINK][CALL]{"name": "x", "arguments": {}}'
    ends = [Section("thinking", True, 0, 8), Section("thinking", False, 0, 9), Section("tool_call", True, 0, 23)]
    for size in range(1, len(text) + 1):
        tracker, found = SectionTracker(SectionMarkers.of(Spelled)), []
        for index, start in enumerate(range(0, len(text), size)):
            for event in tracker.feed(99, index, text[: start + size], start):
                assert event.index == index
                found.append(event)
        assert [(e.kind, e.began, e.char_index) for e in found] == [(e.kind, e.began, e.char_index) for e in ends]
        assert tracker.kind == "tool_call"
        (closed, call) = tracker.end(99, text)
        assert closed == Section("tool_call", False, 99, len(text))
        assert call == ToolText(text[23:], 99)
        assert [said.text for said in tracker.texts(text)] == ["a", "b", text[23:]]


def test_spelled_out_a_marker_of_one_token_is_text() -> None:
    talker = says(sectioned(), "x")
    plain_ids = build_tokenizer().encode("<think>no").ids
    talker.forward.script = plain_ids
    heard = talker.run(plain(len(plain_ids)))
    assert heard.finished.text == "<think>no"
    assert heard.of(Section) == []


# -- tool calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ('{"name": "look_up"', "JSONDecodeError"),
        ('{"arguments": {}}', "it has no name"),
        ('{"name": "x", "arguments": [1]}', "its arguments are a list"),
        ('{"name": "x", "arguments": "no"}', "a string that isn't JSON"),
        ("5", "it is a int, not an object"),
        ("[]", "there is no call in it"),
        ("", "JSONDecodeError"),
        ("[" * 40, "JSONDecodeError"),
    ],
)
def test_a_call_that_can_not_be_parsed(said, error) -> None:
    words = f"<tool_call>{said}</tool_call>"
    talker = says(sectioned(), words)
    heard = talker.run(exactly(talker, words))
    (call,) = heard.of(ToolCall)
    assert (call.name, call.arguments, call.text) == (None, None, said)
    assert error in call.error
    assert heard.finished.tool_calls == (call,)


def test_several_calls_and_arguments_in_a_string() -> None:
    words = (
        '<tool_call>[{"name": "a", "arguments": {"x": 1}, "id": "7"}, {"name": "b", "arguments": "{\\"y\\": 2}"}]'
        "</tool_call>"
    )
    talker = says(sectioned(), words)
    first, second = talker.run(exactly(talker, words)).of(ToolCall)
    assert (first.name, first.arguments, first.id) == ("a", {"x": 1}, "7")
    assert (second.name, second.arguments, second.id) == ("b", {"y": 2}, None)


def test_a_call_that_the_end_of_the_turn_closes() -> None:
    words = f"<tool_call>{CALL}"
    talker = says(sectioned(), words)
    talker.forward.script = [*talker.encode(words), next(iter(talker.using.eos_token_ids))]
    reply = ReplyOptions(max_tokens=100, sections=True)
    heard = talker.run(reply)
    assert heard.finished.stop.kind == "token"
    (call,) = heard.of(ToolCall)
    assert call.name == "f"
    cut_everywhere(talker, reply, every=4)
    # By its length a reply only pauses.
    assert talker.run(exactly(talker, words)).of(ToolCall) == []


def test_tools_reach_the_template_and_the_parser(tmp_path) -> None:
    words = f"<tool_call>{CALL}</tool_call>"
    talker = says(sectioned(), words, tools=TOOLS)
    session = talker.session()
    list(session.stream("Say it.", reply=exactly(talker, words)))
    prompt = talker.using.tokenizer.decode(session.history.ids[: session.history.reply.start])
    assert "Tools: [" in prompt
    assert '"name": "f"' in prompt
    with resume(session.save(tmp_path / "s.mlxgen"), options=ResumeOptions(model=talker.using)) as again:
        assert again.last_finished.tool_calls == session.last_finished.tool_calls
        again.add("wet", role="tool")
        list(again.stream(reply=plain(3)))
        shown = talker.using.tokenizer.decode(again.history.ids)
        assert "<|im_start|>tool\nwet<|im_end|>" in shown
        assert words in shown


def test_a_damaged_journal_is_an_error_that_says_so() -> None:
    talker = says(sectioned(), "<think>one and two and three</think>So.")
    session = talker.session()
    session.send("Say it.", reply=plain(6, thinking_budget=2))
    reply = session.history.reply
    for mark in ((5, "close", None), (5, "close", [10**9]), (5, "close", ["x"]), (5, "steer", 3)):
        twin = session.fork()
        twin.history.reply.marks = [*reply.marks[:-1], mark]
        with pytest.raises(MlxgenError):
            list(twin.continue_())
    reply.finish = {"reason": "stop", "hit": {"kind": "token"}}
    with pytest.raises(SnapshotError, match="finish"):
        _ = session.last_finished
