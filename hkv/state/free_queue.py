"""The free queue and the reference counts: which block is handed out next, and which may be at all.

The queue is a ring of places, four times as many as it may hold. Blocks are handed out and put back at its head, and
appended at its tail; a block that is taken out of the middle leaves an empty place, which is skipped when the head comes
by. When the tail might run into the head, empty places are squeezed out. All of this costs a constant a block, amortised.

A block in the queue keeps its keys until it is handed out; handing out drops them.
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.state import key_table
from hkv.state.events import Event, emit
from hkv.state.loops import Scalar, loop, when
from hkv.state.workspace import Workspace

TAKE_WRITES = ("rows", "blocks", *key_table.WRITES, "head", "free", "evictions")
"""What `take` writes."""


def take(work: Workspace, slot: Scalar, group: Scalar, start: Scalar, count: Scalar) -> Workspace:
    """Hands out the next `count` free blocks: one reference each, keys dropped, ids written to a row.

    Args:
      work: needs `queue` to read and `TAKE_WRITES` to write.
      slot: the request that gets them.
      group: in this group.
      start: at this entry of its row.
      count: how many; at most `work.free`.
    """
    mask = work.queue.shape[1] - 2
    groups = work.table.shape[2]
    spare = work.table.shape[1] - 1

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        taken, block, held, value = local
        given = block != 0
        w = w.write("rows", block, slot, group, start + taken)
        w = w.write("blocks", -given.astype(jnp.int32), block)
        entry = (held >> 1) - 1
        key, column = key_table.split(jnp.where(entry >= 0, entry, spare * groups), groups)
        slow = (((value & 1) == 1) & (entry >= 0)) | ((held & 1) == 1)
        w = w.write("table", key_table.absent(value), jnp.where(slow, spare, key), column)
        w = emit(w, (entry >= 0) & ~slow, Event.REMOVED, entry)
        w = key_table.drop_keys(w, slow, block)
        w = w.write("keys", 0, block, 0)
        w = w.replace(evictions=w.evictions + (held != 0))
        taken = taken + given
        more = taken < count
        block = jnp.where(more, w.read("queue", w.head & mask), 0)
        held = w.read("keys", block, 0)
        entry = (held >> 1) - 1
        key, column = key_table.split(jnp.where(entry >= 0, entry, spare * groups), groups)
        value = w.read("table", key, column)
        return w.replace(head=w.head + more), (taken, block, held, value)

    writes = tuple(name for name in TAKE_WRITES if name != "free")
    work, _ = loop(lambda c: c[0] < count, body, work, (0, 0, 0, 0), reads=("queue",), writes=writes)
    return work.replace(free=work.free - jnp.maximum(count, 0))


ADOPT_WRITES = ("queue", "blocks", "free")
"""What `adopt` writes."""


def adopt(work: Workspace, slot: Scalar, group: Scalar, start: Scalar, end: Scalar) -> Workspace:
    """Adds a reference to every block of entries `[start, end)` of a row, taking those without one out of the queue.

    Args:
      work: needs `rows` to read and `ADOPT_WRITES` to write.
      slot: the request.
      group: the group of its row.
      start: first entry; no entry of the range is null, and no block is there twice.
      end: entry after the last.
    """
    mask = work.queue.shape[1] - 2

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        i, block, place = local
        queued = place > 0
        w = w.write("queue", 0, jnp.where(queued, place - 1, mask + 1))
        w = w.write("blocks", jnp.where(queued, -1, jnp.where(block != 0, place - 1, 0)), block)
        w = w.replace(free=w.free - queued)
        more = i < end
        block = jnp.where(more, w.read("rows", slot, group, jnp.where(more, i, start)), 0)
        return w, (i + 1, block, w.read("blocks", block))

    return loop(
        lambda c: c[0] <= end,
        body,
        work,
        (jnp.where(start < end, start, end + 1), 0, 0),
        reads=("rows",),
        writes=ADOPT_WRITES,
    )[0]


RELEASE_WRITES = ("queue", "blocks", "head", "tail", "free")
"""What `release` writes."""


def release(work: Workspace, slot: Scalar, group: Scalar, start: Scalar, end: Scalar) -> Workspace:
    """Takes a reference from every block of entries `[start, end)` of a row, the last entry first.

    Blocks left without reference return to the queue: those without keys to its head, all of them before the blocks that
    were there and in the order given back; those with keys to its tail, in that order.

    Args:
      work: needs `rows` and `keys` to read and `RELEASE_WRITES` to write.
      slot: the request.
      group: the group of its row.
      start: first entry; null entries of the range are skipped.
      end: entry after the last.
    """
    work = make_room(work, end - start)
    mask = work.queue.shape[1] - 2
    base = work.tail + end

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        i, block, place, held = local
        last = (place == -1) & (block != 0)
        appended = last & (held != 0)
        prepended = last & (held == 0)
        back = (base - i) & mask
        w = w.replace(head=w.head - prepended, free=w.free + last)
        front = w.head & mask
        w = w.write("queue", jnp.where(appended, block, 0), jnp.where(i > start, back, mask + 1))
        w = w.write("queue", block, jnp.where(prepended, front, mask + 1))
        new = jnp.where(appended, back + 1, jnp.where(prepended, front + 1, place + 1))
        w = w.write("blocks", jnp.where(block != 0, new, 0), block)
        more = i < end
        block = jnp.where(more, w.read("rows", slot, group, jnp.where(more, i, start)), 0)
        return w, (i + 1, block, w.read("blocks", block), w.read("keys", block, 0))

    work, _ = loop(
        lambda c: c[0] <= end,
        body,
        work,
        (jnp.where(start < end, start, end + 1), 0, 0, 0),
        reads=("rows", "keys"),
        writes=RELEASE_WRITES,
    )
    return work.replace(tail=work.tail + jnp.maximum(end - start, 0))


def make_room(work: Workspace, count: Scalar) -> Workspace:
    """Squeezes empty places out of the queue if `count` more at both ends might not fit its ring."""
    ring = work.queue.shape[1] - 1
    full = work.tail - work.head + 2 * jnp.maximum(count, 0) > ring
    return when(full, squeeze, work, writes=("queue", "blocks", "tail"))


def squeeze(work: Workspace) -> Workspace:
    """Moves the blocks of the queue together, towards its head.

    Args:
      work: needs `queue`, `blocks` and `tail` to write.
    """
    mask = work.queue.shape[1] - 2
    tail = work.tail

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        source, target, block = local
        moved = block != 0
        w = w.write("queue", 0, jnp.where(moved, (source - 1) & mask, mask + 1))
        w = w.write("queue", block, jnp.where(moved, target & mask, mask + 1))
        w = w.write("blocks", jnp.where(moved, (target & mask) + 1, 0), block)
        more = source - tail < 0
        block = jnp.where(more, w.read("queue", source & mask), 0)
        return w, (source + 1, target + moved, block)

    work, (_, target, _) = loop(
        lambda c: c[0] - tail <= 0, body, work, (work.head, work.head, 0), writes=("queue", "blocks")
    )
    return work.replace(tail=target)
