"""Counter-based randomness: step n of a reply always draws the same numbers, whatever else runs in the process.

The key of a step is a function of (seed, n) and of nothing else, so nothing has to be saved beside the seed and the
number of tokens, and the global MLX generator is neither read nor moved. The function below is part of the snapshot
format: changing it changes the replies of saved runs.

    mix(z)        the finaliser of SplitMix64 (Steele, Lea, Flood 2014: "Fast splittable pseudorandom number
                  generators"), a bijection of 64-bit integers
    word(s, n, d) mix(mix(s + G) + (256 n + d) G)  modulo 2**64, with G = 0x9E3779B97F4A7C15

For one seed all steps n < 2**56 and draws d < 256 get different words. Draw 0 is the key of the token, draw 1 decides
about XTC.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def step_word(seed: int, n: int, draw: int = 0) -> int:
    """The 64-bit word of draw `draw` in step `n`, see the module's docstring. 0 <= seed < 2**64, n >= 0, draw < 256."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (256 * n + draw) * _GOLDEN) & _MASK)


def step_key(seed: int, n: int) -> mx.array:
    """The MLX random key of step `n`: uint32 of shape (2,), high half first. It is already evaluated."""
    word = step_word(seed, n)
    return mx.array([word >> 32, word & 0xFFFFFFFF], dtype=mx.uint32)


def step_uniform(seed: int, n: int, draw: int) -> float:
    """A number in [0, 1) for a decision the host makes in step `n`: the top 53 bits of the word."""
    return (step_word(seed, n, draw) >> 11) * 2.0**-53
