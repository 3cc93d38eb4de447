"""Two engines side by side: an engine that performs everything twice and stops at the first difference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from hkv.dialects.vllm.engines.engine import KeyedEngine
from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, CacheEvent, CacheState, ExtraKeys, Hit
from hkv.replay.plain import Difference, compare

Value = TypeVar("Value")


class LockstepEngine:
    """A `KeyedEngine` that performs every operation on two engines.

    Compared: hits and their blocks, the blocks of every allocation, refusals, free blocks, copies, resets, state.
    Answers are the first engine's, as is every attribute that is not an operation.
    """

    def __init__(self, engine: KeyedEngine, reference: KeyedEngine, names: tuple[str, str]) -> None:
        self._engine = engine
        self._reference = reference
        self._names = names
        self._number = 0

    def step(self) -> None:
        self._number += 1
        self._engine.step()
        self._reference.step()

    def request(self, id: str, tokens: Sequence[int], extra: ExtraKeys | None) -> None:
        self._number += 1
        self._engine.request(id, tokens, extra)
        self._reference.request(id, tokens, extra)

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int]) -> None:
        self._number += 1
        self._engine.request_keyed(id, num_tokens, keys)
        self._reference.request_keyed(id, num_tokens, keys)

    def lookup(self, id: str) -> Hit:
        mine, other = self._engine.lookup(id), self._reference.lookup(id)
        self._number += 1
        for field in ("hit", "blocks", "shared_prefix"):
            self._same("lookup", id, field, getattr(mine, field), getattr(other, field))
        return mine

    def allocate(self, operation: AllocateOp) -> Allocation:
        mine, other = self._engine.allocate(operation), self._reference.allocate(operation)
        self._number += 1
        self._same("allocate", operation.id, "refused", mine.blocks is None, other.blocks is None)
        self._same("allocate", operation.id, "blocks", mine.blocks, other.blocks)
        return mine

    def advance(self, id: str, tokens: int) -> None:
        self._number += 1
        self._engine.advance(id, tokens)
        self._reference.advance(id, tokens)

    def append(self, id: str, tokens: Sequence[int]) -> None:
        self._number += 1
        self._engine.append(id, tokens)
        self._reference.append(id, tokens)

    def extend(self, id: str, tokens: int) -> None:
        self._number += 1
        self._engine.extend(id, tokens)
        self._reference.extend(id, tokens)

    def commit(self, id: str, tokens: int) -> None:
        self._number += 1
        self._engine.commit(id, tokens)
        self._reference.commit(id, tokens)

    def free(self, id: str) -> None:
        self._number += 1
        self._engine.free(id)
        self._reference.free(id)
        self._same("free", id, "free blocks", self._engine.num_free(), self._reference.num_free())

    def drop(self, id: str) -> None:
        self._number += 1
        self._engine.drop(id)
        self._reference.drop(id)

    def evict(self, blocks: Sequence[int]) -> None:
        self._number += 1
        self._engine.evict(blocks)
        self._reference.evict(blocks)

    def copies(self) -> list[tuple[int, int]]:
        self._number += 1
        return self._same("copies", "", "copies", self._engine.copies(), self._reference.copies())

    def reset(self) -> bool:
        self._number += 1
        return self._same("reset", "", "ok", self._engine.reset(), self._reference.reset())

    def events(self) -> list[CacheEvent]:
        self._number += 1
        self._reference.events()
        return self._engine.events()

    def state(self) -> CacheState:
        self._number += 1
        mine, other = self._engine.state(), self._reference.state()
        for field in ("free", "refs", "rows"):
            self._same("state", "", field, getattr(mine, field), getattr(other, field))
        return mine

    def num_free(self) -> int:
        self._number += 1
        return self._same("num_free", "", "free blocks", self._engine.num_free(), self._reference.num_free())

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def _same(self, operation: str, request: str, field: str, mine: Value, other: Value) -> Value:
        if mine != other:
            answers: dict[str, object] = dict(zip(self._names, (mine, other), strict=True))
            raise Difference(self._number, operation, request, field, answers)
        return mine


# Holds a compiled replay against the plain schedule: the same blocks in the same order, and the same records.


class CopyingEngine(KeyedEngine, Protocol):
    """An engine that can be asked which copies are to be made."""

    def pending_copies(self) -> list[list[tuple[int, int]]]:
        """Copies that `copies` would drain, (source, target), a list a group."""


class ComparedEngine:
    """A `KeyedEngine` that compares every block it finds or hands out with those that a compiled replay reported.

    `ids`: for each lookup and allocation, group after group; null blocks before a hit are left out, and before those of
    an allocation come the copies it asks for: group, block, copy.
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
        """Raises where the compiled replay reported more."""
        if self._place != len(self._ids):
            answers: dict[str, object] = dict(zip(self._names, (len(self._ids), self._place), strict=True))
            raise Difference(self._number, "replay", "", "number of blocks", answers)


def compare_queues(mine: Sequence[int], other: Sequence[int], names: tuple[str, str]) -> None:
    """Compares two free queues."""
    for place, blocks in enumerate(itertools.zip_longest(mine, other)):
        compare(f"place {place} of the free queue at the end", *blocks, names)
