"""Bans, stop strings and patterns in every mix, against a reference that knows only final tokens and whole texts."""

from __future__ import annotations

import codecs
import hashlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny.tokenizer import build_tokenizer

from mlxgen.errors import InvalidValueError, StopConditionError
from mlxgen.history import Reply
from mlxgen.judge import Judge
from mlxgen.options import ReplyOptions
from mlxgen.sequence import Sampled
from mlxgen.steeredtext import BanHit, SteeredText, Steering
from mlxgen.stop_regex import MAX_MATCH_CHARS, RegexStops

TOKENIZER = build_tokenizer()
MODEL: Any = SimpleNamespace(tokenizer=TOKENIZER, eos_token_ids=frozenset(), vocab_size=307, name="nobody")
# "é" is two bytes and one token of both; "in", "an" and " a" are tokens of several letters.
TOKENS = tuple(
    dict.fromkeys(
        i for piece in ("a", "b", "n", "i", "in", "an", " a", " ", "é", "\n") for i in (TOKENIZER.encode(piece).ids)
    )
) + tuple(TOKENIZER.token_to_id(char) for char in ("Ã", "©"))

texts = st.text(st.sampled_from("abni é\n"), min_size=1, max_size=4)
PATTERNS = ("b+n", "a.i", r"(?<=in)\s", "n{2}", "[^a]é", "b.*n", "(?s)a.*é", r"\n\n", "(an|in)+b")


@dataclass(frozen=True)
class Wish:
    """What is asked for, and a seed of what the pretended model says."""

    seed: int
    bans: tuple[str, ...]
    stops: tuple[str, ...]
    patterns: tuple[str, ...]
    limit: int

    def next_token(self, ids: list[int], banned: tuple[int, ...]) -> int:
        """The best of what isn't banned; a function of the ids so far."""

        def worth(token: int) -> bytes:
            return hashlib.blake2b(repr((self.seed, ids, token)).encode(), digest_size=8).digest()

        return min((token for token in TOKENS if token not in banned), key=worth)

    @property
    def options(self) -> ReplyOptions:
        return ReplyOptions(
            max_tokens=self.limit, stop=self.stops, stop_regex=self.patterns, ban=self.bans, ignore_eos=True
        )


wishes = st.builds(
    Wish,
    st.integers(0, 10**6),
    st.lists(texts, max_size=3).map(tuple),
    st.lists(texts, max_size=2).map(tuple),
    st.lists(st.sampled_from(PATTERNS), max_size=2, unique=True).map(tuple),
    st.integers(1, 24),
)


@dataclass
class End:
    ids: list[int]
    masks: dict[int, tuple[int, ...]]
    stop: tuple[str, str, int, int] | None  # kind, value, token, character
    text: str


def bytes_of(ids: list[int]) -> list[bytes]:
    alphabet = _alphabet()
    return [bytes(alphabet[char] for char in TOKENIZER.id_to_token(i)) for i in ids]


def _alphabet() -> dict[str, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def decoded(pieces: list[bytes]) -> str:
    """The complete characters."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(b"".join(pieces))


def is_whole(ids: list[int]) -> bool:
    """Whether the last token ends between two characters."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(b"".join(bytes_of(ids)))
    return decoder.getstate()[0] == b""


def string_hit(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The leftmost place where a stop string is, unless an earlier one may still become one."""
    for place in range(len(text)):
        for stop in sorted(stops, key=len):
            if text.startswith(stop, place):
                return place, stop
        if any(stop.startswith(text[place:]) for stop in stops):
            return None
    return None


def reference(wish: Wish) -> End:
    ids: list[int] = []
    masks: dict[int, tuple[int, ...]] = {}
    while True:
        ids.append(wish.next_token(ids, masks.get(len(ids), ())))
        pieces = bytes_of(ids)
        said = b"".join(pieces)
        places = [place for ban in wish.bans if (place := said.find(ban.encode())) >= 0]
        if places:
            token, size = 0, 0
            while size + len(pieces[token]) <= min(places):
                size, token = size + len(pieces[token]), token + 1
            masks = {place: banned for place, banned in masks.items() if place <= token}
            masks[token] = (*masks.get(token, ()), ids[token])
            if len(masks[token]) == len(TOKENS):
                return End(ids[:token], masks, None, "nothing is left")
            del ids[token:]
            continue
        text = decoded(pieces)
        found: list[tuple[int, int, str, str]] = []
        hit = string_hit(text, wish.stops)
        if hit is not None:
            found.append((hit[0], 0, "string", hit[1]))
        for number, pattern in enumerate(wish.patterns):
            match = regex.search(pattern, text)
            if match is not None:
                found.append((match.start(), 1 + number, "regex", pattern))
        if found:
            start, _, kind, value = min(found)
            token = next((n for n in range(1, len(ids) + 1) if len(decoded(pieces[:n])) > start), len(ids)) - 1
            return End(ids, masks, (kind, value, token, start), text[:start])
        if len(ids) == wish.limit:
            # A stop string that is complete, and waits for one that begins before it, isn't shown.
            waiting = [place for place in range(len(text)) if any(text.startswith(s, place) for s in wish.stops)]
            return End(ids, masks, None, text[: min(waiting, default=len(text))])


def may_become(text: str, word: str) -> bool:
    """Whether the text's end is a beginning of the word."""
    return any(word.startswith(text[place:]) for place in range(len(text)))


def heard(wish: Wish, cuts: frozenset[int] = frozenset()) -> End:
    """What `Judge` makes of it; at each of `cuts` (numbers of tokens judged) it is made anew from the record."""
    reply = Reply(wish.options.to_json(), wish.limit, wish.stops)
    judge = Judge(MODEL, reply, wish.options)
    steering = judge.steering(())
    assert (steering is None) == (not wish.bans and not wish.patterns)
    if steering is not None:
        reply.marks.append((0, "steer", steering.to_json()))
        judge.rebuild()
    shown, count = "", 0
    while True:
        count += 1
        if count in cuts:
            before = judge.text
            judge = Judge(MODEL, reply, wish.options)
            assert (judge.text.text, judge.text.held) == (before.text, before.held) == (shown, before.held)
            assert judge.steering(()) is None
        place = len(reply.tokens)
        banned = judge.banned()
        token = Sampled(wish.next_token(reply.ids, banned.get(place, ())))
        verdict = judge.judge(token)
        if isinstance(verdict, BanHit):
            index = judge.first_to_go(verdict)
            gone = token.id if index == place else reply.ids[index]
            reply.cut(index)
            # None of what goes was shown.
            assert decoded(bytes_of(reply.ids)).startswith(shown)
            reply.banned[index] = (*reply.banned.get(index, ()), gone)
            judge.rebuild()
            assert judge.text.text == shown
            if len(reply.banned[index]) == len(TOKENS):
                return End(reply.ids, reply.banned, None, "nothing is left")
            continue
        reply.tokens.append(token)
        shown += verdict.event.text
        for mark in verdict.marks:
            reply.marks.append((*mark.data, None)[:3])
        if verdict.finish is not None:
            hit = verdict.finish.get("hit")
            stop = None if hit is None else (hit["kind"], hit["value"], hit["token"], hit["char"])
            assert judge.text.text == shown
            return End(reply.ids, reply.banned, stop, shown)
        text = decoded(bytes_of(reply.ids))
        if not any(may_become(text, word) for word in (*wish.bans, *wish.stops)) and not any(
            match.start() < len(text)
            for pattern in wish.patterns
            if (match := regex.search(pattern, text, partial=True)) is not None
        ):
            assert shown == text or not is_whole(reply.ids)


@settings(max_examples=600, deadline=None)
@given(wishes)
@example(Wish(120, ("é",), (), (), 13))  # half a character, and again half of it, then the whole
def test_every_mix_ends_as_the_reference_says(wish: Wish) -> None:
    expected, found = reference(wish), heard(wish)
    if expected.text == "nothing is left":
        assert (found.ids, found.masks) == (expected.ids, expected.masks)
    else:
        assert found == expected


@settings(max_examples=200, deadline=None)
@given(wishes)
def test_every_mix_made_anew_at_every_token(wish: Wish) -> None:
    whole = heard(wish)
    assert heard(wish, frozenset(range(1, 2000))) == whole


@settings(max_examples=200, deadline=None)
@given(wishes, st.lists(st.integers(0, 12), max_size=4))
def test_going_on_after_any_end(wish: Wish, more: list[int]) -> None:
    """Ends by length, by stops and in the middle, each gone on from: nothing is shown twice, lost, or banned."""
    reply = Reply(wish.options.to_json(), None, wish.stops)
    shown = ""
    for run, extra in enumerate([wish.limit, *more]):
        judge = Judge(MODEL, reply, wish.options)
        assert judge.text.text == shown + judge.text.carried
        hit = judge.text.hit
        while judge.text.stop_hit is not None:
            reply.marks.append((len(reply.tokens), "release", None))
            judge.text.release()
        assert (hit is None) == (judge.text.carried == "") or run > 0
        steering = judge.steering(())
        if steering is not None:
            reply.marks.append((len(reply.tokens), "steer", steering.to_json()))
        judge = Judge(MODEL, reply, wish.options)
        handed = len(judge.text.text) - len(judge.text.carried)
        assert handed == len(shown)
        judge.limit = len(reply.tokens) + extra
        while len(reply.tokens) < judge.limit:
            place = len(reply.tokens)
            banned = judge.banned().get(place, ())
            if len(banned) == len(TOKENS):
                return
            token = Sampled(wish.next_token(reply.ids, banned))
            verdict = judge.judge(token)
            if isinstance(verdict, BanHit):
                index = judge.first_to_go(verdict)
                gone = token.id if index == place else reply.ids[index]
                reply.cut(index)
                reply.banned[index] = (*reply.banned.get(index, ()), gone)
                judge.rebuild()
                if len(judge.text.text) - len(judge.text.carried) != len(shown):
                    reply.marks.append((index, "shown", len(shown)))
                    judge.rebuild()
                assert len(judge.text.text) - len(judge.text.carried) == len(shown)
                continue
            reply.tokens.append(token)
            shown += verdict.event.text
            reply.marks += [(*mark.data, None)[:3] for mark in verdict.marks]
            if verdict.finish is not None:
                break
        text = decoded(bytes_of(reply.ids))
        assert text.startswith(shown)
        assert judge.text.text == shown + judge.text.carried
        for ban in wish.bans:
            assert ban not in text


# -- patterns ----------------------------------------------------------------------------------------------------------


def test_a_pattern_holds_back_what_may_match_but_not_for_ever() -> None:
    stops = RegexStops(["BEGIN.*END"])
    text = "x BEGIN"
    stops.search(text)
    assert stops.hold == 2
    for _ in range(MAX_MATCH_CHARS // 64 + 2):
        text += "." * 64
        stops.search(text)
        assert stops.hold is None or stops.hold >= len(text) - MAX_MATCH_CHARS
    assert stops.hold is None or stops.hold > 2
    stops.search(text + "END")
    assert stops.hit is None


def test_an_empty_match_ends_once() -> None:
    stops = RegexStops(["(?<=END)"])
    stops.search("the END")
    assert (stops.hit.start, stops.hit.end) == (7, 7)
    stops.release("the END")
    assert stops.hit is None
    stops.search("the END and END")
    assert stops.hit.start == 15


def test_the_leftmost_of_several_patterns_wins() -> None:
    stops = RegexStops(["d+", "b.d"])
    stops.search("abcd")
    assert (stops.hit.pattern, stops.hit.start) == ("b.d", 1)


def test_anchors_and_lookbehinds_see_the_whole_text() -> None:
    stops = RegexStops(["^b", "(?<=a)b"], start=1)
    stops.search("ab")
    assert stops.hit.pattern == "(?<=a)b"


def test_a_pattern_that_explodes_names_itself() -> None:
    stops = RegexStops(["x|(?:a|aa)+$c"], seconds=0.02)
    with pytest.raises(StopConditionError, match=r"stop pattern 'x\|\(\?:a\|aa\)\+\$c' took longer than 0.02 s"):
        stops.search("a" * 64)


@pytest.mark.parametrize("pattern", ["(", "", "a*", "x{3,1}", "(?P<n>a", 5, "a" * 4097, "[z-a]", "$"])
def test_patterns_that_can_not_be(pattern) -> None:
    with pytest.raises(InvalidValueError, match="stop pattern"):
        RegexStops([pattern])


@pytest.mark.parametrize(
    "detail",
    [
        None,
        {},
        {"ban": ["a"]},
        [],
        {"stop_regex": ["("], "ban": [], "sections": False, "opened": False, "num_lifted": 0},
    ],
)
def test_a_journal_with_other_marks_is_refused(detail) -> None:
    with pytest.raises(InvalidValueError):
        SteeredText.rebuild(TOKENIZER, (), [], [(0, "steer", detail)])
    with pytest.raises(InvalidValueError):
        SteeredText.rebuild(TOKENIZER, (), [], [(0, "steer", Steering().to_json()), (0, "shown", 4)])
