"""Whatever goes wrong is one line that says what to do, and an exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from cli.commands import call, generate_args, llama, of, snapshots


def one_line(err: str) -> str:
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("mlxgen: error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give a command"),
        (["generat"], "invalid choice"),
        (["generate"], "--prompt"),
        (["generate", "--promp", "x"], "--prompt"),
        (["generate", "--prompt", "x", "--max-tokens", "many"], "invalid int value"),
        (["generate", "--prompt", "x", "--max-tokens", "-2"], "--max-tokens is -2; give 0 or more"),
        (["generate", "--prompt", "x", "--temp", "nan"], "temperature is nan"),
        (["generate", "--prompt", "x", "--temp", "-1"], "temperature is -1.0"),
        (["generate", "--prompt", "x", "--top-p", "1.5"], "top_p is 1.5"),
        (["generate", "--prompt", "x", "--seed", "-1"], "seed is -1"),
        (["generate", "--prompt", "x", "--logit-bias", "{]"], "not JSON"),
        (["generate", "--prompt", "x", "--logit-bias", '{"x": 1}'], "isn't a token id"),
        (["generate", "--prompt", "x", "--kv-bits", "3"], "kv_bits is 3"),
        (["generate", "--prompt", "x", "--prefill-step-size", "0"], "prefill_step_size is 0"),
        (["generate", "--prompt", "x", "--timeout", "-3"], "not a number of seconds"),
        (["generate", "--prompt", "x", "--timeout", "inf"], "not a number of seconds"),
        (["generate", "--prompt", "-", "--image", "-"], "both read standard input"),
        (["generate", "--prompt", "x", "--stop", ""], "stop string '' is empty"),
        (["resume", "--from-start", "--json", "x"], "--from-start is for text"),
        (["snapshots", "remove"], "give the paths of snapshots, or --all"),
        (["chat", "--resume", "x", "--system", "y"], "leave the others away"),
    ],
)
def test_bad_usage_is_2(capfdbinary: Any, args: list[str], message: str) -> None:
    result = call(capfdbinary, *args)
    assert result.code == 2
    assert message in one_line(result.err)


def test_usage_errors_are_events_too(capfdbinary: Any) -> None:
    result = call(capfdbinary, *generate_args("--json", "--temp", "-1"))
    assert result.code == 2
    assert [event["event"] for event in result.events] == ["error"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2", "did you mean 'smollm2'?"),
        ("/no/such/folder", "no folder '/no/such/folder'"),
    ],
)
def test_model_that_is_not_there(capfdbinary: Any, cache: Path, model: str, message: str) -> None:
    result = call(capfdbinary, "generate", "--offline", "--json", "--prompt", "x", "--model", model)
    assert result.code == 1
    assert message in one_line(result.err)
    event = result.events[0]
    assert set(event) == {"event", "type", "message"}
    assert event["type"] == "ModelLoadError"
    assert message in event["message"]
    assert len(result.events) == 1
    assert snapshots(cache) == []


def test_folder_without_config(capfdbinary: Any, tmp_path: Path) -> None:
    result = call(capfdbinary, "generate", "--prompt", "x", "--model", str(tmp_path))
    assert result.code == 1
    assert "no config.json" in one_line(result.err)


def test_prompt_longer_than_the_context(capfdbinary: Any, cache: Path) -> None:
    result = call(capfdbinary, *generate_args("--json", prompt="word " * 5000))
    assert result.code == 1
    assert "context 4096" in one_line(result.err)
    assert [event["event"] for event in result.events] == ["started", "error"]
    assert result.events[1]["type"] == "ContextLengthError"
    assert snapshots(cache) == []


def test_id_outside_the_vocabulary(capfdbinary: Any, cache: Path) -> None:
    result = call(capfdbinary, *generate_args("--logit-bias", '{"99999": 1}'))
    assert result.code == 1
    assert "99999" in one_line(result.err)
    assert snapshots(cache) == []


def test_empty_prompt(capfdbinary: Any) -> None:
    result = call(capfdbinary, *generate_args(prompt=""))
    assert result.code == 1
    assert "the prompt is empty" in one_line(result.err)


def test_prompt_that_is_no_text(capfdbinary: Any) -> None:
    result = call(capfdbinary, *generate_args(prompt=os.fsdecode(b"caf\xe9")))
    assert result.code == 1
    assert "lone surrogate" in one_line(result.err)


def test_existing_snapshot_is_kept_without_overwrite(capfdbinary: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.mlxgen"
    first = call(capfdbinary, *generate_args("--json", "--snapshot", str(path)))
    journal = (path / "journal.log").read_bytes()
    refused = call(capfdbinary, *generate_args("--json", "--snapshot", str(path)))
    assert refused.code == 1
    assert "--overwrite" in one_line(refused.err)
    assert refused.events[0]["type"] == "SnapshotError"
    assert (path / "journal.log").read_bytes() == journal
    replaced = call(capfdbinary, *generate_args("--json", "--snapshot", str(path), "--overwrite", prompt="another one"))
    assert replaced.code == 0
    assert of(replaced.events, "finished")[0]["text"] != of(first.events, "finished")[0]["text"]
    # What isn't a snapshot is never overwritten.
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("x")
    for target in ("folder", "folder/mine.txt"):
        other = call(capfdbinary, *generate_args("--snapshot", str(tmp_path / target), "--overwrite"))
        assert other.code == 1
        assert "use another path" in other.err or "give another path" in other.err
    assert (tmp_path / "folder" / "mine.txt").read_text() == "x"


@pytest.mark.parametrize("name", ["missing.mlxgen", "file", "folder"])
def test_resume_what_is_no_snapshot(capfdbinary: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("x")
    (tmp_path / "file").write_text("x")
    for command in (["resume"], ["snapshots", "show"]):
        result = call(capfdbinary, *command, str(tmp_path / name))
        assert result.code == 1
        assert name in one_line(result.err)
    assert (tmp_path / "folder" / "x").read_text() == "x"


def test_nothing_to_resume(capfdbinary: Any) -> None:
    result = call(capfdbinary, "resume")
    assert result.code == 1
    assert "no interrupted run" in one_line(result.err)


def test_picture_for_a_text_model_and_missing_files(capfdbinary: Any, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"x")
    typo = call(capfdbinary, *generate_args("--image", str(tmp_path / "foto.png")))
    assert typo.code == 1
    assert "photo.png" in one_line(typo.err)
    nothing = call(capfdbinary, *generate_args("--image", str(tmp_path / "*.jpg")))
    assert "no file matches" in one_line(nothing.err)
    refused = call(capfdbinary, *generate_args("--image", str(tmp_path / "photo.png")))
    assert refused.code == 1
    assert "text-only" in one_line(refused.err)


def test_unexpected_error_is_one_line(capfdbinary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("this\nshould not happen")

    monkeypatch.setattr("mlxgen.cli.generate.load_model", fail)
    result = call(capfdbinary, *generate_args("--json"))
    assert result.code == 1
    line = one_line(result.err)
    assert "unexpected RuntimeError: this should not happen" in line
    assert "report" in line
    assert "MLXGEN_DEBUG=1" in line
    assert result.events[0]["type"] == "RuntimeError"
    monkeypatch.setenv("MLXGEN_DEBUG", "1")
    assert "Traceback" in call(capfdbinary, *generate_args()).err


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["resume"], ["prepare"], ["snapshots"], ["doctor"]])
def test_help_begins_with_examples(capfdbinary: Any, command: list[str]) -> None:
    result = call(capfdbinary, *command, "-h")
    assert result.code == 0
    lines = result.out.decode().splitlines()
    assert lines[0] == "examples:"
    assert lines[1].startswith(f"  mlxgen {' '.join(command)}".rstrip())


def test_budget_that_is_no_size(capfdbinary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXGEN_SNAPSHOT_BUDGET", "lots")
    result = call(capfdbinary, "generate", "--model", llama(), "--prompt", "x")
    assert result.code == 2
    assert "MLXGEN_SNAPSHOT_BUDGET is 'lots'" in one_line(result.err)
