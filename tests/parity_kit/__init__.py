"""Runs a case of the parity kit through the `VisionModel` protocol, as the engine does, in the smallest way.

The kit's folder is named by the environment variable MLXGEN_PARITY; without it every test that uses it is skipped.

    case = load_case("qwen2_5_vl", "img2")
    model = load_model(FAMILY, "qwen2_5_vl", "hf")
    inputs = build_input(model, load_tokenizer("qwen2_5_vl", "hf"), case)
    run = greedy(model, inputs, chunk_size=16)
    assert run.tokens == case.tokens
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer

from mlxgen.inputs import PreparedInput, PreparedMedium, VisionFamily, VisionModel
from mlxgen.request import ImagePart, MediaOptions, MediaPart, VideoPart

_KIT = os.environ.get("MLXGEN_PARITY")

needs_kit = [
    pytest.mark.parity,
    pytest.mark.skipif(_KIT is None, reason="MLXGEN_PARITY doesn't name the parity kit's folder"),
]


def kit() -> Path:
    """The kit's folder."""
    assert _KIT is not None, "MLXGEN_PARITY is not set"
    return Path(_KIT)


@dataclass(frozen=True)
class Case:
    """One case: what goes in, and what the reference computed. `arrays` are the npz entries under the case's name."""

    family: str
    name: str
    prompt: str
    messages: list[dict[str, Any]] | None
    add_special_tokens: bool
    parts: tuple[MediaPart, ...]
    input_ids: list[int]
    tokens: list[int]
    flags: tuple[str, ...]
    grids: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(repr=False)


@dataclass(frozen=True)
class Run:
    """What a greedy run gave: logits at the last prompt position (float32), and the tokens after it."""

    last_logits: np.ndarray
    tokens: list[int]


@cache
def _reference() -> dict[str, Any]:
    return json.loads((kit() / "reference.json").read_text())["families"]


@cache
def _media() -> dict[str, Any]:
    return json.loads((kit() / "cases" / "cases.json").read_text())


def case_names(family: str) -> list[str]:
    """The family's cases; [] without the kit, so that a module can parametrise at import time."""
    return [] if _KIT is None else list(_reference()[family]["cases"])


def layouts(family: str, *, quantized: bool = False) -> list[str]:
    """The checkpoint folders of a family; `mlx-8bit` only when asked, because it has no reference of its own."""
    if _KIT is None:
        return []
    names = [name for name in ("hf", "hub", "mlx", "mlx-8bit") if (kit() / family / name).is_dir()]
    return names if quantized else [name for name in names if name != "mlx-8bit"]


def load_case(family: str, name: str, *, variant: str | None = None) -> Case:
    """A case of the kit. With `variant`, its ids, tokens, logits and positions replace transformers'."""
    entry = _reference()[family]["cases"][name]
    archive = np.load(kit() / family / "reference.npz")
    arrays = {key.split("/", 1)[1]: archive[key] for key in archive.files if key.startswith(f"{name}/")}
    over = entry.get("variants", {}).get(variant, {}) if variant else {}
    for key in [key for key in arrays if variant and key.startswith(f"{variant}/")]:
        arrays[key.split("/", 1)[1]] = arrays[key]
    return Case(
        family=family,
        name=name,
        prompt=entry["prompt"],
        messages=entry["messages"],
        add_special_tokens=entry["add_special_tokens"],
        parts=tuple(_parts(entry)),
        input_ids=list(over.get("input_ids", entry["input_ids"])),
        tokens=list(over.get("tokens", entry["tokens"])),
        flags=tuple(entry["flags"]),
        grids=entry["processor_output"]["values"],
        arrays=arrays,
    )


def _parts(entry: dict[str, Any]) -> list[MediaPart]:
    named: list[tuple[str, str]] = []
    if entry["messages"]:
        for message in entry["messages"]:
            items = message["content"] if isinstance(message["content"], list) else []
            named += [(item["type"], item[item["type"]]) for item in items if item["type"] != "text"]
    else:
        named = [("image", name) for name in entry["images"]] + [("video", name) for name in entry["videos"]]
    return [image_part(name) if kind == "image" else video_part(name) for kind, name in named]


def image_part(name: str, options: MediaOptions | None = None) -> ImagePart:
    return ImagePart(kit() / "cases" / _media()["images"][name]["file"], options or MediaOptions())


def video_part(name: str) -> VideoPart:
    video = _media()["videos"][name]
    return VideoPart(kit() / "cases" / video["dir"], MediaOptions(fps=video["fps"]))


@cache
def load_tokenizer(family: str, layout: str) -> Tokenizer:
    return Tokenizer.from_file(str(kit() / family / layout / "tokenizer.json"))


def load_config(family: str, layout: str) -> dict[str, Any]:
    return json.loads((kit() / family / layout / "config.json").read_text())


def load_model(loader: VisionFamily, family: str, layout: str) -> VisionModel:
    """Load a kit checkpoint through a family's public `load`."""
    config = load_config(family, layout)
    assert config["model_type"] in loader.model_types
    model = loader.load(kit() / family / layout, config)
    assert isinstance(model, VisionModel)
    return model


def prepare(model: VisionModel, part: MediaPart, partial: PreparedMedium | None = None) -> PreparedMedium:
    """Drive `prepare` to its end, checking that it yields one unit at a time."""
    units = model.prepare(part, partial=partial)
    done = len(partial.frames) if partial else 0
    finished: list[PreparedMedium] = []

    def drive() -> Generator[PreparedMedium, None, None]:
        finished.append((yield from units))

    for medium in drive():
        assert len(medium.frames) == done + 1
        done += 1
    assert finished[0].prepared
    return finished[0]


def encode(model: VisionModel, medium: PreparedMedium) -> int:
    """Encode every part that is missing; returns the number of steps taken."""
    num_steps = 0
    medium.num_parts = model.num_parts(medium)
    while len(medium.features) < medium.num_parts:
        features = None
        for item in model.encode(medium, len(medium.features)):
            assert features is None, "nothing may come after the features"
            num_steps += 1
            features = item
        assert features is not None
        medium.features.append(features)
    return num_steps


def build_input(
    model: VisionModel, tokenizer: Tokenizer, case: Case, *, media: Sequence[PreparedMedium] | None = None
) -> PreparedInput:
    """Prepare, expand, tokenise, locate, place and encode a case. `media` replaces preparing the case's own parts."""
    prepared = [prepare(model, part) for part in case.parts] if media is None else list(media)
    text = model.expand(case.prompt, prepared)
    ids = tokenizer.encode(text, add_special_tokens=case.add_special_tokens).ids
    spans = model.locate(ids, prepared)
    position_ids, rope_delta = model.positions(ids, prepared, spans)
    for medium in prepared:
        encode(model, medium)
    inputs = PreparedInput(
        token_ids=ids,
        media=prepared,
        spans=spans,
        position_ids=position_ids,
        rope_delta=rope_delta,
        atomic=model.atomic(spans),
    )
    assert inputs.complete
    return inputs


def chunk_ends(num_tokens: int, chunk_size: int, atomic: Sequence[tuple[int, int]]) -> list[int]:
    """Ends of the prefill chunks: every `chunk_size` tokens, but never inside an atomic range."""
    ends: list[int] = []
    start = 0
    while start < num_tokens:
        end = min(start + chunk_size, num_tokens)
        for first, last in atomic:
            if first < end < last:
                end = first if first > start else last
        ends.append(end)
        start = end
    return ends


def prefill(model: VisionModel, inputs: PreparedInput, caches: Sequence[Any], *, chunk_size: int = 2048) -> mx.array:
    """Feed the whole prompt; returns the logits (vocabulary,) at its last position."""
    start = 0
    logits = None
    for end in chunk_ends(len(inputs.token_ids), chunk_size, inputs.atomic):
        ids = mx.array(inputs.token_ids[start:end], dtype=mx.uint32)
        logits = model.forward(ids, cache=caches, start=start, inputs=inputs)[0, -1]
        mx.eval(logits)
        start = end
    assert logits is not None
    return logits


def step(model: VisionModel, token: int, start: int, caches: Sequence[Any], inputs: PreparedInput | None) -> mx.array:
    """Feed one token; returns the logits (vocabulary,) after it."""
    return model.forward(mx.array([token], dtype=mx.uint32), cache=caches, start=start, inputs=inputs)[0, -1]


def greedy(
    model: VisionModel,
    inputs: PreparedInput,
    *,
    chunk_size: int = 2048,
    num_tokens: int = 24,
    caches: Sequence[Any] | None = None,
) -> Run:
    """Prefill in chunks, then take the likeliest token `num_tokens` times."""
    caches = make_prompt_cache(model.language) if caches is None else caches
    logits = prefill(model, inputs, caches, chunk_size=chunk_size)
    last_logits = np.array(logits.astype(mx.float32))
    tokens: list[int] = []
    start = len(inputs.token_ids)
    while True:
        tokens.append(int(mx.argmax(logits).item()))
        if len(tokens) == num_tokens:
            return Run(last_logits, tokens)
        logits = step(model, tokens[-1], start, caches, inputs)
        start += 1


def pixels_to_frame(pixels: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Undo the normalisation of stored reference pixels: channels last, uint8, exact to the eight-bit step."""
    values = np.rint((pixels * np.asarray(std) + np.asarray(mean)) * 255)
    assert values.min() >= 0
    assert values.max() <= 255
    return values.astype(np.uint8)
