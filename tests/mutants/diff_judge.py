"""Judging a defect planted in an installed engine by `hkv diff` with its default settings, but for a row's version."""

from __future__ import annotations

import time

from hkv.contract.log import describe
from hkv.oracle.comparison import Comparison, FoundDifference
from hkv.oracle.record import ALL
from hkv.testing.planting import applied
from tests.mutants.row import Planted
from tests.mutants.suite_judge import SMALL
from tests.mutants.verdict import Verdict

ENGINES = ("numpy", "vllm")
"""As README names them; defects are planted in the second, which is in doubt in either order."""

SEEDS = 50
"""Seeds of each feature, as `hkv diff` has it by default."""


def judge(mutant: Planted, seeds: int = SEEDS, first_seed: int = 0) -> Verdict:
    """Plants a defect, compares the engines until they differ, and holds the report to the cause.

    Seeds are counted in the order in which `hkv diff` compares them, feature after feature.
    """
    start, compared = time.perf_counter(), 0
    comparison = Comparison(ENGINES, ALL, *mutant.arguments)
    with applied(*mutant.edits):
        for feature in comparison.features:
            for seed in range(first_seed, first_seed + seeds):
                compared += 1
                if comparison.seed(feature, seed):
                    seconds = time.perf_counter() - start
                    return _verdict(mutant, next(comparison.differences(shrink=True)), seconds, compared)
    return Verdict(mutant, "lives", None, "", time.perf_counter() - start, compared, 0)


def _verdict(mutant: Planted, found: FoundDifference, seconds: float, compared: int) -> Verdict:
    size = len(found.case.operations)
    named = size <= SMALL and any(name in found.headline for name in mutant.expected)
    lines = tuple(describe(operation) for operation in found.case.operations)
    outcome = "killed" if named else "misread"
    return Verdict(mutant, outcome, found.invariant, found.headline, seconds, compared, size, lines)
