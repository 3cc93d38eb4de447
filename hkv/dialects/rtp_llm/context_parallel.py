"""Context parallelism under RTP-LLM: which rank holds which block, and under which keys. Host-only arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.errors import ConfigError
from hkv.model.group_policy import CpMapping, CpSlice, GroupPolicy, GroupType


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
        """Tokens of one slot on all ranks together."""
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

    def local_keys(self, keys: Sequence[int]) -> list[int]:
        """The keys of the blocks on this rank."""
        return list(keys[self.rank :: self.size])

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
