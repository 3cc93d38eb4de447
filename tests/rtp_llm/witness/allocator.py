"""Base of all allocators: the way from a request to blocks, verdicts, capacities."""

from __future__ import annotations

import abc

from hkv.dialects.rtp_llm.config import NULL, RtpConfig
from hkv.errors import OperationError
from hkv.model.group_policy import GroupType
from tests.rtp_llm.witness.block_ids import BlockIds
from tests.rtp_llm.witness.kinds.full import FullKind
from tests.rtp_llm.witness.kinds.kind import Kind
from tests.rtp_llm.witness.kinds.linear import LinearKind
from tests.rtp_llm.witness.kinds.swa import SwaKind
from tests.rtp_llm.witness.operation import CopyPair, MallocInfo, MallocResult, MallocVerdict
from tests.rtp_llm.witness.pool import CACHE, REQUEST, BlockPool
from tests.rtp_llm.witness.resource import BatchResource
from tests.rtp_llm.witness.shared_cache import SharedBlockCache

KINDS: dict[GroupType, type[Kind]] = {GroupType.FULL: FullKind, GroupType.LINEAR: LinearKind, GroupType.SWA: SwaKind}
"""Rules for each type of group."""


class Allocator(abc.ABC):
    """Groups over one pool or over one each. RTP-LLM `KVCacheAllocator`.

    Args:
      config: the cache's configuration.

    Attributes:
      config: the same.
      pools: the pools; one, or one a group.
      cache: the cache of all groups.
      kinds: the groups, in order.
    """

    def __init__(self, config: RtpConfig) -> None:
        self.config = config
        self.mapper = config.mapper
        self.pools = [BlockPool(count) for count in config.num_blocks]
        groups = config.topology.groups
        self.cache = SharedBlockCache(
            [self.pools[config.topology.pool_of(group.tag)] for group in groups],
            tree=config.prefix_tree,
            independent=config.independent_groups,
        )
        self.kinds = [
            KINDS[group.policy.group_type](
                index, group.policy, group.spec.block_size, config.linear_step, self.cache.pools[index], self.cache
            )
            for index, group in enumerate(groups)
        ]

    # Blocks of a request.

    def malloc(self, info: MallocInfo) -> MallocResult:
        """Blocks for a request's tokens: all of them when it is new, more of them when it grew.

        A refused request keeps exactly what it had. What was evicted to make room for it stays evicted.

        Raises:
          OperationError: a window's last blocks would not be there, as a hit brings none for a group without reuse
            and only one for others; RTP-LLM throws, here the request keeps what it had.
        """
        if info.resource.current_blocks:
            return self.grow(info)
        verdict = self.capacity(info, available=False)
        if verdict is not MallocVerdict.NONE:
            return MallocResult(0, verdict)
        try:
            begun = self.begin(info)
            grown = self.grow(info) if begun.success else begun
        except OperationError:
            self._abandon(info.resource)
            raise
        if grown.success:
            return begun
        verdict = grown.verdict
        if verdict is MallocVerdict.INTERNAL_ERROR:
            verdict = self.capacity(info, available=True) or MallocVerdict.INTERNAL_ERROR
        self._abandon(info.resource)
        return MallocResult(0, verdict)

    def _abandon(self, resource: BatchResource) -> None:
        self.free(resource)
        for row in resource.rows:
            row.device_reuse = 0

    @abc.abstractmethod
    def begin(self, info: MallocInfo) -> MallocResult:
        """Blocks for what a new request's sequences share (RTP-LLM `initMallocForCommonLen`)."""

    @abc.abstractmethod
    def grow(self, info: MallocInfo) -> MallocResult:
        """Blocks for what each sequence has for itself (RTP-LLM `incrMalloc`)."""

    @abc.abstractmethod
    def first_need(self, info: MallocInfo) -> int:
        """Blocks that a new request takes, over all groups and sequences (RTP-LLM `getNeedBlocks`)."""

    @abc.abstractmethod
    def insert(self, resource: BatchResource, tokens: int, resident: bool = False) -> None:
        """Enter a request's blocks under their keys, those of partly filled blocks included.

        Args:
          resource: the request's blocks.
          tokens: of each sequence; only under context parallelism does it matter.
          resident: never evict them.
        """

    @abc.abstractmethod
    def update(self, resource: BatchResource, sources: list[int], copy_last: bool) -> list[CopyPair] | None:
        """Make the sequences of a request those that `sources` names (RTP-LLM `updateKVBlock`).

        Args:
          resource: the request.
          sources: for each new sequence, the old one that it goes on from.
          copy_last: a sequence that is named again gets a last block of its own.

        Returns:
          What to copy; None when blocks are missing.
        """

    def free(self, resource: BatchResource) -> None:
        """Give back all that a request holds, sequence by sequence, group by group."""
        for row in resource.rows:
            for kind, blocks in zip(self.kinds, row.groups, strict=True):
                kind.free(blocks.blocks)
        resource.clear_blocks()

    def capacity(self, info: MallocInfo, *, available: bool) -> MallocVerdict:
        """Verdict on whether a new request fits next to the reserve (RTP-LLM `evaluateInitCapacity`).

        Args:
          info: the request.
          available: ask not only what the pools could hold, but what they can hold now.
        """
        need = self.first_need(info)
        if need <= 0:
            return MallocVerdict.NONE
        if need + self.config.reserve_blocks > self.total:
            return MallocVerdict.PERMANENT
        if available and need + self.config.reserve_blocks > self.available:
            return MallocVerdict.RETRYABLE
        return MallocVerdict.NONE

    def share(self, info: MallocInfo) -> None:
        """Let every sequence after the first hold the first one's blocks too."""
        first, *others = info.resource.rows
        for row in others:
            for kind, target, source in zip(self.kinds, row.groups, first.groups, strict=True):
                kind.reference(target, source.blocks)

    # Counts.

    @property
    def free_blocks(self) -> int:
        """Blocks without references, over all pools."""
        return sum(pool.free for pool in self.pools)

    @property
    def total(self) -> int:
        """Blocks that can be handed out at all, over all pools."""
        return sum(pool.total for pool in self.pools)

    @property
    def available(self) -> int:
        """Blocks that no request and no connector holds, over all pools; cached ones are among them."""
        return sum(pool.available for pool in self.pools)

    @property
    def not_in_use(self) -> int:
        """Blocks that neither a request nor the cache holds, over all pools."""
        return sum(pool.not_in_use for pool in self.pools)

    @property
    def request_refs(self) -> int:
        """Blocks that requests hold, over all pools."""
        return sum(pool.busy(REQUEST) for pool in self.pools)

    @property
    def cache_refs(self) -> int:
        """Blocks that the cache holds, over all pools."""
        return sum(pool.busy(CACHE) for pool in self.pools)

    def tokens_of(self, count: str) -> int:
        """Tokens that `free_blocks`, `available` or `total` blocks hold: those of the first group's slots."""
        return getattr(self, count) * self.logical_block_size(0)

    def token_capacity(self, count: str) -> int:
        """Tokens that `available` or `total` blocks hold, as routers are told (RTP-LLM `tokenCapacity`)."""
        return getattr(self, count) * self.mapper.virtual_block_size

    def logical_block_size(self, group: int) -> int:
        """Tokens of the sequence that one slot of a group stands for."""
        mapping = self.mapper.mapping(self.config.policies[group])
        return self.mapper.logical_block_size(mapping, self.kinds[group].block_size)

    def effective(self, group: int, tokens: int) -> int:
        """Tokens for which a group allocates on this rank."""
        return self.mapper.effective_tokens(tokens, self.mapper.mapping(self.config.policies[group]))

    def single_need(self, resource: BatchResource, tokens: int, reserve: int) -> int:
        """Slots that one sequence misses, over all groups, holes included (RTP-LLM `singleBatchNeedBlocks`)."""
        return sum(
            kind.need(self.effective(kind.group, tokens), len(blocks), reserve)
            for kind, blocks in zip(self.kinds, resource.rows[0].groups, strict=True)
        )

    def blocks(self, resource: BatchResource, row: int, group: int) -> BlockIds:
        """One sequence's blocks in one group."""
        return resource.rows[row].groups[group]

    def entry(self, blocks: dict[int, int]) -> list[int]:
        """A cache entry: a block for some groups, `NULL` for the others."""
        return [blocks.get(group, NULL) for group in range(len(self.kinds))]
