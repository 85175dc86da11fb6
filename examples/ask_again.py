"""Several conversations with one model at once: an urgent question goes first, and a finished answer is asked to go on.

Run it with `python examples/ask_again.py`, or with the name of a model.
"""

import sys

import mlxgen


def main() -> None:
    model = mlxgen.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    story, question = mlxgen.Session(model), mlxgen.Session(model)

    with mlxgen.Engine(model) as engine:
        long = engine.submit(story, "Tell me a long story about the sea.", reply=mlxgen.ReplyOptions(max_tokens=60))
        for event in long:
            if isinstance(event, mlxgen.Token):
                print(event.text, end="", flush=True)
                if event.index == 20:
                    break

        # The story waits from its next token on, and goes on by itself when the question is answered.
        urgent = engine.submit(question, "What is 7 + 5?", priority=1, reply=mlxgen.ReplyOptions(max_tokens=20))
        print(f"\n\n[urgent] {urgent.result().text}\n")
        for event in long:
            if isinstance(event, mlxgen.Token):
                print(event.text, end="", flush=True)

        # A finished job's session may be submitted again: the same reply, 30 tokens more.
        more = engine.submit(story, reply=mlxgen.ReplyOptions(max_tokens=30)).result()
        print(f"\n\n[{long.result().finish_reason}, then {more.usage.generated_tokens} tokens more]\n\n{more.text}")


if __name__ == "__main__":
    main()
