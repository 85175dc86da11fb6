"""`mlxgen families`: what is installed, where it can stop, and what was compared. Loads no model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from mlxgen.cancellation import CancelToken
from mlxgen.cli import exitcodes
from mlxgen.cli.console import Console
from mlxgen.models.described import Compared, Description, describe_families

NOT_SAID = "(not said)"


def run(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    cancel.checkpoint()
    families = describe_families()
    if args.json:
        for family in families:
            console.write(json.dumps(family.to_json()) + "\n")
        return exitcodes.OK
    for family in families:
        console.write("\n".join(lines(family)) + "\n\n")
    console.write(f"{len(families)} families of vision-language models; text models are all those of mlx-lm.\n")
    return exitcodes.OK


def lines(family: Description) -> Iterator[str]:
    """One family as people read it."""
    yield family.name + (f": {family.models}" if family.models else "")
    rows = {
        "model types": shortened(family.model_types),
        "takes": media(family),
        "units": units(family),
        "layouts": ", ".join(family.layouts) or NOT_SAID,
        "compared": "; ".join(compared(one) for one in family.parity) or "no stored reference",
        "package": "" if family.package == "mlxgen" else family.package,
        "note": family.note,
    }
    for name, value in rows.items():
        if value:
            yield f"  {name:<12} {value}"


def shortened(names: tuple[str, ...], most: int = 12) -> str:
    if len(names) <= most:
        return ", ".join(names) or "none here"
    return ", ".join(names[:most]) + f" and {len(names) - most} more (all with --json)"


def media(family: Description) -> str:
    return {None: "pictures, perhaps video", True: "pictures, video", False: "pictures"}[family.video]


def units(family: Description) -> str:
    """What lies between two checkpoints: a run stops before or after it, and loses no more."""
    if not family.prepares and not family.encodes:
        return NOT_SAID
    return f"prepare: {family.prepares or NOT_SAID}; encode: {family.encodes or NOT_SAID}"


def compared(one: Compared) -> str:
    """What was compared with the reference of one tiny checkpoint."""
    text = f"{one.checkpoint}: {', '.join(one.cases)} in {', '.join(one.layouts)}"
    return text + (f" (and {', '.join(one.quantized)})" if one.quantized else "")
