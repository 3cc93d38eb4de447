"""One operation, with the cache before and after it: what every invariant is asked about."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from hkv.contract.invariant import Register
from hkv.dialects.vllm.config import NAME, VllmConfig
from hkv.dialects.vllm.log.structs import Answer, CacheState, Hit, Operation, Rows
from hkv.dialects.vllm.traffic.ledger import Ledger


class Snapshot:
    """A `CacheState` with block ids as numbers.

    Attributes:
      free: the free queue, next to be handed out first.
      refs: reference count of each block that has one.
      rows: block ids per group of each request that has any.
      cached: of each block with a key: `(group, tokens covered, key in hex)`.
      owners: of each block in a row, every `(request, group, column)` that names it.
      entries: every `(group, key in hex)`.
      held: references of blocks that were taken along, by `pop`, `hold` or copies, and are to be given back.
      num_free: number of free blocks as the engine counts them; None where it does not say.
    """

    def __init__(
        self, state: CacheState, held: Mapping[int, int] = MappingProxyType({}), num_free: int | None = None
    ) -> None:
        self.held, self.num_free = dict(held), num_free
        self.free = state.free
        self.refs = {int(block): count for block, count in state.refs.items()}
        self.rows: dict[str, Rows] = state.rows
        self.cached = {int(block): _entry(*entry) for block, entry in state.cached.items()}
        self.owners: dict[int, list[tuple[str, int, int]]] = collections.defaultdict(list)
        for id, rows in state.rows.items():
            for group, row in enumerate(rows):
                for column, block in enumerate(row):
                    if block:
                        self.owners[block].append((id, group, column))
        self.entries = {(group, key) for group, _, key in self.cached.values()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot):
            return NotImplemented
        ours = (self.free, self.refs, self.rows, self.cached)
        return ours == (other.free, other.refs, other.rows, other.cached)

    __hash__ = None  # type: ignore[assignment]

    def spare(self) -> dict[int, int]:
        """References to each block besides those from rows, and those held: those of pending copies."""
        blocks = self.refs.keys() | self.owners.keys() | self.held.keys()
        counts = {
            block: self.refs.get(block, 0) - len(self.owners.get(block, ())) - self.held.get(block, 0)
            for block in blocks
        }
        return {block: count for block, count in counts.items() if count}


def _entry(group: int, tokens: int, key: str) -> tuple[int, int, str]:
    return group, tokens, key


class KeyBook:
    """Keys and the prefixes that they stand for, learnt from blocks that a request's row holds when they get a key."""

    def __init__(self) -> None:
        self.prefixes: dict[str, set[int]] = collections.defaultdict(set)
        self.keys: dict[int, set[str]] = collections.defaultdict(set)

    def learn(self, key: str, prefix: int) -> None:
        """`key` was seen to stand for `prefix`."""
        self.prefixes[key].add(prefix)
        self.keys[prefix].add(key)


@dataclasses.dataclass(frozen=True)
class Moment:
    """Operation to judge, with the cache before and after it.

    Attributes:
      config: the cache's configuration.
      ledger: requests as the operations up to this one tell them.
      book: keys and prefixes.
      operation: the operation.
      answer: the engine's answer.
      before: the cache before it.
      after: the cache after it.
      again: answer to the same lookup, asked again.
      hits: of some waiting requests, their hit in tokens before and after; only for operations that fill the cache.
    """

    config: VllmConfig
    ledger: Ledger
    book: KeyBook
    operation: Operation
    answer: Answer
    before: Snapshot
    after: Snapshot
    again: Hit | None
    hits: dict[str, tuple[int, int]]

    def has_entry(self, id: str, group: int, end: int) -> bool:
        """True if some block's primary key names the request's first `end` tokens in `group`, after the operation."""
        prefix = self.ledger.prefix(id, end)
        keys = () if prefix is None else self.book.keys.get(prefix, ())
        return any((group, key) in self.after.entries for key in keys)


# The register of the invariants of vLLM 0.33's logs.

INVARIANTS = Register(NAME)
"""Every invariant of vLLM's operation log, by name. Those with a `start` have to be begun; `Watch` does."""

invariant = INVARIANTS.invariant
remembering = INVARIANTS.remembering
