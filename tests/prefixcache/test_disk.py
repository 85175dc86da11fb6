"""The cache's files: a restart, damage of every sort, budgets, and disks that won't."""

from __future__ import annotations

import errno
import json
import os
import time

import numpy as np
import pytest
import xxhash
from harness import SETUPS, greedy, model
from prefixcache.rig import LONG, cold, own_model, say, session

from mlxgen.prefixcache import PrefixCacheOptions, disk, prefix_cache
from mlxgen.prefixcache.disk import DiskTier, clear, stored_files
from mlxgen.prefixcache.keys import root_key
from mlxgen.snapshot import durable, safetensors
from mlxgen.snapshot.safetensors import HostArray

LLAMA = SETUPS["llama"]
BUDGET = 64 * 2**20


@pytest.fixture(autouse=True)
def unflushed(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "prefix"


def written(root, setup=LLAMA, prompt=LONG, disk_bytes=BUDGET, **rest):
    """A process that says something and ends; what it said."""
    mine, _ = own_model(setup.kind, disk_bytes=disk_bytes, folder=root, **rest)
    outcome = say(session(mine, setup), prompt)
    prefix_cache(mine).flush(20)
    return outcome, prefix_cache(mine)


def blocks(root):
    return sorted(root.rglob("block-*"))


def temporary(root):
    return list(root.rglob(".tmp-*"))


@pytest.mark.parametrize("name", SETUPS)
def test_after_a_restart_the_prompt_is_read_and_says_the_same(name, root) -> None:
    setup = SETUPS[name]
    expected = cold(setup)
    first, _ = written(root, setup)
    mine, forward = own_model(setup.kind, disk_bytes=BUDGET, folder=root)
    second = say(session(mine, setup))
    assert first.values == second.values == expected.values
    assert second.reused >= expected.prefilled - 17
    assert max(forward.lengths) <= 16
    assert prefix_cache(mine).info().num_read == len(blocks(root))
    assert prefix_cache(mine).warnings == ()
    # A second process that has them doesn't write them again, and a longer prompt goes on from them.
    before = {path: path.stat().st_ino for path in blocks(root)}
    third = say(session(own_model(setup.kind, disk_bytes=BUDGET, folder=root)[0], setup), LONG + " And after that?")
    assert third.values == cold(setup, LONG + " And after that?").values
    assert third.reused >= 5 * setup.step_size
    assert {path: path.stat().st_ino for path in before} == before


def _flipped(path, offset):
    data = bytearray(path.read_bytes())
    data[offset % len(data)] ^= 4
    path.write_bytes(data)


def _truncated(path, offset):
    path.write_bytes(path.read_bytes()[: offset % path.stat().st_size])


def _swapped(path, offset):
    """Another block's content under this name, with a hash that is right."""
    others = [other for other in sorted(path.parent.glob("block-*")) if other != path]
    data = others[offset % len(others)].read_bytes()
    path.with_name(f"{path.name.split('.')[0]}.{xxhash.xxh3_128_hexdigest(data)}.safetensors").write_bytes(data)
    path.unlink()


def _rewritten(path, change):
    """The same block with something else in it, and a hash that is right."""
    arrays = dict(safetensors.decode(memoryview(path.read_bytes())))
    meta = json.loads(bytes(arrays["meta"].raw()))
    change(meta, arrays)
    arrays["meta"] = HostArray.from_numpy(np.frombuffer(json.dumps(meta).encode(), np.uint8))
    data = b"".join(bytes(piece) for piece in safetensors.encode(arrays))
    path.unlink()
    path.with_name(f"{path.name.split('.')[0]}.{xxhash.xxh3_128_hexdigest(data)}.safetensors").write_bytes(data)


DAMAGE = {
    "flipped": lambda path: _flipped(path, 12345),
    "flipped header": lambda path: _flipped(path, 11),
    "truncated": lambda path: _truncated(path, 999),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "another block": lambda path: _swapped(path, 2),
    "no description": lambda path: _rewritten(path, lambda meta, arrays: meta.clear()),
    "an array less": lambda path: _rewritten(
        path, lambda meta, arrays: arrays.pop(next(name for name in arrays if name != "meta"))
    ),
    "other shape": lambda path: _rewritten(
        path, lambda meta, arrays: arrays.update({k: _transposed(a) for k, a in arrays.items() if k != "meta"})
    ),
    "other dtype": lambda path: _rewritten(
        path, lambda meta, arrays: arrays.update({k: _halved(a) for k, a in arrays.items() if k != "meta"})
    ),
    "other kinds": lambda path: _rewritten(path, lambda meta, arrays: meta["leaves"][0].__setitem__(1, "concatenate")),
    "a layer more": lambda path: _rewritten(path, lambda meta, arrays: meta["leaves"].append(["99", "kv", {}])),
}


def _transposed(array):
    return HostArray(array.dtype, (*array.shape[:-2], array.shape[-1], array.shape[-2]), array.data)


def _halved(array):
    if array.dtype != "F32":
        return HostArray("F32" if array.dtype == "U32" else "I32", array.shape, array.data)
    return HostArray.from_numpy(array.numpy().astype(np.float16))


@pytest.mark.parametrize("name", ["lfm2", "quantized"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_never_used_and_the_rest_still_is(damage, name, root) -> None:
    setup = SETUPS[name]
    written(root, setup)
    by_start = {json.loads(bytes(disk.read_file(path)["meta"].raw()))["start"]: path for path in blocks(root)}
    DAMAGE[damage](by_start[32])
    mine, _ = own_model(setup.kind, disk_bytes=BUDGET, folder=root)
    outcome = say(session(mine, setup))
    assert outcome.values == cold(setup).values
    assert outcome.reused == 32
    info = prefix_cache(mine).info()
    assert (info.num_damaged, info.warnings) == (int(damage != "gone"), ())
    prefix_cache(mine).flush(20)
    again, _ = own_model(setup.kind, disk_bytes=BUDGET, folder=root)
    assert say(session(again, setup)).reused > 64, "it was written anew"


def test_damage_in_the_state_of_a_ring_is_found(root) -> None:
    setup = SETUPS["ring"]
    written(root, setup)
    newest = max(blocks(root), key=lambda path: json.loads(bytes(disk.read_file(path)["meta"].raw()))["end"])

    def lie(meta, arrays):
        state = meta["leaves"][0][2]["state"]
        state[5] = 10**6

    _rewritten(newest, lie)
    mine, _ = own_model(setup.kind, disk_bytes=BUDGET, folder=root)
    assert say(session(mine, setup)).values == cold(setup).values
    assert prefix_cache(mine).info().num_damaged == 1


def test_the_budget_is_held_and_what_was_used_last_stays(root) -> None:
    written(root)
    size = sum(file.num_bytes for file in stored_files(root))
    assert clear(root) > 5
    assert list(root.rglob("*.safetensors")) == []
    budget = int(2.5 * size)
    prompts = [f"{number}: {LONG}" for number in range(6)]
    for prompt in prompts:
        outcome, _ = written(root, prompt=prompt, disk_bytes=budget)
        assert outcome.values == cold(LLAMA, prompt).values
        assert sum(file.num_bytes for file in stored_files(root)) <= budget
        assert written(root, prompt=prompts[0], disk_bytes=budget)[0].reused > 64 or prompt == prompts[0]
    assert written(root, prompt=prompts[5], disk_bytes=budget)[0].reused > 64
    mine, _ = own_model(disk_bytes=budget, folder=root)
    assert say(session(mine), prompts[2]).reused < 64
    _, store = written(root, prompt=prompts[3], disk_bytes=100)
    assert store.warnings == ()
    assert sum(file.num_bytes for file in stored_files(root)) <= 100
    assert temporary(root) == []


def _no_space(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_stops_the_writing_with_one_warning(root, monkeypatch, caplog) -> None:
    written(root)
    kept = len(blocks(root))
    real, left = durable.write_all, [3]

    def write(fd, data):
        left[0] -= 1
        if left[0] < 0:
            _no_space()
        real(fd, data)

    monkeypatch.setattr(durable, "write_all", write)
    outcome, store = written(root, prompt="Other. " + LONG)
    assert outcome.values == cold(LLAMA, "Other. " + LONG).values
    assert len(store.warnings) == 1
    assert "disk space" in store.warnings[0]
    assert len([record for record in caplog.records if "prefix cache" in record.message]) == 1
    assert temporary(root) == []
    assert len(blocks(root)) <= kept + 1
    monkeypatch.undo()
    assert written(root)[0].reused > 64


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_still_read(code, root, monkeypatch) -> None:
    written(root)
    real = os.open

    def no_writing(path, flags, *rest, **more):
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", no_writing)
    monkeypatch.setattr(os, "utime", lambda *a, **k: (_ for _ in ()).throw(OSError(code, "no")))
    outcome, store = written(root, prompt=LONG + " And more of that, please?")
    assert outcome.reused > 64
    assert outcome.values == cold(LLAMA, LONG + " And more of that, please?").values
    assert len(store.warnings) == 1


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    outcome, store = written(tmp_path / "file" / "prefix")
    assert outcome.values == cold(LLAMA).values
    assert len(store.warnings) == 1


def test_temporary_files_of_the_dead_are_swept_and_nothing_else(root) -> None:
    written(root)
    folder = blocks(root)[0].parent
    (folder / ".tmp-0123456789abcdef").write_bytes(b"half a block")
    (folder / "notes.txt").write_text("mine")
    written(root)
    assert temporary(root) == []
    assert (folder / "notes.txt").read_text() == "mine"
    assert oct(folder.stat().st_mode)[-3:] == "700"
    assert {oct(path.stat().st_mode)[-3:] for path in blocks(root)} == {"600"}


def test_two_stores_on_one_folder_see_what_the_other_writes(root) -> None:
    first, _ = own_model(disk_bytes=BUDGET, folder=root)
    second, _ = own_model(disk_bytes=BUDGET, folder=root)
    say(session(first))
    prefix_cache(first).flush(20)
    time.sleep(0.06)
    assert say(session(second)).reused > 64
    clear(root)
    prefix_cache(first).clear()
    assert say(session(first)).values == cold(LLAMA).values
    prefix_cache(first).flush(20)
    assert blocks(root), "the folder is made again"


def test_writing_is_held_back_to_the_rate(root) -> None:
    mine, _ = own_model(disk_bytes=BUDGET, folder=root, disk_bytes_per_s=2**15)
    began = time.perf_counter()
    say(session(mine), LONG * 4)
    elapsed = time.perf_counter() - began
    written_so_far = sum(file.num_bytes for file in stored_files(root))
    assert written_so_far <= 2**15 * (elapsed + 4) + 2**14
    assert prefix_cache(mine).flush(20), "at the end nothing holds back"
    assert sum(file.num_bytes for file in stored_files(root)) > written_so_far


def test_other_models_and_options_have_other_files(root) -> None:
    written(root)
    other = SETUPS["quantized"]
    assert written(root, other)[0].reused == 0
    assert written(root, SETUPS["lfm2"])[0].reused == 0
    assert len({path.parent for path in blocks(root)}) == 2
    keys = {root_key(setup.cache) for setup in SETUPS.values()}
    assert len(keys) == 4  # plain, a ring, two ways to quantise


def test_a_name_that_leads_elsewhere_is_not_followed(root, tmp_path) -> None:
    written(root)
    victim = blocks(root)[0]
    elsewhere = tmp_path / "elsewhere"
    victim.rename(elsewhere)
    victim.symlink_to(elsewhere)
    mine, _ = own_model(disk_bytes=BUDGET, folder=root)
    assert say(session(mine)).values == cold(LLAMA).values
    assert elsewhere.exists()
    tier = DiskTier(root, victim.parent.name, BUDGET)
    assert not tier.find("../elsewhere")


def test_the_default_folder_is_in_the_users_cache_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path / "c"))
    mine, _ = own_model(disk_bytes=BUDGET)
    say(session(mine), "Hi. " + LONG, greedy(1))
    prefix_cache(mine).configure(PrefixCacheOptions(2**20))
    assert blocks(tmp_path / "c" / "prefix")
    assert model("llama") is not mine
