"""From a difference of two engines to the invariant that the engine in doubt breaks, on a small case."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from hkv.contract import registry
from hkv.contract.case import Case
from hkv.oracle.broken_invariant import Broken, on_its_own
from hkv.oracle.record import Only, draw
from hkv.oracle.shrink import Shrinker

FURTHER_SEEDS = 8
"""Seeds whose traffic an engine in doubt is given, from the one on which it differs, until it breaks an invariant."""

READABLE = 12
"""Operations of a case that is small enough to read; for larger ones a few other seeds' are made small as well."""

OTHERS = 3
"""Cases of other seeds that are made small where the first one stays long."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A case, and what is broken on it.

    Attributes:
      case: operations up to the one that is answered differently, or on to the broken invariant.
      broken: the first invariant that the engine in doubt breaks, or why none is known, in words.
    """

    case: Case
    seed: int
    broken: Broken | str


@dataclasses.dataclass(frozen=True)
class SeedTraffic:
    """Seeds of one feature.

    Attributes:
      bugs: whether upstream defects are asked for, besides those that configurations name: they break some invariants,
        of which no case is kept that the right engine breaks too.
      further: seeds whose traffic an engine in doubt is given, until it breaks an invariant.
    """

    feature: str
    only: Only
    version: Callable[[int], int]
    steps: int
    bugs: bool
    further: int = FURTHER_SEEDS


def diagnosed(shrinker: Shrinker, found: Diagnosis, traffic: SeedTraffic) -> Diagnosis:
    """The case up to the first invariant that the engine in doubt breaks, which the shrinker keeps from now on.

    A wrong answer need not break an invariant by itself. The engine then runs on, with the traffic of this seed and of
    the next ones, on its own answers. Where none breaks any, what was found is returned, with how far none did.
    """
    case, said = shrinker.diagnosed(found.case, found.case.operations)
    if isinstance(said, Broken) or not registry.dialect_of(case.header.dialect).invariants:
        return Diagnosis(case, found.seed, said)
    for later, header, operations, broken in _alone(shrinker, found.seed, traffic):
        if isinstance(broken, Broken):
            longer, broken = shrinker.diagnosed(case, operations, header)
            if isinstance(broken, Broken):
                return Diagnosis(longer, later, broken)
        elif later == found.seed:
            said = broken
    return Diagnosis(case, found.seed, said)


def smaller(
    shrinker: Shrinker, found: Diagnosis, traffic: SeedTraffic, shrink: Callable[[Shrinker, Case], Case]
) -> Diagnosis:
    """A case that is small already; while it is a long one, the smallest of those that the next seeds' are made to."""
    keeps, best, left = shrinker.keeps, found, OTHERS
    if keeps is None or len(best.case.operations) <= READABLE:
        return best
    for later, header, operations, broken in _alone(shrinker, found.seed + 1, traffic):
        if not isinstance(broken, Broken) or broken.name != keeps:
            continue
        case, said = shrinker.diagnosed(found.case, operations, header)
        shrinker.keeps, left = keeps, left - 1
        if isinstance(said, Broken) and said.name == keeps:
            other = Diagnosis(shrink(shrinker, case), later, said)
            best = min(best, other, key=lambda diagnosis: diagnosis.case.size)
        if not left or len(best.case.operations) <= READABLE:
            break
    return best


def _alone(
    shrinker: Shrinker, first: int, traffic: SeedTraffic
) -> Iterator[tuple[int, Any, tuple[Any, ...], Broken | str]]:
    """Seeds, their configurations, and how far the engine in doubt gets with each on its own answers."""
    for seed in range(first, first + traffic.further):
        header, choices = draw(traffic.feature, seed, traffic.version(seed), traffic.only)
        if traffic.bugs:
            continue
        drive = registry.dialect_of(header.dialect).drive
        run = functools.partial(drive, header, choices, steps=2 * traffic.steps)
        yield seed, header, *on_its_own(shrinker.tested, header, run)
