"""Failing cases, and the ways of making one smaller that know no dialect's rules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from hkv.contract import registry
from hkv.contract.case import Best, Candidates, LifecycleRepair, ShrinkRules
from hkv.errors import HKVError


def shrink_rules(header: Any) -> ShrinkRules:
    """Rules of a header's dialect; where it has none, fewer operations, shorter lists, fewer blocks."""
    dialect = registry.dialect_of(header.dialect)
    return dialect.shrink_rules or ShrinkRules(
        lambda header: LifecycleRepair(dialect.lifecycle(header)),
        headers=fewer_blocks,
        check=dialect.log.check,
        operations=shorter_lists,
    )


def without_requests(best: Best) -> Candidates:
    """One request less."""
    for id in dict.fromkeys(getattr(operation, "id", None) for operation in best.case.operations):
        if id is not None:
            yield best.case.header, [other for other in best.case.operations if getattr(other, "id", None) != id]


def without_runs(best: Best) -> Candidates:
    """A run of operations less: half of them, then quarters, down to one; from the end, on which nothing depends."""
    size = len(best.case.operations) // 2
    while size:
        start = len(best.case.operations) - size
        while start >= 0:
            operations = list(best.case.operations)
            yield best.case.header, operations[:start] + operations[start + size :]
            start = min(start, len(best.case.operations)) - size
        size //= 2


def legal_headers(rules: ShrinkRules, header: Any) -> Iterator[Any]:
    """The configurations smaller than one that the dialect allows."""
    for smaller in rules.headers(header):
        with contextlib.suppress(HKVError):
            rules.check(smaller)
            yield smaller


def smaller_header(best: Best, rules: ShrinkRules) -> Candidates:
    """A smaller configuration; once one is taken, what is smaller than that.

    Args:
      best: the case.
      rules: rules of the dialect, which give smaller headers.
    """
    taken = True
    while taken:
        asked, taken = best.case.header, False
        for header in legal_headers(rules, asked):
            yield header, list(best.case.operations)
            taken = best.case.header != asked
            if taken:
                break


def one_simpler(best: Best, simpler: Callable[[Any, Any], Iterator[tuple[Any, Any]]]) -> Candidates:
    """One operation simpler, and maybe the header with it, place after place.

    A candidate that is taken changes the operation, or leaves it out, and what `simpler` said of it is void: the
    operation that stands at the place afterwards is asked about anew.

    Args:
      best: the case.
      simpler: of a header and an operation, what may stand in their place.
    """
    place = 0
    while place < len(best.case.operations):
        asked = best.case.header, best.case.operations[place]
        for header, operation in simpler(*asked):
            operations = best.case.operations
            yield header, [*operations[:place], operation, *operations[place + 1 :]]
            if place >= len(best.case.operations) or (best.case.header, best.case.operations[place]) != asked:
                break
        else:
            place += 1


def shorter_lists(operation: Any) -> Iterator[Any]:
    """The operation with a list of numbers halved, then one shorter, then with a number of it halved; never empty."""
    for name in operation.__struct_fields__:
        value = getattr(operation, name)
        if name == "want" or not isinstance(value, list) or not all(type(item) is int for item in value):
            continue
        for length in dict.fromkeys((len(value) // 2, len(value) - 1)):
            if length:
                yield msgspec.structs.replace(operation, **{name: value[:length]})
        for index, item in enumerate(value):
            for smaller in dict.fromkeys((0, item // 2)) if item > 0 else ():
                yield msgspec.structs.replace(operation, **{name: [*value[:index], smaller, *value[index + 1 :]]})


def fewer_blocks(header: Any) -> Iterator[Any]:
    """The configuration with half as many blocks in a pool, and with one less."""
    blocks = header.num_blocks
    pools = blocks if isinstance(blocks, list) else [blocks]
    for place, count in enumerate(pools):
        for fewer in dict.fromkeys((count // 2, count - 1)):
            changed = [*pools[:place], fewer, *pools[place + 1 :]]
            yield msgspec.structs.replace(header, num_blocks=changed if isinstance(blocks, list) else fewer)
