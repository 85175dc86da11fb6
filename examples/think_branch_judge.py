"""Think once, answer several times, judge the answers, and go on with the best of them.

The thoughts are read once. Each answer begins in a fork, so it pays for its own tokens only; the judge asks in a fork
of that, which leaves no trace in the conversation.

Run it with `python examples/think_branch_judge.py`, or with `--model NAME`.
"""

import argparse
from collections.abc import Sequence

import mlxgen

QUESTION = "Which is the better pet for somebody who travels a lot, a dog or a goldfish?"
THINK = "Think about it first: name one reason for each of them."
ANSWER = "Now give your answer in one short sentence."
JUDGE = "Is that a good answer? Say yes or no."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--branches", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)

    session = mlxgen.Session(mlxgen.load(args.model))
    print("thinks:", think(session, args.max_tokens))

    warm = mlxgen.ReplyOptions(
        max_tokens=args.max_tokens,
        sampling=mlxgen.SamplingParams(temperature=0.7, top_p=0.9, seed=args.seed),
        stop=("\n",),
    )
    session.add(ANSWER)
    judged: list[tuple[float, mlxgen.Session]] = []
    for branch in session.branch(args.branches, reply=warm):
        for _ in branch.continue_():
            pass
        score = judge(branch)
        judged.append((score, branch))
        print(f"answer ({score:+.2f}): {branch.reply_text!r}")

    best, chosen = max(judged, key=lambda one: one[0])
    print(f"best ({best:+.2f}): {chosen.reply_text!r}")
    last = chosen.send("Say why, in one sentence.", reply=mlxgen.ReplyOptions(max_tokens=args.max_tokens))
    print("goes on:", last.text, f"({last.usage.reused_tokens} tokens weren't read again)")


def think(session: mlxgen.Session, max_tokens: int) -> str:
    """Let the model think, in its own section if it has one, else as an ordinary reply."""
    has_section = session.model.tokenizer.has_thinking
    reply = mlxgen.ReplyOptions(max_tokens=max_tokens, stop_after_thinking=has_section)
    return session.send(f"{QUESTION} {THINK}", reply=reply).text


def judge(branch: mlxgen.Session) -> float:
    """How much more likely the model finds a yes than a no (natural logarithm)."""
    asked = branch.fork()
    asked.add(JUDGE)
    return asked.score("Yes").total - asked.score("No").total


if __name__ == "__main__":
    main()
