"""The chunks of the second tier, compiled: their places, what a store takes, and in what order they leave (LRU).

The twin of `reference.dialects.vllm.offload.pool` and its `Lru`. An operation costs what the chunks cost that it names,
and those in flight that an eviction passes by; nothing depends on how many there are. What leaves first stands first
in the list: chunks that requests used which ended, by themselves, and in between the requests that have not.

Rows of `nodes`: chunks, from `room.chunks` on the requests, then the ends of the list (`ends`), those of ARC's second,
and a spare. Other arrays end in a spare element: to it goes what an operation that does nothing writes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from hkv.dialects.vllm.rules.offload import arc
from hkv.dialects.vllm.rules.offload.arrays import (
    EVICTED,
    LOADING,
    NO_ROOM,
    READ,
    ChunkNode,
    Handed,
    Job,
    TierField,
    TierNumber,
    TierView,
    User,
)
from hkv.state.loops import Scalar, divide, loop, remainder

USE_WRITES = ("nodes", "marks", "last", "idle")
"""Arrays and scalars that `use` writes."""


class Prefix(NamedTuple):
    """A request, and its prefix keys: where they begin among the trace's, and how many it may have."""

    request: Scalar
    start: Scalar
    units: Scalar


def number_of(w: Any, enabled: Scalar, request: Scalar) -> tuple[Any, Scalar]:
    """The number of a request, which it is given with the first chunk that it uses."""
    if w.room.arc:
        return w, jnp.int32(0)
    words = w.node(w.user(request), ChunkNode.NUMBER), w.node(w.ends, ChunkNode.PREVIOUS)
    w, (number, tail) = w.peek(enabled, "nodes", *words)
    return _numbered(w, enabled, request, number, tail)


def _numbered(w: Any, enabled: Scalar, request: Scalar, number: Scalar, tail: Scalar) -> tuple[Any, Scalar]:
    """`number_of` where its number so far and the list's last node are known."""
    user, new = w.user(request), enabled & (number == 0)
    w = w.replace(last=w.last + new)
    w = w.write_if(new, "nodes", w.last, w.node(user, ChunkNode.NUMBER))
    w = w.write_if(new, "nodes", user, w.node(tail, ChunkNode.NEXT))
    w = w.write_if(new, "nodes", tail, w.node(user, ChunkNode.PREVIOUS))
    w = w.write_if(new, "nodes", w.ends, w.node(user, ChunkNode.NEXT))
    w = w.write_if(new, "nodes", user, w.node(w.ends, ChunkNode.PREVIOUS))
    return w, jnp.where(new, w.last, number)


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
    user, bit, place = w.user(of.request), jnp.left_shift(jnp.int32(1), group), of.start + unit
    if w.room.arc:
        return arc.use(w, enabled, chunk, place, group, readers, notes)
    node = jnp.where(enabled, chunk, w.spare_node)
    words = (
        ChunkNode.READERS,
        ChunkNode.NUMBER,
        ChunkNode.NEXT,
        ChunkNode.PREVIOUS,
        ChunkNode.OWNER,
        ChunkNode.LINK,
        ChunkNode.BLOCK,
    )
    places = [w.node(node, word) for word in words] + [
        w.node(user, ChunkNode.NUMBER),
        w.node(w.ends, ChunkNode.PREVIOUS),
    ]
    w, (state, before, after, previous, owner, link, flags, number, tail, seen) = w.peek_each(
        enabled, *(("nodes", each) for each in places), ("marks", place)
    )
    ready = enabled & (state >= 0)
    owned = ready & (owner > 0)
    old, mine = w.node(jnp.where(owned, w.user(owner - 1), w.spare_node), User.IDLE), w.node(user, User.IDLE)
    w, (theirs, own) = w.peek(ready, "nodes", old, mine)
    was, now = ready & (state == 0), ready & (state + readers == 0)
    moved = jnp.bool_(False)
    if notes:
        first = ready & ((seen & bit) == 0)
        after = jnp.where(first & (number == 0) & (node == tail), user, after)
        w, number = _numbered(w, first, of.request, number, tail)
        moved = first & (number > before)
        w = unlink(w, moved & (owner == 0), previous, after)
        # Never from a request to itself, whose chunks have its own number: `mine` and `old` are words of two nodes.
        w = w.write_if(moved, "nodes", own + now, mine)
        w = w.write_if(moved, "nodes", number, w.node(node, ChunkNode.NUMBER))
        w = w.write_if(moved, "nodes", of.request + 1, w.node(node, ChunkNode.OWNER))
        w = w.write_if(first, "marks", seen | bit, place)
    w = w.write_if(owned, "nodes", theirs + jnp.where(moved, 0, now.astype(jnp.int32)) - was, old)
    w = w.write_if(ready, "nodes", state + readers, w.node(node, ChunkNode.READERS))
    w = w.write_if(ready, "nodes", jnp.where(readers == 0, w.stamp, link), w.node(node, ChunkNode.LINK))
    turned = jnp.where(readers > 0, flags | (READ | LOADING), jnp.where(readers < 0, flags & ~LOADING, flags))
    w = w.write_if(ready, "nodes", turned, w.node(node, ChunkNode.BLOCK))
    return w.replace(idle=w.idle + now - was), was, flags & READ != 0


def unlink(w: Any, enabled: Scalar, previous: Scalar, after: Scalar) -> Any:
    """Takes the node between two others out of the list, if `enabled`."""
    w = w.write_if(enabled, "nodes", after, w.node(previous, ChunkNode.NEXT))
    return w.write_if(enabled, "nodes", previous, w.node(after, ChunkNode.PREVIOUS))


# Stores: chunks for what was collected in `offers`.

STORE_WRITES = (
    *("nodes", "marks", "where", "frees", "offers", "handed", "jobs", "last", "idle", "unused", "handed_out", "stored"),
    *("evicted", "refused", "peak", "flushed", "urgent", "arc", "ghosts", "tracker", "tracked"),
)
"""Arrays and scalars that a store writes, besides its job's."""


def has_room(w: Any, tier: TierView, count: Scalar, offered_idle: Scalar) -> tuple[Scalar, Scalar]:
    """Chunks that must leave for `count` new ones, and whether as many can, none of those just offered."""
    lacking = jnp.maximum(count - (w.unused + tier.number(TierNumber.CAPACITY) - w.handed_out), 0)
    return lacking, lacking <= w.idle - offered_idle


def note_refused(w: Any, count: Scalar) -> Any:
    """Notes of `count` entries that there was no room."""

    def body(v: Any, local: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
        entry = v.read("offers", v.offer(local[0]))
        v = arc.note_refused(v, entry) if v.room.arc else v.write("where", NO_ROOM, entry)
        return v, (local[0] + 1,)

    writes = ("where", "ghosts") if w.room.arc else ("where",)
    w, _ = loop(lambda c: c[0] < count, body, w, (0,), reads=("offers",), writes=writes)
    return w


def insert(
    w: Any, tier: TierView, request: Scalar, number: Scalar, count: Scalar, late: Scalar, step: Scalar
) -> tuple[Any, Scalar]:
    """Gives the first `count` offers chunks, which the next job writes; whether it is flushed at once.

    The job's blocks of windows are fenced; of every group where it is the request's last one (`late`), and then it is
    flushed if one of the others was handed out in this step.
    """
    job, capacity, groups = (
        (w.next_job & (w.room.jobs - 1)) + 1,
        tier.number(TierNumber.CAPACITY),
        w.sizes.buckets.groups,
    )
    spare = w.handed.shape[0] - 1

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        at, unused, handed_out, chain, flushes, fence = local
        v = v.write("handed", job, fence)
        entry, block = v.read("offers", v.offer(at)), v.read("offers", v.offer(at) + 1)
        fresh = handed_out < capacity
        chunk = jnp.where(fresh, handed_out, v.read("frees", jnp.maximum(unused - 1, 0)))
        if v.room.arc:
            v, (value,) = v.peek(at >= 0, "where", entry)
            v = arc.inserted(v, at >= 0, chunk, entry, value, v.read("offers", v.offer(at) + 2))
        v = v.write("where", chunk + 1, entry)
        window = tier.group(remainder(entry, jnp.int32(groups)), TierField.WINDOW) > 0
        fenced = window | late
        words = {ChunkNode.ENTRY: entry, ChunkNode.READERS: -1}
        if not v.room.arc:
            words |= {ChunkNode.NUMBER: number, ChunkNode.OWNER: request + 1}
        for word, value in {**words, ChunkNode.LINK: chain, ChunkNode.BLOCK: jnp.where(fenced, block, -block)}.items():
            v = v.write("nodes", value, v.node(chunk, word))
        asked = late & ~window
        # One handed out in this step needs no fence, as the job is flushed; another job of the step may have its own.
        taken = asked & (v.read("handed", jnp.where(asked, v.handed_word(block, Handed.STEP), 0)) == step)
        fence = jnp.where(fenced & ~taken, v.handed_word(block, Handed.FENCE), spare)
        return v, (at + 1, unused - ~fresh, handed_out + fresh, chunk + 1, flushes | taken, fence)

    w, (_, unused, handed_out, chain, flushes, fence) = loop(
        lambda c: c[0] < count,
        body,
        w,
        (0, w.unused, w.handed_out, 0, False, spare),
        reads=("offers", "frees"),
        writes=("where", "nodes", "handed", *(arc.INSERT_WRITES if w.room.arc else ())),
    )
    present = count > 0
    w = w.write("handed", job, fence)
    w = w.replace(unused=unused, handed_out=handed_out, stored=w.stored + count)
    w = w.replace(peak=jnp.maximum(w.peak, w.handed_out - w.unused))
    w = w.write_if(present, "jobs", chain, w.job(w.next_job, Job.FIRST))
    w = w.write_if(present, "jobs", request, w.job(w.next_job, Job.REQUEST))
    w = w.write_if(present, "jobs", flushes, w.job(w.next_job, Job.FLUSHED))
    w, (open_jobs,) = w.peek(present, "nodes", w.node(w.user(request), User.JOBS))
    w = w.write_if(present, "nodes", open_jobs + 1, w.node(w.user(request), User.JOBS))
    return w, flushes


def evict(w: Any, view: Any, tier: TierView, prefix_of: Any, count: Scalar) -> Any:
    """`count` chunks leave, the first ones of the list that are idle and not just offered; there are so many, as
    the caller knows (`has_room`).
    """
    if w.room.arc:
        return arc.evict(w, tier, count)
    # A chunk with the present `stamp` was just offered; a node below `chunks` is a chunk.
    stamp, chunks = w.stamp, w.room.chunks

    def run(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        node, left, unused, _ = local
        entry, readers, link, after = (
            v.read("nodes", v.node(node, word))
            for word in (ChunkNode.ENTRY, ChunkNode.READERS, ChunkNode.LINK, ChunkNode.NEXT)
        )
        leaves = (node < chunks) & (readers == 0) & (link != stamp)
        v = v.write("where", EVICTED, jnp.where(leaves, entry, v.where.shape[0] - 1))
        v = v.write("frees", node, jnp.where(leaves, unused, v.frees.shape[0] - 1))
        return v, (jnp.where(leaves, after, node), left - leaves, unused + leaves, leaves)

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        before, node, left = local
        v, (node, left, unused, _) = loop(
            lambda c: (c[1] > 0) & c[3],
            run,
            v,
            (node, left, v.unused, True),
            reads=("nodes",),
            writes=("where", "frees"),
        )
        v = v.replace(unused=unused)
        # The list goes on from `before` to `node`: all between them has left.
        v = v.write("nodes", node, v.node(before, ChunkNode.NEXT)).write(
            "nodes", before, v.node(node, ChunkNode.PREVIOUS)
        )
        stays = left > 0
        # A chunk that stays for now, or a request, which stands for the chunks that it used last.
        request = jnp.where(stays & (node >= chunks) & (node < v.ends), node - chunks, v.room.users - 1)
        v, (after, theirs) = v.peek(stays, "nodes", v.node(node, ChunkNode.NEXT), v.node(v.user(request), User.IDLE))
        asked = jnp.where(request < v.room.users - 1, jnp.minimum(left, theirs), 0)
        v, found = _evict_of(v, view, prefix_of(request), asked)
        v = v.write_if(found > 0, "nodes", theirs - found, v.node(v.user(request), User.IDLE))
        left = jnp.where(node == v.ends, 0, left - found)
        return v, (node, after, left)

    w, (first,) = w.peek(count > 0, "nodes", w.node(w.ends, ChunkNode.NEXT))
    w, _ = loop(
        lambda c: c[2] > 0, body, w, (w.ends, first, count), writes=("nodes", "where", "frees", "marks", "unused")
    )
    return w.replace(idle=w.idle - count, evicted=w.evicted + count)


def _evict_of(w: Any, view: Any, prefix: Prefix, count: Scalar) -> tuple[Any, Scalar]:
    """Up to `count` chunks that a request stands for leave, the last position first; and how many did."""
    groups, width, stamp = view.num_groups, w.sizes.buckets.groups, w.stamp

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        turn, left, unused, gone = local
        # What the trip before found, so that each trip writes `where` before it reads it.
        v = v.write("where", EVICTED, gone)
        unit = divide(turn, groups)
        group = groups - 1 - remainder(turn, groups)
        marked = jnp.right_shift(v.read("marks", prefix.start + unit), group) & 1
        entry = view.trace_key(prefix.start + unit) * width + group
        value = jnp.where(marked != 0, v.read("where", entry), 0)
        node = jnp.where(value > 0, value - 1, v.spare_node)
        readers, owner, link = (
            v.read("nodes", v.node(node, word)) for word in (ChunkNode.READERS, ChunkNode.OWNER, ChunkNode.LINK)
        )
        leaves = (value > 0) & (readers == 0) & (owner == prefix.request + 1) & (link != stamp)
        v = v.write("frees", node, jnp.where(leaves, unused, v.frees.shape[0] - 1))
        gone = jnp.where(leaves, entry, v.where.shape[0] - 1)
        return v, (turn - 1, left - leaves, unused + leaves, gone)

    start = (prefix.units * groups - 1, count, w.unused, w.where.shape[0] - 1)
    w, (_, left, unused, gone) = loop(
        lambda c: (c[1] > 0) & (c[0] >= 0), body, w, start, reads=("marks", "nodes"), writes=("where", "frees")
    )
    return w.write("where", EVICTED, gone).replace(unused=unused), count - left


# The end of a request: its uses are made, the last position first.

END_WRITES = ("nodes", "where", "marks", "last")


def end(w: Any, view: Any, prefix: Prefix, enabled: Scalar) -> Any:
    """All chunks that a request has used, and that are there, go to the end of the list; it leaves the list itself."""
    if w.room.arc:
        return arc.end(w, view, prefix, enabled)
    width, user, spare = w.sizes.buckets.groups, w.user(prefix.request), w.spare_node
    words = (ChunkNode.NUMBER, ChunkNode.NEXT, ChunkNode.PREVIOUS)
    w, (number, after, previous) = w.peek(enabled, "nodes", *(w.node(user, word) for word in words))
    enabled = enabled & (number > 0)
    w = unlink(w, enabled, previous, after)
    w = w.write_if(enabled, "nodes", 0, w.node(user, User.IDLE))
    w, (tail,) = w.peek(enabled, "nodes", w.node(w.ends, ChunkNode.PREVIOUS))

    def append(v: Any, chunk: Scalar, before: Scalar, number: Scalar) -> Any:
        for word, value in ((ChunkNode.NUMBER, number), (ChunkNode.PREVIOUS, before), (ChunkNode.OWNER, 0)):
            v = v.write("nodes", value, v.node(chunk, word))
        return v.write("nodes", chunk, v.node(jnp.where(chunk == spare, spare, before), ChunkNode.NEXT))

    def own(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        unit, mask, tail, number, chunk, before, _, _ = local
        v = append(v, chunk, before, number)
        # The highest group first; most units have none but full attention's.
        bits = v.read("marks", prefix.start + unit) & mask
        group = jnp.maximum(31 - lax.clz(bits), 0)
        mask = jnp.left_shift(jnp.int32(1), group) - 1
        entry = view.trace_key(prefix.start + unit) * width + group
        value = v.read("where", entry)
        there = (bits != 0) & (value > 0)
        node = jnp.where(there, value - 1, spare)
        mine = there & (v.read("nodes", v.node(node, ChunkNode.OWNER)) == prefix.request + 1)
        done = (bits & mask) == 0
        unit, mask = jnp.where(done, unit - 1, unit), jnp.where(done, -1, mask)
        found, last = jnp.where(mine, node, spare), jnp.where(mine, node, tail)
        return v, (unit, mask, last, number + mine, found, tail, entry, there & ~mine)

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        start = (*local, spare, spare, 0, False)
        v, (unit, mask, tail, number, chunk, before, entry, stopped) = loop(
            lambda c: (c[0] >= 0) & ~c[7], own, v, start, reads=("marks", "where"), writes=("nodes",)
        )
        v = append(v, chunk, before, number)
        # One that others used, or that ended requests did: taken out of the list, or off its request.
        v, (value,) = v.peek(stopped, "where", entry)
        node = jnp.where(stopped, value - 1, spare)
        words = (ChunkNode.READERS, ChunkNode.OWNER, ChunkNode.NEXT, ChunkNode.PREVIOUS)
        v, (readers, owner, after, previous) = v.peek(stopped, "nodes", *(v.node(node, word) for word in words))
        listed = stopped & (owner == 0)
        last = listed & (node == tail)
        v = unlink(v, listed & ~last, previous, after)
        tail = jnp.where(last, previous, tail)
        theirs = stopped & (owner > 0) & (readers == 0)
        idle = v.node(jnp.where(theirs, v.user(owner - 1), spare), User.IDLE)
        v, (count,) = v.peek(theirs, "nodes", idle)
        v = v.write_if(theirs, "nodes", count - 1, idle)
        v = append(v, node, tail, number + 1)
        return v, (unit, mask, jnp.where(stopped, node, tail), number + stopped)

    start = (jnp.where(enabled, prefix.units - 1, -1), -1, tail, w.last)
    w, (_, _, tail, number) = loop(lambda c: c[0] >= 0, body, w, start, writes=("nodes", "where", "marks"))
    w = w.write_if(enabled, "nodes", w.ends, w.node(tail, ChunkNode.NEXT))
    w = w.write_if(enabled, "nodes", tail, w.node(w.ends, ChunkNode.PREVIOUS))
    return w.replace(last=number)


# Reports.

REPORT_WRITES = ("nodes", "handed", "jobs", "idle", "urgent", "first_job")


def report(w: Any, job: Scalar, enabled: Scalar) -> Any:
    """A store is done: its chunks can be read from now on, its blocks handed out."""
    words = (Job.REQUEST, Job.FIRST, Job.FLUSHED)
    w, (request, first, flushed) = w.peek(enabled, "jobs", *(w.job(job, word) for word in words))
    mine = (job & (w.room.jobs - 1)) + 1
    spare_fence = w.handed.shape[0] - 1

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        link, chunk, fence, count, owned = local
        v = v.write("nodes", 0, v.node(chunk, ChunkNode.READERS))
        v = v.write("nodes", 0, v.node(chunk, ChunkNode.LINK)).write("nodes", 0, v.node(chunk, ChunkNode.BLOCK))
        v = v.write("handed", 0, fence)
        chunk = link - 1
        link, block, owner = (
            v.read("nodes", v.node(chunk, word)) for word in (ChunkNode.LINK, ChunkNode.BLOCK, ChunkNode.OWNER)
        )
        # Of a block that no job fences, that of the null block is read, which is always at hand.
        place = v.handed_word(jnp.maximum(block, 0), Handed.FENCE)
        fence = jnp.where(v.read("handed", place) == mine, place, spare_fence)
        return v, (link, chunk, fence, count + 1, owned + (owner == request + 1))

    start = (jnp.where(enabled, first, 0), w.spare_node, spare_fence, 0, 0)
    w, (_, chunk, fence, count, owned) = loop(lambda c: c[0] > 0, body, w, start, writes=("nodes", "handed"))
    for word in (ChunkNode.READERS, ChunkNode.LINK, ChunkNode.BLOCK):
        w = w.write("nodes", 0, w.node(chunk, word))
    w = w.write("handed", 0, fence)
    user = w.user(jnp.where(enabled, request, w.room.users - 1))
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
            link, chunk, block = local
            u = u.write("nodes", block, u.node(chunk, ChunkNode.BLOCK))
            chunk = link - 1
            # A window's blocks are fenced since they were offered, and may be another job's by now.
            block = u.read("nodes", u.node(chunk, ChunkNode.BLOCK))
            place = jnp.where(block < 0, u.handed_word(-block, Handed.FENCE), u.handed.shape[0] - 1)
            u = u.write("handed", row, place)
            return u, (u.read("nodes", u.node(chunk, ChunkNode.LINK)), chunk, jnp.abs(block))

        start = (first, v.spare_node, 0)
        v, (_, chunk, block) = loop(lambda c: c[0] > 0, body, v, start, writes=("nodes", "handed"))
        return v.write("nodes", block, v.node(chunk, ChunkNode.BLOCK))

    return each_job(w, request, enabled, one, ("nodes", "handed"))
