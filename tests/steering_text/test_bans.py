"""Banned strings: the reply is what it would be if the model had never been allowed to begin them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import mlx.core as mx
import pytest
from harness import PROMPT, SETUPS, StopAt, counted, model, new_session
from scripted import Heard, Talker, cut_everywhere, left_everywhere, says, says_with

from mlxgen import judge as judge_module
from mlxgen.constraints import BanConstraint, Grammar
from mlxgen.decode import DecodeOptions, TokenIterator
from mlxgen.errors import BannedStringError, InvalidValueError, MlxgenError, UnsupportedError
from mlxgen.events import Backtrack, StopHit, Token
from mlxgen.judge import Judge
from mlxgen.options import ReplyOptions
from mlxgen.persist import AutosavePolicy
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.sampling import SamplingParams
from mlxgen.session import Session
from mlxgen.steeredtext import BanHit

WORDS = "I can say the sea is on the hill and so on, at last"


def plain(max_tokens: int | None = 24, **options) -> ReplyOptions:
    return ReplyOptions(max_tokens=max_tokens, ignore_eos=True, **options)


def naive(talker: Talker, bans: tuple[str, ...], num_tokens: int) -> list[int]:
    """Every token from a whole new forward pass over everything; a banned string is looked for in the bytes."""
    session = talker.session()
    session.send("Say it.", reply=ReplyOptions(max_tokens=0))
    prompt = list(session.history.ids)
    pieces = {i: bytes_of(talker, i) for i in range(talker.using.vocab_size)}
    ids: list[int] = []
    masks: dict[int, set[int]] = {}
    while len(ids) < num_tokens:
        from mlxgen.cache import CacheOptions, make_cache

        cache = make_cache(talker.using.module, CacheOptions())
        logits = talker.forward(mx.array(prompt + ids, mx.uint32), cache=cache, start=0, inputs=None)[0, -1]
        row: list[float] = logits.tolist()
        for banned in masks.get(len(ids), ()):
            row[banned] = float("-inf")
        ids.append(max(range(len(row)), key=row.__getitem__))
        said = b"".join(pieces[i] for i in ids)
        found = [place for ban in bans if (place := said.find(ban.encode())) >= 0]
        if found:
            first, size = 0, 0
            while size + len(pieces[ids[first]]) <= min(found):
                size += len(pieces[ids[first]])
                first += 1
            masks = {place: banned for place, banned in masks.items() if place <= first}
            masks.setdefault(first, set()).add(ids[first])
            del ids[first:]
    return ids


def bytes_of(talker: Talker, token: int) -> bytes:
    from mlxgen.detokenizer import token_bytes

    found = token_bytes(talker.using.tokenizer)
    assert found is not None
    return found(token) or b""


@pytest.mark.parametrize(
    "bans",
    [
        ("sea",),
        ("the sea", "the hill"),
        ("say the", "say th", "sea"),
        (" on",),
        ("s",),
        ("and so on", "so on", " on,"),
    ],
)
def test_greedy_replies_are_those_of_a_model_that_was_masked_by_hand(bans) -> None:
    talker = says_with("llama", WORDS)
    heard = talker.run(plain(ban=bans))
    assert heard.of(Backtrack)
    assert not any(ban in heard.finished.text for ban in bans)
    assert heard.text == heard.finished.text
    assert heard.ids == naive(talker, bans, 24)
    assert heard.finished.text == talker.using.tokenizer.decode(heard.ids)


def test_upper_and_lower_case_differ() -> None:
    heard = says_with("llama", WORDS).run(plain(ban=("SEA", "Sea")))
    assert not heard.of(Backtrack)
    assert heard.finished.text.startswith("I can say the sea is")


def test_text_is_shown_late_and_never_taken_back() -> None:
    talker = says_with("llama", WORDS)
    heard = talker.run(plain(ban=("the sea is on the hill",)))
    shown, ends = "", [0]
    for event in heard.events:
        if isinstance(event, Token):
            shown += event.text
            del ends[event.index + 1 :]
            ends.append(ends[-1] + len(talker.using.tokenizer.decode([event.id])))
        elif isinstance(event, Backtrack):
            assert len(shown) <= ends[event.index]
            assert event.banned == "the sea is on the hill"
    (back,) = heard.of(Backtrack)
    held = heard.of(Token)[back.index : back.index + 8]
    assert all(event.text == "" for event in held)


def test_bytes_of_one_character_go_together() -> None:
    """A banned string that begins inside a token sequence of one character goes back to its first byte."""
    talker = says_with("llama", "so 你好 and 😀 or é")
    for ban in ("你", "😀", "é", "好 and", " 😀 or"):
        heard = talker.run(plain(ban=(ban,)))
        assert heard.ids == naive(talker, (ban,), 24)
        assert ban not in heard.finished.text
        for place, ids in heard_banned(talker, ban).items():
            assert ids
            assert place <= len(heard.ids)


def heard_banned(talker: Talker, ban: str) -> dict[int, tuple[int, ...]]:
    session = talker.session()
    session.send("Say it.", reply=plain(ban=(ban,)))
    assert session.history.reply is not None
    return session.history.reply.banned


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("name", SETUPS)
def test_a_reply_is_what_the_same_masks_give_from_the_start(name, temperature) -> None:
    """For every kind of cache, also those that can't be trimmed; sampled with the same keys."""
    setup, sampling = SETUPS[name], SamplingParams(temperature=temperature, seed=7)
    text = new_session(setup).send(PROMPT, reply=plain(30, sampling=sampling)).text
    reply = plain(30, ban=(text[3:6], text[12:14], text[20:23]), sampling=sampling)
    session = new_session(setup)
    heard = Heard()
    heard.take(session.stream(PROMPT, reply=reply))
    assert heard.of(Backtrack)
    record = session.history.reply
    assert record is not None
    iterator = TokenIterator.from_prompt(
        session.model,
        session.history.ids[: record.start],
        options=DecodeOptions(
            sampling=reply.sampling,
            max_tokens=30,
            constraints=(BanConstraint(record.banned, session.model.vocab_size),),
        ),
        cache_options=setup.cache,
        step_size=setup.step_size,
    )
    assert heard.ids == record.ids == [token.id for token in iterator]


@pytest.mark.parametrize("name", ["llama", "gemma3-window", "qwen3_5", "ring", "quantized"])
def test_stopping_anywhere_changes_nothing(name, tmp_path) -> None:
    talker = says(model(SETUPS[name].kind), WORDS, SETUPS[name])
    reply = plain(18, ban=("the sea", "is on the hi", "say the sea is"), logprobs=True)
    assert len(talker.run(reply).of(Backtrack)) >= 2
    cut_everywhere(talker, reply, every=1 if name == "llama" else 5)
    cut_everywhere(talker, reply, tmp_path, every=3 if name == "llama" else 9)


def test_leaving_the_loop_anywhere_loses_nothing() -> None:
    talker = says_with("llama", WORDS)

    def check(heard: Heard, whole: Heard) -> None:
        assert heard.outcome == whole.outcome

    left_everywhere(talker, plain(16, ban=("the sea", "is on the hill")), check)


def test_a_kill_after_any_record(tmp_path) -> None:
    """Whatever the journal has at a kill: the resumed reply is the same, and shows nothing twice."""
    talker = says_with("llama", WORDS)
    reply = plain(16, ban=("the sea is", "say the s"), stop=("zzz",))
    whole = talker.run(reply)
    session = talker.session()
    path = session.autosave(tmp_path / "whole.mlxgen")
    session.send("Say it.", reply=reply)
    session.close()
    lines = (path / "journal.log").read_bytes().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line[9:14] == b"reply") + 1
    for end in range(first, len(lines) + 1):
        cut = tmp_path / f"cut{end}.mlxgen"
        cut.mkdir(mode=0o700)
        (cut / "journal.log").write_bytes(b"".join(lines[:end]))
        with resume(cut, options=ResumeOptions(model=talker.using)) as again:
            before, heard = again.reply_text, Heard()
            if again.unfinished:
                heard.take(again.continue_())
            assert again.reply_text == before + heard.text == whole.finished.text
            assert again.history.reply.ids == whole.ids


def test_only_what_was_taken_back_is_computed_again() -> None:
    """Each going back costs the tokens it took, and the pass of the one before them, whose logits aren't kept."""
    talker = says_with("llama", WORDS)
    counter = talker.forward.inner

    def num_fed(reply: ReplyOptions) -> tuple[int, Heard]:
        counter.lengths.clear()
        heard = talker.run(reply)
        return counter.num_tokens, heard

    without, _ = num_fed(plain(16))
    fed, heard = num_fed(plain(16, ban=("the sea is",)))
    taken = 0
    ids: list[int] = []
    for event in heard.events:
        if isinstance(event, Token):
            ids.append(event.id)
        elif isinstance(event, Backtrack):
            taken += len(ids) - event.index + 1
            del ids[event.index :]
    assert taken > 3
    assert without < fed <= without + taken + len(heard.of(Backtrack))


def test_what_was_shown_at_a_length_end_stays() -> None:
    """Half a banned string was shown when the reply ended; its other half is kept from coming."""
    talker = says_with("llama", WORDS)
    whole = "say the sea"
    end = len(talker.encode("I can say the"))
    session, heard = talker.session(), Heard()
    first = heard.take(session.stream("Say it.", reply=plain(end, ban=(whole,))))
    assert first.text == "I can say the"
    assert not heard.of(Backtrack)
    last = heard.take(session.continue_(reply=plain(10, ban=(whole,))))
    backs = heard.of(Backtrack)
    assert backs
    assert all(back.index >= end for back in backs)
    assert last.text.startswith("I can say the")
    assert whole not in last.text
    assert heard.text == last.text


def test_without_the_ban_the_reply_may_say_it_after_all(tmp_path) -> None:
    """Stopped right after going back, then continued without banned strings: the mask is gone with them."""
    talker = says_with("llama", WORDS)
    session, heard = talker.session(), Heard()
    stream = session.stream("Say it.", reply=plain(20, ban=("the sea",)))
    for event in stream:
        if isinstance(event, Backtrack):
            break
    stream.close()
    path = session.save(tmp_path / "s.mlxgen")
    free = plain(12)
    heard.take(session.continue_(reply=free))
    assert session.reply_text.startswith("I can say the sea is")
    with resume(path, options=ResumeOptions(model=talker.using)) as again:
        again_heard = Heard()
        again_heard.take(again.continue_(reply=free))
        assert again.reply_text == session.reply_text
        assert again_heard.events == heard.events


def test_other_bans_from_here_on() -> None:
    talker = says_with("llama", WORDS)
    for cut in range(1, 20, 2):
        session, heard = talker.session(), Heard()
        heard.take(session.stream("Say it.", reply=plain(60, ban=("the sea is on",)), cancel=StopAt(cut)))
        before = heard.of(Token)
        end = heard.take(session.continue_(reply=plain(24, ban=("sea is", " so on"))))
        assert heard.text == end.text == session.reply_text
        seen = "".join(event.text for event in before)
        assert "sea is" not in end.text[max(0, len(seen) - 5) :]
        assert " so on" not in end.text
        assert heard.ids == session.history.reply.ids


def test_stop_strings_inside_of_bans_and_around_them() -> None:
    """A ban that completes goes before a stop string; one that doesn't is no hindrance to it."""
    talker = says_with("llama", WORDS)
    hidden = talker.run(plain(ban=("the sea",), stop=("sea",)))
    assert hidden.of(Backtrack)
    assert "sea" not in hidden.finished.text
    inside = talker.run(plain(ban=("say the sea and more",), stop=("the sea",)))
    assert inside.finished.text == "I can say "
    assert inside.finished.stop.kind == "string"
    assert inside.finished.stop.char_index == len("I can say ")
    assert not inside.of(Backtrack)


def test_no_token_is_left() -> None:
    talker = says_with("llama", "aaaa")
    session = talker.session()
    stream = session.stream("Say it.", reply=plain(8, ban=("a",)))
    next(event for event in stream if isinstance(event, Backtrack))
    reply = session.history.reply
    assert reply is not None
    (banned,) = reply.banned[0]
    vocab = range(talker.using.vocab_size)
    reply.banned[0] = tuple(i for i in vocab if i not in (banned, talker.encode("a")[0]))
    stream.close()
    with pytest.raises(BannedStringError, match="rule out every token at token 0"):
        Judge(talker.using, reply, plain(8, ban=("a",))).check_backtrack(BanHit("a", 0), 0, banned)


def test_going_back_too_often(monkeypatch) -> None:
    monkeypatch.setattr(judge_module, "MAX_BACKTRACKS", 3)
    talker = says_with("llama", "x" * 40)
    options = plain(8, ban=(*"abcdefghijklmnopqrstuvwxyz0123456789 ",))

    def num_banned() -> int:
        assert session.history.reply is not None
        return sum(map(len, session.history.reply.banned.values()))

    session = talker.session()
    with pytest.raises(BannedStringError, match="gone back 3 times"):
        session.send("Say it.", reply=options)
    assert num_banned() == 3
    # A second run may go back as often again, from where the first one came to; or go on without.
    with pytest.raises(BannedStringError, match="gone back 3 times"):
        list(session.continue_())
    position, text = session.position, session.reply_text
    assert position > 0
    heard = Heard()
    heard.take(session.continue_(reply=plain(3)))
    assert session.position == position + 3
    assert session.reply_text == text + heard.text
    assert "x" in heard.text
    assert session.send("Say it again.", reply=plain(3)).finish_reason == "length"


@pytest.mark.parametrize("bans", ["abc", ("",), ("a" * 4097,), tuple("a" * n for n in range(1, 259)), (3,)])
def test_bans_that_can_not_be(bans) -> None:
    session = new_session(SETUPS["llama"])
    turns = len(session.turns)
    with pytest.raises(InvalidValueError):
        session.stream("Say it.", reply=replace(plain(), ban=bans))
    assert len(session.turns) == turns


def test_a_processor_with_a_state_of_its_own_can_not_go_back() -> None:
    class Remembering:
        name = "remembering"

        def __call__(self, history: mx.array, logits: mx.array) -> mx.array:
            return logits

        def state(self) -> int:
            return 0

        def restore(self, state: object) -> None:
            return None

    with pytest.raises(UnsupportedError, match="go back"):
        new_session(SETUPS["llama"]).stream("Say it.", reply=plain(ban=("a",), processors=(Remembering(),)))


def test_a_pass_stays_in_flight_while_nothing_is_masked() -> None:
    """Banned strings alone don't make decoding wait: the next pass is submitted before a token is shown."""
    using, _ = counted("llama")
    session = new_session(SETUPS["llama"], using)
    seen = []
    for event in session.stream(PROMPT, reply=plain(8, ban=("\u2603\u2603",))):
        if isinstance(event, Token):
            seen.append((event.index, session.sequence.num_fed - session.history.reply.start))
    assert seen[:-1] == [(index, index + 1) for index in range(7)]


def test_words_put_into_the_models_mouth_are_not_taken_back(tmp_path) -> None:
    """They may end in half a banned string: what the model adds to it goes, they stay, and count as shown."""
    talker = says_with("llama", "")
    session, heard = talker.session(), Heard()
    session.add("Say it.")
    session.append_text("I can say th")
    assert session.reply_text == "I can say th"
    place = session.position
    talker.forward.script = [0] * place + talker.encode("e sea is on")
    heard.take(session.continue_(reply=plain(12, ban=("say the sea",))))
    backs = heard.of(Backtrack)
    assert backs
    assert all(back.index >= place for back in backs)
    assert session.reply_text == "I can say th" + heard.text
    assert "say the sea" not in session.reply_text
    with resume(session.save(tmp_path / "s.mlxgen"), options=ResumeOptions(model=talker.using)) as again:
        assert again.reply_text == session.reply_text


@pytest.mark.parametrize("ban", [(" a",), ("b",), ("or", " an")])
def test_with_healing(ban) -> None:
    """The prompt's last word is chosen anew; what may not be said of it isn't, and nothing of the prompt is shown."""
    talker = says_with("llama", "x")
    options = replace(talker.options, raw=True)
    whole = Heard()
    whole.take(Session(talker.using, options=options).stream("on the hill a", reply=plain(12, heal=True, ban=ban)))
    assert whole.text == whole.finished.text
    assert not any(string in whole.text for string in ban)
    for cut in range(1, 16):
        session, heard = Session(talker.using, options=options), Heard()
        heard.take(session.stream("on the hill a", reply=plain(12, heal=True, ban=ban), cancel=StopAt(cut)))
        if session.unfinished:
            heard.take(session.continue_())
        assert heard.outcome == whole.outcome


def test_within_a_grammar(tmp_path) -> None:
    """Both rule out: the reply still fits the grammar, says nothing banned, and ends by the grammar."""
    pytest.importorskip("llguidance")
    talker = says_with("llama", "the sea and the hill")
    reply = ReplyOptions(max_tokens=40, grammar=Grammar.regex("the (sea|hill|an) and the (sea|hill|is)"), ban=("sea",))
    heard = talker.run(reply)
    assert heard.of(Backtrack)
    assert heard.finished.text in [f"the {a} and the {b}" for a in ("hill", "an") for b in ("hill", "is")]
    assert heard.finished.stop == StopHit("grammar", None, len(heard.ids) - 1, len(heard.finished.text))
    cut_everywhere(talker, reply, every=2)
    cut_everywhere(talker, reply, tmp_path, every=5)
    only = ReplyOptions(max_tokens=40, grammar=Grammar.regex("the sea"), ban=("sea",))
    session = talker.session()
    with pytest.raises(MlxgenError):
        session.send("Say it.", reply=only)
    assert session.continue_(reply=plain(4)) is not None


def test_going_back_to_any_token_and_forking_there() -> None:
    """A mark of the user's own inside of half a banned string, or behind one that was taken back: the same reply comes,
    also from a fork."""
    talker = says_with("llama", WORDS)
    reply = plain(16, ban=("the sea", "is on the hill"), stop=("zz",), stop_regex=("q{3}",))
    whole = talker.run(reply)
    for place in range(len(whole.ids)):
        session = talker.session()
        session.send("Say it.", reply=reply)
        session.rewind(num_tokens=session.history.reply.start + place)
        before = session.reply_text
        assert whole.finished.text.startswith(before)
        for each in (session.fork(), session):
            heard = Heard()
            heard.take(each.continue_())
            assert each.history.reply.ids == whole.ids
            assert before + heard.text == each.reply_text == whole.finished.text


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_lost_process_resumes_from_journal_and_last_generation(name, tmp_path) -> None:
    """As after kill -9 while everything is saved all the time: a generation may know tokens that were taken back."""
    talker = says(model(SETUPS[name].kind), WORDS, SETUPS[name])
    reply = plain(14, ban=("the sea", "is on the hi"))
    whole = talker.run(reply)
    session = talker.session()
    session.autosave(tmp_path / "live.mlxgen", policy=AutosavePolicy(every_s=0, every_tokens=1, max_share=1.0))
    copies = []
    for _ in session.stream("Say it.", reply=reply):
        copies.append(copied(tmp_path / "live.mlxgen", tmp_path / f"copy{len(copies)}.mlxgen"))
    session.close()
    for copy in copies[:: 1 if name == "llama" else 4]:
        with resume(copy, options=ResumeOptions(model=talker.using)) as again:
            before, heard = again.reply_text, Heard()
            if again.unfinished:
                heard.take(again.continue_())
            assert again.history.reply.ids == whole.ids
            assert again.reply_text == before + heard.text == whole.finished.text


def copied(live, target):
    """A copy of a folder that is being written."""
    while True:
        try:
            return shutil.copytree(live, target, ignore=shutil.ignore_patterns(".tmp-*"))
        except shutil.Error:
            shutil.rmtree(target)
