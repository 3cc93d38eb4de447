"""Blocks over time, by group: held by requests, cached, and evictable: cached, but held by no request.

They are counted at the ends of some steps, as many as a plot can show: the counting looks at the whole pool.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

MOST = 256
"""Samples of a replay, at most; when it turns out to be longer, every second one goes, down to half as many."""


class Kind(enum.IntEnum):
    """First axis of `Occupancy.blocks`. Blocks that are held may be cached too."""

    HELD = 0
    CACHED = 1
    EVICTABLE = 2


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Blocks of each group at the ends of some steps.

    Attributes:
      steps: int64[n], the steps' numbers, rising.
      blocks: int64[3, groups, n], by `Kind`; what is neither held nor evictable is empty.
    """

    steps: np.ndarray
    blocks: np.ndarray

    def columns(self) -> dict[str, np.ndarray]:
        """`step`, and `held_0`, `cached_0`, `evictable_0` of the first group, and so on."""
        found = {"step": self.steps}
        for group in range(self.blocks.shape[1]):
            found |= {f"{kind.name.lower()}_{group}": self.blocks[kind, group] for kind in Kind}
        return found


class Sampling:
    """Samples after every so many steps with work, fewer and fewer as a replay gets longer.

    Args:
      every: steps between two samples at first.

    Attributes:
      every: steps between two samples now.
      samples: so far, a step and its blocks each.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.samples: list[tuple[int, np.ndarray]] = []

    def due(self, done: int) -> bool:
        """True if there is to be a sample after the `done`-th step with work."""
        return done % self.every == 0

    def add(self, step: int, blocks: np.ndarray) -> None:
        """Takes a sample that is due.

        Args:
          step: the step that has ended.
          blocks: int[3, groups], by `Kind`.
        """
        self.samples.append((step, blocks))
        if len(self.samples) == MOST:
            self.samples, self.every = self.samples[1::2], 2 * self.every

    def taken(self) -> Occupancy | None:
        """The samples; None where the replay was too short for one."""
        if not self.samples:
            return None
        steps, blocks = zip(*self.samples, strict=True)
        return Occupancy(np.array(steps, np.int64), np.stack(blocks, axis=-1).astype(np.int64))
