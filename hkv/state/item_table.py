"""The cache's items: one a key, with a block for each group that has one, in order of use (RTP-LLM's `BlockCache`).

A block in an item holds a reference of its own, so that it outlives the request that brought it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from hkv.state import role_counts
from hkv.state.loops import Scalar, loop
from hkv.state.pooled import Counter, Item, Role
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("items", *role_counts.WRITES, "ids", "num_ids")
"""Arrays that these functions write."""

PRESENT, RESIDENT, NAMESPACE = 1, 2, 4
"""Values of the bits of `Item.FLAGS`."""


def find(work: PooledWorkspace, present: Scalar, key: Scalar, group: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """A key's block in a group, 0 for none. The key counts as used, even if the group has none."""
    places = work.item(key, Item.FLAGS), work.cached(key, group), *neighbours(work, key)
    work, (flags, block, *seen) = work.peek(present, "items", *places)
    # RTP-LLM's `BlockCache::match` moves an item to the front of its LRU by its key alone: a group that finds no
    # block there has used it, too.
    return use(work, flags != 0, flags != 0, key, seen), block


def look(work: PooledWorkspace, key: Scalar, group: Scalar, pool: Scalar, block: Scalar) -> tuple[Scalar, Scalar]:
    """Words that `fill` needs; reads `items` and `references` within a `hkv.state.loops.peek`."""
    old = work.read("items", work.cached(key, group))
    return old, work.read("references", work.reference(pool, block, Role.CACHE))


def fill(
    work: PooledWorkspace,
    present: Scalar,
    key: Scalar,
    group: Scalar,
    pool: Scalar,
    block: Scalar,
    seen: Sequence[Scalar],
) -> tuple[PooledWorkspace, Scalar]:
    """Puts a held block under a key, with a reference, if `present` and the group has none there; and whether it was
    put.

    `seen` is the result of `look`.
    """
    old, references = seen
    # The first block under a key stays. A later one of the same content is not cached, and is freed with its request.
    filled = jnp.asarray(present) & (old == 0)
    work = work.write_if(filled, "items", block, work.cached(key, group))
    return work.write_if(filled, "references", references + 1, work.reference(pool, block, Role.CACHE)), filled


def remove(
    work: PooledWorkspace,
    present: Scalar,
    key: Scalar,
    groups: Scalar,
    pool_of: Callable[[Scalar], Scalar],
    keep: Scalar,
) -> tuple[PooledWorkspace, Scalar]:
    """Takes a cached key out, if `present`; and how many blocks left with it.

    With `keep` the blocks keep their references; the key and its block in each group are reported then.
    """
    work = unlink(work, present, key)
    work = work.write_if(present, "items", 0, work.item(key, Item.FLAGS))
    work = work.emit(key, jnp.asarray(present) & keep)

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, count = local
        w, (block,) = w.peek(group < groups, "items", w.cached(key, group))
        w = w.write("items", 0, w.cached(key, group))
        # With `keep` the caller becomes the owner: ids are reported in the order of groups, and no reference is given
        # back.
        w = w.emit(block, keep)
        w = role_counts.release(w, (block != 0) & ~jnp.asarray(keep), pool_of(group), block, jnp.int32(Role.CACHE))
        return w, (group + 1, count + (block != 0))

    start = (jnp.where(present, 0, groups), 0)
    work, (_, count) = loop(lambda c: c[0] < groups, body, work, start, writes=WRITES)
    work, (evictions,) = work.peek(present, "counters", work.counter(Counter.EVICTIONS))
    return work.write_if(present, "counters", evictions + count, work.counter(Counter.EVICTIONS)), count


# Keys in order of use: a ring of links through the keys' own rows, the least recently used first.


def neighbours(work: PooledWorkspace, key: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """Indices into `items` of what `use` is handed: the keys used after and before a key, and the one used last."""
    return work.item(key, Item.NEXT), work.item(key, Item.PREVIOUS), work.item(work.ring, Item.PREVIOUS)


def use(work: PooledWorkspace, present: Scalar, known: Scalar, key: Scalar, seen: Sequence[Scalar]) -> PooledWorkspace:
    """Makes a key the most recently used, if `present`; it enters the ring unless `known`. `seen` was read at
    its `neighbours`."""
    after, before, last = seen
    known = jnp.asarray(present) & known
    last = jnp.where(known & (last == key), before, last)
    work = work.write_if(known, "items", after, work.item(before, Item.NEXT))
    work = work.write_if(known, "items", before, work.item(after, Item.PREVIOUS))
    work = work.write_if(present, "items", key, work.item(last, Item.NEXT))
    work = work.write_if(present, "items", last, work.item(key, Item.PREVIOUS))
    work = work.write_if(present, "items", work.ring, work.item(key, Item.NEXT))
    return work.write_if(present, "items", key, work.item(work.ring, Item.PREVIOUS))


def unlink(work: PooledWorkspace, present: Scalar, key: Scalar) -> PooledWorkspace:
    """Takes a key out of the ring, if `present`."""
    work, (after, before) = work.peek(present, "items", work.item(key, Item.NEXT), work.item(key, Item.PREVIOUS))
    work = work.write_if(present, "items", after, work.item(before, Item.NEXT))
    return work.write_if(present, "items", before, work.item(after, Item.PREVIOUS))
