"""A snapshot of a real session, damaged in every way there is: a clear error, or exactly what it would have been."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from harness import PROMPT, SETUPS, Outcome, Setup, StopAt, model, new_session, sampled
from tiny import folder
from tiny import make as make_tiny

from mlxgen.errors import MlxgenError, SnapshotError
from mlxgen.events import Token
from mlxgen.models import load
from mlxgen.persist import AutosavePolicy
from mlxgen.resumption import ResumeOptions, resume
from mlxgen.snapshot import safetensors
from mlxgen.snapshot.safetensors import HostArray

REPLY = sampled(10)
AT_RUN_ENDS = AutosavePolicy(every_s=1e9, every_tokens=10**9)
SETUPS = {**SETUPS, "chunked": Setup("llama4")}
KINDS = ("llama", "gemma3-window", "quantized-later", "falcon_h1-list", "chunked")  # every cache kind once


@cache
def expected(name: str) -> tuple[list[int], str, list[float]]:
    session = new_session(SETUPS[name])
    finished = session.send(PROMPT, reply=REPLY)
    return session.history.ids, finished.text, [token.logprob for token in session.history.reply.tokens]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """By name: a snapshot of two generations whose journal has two more tokens."""
    root = tmp_path_factory.mktemp("originals")

    @cache
    def original(name: str) -> Path:
        session = new_session(SETUPS[name])
        live = session.autosave(root / f"{name}-live.mlxgen", policy=AT_RUN_ENDS)
        outcome = Outcome()
        outcome.take(session.stream(PROMPT, reply=REPLY, cancel=StopAt(7)))
        outcome.take(session.continue_(cancel=StopAt(2)))
        for event in session.continue_():
            if isinstance(event, Token):
                outcome.tokens.append(event)
                if len(outcome.tokens) == 7:
                    shutil.copytree(live, root / f"{name}.mlxgen")
                    break
        session.close()
        assert sorted(p.name[:8] for p in (root / f"{name}.mlxgen").iterdir()).count("manifest") == 2
        return root / f"{name}.mlxgen"

    return original


@pytest.fixture
def damaged(originals, tmp_path):
    """Makes fresh copies to damage."""
    numbers = iter(range(10**6))

    def copy(name: str) -> Path:
        return Path(shutil.copytree(originals(name), tmp_path / f"{next(numbers)}.mlxgen"))

    return copy


def check(path: Path, name: str) -> str:
    """Resume and go on to the end. "refused", "exact" (with what is noted), or "lost" when not even the prompt is
    left."""
    began_s = time.process_time()
    try:
        session = resume(path, options=ResumeOptions(model=model(SETUPS[name].kind)))
    except MlxgenError as error:
        assert "\n" not in str(error)
        return "refused"
    finally:
        assert time.process_time() - began_s <= 2
    with session:
        if session.history.reply is None:
            return "lost"
        if session.unfinished:
            for _ in session.continue_():
                pass
        ids, text, logprobs = expected(name)
        assert session.history.ids == ids
        assert session.reply_text == text
        assert [token.logprob for token in session.history.reply.tokens] == logprobs
    shutil.rmtree(path)
    return "exact" if not session.notes else "exact, noted"


def data_files(path: Path) -> list[str]:
    newest = json.loads((path / newest_manifest(path)).read_bytes())
    return [entry["name"] for entry in newest["files"]]


def newest_manifest(path: Path) -> str:
    return max(p.name for p in path.iterdir() if p.name.startswith("manifest-"))


def files_of(path: Path) -> list[str]:
    return ["journal.log", newest_manifest(path), *data_files(path)]


def test_the_undamaged_snapshot_goes_on_exactly(damaged) -> None:
    for name in KINDS:
        assert check(damaged(name), name) == "exact"


@pytest.mark.parametrize("name", KINDS)
def test_truncated(name, damaged, originals) -> None:
    many = 10 if name == "llama" else 1
    for file in files_of(originals(name)):
        size = (originals(name) / file).stat().st_size
        for length in sorted({0, 1, size // 2, size - 1, *range(0, size, 1 + size // many)}):
            path = damaged(name)
            os.truncate(path / file, length)
            result = check(path, name)
            assert file == "journal.log" or result == "exact, noted"


@pytest.mark.parametrize("name", KINDS)
def test_one_bit_flipped(name, damaged, originals) -> None:
    many = 18 if name == "llama" else 3
    for file in files_of(originals(name)):
        data = (originals(name) / file).read_bytes()
        for number, position in enumerate(range(number_of(file) % 7, len(data), 1 + len(data) // many)):
            changed = bytearray(data)
            changed[position] ^= 1 << (number % 8)
            path = damaged(name)
            (path / file).write_bytes(changed)
            result = check(path, name)
            assert file == "journal.log" or result == "exact, noted"


def number_of(text: str) -> int:
    return zlib.crc32(text.encode())


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def symlink(path: Path) -> None:
    target = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(target)
    path.symlink_to(target)


def sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
@pytest.mark.parametrize("change", [Path.unlink, fifo, symlink, sparse])
def test_missing_or_not_a_regular_file(name, change, damaged, originals) -> None:
    for file in files_of(originals(name)):
        path = damaged(name)
        change(path / file)
        result = check(path, name)
        noted = "exact" if change is Path.unlink and file.startswith("manifest") else "exact, noted"
        assert result == ("refused" if file == "journal.log" else noted)


def test_swapped(damaged, originals) -> None:
    for name in ("falcon_h1-list",):
        files = [*files_of(originals(name)), min(p.name for p in originals(name).glob("manifest-*"))]
        for i, first in enumerate(files):
            for second in files[i + 1 :]:
                path = damaged(name)
                (path / first).rename(path / "x")
                (path / second).rename(path / first)
                (path / "x").rename(path / second)
                result = check(path, name)
                assert result == "refused" if "journal.log" in (first, second) else result == "exact, noted"


# -- structure that lies, with hashes that hold ------------------------------------------------------------------------


def resign(path: Path, change) -> None:
    """Change every manifest, so that there is none to fall back to but the journal."""
    for where in path.glob("manifest-*.json"):
        value = json.loads(where.read_bytes())
        del value["xxh3"]
        change(value)
        head = json.dumps(value, separators=(",", ":")).encode()[:-1]
        where.write_bytes(head + b',"xxh3":"%b"}\n' % xxhash.xxh3_128(head).hexdigest().encode())


def rewrite_arrays(path: Path, file: str, change, *, also_meta=None) -> None:
    arrays = {name: array.numpy() for name, array in safetensors.decode(memoryview((path / file).read_bytes())).items()}
    change(arrays)
    data = b"".join(
        bytes(piece)
        for piece in safetensors.encode({n: HostArray.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()})
    )
    (path / file).write_bytes(data)

    def update(value) -> None:
        for entry in value["files"]:
            if entry["name"] == file:
                entry.update(bytes=len(data), xxh3=xxhash.xxh3_128(data).hexdigest())
        if also_meta is not None:
            also_meta(value["body"]["cache"])

    resign(path, update)


ARRAY_LIES = {
    "half precision": lambda a: a.update({n: (v % 1000).astype(np.float16) for n, v in a.items()}),
    "integers": lambda a: a.update({n: v.astype(np.int32) for n, v in a.items()}),
    "a row short": lambda a: a.update({n: v[..., :-1, :] for n, v in a.items() if v.ndim > 1}),
    "a column short": lambda a: a.update({n: v[..., :-1].copy() for n, v in a.items()}),
    "two heads": lambda a: a.update({n: np.repeat(v, 2, axis=1) for n, v in a.items() if v.ndim > 1}),
    "two sequences": lambda a: a.update({n: np.repeat(v, 2, axis=0) for n, v in a.items()}),
    "flat": lambda a: a.update({n: v.reshape(-1) for n, v in a.items()}),
    "transposed": lambda a: a.update({n: np.ascontiguousarray(v.swapaxes(-1, -2)) for n, v in a.items() if v.ndim > 1}),
    "one missing": lambda a: a.pop(min(a)),
    "none": lambda a: a.clear(),
}


def follow(value: dict[str, Any], kind: str, change) -> None:
    """Make the manifest's shapes and dtypes those of the changed arrays."""
    for leaf in value["leaves"]:
        arrays = leaf["meta"]["arrays"]
        fake = {name: np.zeros(shape, "float32") for name, (_, shape) in arrays.items()}
        change(fake)
        leaf["meta"]["arrays"] = {name: [str(a.dtype), list(a.shape)] for name, a in fake.items()}


@pytest.mark.parametrize("name", [*KINDS, "mamba2"])
def test_wrong_shapes_and_dtypes_are_never_used(name, damaged, originals) -> None:
    for lie, change in ARRAY_LIES.items():
        for file in data_files(originals(name))[-1:]:
            path = damaged(name)
            rewrite_arrays(path, file, change)
            assert check(path, name) == "exact, noted", lie
    for lie in ("half precision", "a column short", "two heads", "two sequences", "flat"):
        change = ARRAY_LIES[lie]
        for file in data_files(originals(name))[-1:]:
            path = damaged(name)
            rewrite_arrays(path, file, change, also_meta=lambda value, f=file, c=change: follow(value, f, c))
            assert check(path, name) == "exact, noted", lie


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for step in path[:-1]:
        value = value[step]
    value[path[-1]] = new


LIES = (None, -1, 0, 3, 10**12, 2**70, 1.5, "x", [], {}, [1], True)


@pytest.mark.parametrize("name", [*KINDS, "mamba2"])
def test_a_manifest_that_lies_about_the_cache_is_never_used(name, damaged, originals) -> None:
    """Every value in it replaced, by turns, with something else."""
    rng = random.Random(number_of(name))
    body = json.loads((originals(name) / newest_manifest(originals(name))).read_bytes())["body"]
    cases = [(place, lie) for place in places({"cache": body["cache"], "media": body["media"]}) for lie in LIES]
    for place, lie in rng.sample(cases, 45 if name == "llama" else 14):
        path = damaged(name)

        def change(value, place=place, lie=lie) -> None:
            try:
                put(value["body"], place, lie)
            except (IndexError, KeyError):
                pass  # the older generation is built differently

        resign(path, change)
        assert check(path, name).startswith(("exact", "refused")), (place, lie)


INCONSISTENT = {
    "one token more": lambda cache: cache.update(position=cache["position"] + 1),
    "one token less": lambda cache: cache.update(position=cache["position"] - 1),
    "ids": lambda cache: cache.update(num_ids=cache["num_ids"] + 1),
    "no passes": lambda cache: cache.update(passes=[]),
    "other passes": lambda cache: cache.update(passes=[["prefill", 0, cache["position"]]]),
    "pending out of range": lambda cache: cache.update(pending=[10**6, None, None]),
    "pending negative": lambda cache: cache.update(pending=[-1, None, None]),
    "pending before the end": lambda cache: cache.update(position=cache["position"] - 2, pending=[5, None, None]),
    "a layer less": lambda cache: cache["leaves"].pop(),
    "layers swapped": lambda cache: cache["leaves"].reverse(),
    "a huge layer": lambda cache: cache["leaves"][-1]["meta"].update(arrays={"k": ["float32", [1, 10**9, 10**9, 32]]}),
}


@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
def test_an_inconsistent_manifest_is_never_used(name, damaged) -> None:
    for case, change in INCONSISTENT.items():
        path = damaged(name)
        resign(path, lambda value, change=change: change(value["body"]["cache"]))
        assert check(path, name) == "exact, noted", case


def test_a_ring_s_index_must_fit(damaged) -> None:
    for name in ("gemma3-window", "ring"):
        for index in (-1, 1, 4, 10**6):
            path = damaged(name)

            def change(value, index=index) -> None:
                for leaf in value["body"]["cache"]["leaves"]:
                    if leaf["kind"] == "rotating":
                        leaf["meta"]["state"][-1] = index

            resign(path, change)
            if check_or_wrong(path, name) == "wrong":
                assert name == "gemma3-window"
                assert index in (1, 4), "inside the ring only its hash can tell"


def check_or_wrong(path: Path, name: str) -> str:
    try:
        return check(path, name)
    except AssertionError:
        return "wrong"


def journal_line(name: str, data: Any) -> bytes:
    body = name.encode() + b" " + json.dumps(data, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(body), body)


def test_a_journal_that_lies_with_checksums_that_hold_is_an_error_or_harmless(damaged, originals) -> None:
    lines = (originals("llama") / "journal.log").read_bytes().splitlines(keepends=True)
    rng = random.Random(4)
    cases = []
    for number, line in enumerate(lines):
        name, text = line[9:].decode().split(" ", 1)
        if name in ("journal", "session", "reply", "prompt", "pass", "tok", "turn", "finish", "mark"):
            cases += [(number, name, text, place) for place in places(json.loads(text))]
    for number, name, text, place in rng.sample(cases, 50):
        value = json.loads(text)
        put(value, place, rng.choice((None, -1, 10**12, "x", [], {}, [None], 2**70)))
        path = damaged("llama")
        (path / "journal.log").write_bytes(b"".join([*lines[:number], journal_line(name, value), *lines[number + 1 :]]))
        began_s = time.process_time()
        try:
            with resume(path, options=ResumeOptions(model=model("llama"))) as session:
                if session.history.reply is not None:
                    session.continue_(reply=REPLY).close()
                    for event in session.continue_():
                        if isinstance(event, Token):
                            break
        except MlxgenError:
            pass
        assert time.process_time() - began_s <= 2


@pytest.mark.parametrize("bad", [-1, 307, 10**6, 2**31, 2**40, 2**70, "7", None, 1.5])
def test_token_ids_out_of_range_in_the_journal_are_refused(bad, damaged) -> None:
    path = damaged("llama")
    lines = (path / "journal.log").read_bytes().splitlines(keepends=True)
    for kind in (b" tok ", b" prompt "):
        number = next(i for i, line in enumerate(lines) if line[8:].startswith(kind))
        data = json.loads(lines[number][8 + len(kind) :])
        if kind == b" tok ":
            data[0] = bad
        else:
            data["ids"][3] = bad
        changed = [*lines[:number], journal_line(kind.strip().decode(), data), *lines[number + 1 :]]
        (path / "journal.log").write_bytes(b"".join(changed))
        with pytest.raises(SnapshotError, match=r"token ids|malformed"):
            resume(path, options=ResumeOptions(model=model("llama")))


# -- of another model, of another format -------------------------------------------------------------------------------


def test_another_model_and_one_weight_changed_are_refused(damaged, tmp_path) -> None:
    from safetensors.numpy import load_file, save_file

    path = damaged("llama")
    with pytest.raises(SnapshotError, match="another model"):
        resume(path, options=ResumeOptions(model=model("qwen2")))
    assert check(damaged("llama"), "llama") == "exact"
    copy = Path(shutil.copytree(folder("llama"), tmp_path / "tuned"))
    weights = load_file(copy / "model.safetensors")
    name = sorted(weights)[5]
    weights[name].reshape(-1)[7] += np.float32(1e-3)
    save_file(weights, copy / "model.safetensors", metadata={"format": "mlx"})
    with pytest.raises(SnapshotError, match="another model"):
        resume(path, options=ResumeOptions(model=load(str(copy))))
    deeper = make_tiny("llama", tmp_path / "deeper", config={"num_hidden_layers": 3})
    with pytest.raises(SnapshotError, match="another model"):
        resume(path, options=ResumeOptions(model=load(str(deeper))))
    assert check(path, "llama") == "exact"


def test_an_in_memory_model_with_one_weight_changed_is_refused(tmp_path) -> None:
    import mlx_lm

    from mlxgen.models import Model
    from mlxgen.session import Session

    module, tokenizer = mlx_lm.load(str(folder("llama")))
    session = Session(Model.from_parts(module, tokenizer))
    session.send("Hi", reply=REPLY, cancel=StopAt(4))
    path = session.save(tmp_path / "a.mlxgen")
    resume(path, options=ResumeOptions(model=Model.from_parts(module, tokenizer))).close()
    weight = module.layers[1].mlp.up_proj.weight
    module.layers[1].mlp.up_proj.weight = weight.at[3, 4].add(1e-3)
    with pytest.raises(SnapshotError, match="another model"):
        resume(path, options=ResumeOptions(model=Model.from_parts(module, tokenizer)))


def test_another_schema_is_refused(damaged) -> None:
    path = damaged("llama")
    resign(path, lambda value: value["schema"].update(major=2))
    with pytest.raises(SnapshotError, match=r"schema 2\.0, this version of mlxgen reads 1\.x"):
        resume(path, options=ResumeOptions(model=model("llama")))
    path = damaged("llama")
    lines = (path / "journal.log").read_bytes().splitlines(keepends=True)
    header = json.loads(lines[0][9 + len("journal ") :])
    header["schema"]["major"] = 7
    (path / "journal.log").write_bytes(journal_line("journal", header) + b"".join(lines[1:]))
    with pytest.raises(SnapshotError, match="journal schema 7"):
        resume(path, options=ResumeOptions(model=model("llama")))
    path = damaged("llama")
    lines = (path / "journal.log").read_bytes().splitlines(keepends=True)
    (path / "journal.log").write_bytes(b"".join([*lines, journal_line("hologram", {})]))
    with pytest.raises(SnapshotError, match="unknown type 'hologram'"):
        resume(path, options=ResumeOptions(model=model("llama")))
