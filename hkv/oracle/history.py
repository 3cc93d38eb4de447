"""History of every block under some operations, on one engine or on several side by side: what a page shows.

Engines perform the operations in lock-step and are asked for their `state` after each; a dialect's snapshot of a state
(`Dialect.snapshot`) says of every block who holds it and what it is cached as. Kept are changes alone: columns of
(operation, block, status, holders, key), from which the page rebuilds any moment. A log's own states are a side too,
looked at where the log has them. Where operations times blocks are too many for a look after each, one is made after
every n-th operation, and the page says so; answers are never left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from hkv.contract import registry
from hkv.contract.answer import EngineFactory, Failure, failure_of
from hkv.contract.dialect import Dialect
from hkv.contract.log import Log, answer_type
from hkv.contract.snapshot import Snapshot
from hkv.errors import HKVError, UnsupportedConfigError
from hkv.oracle.broken_invariant import Broken
from hkv.oracle.engine import attempt, compare, make_engine
from hkv.oracle.log_file import log_bytes, parse_log
from hkv.oracle.verbs import explain

LOOKED_AT = 40_000_000
"""Most blocks that all looks at one engine amount to; of more operations and blocks, only some are followed by one."""

QUEUED = 3_000_000
"""Most entries of free queues that are kept, over all looks; beyond, the order of the queue is not."""

EXPLAINED = 8_000
"""Operations that the reference performs for explanations, each of which begins at the first line."""

LONGEST = 2_000
"""Characters of an answer that are kept where operations are many."""

MANY = 5_000
"""Operations from which long answers are cut."""

_LONG = re.compile(r"\[((?:\d+, ){20})(?:\d+, )+(\d+)\]")
"""A list of more than 22 numbers; the first twenty and the last are shown, the answers themselves are whole."""

FREE, HELD, CACHED = 1, 2, 4
"""Bits of a block's status: in a free list, held by somebody, under a key. None of them: lost to everybody."""


Engines: TypeAlias = Sequence[tuple[str, EngineFactory]]
"""Engines by name; of two, the first is in doubt and the second counts."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """An operation to which a page leads at once.

    Attributes:
      line: line of the log; 1 for the configuration.
      kind: `difference`, `invariant` or `line`.
      title: in a few words; `text`: the rest, a line each.
    """

    line: int
    kind: str
    title: str
    text: tuple[str, ...] = ()


def difference_mark(line: int, field: str, want: Any, got: Any, sides: tuple[str, str]) -> Mark:
    """Mark at the first difference of two sides: the one in doubt, and the one that counts."""
    text = tuple(
        _LONG.sub(r"[\1..., \2]", f"{side}: {value}") for side, value in zip(reversed(sides), (want, got), strict=True)
    )
    return Mark(line, "difference", f"first difference: {field}", text)


def invariant_mark(dialect: Dialect, broken: Broken, engine: str) -> Mark:
    """Mark at the first invariant that an engine breaks, with the rule behind it."""
    rule = dialect.invariants.get(broken.name)
    promises = f" ({', '.join(rule.promises)})" if rule and rule.promises else ""
    said = broken.promise if rule is None else rule.promise
    text = (
        broken.problem,
        f"promised by {dialect.title}'s rules{promises}: {said}",
        "docs/invariants.md has all rules",
    )
    return Mark(broken.line, "invariant", f"{engine} breaks: {broken.name}", text)


def history(
    name: str,
    header: Any,
    operations: Sequence[Any],
    engines: Engines,
    *,
    recorded: str = "",
    ids: str = "exact",
    marks: Sequence[Mark] = (),
    headline: str = "",
    commands: Mapping[str, str] | None = None,
    text: bytes = b"",
    path: str = "",
    explained: bool = True,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Data of a page: the operations, and on every engine the answers and the history of each block.

    Args:
      name: title of the case.
      header: the configuration.
      operations: the operations.
      engines: their names and factories; of two, the first is in doubt and the second counts.
      recorded: name under which the operations' own answers and states are a side as well; "" for none.
      ids: comparison of block ids, as of `Dialect.renaming`.
      marks: operations to which the page leads.
      headline: sentence under the title.
      commands: commands that repeat what is shown, by what they do.
      text: the case as a log, to copy.
      path: the log's file, of whose lines `hkv explain` tells more; "" for none.
      explained: whether requests are explained, by the reference, wherever operations name one.
      progress: called after each operation.

    Returns:
      Plain values and NumPy columns, as `hkv.page` packs them.

    Raises:
      UnsupportedConfigError: the dialect does not say what its states mean.
    """
    dialect = registry.dialect_of(header.dialect)
    look = _look(dialect)
    sides = [_Side(dialect, header, each, factory) for each, factory in engines]
    told = _Side(dialect, header, recorded, None) if recorded else None
    every = _every(len(operations), header)
    near = {mark.line - 2 + offset for mark in marks for offset in (-1, 0, 1)}
    differing = list[int]()
    names = dialect.renaming(ids, header)

    def both(operation: Any) -> tuple[Any, Any]:
        return sides[-1].attempt(operation), sides[0].attempt(operation)

    for side in sides:
        side.look(0, look)
    for index, operation in enumerate(operations):
        if told is not None:
            told.takes(index, operation)
        own = names.operation(operation, both) if len(sides) > 1 else operation
        going = not any(side.ended for side in sides)
        given = [side.perform(index, own if side is sides[0] else operation) for side in sides]
        want = getattr(operation, "want", None) if told is not None else given[-1]
        if going and _differ(dialect, want, names.answer(want, given[0]), sides, header):
            differing.append(index)
        if len(sides) > 1:
            names.learn(operation, both)
        if index % every == every - 1 or index in near or index == len(operations) - 1:
            for side in sides:
                side.look(index + 1, look)
        progress()
    all_sides = [*([told] if told is not None else []), *sides]
    log = parse_log(text or log_bytes(header, operations, _wants(operations, sides)), name) if explained else None
    return {
        "name": name,
        "headline": headline,
        "path": path,
        "dialect": dialect.title,
        "summary": dialect.summary(header),
        "header": msgspec.to_builtins(header),
        "groups": [{"kind": kind, "size": size} for kind, size in dialect.groups(header)],
        "pools": next((side.pools for side in all_sides if side.pools), []),
        "every": every,
        "operations": "\n".join(_text(operation) for operation in operations),
        "subjects": [str(getattr(operation, "id", "") or "") for operation in operations],
        "sides": [side.record(len(operations)) for side in all_sides],
        "differing": np.array(differing, np.int32),
        "marks": [dataclasses.asdict(mark) for mark in sorted(marks, key=lambda mark: mark.line)],
        "explanations": {} if log is None else _explanations(log, marks),
        "commands": [{"what": what, "command": command} for what, command in (commands or {}).items()],
        "text": text.decode() if len(text) < 100_000 else "",
    }


def _differ(dialect: Dialect, want: Any, got: Any, sides: Sequence[_Side], header: Any) -> bool:
    """True if two answers differ in what all engines have."""
    lacks = frozenset[str]().union(*(side.lacks for side in sides))
    return compare(dialect, want, got, header.oplog, lacks) is not None


def _look(dialect: Dialect) -> Any:
    """The operation that is answered with the whole state."""
    state = dialect.log.operations.get("state")
    if state is None:
        raise dialect.lacks("an operation `state`, which a page is drawn from")
    return state()


def _every(operations: int, header: Any) -> int:
    blocks = sum(header.num_blocks) if isinstance(header.num_blocks, list) else header.num_blocks
    return max(1, -(-operations * blocks // LOOKED_AT))


def _text(operation: Any) -> str:
    """An operation without its answer, on one line of JSON."""
    fields = msgspec.to_builtins(operation)
    fields.pop("want", None)
    return msgspec.json.encode(fields).decode()


def _wants(operations: Sequence[Any], sides: Sequence[_Side]) -> list[Any]:
    """Answers that a log of the operations needs: the recorded ones, or those of the side that counts."""
    if all(getattr(each, "want", None) is not None for each in operations if answer_type(type(each)) is not None):
        return [getattr(each, "want", None) for each in operations]
    return sides[-1].given


class _Side:
    """One engine, or a log's own answers: what it answered, and how its blocks changed.

    Columns of a change: number of the operation after which it was seen (0: before the first), number of the block
    (over all pools, one after the other), status, group, tokens covered, key, references, set of holders.
    """

    def __init__(self, dialect: Dialect, header: Any, name: str, factory: EngineFactory | None) -> None:
        self._dialect, self._header, self.name = dialect, header, name
        self._engine = None if factory is None else make_engine(factory, header)
        self.lacks = frozenset[str]() if factory is None else dialect.lacking(self._engine)
        self.given: list[Any] = []
        self._answers: list[str] = []
        self.pools: list[dict[str, Any]] = []
        self.problem = "" if factory is not None else "looked at where the log has a state"
        self.ended = self._blind = False
        self._cells: dict[int, tuple[int, ...]] = {}
        self._rows: list[tuple[int, ...]] = []
        self._keys: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._sets: dict[tuple[tuple[str, int, int], ...], int] = {(): 0}
        self._queue: list[Sequence[Sequence[int]]] = []
        self._queue_at: list[int] = []
        self._queued = 0
        self._looks: list[int] = []

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
            self._take(index, answer)
        self.given.append(answer)
        return answer

    def takes(self, index: int, operation: Any) -> None:
        """Takes a recorded answer, and looks at it where it is a state."""
        answer = getattr(operation, "want", None)
        self._take(index, answer)
        if answer is not None and type(operation).__struct_config__.tag == "state":
            self._see(index + 1, answer)

    def _take(self, index: int, answer: Any) -> None:
        if isinstance(answer, Failure):
            self.ended, self.problem = True, f"line {index + 2}: fails, {answer.message}"
            self._answers.append(f"fails: {' '.join(answer.message.split())}")
            return
        encoded = "" if answer is None else msgspec.json.encode(self._dialect.log.encode_answer(answer)).decode()
        self._answers.append(encoded if index < MANY or len(encoded) <= LONGEST else f"{encoded[:LONGEST]}...")

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
        cells = self._cells_of(seen)
        before, plain = self._cells, (FREE, -1, -1, -1, 0, 0)
        self._rows += [(at, block, *cell) for block, cell in cells.items() if before.get(block, plain) != cell]
        self._rows += [(at, block, *plain) for block in before if block not in cells]
        self._cells = cells
        self._looks.append(at)
        order = [list(pool.free) for pool in seen.pools]
        if self._queued <= QUEUED and (not self._queue or order != self._queue[-1]):
            self._queue.append(order)
            self._queue_at.append(at)
            self._queued += sum(map(len, order))

    def _cells_of(self, seen: Snapshot) -> dict[int, tuple[int, ...]]:
        """Every block that is not simply free, by its number over all pools."""
        found: dict[int, tuple[int, ...]] = {}
        start = 0
        for number, pool in enumerate(seen.pools):
            free, first = set(pool.free), pool.ids.start
            special = {block for which, block in (*seen.holders, *seen.entries, *seen.references) if which == number}
            for block in (special | (set(pool.ids) - free)) & set(pool.ids):
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
        return found

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
            "problem": self.problem,
            "answers": "\n".join(self._answers),
            "changes": {field: rows[:, column].copy() for column, field in enumerate(fields)},
            "holders": {
                "start": np.cumsum([0, *map(len, sets)], dtype=np.int32),
                **{field: flat[:, column].copy() for column, field in enumerate(("request", "group", "column"))},
            },
            "requests": list(names),
            "keys": list(self._keys),
            "looks": np.array(self._looks, np.int32),
            "queue": {
                "whole": self._queued <= QUEUED,
                "at": np.array(self._queue_at, np.int32),
                "lengths": np.array(lengths, np.int32),
                "blocks": np.concatenate(queue) if queue else np.zeros(0, np.int32),
            },
        }


# Accounts of requests, in `hkv explain`'s words.


def _explanations(log: Log, marks: Iterable[Mark]) -> dict[str, Any]:
    """Accounts of the requests that lines name, by line: of all, or of the last ones before a mark and the end."""
    found: dict[str, Any] = {}
    left = EXPLAINED
    lines = [index + 2 for index, operation in enumerate(log.operations) if getattr(operation, "id", None)]
    ends = [mark.line for mark in marks] or [len(log.operations) + 1]
    answered = {line for line in lines if answer_type(type(log.operations[line - 2])) is not None}
    for line in sorted(lines, key=lambda line: min(abs(end - line) + 10**6 * (line > end) for end in ends)):
        if line not in ends and line not in answered:
            continue
        if left < line:
            break
        left -= line
        try:
            found[str(line)] = msgspec.to_builtins(explain(log, line))
        except UnsupportedConfigError:
            return {}
        except HKVError as error:
            found[str(line)] = {"refused": str(error)}
        except Exception as error:  # a case may stop where the reference cannot follow
            found[str(line)] = {"refused": failure_of(error).message}
    return found
