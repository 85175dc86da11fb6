"""docs/snapshot-format.md names every record type and every key that mlxgen writes, and no record type it doesn't."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import ROOT
from vision_harness import tiny_vlm

import mlxgen
from mlxgen.history import _HANDLERS

SECTION = (
    (ROOT / "docs" / "snapshot-format.md").read_text(encoding="utf-8").partition("## Records and manifest body")[2]
)
NAMES = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`[^`]*`", SECTION))))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversation with all there can be: pictures, a stop, stop strings, an undone turn, a chosen chunk size, a mark
    that it goes back to, words put into the model's mouth, an edited turn."""
    model = mlxgen.load(tiny_vlm.folder("qwen2_5_vl"))
    options = mlxgen.SessionOptions(prefill_step_size=64, max_stop_latency_s=0.5)
    session = mlxgen.Session(model, system="Be brief.", options=options)
    path = session.autosave(tmp_path_factory.mktemp("snapshots") / "all.mlxgen")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    sampling = mlxgen.SamplingParams(temperature=1.0, seed=5)
    reply = mlxgen.ReplyOptions(max_tokens=8, sampling=sampling, top_logprobs=2, ignore_eos=True)
    token = mlxgen.CancelToken()
    for event in session.stream([mlxgen.ImagePart(pixels), "What is it? " * 40], reply=reply, cancel=token):
        if isinstance(event, mlxgen.Token) and event.index == 2:
            token.cancel()
    more = mlxgen.ReplyOptions(max_tokens=4, stop=("never",), ignore_eos=True)
    for _ in session.continue_(reply=more):
        pass
    session.send("And now?", reply=more)
    session.undo()
    session.send("Or now?", reply=more)
    session.mark()
    session.send("And then?", reply=more)
    session.rewind(num_tokens=session.history.reply.start + 1)
    session.append_text(" And")
    for _ in session.continue_(reply=more):
        pass
    session.edit(len(session.turns) - 2, "What then?")
    grammar = mlxgen.Grammar.regex("[a-z]{1,3}") if importlib.util.find_spec("llguidance") else None
    steered = mlxgen.ReplyOptions(max_tokens=4, stop_regex=("never",), ban=("never",), sections=True, grammar=grammar)
    session.send(reply=steered)
    session.close()
    return path


def records(path: Path) -> Iterator[tuple[str, Any]]:
    for line in (path / "journal.log").read_text(encoding="utf-8").splitlines()[1:]:
        _, kind, data = line.split(" ", 2)
        yield kind, json.loads(data)


def body(path: Path) -> dict[str, Any]:
    newest = max(path.glob("manifest-*.json"))
    return json.loads(newest.read_text(encoding="utf-8"))


def keys(value: Any, skip: tuple[str, ...] = ()) -> Iterator[str]:
    """All keys of nested objects, but for those inside a key of `skip` (whose own keys are somebody else's)."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key not in skip:
                yield from keys(inner, skip)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, skip)


def test_record_types() -> None:
    table = SECTION.partition("### Records")[2].partition("### The manifest's body")[0]
    rows = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| `")]
    assert sorted(row.strip("`") for row in rows) == sorted(_HANDLERS)


def test_every_key_of_every_record(snapshot: Path) -> None:
    seen = set()
    for kind, data in records(snapshot):
        seen.add(kind)
        unknown = set(keys(data, skip=("parts",) if kind == "model" else ("template_options",))) - NAMES
        assert not unknown, kind
    assert seen == set(_HANDLERS)


def test_every_key_of_a_manifest_body(snapshot: Path) -> None:
    manifest = body(snapshot)
    assert not set(keys(manifest["body"], skip=("arrays", "geometry", "versions"))) - NAMES
    assert {entry["kind"] for entry in manifest["files"]} == {"kv", "prep"}
    for entry in manifest["files"]:
        assert not set(keys(entry["meta"])) - NAMES


def test_rows_and_positions_are_as_specified(snapshot: Path) -> None:
    manifest = body(snapshot)
    cache = manifest["body"]["cache"]
    rows = [(entry["meta"]["start"], entry["meta"]["end"]) for entry in manifest["files"] if entry["kind"] == "kv"]
    assert [start for start, _ in rows] == [0, *(end for _, end in rows[:-1])]
    assert rows[-1][1] == cache["position"]
    assert all(leaf["meta"]["offset"] == cache["position"] for leaf in cache["leaves"])
    covered = sum(count for _, _, count in cache["passes"])
    assert covered >= cache["position"]
