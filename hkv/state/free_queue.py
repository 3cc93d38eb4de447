"""The free queue and the reference counts: which block is handed out next, and which may be at all.

The queue is a ring of places, at least twice as many as it may hold. Blocks are handed out and put back at its head,
and appended at its tail; a block that is taken out of the middle leaves an empty place, which is skipped when the head
comes by. When the tail might run into the head, empty places are squeezed out. All of this costs a constant a block,
in the long run.

A block in the queue keeps its keys until it is handed out; handing out drops them.
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.state import key_table
from hkv.state.loops import Scalar, divide, loop, peek, remainder, when
from hkv.state.workspace import Event, Workspace, emit

TAKE_WRITES = ("queue", "rows", "blocks", *key_table.WRITES, "head", "free", "evictions")
"""Arrays that `take` writes; `queue` only in its spare element."""


def take(work: Workspace, start: Scalar, count: Scalar) -> Workspace:
    """Hands out the next `count` free blocks: one reference each, keys dropped, ids written to `State.rows` from
    `start` on."""
    buckets = work.sizes.buckets
    evicted = key_table.evicted_for(work, remainder(divide(start, jnp.int32(buckets.row)), jnp.int32(buckets.groups)))

    # vLLM's `BlockPool.get_new_blocks` pops a block and calls `_maybe_evict_cached_block`, a dictionary lookup. Here
    # nearly all blocks are plain (no key, or one key of which no other block has a copy), so the fast loop drops a
    # key by two writes and stops at the first block that is not plain; `stretch` takes that one out by the general
    # rule and goes on.
    def plain(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        taken, before, _ = local
        # The key word of the block of the trip before: written here, not there, so that each trip writes `keys`
        # before it reads it, and XLA can update the array in place (`hkv.state.loops`, rule 1).
        w = w.write("keys", 0, w.key(before))
        block = w.read("queue", w.place(w.head))
        word = w.read("keys", w.key(block))
        # Both flags clear: no second block under the key, no keys that end inside the block.
        fast = (word & 3) == 0
        # A 0 in the ring is a place out of which a block was taken by a hit. It is skipped, not handed
        # out.
        given = (block != 0) & fast
        entry = key_table.entry_of(word)
        named = fast & (entry >= 0)
        w = w.write("table", evicted, w.entry(jnp.where(named, entry, w.spare_entry)))
        w = w.write("rows", block, start + taken)
        w = w.write("blocks", -given.astype(jnp.int32), w.block(jnp.where(fast, block, 0)))
        w = emit(w, named, Event.REMOVED, entry)
        w = w.replace(head=w.head + 1, evictions=w.evictions + named)
        return w, (taken + given, jnp.where(fast, block, 0), ~fast)

    def stretch(w: Workspace, local: tuple[Scalar]) -> tuple[Workspace, tuple[Scalar]]:
        w, (taken, before, stopped) = loop(
            lambda c: (c[0] < count) & ~c[2],
            plain,
            w,
            (local[0], 0, False),
            reads=("queue",),
            writes=("rows", "blocks", "keys", "table", "head", "evictions", "events", "num_events"),
        )
        # A block that stopped the fast loop was counted past the head, but not taken.
        w = w.write("keys", 0, w.key(before)).replace(head=w.head - stopped)
        w, (block,) = w.peek(stopped, "queue", w.place(w.head))
        w = key_table.drop_keys(w, stopped, block, evicted)
        return w.replace(evictions=w.evictions + stopped), (taken,)

    writes = tuple(name for name in TAKE_WRITES if name != "free")
    work, _ = loop(lambda c: c[0] < count, stretch, work, (0,), writes=writes)
    return work.replace(free=work.free - jnp.maximum(count, 0))


ADOPT_WRITES = ("queue", "blocks", "free")
"""Arrays that `adopt` writes."""


def adopt(work: Workspace, start: Scalar, count: Scalar) -> Workspace:
    """Adds a reference to `count` entries of `State.rows` from `start` on, taking blocks without one out of the queue.

    Null entries are skipped; no block is there twice.
    """

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        # `references` is what the block of the trip before gets: its write is this trip's first, before any read.
        i, before, references = local
        w = w.write("blocks", references, w.block(before))
        block = w.read("rows", start + i)
        place = w.read("blocks", w.block(block))
        queued = place > 0
        # Taking a block out of the middle of vLLM's linked list is O(1) (`FreeKVCacheBlockQueue.remove`). A ring has
        # no links: its place becomes empty, and the head skips it later.
        w = w.write("queue", 0, jnp.where(queued, w.place(place - 1), w.queue.shape[0] - 1))
        return w.replace(free=w.free - queued), (
            i + 1,
            block,
            jnp.where(queued, -1, jnp.where(block != 0, place - 1, 0)),
        )

    work, (_, block, references) = loop(
        lambda c: c[0] < count, body, work, (0, 0, 0), reads=("rows",), writes=ADOPT_WRITES
    )
    return work.write("blocks", references, work.block(block))


def hold(work: Workspace, entry: Scalar) -> Workspace:
    """`adopt` of one entry of `State.rows`, whose block may be held already; a null entry is skipped."""

    def look(w: Workspace) -> tuple[Scalar, Scalar]:
        block = w.read("rows", entry)
        return block, w.read("blocks", w.block(block))

    work, (block, place) = peek(entry >= 0, look, work, reads=("rows", "blocks"), default=(0, 0))
    queued = place > 0
    work = work.write("queue", 0, jnp.where(queued, work.place(place - 1), work.queue.shape[0] - 1))
    references = jnp.where(queued, -1, jnp.where(block != 0, place - 1, 0))
    return work.write("blocks", references, work.block(block)).replace(free=work.free - queued)


def add_reference(work: Workspace, present: Scalar, block: Scalar) -> Workspace:
    """Adds a reference to a block that has one, if `present`."""
    work, (references,) = work.peek(present, "blocks", work.block(block))
    return work.write("blocks", jnp.where(present, references - 1, 0), work.block(jnp.where(present, block, 0)))


RELEASE_WRITES = ("queue", "blocks", "head", "tail", "free")
"""Arrays that `release` writes."""


def release(work: Workspace, start: Scalar, count: Scalar) -> Workspace:
    """Takes a reference from `count` blocks of `State.rows` from `start` on, the last entry first; null ones are
    skipped.

    Blocks left without reference return to the queue, which needs room (`make_room`): those without keys to its head,
    all of them before the blocks that were there and in the order given back; those with keys to its tail, in that
    order. Since the order is known, the row is walked from its first entry on, and places at the tail are left empty
    for blocks that do not go there.
    """

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        left, most, before, value = local
        w = w.write("blocks", value, w.block(before))
        block = w.read("rows", start + (count - left))
        references = w.read("blocks", w.block(block))
        known = w.read("keys", w.key(block)) != 0
        last = (references == -1) & (block != 0)
        appended, prepended = last & known, last & ~known
        # vLLM frees a request's blocks in reverse order, so that the tail of a sequence is evicted first. The row is
        # walked forwards, the i-th entry from its end going to the i-th place behind the tail: the same order without
        # reversing the row.
        back = w.tail + (left - 1)
        w = w.replace(head=w.head - prepended, free=w.free + last)
        w = w.write("queue", jnp.where(appended, block, 0), w.place(back))
        w = w.write("queue", block, jnp.where(prepended, w.place(w.head), w.queue.shape[0] - 1))
        placed = (jnp.where(appended, back, w.head) & w.mask) + 1
        value = jnp.where(last, placed, jnp.where(block != 0, references + 1, 0))
        # The first entry that is appended lies furthest back, and says by how much the tail advances.
        most = jnp.where(appended & (most == 0), left, most)
        return w, (left - 1, most, block, value)

    work, (_, most, block, value) = loop(
        lambda c: c[0] > 0,
        body,
        work,
        (jnp.maximum(count, 0), 0, 0, 0),
        reads=("rows", "keys"),
        writes=("queue", "blocks", "head", "free"),
    )
    work = work.write("blocks", value, work.block(block))
    return work.replace(tail=work.tail + most)


def make_room(work: Workspace) -> Workspace:
    """Squeezes empty places out of the queue if its ring might be too small for all that one request can give back."""
    buckets = work.sizes.buckets
    # Positions are never masked before they are stored, so that tail minus head is the stretch in use, empty places
    # included. One request gives back at most its rows; twice that, since prepending takes places below the head as
    # well.
    full = work.tail - work.head + 2 * buckets.groups * buckets.row > buckets.queue
    return when(full, squeeze, work, writes=("queue", "blocks", "tail"))


def squeeze(work: Workspace) -> Workspace:
    """Moves the blocks of the queue together, towards its head."""
    tail, spare = work.tail, work.queue.shape[0] - 1

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        source, target, block = local
        moved = block != 0
        w = w.write("queue", 0, jnp.where(moved, w.place(source - 1), spare))
        w = w.write("queue", block, jnp.where(moved, w.place(target), spare))
        w = w.write("blocks", jnp.where(moved, (target & w.mask) + 1, 0), w.block(block))
        block = jnp.where(source - tail < 0, w.read("queue", w.place(source)), 0)
        return w, (source + 1, target + moved, block)

    start = (work.head, work.head, 0)
    work, (_, target, _) = loop(lambda c: c[0] - tail <= 0, body, work, start, writes=("queue", "blocks"))
    return work.replace(tail=target)
