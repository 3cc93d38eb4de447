"""Beams and samples: the sequences of a request become copies of one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkv.dialects.rtp_llm.bugs import FORGETS_ALIGNMENT, KEEPS_FREED_LISTS
from hkv.dialects.rtp_llm.config import NULL
from hkv.errors import OperationError
from tests.rtp_llm.witness.operation import CopyPair
from tests.rtp_llm.witness.resource import BatchResource, Resource

if TYPE_CHECKING:
    from tests.rtp_llm.witness.allocator import Allocator


def fork_single(
    allocator: Allocator, resource: BatchResource, sources: list[int], copy_last: bool
) -> list[CopyPair] | None:
    """RTP-LLM `SingleTypeKVCacheAllocator::updateKVBlock`.

    The sequences that are not continued are freed first. If the others then find no blocks for their copies the
    answer is None, and those sequences stay empty: only this allocator's forks change something before they fail.
    """
    if not sources:
        return []
    uses = _uses(resource, sources)
    kind = allocator.kinds[0]
    for row, count in zip(resource.rows, uses, strict=True):
        if count == 0:
            kind.free(row.groups[0].blocks)
            if KEEPS_FREED_LISTS not in allocator.config.bugs:
                row.groups[0].resize(0)
    wanted = sum(count - 1 for row, count in zip(resource.rows, uses, strict=True) if count and len(row.groups[0]))
    if copy_last and not kind.make_room(wanted):
        return None
    fresh = kind.pool.malloc(wanted) if copy_last else []
    return _assemble(allocator, resource, sources, uses, [fresh] if copy_last else None)


def fork_hybrid(
    allocator: Allocator, resource: BatchResource, sources: list[int], copy_last: bool
) -> list[CopyPair] | None:
    """RTP-LLM `HybridTypeKVCacheAllocator::updateKVBlock`: all or nothing.

    Copies go first into the last blocks of the sequences that are not continued, then into fresh ones.
    """
    if not sources:
        return []
    uses = _uses(resource, sources)
    recycled: list[list[int]] = [[] for _ in allocator.kinds]
    fresh: list[list[int]] = [[] for _ in allocator.kinds]
    for group, kind in enumerate(allocator.kinds if copy_last else ()):
        rows = zip(resource.rows, uses, strict=True)
        wanted = sum(count - 1 for row, count in rows if count > 1 and len(row.groups[group]))
        recycled[group] = _recyclable(resource, uses, group)[:wanted]
        for _ in range(wanted - len(recycled[group])):
            taken = kind.take(1)
            if taken is None:
                for each, blocks in zip(allocator.kinds, fresh, strict=True):
                    each.free(blocks)
                return None
            fresh[group] += taken
    for row, count in zip(resource.rows, uses, strict=True):
        if count == 0:
            for group, kind in enumerate(allocator.kinds):
                kind.free(block for block in row.groups[group].real if block not in recycled[group])
    targets = [[*old, *new] for old, new in zip(recycled, fresh, strict=True)]
    return _assemble(allocator, resource, sources, uses, targets if copy_last else None)


def _uses(resource: BatchResource, sources: list[int]) -> list[int]:
    """Number of new sequences that go on from each old one."""
    for source in sources:
        if not 0 <= source < resource.batch:
            raise OperationError("sources", source, f"a sequence from 0 to {resource.batch - 1}")
    return [sources.count(row) for row in range(resource.batch)]


def _recyclable(resource: BatchResource, uses: list[int], group: int) -> list[int]:
    """Last blocks of dropped sequences, in their order, that no other sequence of the request holds."""
    dropped = [row.groups[group] for row, count in zip(resource.rows, uses, strict=True) if count == 0]
    kept = {
        block for row, count in zip(resource.rows, uses, strict=True) if count for block in row.groups[group].blocks
    }
    held = [block for blocks in dropped for block in blocks.blocks]
    last = [blocks.blocks[-1] for blocks in dropped if len(blocks)]
    return [block for block in last if block > 0 and held.count(block) == 1 and block not in kept]


def _assemble(
    allocator: Allocator,
    resource: BatchResource,
    sources: list[int],
    uses: list[int],
    targets: list[list[int]] | None,
) -> list[CopyPair]:
    """The new sequences: the last use of an old one keeps its blocks, the earlier ones share them.

    `targets` holds, for each group, the blocks that replace the last ones of the earlier uses; None for no copies.
    """
    pairs: list[CopyPair] = []
    left, rows = list(uses), []
    for source in sources:
        original = resource.rows[source]
        left[source] -= 1
        if left[source] == 0:
            rows.append(original)
            continue
        row = _shared(allocator, original)
        rows.append(row)
        for group, kind in enumerate(allocator.kinds if targets is not None else ()):
            assert targets is not None
            if len(row.groups[group]):
                old, new = row.groups[group].pop(), targets[group].pop(0)
                row.groups[group].add([new])
                if old != NULL:
                    kind.free([old])
                    pairs.append(CopyPair(allocator.config.topology.groups[group].tag, old, new))
    resource.rows = rows
    return pairs


def _shared(allocator: Allocator, original: Resource) -> Resource:
    row = original.copy()
    row.aligned = original.aligned and FORGETS_ALIGNMENT not in allocator.config.bugs
    for kind, blocks in zip(allocator.kinds, row.groups, strict=True):
        held = list(blocks.blocks)
        blocks.resize(0)
        kind.reference(blocks, held)
    return row
