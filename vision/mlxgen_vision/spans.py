"""Placeholders that stand for runs of one repeated token: expanding them in text, finding them again among ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxgen.errors import PlaceholderError
from mlxgen.inputs import MediaKind, MediaSpan, PreparedMedium
from mlxgen.request import ImagePart


def template_parts(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """A turn's parts as most vision models' chat templates take them: {"type": "text" | "image" | "video"} each."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content.append({"type": "image" if isinstance(part, ImagePart) else "video"})
    return content


def expand_placeholders(
    text: str,
    media: Sequence[PreparedMedium],
    placeholders: Mapping[str, MediaKind],
    render: Callable[[PreparedMedium], str],
) -> str:
    """Replace every placeholder, in order, by what `render` makes of its medium.

    Raises `PlaceholderError` if there are more or fewer than media, or one asks for a picture where a video is given.
    """
    pieces = re.split("(" + "|".join(re.escape(name) for name in placeholders) + ")", text)
    found = pieces[1::2]
    if len(found) != len(media):
        raise PlaceholderError(
            f"the prompt has {len(found)} placeholders ({', '.join(placeholders)}) and {len(media)} pictures or videos "
            "were given; give one for each, in order"
        )
    for number, (name, medium) in enumerate(zip(found, media, strict=True), start=1):
        if placeholders[name] != medium.kind:
            raise PlaceholderError(
                f"placeholder {number} is {name}, which stands for one {placeholders[name]}, but medium {number} is a "
                f"{medium.kind} ({medium.source_name}); give media in the order of their placeholders"
            )
    pieces[1::2] = [render(medium) for medium in media]
    return "".join(pieces)


def token_runs(token_ids: Sequence[int], token: int) -> Iterator[tuple[int, int]]:
    """The maximal half-open ranges in which `token` repeats."""
    start: int | None = None
    for position, other in enumerate(token_ids):
        if other == token and start is None:
            start = position
        elif other != token and start is not None:
            yield start, position
            start = None
    if start is not None:
        yield start, len(token_ids)


@dataclass(frozen=True, slots=True)
class RunLayout:
    """What a family's media look like among ids: runs of `num_tokens` times `token`, `num_runs(medium)` to a medium."""

    token: int
    num_tokens: int
    num_runs: Callable[[PreparedMedium], int]

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        """One span per run, the rows of each medium counted from 0.

        Raises `PlaceholderError` if a run has another length or the number of runs isn't what the media take.
        """
        runs = list(token_runs(token_ids, self.token))
        for start, end in runs:
            if end - start != self.num_tokens:
                raise PlaceholderError(
                    f"{end - start} image tokens (id {self.token}) in a row at position {start}, the model takes "
                    f"{self.num_tokens}; leave the text between expanding and tokenising as it is"
                )
        wanted = [self.num_runs(medium) for medium in media]
        if len(runs) != sum(wanted):
            raise PlaceholderError(
                f"the prompt has {len(runs)} runs of image tokens, its {len(media)} media take {sum(wanted)}; "
                "give the media the prompt was expanded for"
            )
        spans: list[MediaSpan] = []
        for medium, count in enumerate(wanted):
            for run in range(count):
                start, end = runs[len(spans)]
                spans.append(MediaSpan(start, end, medium, run * self.num_tokens, (run + 1) * self.num_tokens))
        return tuple(spans)


def locate_runs(
    token_ids: Sequence[int],
    media: Sequence[PreparedMedium],
    tokens: Mapping[MediaKind, int],
    lengths: Callable[[PreparedMedium], Sequence[int]],
) -> tuple[MediaSpan, ...]:
    """The spans of media whose runs differ in length: one to each of `lengths(medium)`, in the order of the media.

    `tokens` names each kind's token; runs may touch. Raises `PlaceholderError` if the ids have other runs than these.
    """
    known = set(tokens.values())
    spans: list[MediaSpan] = []
    position = 0
    for number, medium in enumerate(media):
        token = tokens[medium.kind]
        row = 0
        for length in lengths(medium):
            position = _next_of(token_ids, position, known)
            end = position + length
            if any(found != token for found in token_ids[position:end]) or end > len(token_ids):
                raise PlaceholderError(
                    f"the prompt has no {length} tokens {token} at {position} for {medium.kind} {number + 1} "
                    f"({medium.source_name}); media must be in the order of the prompt"
                )
            spans.append(MediaSpan(position, end, number, row, row + length))
            position, row = end, row + length
    left = _next_of(token_ids, position, known)
    if left < len(token_ids):
        raise PlaceholderError(
            f"the prompt has an image or video token at {left} and no medium for it: {len(media)} were given"
        )
    return tuple(spans)


def _next_of(token_ids: Sequence[int], position: int, wanted: set[int]) -> int:
    while position < len(token_ids) and token_ids[position] not in wanted:
        position += 1
    return position
