"""Lists of blocks: how long they are, which of their slots have a block, and how they grow and are swept.

A full group keeps every block; a linear one its last states, and states on a grid that others resume from; a window its
last blocks, and those on a grid if its policy lets others reuse them. Slots in between are holes.
"""

from __future__ import annotations

import enum

from reference.dialects.rtp_llm.evicting import make_room
from reference.dialects.rtp_llm.pools import refer, release, smallest
from reference.dialects.rtp_llm.records import BlockIds, Cache, Group, Kind, Request, Role, Status, ceil
from reference.language import Text, clause

TEXT = Text(__name__)


class Sweep(enum.IntEnum):
    """Ways to give back: nothing; what the allocation at hand brought; what decoding does not need; everything; the
    same where a first allocation found no block; and of a sequence that a fork drops, what it gives to no other."""

    NOTHING, UNDO, CLEAN, CLEAR, ABANDON, DROP = range(6)


def total(group: Group, tokens: int, reserve: int) -> int:
    """Slots for tokens and a reserve: tokens, too, but for states, where it is one more than slots."""
    if group.kind == Kind.LINEAR:
        return ceil(tokens, group.block) + max(reserve - 1, 0)
    return ceil(tokens + reserve, group.block)


def effective(c: Cache, group: Group, tokens: int) -> int:
    """The tokens for which a group allocates on this rank: all ranks have as many slots."""
    if group.dealt:
        clause("effective-length", "CPSlotMapper::effectiveSeqLenForAlloc")
        return ceil(ceil(tokens, c.config.block), c.config.ranks) * c.config.block
    return tokens


def on_grid(c: Cache, group: Group, at: int, reuse: int) -> bool:
    """True if the block of a slot is kept for requests that reuse it."""
    return group.grid > 0 and reuse > 0 and (at + 1) % c.config.step == 0


def has_block(c: Cache, group: Group, at: int, filled: int, reserve: int, reuse: int) -> bool:
    """True if an allocation brings a block to a slot; slots from `filled` on are the reserve's."""
    last = filled - group.tail <= at < filled
    return last or (reserve > 0 and at >= filled) or on_grid(c, group, at, reuse)


def lacks(c: Cache, group: Group, ids: BlockIds, at: int, filled: int, reserve: int, reuse: int) -> bool:
    """True if an allocation brings a block to a slot that has none."""
    return has_block(c, group, at, filled, reserve, reuse) and (at >= ids.length or ids.blocks[at] == 0)


def extend(c: Cache, group: Group, ids: BlockIds, filled: int, end: int, reserve: int, reuse: int) -> int:
    """Makes a list `end` slots long, with the blocks that it lacks then, for which others may leave; a status.

    Of states, holes are filled that the new length wants, before slots are appended. What is refused changes nothing.
    Tokens fill `filled` of the slots, the others are the reserve's.
    """
    clause("extend", "KVCacheGroup::malloc")
    start = 0 if group.kind == Kind.LINEAR else ids.length
    if end > c.config.row:
        return Status.ROW_FULL
    count = 0
    for at in range(start, end):
        count += lacks(c, group, ids, at, filled, reserve, reuse)
    if not make_room(c, group, count):
        clause("no-blocks", "KVCacheGroup::malloc", "a list finds no blocks")
        return Status.INTERNAL_ERROR
    if end > filled:
        clause("reserve-slots", "KVCacheGroup::malloc", "tokens to come have slots")
    whole = max(end, ids.length)
    for at in range(max(whole - group.checked, 0), whole):
        if not (ids.blocks[at] > 0 if at < ids.length else has_block(c, group, at, filled, reserve, reuse)):
            clause("tail-missing", "SWAKVCacheGroup::validateTailBlocks", "a window's last blocks would not be there")
            return Status.TAIL_MISSING
    for at in range(start, end):
        block = 0
        if lacks(c, group, ids, at, filled, reserve, reuse):
            block, ids.fresh[at] = smallest(group.pool), c.fills
        if block > 0 or at >= ids.length:
            ids.blocks[at] = block
        refer(c, group.pool, block, Role.REQUEST)
    ids.before = ids.length
    ids.length = whole
    return Status.OK


def append(c: Cache, group: Group, target: BlockIds, source: BlockIds, count: int) -> None:
    """Appends blocks that another list has, holes included, with a reference to each."""
    clause("share", "KVCacheGroup::reference")
    for at in range(count):
        block = source.blocks[at]
        target.blocks[target.length + at] = block
        refer(c, group.pool, block, Role.REQUEST)
    target.length += count


def sweep_all(c: Cache, request: Request, mode: int, done: int, reuse: int) -> None:
    """Sweeps a request's lists, sequence by sequence; only the first `done` have grown."""
    for n in range(done if mode == Sweep.UNDO else request.batch * c.config.groups):
        row, g = n // c.config.groups, n % c.config.groups
        sweep(c, c.groups[g + 1], request.rows[row].groups[g], mode, request.reserve, reuse, n < done)


def sweep(c: Cache, group: Group, ids: BlockIds, mode: int, reserve: int, reuse: int, grown: int) -> None:
    """Gives blocks of a list back; a cleaned one keeps its length, with holes."""
    leaks = c.defects.leak_of_backfilled_states and mode == Sweep.ABANDON and grown
    keeps = c.defects.refused_fork_keeps_freed_lists and mode == Sweep.DROP
    end = ids.length
    if mode == Sweep.CLEAN:
        end = max(ids.length - group.kept - reserve, 0)
    for at in range(end):
        block = ids.blocks[at]
        goes = mode >= Sweep.CLEAR
        if mode == Sweep.UNDO:
            goes = at >= ids.before or ids.fresh[at] == c.fills
        elif mode == Sweep.CLEAN:
            goes = not on_grid(c, group, at, reuse)
        goes = goes and block > 0 and not (mode == Sweep.DROP and ids.given == c.asked and at == ids.length - 1)
        if goes and mode == Sweep.CLEAN:
            clause("clean", "KVCacheGroup::removeSkippedBlocks", "a request gives back what decoding does not need")
        if goes and not keeps:
            ids.blocks[at] = 0
        if goes and leaks and ids.fresh[at] == c.fills and at < ids.before:
            clause(
                "leak-of-backfilled-states",
                "HybridKVCacheAllocator::rollbackInitMalloc",
                "defect: states put into holes are forgotten when a later group finds no block",
            )
            goes = False
        release(c, group.pool, block if goes else 0, Role.REQUEST)
    if mode == Sweep.UNDO:
        ids.length = ids.before
    elif mode >= Sweep.CLEAR and not keeps:
        ids.length = 0
