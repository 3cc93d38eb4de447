"""Judging a mutant: its suite runs example after example with the mutant alone, until an invariant breaks."""

from __future__ import annotations

import dataclasses
import time

from hkv.errors import MissingExtraError
from hkv.testing.mutants.mutant import Mutant
from hkv.testing.mutants.patch import applied
from hkv.testing.suites import SUITES
from hkv.testing.suites.suite import TOTALITY, Failure, Suite

SEEDS = 300
"""Examples of traffic before a mutant counts as a survivor; of other suites, `Suite.pace` times as many."""

PATIENCE = 40
"""Further examples after one in which a legal operation failed, to find an invariant that says more."""


SMALL = 12
"""Operations of a case that is small enough to read; for larger ones other examples are shrunk as well."""

OTHERS = 60
"""Further examples among which a smaller case is looked for; of other suites, `Suite.pace` times as many."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a mutant.

    Attributes:
      mutant: the mutant.
      invariant: the invariant that caught it, or None for a survivor.
      problem: what it said.
      examples: examples run up to and with the one that showed it.
      seconds: to the kill, shrinking not counted.
      size: operations of the shrunk case.
      lines: the shrunk case.
    """

    mutant: Mutant
    invariant: str | None
    problem: str
    examples: int
    seconds: float
    size: int
    lines: tuple[str, ...]

    @property
    def killed(self) -> bool:
        """Whether an invariant broke."""
        return self.invariant is not None


def judge(mutant: Mutant, seeds: int = SEEDS, first_seed: int = 0, shrink: bool = True) -> Verdict:
    """Runs a mutant's suite until an invariant breaks; the code without the mutant is never asked.

    Where a legal operation fails, a few further examples are tried for a better reason. A mutant that fails on the
    first operation of every example is a survivor: it shows nothing.

    Args:
      mutant: the mutant.
      seeds: most examples.
      first_seed: number of the first example.
      shrink: whether to make the case smaller.

    Raises:
      MissingExtraError: the suite needs a package that is not installed.
    """
    suite = SUITES[mutant.suite]
    start = time.perf_counter()
    found: tuple[int, Failure] | None = None
    examples, patience, seconds = 0, seeds * suite.pace, 0.0
    with applied(*mutant.patches):
        for seed in range(first_seed, first_seed + seeds * suite.pace):
            examples += 1
            try:
                failure = suite.run(seed, mutant.topics)
            except MissingExtraError:
                raise  # nothing was tried, so that nothing survived
            except Exception:
                failure = None
            if failure is not None and found is None:
                found, seconds = (seed, failure), time.perf_counter() - start
                if failure.invariant != TOTALITY:
                    break
                patience = examples + PATIENCE
            elif failure is not None and failure.invariant != TOTALITY:
                found, seconds = (seed, failure), time.perf_counter() - start
                break
            if examples >= patience:
                break
        if found is None:
            return Verdict(mutant, None, "", examples, time.perf_counter() - start, 0, ())
        seed, failure = found
        if shrink:
            failure = _smallest(suite, mutant, seed, failure)
    return Verdict(mutant, failure.invariant, failure.problem, examples, seconds, failure.size, failure.lines)


def _smallest(suite: Suite, mutant: Mutant, seed: int, failure: Failure) -> Failure:
    """The shrunk case; while it is a long one, the shortest of those that later examples shrink to."""
    best = suite.shrink(seed, failure, mutant.topics)
    for later in range(seed + 1, seed + 1 + OTHERS * suite.pace):
        if best.size <= SMALL:
            break
        try:
            other = suite.run(later, mutant.topics)
        except Exception:
            continue
        if other is not None and other.invariant == failure.invariant:
            shrunk = suite.shrink(later, other, mutant.topics)
            best = min(best, shrunk, key=lambda found: found.size)
    return best
