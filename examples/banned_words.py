"""Go back where a banned string is said, and go on another way: nobody sees the words that were taken back.

Banning a token isn't enough: " sea", "sea", "Sea" and "s" + "ea" are different tokens. So the text is watched; where a
banned string is complete, the tokens from its beginning on go, and what began it may not come there again.

Run it with `python examples/banned_words.py`, or with `--model NAME --ban WORD --ban WORD`.
"""

import argparse
from collections.abc import Sequence

import mlxgen
from mlxgen.events import Backtrack


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", default="Name three animals.")
    parser.add_argument("--ban", action="append", help="repeatable (default: cat, dog)")
    parser.add_argument("--max-tokens", type=int, default=40)
    args = parser.parse_args(arguments)
    banned = tuple(args.ban or ("cat", "dog"))

    session = mlxgen.Session(mlxgen.load(args.model))
    free = session.send(args.prompt, reply=mlxgen.ReplyOptions(max_tokens=args.max_tokens))
    print(f"--- as it would\n{free.text}\n--- without {', '.join(banned)}")

    session.rewind()  # before the reply: the prompt is in the cache already
    went_back: list[Backtrack] = []
    for event in session.stream(reply=mlxgen.ReplyOptions(max_tokens=args.max_tokens, ban=banned)):
        if isinstance(event, mlxgen.Token):
            print(event.text, end="", flush=True)  # empty while it may still become a banned string
        elif isinstance(event, Backtrack):
            went_back.append(event)
    print(f"\n--- taken back: {len(went_back)}")
    for event in went_back:
        print(f"{event.banned!r} at token {event.index}")


if __name__ == "__main__":
    main()
