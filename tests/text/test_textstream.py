from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizers_for_tests as kinds

from mlxgen.errors import InvalidValueError
from mlxgen.textstream import Mark, TextStream

TOKENIZER = kinds.byte_level()


def _ids(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def _state(stream: TextStream) -> dict[str, Any]:
    """Everything the stream's future depends on."""
    matcher = stream._matcher
    return {
        "text": stream.text,
        "tokens": stream.num_tokens,
        "held": stream.held,
        "pending": stream.pending,
        "utf8": stream._detokenizer._stream._utf8.getstate(),  # type: ignore[attr-defined]
        "matcher": (matcher._buffer, matcher._num_shown, matcher._hit, matcher._hit_start),
    }


def test_a_stop_string_in_the_middle_of_tokens_is_withheld_and_released() -> None:
    stream = TextStream(TOKENIZER, ["\n\n"])
    hits = [stream.feed(token).stop_hit for token in _ids("one\n\ntwo")]
    assert hits[:4] == [None] * 4
    assert stream.stop_hit == "\n\n"
    assert stream.text == "one"
    assert stream.release() == "\n\ntwo"
    assert stream.text == "one\n\ntwo"


def test_a_length_finish_shows_half_a_stop_string_but_never_half_a_character() -> None:
    stream = TextStream(TOKENIZER, ["STOP"])
    ids = _ids("x ST") + _ids("é")[:1] if len(_ids("é")) > 1 else _ids("x ST") + _ids("你")[:2]
    for token in ids:
        stream.feed(token)
    assert stream.flush() == "ST"
    assert stream.text == "x ST"
    assert "\ufffd" in stream.pending
    stream.feed(_ids("你")[2])
    assert stream.text == "x ST你"
    assert stream.pending == ""


def test_rebuilt_from_ids_and_marks_is_the_same_at_every_cut() -> None:
    """Random interruptions: the rebuilt stream has the same state, and the same future."""
    rng = random.Random(5)
    words = ["STOP", "ST", "S", "you", "é", "你好", " 👩‍👩‍👧", "\n\n", "\n", "END", "x", "<|im_end|>"]
    for _ in range(40):
        tokens = _ids("".join(rng.choice(words) for _ in range(12)))
        stream = TextStream(TOKENIZER, ["STOP", "\n\n", "END"])
        marks: list[Mark] = []
        for n, token in enumerate(tokens, 1):
            stream.feed(token)
            if stream.stop_hit:
                if rng.random() < 0.5:
                    stream.release()
                    marks.append((n, "release", None))
            elif rng.random() < 0.2:
                stream.flush()
                marks.append((n, "flush", None))
            elif rng.random() < 0.1:
                stream.change_stops(["END", "é"])
                marks.append((n, "stops", ["END", "é"]))
            again = TextStream.rebuild(TOKENIZER, ["STOP", "\n\n", "END"], tokens[:n], marks)
            assert _state(again) == _state(stream)
            assert again.carried == stream.carried
        whole = stream.text + stream.held + stream.pending
        assert whole == TOKENIZER.decode(tokens, skip_special_tokens=False)


def test_a_stop_token_has_no_text_and_what_is_let_go_of_waits_for_the_next_token() -> None:
    tokens = _ids("one STOP two")
    silent = len(tokens) - 1
    stream = TextStream.rebuild(TOKENIZER, ["STOP"], tokens[: silent + 1], [(silent + 1, "silent", None)])
    assert stream.num_tokens == silent + 1
    released = TextStream.rebuild(TOKENIZER, ["STOP"], tokens, [(len(tokens), "release", None)])
    assert released.carried == "STOP two"
    assert released.text == "one STOP two"
    released.feed(tokens[0])
    assert released.carried == ""


def test_marks_at_the_start_and_twice_at_one_place() -> None:
    stream = TextStream.rebuild(
        TOKENIZER, ["ab"], _ids("xa"), [(0, "flush", None), (2, "flush", None), (2, "release", None)]
    )
    assert stream.text == "xa"


@pytest.mark.parametrize(
    "marks",
    [
        [(9, "flush", None)],
        [(2, "flush", None), (1, "flush", None)],
        [(1, "burn", None)],
        [(-1, "flush", None)],
    ],
)
def test_marks_that_do_not_fit_are_refused(marks: list[Mark]) -> None:
    with pytest.raises(InvalidValueError):
        TextStream.rebuild(TOKENIZER, [], _ids("abc"), marks)


def test_rebuilding_a_long_reply_is_linear() -> None:
    tokens = _ids("the end. " * 4000)
    stream = TextStream.rebuild(TOKENIZER, ["STOP"], tokens)
    assert stream.text == "the end. " * 4000
