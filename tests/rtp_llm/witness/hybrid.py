"""Several groups that are allocated, reused and forked together."""

from __future__ import annotations

from typing import NamedTuple

from hkv.dialects.rtp_llm.bugs import LEAKS_STATES
from hkv.dialects.rtp_llm.config import NULL
from hkv.errors import OperationError
from tests.rtp_llm.witness.allocator import Allocator
from tests.rtp_llm.witness.block_ids import BlockIds
from tests.rtp_llm.witness.forks import fork_hybrid
from tests.rtp_llm.witness.joint_reuse import joint_reuse, reused_tokens
from tests.rtp_llm.witness.kinds.kind import Kind, Need
from tests.rtp_llm.witness.operation import CopyPair, MallocInfo, MallocResult, MallocVerdict
from tests.rtp_llm.witness.prefix_tree import GPU_CP_CANONICAL, GPU_LOGICAL
from tests.rtp_llm.witness.resource import BatchResource, Resource, linear_dependencies


class _Step(NamedTuple):
    """One list that grew: what it takes to undo it."""

    kind: Kind
    blocks: BlockIds
    length: int
    filled: list[int]


class HybridAllocator(Allocator):
    """Several groups over one pool (RTP-LLM `HybridTypeKVCacheAllocator`)."""

    def first_need(self, info: MallocInfo) -> int:
        """Every group is credited with the longest list's slots, whatever its own length."""
        current = info.resource.current_blocks
        needs = [self.group_need(info, kind, current) for kind in self.kinds]
        return sum(need.common for need in needs) + info.resource.batch * sum(need.extra for need in needs)

    def group_need(self, info: MallocInfo, kind: Kind, current: int) -> Need:
        """Blocks that a new request takes of one group, when `current` slots are there already."""
        common, seq = (self.effective(kind.group, tokens) for tokens in (info.common, info.tokens.seq))
        return kind.first_need(common, seq, info.tokens.reserve, current if info.reuse else 0, info.reuse)

    def begin(self, info: MallocInfo) -> MallocResult:
        """Cached blocks, then the verdict on what is left to take, then fresh blocks for what is common.

        A group that finds none for what is common leaves the request empty: why it did is asked after that.
        """
        row = info.resource.rows[0]
        reused = self._adopt(row) if info.device_cache else 0
        verdict = self.capacity(info, available=True)
        if verdict is not MallocVerdict.NONE:
            return MallocResult(0, verdict)
        done: list[_Step] = []
        for kind, blocks in zip(self.kinds, row.groups, strict=True):
            length = len(blocks)
            filled = kind.malloc(blocks, self.effective(kind.group, info.common), info.reuse)
            if filled is None:
                self._empty(info.resource, done)
                return MallocResult(0, MallocVerdict.INTERNAL_ERROR)
            done.append(_Step(kind, blocks, length, filled))
        self.share(info)
        return MallocResult(reused_tokens(self, reused))

    def _empty(self, resource: BatchResource, done: list[_Step]) -> None:
        """Give everything back (RTP-LLM `rollbackInitMalloc`)."""
        for step in done if LEAKS_STATES in self.config.bugs else ():
            step.blocks.remove(step.filled)
        self.free(resource)

    def _adopt(self, row: Resource) -> int:
        """Take over what is cached under all keys but the last; how many keys."""
        found = joint_reuse(self, self.canonical_keys(row)[:-1])
        for kind, blocks, cached in zip(self.kinds, row.groups, found.lists, strict=True):
            kind.reference(blocks, cached)
        row.device_reuse = found.keys
        return found.keys

    def grow(self, info: MallocInfo) -> MallocResult:
        """Every list of every sequence grows, or none does; then what decoding does not need is given back."""
        done: list[_Step] = []
        try:
            granted = self._extend(info, done)
        except OperationError:
            _undo(done)
            raise
        if not granted:
            _undo(done)
            return MallocResult(0, MallocVerdict.INTERNAL_ERROR)
        if info.cleanup:
            for step in done:
                step.kind.cleanup(step.blocks, info.reuse, info.tokens.reserve)
        return MallocResult()

    def _extend(self, info: MallocInfo, done: list[_Step]) -> bool:
        """Extend list after list, noting in `done` what was; False at the first that cannot be."""
        for row in info.resource.rows:
            for kind, blocks in zip(self.kinds, row.groups, strict=True):
                length, seq = len(blocks), self.effective(kind.group, info.length)
                filled = kind.malloc(blocks, seq, info.reuse, info.tokens.reserve)
                if filled is None:
                    return False
                done.append(_Step(kind, blocks, length, filled))
        return True

    def insert(self, resource: BatchResource, tokens: int, resident: bool = False) -> None:
        """All sequences, last key first, so that a prefix's first keys are the last to be evicted."""
        for row in resource.rows:
            if self.mapper.sharded:
                self._insert_sharded(row, tokens, resident)
            else:
                self._insert(row, resident)

    def _insert(self, row: Resource, resident: bool) -> None:
        dependencies = linear_dependencies(row.keys)
        for position in range(len(row.keys) - 1, -1, -1):
            found = {
                kind.group: blocks.blocks[position]
                for kind, blocks in zip(self.kinds, row.groups, strict=True)
                if kind.policy.enable_prefix_reuse and position < len(blocks) and blocks.blocks[position] != NULL
            }
            if found:
                self.cache.put(
                    row.keys[position],
                    self.entry(found),
                    resident=resident,
                    namespace=GPU_LOGICAL,
                    dependency=dependencies[position],
                )

    def _insert_sharded(self, row: Resource, tokens: int, resident: bool) -> None:
        """Group by group: those that are spread over ranks under canonical keys. A last token is always left out."""
        for kind, blocks in zip(self.kinds, row.groups, strict=True):
            if not kind.policy.enable_prefix_reuse:
                continue
            canonical = self.mapper.canonical(kind.policy)
            keys = self.canonical_keys(row) if canonical else row.keys
            dependencies = linear_dependencies(keys)
            count = min(len(keys), max(tokens - 1, 0) // self.logical_block_size(kind.group), len(blocks))
            for position in range(count - 1, -1, -1):
                block = blocks.blocks[position]
                if block != NULL:
                    self.cache.put(
                        keys[position],
                        self.entry({kind.group: block}),
                        resident=resident,
                        namespace=GPU_CP_CANONICAL if canonical else GPU_LOGICAL,
                        dependency=dependencies[position],
                    )

    def canonical_keys(self, row: Resource) -> list[int]:
        """The keys of whole virtual blocks; all keys without context parallelism."""
        return list(row.keys) if row.canonical else self.mapper.canonical_keys(row.keys)

    def update(self, resource: BatchResource, sources: list[int], copy_last: bool) -> list[CopyPair] | None:
        return fork_hybrid(self, resource, sources, copy_last)


def _undo(done: list[_Step]) -> None:
    for step in reversed(done):
        step.kind.undo(step.blocks, step.length, step.filled)
