"""The text of a recorded reply without its model: the journal and the tokenizer say it all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxgen.errors import MlxgenError
from mlxgen.events import Finished, Usage
from mlxgen.history import History
from mlxgen.judge import rebuild_text
from mlxgen.models.config import read_config
from mlxgen.models.fingerprint import fingerprint_files, fingerprint_parts
from mlxgen.models.load import LoadOptions, read_tokenizer
from mlxgen.reply import finished_event


def recorded_reply(history: History) -> Finished | None:
    """The last reply as its `Finished` event, with `usage` saying that nothing was done.

    None where it takes more than that: there is no reply, or the model's folder isn't where it was, or has another
    tokenizer now.
    """
    reply = history.reply
    source = history.model.get("source")
    if reply is None or source is None:
        return None
    try:
        tokenizer = _same_tokenizer(Path(source), history.model["parts"])
    except MlxgenError:
        return None
    if tokenizer is None:
        return None
    return finished_event(reply, rebuild_text(tokenizer, reply), Usage(prompt_tokens=reply.num_prompt_tokens))


def _same_tokenizer(folder: Path, digests: Mapping[str, str]) -> Any:
    if not folder.is_dir():
        return None
    files = {part: paths for part, paths in fingerprint_parts(folder, ()).items() if part == "tokenizer"}
    found = fingerprint_files(files).parts
    if not found or found.get("tokenizer") != digests.get("tokenizer"):
        return None
    return read_tokenizer(folder, read_config(folder), LoadOptions())
