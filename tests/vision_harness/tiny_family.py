"""What `tiny_vlm` must know of a family to write its tiny checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TinyFamily:
    """`specials` are the tokenizer's special tokens, `eos` one of them.

    `config(vocabulary, text)` gives config.json but for its model_type, from the vocabulary in the order of the ids and
    a text_config that lacks its model_type; `modules(config)` the modules by the prefix their weights get. `tokenizer`
    are further entries of tokenizer_config.json.
    """

    specials: tuple[str, ...]
    template: str
    eos: str
    processor: dict[str, Any]
    config: Callable[[Sequence[str], dict[str, Any]], dict[str, Any]]
    modules: Callable[[dict[str, Any]], dict[str, Any]]
    video: bool = False
    tokenizer: dict[str, Any] = field(default_factory=dict)
