"""Hundreds of replies of one token each, continued, are one long reply: across buffers that grow, rings that wrap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import PROMPT, SETUPS, greedy, new_session, sampled

NUM_TOKENS = 500
# The caches grow, and memory is given back, every 256 rows; the prompt takes the position past 520.


@pytest.mark.parametrize("name", SETUPS)
def test_five_hundred_continuations_of_one_token_are_one_run_of_five_hundred(name) -> None:
    reply = sampled if name in ("llama", "qwen3_5") else greedy
    whole = new_session(SETUPS[name])
    whole.send(PROMPT, reply=reply(NUM_TOKENS))
    expected = whole.history.reply

    session = new_session(SETUPS[name])
    session.send(PROMPT, reply=reply(1))
    again = replace(reply(1), sampling=session.reply_options(session.history.reply).sampling)
    while session.position < NUM_TOKENS:
        list(session.continue_(reply=again if session.position % 2 else None))
    assert len(session.history.ids) > 520
    assert session.history.reply.tokens == expected.tokens
    assert session.reply_text == whole.reply_text
    assert session.history.num_fed == whole.history.num_fed
