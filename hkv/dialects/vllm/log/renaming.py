"""Comparison of two engines up to renaming of blocks: a renaming that is learnt as they go."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from hkv.contract import answer
from hkv.contract.answer import Failure, Mismatch, SameNames, States, first_difference
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.errors import ConfigError

NULL = 0


class Renaming(SameNames):
    """Calls the blocks of the tested engine by the names that the right one has for them.

    A block gets its name when both engines hand it out: what stands at the same place of the two answers is the same
    block. It keeps it as long as it is referenced or cached; a block that is neither has none, and any stands for it.
    The null block is the null block. A block without a name is called by its negative id, which agrees with nothing.

    Args:
      block_sizes: tokens in a block of each group.
    """

    def __init__(self, block_sizes: Sequence[int]) -> None:
        self._sizes = tuple(block_sizes)
        self._right: dict[int, int] = {NULL: NULL}
        self._tested: dict[int, int] = {NULL: NULL}
        self._digest: oplog.Digest | None = None

    def operation(self, operation: oplog.Operation, states: States) -> oplog.Operation:
        """The operation as the tested engine has to hear it, with its own blocks.

        Of `evict`, those without a name are left out: they have no key to lose.
        """
        if isinstance(operation, oplog.DigestOp):
            got = self.answer(*states(oplog.StateOp()))
            self._digest = oplog.state_digest(got) if isinstance(got, oplog.CacheState) else None
        if isinstance(operation, oplog.EvictOp):
            self.answer(*states(oplog.StateOp()))
            return oplog.EvictOp(blocks=[self._tested[block] for block in operation.blocks if block in self._tested])
        blocks, rows = getattr(operation, "blocks", None), getattr(operation, "rows", None)
        if blocks is not None:
            return msgspec.structs.replace(operation, blocks=[self._tested.get(block, block) for block in blocks])
        if rows is not None:
            named = [[self._tested.get(block, block) for block in row] for row in rows]
            return msgspec.structs.replace(operation, rows=named)
        return operation

    def answer(self, want: oplog.Answer | Failure, got: oplog.Answer | Failure) -> oplog.Answer | Failure:
        """The tested engine's answer in the names of the right one's."""
        if isinstance(want, oplog.Allocation) and isinstance(got, oplog.Allocation):
            if want.blocks is None or got.blocks is None:
                return got
            self._learn(want.blocks, got.blocks)
            return oplog.Allocation(self._rows(got.blocks))
        if isinstance(got, oplog.Hit | oplog.Truncated):
            return msgspec.structs.replace(got, blocks=self._rows(got.blocks))
        if isinstance(got, oplog.Digest):
            return self._digest or got
        if isinstance(want, oplog.CacheState) and isinstance(got, oplog.CacheState):
            return self._state(want, got)
        if isinstance(got, dict):
            wanted = want if isinstance(want, dict) else {}
            return {id: self._offers(offers, wanted.get(id, [])) for id, offers in got.items()}
        if isinstance(got, list) and got and not isinstance(got[0], oplog.CacheEvent):
            return self._listed(want, got)
        return got

    def _listed(self, want: Any, got: list[Any]) -> list[Any]:
        """A list of blocks, of copies, or of states that are offered."""
        if isinstance(got[0], int):
            return [self._listed_name(*pair) for pair in itertools.zip_longest(got, want or ()) if pair[0] is not None]
        if len(got[0]) == len(("group", "block", "tokens")):
            return self._offers(got, want)
        if isinstance(want, list):
            # A block that an owner leaves to the cache is in no answer before its copy is reported.
            self._learn([[pair[1] for pair in want]], [[pair[1] for pair in got]])
        return [(self._name(source), self._name(target)) for source, target in got]

    def _listed_name(self, block: int, wanted: int | None) -> int:
        """A block of a list: by what the other list has in its place, where both were given back since."""
        nameless = block not in self._right and wanted is not None and wanted not in self._tested
        return wanted if nameless and wanted is not None else self._name(block)

    def _offers(self, offers: list[oplog.Offer], want: Any) -> list[oplog.Offer]:
        wanted = [block for _, block, _ in want] if isinstance(want, list) else []
        wanted += [None] * (len(offers) - len(wanted))
        pairs = zip(offers, wanted, strict=False)
        return [(group, self._listed_name(block, right), tokens) for (group, block, tokens), right in pairs]

    def learn(self, operation: oplog.Operation, states: States) -> None:
        """Takes note of the blocks for external tokens, which no answer to `allocate` lists."""
        if not isinstance(operation, oplog.AllocateOp) or not operation.external:
            return
        want, got = states(oplog.StateOp())
        if not isinstance(want, oplog.CacheState) or not isinstance(got, oplog.CacheState):
            return
        taken = [
            [row[-(-operation.hit // size) :] for row, size in zip(rows, self._sizes, strict=False)]
            for rows in (want.rows.get(operation.id, []), got.rows.get(operation.id, []))
        ]
        self._learn(*taken)

    def _learn(self, want: oplog.Rows, got: oplog.Rows) -> None:
        for right, tested in zip(want, got, strict=False):
            for name, block in zip(right, tested, strict=False):
                if NULL not in (name, block):
                    self._forget(name, block)
                    self._right[block], self._tested[name] = name, block

    def _forget(self, name: int, block: int) -> None:
        self._right.pop(self._tested.pop(name, block), None)
        self._tested.pop(self._right.pop(block, name), None)

    def _name(self, block: int) -> int:
        return self._right.get(block, -block)

    def _rows(self, rows: oplog.Rows) -> oplog.Rows:
        return [[self._name(block) for block in row] for row in rows]

    def _state(self, want: oplog.CacheState, got: oplog.CacheState) -> oplog.CacheState:
        named = {int(block) for block in (*want.refs, *want.cached)}
        live = {int(block) for block in (*got.refs, *got.cached)}
        for block, name in list(self._right.items()):
            if block != NULL and block not in live and name not in named:
                self._forget(name, block)
        free = [
            name if block not in live and name not in named else self._name(block)
            for block, name in zip(got.free, want.free, strict=False)
        ]
        free += map(self._name, got.free[len(want.free) :])
        return msgspec.structs.replace(
            got,
            free=free,
            refs={str(self._name(int(block))): count for block, count in got.refs.items()},
            rows={id: self._rows(rows) for id, rows in got.rows.items()},
            cached={str(self._name(int(block))): entry for block, entry in got.cached.items()},
        )


def renaming(ids: str, header: oplog.Header) -> SameNames:
    """Comparison of two engines' block ids: `exact`, or `isomorphic`, up to a renaming.

    Raises:
      ConfigError: another name.
    """
    if ids == "exact":
        return SameNames()
    if ids == "isomorphic":
        return Renaming(to_config(header).block_sizes)
    raise ConfigError("ids", ids, "one of exact, isomorphic")


# Comparison of two answers of vLLM's logs: events in order, except those of keys that leave together.


def compare(want: oplog.Answer | Failure, got: oplog.Answer | Failure, version: int = 2) -> Mismatch | None:
    """The first difference between two answers, or None when they agree.

    Stored and cleared events are compared in order, removed ones as a multiset, because one block's keys leave the
    cache in no particular order. The fields of an event that may be left out are compared where `want` has them.

    Args:
      want: the answer to be met.
      got: the other one; either may be a Failure, and two of them agree.
      version: of the log format; version 1 knows no cleared events.
    """

    def answers(want: oplog.Answer, got: oplog.Answer) -> Mismatch | None:
        if _is_events(want) or _is_events(got):
            return _compare_events(_events(want), _events(got), version)
        return first_difference(want, got)

    return answer.compare(want, got, answers)


def _is_events(answer: oplog.Answer) -> bool:
    return isinstance(answer, list) and bool(answer) and isinstance(answer[0], oplog.CacheEvent)


def _events(answer: Any) -> list[oplog.CacheEvent]:
    return list(answer or ())


def _compare_events(want: list[oplog.CacheEvent], got: list[oplog.CacheEvent], version: int) -> Mismatch | None:
    if version == 1:
        got = [event for event in got if event.type != "cleared"]
    ordered = [[event for event in events if event.type != "removed"] for events in (want, got)]
    for index, (wanted, found) in enumerate(zip(*ordered, strict=False)):
        if mismatch := first_difference(_event(wanted, wanted), _event(found, wanted), f"{wanted.type}[{index}]"):
            return mismatch
    if len(ordered[0]) != len(ordered[1]):
        return Mismatch("number of stored events", len(ordered[0]), len(ordered[1]))
    removed = [event for event in want if event.type == "removed"]
    pattern = removed[0] if removed else None
    counts = collections.Counter(_frozen(event, pattern) for event in removed)
    found_counts = collections.Counter(_frozen(event, pattern) for event in got if event.type == "removed")
    if counts != found_counts:
        return Mismatch(
            "removed", sorted((counts - found_counts).elements()), sorted((found_counts - counts).elements())
        )
    return None


def _event(event: oplog.CacheEvent, pattern: oplog.CacheEvent) -> dict[str, Any]:
    """Fields of an event, but those that may be left out and that another leaves out."""
    names = [
        each for each in event.__struct_fields__ if each not in oplog.EVENT_FIELDS or getattr(pattern, each) is not None
    ]
    return {name: getattr(event, name) for name in names}


def _frozen(event: oplog.CacheEvent, pattern: oplog.CacheEvent | None) -> tuple[int | str | tuple[str, ...], ...]:
    keys = event.keys if pattern is None or pattern.keys is not None else None
    medium = event.medium if pattern is None or pattern.medium is not None else None
    return event.group, event.num_blocks, tuple(keys or ()), *((medium,) if medium is not None else ())
