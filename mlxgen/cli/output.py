"""How a run's events are shown: as one JSON object per line (a contract for programs), or as text for people."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from mlxgen.cli.console import Console
from mlxgen.events import Backtrack, Event, Finished, InputProgress, PrefillProgress, Section, Token, ToolCall


class Output(Protocol):
    """What a command tells about a run. One process, one run; never raises for a reader that is gone."""

    def started(
        self, snapshot: Path | None, *, resumed: bool, position: int, text: str = "", show_text: bool = False
    ) -> None:
        """The snapshot exists and can be resumed from here on; `position` reply tokens exist already, and say `text`.

        `show_text`: people are shown it before what is new.
        """
        ...

    def event(self, event: Event) -> None: ...

    def saved(self, snapshot: Path, position: int) -> None: ...

    def error(self, error: BaseException, message: str) -> None: ...


class JsonOutput:
    """Every event as one line of JSON (ASCII, so that no encoding can damage it), flushed at once, nothing else."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def _line(self, event: str, **values: Any) -> None:
        self._console.write(json.dumps({"event": event, **values}) + "\n")

    def started(
        self, snapshot: Path | None, *, resumed: bool, position: int, text: str = "", show_text: bool = False
    ) -> None:
        path = None if snapshot is None else str(snapshot)
        self._line("started", snapshot=path, resumed=resumed, position=position, text=text)

    def event(self, event: Event) -> None:
        if isinstance(event, Token):
            self._line(
                "token",
                index=event.index,
                id=event.id,
                text=event.text,
                logprob=event.logprob,
                section=event.section,
            )
        elif isinstance(event, PrefillProgress):
            self._line("prefill", done=event.done, total=event.total)
        elif isinstance(event, InputProgress):
            self._line("input", kind=event.kind, phase=event.phase, index=event.index, total=event.total)
        elif isinstance(event, Section):
            self._line("section", **asdict(event))
        elif isinstance(event, ToolCall):
            self._line("tool_call", **asdict(event))
        elif isinstance(event, Backtrack):
            self._line("backtrack", index=event.index, banned=event.banned)
        else:
            self._line(
                "finished",
                finish_reason=event.finish_reason,
                cancel_reason=event.cancel_reason,
                text=event.text,
                usage=asdict(event.usage),
                stop=None if event.stop is None else asdict(event.stop),
                sections=[asdict(section) for section in event.sections],
                tool_calls=[asdict(call) for call in event.tool_calls],
            )

    def saved(self, snapshot: Path, position: int) -> None:
        self._line("saved", snapshot=str(snapshot), position=position)

    def error(self, error: BaseException, message: str) -> None:
        self._line("error", type=type(error).__name__, message=message)


class TextOutput:
    """The reply's text, and only that, to standard output; bars and statistics to standard error.

    A newline is added after a reply that ended by itself without one. After a stop nothing is added, so that what the
    resumed command prints joins it byte for byte.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting = ""  # text to be shown before the first token's

    def started(
        self, snapshot: Path | None, *, resumed: bool, position: int, text: str = "", show_text: bool = False
    ) -> None:
        if show_text:
            self._waiting = text
        if not self._console.draws_bars:
            self._show_waiting()  # a bar between it and what follows would break the line

    def _show_waiting(self) -> None:
        text, self._waiting = self._waiting, ""
        self._console.write(text)

    def event(self, event: Event) -> None:
        console = self._console
        if isinstance(event, Token):
            self._show_waiting()
            console.write(event.text)
        elif isinstance(event, PrefillProgress):
            console.bar("prompt", event.done, event.total)
        elif isinstance(event, InputProgress):
            console.bar(f"{event.phase} {event.kind}s", event.index + 1, event.total)
        elif isinstance(event, Finished):
            self._finished(event)

    def _finished(self, event: Finished) -> None:
        console = self._console
        console.clear_bar()
        self._show_waiting()
        if event.finish_reason != "cancelled":
            if not event.text.endswith("\n"):
                console.write("\n")
            console.note(statistics(event))

    def saved(self, snapshot: Path, position: int) -> None:
        pass

    def error(self, error: BaseException, message: str) -> None:
        pass


def statistics(event: Finished) -> str:
    """One line about what this process did."""
    usage = event.usage
    parts = [f"prompt {usage.prompt_tokens} tokens"]
    if usage.prefilled_tokens:
        parts[0] += f" ({usage.prefilled_tokens} prefilled at {usage.prompt_tps:.1f} tokens/s)"
    parts.append(f"reply {usage.generated_tokens} tokens")
    if usage.generation_tps > 0:
        parts[-1] += f" at {usage.generation_tps:.1f} tokens/s"
    if usage.images_prepared or usage.images_encoded:
        num_images = max(usage.images_prepared, usage.images_encoded)
        parts.append("1 image" if num_images == 1 else f"{num_images} images")
    if usage.frames_prepared or usage.frames_encoded:
        num_frames = max(usage.frames_prepared, usage.frames_encoded)
        parts.append("1 frame" if num_frames == 1 else f"{num_frames} frames")
    if usage.time_to_first_token_s is not None:
        parts.append(f"first token after {usage.time_to_first_token_s:.2f} s")
    parts.append(f"peak memory {usage.peak_memory_bytes / 1e9:.2f} GB")
    return "; ".join(parts)
