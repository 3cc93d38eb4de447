"""LRU, compiled: the requests that used chunks in a list, each standing for those that it used last.

The twin of `reference.dialects.vllm.offload.policies.Lru`, which numbers chunks. A request takes a number when it first
uses a chunk, and another when it ends; its chunks leave with its number, the last position first. So the list has a
node for each request that has chunks, a request's end costs nothing for the chunks that it stands for, and these are
found by its prefix keys once they leave, from a place on that moves toward its beginning.

Of several groups' chunks that end at the same token, the lowest group's leaves first while the request has not ended:
vLLM compares keys, which end in the group. At its end it numbers them from the last to the first, lower groups later.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from hkv.dialects.vllm.rules.offload.linked_lists import put_last, take_out
from hkv.dialects.vllm.rules.offload.words import ENDED, ChunkNode, User
from hkv.state.loops import Scalar, loop


class Use(NamedTuple):
    """A use of a chunk that can be read.

    Attributes:
      node: the chunk.
      owner: 1 plus the request that stands for it.
      of: the request that uses it.
      unit: place of the chunk's key among the request's.
      group: its group.
      marked: the request's marks of that key.
      was, now: whether it is idle before, and after.
    """

    node: Scalar
    owner: Scalar
    of: Any
    unit: Scalar
    group: Scalar
    marked: Scalar
    was: Scalar
    now: Scalar


def use(w: Any, ready: Scalar, of: Use, notes: bool) -> Any:
    """The request stands for a chunk from now on, unless a later one used it; `enlist` has to follow.

    `notes`: whether it counts as a use; else the chunk is more or less idle, and stays whose it is.
    """
    mine, bit = of.of.request + 1, jnp.left_shift(jnp.int32(1), of.group)
    user, other = w.user(of.of.request), jnp.where(ready, w.user(of.owner - 1), w.spare_node)
    words = (User.IDLE, User.OWNED, User.NUMBER)
    places = [w.node(each, word) for each in (other, user) for word in words]
    w, (theirs, their_owned, before, own, owned, number) = w.peek(ready, "nodes", *places)
    moved = jnp.bool_(False)
    if notes:
        first = ready & ((of.marked & bit) == 0)
        foreign = first & (of.owner != mine)
        # A request without a number takes the next one, after all others.
        moved = foreign & ((number == 0) | (number > before))
        w = part(w, foreign, jnp.where(moved, other, user), of.unit + 1)
        w = w.write_if(moved, "nodes", their_owned - 1, w.node(other, User.OWNED))
        w = w.write_if(moved, "nodes", owned + 1, w.node(user, User.OWNED))
        w = w.write_if(moved, "nodes", own + of.now, w.node(user, User.IDLE))
        w = w.write_if(moved, "nodes", mine, w.node(of.node, ChunkNode.OWNER))
        w = w.write_if(first, "marks", of.marked | bit, of.of.start + of.unit)
    left = theirs + jnp.where(moved, 0, of.now.astype(jnp.int32)) - of.was
    return w.write_if(ready, "nodes", left, w.node(other, User.IDLE))


def part(w: Any, enabled: Scalar, user: Scalar, units: Scalar) -> Any:
    """Of a request, by its node, others may stand for chunks of its first `units` prefix keys from now on."""
    w, (parted,) = w.peek(enabled, "nodes", w.node(user, User.PARTED))
    return w.write_if(enabled, "nodes", jnp.maximum(parted, units), w.node(user, User.PARTED))


def enlist(w: Any, enabled: Scalar, of: Any, stores: Scalar) -> Any:
    """A request that has used chunks of some of its keys, or is about to store some, is in the list."""
    user = w.user(of.request)
    words = (User.NUMBER, User.OWNED)
    w, (number, owned) = w.peek(enabled, "nodes", *(w.node(user, word) for word in words))
    w = reaches(w, enabled, of)
    new = enabled & (number == 0) & (stores | (owned > 0))
    w = w.replace(last=w.last + new)
    w = w.write_if(new, "nodes", w.last, w.node(user, User.NUMBER))
    return put_last(w, new, "nodes", w.node, User, user, w.ends)


def reaches(w: Any, enabled: Scalar, of: Any) -> Any:
    """A request may stand for chunks of the last of some of its keys again."""
    place = w.node(w.user(of.request), User.CURSOR)
    w, (cursor,) = w.peek(enabled, "nodes", place)
    return w.write_if(enabled, "nodes", jnp.maximum(cursor, of.units), place)


def evict(w: Any, view: Any, prefix_of: Any, count: Scalar) -> Any:
    """`pool.evict`. What the list passes by stays for now: requests whose chunks are in transfer, or just offered."""

    def of_request(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        user, left = local
        there = user != v.ends
        request = jnp.where(there, v.request_of(user), v.room.users - 1)
        words = (User.NEXT, User.IDLE, User.OWNED, User.FLAGS, User.CURSOR)
        v, (after, idle, owned, flags, cursor) = v.peek(left > 0, "nodes", *(v.node(user, word) for word in words))
        asked, ended = jnp.where(there, jnp.minimum(left, idle), 0), flags & ENDED != 0
        v, found, left_at = _evict_of(v, view, prefix_of(request), asked, cursor, ended)
        for word, value in ((User.IDLE, idle - found), (User.OWNED, owned - found), (User.CURSOR, left_at)):
            v = v.write_if(asked > 0, "nodes", value, v.node(user, word))
        # What leaves now, others may store again before the request ends.
        v = part(v, (found > 0) & ~ended, user, cursor)
        v = take_out(v, there & ended & (owned == found), "nodes", v.node, User, user)
        return v, (after, jnp.where(there, left - found, 0))

    w, (first,) = w.peek(count > 0, "nodes", w.node(w.ends, User.NEXT))
    writes = ("nodes", "where", "frees", "marks", "unused")
    w, _ = loop(lambda c: c[1] > 0, of_request, w, (first, count), writes=writes)
    return w.replace(idle=w.idle - count, evicted=w.evicted + count)


def _evict_of(
    w: Any, view: Any, prefix: Any, count: Scalar, cursor: Scalar, ended: Scalar
) -> tuple[Any, Scalar, Scalar]:
    """Up to `count` chunks that a request stands for leave, the last position first; how many, and its cursor then."""
    width, stamp = w.sizes.buckets.groups, w.stamp

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        unit, done, left, unused, gone, busy = local
        # What the trip before found, so that each trip writes `where` before it reads it.
        v = v.write("where", 0, gone)
        bits = v.read("marks", prefix.start + unit) & ~done
        pick = jnp.where(ended, bits, bits & -bits)
        group = jnp.maximum(31 - lax.clz(pick), 0)
        done = done | jnp.left_shift(jnp.int32(1), group)
        entry = view.trace_key(prefix.start + unit) * width + group
        value = jnp.where(bits != 0, v.read("where", entry), 0)
        node = jnp.where(value > 0, value - 1, v.spare_node)
        readers, owner, link = (
            v.read("nodes", v.node(node, word)) for word in (ChunkNode.READERS, ChunkNode.OWNER, ChunkNode.LINK)
        )
        mine = (value > 0) & (owner == prefix.request + 1)
        leaves = mine & (readers == 0) & (link != stamp)
        v = v.write("frees", node, jnp.where(leaves, unused, v.frees.shape[0] - 1))
        gone = jnp.where(leaves, entry, v.where.shape[0] - 1)
        busy = jnp.where(mine & ~leaves, jnp.maximum(busy, unit), busy)
        last = (bits & ~done) == 0
        unit, done = jnp.where(last, unit - 1, unit), jnp.where(last, 0, done)
        return v, (unit, done, left - leaves, unused + leaves, gone, busy)

    start = (cursor - 1, 0, count, w.unused, w.where.shape[0] - 1, -1)
    w, (unit, _, left, unused, gone, busy) = loop(
        lambda c: (c[2] > 0) & (c[0] >= 0), body, w, start, reads=("marks", "nodes"), writes=("where", "frees")
    )
    w = w.write("where", 0, gone).replace(unused=unused)
    return w, count - left, jnp.maximum(unit, busy) + 1


def end(w: Any, view: Any, prefix: Any, enabled: Scalar) -> Any:
    """`pool.end`: the request goes to the end of the list, and stands again for all that it used and that is there."""
    user = w.user(prefix.request)
    words = (User.NUMBER, User.FLAGS, User.PARTED)
    w, (number, flags, parted) = w.peek(enabled, "nodes", *(w.node(user, word) for word in words))
    enabled = enabled & (number > 0)
    w = take_out(w, enabled, "nodes", w.node, User, user)
    w = _regain(w, view, prefix, jnp.where(enabled, jnp.minimum(parted, prefix.units), 0))
    w, (owned,) = w.peek(enabled, "nodes", w.node(user, User.OWNED))
    w = put_last(w, enabled & (owned > 0), "nodes", w.node, User, user, w.ends)
    w = w.replace(last=w.last + enabled)
    for word, value in ((User.NUMBER, w.last), (User.FLAGS, flags | ENDED), (User.CURSOR, prefix.units)):
        w = w.write_if(enabled, "nodes", value, w.node(user, word))
    return w


def _regain(w: Any, view: Any, prefix: Any, units: Scalar) -> Any:
    """A request stands for chunks of its first `units` keys that it used and that others stand for, whatever transfers
    read or write them."""
    width, user, mine = w.sizes.buckets.groups, w.user(prefix.request), prefix.request + 1

    def own(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        unit, done, _, _ = local
        bits = v.read("marks", prefix.start + unit) & ~done
        group = jnp.maximum(31 - lax.clz(bits), 0)
        done = done | jnp.left_shift(jnp.int32(1), group)
        value = v.read("where", view.trace_key(prefix.start + unit) * width + group)
        node = jnp.where((bits != 0) & (value > 0), value - 1, v.spare_node)
        owner = v.read("nodes", v.node(node, ChunkNode.OWNER))
        last = (bits & ~done) == 0
        unit, done = jnp.where(last, unit - 1, unit), jnp.where(last, 0, done)
        return v, (unit, done, node, (node != v.spare_node) & (owner != mine))

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        v, (unit, done, node, found) = loop(
            lambda c: (c[0] >= 0) & ~c[3],
            own,
            v,
            (*local, v.spare_node, False),
            reads=("marks", "where", "nodes"),
        )
        v, (readers, owner) = v.peek(found, "nodes", v.node(node, ChunkNode.READERS), v.node(node, ChunkNode.OWNER))
        idle, other = (found & (readers == 0)).astype(jnp.int32), jnp.where(found, v.user(owner - 1), v.spare_node)
        places = [v.node(each, word) for each in (other, user) for word in (User.OWNED, User.IDLE)]
        v, (their_owned, theirs, owned, ours) = v.peek(found, "nodes", *places)
        for place, value in zip(places, (their_owned - 1, theirs - idle, owned + 1, ours + idle), strict=True):
            v = v.write_if(found, "nodes", value, place)
        v = part(v, found, other, prefix.units)
        return v.write_if(found, "nodes", mine, v.node(node, ChunkNode.OWNER)), (unit, done)

    start = (units - 1, 0)
    w, _ = loop(lambda c: c[0] >= 0, body, w, start, writes=("nodes", "where", "marks"))
    return w
