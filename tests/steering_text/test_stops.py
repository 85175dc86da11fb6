"""Every kind of stop: which one hit and where, going on after it, stopping in the midst of it, and what can fail."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from harness import PROMPT, SETUPS, StopAt, model, new_session
from scripted import MARKERS, Heard, Talker, cut_everywhere, says, says_with, sectioned

from mlxgen import steeredtext
from mlxgen.errors import InvalidValueError, NotResumableError, StopConditionError
from mlxgen.events import StopHit, Token
from mlxgen.options import ReplyOptions
from mlxgen.resumption import ResumeOptions, resume

WORDS = "One step, two steps.\nThree: 14:05 and on <b>it</b> goes, at last."
THINKS = "<think>so it is\n</think>It is so."


def plain(max_tokens: int | None = 60, **options: Any) -> ReplyOptions:
    return ReplyOptions(max_tokens=max_tokens, ignore_eos=True, **options)


class After:
    """A callable with a name: True once the text has a word in it. Keeps what it was asked."""

    def __init__(self, word: str, name: str | None = "after") -> None:
        self.word = word
        self.asked: list[tuple[str, Token]] = []
        if name is not None:
            self.name = name

    def __call__(self, text: str, token: Token) -> bool:
        self.asked.append((text, token))
        return self.word in text


def thinker() -> Talker:
    base = sectioned()
    return says(base, THINKS)


def last_token(talker: Talker, text: str) -> int:
    """The index of the token that completes `text`."""
    ids = talker.encode(WORDS)
    decode = talker.using.tokenizer.decode
    return next(n for n in range(len(ids)) if text in decode(ids[: n + 1]))


def token_at(talker: Talker, char: int) -> int:
    ids = talker.encode(WORDS)
    return next(n for n in range(len(ids)) if len(talker.using.tokenizer.decode(ids[: n + 1])) > char)


def stops(talker: Talker) -> dict[str, tuple[ReplyOptions, StopHit, str, int]]:
    """By kind: what is asked for, what must have hit, the text, and the number of tokens."""
    ids = talker.encode(WORDS)
    newline = ids.index(talker.encode("\n")[0])
    time_at, tag_at = WORDS.index("14:05"), WORDS.index("<b>")
    return {
        "token": (
            plain(stop_token_ids=(ids[newline],)),
            StopHit("token", ids[newline], newline, WORDS.index("\n")),
            WORDS[: WORDS.index("\n")],
            newline + 1,
        ),
        "string": (
            plain(stop=("two steps!", "<b>it")),
            StopHit("string", "<b>it", token_at(talker, tag_at), tag_at),
            WORDS[:tag_at],
            last_token(talker, "<b>it") + 1,
        ),
        "regex": (
            plain(stop_regex=(r"\d+:\d\d", "zz")),
            StopHit("regex", r"\d+:\d\d", token_at(talker, time_at), time_at),
            WORDS[:time_at],
            last_token(talker, "14:05") + 1,
        ),
        "callable": (
            plain(stop_when=After("two")),
            StopHit("callable", "after", last_token(talker, "two"), WORDS.index("two") + 3),
            WORDS[: WORDS.index("two") + 3],
            last_token(talker, "two") + 1,
        ),
    }


KINDS = ("token", "string", "regex", "callable")


@pytest.mark.parametrize("kind", KINDS)
def test_which_one_hit_and_where(kind) -> None:
    talker = says_with("llama", WORDS)
    reply, hit, text, num_tokens = stops(talker)[kind]
    heard = talker.run(reply)
    end = heard.finished
    assert (end.finish_reason, end.text, end.stop) == ("stop", text, hit)
    assert len(heard.ids) == num_tokens
    assert heard.text == text
    assert end.stop_string == (hit.value if kind == "string" else None)
    assert end.stop_token == (hit.value if kind == "token" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_stopping_anywhere_changes_nothing(kind, tmp_path) -> None:
    talker = says_with("llama", WORDS)
    reply, *_ = stops(talker)[kind]
    cut_everywhere(talker, reply)
    given = {"stop_when": reply.stop_when} if kind == "callable" else {}
    cut_everywhere(talker, reply, tmp_path, every=5, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_with_other_settings(kind) -> None:
    """After any stop, with any other: the whole text comes, and the second stop says where it hit."""
    talker = says_with("llama", WORDS)
    first = stops(talker)[kind][0]
    for other in (*KINDS, "length", "the same"):
        session, heard = talker.session(), Heard()
        heard.take(session.stream("Say it.", reply=first))
        if other == "the same":
            heard.take(session.continue_())
        else:
            second = plain(400) if other == "length" else stops(talker)[other][0]
            if other == "length":
                second = replace(second, max_tokens=len(talker.encode(WORDS)) - session.position)
            heard.take(session.continue_(reply=second))
        end = heard.finished
        assert heard.text == end.text == session.reply_text
        said = WORDS.replace("\n", "", 1) if kind == "token" else WORDS
        if other == "length":
            assert (end.finish_reason, end.text, end.stop) == ("length", said, None)
        elif end.finish_reason == "stop":
            assert end.stop.kind == (kind if other == "the same" else other)
            assert said.startswith(end.text)
            assert session.last_finished.stop == end.stop


def test_of_several_in_one_token_the_one_that_begins_first() -> None:
    talker = says_with("llama", WORDS)
    both = talker.run(plain(stop=("05 a",), stop_regex=("4:05 a",)))
    assert (both.finished.stop.kind, both.finished.text) == ("regex", WORDS[: WORDS.index("4:05")])
    both = talker.run(plain(stop=("4:05 a",), stop_regex=("05 a",)))
    assert (both.finished.stop.kind, both.finished.text) == ("string", WORDS[: WORDS.index("4:05")])
    tie = talker.run(plain(stop=("14:05",), stop_regex=("14:05",), stop_when=After("14:05")))
    assert tie.finished.stop.kind == "string"


def test_text_that_may_become_a_match_is_held_back() -> None:
    talker = says_with("llama", WORDS)
    shown = ""
    for event in talker.session().stream("Say it.", reply=plain(stop_regex=(r"two.*\n.*14:05",))):
        if isinstance(event, Token):
            shown += event.text
            assert "tw" not in shown
    assert shown == "One step, "
    longer = talker.run(plain(len(talker.encode(WORDS)), stop_regex=(r"two.*\n.*14:06",)))
    assert longer.finished.text == WORDS


def test_a_cut_character_is_not_cut_by_a_pattern(tmp_path) -> None:
    talker = says_with("llama", "so 你好 and 😀é!")
    for pattern in ("你好", "😀", "[^\x00-\x7f]é", "(?<=é)"):
        reply = plain(40, stop_regex=(pattern,))
        cut_everywhere(talker, reply)
        assert "\ufffd" not in talker.run(reply).finished.text


# -- the callable ----------------------------------------------------------------------------------------------------


def test_the_callable_is_asked_after_each_token_with_all_of_the_text() -> None:
    talker = says_with("llama", WORDS)
    ask = After("14:05")
    heard = talker.run(plain(stop=("two steps!",), stop_when=ask))
    ids, decode = talker.encode(WORDS), talker.using.tokenizer.decode
    assert [text for text, _ in ask.asked] == [decode(ids[: n + 1]) for n in range(len(ask.asked))]
    assert [token.index for _, token in ask.asked] == list(range(len(ask.asked)))
    assert heard.finished.text == WORDS[: WORDS.index("14:05") + 5]


class Broken(Exception):
    pass


def test_a_callable_that_raises_leaves_the_session_at_the_token_before() -> None:
    talker = says_with("llama", WORDS)
    whole = talker.run(plain(20))

    def raising(text: str, token: Token) -> bool:
        if token.index == 5:
            raise Broken("no\nwonder")
        return False

    session, heard = talker.session(), Heard()
    with pytest.raises(StopConditionError, match=r"'raising' raised Broken at token 5 \(no wonder\)") as caught:
        heard.take(session.stream("Say it.", reply=plain(20, stop_when=raising)))
    assert isinstance(caught.value.__cause__, Broken)
    assert session.position == 5
    assert session.reply_text == heard.text
    with pytest.raises(StopConditionError):
        heard.take(session.continue_())
    assert session.position == 5
    heard.take(session.continue_(reply=plain(15)))
    assert heard.events == whole.events
    assert heard.finished.text == whole.finished.text


def test_after_an_error_the_next_turn_and_a_snapshot_are_right(tmp_path) -> None:
    def raising(text: str, token: Token) -> bool:
        raise Broken

    raising.name = "raising"  # type: ignore[attr-defined]
    session = new_session(SETUPS["llama"])
    session.autosave(tmp_path / "s.mlxgen")
    with pytest.raises(StopConditionError):
        session.send(PROMPT, reply=plain(9, stop_when=raising))
    session.close()
    with resume(tmp_path / "s.mlxgen", options=ResumeOptions(model=model("llama"), stop_when=raising)) as again:
        assert again.position == 0
        with pytest.raises(StopConditionError):
            list(again.continue_())
        rest = again.continue_(reply=plain(9))
        expected = new_session(SETUPS["llama"])
        expected.send(PROMPT, reply=plain(9))
        list(rest)
        assert again.reply_text == expected.reply_text
        assert again.send("And now?", reply=plain(6)).text == expected.send("And now?", reply=plain(6)).text


def test_a_callable_is_brought_back_by_its_name(tmp_path) -> None:
    talker = says_with("llama", WORDS)
    session = talker.session()
    session.send("Say it.", reply=plain(stop_when=After("14:05")), cancel=StopAt(6))
    path = session.save(tmp_path / "s.mlxgen")
    for given in (None, After("14:05", "other"), lambda text, token: False):
        with pytest.raises(NotResumableError, match=r"stop condition 'after'"):
            resume(path, options=ResumeOptions(model=talker.using, stop_when=given))
    with resume(path, options=ResumeOptions(model=talker.using, stop_when=After("14:05"))) as again:
        list(again.continue_())
        assert again.last_finished.stop.kind == "callable"


def test_a_callable_without_a_name_can_not_be_saved(tmp_path) -> None:
    talker = says_with("llama", WORDS)
    nameless = plain(stop_when=After("two", None))
    session = talker.session()
    session.autosave(tmp_path / "a.mlxgen")
    with pytest.raises(NotResumableError, match="has no name"):
        session.stream("Say it.", reply=nameless)
    assert len(session.turns) == 0
    session.close()
    loose = talker.session()
    loose.send("Say it.", reply=nameless, cancel=StopAt(6))
    with pytest.raises(NotResumableError, match="has no name"):
        loose.save(tmp_path / "b.mlxgen")
    assert loose.continue_() is not None
    # In memory it goes on, and once the reply has ended it can be saved, and opened without it.
    done = talker.session()
    done.send("Say it.", reply=nameless)
    with resume(done.save(tmp_path / "c.mlxgen"), options=ResumeOptions(model=talker.using)) as again:
        assert again.last_finished.stop == done.last_finished.stop
        assert again.last_finished.stop.value is None


# -- patterns that fail ----------------------------------------------------------------------------------------------


def test_a_pattern_that_explodes_leaves_the_session_at_the_token_before(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(steeredtext, "MAX_SECONDS", 0.05)
    talker = says_with("llama", "b" + "a" * 70)
    session, heard = talker.session(), Heard()
    began_s = time.perf_counter()
    with pytest.raises(StopConditionError, match="longer than 0.05 s .* nested repetitions, or go on without it"):
        heard.take(session.stream("Say it.", reply=plain(70, stop_regex=("x|(?:a|aa)+$c",))))
    assert time.perf_counter() - began_s < 60
    position = session.position
    assert 10 < position < 70
    assert session.reply_text == heard.text
    path = session.save(tmp_path / "s.mlxgen")
    heard.take(session.continue_(reply=plain(71 - position)))
    assert session.reply_text == "b" + "a" * 70 == heard.text
    with resume(path, options=ResumeOptions(model=talker.using)) as again:
        assert again.position == position
        list(again.continue_(reply=plain(71 - position)))
        assert again.reply_text == "b" + "a" * 70


@pytest.mark.parametrize("patterns", [("(",), ("a*",), ("",), ("[z-a]",), "abc", tuple("a" for _ in range(65))])
def test_a_broken_pattern_changes_nothing(patterns) -> None:
    session = new_session(SETUPS["llama"])
    with pytest.raises(InvalidValueError):
        session.stream(PROMPT, reply=replace(plain(), stop_regex=patterns))
    assert session.turns[1:] == ()
    assert session.send(PROMPT, reply=plain(4)).finish_reason == "length"


# -- the end of thinking ---------------------------------------------------------------------------------------------


def test_the_end_of_thinking(tmp_path) -> None:
    talker = thinker()
    reply = plain(stop_after_thinking=True)
    end = talker.run(reply).finished
    at = THINKS.index("</think>")
    assert end.text == THINKS[: at + len("</think>")]
    closing = talker.encode(THINKS).index(talker.using.tokenizer.encode(MARKERS[1], add_special_tokens=False)[0])
    assert end.stop == StopHit("thinking", "</think>", closing, at)
    cut_everywhere(talker, reply)
    cut_everywhere(talker, reply, tmp_path, every=2)
    session = talker.session()
    session.send("Say it.", reply=reply)
    rest = len(talker.encode(THINKS)) - session.position
    session.continue_(reply=plain(rest))
    assert [event.text for event in session.continue_(reply=plain(rest)) if isinstance(event, Token)]
    assert session.reply_text == THINKS


def test_a_model_that_does_not_think() -> None:
    session = new_session(SETUPS["llama"])
    for options in ({"stop_after_thinking": True}, {"thinking_budget": 4}):
        with pytest.raises(InvalidValueError, match="no thinking sections"):
            session.stream(PROMPT, reply=plain(**options))
    with pytest.raises(InvalidValueError, match="thinking_budget is -1"):
        session.stream(PROMPT, reply=plain(thinking_budget=-1))


# -- what was recorded before ----------------------------------------------------------------------------------------


def test_options_and_ends_of_older_journals() -> None:
    options = plain().to_json()
    old = {key: value for key, value in options.items() if key not in NEW}
    assert ReplyOptions.from_json(old) == plain()
    session = new_session(SETUPS["llama"])
    session.send(PROMPT, reply=plain(4))
    session.history.reply.finish = {"reason": "stop", "stop_string": "x"}
    assert session.last_finished.stop is None
    assert session.last_finished.stop_string == "x"


NEW = ("stop_regex", "stop_when", "stop_after_thinking", "ban", "sections", "thinking_budget", "grammar", "heal")


def test_without_any_of_it_nothing_of_it_is_made_or_recorded() -> None:
    session = new_session(SETUPS["llama"])
    list(session.stream(PROMPT, reply=plain(5, stop=("\u2603",))))
    kinds = {mark[1] for mark in session.history.reply.marks}
    assert kinds == {"flush"}
    assert type(session._reply_run) is type(None)
