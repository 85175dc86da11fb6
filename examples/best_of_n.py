"""The best of N answers, by how likely the model itself finds each of them.

The prompt is read once; each branch samples with a seed of its own. The score is the mean log-probability of the
answer's tokens as the model's own, unchanged distribution has it (no temperature, no filters).

Run it with `python examples/best_of_n.py`, or with `--model NAME`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import mlxgen


@dataclass(frozen=True)
class Candidate:
    text: str
    score: float


def best_of(
    session: mlxgen.Session, num_candidates: int, reply: mlxgen.ReplyOptions
) -> tuple[Candidate, list[Candidate]]:
    """The best candidate and all of them. The session, which ends with the user's turn, stays as it is."""
    candidates = []
    for branch in session.branch(num_candidates, reply=reply):
        for _ in branch.continue_():
            pass
        answer = branch.history.reply
        assert answer is not None
        # Of the very tokens it was made of, the one that ended it included.
        candidates.append(Candidate(branch.reply_text, session.score(answer.ids).mean))
    return max(candidates, key=lambda candidate: candidate.score), candidates


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", default="Give a name to a small boat. Say the name only.")
    parser.add_argument("-n", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)

    session = mlxgen.Session(mlxgen.load(args.model))
    session.add(args.prompt)
    sampling = mlxgen.SamplingParams(temperature=args.temperature, seed=args.seed)
    best, candidates = best_of(session, args.n, mlxgen.ReplyOptions(max_tokens=args.max_tokens, sampling=sampling))
    for candidate in candidates:
        print(f"{'*' if candidate is best else ' '} {candidate.score:7.3f}  {candidate.text!r}")

    session.append_text(best.text)  # the conversation goes on with it
    print(f"{args.prompt} -> {session.reply_text!r}")


if __name__ == "__main__":
    main()
