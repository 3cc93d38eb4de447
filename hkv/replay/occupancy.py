"""Blocks over time, by group: held by requests, cached, and evictable: cached, but held by no request.

They are counted at the ends of some steps, as many as a plot can show: the counting looks at the whole pool.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from hkv.replay.reasons import HitUnits
from hkv.replay.traces.interned import InternedTrace

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
    """Samples after every so many steps with work, fewer and fewer as a replay gets longer."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.samples: list[tuple[int, np.ndarray]] = []

    def due(self, done: int) -> bool:
        """True if there is to be a sample after the `done`-th step with work."""
        return done % self.every == 0

    def add(self, step: int, blocks: np.ndarray) -> None:
        """Takes a sample that is due."""
        self.samples.append((step, blocks))
        if len(self.samples) == MOST:
            self.samples, self.every = self.samples[1::2], 2 * self.every

    def taken(self) -> Occupancy | None:
        """The samples; None where the replay was too short for one."""
        if not self.samples:
            return None
        steps, blocks = zip(*self.samples, strict=True)
        return Occupancy(np.array(steps, np.int64), np.stack(blocks, axis=-1).astype(np.int64))


# Reuse of a trace's prompts: which units of each prompt an earlier request brought, and which one did last.


@dataclasses.dataclass(frozen=True)
class Reuse:
    """Reuse of a trace's prompts, whatever cache it meets.

    A unit is what hits grow by: so many tokens at a multiple of them, known by the whole prefix that they end. Requests
    that are too long are left out; the others are numbered in order.

    Attributes:
      unit: tokens of a unit.
      requests: int64[n], the requests' numbers in the trace.
      prompts: int64[n], tokens of each prompt.
      lengths: int64[n], tokens of each prompt and its output.
      free: int64[n], units of each prompt that an earlier request generated: no cache need have kept them.
      spans: int64[m, 3], units that can be hits: the last earlier request whose prompt had them, the request that has
        them again, and how many these are; in order of the second.
    """

    unit: int
    requests: np.ndarray
    prompts: np.ndarray
    lengths: np.ndarray
    free: np.ndarray
    spans: np.ndarray


def reuse(trace: InternedTrace, units: HitUnits, max_model_len: int) -> Reuse:
    """Finds the reuse of a trace's prompts."""
    keys, seen = trace.keys(units.block, max_model_len), trace.shared(max_model_len)[0]
    lengths = np.array([each.input_length + each.output_length for each in trace.requests], np.int64)
    prompts = np.array([each.input_length for each in trace.requests], np.int64)
    served = np.flatnonzero(lengths <= max_model_len)
    lengths, prompts = lengths[served], prompts[served]
    most = units.boundaries(prompts, seen[served])[-1] // units.unit
    brought = np.full(keys.keys.max(initial=0) + 1, -1, np.int32)
    generated = np.zeros(len(brought), bool)
    free, spans, per_unit = np.zeros(len(served), np.int64), [], units.unit // units.block
    for place, index in enumerate(served.tolist()):
        named = keys.of(index)[per_unit - 1 :: per_unit]
        whole = prompts[place] // units.unit
        again = named[: most[place]]
        paid = ~generated[again]
        free[place] = len(again) - paid.sum()
        last = brought[again[paid]]
        ends = np.flatnonzero(np.diff(last, append=-2))
        for count, end in zip(np.diff(ends, prepend=-1).tolist(), ends.tolist(), strict=True):
            if last[end] >= 0:
                spans.append((int(last[end]), place, count))
        brought[named[:whole]] = place
        generated[named[whole:]] = True
    return Reuse(units.unit, served, prompts, lengths, free, np.array(spans, np.int64).reshape(-1, 3))
