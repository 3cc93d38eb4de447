"""Engines under vLLM 0.33's rules held against each other: side by side, or one after a compiled replay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, Hit
from hkv.replay.plain import Compared, Lockstep, Part, compare


class LockstepEngine(Lockstep):
    """Two `KeyedEngine`s side by side.

    Compared: hits and their blocks, the blocks of every allocation, refusals, free blocks, copies, resets, state.
    """

    operations = (
        *("step", "request", "request_keyed", "lookup", "allocate", "advance", "append", "extend", "commit", "free"),
        *("drop", "evict", "copies", "reset", "events", "state", "num_free"),
    )

    def _parts(self, name: str, arguments: tuple[Any, ...], mine: Any, other: Any) -> Iterator[Part]:
        fields = {"lookup": ("hit", "blocks", "shared_prefix"), "state": ("free", "refs", "rows")}.get(name, ())
        for field in fields:
            yield name, arguments[0] if arguments else "", field, getattr(mine, field), getattr(other, field)
        if name == "allocate":
            yield name, arguments[0].id, "refused", mine.blocks is None, other.blocks is None
            yield name, arguments[0].id, "blocks", mine.blocks, other.blocks
        elif name == "free":
            yield name, arguments[0], "free blocks", self._engine.num_free(), self._reference.num_free()
        elif name in WHOLE:
            yield name, "", WHOLE[name], mine, other


WHOLE = {"copies": "copies", "reset": "ok", "num_free": "free blocks"}
"""Operations whose whole answer is compared, and what it is called."""


# Holds a compiled replay against the plain schedule: the same blocks in the same order, and the same records.


class ComparedEngine(Compared):
    """A `KeyedEngine` that compares every block it finds or hands out with those that a compiled replay reported.

    `ids`: for each lookup and allocation, group after group; null blocks before a hit are left out, and before those of
    an allocation come the copies it asks for: group, block, copy. The engine says which copies are pending.
    """

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

    def _compare(self, operation: str, request: str, rows: Sequence[Sequence[int]]) -> None:
        self._number += 1
        blocks = [block for row in rows for block in row]
        theirs = self._read(len(blocks))
        if theirs != blocks:
            raise self._differ(operation, request, "blocks", theirs, blocks)


def compare_queues(mine: Sequence[int], other: Sequence[int], names: tuple[str, str]) -> None:
    """Compares two free queues."""
    for place, blocks in enumerate(itertools.zip_longest(mine, other)):
        compare(f"place {place} of the free queue at the end", *blocks, names)
