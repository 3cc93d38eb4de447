"""Leaving: blocks that no later token reads, whole rows, and what a connector held or was promised.

After vLLM 0.33 `remove_skipped_blocks`, `free`, `pop_blocks_for_free` and `take_boundary_state_offloads`.
"""

from __future__ import annotations

from reference.dialects.vllm.pool import primary, release, touch
from reference.dialects.vllm.records import (
    NONE,
    Block,
    Cache,
    Code,
    Entry,
    Group,
    Kind,
    Request,
    Told,
    at_column,
    passed,
)
from reference.language import Text, clause

TEXT = Text(__name__)


def give_back(c: Cache, request: Request, processed: int, everything: int) -> None:
    """Blocks that no token from `processed` on reads, or all, are given back, last first, group by group."""
    clause("retire", "SingleTypeKVCacheManager.remove_skipped_blocks")
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], request.rows[g]
        begin, end, last = row.begin, row.length, c.free.ends
        if not everything:
            end = min(passed(group, processed), row.length)
        if c.config.sinks and group.sinks > 0:
            begin = 0 if everything else max(begin, group.sinks)
        for column in range(end - 1, begin - 1, -1):
            block = at_column(group, row, column)
            if block is not None:
                last = release(c, block, last)
                if c.config.explains and not everything:
                    passed_by(group)
        row.begin = max(end, row.begin)
        gone = c.config.states and group.kind == Kind.STATE and row.shared - 1 < row.begin
        if gone and not everything and not c.defects.tail_key_outlives_state:
            row.shared = 0


def passed_by(group: Group) -> None:
    """Names what no later token of a request reads."""
    if group.kind == Kind.STATE:
        clause("retire/mamba", "MambaManager.remove_skipped_blocks", "earlier states are given back")
    elif group.kind == Kind.CHUNK:
        clause("retire/chunk", "ChunkedLocalAttentionManager", "blocks before the chunk are given back")
    else:
        clause("retire/sliding-window", "SlidingWindowManager", "blocks before the window are given back")


def clear(c: Cache, request: Request) -> None:
    """A request has no blocks any more, and nothing of it is offered."""
    for g in range(1, c.config.width + 1):
        row = request.rows[g]
        if c.config.exporting:
            for column in range(max(row.looked, 0), row.length):
                row.stands[column] = 0
        row.begin, row.length, row.looked, row.shared, row.grown, row.planned, row.begun = 0, 0, -1, 0, 0, 0, 0
        if c.config.offering:
            row.tail = NONE
    if c.config.offering:
        keep_offers(c, request)


def wait_again(c: Cache, request: Request) -> None:
    """A request holds no blocks any more, and nothing of it is computed."""
    request.running, request.computed, request.flying, request.room, request.grant_step = 0, 0, 0, 0, 0
    request.returned = 1
    c.scheduled -= 1


def keep_offers(c: Cache, request: Request) -> None:
    """Forgets what was offered of a request (`pop_blocks_for_free`)."""
    kept = 0
    for n in range(1, c.offered + 1):
        each = c.offers[n]
        if each.request is not request:
            kept += 1
            moved = c.offers[kept]
            moved.group, moved.request, moved.block, moved.entry = each.group, each.request, each.block, each.entry
    c.offered = kept


def take_offers(c: Cache) -> None:
    """Tells of the states on offer, group by group, since this was asked last (`take_boundary_state_offloads`)."""
    for g in range(1, c.config.width + 1):
        for n in range(1, c.offered + 1):
            each = c.offers[n]
            if each.group is c.groups[g]:
                tell_offer(c, each.request, g, each.block, each.entry)
    c.offered = 0


def finalize(c: Cache, request: Request, in_flight: int) -> None:
    """Tells of the ends of a request's prompt inside blocks, if no later token was computed; once
    (`finalize_partial_tail_offloads`)."""
    for g in range(1, c.config.width + 1):
        row = request.rows[g]
        tail, block = row.tail, row.tail_block
        row.tail = NONE
        if tail is not None and in_flight == 0 and request.computed == row.tail_end:
            tell_offer(c, request, g, block, tail)


def tell_offer(c: Cache, request: Request, g: int, block: Block, entry: Entry) -> None:
    """Tells of a state that is still in its block, which is held and known by the state's key."""
    stands = block.refs > 0 and primary(c, block) is entry
    if c.defects.offer_outlives_state:
        clause("offer-outlives-state", "KVCacheManager.take_boundary_state_offloads", "defect: what is gone is offered")
        stands = True
    if stands:
        c.told += 1
        told = c.news[c.told]
        told.kind, told.request, told.group = Told.OFFER, request, c.groups[g]
        told.block, told.entry = block, entry


def settle_copies(c: Cache, holds: int) -> None:
    """Copies are made, group by group: their blocks lose what held them for that, unless they stay held."""
    last = c.free.ends
    for g in range(1, c.config.width + 1):
        for n in range(1, c.pending + 1):
            made = c.copies[n]
            if made.group is c.groups[g] and not holds:
                for block in (made.source, made.target):
                    last = release(c, block, last)
    c.pending = 0


def change_holds(c: Cache, start: int, count: int, code: int) -> bool:
    """Blocks lose a reference each, in this order, or gain one; False where one has too few to lose."""
    for n in range(count):
        block, wanted = c.blocks[c.payload[start + n]], 0
        for other in range(count):
            wanted += c.payload[start + other] == c.payload[start + n]
        if code == Code.RELEASE and block.refs < wanted:
            return False
    last = c.free.ends
    for n in range(count):
        block = c.blocks[c.payload[start + n]]
        if code == Code.RELEASE:
            last = release(c, block, last)
        else:
            touch(c, block)
    return True
