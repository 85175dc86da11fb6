"""How much of a vision tower goes between two checkpoints: a tenth of a second, or one block where that takes longer.

Where a step ends changes no result: the same operations run in the same shapes. So it may follow the machine's speed,
which is measured step by step.
"""

from __future__ import annotations

from typing import Final

# What one step may compute at most: a tenth of a second at 1 TFLOP/s, about what the smallest Apple GPU sustains.
STEP_FLOPS: Final = 1e11

STEP_S: Final = 0.1
_SHARE: Final = 0.7  # of STEP_S that is planned for: two steps of one amount never take exactly the same time


class Pace:
    """The amount of work for the next step of one part, learnt from the steps before. Lives while the part is encoded.

    The first step is as small as can be: one block, which tells how fast this machine is.
    """

    def __init__(self) -> None:
        self._budget = 0.0

    def fits(self, flops: float) -> bool:
        """Whether so much may go into one step."""
        return flops <= self._budget

    def took(self, flops: float, seconds: float) -> None:
        """Learn from a step that was evaluated."""
        self._budget = min(STEP_FLOPS, _SHARE * STEP_S * flops / max(seconds, 1e-9))
