from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxgen.errors import InvalidValueError
from mlxgen.stop import StopMatcher

alphabet = st.sampled_from("ab\u00e9\U0001f600")
texts = st.text(alphabet, max_size=14)
stops = st.lists(st.text(alphabet, min_size=1, max_size=4), max_size=3)


def _feed_all(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    """(emitted, hit), the way a decode loop feeds: it ends at a hit."""
    emitted = ""
    for piece in pieces:
        step = matcher.feed(piece)
        emitted += step.emit
        if step.hit:
            return emitted, step.hit
    return emitted, None


def test_found_across_pieces_and_never_shown() -> None:
    matcher = StopMatcher(["</s>", "STOP"])
    assert matcher.feed("one ST").emit == "one "
    assert matcher.feed("AR S").emit == "STAR "
    assert matcher.held == "S"
    step = matcher.feed("TOP two")
    assert (step.emit, step.hit) == ("", "STOP")
    assert matcher.held == "STOP two"
    assert matcher.release() == "STOP two"
    assert (matcher.hit, matcher.held) == (None, "")
    assert matcher.feed(" three").emit == " three"


def test_the_match_that_starts_first_wins_even_if_it_ends_last() -> None:
    for pieces in (["xabcd"], list("xabcd"), ["xab", "cd"]):
        matcher = StopMatcher(["bc", "abcd"])
        assert _feed_all(matcher, pieces) == ("x", "abcd")
    assert _feed_all(StopMatcher(["bc", "abcd"]), list("xabcx")) == ("xa", "bc")


def test_of_matches_that_start_together_the_shortest_wins() -> None:
    assert _feed_all(StopMatcher(["abc", "ab"]), ["xabc"]) == ("x", "ab")
    assert _feed_all(StopMatcher(["abc", "ab"]), list("xabc")) == ("x", "ab")


def test_flush_emits_half_a_stop_string_that_is_still_found_later() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("x ST").emit == "x "
    assert matcher.flush() == "ST"
    assert matcher.flush() == ""
    step = matcher.feed("OP y")
    assert (step.emit, step.hit) == ("", "STOP")
    # What was shown before the seam isn't shown twice.
    assert matcher.release() == "OP y"

    matcher = StopMatcher(["STOP"])
    matcher.feed("x ST")
    matcher.flush()
    assert matcher.feed("AR").emit == "AR"


def test_flush_never_shows_a_whole_stop_string_that_waits_for_an_earlier_one() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    matcher.feed("xabc")
    assert matcher.flush() == "a"
    step = matcher.feed("d")
    assert (step.emit, step.hit) == ("", "abcd")
    assert matcher.release() == "bcd"


def test_a_second_stop_string_behind_the_first_hits_at_once_after_release() -> None:
    matcher = StopMatcher(["A", "B"])
    step = matcher.feed("xAyBz")
    assert (step.emit, step.hit) == ("x", "A")
    assert matcher.release() == "Ay"
    assert matcher.hit == "B"
    assert matcher.feed("!").hit == "B"
    assert matcher.release() == "Bz!"
    assert matcher.hit is None
    assert matcher.release() == ""


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("abc") == matcher.feed("abc")
    assert matcher.feed("").emit == ""
    assert matcher.flush() == ""


@pytest.mark.parametrize("bad", [[""], ["ok", ""], "STOP", [5], ["x" * 5000], ["x"] * 300])
def test_bad_stop_strings_are_refused(bad: list[str]) -> None:
    with pytest.raises(InvalidValueError):
        StopMatcher(bad)


def _by_definition(text: str, stop_strings: list[str]) -> tuple[str, str | None]:
    """What must have been emitted after `text`, from the definition: walk the starts in order."""
    for start in range(len(text)):
        complete = [stop for stop in stop_strings if text.startswith(stop, start)]
        if complete:
            return text[:start], min(complete, key=len)
        if any(stop.startswith(text[start:]) for stop in stop_strings):
            return text[:start], None
    return text, None


@settings(max_examples=400, deadline=None)
@given(text=texts, stop_strings=stops, data=st.data())
def test_how_the_text_is_cut_makes_no_difference(text: str, stop_strings: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopMatcher(stop_strings)
    emitted = ""
    for n, piece in enumerate(pieces):
        emitted += matcher.feed(piece).emit
        assert (emitted, matcher.hit) == _by_definition(text[: sum(map(len, pieces[: n + 1]))], stop_strings)
    # Nothing is lost: what isn't shown is held.
    assert emitted + matcher.held == text


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(texts, max_size=5), stop_strings=stops, actions=st.lists(st.booleans(), min_size=5, max_size=5))
def test_flush_and_release_lose_and_double_nothing(
    pieces: list[str], stop_strings: list[str], actions: list[bool]
) -> None:
    matcher = StopMatcher(stop_strings)
    emitted = ""
    for piece, flush in zip(pieces, actions, strict=False):
        emitted += matcher.feed(piece).emit
        emitted += matcher.flush() if flush else matcher.release()
    assert emitted + matcher.held == "".join(pieces)
