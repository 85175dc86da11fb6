"""The prepared input: all that prefill consumes. And the protocol by which a vision family produces it.

The engine knows pictures only through this file. A family (in `mlxgen_vision`, or in anybody's package) is found
through the entry-point group `mlxgen.families`; each entry point names an object that satisfies `VisionFamily`.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from mlxgen.cancellation import NEVER, CancelToken

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

    from mlxgen.request import MediaPart

MediaKind = Literal["image", "video"]
Features = dict[str, "mx.array"]


class TemplateText(str):
    """A text part of a turn that counts as the chat template's own text, not as the user's: its placeholders are real.

    For a family whose published template doesn't write a placeholder that its models were trained with.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Half-open `[start, end)` of placeholder tokens that stand for rows `[row_start, row_end)` of one medium's
    features.

    A medium may have several spans (tiles, the frames of a video with time stamps between them).
    """

    start: int
    end: int
    medium: int
    row_start: int
    row_end: int


@dataclass(slots=True)
class PreparedMedium:
    """One picture or video on its way into the model. Owned by one session; grows unit by unit, never shrinks.

    Survives every stop: `frames` (one entry per prepared unit: an image, or one video frame, as resized uint8 pixels),
    `geometry` (JSON-able, the family's: grids, tile counts, time stamps, the plan of frames still to come) and
    `features` (one entry per encoded part: an image, or one temporal patch of a video).

    `content_hash` is the SHA-256 (hex) of what the model sees: the decoded, oriented and resized pixels together with
    the geometry. It is part of a prefix's identity (same text, other picture: never the same cache), and set when
    the medium is complete. `source_hash` is the SHA-256 of the source's bytes (for a folder: of its files in order; for
    an array or PIL image: of its pixels), set when it was first opened: a medium not yet complete may only be continued
    from the same content.
    """

    kind: MediaKind
    source_hash: str = ""
    source_name: str = ""
    geometry: dict[str, Any] = field(default_factory=dict)
    frames: list[np.ndarray[Any, Any]] = field(default_factory=list)
    num_frames: int | None = None
    content_hash: str = ""
    features: list[Features] = field(default_factory=list)
    num_parts: int | None = None

    @property
    def prepared(self) -> bool:
        return self.num_frames is not None and len(self.frames) == self.num_frames and bool(self.content_hash)

    @property
    def encoded(self) -> bool:
        return self.num_parts is not None and len(self.features) == self.num_parts

    def fork(self) -> PreparedMedium:
        """The same medium for another session: itself when it is complete (it never changes again)."""
        if self.prepared and self.encoded:
            return self
        return replace(
            self, geometry=copy.deepcopy(self.geometry), frames=list(self.frames), features=list(self.features)
        )


@dataclass(slots=True)
class PreparedInput:
    """Token ids with every placeholder expanded, the media behind them, and the positions of both.

    `token_ids` and `spans` cover the whole sequence from position 0. `position_ids` is int32 of shape
    (axes, num_tokens) for families with multi-axis rotary positions, otherwise None; token n of the reply then has
    position `num_tokens + n + rope_delta` on every axis. `atomic` are the half-open token ranges prefill must not cut
    (image blocks that attend in both directions).
    """

    token_ids: list[int]
    media: list[PreparedMedium] = field(default_factory=list)
    spans: tuple[MediaSpan, ...] = ()
    position_ids: np.ndarray[Any, Any] | None = None
    rope_delta: int = 0
    atomic: tuple[tuple[int, int], ...] = ()

    def before(self, end: int) -> PreparedInput:
        """The same input as if text alone followed token `end`: without the pictures there, with positions that count
        on."""
        spans = tuple(span for span in self.spans if span.end <= end)
        atomic = tuple(pair for pair in self.atomic if pair[1] <= end)
        known, delta = self.position_ids, self.rope_delta
        if known is not None and end < len(self.token_ids):
            known = known[:, :end]
            delta = int(known[:, -1].max()) + 1 - end if end else 0
        return replace(
            self, token_ids=self.token_ids[:end], spans=spans, atomic=atomic, position_ids=known, rope_delta=delta
        )

    @property
    def complete(self) -> bool:
        """Whether prefill may start: every medium prepared and encoded."""
        return all(medium.prepared and medium.encoded for medium in self.media)


class ForwardPass(Protocol):
    """One call of the language model. Stateless (P6): all that belongs to the request comes in as an argument.

    `ids` is uint32 of shape (n,); `start` is how many tokens the cache has been fed. Returns logits (1, n, vocabulary),
    lazily, so that a prefill chunk whose logits nobody evaluates never computes the output projection.
    """

    def __call__(
        self, ids: mx.array, *, cache: Sequence[Any], start: int, inputs: PreparedInput | None
    ) -> mx.array: ...


@runtime_checkable
class VisionModel(Protocol):
    """A loaded vision-language model. Immutable after load; any number of sessions may share it.

    All methods run on the thread that owns the model.
    """

    @property
    def family(self) -> str: ...

    @property
    def language(self) -> Any:
        """The nn.Module whose `make_cache` and `layers` describe the caches."""
        ...

    @property
    def forward(self) -> ForwardPass: ...

    def prepare(
        self, part: MediaPart, *, partial: PreparedMedium | None = None, cancel: CancelToken = NEVER
    ) -> Generator[PreparedMedium, None, PreparedMedium]:
        """Yield the growing medium after each finished unit (one image; one video frame), return it when complete.

        `cancel.checkpoint()` comes before each unit, so that `Cancelled` finds nothing half done. With `partial`,
        units that are in it are not decoded to pixels, resized or yielded again.
        """
        ...

    def expand(self, text: str, media: Sequence[PreparedMedium]) -> str:
        """Replace each placeholder of template text by the full run of tokens its medium takes, in order.

        Raises `PlaceholderError` if the number of placeholders isn't the number of media.
        """
        ...

    def content_for_template(self, parts: Sequence[Any]) -> Any:
        """A turn's parts as this family's chat template expects them (a list of {"type": ...} or a string)."""
        ...

    def locate(self, token_ids: Sequence[int], media: Sequence[PreparedMedium]) -> tuple[MediaSpan, ...]:
        """Find the spans of all media in the expanded ids. Raises `PlaceholderError` when they don't fit."""
        ...

    def positions(
        self, token_ids: Sequence[int], media: Sequence[PreparedMedium], spans: Sequence[MediaSpan]
    ) -> tuple[np.ndarray[Any, Any] | None, int]:
        """(position_ids or None, rope_delta) for the whole sequence; see `PreparedInput`."""
        ...

    def atomic(self, spans: Sequence[MediaSpan]) -> tuple[tuple[int, int], ...]:
        """Token ranges prefill must not cut; () for causal families."""
        ...

    def num_parts(self, medium: PreparedMedium) -> int:
        """How many independently encoded parts a complete medium has (1 for an image; temporal patches of a video)."""
        ...

    def frames_of_part(self, medium: PreparedMedium, part: int) -> int:
        """How many frames (or images) part `part` stands for, for progress events."""
        ...

    def encode(self, medium: PreparedMedium, part: int) -> Iterator[Features | None]:
        """Run the tower on one part, a few blocks per step, `mx.eval` at the end of each.

        Yields None after every step but the last, and the part's evaluated features as the last item. The caller
        asks its cancel token between two steps. Features have a "features" array (rows, hidden) and may have others.
        """
        ...


@runtime_checkable
class VisionFamily(Protocol):
    """What an entry point of `mlxgen.families` names."""

    name: str
    model_types: tuple[str, ...]

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> VisionModel:
        """Build the model from a folder in any published layout. One weight file is one cancellable unit."""
        ...
