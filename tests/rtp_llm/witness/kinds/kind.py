"""Base of all types of group: taking blocks from a pool, making room, giving blocks back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hkv.dialects.rtp_llm.config import NULL
from hkv.errors import OperationError
from hkv.model.group_policy import GroupPolicy
from tests.rtp_llm.witness.block_ids import BlockIds
from tests.rtp_llm.witness.eviction import evict_and_free_for_group
from tests.rtp_llm.witness.pool import REQUEST, BlockPool
from tests.rtp_llm.witness.shared_cache import SharedBlockCache


class Need(NamedTuple):
    """Blocks that a first allocation takes.

    Attributes:
      common: those that all sequences of a request share.
      extra: those that each sequence takes for itself.
    """

    common: int
    extra: int


class Kind:
    """One group. RTP-LLM `KVCacheGroup`.

    Args:
      group: its index.
      policy: policy of the group.
      block_size: tokens per block, written B below.
      step: distance, in blocks, between two states that are kept for reuse.
      pool: pool that its blocks come from.
      cache: cache from which blocks may be evicted to make room; None for none.
    """

    sparse = True
    """True if a list may have holes."""

    by_prefix = False
    """True if a hit is matched from the first key on (`match_prefix`), not by its last key alone (`match`)."""

    def __init__(
        self,
        group: int,
        policy: GroupPolicy,
        block_size: int,
        step: int,
        pool: BlockPool,
        cache: SharedBlockCache | None,
    ) -> None:
        self.group = group
        self.policy = policy
        self.block_size = block_size
        self.step = max(1, step)
        self.pool = pool
        self.cache = cache

    def need(self, seq: int, current: int, reserve: int) -> int:
        """Slots that are missing for `seq` tokens and a reserve, after `current` slots."""
        raise NotImplementedError

    def first_need(self, common: int, seq: int, reserve: int, reused: int, reuse: bool) -> Need:
        """Blocks that a request's first allocation takes (RTP-LLM `getNeedBlocks` of a group).

        Args:
          common: tokens that its sequences share.
          seq: tokens of each.
          reserve: tokens to come.
          reused: blocks that it has already, from the cache.
          reuse: whether the request reuses and is reused.
        """
        raise NotImplementedError

    def peak(self, seq: int, current: BlockIds, remaining: int, reserve: int, reuse: bool) -> int:
        """Most blocks, beyond those it has, that a sequence holds at once until `remaining` more tokens are done."""
        raise NotImplementedError

    def first_peak(self, seq: int, common: int, remaining: int, reserve: int, reuse: bool, batch: int) -> int:
        """The same for a request of `batch` sequences that has nothing yet."""
        full = -(-common // self.block_size)
        last = -(-(seq + remaining + reserve) // self.block_size)
        return full + max(batch, 1) * max(last - full, 0)

    def malloc(self, blocks: BlockIds, seq: int, reuse: bool, reserve: int = 0) -> list[int] | None:
        """Give a list the blocks that `seq` tokens and a reserve need, or nothing.

        Returns:
          Positions of holes that were filled; what was appended lies at the end. None when refused.
        """
        raise NotImplementedError

    def cleanup(self, blocks: BlockIds, reuse: bool, reserve: int = 0) -> None:
        """Give back what decoding on does not need (RTP-LLM `removeSkippedBlocks`)."""
        raise NotImplementedError

    @property
    def votes(self) -> bool:
        """True if a hit cannot end at a key under which the group has no block."""
        return self.policy.enable_prefix_reuse

    def match_prefix(self, keys: Sequence[int]) -> list[int]:
        """The blocks of the longest run of keys from the first on that the cache has (RTP-LLM `matchPrefix`)."""
        raise OperationError("keys", list(keys), "one key: this group is matched by the last key of a hit")

    def match(self, key: int) -> int:
        """This group's block under a key, or `NULL` (RTP-LLM `matchSingleKey`)."""
        return NULL if self.cache is None else self.cache.match_group(key, self.group)

    def make_room(self, count: int) -> bool:
        """Evict until `count` blocks are free (RTP-LLM `ensureFreeBlocks`); False when that cannot be."""
        while self.pool.free < count:
            if self.cache is None:
                return False
            if evict_and_free_for_group(self.cache, self.group, count - self.pool.free) == 0:
                return False
        return True

    def take(self, count: int) -> list[int] | None:
        """`count` fresh blocks, ascending, for which others may be evicted; None when there are not so many."""
        if count == 0:
            return []
        return self.pool.malloc(count) if self.make_room(count) else None

    def reference(self, blocks: BlockIds, more: Sequence[int], role: str = REQUEST) -> None:
        """Append blocks that somebody else holds too, holes included, with a reference to each."""
        blocks.add(more)
        self.pool.reference((block for block in more if block != NULL), role)

    def free(self, blocks: Iterable[int]) -> None:
        """Give one reference to each block back; holes have none."""
        self.pool.release(block for block in blocks if block != NULL)

    def insert(self, keys: Sequence[int], blocks: Sequence[int]) -> None:
        """Enter blocks under keys, first to last, as roots (RTP-LLM `insertIntoCache` of a group)."""
        assert self.cache is not None
        for key, block in zip(keys, blocks, strict=False):
            if block != NULL:
                row = [NULL] * len(self.cache.pools)
                row[self.group] = block
                self.cache.put(key, row)

    def undo(self, blocks: BlockIds, length: int, filled: Iterable[int]) -> None:
        """Take one `malloc` back: what was appended after `length` slots, and the holes that were filled."""
        for position in filled:
            self.free([blocks.blocks[position]])
            blocks.set_at(position, NULL)
        self.free(blocks.blocks[length:])
        blocks.resize(length)

    def slots(self, tokens: int) -> int:
        """Slots that `tokens` tokens fill, the last maybe in part."""
        return -(-tokens // self.block_size)
