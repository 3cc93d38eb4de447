"""Estimate: the number of blocks that a request will hold at most until it ends."""

from __future__ import annotations

from reference.dialects.rtp_llm.lists import has_block, on_grid, total
from reference.dialects.rtp_llm.records import BlockIds, Cache, Group, Kind, Operation, Request, ceil
from reference.language import Text, clause

TEXT = Text(__name__)


def peak(c: Cache, request: Request, op: Operation, fresh: bool) -> int:
    """Blocks beyond those it has that a request holds at its peak, `op.tokens` from now.

    An upper bound for a new request, for every group is taken at its own peak. A request that is to be forked is
    counted one block a new sequence when its last block is partly filled, however many groups there are.
    """
    clause("peak", "KVCacheAllocator::estimateBatchPeakNeedBlocks")
    width, most = max(request.batch, op.sequences), 0
    for g in range(c.config.groups):
        group, ids = c.groups[g + 1], request.rows[0].groups[g]
        held = 0
        for at in range(ids.length):
            held += ids.blocks[at] > 0
        if group.kind == Kind.LINEAR:
            most += max(of_states(c, request, op, group, ids, fresh, width) - held, 0)
        else:
            last = ceil(request.tokens + op.tokens + request.reserve, group.block)
            if fresh:
                common = ceil(min(request.common, request.tokens), group.block)
                most += common + width * max(last - common, 0)
            else:
                most += max(last - (ids.length if group.kind == Kind.FULL else held), 0)
    if fresh:
        return most
    return width * most + (width - request.batch if request.tokens % c.config.block > 0 else 0)


def of_states(c: Cache, request: Request, op: Operation, group: Group, ids: BlockIds, fresh: bool, width: int) -> int:
    """The most that all slots of states cost while a list grows slot by slot, a cleanup after each."""
    each, common = width if fresh else 1, ceil(min(request.common, request.tokens), group.block) if fresh else 0
    start = ids.length if ids.length > 0 else max(total(group, request.tokens, request.reserve), common)
    cost, cleaned = 0, 0
    for at in range(start):
        cost += cost_of(c, request, op, group, ids, at, common, each)
    most = cost
    for size in range(start + 1, total(group, request.tokens + op.tokens, request.reserve) + 1):
        cost += each
        most = max(most, cost)
        while cleaned < size - group.kept - request.reserve:
            if not on_grid(c, group, cleaned, op.reuse):
                cost -= each if cleaned >= start else cost_of(c, request, op, group, ids, cleaned, common, each)
            cleaned += 1
    return most


def cost_of(
    c: Cache, request: Request, op: Operation, group: Group, ids: BlockIds, at: int, common: int, each: int
) -> int:
    """Blocks of a slot: what it has, or what an allocation would bring, for the first `common` slots once."""
    if ids.length > 0:
        return ids.blocks[at] > 0
    if at < common:
        return has_block(c, group, at, common, 0, op.reuse)
    return each if has_block(c, group, at, ceil(request.tokens, group.block), request.reserve, op.reuse) else 0
