"""Registration: a request's blocks are entered into the cache under their keys (RTP-LLM `insertIntoCache`).

The allocators differ in what they enter, and in which order: a single group those of the first sequence, forward; a
hybrid those of all sequences, backward, so that the beginning of a prefix is the most recently used. Order decides what
is evicted, and so it is kept, by arithmetic on one loop's position instead of a loop for each. Under context
parallelism groups come one after the other, since each may have keys of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules import prefix_tree
from hkv.dialects.rtp_llm.rules.parameters import CacheField, GroupField, RtpView, canonical_place
from hkv.dialects.rtp_llm.rules.prefix_tree import DEFAULT, GPU_CP_CANONICAL, GPU_LOGICAL
from hkv.state import item_table
from hkv.state.loops import Scalar, divide, loop, peek, remainder
from hkv.state.pooled import Counter, Item
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("rows", "requests", "chains", *item_table.WRITES, *prefix_tree.WRITES)
"""Arrays that registering writes; `rows`, `requests` and `chains` only in their spare elements."""


class InsertedKey(NamedTuple):
    """One key to insert into the cache, with its block in some groups' lists.

    Attributes:
      slot, sequence, position: place of the blocks.
      first, end: the groups.
      key, namespace, ordinal, parent: the key and what it builds on, as in `Item`.
      resident: True if it is never evicted.
    """

    slot: Scalar
    sequence: Scalar
    position: Scalar
    first: Scalar
    end: Scalar
    key: Scalar
    namespace: Scalar
    ordinal: Scalar
    parent: Scalar
    resident: Scalar


class InsertedRequest(NamedTuple):
    """A request that is entered: its sequences, whole keys, and the tokens of each sequence."""

    slot: Scalar
    sequences: Scalar
    keys: Scalar
    tokens: Scalar
    resident: Scalar


def insert(work: PooledWorkspace, view: RtpView, batch: InsertedRequest) -> PooledWorkspace:
    """Enters a request's blocks (RTP-LLM `insertIntoCache`).

    With a single group: those of the first sequence, first key first, each a root. Else those of all sequences, last
    key first, so that a prefix's first keys are the last to be evicted; under context parallelism group by group, and
    never the block of a last token.
    """
    single, ranks, groups = view.whole(CacheField.SINGLE) != 0, view.whole(CacheField.RANKS), view.num_groups
    sharded = ranks > 1
    passes = jnp.where(sharded, groups, 1)

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        place = local[0]
        sequence, group = divide(place, passes), remainder(place, passes)
        canonical = view.flag(group, GroupField.CANONICAL) & sharded
        stride = jnp.where(canonical, ranks, 1)
        w, (length,) = w.peek(place >= 0, "requests", w.length(batch.slot, sequence, group))
        whole = divide(jnp.maximum(batch.tokens - 1, 0), view.group(group, GroupField.LOGICAL))
        count = divide(batch.keys, stride)
        # Under context parallelism never the block of the last token: it is computed again by whoever hits.
        count = jnp.where(sharded, jnp.minimum(count, jnp.minimum(whole, length)), count)

        def enter(v: PooledWorkspace, at: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
            step, changes = at
            # Backwards: the first keys of a prefix are entered last, are the most recently used, and stay the
            # longest.
            position = jnp.where(single, step, count - 1 - step)
            chain = v.chain(batch.slot, sequence)
            # A single group's keys are all roots: its `insertIntoCache` names no dependency.
            before = (position > 0) & ~single
            v, (key, parent) = v.peek(
                step >= 0,
                "chains",
                chain + canonical_place(position, stride),
                chain + jnp.where(before, canonical_place(position - 1, stride), 0),
            )
            namespace = jnp.where(single, DEFAULT, jnp.where(canonical, GPU_CP_CANONICAL, GPU_LOGICAL))
            entry = InsertedKey(
                slot=batch.slot,
                sequence=sequence,
                position=position,
                first=jnp.where(sharded, group, 0),
                end=jnp.where(sharded, group + 1, groups),
                key=key,
                namespace=namespace,
                ordinal=jnp.where(single, 0, position),
                parent=jnp.where(before, parent + 1, 0),
                resident=batch.resident,
            )
            v, changed = put(v, view, entry)
            return v, (step + 1, changes + changed)

        w, (_, changes) = loop(lambda c: c[0] < count, enter, w, (0, local[1]), writes=WRITES)
        return w, (place + 1, changes)

    sequences = jnp.where(single, jnp.minimum(batch.sequences, 1), batch.sequences)
    end = sequences * passes
    work, (_, changes) = loop(lambda c: c[0] < end, one, work, (0, 0), writes=WRITES)
    # Once for a whole insertion, by the number of changes: RTP-LLM counts each `put` that changed something.
    work, (version,) = work.peek(changes > 0, "counters", work.counter(Counter.VERSION))
    return work.write_if(changes > 0, "counters", version + changes, work.counter(Counter.VERSION))


def put(work: PooledWorkspace, view: RtpView, entry: InsertedKey) -> tuple[PooledWorkspace, Scalar]:
    """Enters one key, if any of its groups has a block there (RTP-LLM `SharedBlockCache::put`); whether that is a new
    version.

    A slot that is filled keeps its block. Residence stays once it is there, and a dependency among virtual blocks is
    not replaced by one of another namespace.
    """
    work, there = _any_block(work, view, entry)
    own = (work.item(entry.key, field) for field in (Item.FLAGS, Item.ORDINAL, Item.PARENT))
    places = *own, *item_table.neighbours(work, entry.key)
    work, (flags, ordinal, parent, *seen) = work.peek(there, "items", *places)
    known, namespace = there & (flags != 0), flags // item_table.NAMESPACE
    work = item_table.use(work, there, known, entry.key, seen)
    work, filled = _fill(work, view, entry, there)
    resident = entry.resident | ((flags & item_table.RESIDENT) != 0)
    # A dependency among virtual blocks holds for all ranks, one of a rank's own keys for it alone: it is never
    # replaced by that.
    kept = known & (namespace == GPU_CP_CANONICAL) & (entry.namespace != GPU_CP_CANONICAL)
    same = (namespace == entry.namespace) & (ordinal == entry.ordinal) & (parent == entry.parent)
    changed = ~known | filled | (resident & ((flags & item_table.RESIDENT) == 0)) | (~kept & ~same)
    word = item_table.PRESENT + item_table.RESIDENT * resident
    word = word + item_table.NAMESPACE * jnp.where(kept, namespace, entry.namespace)
    work = work.write_if(there, "items", word, work.item(entry.key, Item.FLAGS))
    work = work.write_if(there & ~kept, "items", entry.ordinal, work.item(entry.key, Item.ORDINAL))
    work = work.write_if(there & ~kept, "items", entry.parent, work.item(entry.key, Item.PARENT))
    work = prefix_tree.enter(work, there, entry.key, entry.namespace, entry.parent, word)
    # Residence counts as a change each time it is asked for, not only when it is new.
    return work, there & (changed | resident)


def _block(work: PooledWorkspace, view: RtpView, entry: InsertedKey, group: Scalar) -> Scalar:
    """A group's block at the entry's slot, 0 if it has none or its policy forbids reuse."""
    # A list may be shorter than the keys: a windowless tail, or a rank's share.
    inside = entry.position < work.read("requests", work.length(entry.slot, entry.sequence, group))
    asked = inside & view.flag(group, GroupField.REUSE)
    place = work.row(entry.slot, entry.sequence, group) + jnp.where(asked, entry.position, 0)
    return jnp.where(asked, work.read("rows", place), 0)


def _any_block(work: PooledWorkspace, view: RtpView, entry: InsertedKey) -> tuple[PooledWorkspace, Scalar]:
    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, _ = local
        return w, (group + 1, _block(w, view, entry, group) != 0)

    work, (_, found) = loop(
        lambda c: (c[0] < entry.end) & ~c[1], body, work, (entry.first, False), reads=("rows", "requests")
    )
    return work, found


def _fill(work: PooledWorkspace, view: RtpView, entry: InsertedKey, enabled: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """Puts the groups' blocks into the key's holes; whether any was put."""

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, any_filled = local
        pool = view.pool_of(group)

        def look(v: PooledWorkspace) -> list[Scalar]:
            block = _block(v, view, entry, group)
            return [block, *item_table.look(v, entry.key, group, pool, block)]

        names = ("rows", "requests", "items", "references")
        w, (block, *seen) = peek(group >= 0, look, w, names, (0, 1, 0))
        w, filled = item_table.fill(w, block != 0, entry.key, group, pool, block, seen)
        return w, (group + 1, any_filled | filled)

    end = jnp.where(enabled, entry.end, entry.first)
    work, (_, filled) = loop(lambda c: c[0] < end, body, work, (entry.first, False), writes=WRITES)
    return work, filled
