"""An asyncio program cancels an answer and asks something else at once: what was said stays, nothing is read again.

python examples/cancel_and_ask.py
python examples/cancel_and_ask.py --model mlx-community/Qwen3-4B-4bit
"""

from __future__ import annotations

import argparse
import asyncio

import mlxgen


async def answer(session: mlxgen.Session, prompt: str, max_tokens: int, spoken: asyncio.Event) -> mlxgen.Finished:
    """Print an answer as it comes; `spoken` is set once there is a sentence's worth of it."""
    finished: mlxgen.Finished | None = None
    reply = mlxgen.ReplyOptions(max_tokens=max_tokens, ignore_eos=True)
    async for event in session.astream(prompt, reply=reply):
        if isinstance(event, mlxgen.Token):
            print(event.text, end="", flush=True)
            if event.index == 15:
                spoken.set()
        elif isinstance(event, mlxgen.Finished):
            finished = event
    assert finished is not None
    return finished


async def talk(model: mlxgen.Model) -> None:
    session = mlxgen.Session(model)
    spoken = asyncio.Event()
    task = asyncio.create_task(answer(session, "Tell me a long story about the sea.", 400, spoken))
    await spoken.wait()
    # The user has heard enough. Cancelling waits for the token that is being computed, and for nothing else.
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        print(f"\n[cancelled after {session.position} tokens]\n")

    finished = await answer(session, "In other words?", 20, asyncio.Event())
    usage = finished.usage
    print(f"\n[{usage.reused_tokens} of {usage.prompt_tokens} tokens of the conversation were there already]")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    asyncio.run(talk(mlxgen.load(parser.parse_args(argv).model)))


if __name__ == "__main__":
    main()
