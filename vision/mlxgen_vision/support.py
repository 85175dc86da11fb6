"""What each family says of itself: for `mlxgen families`, and for docs/families.md.

mlxgen reads `support` of a family's object by these names. A family of another package may give a mapping with the
same names instead, so that it needs nothing of this module; every name may be left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PICTURE_CASES: Final = ("text", "img1", "img2")
VIDEO_CASES: Final = (*PICTURE_CASES, "vid1", "mix")
# As transformers 5 saves a model; as it was published for transformers 4; as mlx-community publishes it.
LAYOUTS: Final = ("hf", "hub", "mlx")


@dataclass(frozen=True, slots=True)
class Parity:
    """One tiny checkpoint on which transformers' ids, features, logits and 24 greedy tokens were found again.

    `cases` were compared in each of `layouts`; a test holds both against what the parity tests run. `quantized` ones
    have no reference: their tokens were compared with those of the same weights dequantised.
    """

    checkpoint: str
    cases: tuple[str, ...] = PICTURE_CASES
    layouts: tuple[str, ...] = LAYOUTS
    quantized: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FamilySupport:
    """`models`: what people call them. `prepares`, `encodes`: what lies between two checkpoints in each phase.

    `layouts`: the forms of checkpoints it reads; quantised weights in each. `parity` is empty where nothing was
    compared; `note` says what else a user should know.
    """

    models: str
    prepares: str = "one picture"
    encodes: str = "a few blocks of the tower, for one picture"
    video: bool = False
    layouts: tuple[str, ...] = LAYOUTS
    parity: tuple[Parity, ...] = ()
    note: str = ""
