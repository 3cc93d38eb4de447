"""One side of a page: what an engine answered, or a log says, and how each block changed.

A side is asked for its `state` now and then, and a dialect's snapshot of it (`Dialect.snapshot`) says of every block
its holders and what it is cached as. Kept are changes alone: columns of (operation, block, status, holders, key), from
which the page rebuilds any moment. What is old can be forgotten, so that a side can follow an engine for as long as it
runs; how the blocks were then is what the rest begins with.
"""

from __future__ import annotations

import bisect
import collections
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from hkv.contract import registry
from hkv.contract.answer import Failure
from hkv.contract.dialect import Dialect
from hkv.contract.log import Log
from hkv.contract.snapshot import Snapshot
from hkv.errors import UnsupportedConfigError
from hkv.oracle.check import Difference, Performing
from hkv.oracle.engine import answers, attempt

LOOKED_AT = 2_000_000
"""Most blocks that all looks at one engine amount to; of more operations and blocks, only some are followed by one."""

QUEUED = 3_000_000
"""Most entries of free queues that are kept, over all looks; beyond, the order of the queue is not."""

LONGEST = 2_000
"""Characters of an answer that are kept where operations are many."""

MANY = 5_000
"""Operations from which long answers are cut."""

FREE, HELD, CACHED = 1, 2, 4
"""Bits of a block's status: in a free list, held by somebody, under a key. None of them: lost to everybody."""

_PLAIN = (FREE, -1, -1, -1, 0, 0)
"""Cell of a block that is free, and nothing else."""


class EngineSide:
    """One engine, or what was told of one: what it answered, and how its blocks changed.

    Columns of a change: number of the operation after which it was seen (0: before the first), number of the block
    (over all pools, one after the other), status, group, tokens covered, key, references, set of holders.

    Args:
      dialect: its dialect.
      header: its configuration.
      name: its name.
      engine: the engine, which is asked for its state; None where states are told only.
      whole: operations from which long answers are cut.
      queued: entries of free queues that are kept.

    Attributes:
      first: operations that were forgotten.
      looks: numbers of operations after which it was looked at; the first is below 0 if it was before the first that
        are kept.
    """

    def __init__(
        self, dialect: Dialect, header: Any, name: str, engine: Any, *, whole: int = MANY, queued: int = QUEUED
    ) -> None:
        self._dialect, self._header, self.name = dialect, header, name
        self._engine, self._whole, self._most_queued = engine, whole, queued
        self.lacks = frozenset[str]() if engine is None else dialect.missing_capabilities(engine)
        self.first = 0
        self.given: list[Any] = []
        self._answers: list[str] = []
        self.pools: list[dict[str, Any]] = []
        self.problem = "" if engine is not None else "looked at where the log has a state"
        self.ended = self._blind = False
        self._cells: dict[int, tuple[int, ...]] = {}
        self._seen: Snapshot | None = None
        self._free: list[frozenset[int]] = []
        self._rows: list[tuple[int, ...]] = []
        self._keys: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._sets: dict[tuple[tuple[str, int, int], ...], int] = {(): 0}
        self._queue: list[Sequence[Sequence[int]]] = []
        self._queue_at: list[int] = []
        self._queued = 0
        self.looks: list[int] = []

    @property
    def size(self) -> int:
        """Changes that are kept."""
        return len(self._rows)

    def attempt(self, operation: Any) -> Any:
        """Answer of the engine, or the failure in its place."""
        return attempt(self._dialect, self._engine, operation)

    def perform(self, index: int, operation: Any) -> Any:
        """Answer to the next operation; once the engine has failed it is asked no more."""
        if self.ended:
            answer: Any = self.given[-1]
            self._answers.append("")
        else:
            answer = self.attempt(operation)
            self.takes(index, answer)
        self.given.append(answer)
        return answer

    def is_told(self, index: int, operation: Any, answer: Any) -> None:
        """Takes an answer that was told, and looks at it where it is a state."""
        self.takes(index, answer)
        if answer is not None and type(operation).__struct_config__.tag == "state":
            self._see(index + 1, answer)

    def takes(self, index: int, answer: Any) -> None:
        """Takes the answer to an operation."""
        if isinstance(answer, Failure):
            self.ended, self.problem = True, f"line {self.first + index + 2}: fails, {answer.message}"
            self._answers.append(f"fails: {' '.join(answer.message.split())}")
            return
        encoded = "" if answer is None else msgspec.json.encode(self._dialect.log.encode_answer(answer)).decode()
        cut = index >= self._whole and len(encoded) > LONGEST
        self._answers.append(f"{encoded[:LONGEST]}..." if cut else encoded)

    def look(self, at: int, operation: Any) -> None:
        """Looks at the engine after so many operations."""
        if self.ended or self._blind or "state" in self.lacks:
            if not self.ended and not self._blind:
                self._blind, self.problem = True, "the engine has no states: its blocks cannot be drawn"
            return
        answer = self.attempt(operation)
        if isinstance(answer, Failure):
            self._blind, self.problem = True, f"no blocks from here on: asked for its state, {answer.message}"
            return
        self._see(at, answer)

    def _see(self, at: int, state: Any) -> None:
        try:
            seen = self._dialect.snapshot(self._header, state)
        except UnsupportedConfigError as error:
            self._blind, self.problem = True, f"its blocks cannot be drawn: {error.expected}"
            return
        if not self.pools:
            self.pools = [{"name": pool.name, "first": pool.ids.start, "size": len(pool.ids)} for pool in seen.pools]
        for block, cell in self._cells_of(seen).items():
            if self._cells.get(block, _PLAIN) != cell:
                self._rows.append((at, block, *cell))
                self._cells[block] = cell
        self.looks.append(at)
        order = [list(pool.free) for pool in seen.pools]
        if self._queued <= self._most_queued and (not self._queue or order != self._queue[-1]):
            self._queue.append(order)
            self._queue_at.append(at)
            self._queued += sum(map(len, order))

    def _cells_of(self, seen: Snapshot) -> dict[int, tuple[int, ...]]:
        """Every block of which a snapshot says something else than the last one did, by its number over all pools."""
        found: dict[int, tuple[int, ...]] = {}
        start, frees = 0, [frozenset(pool.free) for pool in seen.pools]
        before = self._seen or Snapshot((), {}, {}, {})
        pairs = ((seen.holders, before.holders), (seen.references, before.references), (seen.entries, before.entries))
        changed = {at for now, was in pairs for at in now.keys() | was.keys() if now.get(at) != was.get(at)}
        for number, (pool, free) in enumerate(zip(seen.pools, frees, strict=True)):
            first = pool.ids.start
            freed = free ^ (self._free[number] if self._free else frozenset(pool.ids))
            for block in (freed | {block for which, block in changed if which == number}) & set(pool.ids):
                at = number, block
                holders = tuple(sorted(seen.holders.get(at, ())))
                group, tokens, key = seen.entries.get(at, (-1, -1, ""))
                references = seen.references.get(at, len(holders))
                status = FREE * (block in free) | HELD * bool(holders or references) | CACHED * (at in seen.entries)
                group = group if group >= 0 or not holders else holders[0][1]
                named = self._keys.setdefault(key, len(self._keys)) if status & CACHED else -1
                held = self._sets.setdefault(holders, len(self._sets))
                found[start + block - first] = (status, group, tokens, named, references, held)
            start += len(pool.ids)
        self._seen, self._free = seen, frees
        return found

    def forget(self, count: int) -> None:
        """Drops the first operations; how blocks were when they were last looked at is what the rest begins with."""
        before = {row[1]: (0, *row[1:]) for row in self._rows if row[0] <= count}
        rows = [row for row in before.values() if row[2:] != _PLAIN]
        rows += [(row[0] - count, *row[1:]) for row in self._rows if row[0] > count]
        keys, sets = list(self._keys), list(self._sets)
        self._keys, self._sets, self._names = {}, {(): 0}, {}

        def numbered(row: tuple[int, ...]) -> tuple[int, ...]:
            key, held = row[5], self._sets.setdefault(sets[row[7]], len(self._sets))
            key = key if key < 0 else self._keys.setdefault(keys[key], len(self._keys))
            return (*row[:5], key, row[6], held)

        self._rows = [numbered(row) for row in rows]
        self._cells = {row[1]: row[2:] for row in self._rows}
        self._answers = self._answers[count:]
        self.first += count
        # The look that the rest begins with keeps its own time, below 0: another side may have changed since.
        looked = bisect.bisect_right(self.looks, count)
        self.looks = [at - count for at in self.looks[max(0, looked - 1) :]]
        # Where the order was kept no longer, it begins anew with the next look.
        gone = bisect.bisect_right(self._queue_at, count) - 1 if self._queued <= self._most_queued else len(self._queue)
        self._queue = self._queue[max(0, gone) :]
        self._queue_at = [max(0, at - count) for at in self._queue_at[max(0, gone) :]]
        self._queued = sum(len(pool) for order in self._queue for pool in order)

    def copied(self) -> EngineSide:
        """The side as it is now, which goes on by itself."""
        made = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (list, dict)):
                setattr(made, name, value.copy())
        return made

    def record(self, operations: int) -> dict[str, Any]:
        """The side as plain values and columns."""
        self._answers += [""] * (operations - len(self._answers))
        rows = np.array(self._rows, np.int32).reshape(-1, 8)
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        fields = ("at", "block", "status", "group", "tokens", "key", "references", "holders")
        names = self._names
        sets = [
            [(names.setdefault(id, len(names)), group, column) for id, group, column in each] for each in self._sets
        ]
        flat = np.array([each for one in sets for each in one], np.int32).reshape(-1, 3)
        queue = [np.array([block for pool in order for block in pool], np.int32) for order in self._queue]
        lengths = [len(pool) for order in self._queue for pool in order]
        return {
            "name": self.name,
            "told": self._engine is None,
            "problem": self.problem,
            "answers": "\n".join(self._answers),
            "changes": {field: rows[:, column].copy() for column, field in enumerate(fields)},
            "holders": {
                "start": np.cumsum([0, *map(len, sets)], dtype=np.int32),
                **{field: flat[:, column].copy() for column, field in enumerate(("request", "group", "column"))},
            },
            "requests": list(names),
            "keys": list(self._keys),
            "looks": np.array(self.looks, np.int32),
            "queue": {
                "whole": self._queued <= self._most_queued,
                "at": np.array(self._queue_at, np.int32),
                "lengths": np.array(lengths, np.int32),
                "blocks": np.concatenate(queue) if queue else np.zeros(0, np.int32),
            },
        }


def look_of(dialect: Dialect) -> Any:
    """The operation that is answered with the whole state."""
    state = dialect.log.operations.get("state")
    if state is None:
        raise dialect.unsupported("an operation `state`, which a page is drawn from")
    return state()


def looks_apart(operations: int, header: Any) -> int:
    """Operations from one look at an engine to the next."""
    blocks = sum(header.num_blocks) if isinstance(header.num_blocks, list) else header.num_blocks
    return max(1, -(-operations * blocks // LOOKED_AT))


class Drawn:
    """The log of a check that a page shows, the first that differs or else the first, and an engine's side of it.

    A built-in engine is looked at as the check has it perform the first log, which need not be performed again where it
    agrees; where it differs, the page looks beside the difference too, whose place is known too late for that.
    Another's engine might be changed by the question for its state, and the verdict with it. `side` is the engine's, of
    a log that agrees; `known`: upstream defects with which it does.
    """

    def __init__(self, engine: str) -> None:
        self._engine, self.known = engine, tuple[str, ...]()
        self.log: Log | None = None
        self.difference: Difference | None = None
        self.side: EngineSide | None = None

    def performing(self, log: Log) -> Performing:
        """Has an engine perform a log; looks at it as often as a page does, if the log may be kept."""
        dialect = registry.dialect_of(log.header.dialect)
        looked_at = self._engine.partition("@")[0] in dialect.engines and "state" in dialect.log.operations
        return functools.partial(self._looking, log.header) if looked_at and self.log is None else answers

    def _looking(
        self, header: Any, dialect: Dialect, engine: Any, operations: Sequence[Any], again: Callable[[], Any]
    ) -> Iterator[Any]:
        look, every = look_of(dialect), looks_apart(len(operations), header)
        side = self.side = EngineSide(dialect, header, self._engine, engine)

        def resumed(start: int) -> Any:
            collections.deque(answers(dialect, fresh := again(), operations[:start], again), maxlen=0)
            return fresh

        side.look(0, look)
        for start in range(0, len(operations), every):
            given = answers(dialect, engine, operations[start : start + every], functools.partial(resumed, start))
            for index, answer in enumerate(given, start):
                side.takes(index, answer)
                yield answer
            side.look(min(start + every, len(operations)), look)

    def keep(self, log: Log, difference: Difference | None, known: tuple[str, ...]) -> None:
        """Takes note of a log that was checked."""
        if self.log is None or (difference is not None and self.difference is None):
            self.log, self.difference, self.known = log, difference, known
            self.side = None if difference or known else self.side
