"""`doctor`: the promises are tried, and one that is broken is seen."""

from __future__ import annotations

from typing import Any

import pytest
from cli.commands import call, llama

from mlxgen.cli import proofs
from mlxgen.cli.doctor import Finding


def test_environment_alone(capfdbinary: Any) -> None:
    result = call(capfdbinary, "doctor")
    assert result.code == 0
    text = result.out.decode()
    for expected in (
        "versions: mlxgen ",
        "python: 3.",
        "system: ",
        "device: ",
        "memory: ",
        "cache folder: ",
        "mlx-vlm: ",
    ):
        assert expected in text
    assert "BROKEN" not in text
    assert call(capfdbinary, "doctor", "--quiet").out == b""


def test_every_promise_is_tried_with_a_model(capfdbinary: Any) -> None:
    result = call(capfdbinary, "doctor", "--model", llama())
    assert result.code == 0, result.out.decode() + result.err
    text = result.out.decode()
    for expected in (
        "ok     exact resume, greedy: stopped at prefill-2, decode-6",
        "ok     exact resume, sampled: stopped at prefill-2, decode-6",
        "stop in prefill: ",
        "stop in decode: ",
        "ok     snapshot: saving after 64 new tokens",
    ):
        assert expected in text


def test_a_wrong_continuation_is_found(capfdbinary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = proofs._resume_elsewhere

    def off_by_one_bit(*args: Any) -> dict[str, proofs.Transcript]:
        resumed = elsewhere(*args)
        last = resumed["sampled-decode-6"].logprobs
        assert last[-1] is not None
        last[-1] += 1e-6
        return resumed

    monkeypatch.setattr(proofs, "_resume_elsewhere", off_by_one_bit)
    monkeypatch.setattr(proofs, "stop_latency", lambda bench: iter(()))
    monkeypatch.setattr(proofs, "snapshot_speed", lambda bench, path: Finding("snapshot", "not tried here"))
    result = call(capfdbinary, "doctor", "--model", llama(), "--quiet")
    assert result.code == 1
    assert result.out.decode().startswith("BROKEN exact resume, sampled: not the same after a stop at decode-6")
    assert result.out.count(b"\n") == 1


def test_a_second_process_that_fails_is_told(capfdbinary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxgen.cli.doctor.sys.executable", "/bin/false")
    result = call(capfdbinary, "doctor", "--model", llama())
    assert result.code == 1
    assert "the second process failed with exit code 1" in result.err
