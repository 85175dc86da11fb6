"""P7 over sessions and restarts: a prompt's beginning is shared up to where its pictures differ, and never further."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import mlx.core as mx
import pytest
from mlxgen_vision.prefix import PrefixSpan
from prefixcache.rig import MEMORY, next_logits, say
from vision_harness import tiny_vlm
from vision_harness.jobs import Counts, counting, image, model, options, reply, sources

from mlxgen.inputs import MediaSpan, PreparedInput, PreparedMedium
from mlxgen.prefixcache import PrefixCacheOptions, prefix_cache
from mlxgen.prefixcache.keys import chunks
from mlxgen.preparation import shared_prefix
from mlxgen.session import Session

FAMILIES = pytest.mark.parametrize("family", tiny_vlm.FAMILIES)


@pytest.fixture
def folder(tmp_path):
    return sources(tmp_path / "media")


def own(family, counts=None, **rest):
    using = counting(model(family), counts or Counts())
    prefix_cache(using).configure(PrefixCacheOptions(MEMORY, **rest))
    return using


def talk(using, family, turn, *, cached=True, max_tokens=3):
    session = Session(using, options=replace(options(family), prefix_cache=cached))
    return session, say(session, turn, reply(max_tokens))


@FAMILIES
def test_a_picture_added_behind_keeps_what_is_before_it_and_one_put_before_does_not(family, folder) -> None:
    using = own(family)
    a, b, text = image(folder, "A"), image(folder, "B"), "What is there to be seen? Say it at some length, please."
    between = "Then, after some words have been said of it, which take their time, there comes this: " * 3
    first, _ = talk(using, family, [a, between, text])
    session, warm = talk(using, family, [a, between, b, text])
    plain, expected = talk(using, family, [a, between, b, text], cached=False)
    assert (warm.values, session.sequence.passes) == (expected.values, plain.sequence.passes)
    # A family may prepare a picture in another way where there are several: then it is another picture.
    same = shared_prefix(first.sequence.ids, first.sequence.inputs, session.sequence.ids, session.sequence.inputs)
    both = zip(first.sequence.passes.entries, plain.sequence.passes.entries, strict=False)
    alike = takewhile(lambda pair: pair[0] == pair[1] and pair[0][1] + pair[0][2] <= same, both)
    assert warm.reused == sum(entry[2] for entry, _ in alike), "all chunks up to the end of A"
    if family in ("qwen2_5_vl", "qwen3_5", "gemma3", "idefics3"):
        assert warm.reused > min(span.end for span in session.sequence.inputs.spans)
    exchanged, said = talk(using, family, [b, between, a, text])
    plain, expected = talk(using, family, [b, between, a, text], cached=False)
    assert said.values == expected.values
    start_of_b = min(span.start for span in exchanged.sequence.inputs.spans)
    assert said.reused <= start_of_b, "nothing of A behind B"


@FAMILIES
def test_the_same_text_with_another_picture_shares_nothing_behind_its_beginning(family, folder) -> None:
    using = own(family)
    text = "Look at it for as long as it takes to be sure of what it is, and then tell me: "
    turn = lambda name: [text, image(folder, name), "What is it?"]  # noqa: E731
    first, one = talk(using, family, turn("A"))
    _, same = talk(using, family, turn("A"))
    assert same.values == one.values
    assert same.prefilled <= 17
    session, other = talk(using, family, turn("D"))
    plain, expected = talk(using, family, turn("D"), cached=False)
    assert session.sequence.ids == [*first.sequence.ids[: len(session.sequence.ids) - 3], *session.sequence.ids[-3:]]
    assert other.values == expected.values
    assert [value[3] for value in other.values] != [value[3] for value in one.values]
    assert other.reused <= min(span.start for span in session.sequence.inputs.spans)
    assert mx.array_equal(next_logits(session), next_logits(plain))


def test_after_a_restart_pictures_are_not_encoded_and_their_rows_not_fed_again(folder, tmp_path) -> None:
    family = "qwen2_5_vl"
    turn = [image(folder, "A"), "and", image(folder, "B"), "What do you see in these two pictures?"]
    kept = {"disk_bytes": 2**26, "folder": tmp_path / "prefix"}
    using = own(family, **kept)
    _, expected = talk(using, family, turn)
    assert prefix_cache(using).flush(20)
    counts = Counts()
    fresh = own(family, counts, **kept)
    session, warm = talk(fresh, family, turn)
    assert warm.values == expected.values
    assert not counts.encoded
    assert counts.num_fed == warm.prefilled + 2
    assert warm.prefilled <= 17
    plain, _ = talk(own(family), family, turn, cached=False)
    assert mx.array_equal(next_logits(session), next_logits(plain))


def test_features_of_another_picture_are_never_taken_for_these(folder, tmp_path) -> None:
    family = "qwen2_5_vl"
    kept = {"disk_bytes": 2**26, "folder": tmp_path / "prefix"}
    using = own(family, **kept)
    talk(using, family, [image(folder, "A"), "?"])
    assert prefix_cache(using).flush(20)
    files = sorted((tmp_path / "prefix").rglob("features-*"))
    assert len(files) == 1
    # Under the name of D's features, with a hash that is right.
    session, _ = talk(own(family), family, [image(folder, "D"), "?"])
    other = session.media[0].content_hash
    renamed = files[0].with_name(f"features-{other}-0.{files[0].name.split('.')[1]}.safetensors")
    files[0].rename(renamed)
    counts = Counts()
    _, warm = talk(own(family, counts, **kept), family, [image(folder, "D"), "?"])
    _, expected = talk(own(family), family, [image(folder, "D"), "?"], cached=False)
    assert warm.values == expected.values
    assert sum(counts.encoded.values()) == 1


def test_a_prompt_that_attends_in_both_directions_is_shared_whole_or_not_at_all(folder) -> None:
    using = own("paligemma")
    turn = [image(folder, "A"), "What is in this picture, and what of it is red?"]
    _, one = talk(using, "paligemma", turn)
    _, same = talk(using, "paligemma", turn)
    assert (same.values, same.prefilled) == (one.values, 1)
    # Another last word is seen by all before it.
    other = [turn[0], "What is in this picture, and what of it is red!"]
    _, warm = talk(using, "paligemma", other)
    _, expected = talk(using, "paligemma", other, cached=False)
    assert (warm.values, warm.reused) == (expected.values, 0)


def test_all_that_a_family_says_of_a_span_is_part_of_what_a_block_is_known_by() -> None:
    """The pass over all but the last token of such a prompt computes the last one, too, and it is in the span alone."""
    medium = PreparedMedium("image", content_hash="a" * 64)

    def key(span, content="a" * 64, atomic=((0, 40),)):
        medium.content_hash = content
        inputs = PreparedInput(list(range(40)), [medium], (span,), atomic=atomic)
        return chunks("0" * 64, inputs.token_ids, inputs, [(0, 39)])[-1].key

    plain = MediaSpan(2, 18, 0, 0, 16)
    prefix = PrefixSpan(2, 18, 0, 0, 16, (0, 40), 39)
    different = [
        key(plain),
        key(prefix),
        key(replace(prefix, last_id=38)),
        key(plain, "b" * 64),
        key(plain, atomic=()),
        key(replace(plain, row_start=1, row_end=17)),
    ]
    assert len(set(different)) == len(different)
    assert key(plain) == key(plain)
