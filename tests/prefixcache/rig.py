"""Models with a prefix cache of their own, sessions that use it, and what a run without one says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from harness import SETUPS, CountingForward, Outcome, Setup, greedy, model

from mlxgen.models import Model
from mlxgen.options import ReplyOptions, SessionOptions
from mlxgen.prefixcache import PrefixCacheOptions, prefix_cache
from mlxgen.session import Session

MEMORY = 64 * 2**20
LONG = "Where does a stopped train of thought go? It waits, and it waits, and then it goes on as if nothing had been."


def own_model(
    kind: str = "llama", *, memory_bytes: int = MEMORY, disk_bytes: int = 0, folder: Path | None = None, **rest: Any
) -> tuple[Model, CountingForward]:
    """A model object like a newly loaded one: with an empty prefix cache, and counted passes."""
    forward = CountingForward(model(kind).forward)
    mine = replace(model(kind), forward=forward)
    options = PrefixCacheOptions(memory_bytes, disk_bytes, folder, **rest)
    prefix_cache(mine).configure(options)
    return mine, forward


def options_of(setup: Setup, **rest: Any) -> SessionOptions:
    return replace(setup.session_options, prefix_cache=True, **rest)


def session(mine: Model, setup: Setup = SETUPS["llama"], *, system: str = "Be brief.") -> Session:
    return Session(mine, system=system, options=options_of(setup))


@dataclass
class Said:
    """One reply: what it says, and what it cost."""

    values: list[Any]
    reused: int
    prefilled: int


def say(session: Session, prompt: str | Sequence[Any] | None = LONG, reply: ReplyOptions = greedy(6)) -> Said:
    outcome = Outcome()
    usage = outcome.take(session.stream(prompt, reply=reply)).usage
    return Said(outcome.values, usage.reused_tokens, usage.prefilled_tokens)


def cold(setup: Setup, prompt: str = LONG, *, system: str = "Be brief.", reply: ReplyOptions = greedy(6)) -> Said:
    """What a session without a prefix cache says."""
    options = replace(setup.session_options, prefix_cache=False)
    return say(Session(model(setup.kind), system=system, options=options), prompt, reply)


def next_logits(session: Session) -> mx.array:
    """The logits of the prompt's last token, after a prefill."""
    twin = session.sequence.fork()
    return twin.step(mx.array(twin.ids[twin.num_fed : twin.num_fed + 1], mx.uint32))
