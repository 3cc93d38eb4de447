"""Boundaries that a hit cannot pass, whatever is cached: the last token, blocks, units of hits, a draft's proof."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class HitUnits:
    """Units in which a cache finds prefixes, in tokens.

    Attributes:
      block: tokens that one prefix key stands for: nothing finer is known of a prompt.
      unit: hits end at multiples of it, a multiple of `block`.
      proof: tokens after a hit that must be cached too, for a draft module that drops them; a multiple of `block`.
      shared: whether any group is cached at all.
    """

    block: int
    unit: int
    proof: int = 0
    shared: bool = True

    def boundaries(self, prompt: Any, seen: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Longest hits that the prefixes seen before leave, one limit after the other, never rising.

        Returns:
          Tokens, each int64[...]: all that was seen but the last token of the prompt, which is always computed; of
          that, whole blocks; of these, whole units; of these, what leaves room for a draft's proof.
        """
        prompt, seen = np.asarray(prompt, np.int64), np.asarray(seen, np.int64)
        last = np.minimum(seen, prompt - 1)
        blocks = last // self.block * self.block
        units = blocks // self.unit * self.unit
        proven = np.maximum(seen // self.block * self.block - self.proof, 0)
        return last, blocks, units, np.minimum(units, proven // self.unit * self.unit)
