"""Judging a mutant by a suite, which runs example after example with the mutant alone, until an invariant breaks."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hkv.contract import registry
from hkv.contract.log import describe
from hkv.errors import MissingExtraError
from hkv.oracle.comparison import Comparison
from hkv.oracle.found_difference import FoundDifference
from hkv.oracle.record import Only
from hkv.testing.planting import applied
from tests.mutants.row import Planted, Verdict
from tests.suites import SUITES
from tests.suites.suite import TOTALITY, Failure, Suite

SEEDS = 300
"""Examples of traffic before a mutant counts as a survivor; of other suites, `Suite.pace` times as many."""

PATIENCE = 40
"""Further examples after one in which a legal operation failed, to find an invariant that says more."""


SMALL = 12
"""Operations of a case that is small enough to read; for larger ones other examples are shrunk as well."""

OTHERS = 60
"""Further examples among which a smaller case is looked for; of other suites, `Suite.pace` times as many."""


def judge(mutant: Planted, seeds: int = SEEDS, first_seed: int = 0, shrink: bool = True) -> Verdict:
    """Runs a mutant's suite until an invariant breaks; the code without the mutant is never asked.

    Where a legal operation fails, a few further examples are tried for a better reason. A mutant that fails on the
    first operation of every example is a survivor: it shows nothing.
    """
    suite, topics = SUITES[mutant.judge], mutant.arguments
    start = time.perf_counter()
    found: tuple[int, Failure] | None = None
    examples, patience, seconds = 0, seeds * suite.pace, 0.0
    with applied(*mutant.edits):
        for seed in range(first_seed, first_seed + seeds * suite.pace):
            examples += 1
            try:
                failure = suite.run(seed, topics)
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
            return Verdict(mutant, "lives", None, "", time.perf_counter() - start, examples, 0)
        seed, failure = found
        if shrink:
            failure = _smallest(suite, topics, seed, failure)
    return Verdict(mutant, "killed", failure.invariant, failure.problem, seconds, examples, failure.size, failure.lines)


def _smallest(suite: Suite, topics: Sequence[str], seed: int, failure: Failure) -> Failure:
    """The shrunk case; while it is a long one, the shortest of those that later examples shrink to."""
    best = suite.shrink(seed, failure, topics)
    for later in range(seed + 1, seed + 1 + OTHERS * suite.pace):
        if best.size <= SMALL:
            break
        try:
            other = suite.run(later, topics)
        except Exception:
            continue
        if other is not None and other.invariant == failure.invariant:
            shrunk = suite.shrink(later, other, topics)
            best = min(best, shrunk, key=lambda found: found.size)
    return best


DIFF_SEEDS = 50
"""Seeds of each feature, as `hkv diff` has it by default."""


def judge_by_diff(mutant: Planted, seeds: int = DIFF_SEEDS, first_seed: int = 0) -> Verdict:
    """Plants a defect, compares the engines until they differ, and holds the report to the cause.

    Seeds are counted in the order in which `hkv diff` compares them, feature after feature.
    """
    start, compared = time.perf_counter(), 0
    names = next(each.names for each in registry.dialects() if mutant.section in each.engines)
    pair = ("numpy", mutant.section)
    comparisons = [Comparison(pair, Only(dialect=name), *mutant.arguments) for name in names]
    for comparison in comparisons:
        comparison.require(comparison.features[:1])  # the package is imported as its engine has it imported
    with applied(*mutant.edits):
        for comparison in comparisons:
            for feature in comparison.features:
                for seed in range(first_seed, first_seed + seeds):
                    compared += 1
                    if comparison.seed(feature, seed):
                        seconds = time.perf_counter() - start
                        return _diff_verdict(mutant, next(comparison.differences(shrink=True)), seconds, compared)
    return Verdict(mutant, "lives", None, "", time.perf_counter() - start, compared, 0)


def _diff_verdict(mutant: Planted, found: FoundDifference, seconds: float, compared: int) -> Verdict:
    size = len(found.case.operations)
    named = size <= SMALL and any(name in found.headline for name in mutant.expected)
    lines = tuple(describe(operation) for operation in found.case.operations)
    outcome = "killed" if named else "misread"
    return Verdict(mutant, outcome, found.invariant, found.headline, seconds, compared, size, lines)
