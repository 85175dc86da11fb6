"""How three-axis positions reach mlx-lm's language models, which know one axis and take it from their cache.

mlx-lm's attention calls `self.rope(x, offset=cache.offset)`. Two small things make that three-axis, and keep every
request's state out of the model:

- at load, each attention's `rope` is replaced by `MultiAxisRope`, which holds the section table and nothing else;
- for each forward pass, the caches are wrapped in views (`positioned`) whose `offset` says where the chunk's tokens
  stand. Everything else a view passes to the real cache, which is never touched.

A chunk whose tokens have consecutive positions, the same on all axes (text: every decode step), gets a plain integer
offset and takes mlx-lm's own rotation; if that integer is the cache's own offset, there is no view at all and the pass
is exactly mlx-lm's. On the CPU, where that rotation isn't one fused kernel but two dozen small operations in every
layer, an integer that isn't the cache's own is turned into cosines and sines too, once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxgen.errors import InvalidValueError, UnsupportedError
from mlxgen.inputs import PreparedInput


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of one chunk, float32 of shape (num_tokens, dims): x * cos + (x with its halves exchanged) * sin.

    Both halves of `cos` are the cosines; of `sin`, the first half is the negative sines, the second the sines.
    """

    cos: mx.array
    sin: mx.array


class MultiAxisRope(nn.Module):  # type: ignore[misc]
    """Rotates by an integer offset as `plain` does, or by a `Rotation`. Made at load, without state.

    `sections` are how many of the dims / 2 frequencies follow the time, row and column axis. They come in three runs
    (Qwen2-VL, Qwen2.5-VL) or `interleaved` (Qwen3-VL, Qwen3.5: time, row, column, time, ... for as long as row and
    column have some left, the rest is time).

    Raises `UnsupportedError` for a `plain` module whose frequencies depend on the length (dynamic NTK).
    """

    def __init__(self, plain: nn.Module, sections: Sequence[int], *, interleaved: bool) -> None:
        super().__init__()
        self.plain = plain
        self._inverse, self._scale = _frequencies(plain)
        self.dims = 2 * len(self._inverse)
        self._axis = _axes(sections, self.dims // 2, interleaved=interleaved)

    def rotation(self, positions: np.ndarray[Any, Any]) -> Rotation:
        """The chunk's rotation from its positions, an integer array of shape (3, num_tokens)."""
        angles = positions[self._axis].T.astype(np.float32) * self._inverse
        cos, sin = np.cos(angles), np.sin(angles)
        return Rotation(mx.array(np.concatenate([cos, cos], axis=1)), mx.array(np.concatenate([-sin, sin], axis=1)))

    def offset(self, positions: int | np.ndarray[Any, Any], tokens: range) -> int | Rotation:
        """What the attention layers are told about the chunk `tokens`."""
        if not isinstance(positions, int):
            return self.rotation(positions)
        if positions == tokens.start or mx.default_device() == mx.gpu:
            return positions
        return self.rotation(np.broadcast_to(np.arange(positions, positions + len(tokens)), (3, len(tokens))))

    def __call__(self, x: mx.array, offset: int | Rotation = 0) -> mx.array:
        if not isinstance(offset, Rotation):
            rotated: mx.array = self.plain(x, offset=offset)
            return rotated
        half, turned = self.dims // 2, x[..., : self.dims].astype(mx.float32)
        if self._scale != 1.0:
            turned = turned * self._scale
        exchanged = mx.concatenate([turned[..., half:], turned[..., :half]], axis=-1)
        turned = (turned * offset.cos + exchanged * offset.sin).astype(x.dtype)
        return mx.concatenate([turned, x[..., self.dims :]], axis=-1) if self.dims < x.shape[-1] else turned


def _frequencies(plain: nn.Module) -> tuple[np.ndarray[Any, Any], float]:
    """Inverse frequencies (float32) of one of mlx-lm's rope modules, and the factor it multiplies its input by."""
    if isinstance(plain, nn.RoPE) and not plain.traditional:
        exponents = np.arange(0, plain.dims, 2, dtype=np.float32) / np.float32(plain.dims)
        return (plain.scale / np.power(np.float32(plain.base), exponents)).astype(np.float32), 1.0
    frequencies = getattr(plain, "_freqs", None)
    if frequencies is None or getattr(plain, "traditional", False):
        raise UnsupportedError(
            f"{type(plain).__name__} can't be spread over three axes; use rope type default, linear or yarn"
        )
    inverse: np.ndarray[Any, Any] = 1.0 / np.array(frequencies, dtype=np.float32)
    return inverse, float(getattr(plain, "mscale", getattr(plain, "_scale", 1.0)))


def _axes(sections: Sequence[int], num_frequencies: int, *, interleaved: bool) -> np.ndarray[Any, Any]:
    if len(sections) != 3 or sum(sections) != num_frequencies:
        raise InvalidValueError(
            f"mrope_section is {list(sections)}; three numbers that add up to {num_frequencies} (half the rotated "
            "dimensions) are needed"
        )
    if not interleaved:
        return np.repeat(np.arange(3), sections)
    axes = np.zeros(num_frequencies, dtype=np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


class CacheView:
    """One layer's cache during one forward pass, with its own `offset`, and rows to add to the layer's output.

    Made for a call and dropped after it; the cache itself learns nothing of positions.
    """

    __slots__ = ("_cache", "offset", "rows")

    def __init__(self, cache: Any, offset: int | Rotation, rows: mx.array | None = None) -> None:
        self._cache = cache
        self.offset = offset
        self.rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def chunk_positions(inputs: PreparedInput | None, start: int, num_tokens: int) -> int | np.ndarray[Any, Any]:
    """Positions of the tokens `[start, start + num_tokens)`: the first, if they count up from it alike on all axes.

    Otherwise int32 (3, num_tokens). Tokens past the prepared input are reply tokens and follow its rope delta.
    """
    if inputs is None or inputs.position_ids is None:
        return start
    known = inputs.position_ids[:, start : start + num_tokens]
    missing = num_tokens - known.shape[1]
    if missing == num_tokens:
        return start + inputs.rope_delta
    if missing:
        end = start + num_tokens
        reply = np.arange(end - missing, end, dtype=np.int32) + inputs.rope_delta
        known = np.concatenate([known, np.broadcast_to(reply, (3, missing))], axis=1)
    first = int(known[0, 0])
    if np.array_equal(known, np.broadcast_to(np.arange(first, first + num_tokens), (3, num_tokens))):
        return first
    return known


def positioned(
    cache: Sequence[Any],
    rope: MultiAxisRope,
    positions: int | np.ndarray[Any, Any],
    tokens: range,
    rows: Sequence[mx.array | None] = (),
) -> list[Any]:
    """The caches to hand to the language model: views that know the positions of the chunk `tokens`, or the caches.

    `rows[i]`, of shape (1, num_tokens, hidden), is what layer i adds to its output (see `VisualLayer`). Caches without
    an `offset` (recurrent state) have no positions and are only wrapped where there are rows for them.
    """
    plain = isinstance(positions, int)
    if plain and positions == tokens.start and not any(row is not None for row in rows):
        return list(cache)
    offset = rope.offset(positions, tokens)
    padded = [*rows, *[None] * (len(cache) - len(rows))]
    return [
        CacheView(layer, offset, row) if hasattr(layer, "offset") else layer
        for layer, row in zip(cache, padded, strict=True)
    ]
