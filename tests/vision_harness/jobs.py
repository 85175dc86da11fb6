"""A job with pictures and a video, the same for every family, and counters for what must not be done twice."""

from __future__ import annotations

import functools
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlxgen_vision import image as image_module
from mlxgen_vision.towers import pace
from PIL import Image

from mlxgen.cache import CacheOptions
from mlxgen.models import Model, load
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.request import ImagePart, MediaOptions, Part, VideoPart
from mlxgen.session import Session
from vision_harness import tiny_vlm

SIZES = {"A": (60, 90), "B": (90, 60), "C": (64, 64), "D": (60, 90)}  # height, width; A and D alike
NUM_FRAMES = 4


@functools.cache
def model(family: str, layout: str | None = None) -> Model:
    """The family's tiny model; with `layout`, the parity kit's."""
    if layout is None:
        return load(str(tiny_vlm.folder(family)))
    return load(str(Path(os.environ["MLXGEN_PARITY"]) / family / layout))


def pixels(height: int, width: int, seed: int) -> np.ndarray:
    """Smooth noise, uint8 RGB."""
    shape = (-(-height // 8), -(-width // 8), 3)
    coarse = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return np.ascontiguousarray(coarse.repeat(8, axis=0).repeat(8, axis=1)[:height, :width])


@functools.cache
def _sources() -> Path:
    folder = tiny_vlm.folder("gemma3").parent / "media"
    (folder / "V").mkdir(parents=True)
    for number, (name, (height, width)) in enumerate(SIZES.items()):
        Image.fromarray(pixels(height, width, number)).save(folder / f"{name}.png")
    for number in range(NUM_FRAMES):
        Image.fromarray(pixels(48, 64, 10 + number)).save(folder / "V" / f"{number}.png")
    return folder


def sources(folder: Path) -> Path:
    """A fresh copy of the job's files: A.png to D.png and the frames of a video in V."""
    return Path(shutil.copytree(_sources(), folder))


def job(family: str, folder: Path) -> list[Part]:
    """Three pictures with text between them, and a video where the family takes one."""
    parts: list[Part] = [ImagePart(folder / "A.png"), "Then ", ImagePart(folder / "B.png"), ImagePart(folder / "C.png")]
    if family in tiny_vlm.WITH_VIDEO:
        parts.append(VideoPart(folder / "V", MediaOptions(fps=2)))
    return [*parts, "What is there?"]


def image(folder: Path, name: str) -> ImagePart:
    return ImagePart(folder / f"{name}.png")


def reply(max_tokens: int = 6) -> ReplyOptions:
    return ReplyOptions(max_tokens=max_tokens, ignore_eos=True, logprobs=True)


def options(family: str, cache: CacheOptions = CacheOptions()) -> SessionOptions:
    """Small chunks, so that a prompt takes several."""
    return SessionOptions(cache=cache, prefill_step_size=128 if tiny_vlm.style(family) == "tiled" else 24)


def new_session(family: str, using: Model | None = None, cache: CacheOptions = CacheOptions()) -> Session:
    return Session(using or model(family), options=options(family, cache))


@dataclass
class Counts:
    """What was done, over any number of sessions and models: every entry must be what one uninterrupted run does."""

    decoded: Counter[str] = field(default_factory=Counter)
    prepared: Counter[str] = field(default_factory=Counter)
    encoded: Counter[tuple[str, int]] = field(default_factory=Counter)
    num_resizes: int = 0
    num_fed: int = 0
    num_passes: int = 0


class CountingVision:
    """A family's model that counts; as good as one in a new process, since no feature store knows it."""

    def __init__(self, inner: Any, counts: Counts) -> None:
        self._inner = inner
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare(self, part, *, partial=None, cancel):
        units = self._inner.prepare(part, partial=partial, cancel=cancel)
        while True:
            try:
                grown = next(units)
            except StopIteration as end:
                return end.value
            self._counts.prepared[f"{os.path.basename(grown.source_name)}/{len(grown.frames) - 1}"] += 1
            yield grown

    def encode(self, medium, part):
        for step in self._inner.encode(medium, part):
            if step is not None:
                self._counts.encoded[(medium.content_hash, part)] += 1
            yield step


def counting(base: Model, counts: Counts) -> Model:
    """The same model, counting into `counts`."""
    forward = base.forward

    def counted(ids: mx.array, *, cache: Any, start: int, inputs: Any) -> mx.array:
        # One token at the start is a pass that nobody evaluates: it tells the shapes of a model's caches.
        if (start, ids.shape[0]) != (0, 1):
            counts.num_fed += int(ids.shape[0])
            counts.num_passes += 1
        return forward(ids, cache=cache, start=start, inputs=inputs)

    return replace(base, vision=CountingVision(base.vision, counts), forward=counted)


@contextmanager
def counted(counts: Counts) -> Iterator[None]:
    """Count decoded pictures (by file name) and resizes while the block runs; one tower block is one step."""
    with pytest.MonkeyPatch.context() as patch:
        decode, resize = image_module.decode, Image.Image.resize

        def counting_decode(image: Any, name: str, *rest: Any) -> Any:
            counts.decoded[os.path.basename(name)] += 1
            return decode(image, name, *rest)

        def counting_resize(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts.num_resizes += 1
            return resize(self, *args, **kwargs)

        patch.setattr(image_module, "decode", counting_decode)
        patch.setattr(Image.Image, "resize", counting_resize)
        with small_steps(patch):
            yield


@contextmanager
def small_steps(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """One tower block to a step, however little it is."""
    patch.setattr(pace, "STEP_FLOPS", 0.0)
    yield


def remove_prepared(session: Session) -> list[str]:
    """Delete the sources of every medium that is prepared; their names."""
    removed = []
    for known, medium in zip(session.history.media, session.media, strict=True):
        if medium.prepared:
            path = Path(known.path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            removed.append(path.name)
    return removed
