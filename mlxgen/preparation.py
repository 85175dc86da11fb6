"""The phases before prefill: prepare every medium unit by unit, encode it part by part, lay out the prompt.

Each function is a generator that yields after every finished unit and has committed that unit to the `PreparedMedium`
it belongs to before it yields. The order inside a unit is checkpoint, work, commit: a `Cancelled` never finds anything
half done, and a second call goes on with the next unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import mlx.core as mx

from mlxgen.cancellation import NEVER, Cancelled, CancelToken
from mlxgen.errors import InvalidValueError, PlaceholderError, UnsupportedError
from mlxgen.events import InputProgress
from mlxgen.features import feature_store
from mlxgen.inputs import Features, PreparedInput, PreparedMedium, VisionModel
from mlxgen.models.model import Model
from mlxgen.request import ImagePart, MediaPart, Message
from mlxgen.tokenizer import ChatTokenizer, Piece, ReplyPiece


def require_vision(model: Model) -> VisionModel:
    if model.vision is None:
        raise UnsupportedError(
            f"{model.name} is a text-only model: it can't take pictures or video; use a vision-language model"
        )
    return model.vision


def prepare_medium(
    vision: VisionModel, part: MediaPart, medium: PreparedMedium, *, cancel: CancelToken = NEVER
) -> Iterator[InputProgress]:
    """Finish preparing one medium; `medium` is filled in place and holds every finished unit at each yield."""
    if medium.prepared:
        return
    kind = "image" if isinstance(part, ImagePart) else "frame"
    done = len(medium.frames)
    for grown in vision.prepare(part, partial=medium, cancel=cancel):
        _take_over(medium, grown)
        for index in range(done, len(medium.frames)):
            total = medium.num_frames if medium.num_frames is not None else len(medium.frames)
            yield InputProgress("image" if kind == "image" else "frame", "prepare", index, total)
        done = len(medium.frames)


def _take_over(medium: PreparedMedium, grown: PreparedMedium) -> None:
    if grown is medium:
        return
    for name in PreparedMedium.__slots__:
        setattr(medium, name, getattr(grown, name))


def encode_medium(
    vision: VisionModel, medium: PreparedMedium, *, cancel: CancelToken = NEVER
) -> Iterator[InputProgress]:
    """Run the tower on the parts of a medium that aren't encoded yet; a checkpoint before every few blocks."""
    medium.num_parts = vision.num_parts(medium)
    store = feature_store(vision)
    total = len(medium.frames) if medium.kind == "video" else 1
    index = sum(vision.frames_of_part(medium, part) for part in range(len(medium.features)))
    for part in range(len(medium.features), medium.num_parts):
        cancel.checkpoint()
        features = store.get(medium.content_hash, part)
        encoded_here = features is None
        if features is None:
            features = _encode_part(vision, medium, part, cancel)
            store.put(medium.content_hash, part, features)
        medium.features.append(features)
        count = vision.frames_of_part(medium, part)
        if encoded_here:
            for frame in range(index, index + count):
                yield InputProgress("image" if medium.kind == "image" else "frame", "encode", frame, total)
        index += count


def _encode_part(vision: VisionModel, medium: PreparedMedium, part: int, cancel: CancelToken) -> Features:
    features: Features | None = None
    for step in vision.encode(medium, part):
        if step is None:
            cancel.checkpoint()
        else:
            features = step
    if features is None:
        raise UnsupportedError(f"the family {vision.family!r} encoded part {part} without giving features")
    mx.eval(list(features.values()))
    return features


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of a whole conversation, and the half-open ranges of them that are the model's own earlier replies."""

    ids: list[int]
    reply_ranges: tuple[tuple[int, int], ...] = ()

    def without_replies(self) -> list[int]:
        """The ids with -1 where a reply is: a placeholder token that a model happened to say stands for no picture."""
        masked = list(self.ids)
        for start, end in self.reply_ranges:
            masked[start:end] = [-1] * (end - start)
        return masked


def prepared_input(model: Model, prompt: Prompt, media: Sequence[PreparedMedium]) -> PreparedInput | None:
    """The prepared input for a whole prompt, or None where there are no media (plain text needs none)."""
    if not media:
        return None
    vision = require_vision(model)
    given = prompt.without_replies()
    spans = vision.locate(given, media)
    position_ids, rope_delta = vision.positions(given, media, spans)
    return PreparedInput(prompt.ids, list(media), spans, position_ids, rope_delta, vision.atomic(spans))


def shared_prefix(
    old_ids: Sequence[int], old: PreparedInput | None, new_ids: Sequence[int], new: PreparedInput | None
) -> int:
    """How many leading tokens both sequences share, media included (P7): same ids *and* the same content behind spans.

    Never ends inside a span or an atomic range: tokens that see each other are shared whole or not at all.
    """
    limit = min(len(old_ids), len(new_ids))
    common = 0
    while common < limit and old_ids[common] == new_ids[common]:
        common += 1
    old_spans = _identities(old)
    new_spans = _identities(new)
    for start, identity in new_spans.items():
        if start < common and (old_spans.get(start) != identity or identity[0] > common):
            common = start
    for start, identity in old_spans.items():
        if start < common and (new_spans.get(start) != identity or identity[0] > common):
            common = start
    old_ranges = set() if old is None else set(old.atomic)
    new_ranges = set() if new is None else set(new.atomic)
    for start, end in sorted(old_ranges | new_ranges, reverse=True):
        if start < common and (end > common or (start, end) not in old_ranges & new_ranges):
            common = start
    return common


def _identities(inputs: PreparedInput | None) -> dict[int, tuple[int, int, int, str]]:
    if inputs is None:
        return {}
    return {
        span.start: (span.end, span.row_start, span.row_end, inputs.media[span.medium].content_hash)
        for span in inputs.spans
    }


# -- the public `prepare` --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """What to prepare: messages for one model. `raw` takes the text as it is, without a chat template."""

    model: Model
    messages: tuple[Message, ...]
    raw: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)


def prepare(
    request: PrepareRequest, *, partial: PreparedInput | None = None, cancel: CancelToken = NEVER
) -> PreparedInput:
    """Everything prefill needs: media decoded, resized and encoded, the prompt's ids, spans and positions.

    Raises `Cancelled` with `.partial`, a `PreparedInput` that holds what was finished and has no token ids yet, with
    which a second call goes on; nothing that is finished in it is opened, resized or encoded again. It grows in place:
    don't give it to two calls at once. `TokenIterator.from_input` takes the result and refuses a partial one. Raises
    `MediaError` for a source that can't be used, or that has changed since it was opened, and `InvalidValueError` for a
    `partial` of another request.
    """
    parts = [part for message in request.messages for part in message.media]
    media = [PreparedMedium("image" if isinstance(part, ImagePart) else "video") for part in parts]
    if partial is not None:
        found, wanted = ([medium.kind for medium in given] for given in (partial.media, media))
        if found != wanted:
            raise InvalidValueError(
                f"the partial input has media {found}, the request {wanted}; pass the request it is of"
            )
        media = partial.media
    try:
        cancel.checkpoint()
        for part, medium in zip(parts, media, strict=True):
            for _ in prepare_medium(require_vision(request.model), part, medium, cancel=cancel):
                pass
        for medium in media:
            for _ in encode_medium(require_vision(request.model), medium, cancel=cancel):
                pass
    except Cancelled as stop:
        raise Cancelled(stop.reason, PreparedInput([], media)) from None
    prompt = _fresh_prompt(request, media)
    return prepared_input(request.model, prompt, media) or PreparedInput(prompt.ids)


def _fresh_prompt(request: PrepareRequest, media: Sequence[PreparedMedium]) -> Prompt:
    model = request.model
    if request.raw:
        return Prompt(raw_ids(model, "".join(message.text for message in request.messages), media))
    messages = [chat_message(model, message.role, message.parts) for message in request.messages]
    return chat_prompt(model, PromptSource(messages, {}, request.template_options), media)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Messages for the chat template; `reply_ids` are the ids of earlier replies by message index. `now`: see
    `pieces`. `locate_replies`: say where they stand also where no media make it matter."""

    messages: Sequence[Mapping[str, Any]]
    reply_ids: Mapping[int, Sequence[int]]
    template_options: Mapping[str, Any]
    now: datetime | None = None
    locate_replies: bool = False


def chat_message(model: Model, role: str, parts: Sequence[Any]) -> dict[str, Any]:
    """One turn in the form the model's chat template reads."""
    if model.vision is not None:
        return {"role": role, "content": model.vision.content_for_template(parts)}
    return {"role": role, "content": "".join(part for part in parts if isinstance(part, str))}


def chat_prompt(model: Model, conversation: PromptSource, media: Sequence[PreparedMedium]) -> Prompt:
    """A conversation to ids, with every placeholder of the template's own text expanded to its medium's tokens."""
    chat = ChatTokenizer(model.tokenizer)
    vision = model.vision

    def expand(texts: list[str]) -> list[str]:
        assert vision is not None
        return expand_texts(vision, texts, media)

    pieces = chat.pieces(
        conversation.messages,
        add_generation_prompt=True,
        template_options=conversation.template_options,
        expand=None if vision is None else expand,
        now=conversation.now,
    )
    ids = chat.encode(pieces, conversation.reply_ids, add_bos_if_missing=vision is not None)
    wanted = bool(media) or conversation.locate_replies
    return Prompt(ids, _reply_ranges(chat, pieces, conversation.reply_ids, ids) if wanted else ())


def _reply_ranges(
    chat: ChatTokenizer, pieces: Sequence[Piece], reply_ids: Mapping[int, Sequence[int]], ids: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Where the verbatim replies stand: behind the ids of everything before them."""
    ranges: list[tuple[int, int]] = []
    for piece in pieces:
        if isinstance(piece, ReplyPiece) and piece.rewritten is None and reply_ids.get(piece.turn_index):
            own = reply_ids[piece.turn_index]
            before = chat.encode(pieces[: pieces.index(piece)], reply_ids, add_bos_if_missing=True)
            start = len(before)
            if list(ids[start : start + len(own)]) == list(own):
                ranges.append((start, start + len(own)))
    return tuple(ranges)


# Between two stretches of template text while they are expanded together: no tokenizer or template has it.
_SEAM = "\ue000mlxgen-seam\ue001"


def expand_texts(vision: VisionModel, texts: Sequence[str], media: Sequence[PreparedMedium]) -> list[str]:
    """Expand the placeholders of several stretches of text that share one list of media."""
    expanded = vision.expand(_SEAM.join(texts), media).split(_SEAM)
    if len(expanded) != len(texts):
        raise PlaceholderError(f"expanding placeholders gave {len(expanded)} texts for {len(texts)}; a family's fault")
    return expanded


def raw_ids(model: Model, text: str, media: Sequence[PreparedMedium], *, first: bool = True) -> list[int]:
    """The ids of a prompt that is taken as it is, special tokens included; BOS only at the very start."""
    if media:
        text = require_vision(model).expand(text, media)
    return ChatTokenizer(model.tokenizer).encode_raw(text, add_special=first)
