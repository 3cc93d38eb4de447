"""Configuration of a cache under RTP-LLM's rules, validated as that engine validates it. Host-only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.contract.bugs import check_bugs
from hkv.dialects.rtp_llm.bugs import BUGS
from hkv.errors import ConfigError
from hkv.limits import MAX_BLOCKS, MAX_RANKS, MAX_TOKENS, check_whole
from hkv.model.group_policy import CpMapping, CpSlice, EvictPolicy, GroupPolicy, GroupType
from hkv.model.topology import Topology
from hkv.spec import attention_of

SINGLE, HYBRID, HYBRID_POOL = NAMES = ("rtp-llm/single", "rtp-llm/hybrid", "rtp-llm/hybrid-pool")
"""The three allocators: one group; several groups over one pool; several groups with a pool each."""

NULL = -1
"""The id that stands for no block. Block 0 exists but is never handed out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RtpConfig:
    """A cache as RTP-LLM's `KVCacheManager` is configured. Lengths are in tokens unless they say blocks.

    Attributes:
      topology: the groups, in order, with their policies; its pools are `shared` or `independent`.
      num_blocks: blocks of each pool, the reserved block 0 included; one number for a shared pool, else one a group.
      block_size: tokens between two cache keys, and per block of groups that context parallelism deals out; 0 for the
        first full group's block.
      linear_step: distance, in blocks, between two states that are kept for reuse.
      reserve_blocks: blocks that a first allocation leaves free (RTP-LLM `reserve_block_num`).
      prefix_tree: eviction takes chains of the prefix tree, not single keys (RTP-LLM `enable_gpu_prefix_tree`).
      independent_eviction: groups whose policy says INDEPENDENT may lose blocks alone, under the prefix tree.
      cp_size: ranks that share the sequence, 1 for no sharding.
      cp_rank: this rank.
      prefill_cp_size: of a decode server, ranks of the prefill servers behind it that share a sequence: its compact
        groups' blocks hold the tokens of all of them. Requests then come with their cache, and a first allocation takes
        over nothing (RTP-LLM `disable_decode_first_malloc_device_reuse`), so that where such a block is cached under
        the key of its position, as RTP-LLM caches it, nobody reads it there.
      bugs: names of upstream defects to reproduce (`hkv.dialects.rtp_llm.bugs`).
    """

    topology: Topology
    num_blocks: tuple[int, ...]
    block_size: int = 0
    linear_step: int = 1
    reserve_blocks: int = 0
    prefix_tree: bool = False
    independent_eviction: bool = False
    cp_size: int = 1
    cp_rank: int = 0
    prefill_cp_size: int = 1
    bugs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_bugs(self.bugs, BUGS)
        pools = self.topology.num_pools
        if not isinstance(self.num_blocks, tuple) or len(self.num_blocks) != pools:
            raise ConfigError("num_blocks", self.num_blocks, f"a tuple of {pools}, one number a pool")
        for index, count in enumerate(self.num_blocks):
            check_whole(f"num_blocks[{index}]", count, 2, MAX_BLOCKS)
        if self.block_size == 0:
            (first, *_) = self.full_groups or (0,)
            object.__setattr__(self, "block_size", self.topology.groups[first].spec.block_size)
        check_whole("block_size", self.block_size, 1, MAX_TOKENS)
        check_whole("linear_step", self.linear_step, 0, MAX_TOKENS)
        check_whole("reserve_blocks", self.reserve_blocks, 0, MAX_BLOCKS)
        check_whole("cp_size", self.cp_size, 1, MAX_RANKS)
        check_whole("prefill_cp_size", self.prefill_cp_size, 1, MAX_RANKS)
        if self.cp_size > 1 and self.prefill_cp_size > 1:
            raise ConfigError("prefill_cp_size", self.prefill_cp_size, "1 where own ranks share a sequence")
        CpSlotMapper(self.cp_rank, self.cp_size, self.block_size)
        self._check_groups()

    def _check_groups(self) -> None:
        attention = [
            group
            for group in self.topology.groups
            if group.policy.group_type is GroupType.FULL and attention_of(group.spec)
        ]
        if self.topology.pools == "shared" and not attention:
            raise ConfigError("groups", self.topology.tags, "a full-attention group, or independent pools")
        ranks = max(self.cp_size, self.prefill_cp_size)
        for group in self.topology.groups:
            compact = ranks > 1 and group.policy.cp_mapping is CpMapping.COMPACT_LAST_RANK
            wanted = self.block_size * (ranks if compact else 1)
            if group.spec.block_size != wanted:
                expected = (
                    f"{wanted}: a block for each cache key" if not compact else f"{wanted}: the tokens of all ranks"
                )
                raise ConfigError(f"block_size of group {group.tag}", group.spec.block_size, expected)

    @property
    def name(self) -> str:
        """Name of the dialect, which is the allocator's."""
        if self.topology.pools == "independent":
            return HYBRID_POOL
        return HYBRID if len(self.topology.groups) > 1 else SINGLE

    @property
    def policies(self) -> tuple[GroupPolicy, ...]:
        """The groups' policies, in group order."""
        return tuple(group.policy for group in self.topology.groups)

    @property
    def full_groups(self) -> tuple[int, ...]:
        """Indices of the groups that keep every block."""
        return tuple(i for i, policy in enumerate(self.policies) if policy.group_type is GroupType.FULL)

    @property
    def independent_groups(self) -> frozenset[int]:
        """Indices of the groups that may lose blocks alone; none unless `independent_eviction` is on."""
        if not self.independent_eviction:
            return frozenset()
        chosen = (i for i, policy in enumerate(self.policies) if policy.evict_policy is EvictPolicy.INDEPENDENT)
        return frozenset(chosen)

    @property
    def mapper(self) -> CpSlotMapper:
        """Mapper from logical blocks to ranks and slots under context parallelism."""
        return CpSlotMapper(self.cp_rank, self.cp_size, self.block_size)


RESERVE_RATIO = 5
"""Percent of its blocks that RTP-LLM leaves free at a first allocation unless told otherwise."""


def reserve_for_ratio(ratio: int, available: int) -> int:
    """Blocks that stay free when `ratio` percent of `available` blocks are reserved, rounded down."""
    return ratio * available // 100


# Context parallelism under RTP-LLM: which rank holds which block, and under which keys. Host-only arithmetic.


@dataclasses.dataclass(frozen=True)
class CpSlotMapper:
    """Deals the logical blocks of a sequence out to ranks, one by one (RTP-LLM `CPSlotMapper`).

    Logical block b lies on rank `b % size`, in slot `b // size` of that rank's row. `size` blocks in a row are one
    virtual block.

    Attributes:
      rank: this rank.
      size: ranks.
      block_size: tokens per logical block.
    """

    rank: int
    size: int
    block_size: int

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise ConfigError("cp_size", self.size, "a positive number of ranks")
        if type(self.block_size) is not int or self.block_size < 1:
            raise ConfigError("block_size", self.block_size, "a positive number of tokens")
        if type(self.rank) is not int or not 0 <= self.rank < self.size:
            raise ConfigError("cp_rank", self.rank, f"a rank from 0 to {self.size - 1}")

    @property
    def sharded(self) -> bool:
        """True if there is more than one rank."""
        return self.size > 1

    @property
    def virtual_block_size(self) -> int:
        """Tokens of one virtual block: as many logical blocks as there are ranks."""
        return self.block_size * self.size

    def local_blocks(self, tokens: int) -> int:
        """Slots each rank needs for `tokens` tokens: the same on all, so that the last may stay unused on some."""
        blocks = -(-max(tokens, 0) // self.block_size)
        return -(-blocks // self.size)

    def effective_tokens(self, tokens: int, mapping: CpMapping) -> int:
        """The length for which a group of that mapping allocates on this rank."""
        if not self.sharded or mapping is not CpMapping.BLOCK_ROUND_ROBIN:
            return tokens
        return self.local_blocks(tokens) * self.block_size

    def logical_block_size(self, mapping: CpMapping, group_block_size: int) -> int:
        """Tokens of the sequence that one slot of a group stands for."""
        dealt = self.sharded and mapping is CpMapping.BLOCK_ROUND_ROBIN
        return self.virtual_block_size if dealt else group_block_size

    def owner(self, block: int) -> tuple[int, int]:
        """`(rank, slot)` of a logical block."""
        return block % self.size, block // self.size

    def canonical_keys(self, keys: Sequence[int]) -> list[int]:
        """The keys of whole virtual blocks: in each, the last rank's key covers them all."""
        return list(keys[self.size - 1 :: self.size])

    def mapping(self, policy: GroupPolicy) -> CpMapping:
        """Split of a group of that policy over the ranks."""
        return policy.cp_mapping if self.sharded else CpMapping.NONE

    def slice(self, policy: GroupPolicy) -> CpSlice:
        """Part of a block that a rank holds; a full group's blocks are never sliced."""
        if not self.sharded or policy.group_type is GroupType.FULL:
            return CpSlice.NONE
        return policy.cp_slice

    def canonical(self, policy: GroupPolicy) -> bool:
        """True if a group's blocks are cached under canonical keys."""
        return self.mapping(policy) is not CpMapping.NONE
