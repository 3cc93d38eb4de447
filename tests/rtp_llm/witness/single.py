"""One full group over one pool."""

from __future__ import annotations

from hkv.dialects.rtp_llm.config import SINGLE, RtpConfig
from hkv.errors import ConfigError
from tests.rtp_llm.witness.allocator import Allocator
from tests.rtp_llm.witness.forks import fork_single
from tests.rtp_llm.witness.operation import CopyPair, MallocInfo, MallocResult, MallocVerdict
from tests.rtp_llm.witness.resource import BatchResource


class SingleAllocator(Allocator):
    """RTP-LLM `SingleTypeKVCacheAllocator`. Context parallelism changes its token counts, not its allocation."""

    def __init__(self, config: RtpConfig) -> None:
        if config.name != SINGLE:
            raise ConfigError("groups", config.topology.tags, "one full-attention group for the single allocator")
        super().__init__(config)
        self.kind = self.kinds[0]
        self.pool = self.pools[0]

    def first_need(self, info: MallocInfo) -> int:
        need = self.kind.first_need(
            info.common, info.tokens.seq, info.tokens.reserve, info.resource.current_blocks, info.reuse
        )
        return need.common + info.resource.batch * need.extra

    def begin(self, info: MallocInfo) -> MallocResult:
        """Cached blocks for all keys but the last, fresh ones for the rest, unless the reserve forbids them."""
        resource = info.resource
        row, reserve = resource.rows[0], self.config.reserve_blocks
        estimate = self.first_need(info) if reserve else 0
        hits: list[int] = []
        if info.device_cache and self.kind.policy.enable_prefix_reuse:
            hits = self.kind.match_prefix(row.keys[:-1])
            self.kind.reference(row.groups[0], hits)
            row.device_reuse = len(hits)
        left = max(estimate - len(hits), 0)
        if left and self.available < left + reserve:
            return MallocResult(0, MallocVerdict.INTERNAL_ERROR)
        if self.kind.malloc(row.groups[0], info.common, info.reuse) is None:
            return MallocResult(0, MallocVerdict.INTERNAL_ERROR)
        self.share(info)
        return MallocResult(len(hits) * self.kind.block_size)

    def grow(self, info: MallocInfo) -> MallocResult:
        """Gives each sequence as many blocks as the first one misses. Nothing is ever given back."""
        rows = [row.groups[0] for row in info.resource.rows]
        length = len(rows[0])
        if self.kind.need(info.length, length, info.tokens.reserve) == 0:
            return MallocResult()
        lengths = [len(blocks) for blocks in rows]
        for blocks in rows:
            if self.kind.malloc(blocks, info.length, info.reuse, info.tokens.reserve) is None:
                for touched, before in zip(rows, lengths, strict=True):
                    self.kind.undo(touched, before, ())
                return MallocResult(0, MallocVerdict.INTERNAL_ERROR)
        return MallocResult()

    def insert(self, resource: BatchResource, tokens: int, resident: bool = False) -> None:
        """The first sequence's blocks, first to last, as roots of the prefix tree: the oldest are a prefix's first."""
        if self.kind.policy.enable_prefix_reuse:
            row = resource.rows[0]
            for key, block in zip(row.keys, row.groups[0].blocks, strict=False):
                self.cache.put(key, [block], resident=resident)

    def update(self, resource: BatchResource, sources: list[int], copy_last: bool) -> list[CopyPair] | None:
        return fork_single(self, resource, sources, copy_last)
