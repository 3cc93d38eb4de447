"""Holds a compiled replay against the plain schedule: the same blocks in the same order, and the same records."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hkv.dialects.vllm.engines.engine import KeyedEngine
from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, Hit
from hkv.replay.difference import Difference, compare


class CopyingEngine(KeyedEngine, Protocol):
    """An engine that can be asked which copies are to be made."""

    def pending_copies(self) -> list[list[tuple[int, int]]]:
        """Copies that `copies` would drain, (source, target), a list a group."""
        ...


class ComparedEngine:
    """A `KeyedEngine` that compares every block it finds or hands out with those that a compiled replay reported.

    Args:
      engine: an empty engine.
      ids: block ids that the compiled replay reported: for each lookup and allocation, group after group; null blocks
        before a hit are left out, and before those of an allocation come the copies it asks for: group, block, copy.
      names: of the compiled engine and of this one.
    """

    def __init__(self, engine: CopyingEngine, ids: np.ndarray, names: tuple[str, str]) -> None:
        self._engine = engine
        self._ids = ids
        self._names = names
        self._place = 0
        self._number = 0

    def lookup(self, id: str) -> Hit:
        """Hit that the engine finds, compared."""
        hit = self._engine.lookup(id)
        rows = [row[next((i for i, block in enumerate(row) if block), len(row)) :] for row in hit.blocks]
        self._compare("lookup", id, rows if hit.hit else [])
        return hit

    def allocate(self, operation: AllocateOp) -> Allocation:
        """Allocation that the engine makes, compared."""
        before = [len(copies) for copies in self._engine.pending_copies()]
        allocation = self._engine.allocate(operation)
        after = self._engine.pending_copies()
        new = [(group, *copy) for group, copies in enumerate(after) for copy in copies[before[group] :]]
        rows = [list(row) for row in allocation.blocks or []]
        if operation.hit:
            for group, _, _ in new:
                del rows[group][0]
        self._compare("allocate", operation.id, [*new, *rows])
        return allocation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _compare(self, operation: str, request: str, rows: Sequence[Sequence[int]]) -> None:
        self._number += 1
        blocks = [block for row in rows for block in row]
        end = self._place + len(blocks)
        theirs = self._ids[self._place : end].tolist()
        if theirs != blocks:
            answers: dict[str, object] = dict(zip(self._names, (theirs, blocks), strict=True))
            raise Difference(self._number, operation, request, "blocks", answers)
        self._place = end

    def check_all_compared(self) -> None:
        """Raises where the compiled replay reported more.

        Raises:
          Difference: some ids are left.
        """
        if self._place != len(self._ids):
            answers: dict[str, object] = dict(zip(self._names, (len(self._ids), self._place), strict=True))
            raise Difference(self._number, "replay", "", "number of blocks", answers)


def compare_queues(mine: Sequence[int], other: Sequence[int], names: tuple[str, str]) -> None:
    """Compares two free queues.

    Raises:
      Difference: names the first place where they differ.
    """
    for place, blocks in enumerate(itertools.zip_longest(mine, other)):
        compare(f"place {place} of the free queue at the end", *blocks, names)
