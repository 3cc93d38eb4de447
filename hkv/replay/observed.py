"""Observations of a cache: ends of hits, what each group lacks further on, and blocks over time.

Boundaries that no hit can pass follow from the trace and the cache's units; a replay tells those that it finds to
another one. Blocks are counted at the ends of some steps, as many as a plot can show: the counting looks at all.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

NOTHING = "nothing to find"
HAD = "had it"
NEVER_SEEN = "never seen"
UNFINISHED = "not finished"
EVICTED = "evicted"
RETIRED = "retired window"
NOT_RETAINED = "not retained"
NOT_SHARED = "never shared"
CACHING_OFF = "caching is off"

COMPLETE = frozenset((NOTHING, HAD, NOT_SHARED, CACHING_OFF))
"""Reasons of groups that lack nothing, or that nobody asks."""

NOT_COMPUTED = frozenset((NEVER_SEEN, UNFINISHED))
"""Reasons of groups whose blocks nobody has computed to the end."""


class MissReason(NamedTuple):
    """State of the blocks that one group needs at a boundary.

    Attributes:
      reason: `HAD` where all are there; else the reason why one of them is not, among the dialect's names.
      evicted: the step with work in which that block was evicted, the first being 2; 0 if it was not, or is unknown.
      taker: the group that got it, or -1.
    """

    reason: str
    evicted: int = 0
    taker: int = -1


class HitReasons(Protocol):
    """Reasons why groups cannot extend a hit."""

    def miss_reasons(self, keys: Sequence[int], hit: int, asked: int) -> tuple[int, list[MissReason]]:
        """State of each group's blocks, for a request that is about to be allocated its own.

        Returns:
          The furthest boundary up to `asked` whose blocks have been computed by anybody; and, one a group, what it
          lacks there, `NOTHING` where nothing was asked.
        """
        ...


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


Found = TypeVar("Found")


class Boundaries(Generic[Found]):
    """Hits of a replay in a thread of its own, for another one that asks up to them why its hits ended.

    Requests are first admitted in the order of the trace, so that hits become known in that order, too. The thread
    ends with the process: an interrupt need not wait for it.

    Attributes:
      hits: int64[requests], tokens that were found for each; only those of known requests are final.
    """

    def __init__(self, requests: int) -> None:
        self.hits = np.zeros(requests, np.int64)
        self._known = 0
        self._news = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._found: Found | None = None

    def begin(self, work: Callable[[], Found]) -> None:
        """Begins the replay; `work` tells as it goes on, and returns what `found` returns."""

        def run() -> None:
            try:
                self._found = work()
            except BaseException as error:  # raised again where somebody waits
                self._error = error
            with self._news:
                self._ended = True
                self._news.notify_all()

        threading.Thread(target=run, name="hkv-boundaries", daemon=True).start()

    def tell(self, hits: np.ndarray, known: int) -> None:
        """The hits of the first `known` requests are final."""
        with self._news:
            self.hits[:known] = hits[:known]
            self._known = known
            self._news.notify_all()

    def known(self, enough: Callable[[int], bool]) -> int:
        """Number of known requests, once that is enough, or all there will be."""
        with self._news:
            self._news.wait_for(lambda: self._ended or enough(self._known))
            if self._error is not None:
                raise self._error
            return len(self.hits) if self._ended else self._known

    def found(self) -> Found:
        """The replay, once it ended."""
        self.known(lambda _: False)
        assert self._found is not None
        return self._found


# Blocks over time, by group: held by requests, cached, and evictable: cached, but held by no request.

MOST = 256
"""Samples of a replay, at most; when it turns out to be longer, every second one goes, down to half as many."""


class OccupancyKind(enum.IntEnum):
    """First axis of `Occupancy.blocks`. Blocks that are held may be cached too."""

    HELD = 0
    CACHED = 1
    EVICTABLE = 2


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Blocks of each group at the ends of some steps.

    Attributes:
      steps: int64[n], the steps' numbers, rising.
      blocks: int64[3, groups, n], by `OccupancyKind`; what is neither held nor evictable is empty.
    """

    steps: np.ndarray
    blocks: np.ndarray

    def columns(self) -> dict[str, np.ndarray]:
        """`step`, and `held_0`, `cached_0`, `evictable_0` of the first group, and so on."""
        found = {"step": self.steps}
        for group in range(self.blocks.shape[1]):
            found |= {f"{kind.name.lower()}_{group}": self.blocks[kind, group] for kind in OccupancyKind}
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
