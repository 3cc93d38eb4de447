"""Several groups with a pool each."""

from __future__ import annotations

from hkv.model.group_policy import GroupType
from tests.rtp_llm.witness.hybrid import HybridAllocator
from tests.rtp_llm.witness.operation import MallocInfo, MallocVerdict


class HybridPoolAllocator(HybridAllocator):
    """RTP-LLM `HybridPoolKVCacheAllocator`: the verdict is given pool by pool, and the reserve is shared out."""

    def capacity(self, info: MallocInfo, *, available: bool) -> MallocVerdict:
        """A pool that can never hold its part decides at once; one that cannot now, when all were asked."""
        verdict = MallocVerdict.NONE
        totals, availables = self._shares("total"), self._shares("available")
        for kind, blocks in zip(self.kinds, info.resource.rows[0].groups, strict=True):
            need = self.group_need(info, kind, len(blocks))
            count = need.common + info.resource.batch * need.extra
            if count <= 0:
                continue
            if count + totals[kind.group] > kind.pool.total:
                return MallocVerdict.PERMANENT
            if available and count + availables[kind.group] > kind.pool.available:
                verdict = MallocVerdict.RETRYABLE
        return verdict

    def _shares(self, name: str) -> list[int]:
        """Each pool's part of the reserve, by its size; pools of an explicit size have none."""
        sizes = [0 if kind.policy.explicit_block_num else getattr(kind.pool, name) for kind in self.kinds]
        whole = sum(sizes)
        return [self.config.reserve_blocks * size // whole if whole else 0 for size in sizes]

    def tokens_of(self, count: str) -> int:
        """Tokens for which every full group has room; every group, if none is full."""
        name = "free" if count == "free_blocks" else count
        full = [kind for kind in self.kinds if kind.policy.group_type is GroupType.FULL]
        return min(getattr(kind.pool, name) * self.logical_block_size(kind.group) for kind in full or self.kinds)

    def token_capacity(self, count: str) -> int:
        """Tokens for which the scarcest pool has room, on this rank."""
        return min(getattr(kind.pool, count) * kind.block_size for kind in self.kinds)
