"""The order in which a connector gives the bytes of a block: a set of ranges may be right, and its payload wrong.

What a connector stores of one block it loads into another, of this cache or of one that lies otherwise. So the bytes of
a layer's blocks have to come in one order, and keys before values, the first state (convolution) before the second
(SSM), as every layout has them. Any order within these is the connector's own affair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from hkv.connectors.cases import MemoryCase
from hkv.connectors.memory import Range

Ranges = tuple[Range, ...]


def disorder(case: MemoryCase, answers: Iterable[tuple[int, int, Ranges]]) -> tuple[int, int, Ranges, str] | None:
    """The first of some right answers about a case whose bytes come in a wrong order, and that in words."""
    orders: dict[int, tuple[int, list[Range]]] = {}
    for layer, block, given in answers:
        if exchanged := _exchanged(case.parts(layer, block), given):
            return layer, block, given, exchanged
        order = _order(case.data(layer, block), given)
        first, of_first = orders.setdefault(layer, (block, order))
        if order != of_first and len(case.data(layer, block)) == len(case.data(layer, first)):
            told = f"bytes of block {block} come in another order than those of block {first}"
            return layer, block, given, f"{told}: what is stored of one is loaded into the other as something else"
    return None


def _order(data: Sequence[Range], given: Ranges) -> list[Range]:
    """The bytes given, in their order, as parts of the runs of a block's data: index of the run, first byte, bytes."""
    found: list[Range] = []
    for at, run, piece in _shared(data, given):
        first = piece.first - run.first
        if found and (found[-1].buffer, found[-1].first + found[-1].size) == (at, first):
            found[-1] = Range(at, found[-1].first, found[-1].size + piece.size)
        else:
            found.append(Range(at, first, piece.size))
    return found


def _shared(data: Sequence[Range], given: Ranges) -> Iterator[tuple[int, Range, Range]]:
    """Pieces of what was given that lie in runs of the data, in the order given: index of the run, run, piece."""
    for each in given:
        for at, run in enumerate(data):
            first, end = max(run.first, each.first), min(run.first + run.size, each.first + each.size)
            if run.buffer == each.buffer and first < end:
                yield at, run, Range(run.buffer, first, end - first)


def _exchanged(parts: Sequence[tuple[str, Ranges]], given: Ranges) -> str:
    """Two parts of a block that come in the other order, in words; empty where none do."""
    begins = [(name, _begin(ranges, given)) for name, ranges in parts]
    for (name, first), (other, second) in itertools.pairwise(begins):
        if second < first:
            return f"{other} bytes come before {name} bytes: whoever loads them by another layout has them exchanged"
    return ""


def _begin(part: Ranges, given: Ranges) -> int:
    """Bytes that are given before the first one of a part."""
    position = 0
    for each in given:
        if found := [piece.first for _, _, piece in _shared(part, (each,))]:
            return position + min(found) - each.first
        position += each.size
    return position
