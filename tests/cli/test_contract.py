"""The JSON events word for word, and the text mode byte for byte."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli.commands import Process, call, generate_args, llama, of, snapshots

KEYS = {
    "started": {"event", "snapshot", "resumed", "position", "text"},
    "input": {"event", "kind", "phase", "index", "total"},
    "prefill": {"event", "done", "total"},
    "token": {"event", "index", "id", "text", "logprob", "section"},
    "finished": {
        *("event", "finish_reason", "cancel_reason", "text", "usage"),
        *("stop", "sections", "tool_calls"),
    },
    "saved": {"event", "snapshot", "position"},
    "error": {"event", "type", "message"},
}
USAGE = {
    *("prompt_tokens", "prefilled_tokens", "reused_tokens", "generated_tokens", "images_prepared", "images_encoded"),
    *("frames_prepared", "frames_encoded", "prompt_tps", "generation_tps", "time_to_first_token_s"),
    "peak_memory_bytes",
}


def test_events_of_a_whole_run(tmp_path: Path) -> None:
    snapshot = tmp_path / "run.mlxgen"
    process = Process(
        generate_args("--json", "--logprobs", "--snapshot", str(snapshot), "--prefill-step-size", "8", max_tokens=12)
    )
    result = process.finish()
    events = process.events
    assert result.code == 0
    assert result.err == ""
    assert all(set(event) == KEYS[event["event"]] for event in events)
    total = events[1]["total"]
    chunks = [8, 16, 17] if total == 17 else []
    kinds = [event["event"] for event in events]
    assert kinds == ["started", *["prefill"] * (1 + len(chunks)), *["token"] * 12, "finished", "saved"]
    assert events[0] == {"event": "started", "snapshot": str(snapshot), "resumed": False, "position": 0, "text": ""}
    assert [event["done"] for event in of(events, "prefill")] == [0, *chunks]
    tokens, finished = of(events, "token"), of(events, "finished")[0]
    assert [event["index"] for event in tokens] == list(range(12))
    assert all(isinstance(event["id"], int) and event["logprob"] < 0 for event in tokens)
    assert "".join(event["text"] for event in tokens) == finished["text"]
    assert (finished["finish_reason"], finished["cancel_reason"]) == ("length", None)
    usage = finished["usage"]
    assert set(usage) == USAGE
    assert (usage["prompt_tokens"], usage["prefilled_tokens"], usage["generated_tokens"]) == (17, 17, 12)
    assert events[-1] == {"event": "saved", "snapshot": str(snapshot), "position": 12}


def test_text_is_exact_and_the_unnamed_snapshot_goes(capfdbinary: Any, cache: Path) -> None:
    as_json = call(capfdbinary, *generate_args("--json", "--temp", "0.9", "--seed", "4"))
    text = as_json.events[-1]["text"]
    assert as_json.events[-1]["event"] == "finished"  # no saved event: it was removed
    assert os.path.dirname(as_json.events[0]["snapshot"]) == str(cache)
    assert of(as_json.events, "token")[0]["logprob"] is None
    as_text = call(capfdbinary, *generate_args("--temp", "0.9", "--seed", "4"))
    assert as_text.code == 0
    assert as_text.out == text.encode() + (b"" if text.endswith("\n") else b"\n")
    assert "prompt 17 tokens" in as_text.err
    assert "reply 40 tokens" in as_text.err
    assert "\r" not in as_text.err  # no bars: this isn't a terminal
    quiet = call(capfdbinary, *generate_args("--temp", "0.9", "--seed", "4", "--quiet"))
    assert (quiet.out, quiet.err) == (as_text.out, "")
    assert snapshots(cache) == []


def test_a_finished_reply_is_repeated(capfdbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "run.mlxgen")
    first = call(capfdbinary, *generate_args("--json", "--snapshot", path))
    before = {name: (Path(path) / name).read_bytes() for name in os.listdir(path)}

    def must_not_load(*args: Any, **options: Any) -> None:
        raise AssertionError("a finished reply needs no model")

    monkeypatch.setattr("mlxgen.resumption.load", must_not_load)
    again = call(capfdbinary, "resume", path, "--json")
    assert again.code == 0
    finished, original = again.events[1], of(first.events, "finished")[0]
    started = {"event": "started", "snapshot": path, "resumed": True, "position": 40, "text": original["text"]}
    assert again.events[0] == started
    for key in KEYS["finished"] - {"usage"}:
        assert finished[key] == original[key]
    assert (finished["usage"]["prefilled_tokens"], finished["usage"]["generated_tokens"]) == (0, 0)
    assert len(again.events) == 2
    as_text = call(capfdbinary, "resume", path)
    assert as_text.out.decode() == original["text"] + ("" if original["text"].endswith("\n") else "\n")
    assert {name: (Path(path) / name).read_bytes() for name in os.listdir(path)} == before


def test_a_finished_reply_goes_on_when_asked(capfdbinary: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "run.mlxgen")
    whole = call(capfdbinary, *generate_args("--json", max_tokens=50))
    call(capfdbinary, *generate_args("--json", "--snapshot", path, max_tokens=20))
    more = call(capfdbinary, "resume", path, "--json", "--max-tokens", "30")
    assert [event["index"] for event in of(more.events, "token")] == list(range(20, 50))
    assert of(more.events, "finished")[0]["text"] == whole.events[-1]["text"]
    assert of(more.events, "finished")[0]["usage"]["prefilled_tokens"] == 0


def test_stop_strings_and_token_ids(capfdbinary: Any) -> None:
    whole = call(capfdbinary, *generate_args("--json")).events
    text, tokens = whole[-1]["text"], of(whole, "token")
    stop = text[12:15]
    stopped = call(capfdbinary, *generate_args("--json", "--stop", stop)).events[-1]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(stop)]
    wanted = tokens[5]["id"]
    first = next(index for index, token in enumerate(tokens) if token["id"] == wanted)
    ended = call(capfdbinary, *generate_args("--json", "--stop-token-id", str(wanted))).events
    assert len(of(ended, "token")) == first + 1
    assert ended[-1]["finish_reason"] == "stop"


def test_no_tokens_prefills_only(capfdbinary: Any) -> None:
    result = call(capfdbinary, *generate_args("--json", max_tokens=0))
    assert result.code == 0
    assert of(result.events, "token") == []
    assert result.events[-1]["finish_reason"] == "length"


class _Input(io.BytesIO):
    """Standard input, as far as the command asks."""

    @classmethod
    def of(cls, data: bytes) -> Any:
        return SimpleNamespace(buffer=cls(data), isatty=lambda: False)


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"hello there\n", "hello there"), (b"a\nb\n\n", "a\nb\n"), (b"x\r\n", "x"), ("é".encode(), "é"), (b"\n\n", "\n")],
)
def test_prompt_from_stdin_loses_one_newline(
    capfdbinary: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes, expected: str
) -> None:
    path = str(tmp_path / "run.mlxgen")
    monkeypatch.setattr(sys, "stdin", _Input.of(data))
    result = call(capfdbinary, *generate_args("--json", "--snapshot", path, prompt="-", max_tokens=1))
    assert result.code == 0
    shown = call(capfdbinary, "snapshots", "show", path, "--json")
    assert json.loads(shown.out)["turns"][0] == {"role": "user", "text": expected, "tokens": None}


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"caf\xe9 au lait", "not UTF-8 (byte 0xe9 at position 3)"), (b"", "prompt is empty"), (b"\n", "prompt is empty")],
)
def test_bad_prompt_on_stdin(
    capfdbinary: Any, monkeypatch: pytest.MonkeyPatch, cache: Path, data: bytes, message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", _Input.of(data))
    result = call(capfdbinary, *generate_args(prompt="-"))
    assert result.code == 1
    assert result.out == b""
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert snapshots(cache) == []


def test_raw_prompt(capfdbinary: Any) -> None:
    raw = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    templated = call(capfdbinary, *generate_args("--json")).events[-1]
    taken = call(capfdbinary, *generate_args("--json", "--ignore-chat-template", prompt=raw)).events[-1]
    assert taken["text"] == templated["text"]
    assert taken["usage"]["prompt_tokens"] == templated["usage"]["prompt_tokens"] == 17
    # The same words within the template are nobody's command.
    plain = call(capfdbinary, *generate_args("--json", prompt=raw, max_tokens=1)).events[-1]
    assert plain["usage"]["prompt_tokens"] > 2 * 17


def test_prepared_then_resumed_equals_generated(capfdbinary: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "tonight.mlxgen")
    sampled = ("--temp", "1.0", "--seed", "9", "--json")
    whole = call(capfdbinary, *generate_args(*sampled))
    args = ["prepare", *generate_args(*sampled, "--snapshot", path)[1:]]
    prepared = call(capfdbinary, *args)
    assert prepared.code == 0
    assert [event["event"] for event in prepared.events] == ["started", "finished", "saved"]
    assert prepared.events[1]["usage"]["prefilled_tokens"] == 0
    shown = json.loads(call(capfdbinary, "snapshots", "show", path, "--json").out)
    assert (shown["phase"], shown["position"], shown["model"]) == ("prefill", 0, llama())
    resumed = call(capfdbinary, "resume", path, "--json")
    assert resumed.code == 0
    assert of(resumed.events, "token") == of(whole.events, "token")
    assert resumed.events[-2]["text"] == whole.events[-1]["text"]
