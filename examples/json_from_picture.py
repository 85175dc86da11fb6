"""JSON from a picture: whatever the model would rather say, what comes out fits the schema.

The built-in model is tiny: it was trained on sentences about coloured shapes, so the schema asks for these. A larger
model fills in `{"enum": ["circle", "square"]}` as well.

Run it with `python examples/json_from_picture.py`, or with `--model NAME --image FILE`. Needs the package llguidance
(`pip install "mlxgen[grammar]"`).
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from mlxgen_vision.demo_pictures import COLOURS, KINDS, example_picture

import mlxgen

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shape": {"type": "string", "pattern": f"^It is a ({'|'.join(KINDS)})\\.$"},
        "colour": {"type": "string", "pattern": f"^It is ({'|'.join(COLOURS)})\\.$"},
    },
    "required": ["shape", "colour"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # no blanks between the parts
}


def describe(session: mlxgen.Session, picture: Any, prompt: str) -> dict[str, str]:
    """What the schema asks for, as the model sees it."""
    reply = mlxgen.ReplyOptions(max_tokens=100, grammar=mlxgen.Grammar.json_schema(SCHEMA))
    finished = session.send([mlxgen.ImagePart(picture), prompt], reply=reply)
    if finished.finish_reason != "stop":
        raise SystemExit(f"the reply was cut off ({finished.finish_reason}), so it is no JSON: {finished.text}")
    found: dict[str, str] = json.loads(finished.text)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="shapes-vl")
    parser.add_argument("--image", help="a picture (default: a drawing of a blue star)")
    parser.add_argument("--prompt", default="What do you see?")
    args = parser.parse_args(arguments)

    session = mlxgen.Session(mlxgen.load(args.model))
    print(json.dumps(describe(session, args.image or example_picture("one"), args.prompt)))


if __name__ == "__main__":
    main()
