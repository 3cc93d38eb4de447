"""The chunks of the second tier, compiled: their places, what a store takes, and when its blocks can be handed out.

The twin of `reference.dialects.vllm.offload.pool`. An operation costs what the chunks cost that it names, and those in
flight that an eviction passes by; nothing depends on how many there are. In what order they leave, `lru` and `arc` say.

Rows of `nodes`: chunks, from `room.chunks` on the requests, some each, then the end of the list (`ends`), that of ARC's
second, and a spare. Other arrays end in a spare element: to it goes what an operation that does nothing writes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from hkv.dialects.vllm.rules.offload import arc, lru
from hkv.dialects.vllm.rules.offload.parameters import TierField, TierNumber, TierView
from hkv.dialects.vllm.rules.offload.words import LOADING, READ, SEVERAL, ChunkNode, Handed, Job, User
from hkv.state.loops import Scalar, loop, remainder

USE_WRITES = ("nodes", "marks", "idle")
"""Arrays and scalars that `use` writes."""


class Prefix(NamedTuple):
    """A request, and its prefix keys: where they begin among the trace's, and how many it may have."""

    request: Scalar
    start: Scalar
    units: Scalar


def use(
    w: Any, enabled: Scalar, chunk: Scalar, of: Prefix, unit: Scalar, group: Scalar, readers: Scalar, notes: bool = True
) -> tuple[Any, Scalar, Scalar]:
    """A request uses a chunk, where it can be read; whether it was idle, and whether it was read before.

    Args:
      w: the workspace.
      enabled: whether it does.
      chunk: the chunk.
      of: the request.
      unit: place of the chunk's key among the request's.
      group: its group.
      readers: 1 for a transfer that begins to read it, -1 for one that ends, 0 for an offer.
      notes: whether it counts as a use; else the transfer alone is noted.
    """
    node, place = jnp.where(enabled, chunk, w.spare_node), of.start + unit
    words = (ChunkNode.READERS, ChunkNode.OWNER, ChunkNode.LINK, ChunkNode.BLOCK)
    w, (state, owner, link, flags, marked) = w.peek_each(
        enabled, *(("nodes", w.node(node, word)) for word in words), ("marks", place)
    )
    ready = enabled & (state >= 0)
    was, now = ready & (state == 0), ready & (state + readers == 0)
    if not w.room.arc:
        w = lru.use(w, ready, lru.Use(node, owner, of, unit, group, marked, was, now), notes)
    elif notes:
        w = arc.use(w, ready, place, group, marked)
    w = w.write_if(ready, "nodes", state + readers, w.node(node, ChunkNode.READERS))
    w = w.write_if(ready, "nodes", jnp.where(readers == 0, w.stamp, link), w.node(node, ChunkNode.LINK))
    turned = jnp.where(readers > 0, flags | (READ | LOADING), jnp.where(readers < 0, flags & ~LOADING, flags))
    w = w.write_if(ready, "nodes", turned, w.node(node, ChunkNode.BLOCK))
    return w.replace(idle=w.idle + now - was), was, flags & READ != 0


# Stores: chunks for what was collected in `offers`.

STORE_WRITES = (
    *("nodes", "marks", "where", "frees", "offers", "keys", "jobs", "last", "idle", "unused", "handed_out", "stored"),
    *("evicted", "refused", "peak", "flushed", "urgent", "arc", "ghosts", "tracker", "tracked"),
)
"""Arrays and scalars that a store writes, besides its job's."""


def has_room(w: Any, tier: TierView, count: Scalar, offered_idle: Scalar) -> tuple[Scalar, Scalar]:
    """Chunks that must leave for `count` new ones, and whether as many can, none of those just offered."""
    lacking = jnp.maximum(count - (w.unused + tier.number(TierNumber.CAPACITY) - w.handed_out), 0)
    return lacking, lacking <= w.idle - offered_idle


def insert(w: Any, tier: TierView, of: Prefix, count: Scalar, late: Scalar, step: Scalar) -> tuple[Any, Scalar]:
    """Gives a request's first `count` offers chunks, which the next job writes; whether it is flushed at once.

    The job's blocks of windows are fenced; of every group where it is the request's last one (`late`), and then it is
    flushed if one of the others was handed out in this step.
    """
    job, capacity, groups = (
        (w.next_job & (w.room.jobs - 1)) + 1,
        tier.number(TierNumber.CAPACITY),
        w.sizes.buckets.groups,
    )
    spare, request = w.keys.shape[0] - 1, of.request

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        at, unused, handed_out, chain, flushes, fence, reader = local
        v = v.write("keys", reader, fence)
        entry, block = v.read("offers", v.offer(at)), v.read("offers", v.offer(at) + 1)
        fresh = handed_out < capacity
        chunk = jnp.where(fresh, handed_out, v.read("frees", jnp.maximum(unused - 1, 0)))
        if v.room.arc:
            v, (value,) = v.peek(at >= 0, "where", entry)
            v = arc.inserted(v, at >= 0, chunk, entry, value, v.read("offers", v.offer(at) + 2))
        v = v.write("where", chunk + 1, entry)
        window = tier.group(remainder(entry, jnp.int32(groups)), TierField.WINDOW) > 0
        fenced = window | late
        words = {ChunkNode.READERS: -1, **({ChunkNode.ENTRY: entry} if v.room.arc else {ChunkNode.OWNER: request + 1})}
        for word, value in {**words, ChunkNode.LINK: chain, ChunkNode.BLOCK: jnp.where(fenced, block, -block)}.items():
            v = v.write("nodes", value, v.node(chunk, word))
        asked = late & ~window
        # One handed out in this step needs no fence, as the job is flushed; another job of the step may have its own.
        taken = asked & (v.read("keys", jnp.where(asked, v.handed_word(block, Handed.STEP), 0)) == step)
        fence = jnp.where(fenced & ~taken, v.handed_word(block, Handed.FENCE), spare)
        reader = _reader(v, reader, job, fence)
        return v, (at + 1, unused - ~fresh, handed_out + fresh, chunk + 1, flushes | taken, fence, reader)

    w, (_, unused, handed_out, chain, flushes, fence, reader) = loop(
        lambda c: c[0] < count,
        body,
        w,
        (0, w.unused, w.handed_out, 0, False, spare, job),
        reads=("offers", "frees"),
        writes=("where", "nodes", "keys", *(arc.INSERT_WRITES if w.room.arc else ())),
    )
    present = count > 0
    w = w.write("keys", reader, fence)
    w = w.replace(unused=unused, handed_out=handed_out, stored=w.stored + count)
    w = w.replace(peak=jnp.maximum(w.peak, w.handed_out - w.unused))
    w = w.write_if(present, "jobs", chain, w.job(w.next_job, Job.FIRST))
    w = w.write_if(present, "jobs", request, w.job(w.next_job, Job.REQUEST))
    w = w.write_if(present, "jobs", flushes, w.job(w.next_job, Job.FLUSHED))
    places = w.node(w.user(request), User.JOBS), w.node(w.user(request), User.OWNED)
    w, (open_jobs, owned) = w.peek(present, "nodes", *places)
    w = w.write_if(present, "nodes", open_jobs + 1, places[0])
    w = w.write_if(present, "nodes", owned + count, places[1])
    # Behind what left before, some of which may have been its own.
    return w if w.room.arc else lru.reaches(w, present, of), flushes


def _reader(w: Any, before: Scalar, job: Scalar, fence: Scalar) -> Scalar:
    """The fence of a block: its job's row, as of the one `before`, or `SEVERAL` where another job reads it as well."""
    # A block that one job reads is handed out, and the job flushed, before another does; but where requests offer
    # blocks that are others' by now.
    return jnp.where(w.read("keys", fence) != 0, SEVERAL, job) if w.room.again else before


def evict(w: Any, view: Any, tier: TierView, prefix_of: Any, count: Scalar) -> Any:
    """`count` chunks leave, the first ones that are idle and not just offered; there are so many, as the caller knows
    (`has_room`).
    """
    return arc.evict(w, tier, count) if w.room.arc else lru.evict(w, view, prefix_of, count)


def end(w: Any, view: Any, prefix: Prefix, enabled: Scalar) -> Any:
    """A request has ended: all chunks that it has used, and that are there, count as used once more."""
    return arc.end(w, view, prefix, enabled) if w.room.arc else lru.end(w, view, prefix, enabled)


# Reports.

REPORT_WRITES = ("nodes", "keys", "jobs", "idle", "urgent", "first_job")


def report(w: Any, job: Scalar, enabled: Scalar) -> Any:
    """A store is done: its chunks can be read from now on, its blocks handed out."""
    words = (Job.REQUEST, Job.FIRST, Job.FLUSHED)
    w, (request, first, flushed) = w.peek(enabled, "jobs", *(w.job(job, word) for word in words))
    mine, user = (job & (w.room.jobs - 1)) + 1, w.user(jnp.where(enabled, request, w.room.users - 1))
    spare_fence = w.keys.shape[0] - 1

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        link, chunk, fence, count, owned, _ = local
        v = v.write("nodes", 0, v.node(chunk, ChunkNode.READERS))
        v = v.write("nodes", 0, v.node(chunk, ChunkNode.LINK)).write("nodes", 0, v.node(chunk, ChunkNode.BLOCK))
        v = v.write("keys", 0, fence)
        chunk = link - 1
        link, block, owner = (
            v.read("nodes", v.node(chunk, word)) for word in (ChunkNode.LINK, ChunkNode.BLOCK, ChunkNode.OWNER)
        )
        # Of a block that no job fences, that of the null block is read, which is always at hand.
        place = v.handed_word(jnp.maximum(block, 0), Handed.FENCE)
        fence = jnp.where(v.read("keys", place) == mine, place, spare_fence)
        others = (owner != request + 1) & (not v.room.arc)
        return v, (link, chunk, fence, count + 1, owned + ~others, others)

    def stretch(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        start = (*local, False)
        v, (*left, others) = loop(lambda c: (c[0] > 0) & ~c[5], body, v, start, writes=("nodes", "keys"))
        # A chunk that left before, and that its earlier user took back at its end.
        v, (owner,) = v.peek(others, "nodes", v.node(left[1], ChunkNode.OWNER))
        idle = v.node(jnp.where(others, v.user(owner - 1), v.spare_node), User.IDLE)
        v, (count,) = v.peek(others, "nodes", idle)
        return v.write_if(others, "nodes", count + 1, idle), tuple(left)

    start = (jnp.where(enabled, first, 0), w.spare_node, spare_fence, 0, 0)
    w, (_, chunk, fence, count, owned) = loop(lambda c: c[0] > 0, stretch, w, start, writes=("nodes", "keys"))
    for word in (ChunkNode.READERS, ChunkNode.LINK, ChunkNode.BLOCK):
        w = w.write("nodes", 0, w.node(chunk, word))
    w = w.write("keys", 0, fence)
    w, (open_jobs, idle) = w.peek(enabled, "nodes", w.node(user, User.JOBS), w.node(user, User.IDLE))
    w = w.write_if(enabled, "nodes", open_jobs - 1, w.node(user, User.JOBS))
    w = w.write_if(enabled, "nodes", idle + owned, w.node(user, User.IDLE))
    w = w.write_if(enabled, "jobs", 0, w.job(job, Job.FIRST))
    return w.replace(idle=w.idle + count, urgent=w.urgent - (enabled & (flushed != 0)))


def deliver(w: Any, step: Scalar) -> Any:
    """Reports of stores that were done by the end of a step: in order, but for those that were flushed."""

    def one(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        at, front, _ = local
        v, (first, end) = v.peek(at >= 0, "jobs", v.job(at, Job.FIRST), v.job(at, Job.END))
        due = (first > 0) & (end <= step)
        v = report(v, at, due)
        front = front & ((first == 0) | due)
        return v.replace(first_job=v.first_job + front), (at + 1, front, front | (v.urgent > 0))

    end = jnp.where(step >= 0, w.next_job, w.first_job)
    w, _ = loop(lambda c: (c[0] < end) & c[2], one, w, (w.first_job, True, True), writes=REPORT_WRITES)
    return w


def flush(w: Any, row: Scalar, step: Scalar, enabled: Scalar) -> Any:
    """A job, by its row, is to be done by the end of this step, whenever it would be else."""
    places = (row * 4 + int(Job.FLUSHED), row * 4 + int(Job.END))
    w, (flushed, at) = w.peek(enabled, "jobs", *places)
    new = enabled & (flushed == 0)
    w = w.write_if(new, "jobs", 1, places[0])
    w = w.write_if(new, "jobs", jnp.minimum(at, step), places[1])
    return w.replace(flushed=w.flushed + new, urgent=w.urgent + new)


FLUSH_WRITES = ("jobs", "flushed", "urgent")


def flush_readers(w: Any, block: Scalar, fence: Scalar, step: Scalar, enabled: Scalar) -> Any:
    """All jobs that read a block are to be done by the end of this step; `fence` says which one does, or `SEVERAL`."""
    w = flush(w, fence - 1, step, enabled & (fence > 0))
    if not w.room.again:
        return w
    several = enabled & (fence < 0)
    w = w.write_if(several, "keys", 0, w.handed_word(block, Handed.FENCE))

    def one(v: Any, local: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
        at = local[0]
        v, (first,) = v.peek(at >= 0, "jobs", v.job(at, Job.FIRST))

        def look(u: Any, chain: tuple[Scalar, Scalar]) -> tuple[Any, tuple[Scalar, Scalar]]:
            chunk = chain[0] - 1
            found = u.read("nodes", u.node(chunk, ChunkNode.BLOCK)) == block
            return u, (u.read("nodes", u.node(chunk, ChunkNode.LINK)), found)

        v, (_, found) = loop(lambda c: (c[0] > 0) & ~c[1], look, v, (first, False), reads=("nodes",))
        return flush(v, at & (v.room.jobs - 1), step, found), (at + 1,)

    start, end = jnp.where(several, w.first_job, w.next_job), w.next_job
    return loop(lambda c: c[0] < end, one, w, (start,), writes=("nodes", *FLUSH_WRITES))[0]


HAND_WRITES = ("keys", "nodes", *FLUSH_WRITES)
"""Arrays and scalars that `flush_readers` writes."""


def each_job(w: Any, request: Scalar, enabled: Scalar, body: Any, writes: tuple[str, ...]) -> Any:
    """`body(workspace, job, enabled)` for each of a request's stores that go on."""
    w, (count,) = w.peek(enabled, "nodes", w.node(w.user(request), User.JOBS))

    def one(v: Any, local: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
        at = local[0]
        v, (owner, first) = v.peek(at >= 0, "jobs", v.job(at, Job.REQUEST), v.job(at, Job.FIRST))
        return body(v, at, (owner == request) & (first > 0)), (at + 1,)

    start = jnp.where(enabled & (count > 0), w.first_job, w.next_job)
    end = w.next_job
    w, _ = loop(lambda c: c[0] < end, one, w, (start,), writes=("jobs", *writes))
    return w


def fence(w: Any, request: Scalar, enabled: Scalar) -> Any:
    """A request has finished: all blocks that its stores read are fenced, for they may be handed out from now on."""

    def one(v: Any, job: Scalar, mine: Scalar) -> Any:
        v, (first,) = v.peek(mine, "jobs", v.job(job, Job.FIRST))
        row = (job & (v.room.jobs - 1)) + 1

        def body(u: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
            link, chunk, block, place, reader = local
            u = u.write("nodes", block, u.node(chunk, ChunkNode.BLOCK)).write("keys", reader, place)
            chunk = link - 1
            # A window's blocks are fenced since they were offered, and may be another job's by now.
            block = u.read("nodes", u.node(chunk, ChunkNode.BLOCK))
            place = jnp.where(block < 0, u.handed_word(-block, Handed.FENCE), u.keys.shape[0] - 1)
            link = u.read("nodes", u.node(chunk, ChunkNode.LINK))
            return u, (link, chunk, jnp.abs(block), place, _reader(u, reader, row, place))

        start = (first, v.spare_node, 0, v.keys.shape[0] - 1, row)
        v, (_, chunk, block, place, reader) = loop(lambda c: c[0] > 0, body, v, start, writes=("nodes", "keys"))
        return v.write("nodes", block, v.node(chunk, ChunkNode.BLOCK)).write("keys", reader, place)

    return each_job(w, request, enabled, one, ("nodes", "keys"))
