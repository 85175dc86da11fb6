"""Images of one size through a vision tower, a few blocks of a few images at a time so that a stop is never far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np

from mlxgen.inputs import Features
from mlxgen_vision.towers import pace

# Images that go through a block together, at most: more don't make the products any more efficient, but every one
# holds its hidden states and attention scores in memory.
MAX_IMAGES_PER_STEP: Final = 8


class TowerShape(Protocol):
    """What a tower's config must tell."""

    def block_flops(self, num_tokens: int) -> float:
        """Floating-point operations of one block for one image of `num_tokens` tokens."""
        ...


class ImageTower(Protocol):
    """A tower whose blocks take (images, tokens, width) and give the same. Immutable after load."""

    @property
    def config(self) -> TowerShape: ...

    @property
    def dtype(self) -> mx.Dtype:
        """What the tower computes in."""
        ...

    @property
    def blocks(self) -> Sequence[Callable[[mx.array], mx.array]]: ...

    def num_tokens(self, height: int, width: int) -> int:
        """How many tokens the blocks see of an image of this size in pixels."""
        ...

    def embed(self, pixels: mx.array) -> mx.array:
        """(images, height, width, channels) -> (images, tokens, width): all that comes before the first block."""
        ...

    def final_norm(self, hidden: mx.array) -> mx.array:
        """What comes after the last block; for a tower that has nothing there, `hidden` itself."""
        ...


@dataclass(frozen=True, slots=True)
class Readout:
    """Which hidden states a family takes, and what it makes of them.

    `num_layers` None runs all blocks, -1 all but the last; `post_norm` says whether the final layer norm is applied.
    `project` maps (images, tokens, width) to (images, rows, text width).
    """

    project: Callable[[mx.array], mx.array]
    num_layers: int | None = None
    post_norm: bool = True


def images_per_step(shape: TowerShape, num_images: int, num_tokens: int) -> int:
    """How many images go through a block together: as many as fit `pace.STEP_FLOPS`, but one at least.

    Not a matter of the machine's speed: other shapes may round differently.
    """
    return max(1, min(num_images, MAX_IMAGES_PER_STEP, int(pace.STEP_FLOPS // shape.block_flops(num_tokens))))


def encode_images(tower: ImageTower, pixels: np.ndarray[Any, Any], readout: Readout) -> Iterator[Features | None]:
    """Run normalised images of one size through the tower: None after every step but the last, then the features.

    `pixels` is float32 (images, height, width, channels); the features are `(images * rows, text width)` in the order
    of the images, evaluated. Every step ends with an eval, so nothing lazy is left when the generator is dropped.
    """
    count, height, width, _ = pixels.shape
    block_flops = tower.config.block_flops(tower.num_tokens(height, width))
    together = images_per_step(tower.config, count, tower.num_tokens(height, width))
    own_pace = pace.Pace()
    finished: list[mx.array] = []
    for first in range(0, count, together):
        batch = pixels[first : first + together]
        cost, pending, began_s = block_flops * len(batch), 0.0, time.perf_counter()
        hidden = tower.embed(mx.array(batch).astype(tower.dtype))
        for block in [*tower.blocks[: readout.num_layers], None]:  # None: what comes after the last, counted as a block
            if pending and not own_pace.fits(pending + cost):
                mx.eval(hidden)
                own_pace.took(pending, time.perf_counter() - began_s)
                pending, began_s = 0.0, time.perf_counter()
                yield None
            if block is not None:
                hidden = block(hidden)
            pending += cost
        rows = readout.project(tower.final_norm(hidden) if readout.post_norm else hidden)
        mx.eval(rows)
        finished.append(rows.reshape(-1, rows.shape[-1]))
        if first + together < count:
            yield None
    features = mx.concatenate(finished) if len(finished) > 1 else finished[0]
    mx.eval(features)
    yield {"features": features}
