"""Makes up token sequences that never repeat, the same on every machine."""

from __future__ import annotations

import numpy as np

VOCABULARY = 100_000
"""Tokens are numbers below this."""


class Texts:
    """An endless supply of tokens: the n-th depends on the seed and on n alone (SplitMix64)."""

    def __init__(self, seed: int) -> None:
        self._next = (seed % 2**31) << 33

    def new(self, length: int) -> np.ndarray:
        """The next `length` tokens, uint32."""
        state = np.arange(self._next, self._next + length, dtype=np.uint64)
        self._next += length
        with np.errstate(over="ignore"):
            state *= np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
        return (state % np.uint64(VOCABULARY)).astype(np.uint32)
