"""The pool: every block, its references and keys, and the order in which free ones are handed out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hkv.errors import OperationError
from reference.keys.views import Chain
from reference.state.events import Cleared, Event, Removed
from reference.state.free_queue import FreeQueue
from reference.state.history import REGISTERED, History
from reference.state.key_table import Key, KeyTable

NULL = 0
"""The null block: stands in rows where no block is needed. Never referenced, freed or registered."""


class Pool:
    """Blocks 0 to `num_blocks - 1`; block 0 is the null block. vLLM 0.33 `BlockPool`.

    A block is in the free queue exactly when its reference count is 0. It may keep its keys there, be found by them and
    be taken back out; it loses them when it is handed out anew.

    Attributes:
      num_blocks: blocks, the null block included.
      free: the free queue.
      refs: reference count of each block; 0 for the null block.
      primary: the key each block is known by, or None.
      covered: tokens that the primary key covers, from the start of the request; 0 without one.
      extra: further keys of a block, in order of registration, only for blocks that have any.
      table: from keys to blocks.
      events: changes to keys since events were last taken; stays empty when `records` is off.
      records: whether events are recorded.
      evictions: blocks that lost their keys by being handed out.
      history: last event of each key, for diagnosis.
      step: 1 more than the scheduling steps begun, for diagnosis.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = FreeQueue(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.primary: list[Key | None] = [None] * num_blocks
        self.covered = [0] * num_blocks
        self.extra: dict[int, dict[Key, None]] = {}
        self.table = KeyTable()
        self.events: list[Event] = []
        self.records = True
        self.evictions = 0
        self.history = History()
        self.step = 1

    def take(self, count: int, group: int | None = None) -> list[int]:
        """Hand out `count` blocks from the front of the queue, each with one reference and without keys.

        Args:
          count: how many.
          group: whose row they are for, which is remembered of what they held; None to remember nothing.

        Raises:
          OperationError: fewer are free; nothing was changed.
        """
        if count > len(self.free):
            raise OperationError("blocks", count, f"at most the {len(self.free)} blocks that are free")
        blocks = [self.free.pop() for _ in range(count)]
        for block in blocks:
            if self.primary[block] is not None:
                keys = self.keys_of(block)
                self.drop_keys(block)
                self.evictions += 1
                for key in keys:
                    if group is not None and key not in self.table:
                        self.history.evicted(*key, self.step, group)
            self.refs[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; one that was free leaves the queue. Null blocks are passed over."""
        refs = self.refs
        for block in blocks:
            if block != NULL:
                if refs[block] == 0:
                    self.free.remove(block)
                refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take a reference from each block. Those that have none left become free, in the order given.

        Blocks without a key go to the front of the queue, to be handed out next: no hit finds them. Blocks with one
        go to the back, behind all that were released before. Null blocks are passed over.
        """
        unknown: list[int] = []
        known: list[int] = []
        refs, primary = self.refs, self.primary
        for block in blocks:
            if block != NULL:
                refs[block] -= 1
                if refs[block] == 0:
                    (unknown if primary[block] is None else known).append(block)
        if unknown:
            self.free.prepend(unknown)
        if known:
            self.free.append(known)

    def find(self, chain: Chain, groups: Sequence[int]) -> list[int] | None:
        """The block of each of `groups` that ends the prefix `chain`, or None unless every one has it."""
        found: list[int] = []
        for group in groups:
            block = self.table.first((group, chain))
            if block is None:
                return None
            found.append(block)
        return found

    def insert(self, key: Key, block: int, tokens: int) -> None:
        """Register `block` under `key`: as its primary key if it has none, else as an extra one.

        Args:
          key: group and prefix.
          block: the block; registering it twice under one key changes nothing.
          tokens: tokens from the start of the request that `key` covers.
        """
        if not self.table.insert(key, block):
            return
        if self.primary[block] is None:
            self.primary[block] = key
            self.covered[block] = tokens
        else:
            self.extra.setdefault(block, {})[key] = None
        self.history.note(*key, REGISTERED)

    def drop_keys(self, block: int) -> None:
        """Take every key away from a block, wherever it stands, with one `Removed` event for each."""
        for key in self.keys_of(block):
            self.table.remove(key, block)
            if self.records:
                self.events.append(Removed(*key))
        self.forget_keys(block)

    def move_keys(self, source: int, target: int) -> None:
        """Let `target`, which has no key, stand under every key of `source` instead of it. No event: content moves."""
        for key in self.keys_of(source):
            self.table.remove(key, source)
            self.table.insert(key, target)
        self.primary[target] = self.primary[source]
        self.covered[target] = self.covered[source]
        if source in self.extra:
            self.extra[target] = self.extra[source]
        self.forget_keys(source)

    def keys_of(self, block: int) -> list[Key]:
        """The primary key of a block and then its extra ones; empty for a block that no lookup can find."""
        primary = self.primary[block]
        return [] if primary is None else [primary, *self.extra.get(block, ())]

    def forget_keys(self, block: int) -> None:
        """Make `block` one without keys, leaving the table alone."""
        self.primary[block] = None
        self.covered[block] = 0
        self.extra.pop(block, None)

    def evict(self, blocks: Iterable[int]) -> None:
        """Take all keys away from these blocks. References and places in the queue stay."""
        for block in blocks:
            self.drop_keys(block)

    def reset(self) -> bool:
        """Forget every key, unless a block is in use; then nothing changes. The queue keeps its order.

        Returns:
          Whether the cache was reset.
        """
        if len(self.free) != self.num_blocks - 1:
            return False
        self.table.clear()
        self.extra.clear()
        self.primary = [None] * self.num_blocks
        self.covered = [0] * self.num_blocks
        if self.records:
            self.events.append(Cleared())
        return True

    def writable(self, block: int) -> bool:
        """True if exactly one reference holds the block and no other request can find it."""
        return block != NULL and self.refs[block] == 1 and self.primary[block] is None
