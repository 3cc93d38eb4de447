"""Few combinations that hold every pair, or every few, of the values that several factors can take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
"""A value of each factor, by its name."""

Part = tuple[tuple[str, int], ...]
"""Values of some factors: names, and the place of each value among its factor's."""


def covering(factors: Mapping[str, Sequence[Any]], strength: int, allowed: Callable[[Row], bool]) -> list[Row]:
    """Combinations such that any `strength` factors take, in one of them, every values they take in any allowed one.

    Greedy: each time the combination that brings most that is new, the first of those. As many factors as there are
    give the whole product.

    Args:
      factors: the values of each.
      strength: at least 1.
      allowed: which combinations there are.
    """
    rows = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    candidates = [(row, frozenset(parts_of(factors, row, strength))) for row in rows if allowed(row)]
    if strength >= len(factors):
        return [row for row, _ in candidates]
    missing = set().union(*(parts for _, parts in candidates))
    found: list[Row] = []
    while missing:
        row, parts = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        found.append(row)
        missing -= parts
    return found


def parts_of(factors: Mapping[str, Sequence[Any]], row: Row, strength: int) -> Iterator[Part]:
    """Every choice of `strength` factors with their values in a combination."""
    places = [(name, list(values).index(row[name])) for name, values in factors.items()]
    return itertools.combinations(places, min(strength, len(places)))
