"""The code blocks of the documents, so that tests can run them as they stand there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(
    r"(?:<!-- (?P<note>[^>]*) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """A fenced code block; `note` is the HTML comment on the line above it, `line` where the code starts."""

    language: str
    code: str
    note: str
    line: int


def blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [
        Block(found["language"], found["code"], found["note"] or "", text.count("\n", 0, found.start("code")) + 1)
        for found in _BLOCK.finditer(text)
    ]


def write_files(document: str, folder: Path) -> None:
    """Write every block with a note `file: NAME` under that name."""
    for block in blocks(document):
        if block.note.startswith("file: "):
            (folder / block.note.removeprefix("file: ")).write_text(block.code, encoding="utf-8")
