"""Pictures in any turn, several sessions on one model, and what is reused of what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import Outcome, StopAt
from vision_harness import tiny_vlm
from vision_harness.jobs import Counts, counting, image, job, model, new_session, options, reply, sources

from mlxgen.errors import PlaceholderError
from mlxgen.features import feature_store
from mlxgen.models import Model
from mlxgen.models.model import TextForward
from mlxgen.options import SessionOptions
from mlxgen.request import ImagePart, VideoPart
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.session import Session
from mlxgen.textstream import TextStream

FAMILIES = pytest.mark.parametrize("family", tiny_vlm.FAMILIES)


@pytest.fixture
def folder(tmp_path):
    return sources(tmp_path / "media")


def values(session, prompt=None, max_tokens=6):
    outcome = Outcome()
    outcome.take(session.stream(prompt, reply=reply(max_tokens)))
    return outcome.values


def cold(family, session):
    """What a new session says to the same turns, replies included, when it prefills everything at once."""
    fresh = new_session(family)
    state, source = fresh.state, session.state
    state.history.turns = [*source.history.turns[:-1]]
    state.history.session = source.history.session
    state.history.media, state.media, state.sources = source.history.media, source.media, source.sources
    return values(fresh)


def close(one, other):
    """The same ids and text; log-probabilities up to how the prompt was cut into chunks."""
    assert [value[:3] for value in one] == [value[:3] for value in other]
    assert [value[3] for value in one] == pytest.approx([value[3] for value in other], abs=2e-4)


@FAMILIES
def test_two_sessions_token_by_token_are_what_each_is_alone(family, folder) -> None:
    prompts = [[image(folder, "A"), "and", image(folder, "B"), "What?"], ["Say: ", image(folder, "C"), "Which?"]]
    if family in tiny_vlm.WITH_VIDEO:
        prompts[1].insert(0, VideoPart(folder / "V"))
    alone = [values(new_session(family), prompt) for prompt in prompts]
    streams = [new_session(family).stream(prompt, reply=reply()) for prompt in prompts]
    outcomes = [Outcome(), Outcome()]
    running = [0, 1]
    while running:
        for which in list(running):
            event = next(streams[which], None)
            if event is None:
                running.remove(which)
            else:
                if event.__class__.__name__ == "Token":
                    outcomes[which].tokens.append(event)
    assert [outcome.values for outcome in outcomes] == alone


@FAMILIES
def test_pictures_in_later_turns_and_text_only_turns_reuse_all_before(family, folder) -> None:
    counts = Counts()
    session = new_session(family, counting(model(family), counts))
    turns = [
        [image(folder, "A"), "one", image(folder, "B"), "two", image(folder, "C"), "What?"],
        "And without a picture?",
        ["Another: ", image(folder, "D"), "What now?"],
        "Thanks.",
    ]
    pictures = [3, 0, 1, 0]
    for turn, count in zip(turns, pictures, strict=True):
        held = len(session.ledger)
        fed = counts.num_fed
        finished = session.send(turn, reply=reply())
        usage = finished.usage
        assert (usage.images_prepared, usage.images_encoded) == (count, count), "only what is new"
        # The templates of Idefics3 and SmolVLM write "Assistant: " before a reply that was asked for by "Assistant:".
        if tiny_vlm.style(family) != "tiled":
            assert usage.reused_tokens == held, "what the user saw is reused"
        else:
            assert usage.reused_tokens >= held - 6, "all but the reply is reused"
        assert usage.prefilled_tokens == usage.prompt_tokens - usage.reused_tokens
        assert counts.num_fed - fed == usage.prefilled_tokens + 5, "6 tokens sampled, the last not fed"
        close(last_values(session), cold(family, session))


def last_values(session):
    """The last reply as `values` has it."""
    own = session.state.history.reply
    shown = texts(session)
    return [(i, token.id, shown[i], token.logprob, None) for i, token in enumerate(own.tokens)]


def texts(session):
    """The text of each token event of the last reply, by streaming the same ids again."""
    own = session.state.history.reply
    stream = TextStream(session.model.tokenizer, ())
    shown = [stream.feed(token.id).text for token in own.tokens]
    if own.finish["reason"] == "length":
        shown[-1] += stream.flush()
    return shown


@FAMILIES
def test_text_alone_is_what_the_language_model_says_alone(family) -> None:
    whole = model(family)
    alone = replace(whole, module=whole.vision.language, vision=None, forward=TextForward(whole.vision.language))
    assert isinstance(alone, Model)
    mine, plain = Session(whole, options=SessionOptions(raw=True)), Session(alone, options=SessionOptions(raw=True))
    for prompt in ("Once upon a time", " and then"):
        assert values(mine, prompt) == values(plain, prompt)
        assert mine.ledger == plain.ledger


@FAMILIES
def test_another_picture_of_the_same_size_never_gets_the_first_ones_cache(family, folder) -> None:
    session = new_session(family)
    first = values(session, ["Look: ", image(folder, "A"), "What is it?"])
    session.undo()
    outcome = Outcome()
    finished = outcome.take(session.stream(["Look: ", image(folder, "D"), "What is it?"], reply=reply()))
    second = outcome.values
    assert [value[3] for value in first] != [value[3] for value in second]
    expected = values(new_session(family), ["Look: ", image(folder, "D"), "What is it?"])
    close(second, expected)
    spans = session.state.sequence.inputs.spans
    assert finished.usage.reused_tokens <= min(span.start for span in spans)


@FAMILIES
def test_two_pictures_exchanged_are_another_prompt(family, folder) -> None:
    session = new_session(family)
    first = values(session, [image(folder, "A"), image(folder, "D"), "Which?"])
    session.undo()
    outcome = Outcome()
    finished = outcome.take(session.stream([image(folder, "D"), image(folder, "A"), "Which?"], reply=reply()))
    assert finished.usage.images_encoded == 0, "both are known"
    assert [value[3] for value in first] != [value[3] for value in outcome.values]
    close(outcome.values, values(new_session(family), [image(folder, "D"), image(folder, "A"), "Which?"]))


def test_the_same_picture_encodes_nothing_in_another_turn_or_session(folder) -> None:
    family, counts = "qwen2_5_vl", Counts()
    using = counting(model(family), counts)
    session = new_session(family, using)
    session.send([image(folder, "A"), "What?"], reply=reply(2))
    finished = session.send([image(folder, "A"), "Again?"], reply=reply(2))
    assert (finished.usage.images_prepared, finished.usage.images_encoded) == (1, 0)
    other = new_session(family, using)
    finished = other.send([ImagePart((folder / "A.png").read_bytes()), VideoPart(folder / "V"), "?"], reply=reply(2))
    assert (finished.usage.images_encoded, finished.usage.frames_encoded) == (0, 4)
    assert all(count == 1 for count in counts.encoded.values())


def test_the_feature_store_is_bounded(folder, monkeypatch) -> None:
    family, counts = "qwen2_5_vl", Counts()
    using = counting(model(family), counts)
    store = feature_store(using.vision)
    monkeypatch.setattr(store, "_max_bytes", 3 * 1024)
    for name in "ABCDABCD":
        new_session(family, using).send([image(folder, name), "?"], reply=reply(1))
        assert store.num_bytes <= 3 * 1024
    assert any(count == 2 for count in counts.encoded.values())


@FAMILIES
def test_after_a_resume_the_next_turn_reuses_the_pictures_too(family, folder, tmp_path) -> None:
    live = new_session(family)
    # Two pictures: a family may show a single one in another way.
    live.send([image(folder, "A"), image(folder, "C"), "What?"], reply=reply())
    path = live.save(tmp_path / "a.mlxgen")
    turn = [image(folder, "B"), "And this?"]
    expected, outcome = Outcome(), Outcome()
    usage = expected.take(live.stream(turn, reply=reply())).usage
    with resume(path, options=ResumeOptions(model=model(family))) as again:
        # Stopped in the new picture, and resumed once more: the first one's rows must still be known for what they are.
        again.send(turn, reply=reply(), cancel=StopAt(1))
    with resume(path, options=ResumeOptions(model=model(family))) as again:
        assert outcome.take(again.continue_()).usage.reused_tokens == usage.reused_tokens > 0
    assert outcome.values == expected.values


def test_an_undone_picture_is_remembered_as_such_after_a_resume(folder, tmp_path) -> None:
    family = "qwen2_5_vl"
    session = new_session(family)
    session.send(["Look: ", image(folder, "A"), "What is it?"], reply=reply())
    session.undo()
    session.add(["Look: ", image(folder, "D"), "What is it?"])
    path = session.save(tmp_path / "a.mlxgen")
    outcome = Outcome()
    with resume(path, options=ResumeOptions(model=model(family))) as again:
        outcome.take(again.stream(reply=reply()))
    close(outcome.values, values(new_session(family), ["Look: ", image(folder, "D"), "What is it?"]))


PLACEHOLDERS = {"qwen": "<|image_pad|>", "tiled": "<image>", "gemma": "<start_of_image>"}
PLACEHOLDERS |= {"gemma4": "<|image|>", "gemma4_e": "<|image|>"}
PLACEHOLDERS |= {"llava": "<image>", "llava_next": "<image>", "llava_onevision": "<image>", "paligemma": "<image>"}
PLACEHOLDERS |= {"pixtral": "[IMG]", "mistral3": "[IMG]", "internvl": "<IMG_CONTEXT>"}
PLACEHOLDERS |= {"lfm2_vl": "<image>"}
PLACEHOLDERS |= {"paddleocr_vl": "<|IMAGE_PLACEHOLDER|>"}
TOKENS = PLACEHOLDERS | {"gemma": "<image_soft_token>"}


@FAMILIES
def test_a_placeholder_somebody_types_is_text(family, folder) -> None:
    typed = f"What does {PLACEHOLDERS[tiny_vlm.style(family)]} or {TOKENS[tiny_vlm.style(family)]} mean?"
    session = new_session(family)
    assert session.send(typed, reply=reply(2)).usage.images_prepared == 0
    finished = session.send([image(folder, "A"), typed], reply=reply(2))
    assert finished.usage.images_prepared == 1
    ids = session.state.history.ids[: session.state.history.reply.start]
    token = session.model.tokenizer.convert_tokens_to_ids(TOKENS[tiny_vlm.style(family)])
    inside = sum(span.end - span.start for span in session.state.sequence.inputs.spans)
    assert ids.count(token) == inside
    assert session.model.tokenizer.decode(ids).count(typed) == 2


@pytest.mark.parametrize(("num_placeholders", "num_pictures"), [(0, 1), (1, 2), (2, 1)])
@FAMILIES
def test_raw_prompts_need_a_placeholder_for_each_picture(family, num_placeholders, num_pictures, folder) -> None:
    placeholder = PLACEHOLDERS[tiny_vlm.style(family)]
    session = Session(model(family), options=replace(options(family), raw=True))
    prompt = [placeholder * num_placeholders + "What?", *[image(folder, name) for name in "AB"[:num_pictures]]]
    with pytest.raises(PlaceholderError, match=f"{num_placeholders} placeholders.*{num_pictures} pictures"):
        session.send(prompt, reply=reply())
    assert session.turns == (), "a turn that fits no prompt is taken back"
    finished = session.send([placeholder + "What?", image(folder, "A")], reply=reply())
    assert finished.finish_reason == "length"


@FAMILIES
def test_a_placeholder_the_model_says_is_no_picture(family, folder) -> None:
    """Force the reply to be placeholder tokens, then ask about another picture, also after a resume."""
    token = model(family).tokenizer.convert_tokens_to_ids(TOKENS[tiny_vlm.style(family)])
    forced = replace(reply(3), sampling=replace(reply().sampling, logit_bias={token: 1e4}))
    session = new_session(family)
    session.send([image(folder, "A"), "Say it."], reply=forced)
    assert session.state.history.reply.ids == [token] * 3
    finished = session.send([image(folder, "B"), "And?"], reply=reply())
    assert finished.finish_reason == "length"
    assert len({span.medium for span in session.state.sequence.inputs.spans}) == 2
    close(last_values(session), cold(family, session))


@pytest.mark.parametrize("family", tiny_vlm.WITH_VIDEO)
def test_the_whole_job_says_what_it_did(family, folder) -> None:
    usage = new_session(family, counting(model(family), Counts())).send(job(family, folder), reply=reply()).usage
    assert (usage.images_prepared, usage.images_encoded) == (3, 3)
    assert (usage.frames_prepared, usage.frames_encoded) == (4, 4)
