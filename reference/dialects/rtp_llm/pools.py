"""Pools: blocks are held in three roles, for requests, connectors and the cache, and free when nobody holds them.

The smallest free id is handed out first, which a tree of words of 16 bits finds: a bit says that below it one is free.
"""

from __future__ import annotations

from reference.dialects.rtp_llm.records import Cache, Pool, Role
from reference.language import Text, clause

TEXT = Text(__name__)


def available(pool: Pool) -> int:
    """Blocks that no request and no connector holds: free ones, and those that eviction would give."""
    return pool.total - pool.held


def smallest(pool: Pool) -> int:
    """The smallest free block; there must be one."""
    clause("smallest", "BlockPool::malloc")
    at = 0
    while at < pool.leaf:
        at = 16 * at + 1 + lowest(pool.bits[at])
    return 16 * (at - pool.leaf) + lowest(pool.bits[at])


def lowest(word: int) -> int:
    """The lowest bit of a word that has one."""
    at = 0
    for width in (8, 4, 2, 1):
        if word & ((1 << width) - 1) == 0:
            word, at = word >> width, at + width
    return at


def refer(c: Cache, pool: Pool, block: int, role: int) -> None:
    """One more reference to a block, if it is one and no hole."""
    clause("refer", "BlockPool::requestReference")
    held = c.blocks[pool.first + block]
    was_held, was_busy = held.request + held.connector + held.cache > 0, held.request + held.connector > 0
    held.request += block > 0 and role == Role.REQUEST
    held.connector += block > 0 and role == Role.CONNECTOR
    held.cache += block > 0 and role == Role.CACHE
    pool.held += block > 0 and role != Role.CACHE and not was_busy
    pool.free -= block > 0 and not was_held
    set_free(pool, block, 0, block > 0 and not was_held)


def release(c: Cache, pool: Pool, block: int, role: int) -> None:
    """One reference less to a block, if it is one and no hole; it is free if it was the last. One that is not there is
    counted as dropped."""
    clause("release", "BlockPool::requestFree")
    held = c.blocks[pool.first + block]
    count = held.request if role == Role.REQUEST else held.connector if role == Role.CONNECTOR else held.cache
    gives = block > 0 and count > 0
    c.dropped += block > 0 and count == 0
    held.request -= gives and role == Role.REQUEST
    held.connector -= gives and role == Role.CONNECTOR
    held.cache -= gives and role == Role.CACHE
    pool.held -= gives and role != Role.CACHE and held.request + held.connector == 0
    frees = gives and held.request + held.connector + held.cache == 0
    pool.free += frees
    set_free(pool, block, 1, frees)


def set_free(pool: Pool, block: int, free: int, changes: bool) -> None:
    """If it changes, notes that a block is free now, or is not any more; upwards as long as a word has got its first
    bit, or lost its last."""
    at, bit = pool.leaf + block // 16, block % 16
    while changes:
        word = pool.bits[at]
        changed = word | 1 << bit if free else word - (word & 1 << bit)
        pool.bits[at] = changed
        changes = at > 0 and (word if free else changed) == 0
        if at > 0:
            at, bit = (at - 1) // 16, (at - 1) % 16
