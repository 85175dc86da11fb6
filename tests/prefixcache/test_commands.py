"""What one command prefilled the next one doesn't; and `mlxgen cache`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.commands import call, generate_args, of

PROMPT = "It was said, and written down, that nothing would ever be computed twice by anybody who had asked before. "


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLXGEN_PREFIX_CACHE_BUDGET", raising=False)
    monkeypatch.setattr("mlxgen.prefixcache.options.default_memory_bytes", lambda: 2**26)
    return tmp_path / "cache" / "prefix"


def run(capfdbinary, *flags: str, prompt: str = PROMPT):
    result = call(capfdbinary, *generate_args("--json", "--logprobs", *flags, prompt=prompt, max_tokens=5))
    assert result.code == 0, result.err
    return of(result.events, "token"), of(result.events, "finished")[0]["usage"]


def test_a_second_command_finds_the_prompt_of_the_first(capfdbinary, cache) -> None:
    cold, usage = run(capfdbinary, "--no-prefix-cache")
    assert not cache.exists()
    assert run(capfdbinary)[0] == cold
    warm, again = run(capfdbinary)
    assert warm == cold
    assert (usage["reused_tokens"], again["prefilled_tokens"]) == (0, 1)
    assert again["reused_tokens"] == again["prompt_tokens"] - 1
    same, none = run(capfdbinary, "--no-prefix-cache")
    assert (same, none["reused_tokens"]) == (cold, 0)


def test_a_budget_of_nothing_keeps_nothing(capfdbinary, cache, monkeypatch) -> None:
    monkeypatch.setenv("MLXGEN_PREFIX_CACHE_BUDGET", "0")
    run(capfdbinary)
    assert not cache.exists()
    monkeypatch.setenv("MLXGEN_PREFIX_CACHE_BUDGET", "a lot")
    result = call(capfdbinary, *generate_args())
    assert result.code == 2
    assert "MLXGEN_PREFIX_CACHE_BUDGET is 'a lot'" in result.err


def test_info_verify_and_clear(capfdbinary, cache) -> None:
    nothing = json.loads(call(capfdbinary, "cache", "info", "--json").out)
    assert (nothing["size_bytes"], nothing["models"], nothing["budget_bytes"]) == (0, [], 2**31)
    assert call(capfdbinary, "cache", "clear").code == 0
    run(capfdbinary)
    said = json.loads(call(capfdbinary, "cache", "info", "--json").out)
    files = sorted(cache.rglob("*.safetensors"))
    assert said["size_bytes"] == sum(path.stat().st_size for path in files) > 0
    assert said["models"][0]["blocks"] == len(files)
    text = call(capfdbinary, "cache", "info").out.decode()
    assert f"{len(files)} blocks of prompts" in text
    assert call(capfdbinary, "cache", "verify").code == 0
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    result = call(capfdbinary, "cache", "verify", "--json")
    assert result.code == 1
    found = json.loads(result.out)
    assert (found["num_files"], len(found["damaged"])) == (len(files), 1)
    assert not files[0].exists()
    assert call(capfdbinary, "cache", "verify").code == 0
    run(capfdbinary)
    assert call(capfdbinary, "cache", "clear").code == 0
    assert list(cache.rglob("*.safetensors")) == []
