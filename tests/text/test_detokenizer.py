from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers_for_tests as kinds
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer

from mlxgen.detokenizer import Detokenizer
from mlxgen.errors import InvalidValueError

BUILDERS = {
    "byte_level": kinds.byte_level,
    "byte_fallback": kinds.byte_fallback,
    "byte_fallback_no_strip": lambda: kinds.byte_fallback(strip=False),
    "metaspace": kinds.metaspace,
    "word_piece": kinds.word_piece,
    "split_bytes": kinds.split_bytes,
}
EXACT = ("byte_level", "metaspace", "word_piece")
BUILT: dict[str, Tokenizer] = {name: build() for name, build in BUILDERS.items()}


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def _stream(tokenizer: Any, ids: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.add(token) for token in ids], detokenizer.pending()


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("text", kinds.TEXTS)
def test_valid_text_streams_without_a_replacement_character(name: str, text: str) -> None:
    tokenizer = BUILT[name]
    ids = tokenizer.encode(text).ids
    pieces, pending = _stream(tokenizer, ids)
    assert pending == ""
    assert "".join(pieces) == _decode(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    if name.startswith("byte"):
        assert text in "".join(pieces)


@pytest.mark.parametrize("name", EXACT)
def test_any_ids_give_what_decode_gives_at_every_length(name: str) -> None:
    tokenizer = BUILT[name]
    size = tokenizer.get_vocab_size()

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, size + 3), max_size=40))
    def check(ids: list[int]) -> None:
        detokenizer, emitted = Detokenizer(tokenizer), ""
        for n, token in enumerate(ids, 1):
            emitted += detokenizer.add(token)
            known = [i for i in ids[:n] if i < size]
            assert emitted + detokenizer.pending() == _decode(tokenizer, known)

    check()


@pytest.mark.parametrize("strip", [True, False])
def test_byte_fallback_equals_decode_wherever_decode_spoils_nothing(strip: bool) -> None:
    """Any ids, as long as a run of bytes holds no complete character beside an invalid byte."""
    tokenizer = kinds.byte_fallback(strip=strip)
    first, last = tokenizer.token_to_id("<0x00>"), tokenizer.token_to_id("<0xFF>")
    text_ids = st.integers(0, tokenizer.get_vocab_size() - 1).filter(lambda i: not first <= i <= last)
    invalid = st.lists(st.integers(0x80, 0xBF), min_size=1, max_size=4).map(bytes) | st.sampled_from(
        [b"\xe4\xbd", b"\xf0\x9f\x98", b"\xff\xfe", b"\xe4", b"\xed\xa0\x80"]
    )
    runs = (st.text(max_size=4).map(lambda text: text.encode("utf-8", "ignore")) | invalid).map(
        lambda run: [first + byte for byte in run]
    )

    @settings(max_examples=120, deadline=None)
    @given(st.lists(st.tuples(runs, text_ids), max_size=8), runs)
    def check(parts: list[tuple[list[int], int]], tail: list[int]) -> None:
        ids = [token for run, text in parts for token in (*run, text)] + tail
        pieces, pending = _stream(tokenizer, ids)
        assert "".join(pieces) + pending == _decode(tokenizer, ids)

    check()


def test_a_character_that_was_complete_stays_when_an_invalid_byte_follows() -> None:
    tokenizer = BUILT["byte_fallback"]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode() + b"\xff"]
    pieces, _ = _stream(tokenizer, ids)
    assert pieces == ["", "", "你", "\ufffd"]
    assert _decode(tokenizer, ids) == "\ufffd" * 4


@pytest.mark.parametrize("name", ["byte_level", "split_bytes"])
def test_split_characters_come_out_whole_and_as_soon_as_possible(name: str) -> None:
    tokenizer = BUILT[name]
    ids = tokenizer.encode("é👩‍👩‍👧x").ids
    detokenizer, emitted = Detokenizer(tokenizer), ""
    for n, token in enumerate(ids, 1):
        emitted += detokenizer.add(token)
        assert emitted == _decode(tokenizer, ids[:n]).rstrip("\ufffd")


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "split_bytes"])
def test_invalid_bytes_cannot_block_the_stream(name: str) -> None:
    tokenizer = BUILT[name]
    spelling = {"byte_fallback": "<0xE4>"}.get(name, "ä")
    byte = tokenizer.token_to_id(spelling)
    detokenizer, emitted = Detokenizer(tokenizer), ""
    for n in range(1, 60):
        emitted += detokenizer.add(byte)
        assert n - len(emitted) <= 3
    assert set(emitted) == {"\ufffd"}


def test_every_token_ending_inside_a_character_is_still_valid_text() -> None:
    """A vocabulary whose tokens straddle characters: something is held for a long time, and none of it is invalid."""
    tokenizer = BUILT["split_bytes"]
    data = "你好吗你好吗你好吗".encode()
    alphabet = {byte: char for char, byte in zip(*_byte_alphabet(), strict=True)}
    names = ["".join(alphabet[byte] for byte in data[start : start + 2]) for start in range(1, len(data), 2)]
    tokenizer = kinds.split_bytes()
    tokenizer.add_tokens(["".join(alphabet[byte] for byte in data[:1]), *names])
    ids = [tokenizer.token_to_id(name) for name in [alphabet[data[0]], *names]]
    pieces, pending = _stream(tokenizer, ids)
    assert ("".join(pieces) + pending, "\ufffd" in "".join(pieces)) == ("你好吗你好吗你好吗", False)


def _byte_alphabet() -> tuple[list[str], list[int]]:
    from mlxgen.detokenizer import _byte_of_char

    table = _byte_of_char()
    return list(table), list(table.values())


def test_ids_outside_the_vocabulary() -> None:
    for tokenizer in BUILT.values():
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.add(tokenizer.get_vocab_size() + 1000) == ""
        with pytest.raises(InvalidValueError, match="-1"):
            detokenizer.add(-1)
        with pytest.raises(TypeError):
            detokenizer.add(1.5)  # type: ignore[arg-type]


def test_wrappers_of_both_libraries_and_a_decode_of_its_own() -> None:
    backend = kinds.byte_level()
    text = "café 你好\nthe end"
    ids = backend.encode(text).ids
    plain = kinds.hugging_face(backend, eos_token="<|im_end|>")
    for tokenizer in (plain, TokenizerWrapper(plain)):
        assert "".join(_stream(tokenizer, ids)[0]) == text
    backend.add_tokens(["<n>"])
    special = NewlineTokenizer(tokenizer_object=backend)
    ids = special.encode("a\nb 你", add_special_tokens=False)
    assert "".join(_stream(special, ids)[0]) == special.decode(ids) == "a\nb 你"


def test_a_window_costs_the_same_however_long_the_reply_is() -> None:
    tokenizer, lengths = BUILT["metaspace"], []
    detokenizer = Detokenizer(tokenizer)
    inner = detokenizer._stream
    decode = inner._decode  # type: ignore[attr-defined]
    inner._decode = lambda ids: lengths.append(len(ids)) or decode(ids)  # type: ignore[attr-defined]
    rng = random.Random(1)
    for _ in range(500):
        detokenizer.add(rng.randrange(tokenizer.get_vocab_size()))
    assert max(lengths) <= 20
    assert len(lengths) < 600


@pytest.mark.parity
def test_parity_kit_tokenizers() -> None:
    root = os.environ.get("MLXGEN_PARITY")
    if not root:
        pytest.skip("MLXGEN_PARITY is not set: the kit's tokenizers are not tested")
    folders = sorted([*Path(root).glob("text/*/tokenizer.json"), *Path(root).glob("*/hf/tokenizer.json")])
    assert len(folders) >= 20
    rng = random.Random(0)
    for path in folders:
        tokenizer = load_tokenizer(path.parent)
        for ids in (
            tokenizer.encode(kinds.TEXTS[0]),
            [rng.randrange(len(tokenizer)) for _ in range(200)],
        ):
            pieces, pending = _stream(tokenizer, ids)
            assert "".join(pieces) + pending == tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
