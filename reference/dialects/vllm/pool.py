"""The pool of blocks: who holds them, by which keys they are found, and the order in which they are handed out.

Duplicates of a key are kept apart, never merged: a lookup gives the oldest. Where hits may end inside a block it may
have several keys, one for each number of hash blocks that are covered; a longer key comes in the place of shorter ones.

After vLLM 0.33 `BlockPool`, `BlockHashToBlockMap` and `FreeKVCacheBlockQueue`.
"""

from __future__ import annotations

from reference.dialects.vllm.records import NONE, Block, Cache, Entry, Fate, Group, Request, Told
from reference.language import Text, clause

TEXT = Text(__name__)


def entry_of(c: Cache, request: Request, group: Group, at: int) -> Entry:
    """A request's key of its hash block `at`, from 0 on, in a group."""
    return c.entries[request.chain[at] * c.config.width + group.place]


def is_cached(c: Cache, block: Block) -> bool:
    """True if a block has a key."""
    return block.names > 0 if c.config.parts > 1 else block.known[0] is not None


def primary(c: Cache, block: Block) -> Entry:
    """The entry of a block's longest key; None for none."""
    found, part = block.known[0], c.config.parts - 1
    while found is None and part > 0:
        found = block.known[part]
        part -= 1
    return found


def enter(c: Cache, block: Block, part: int, entry: Entry) -> None:
    """A block stands under a key, behind those that do already."""
    first = entry.first
    if first is None:
        entry.first = block
    else:
        clause("register/duplicate", "BlockHashToBlockMap.insert", "two blocks hold the same key")
        last = first if first.sooner[part] is None else first.sooner[part]
        last.later[part] = block
        first.sooner[part] = block
        block.later[part], block.sooner[part] = first, last
    block.known[part] = entry
    if c.config.parts > 1:
        block.names += 1


def withdraw(c: Cache, block: Block, part: int) -> None:
    """A block stands under one of its keys no more."""
    entry, later, sooner = block.known[part], block.later[part], block.sooner[part]
    block.known[part] = NONE
    if c.config.parts > 1:
        block.names -= 1
    if entry.first is block:
        entry.first = later
    if later is not None:
        two = later is sooner
        sooner.later[part], later.sooner[part] = NONE if two else later, NONE if two else sooner
        block.later[part], block.sooner[part] = NONE, NONE


def drop_keys(c: Cache, block: Block, taker: Group) -> None:
    """A block is found no more; `taker`: the group that it is handed out to, None for none."""
    if is_cached(c, block):
        clause("drop-keys", "BlockPool._maybe_evict_cached_block", "a block loses its keys")
        for part in range(c.config.parts):
            entry = block.known[part]
            if entry is not None:
                withdraw(c, block, part)
                if c.config.events:
                    c.told += 1
                    told = c.news[c.told]
                    told.kind, told.entry = Told.REMOVED, entry
                if c.config.explains and taker is not None and entry.first is None:
                    entry.lost, entry.taker = c.step, taker


def note(c: Cache, entry: Entry, fate: int) -> None:
    """Notes what became of a key, for whoever asks why a hit missed."""
    if c.config.explains:
        entry.noted, entry.lost = fate, 0


def register(c: Cache, block: Block, part: int, entry: Entry) -> None:
    """A block enters the cache under a key."""
    enter(c, block, part, entry)
    note(c, entry, Fate.REGISTERED)
    tell_key(c, entry)


def tell_key(c: Cache, entry: Entry) -> None:
    """A key of the span that is told of next."""
    if c.config.events:
        c.told += 1
        told = c.news[c.told]
        told.kind, told.entry = Told.KEY, entry


def tell_stored(c: Cache, request: Request, group: Group, start: int, end: int, size: int) -> None:
    """The event that the keys told of last were stored, of a span of tokens (`BlockStored`)."""
    if c.config.events:
        c.told += 1
        told = c.news[c.told]
        told.kind, told.request, told.group = Told.STORED, request, group
        told.start, told.end, told.size = start, end, size


def take(c: Cache, group: Group) -> Block:
    """The next free block, with one reference and without keys; there must be one."""
    block = c.free.oldest()
    c.free.remove(block)
    c.free.count -= 1
    block.refs = 1
    if is_cached(c, block):
        clause("evict/reuse", "BlockPool.get_new_blocks", "a cached block is handed out and loses its keys")
        c.evictions += 1
    drop_keys(c, block, group)
    return block


def tell_zeroed(c: Cache, group: Group, block: Block) -> None:
    """A block is to be zeroed before it is read (`take_new_block_ids`)."""
    if c.config.zeroing and group.zeroed:
        c.told += 1
        told = c.news[c.told]
        told.kind, told.group, told.block = Told.ZERO, group, block


def touch(c: Cache, block: Block) -> None:
    """A block gains a reference; a free one leaves the queue."""
    clause("touch", "BlockPool.touch")
    if block.refs == 0:
        c.free.remove(block)
        c.free.count -= 1
    block.refs += 1


def release(c: Cache, block: Block, last: Block) -> Block:
    """A block loses a reference. Without any it is free: behind all others, for as long as possible; or, if it has no
    key, before all others, behind the `last` such block that was released with it. That one."""
    clause("release", "BlockPool.free_blocks")
    left = block.refs - 1
    block.refs = left
    if left == 0:
        known = is_cached(c, block)
        newer = c.free.ends if known else c.free.newer[last]
        c.free.put_behind(block, newer)
        c.free.count += 1
        if not known:
            last = block
    return last


def offer(c: Cache, group: Group, request: Request, block: Block, entry: Entry) -> None:
    """A connector is to be offered a state (`BoundaryStateOffload`)."""
    c.offered += 1
    made = c.offers[c.offered]
    made.group, made.request, made.block, made.entry = group, request, block, entry
