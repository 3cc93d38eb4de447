"""ARC, compiled: chunks that one request used, chunks that several used, the names of both that left, and a target.

The twin of `reference.dialects.vllm.offload.policies.Arc`. Both lists of chunks are in `nodes`, both lists of names in
`ghosts`, where `where` leads to them. The target is a double in vLLM: here a whole number and 52 bits behind the
point, of which every double that it can be is a multiple, rounded after each step as a double is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from hkv.dialects.vllm.rules.offload.linked_lists import put_last, take_out
from hkv.dialects.vllm.rules.offload.parameters import TierNumber, TierView
from hkv.dialects.vllm.rules.offload.words import GHOST, ArcWord, ChunkNode, GhostWord
from hkv.state.loops import Scalar, divide, loop, remainder

MOST_GROUPS = 10
"""Groups of which a word of `marks` holds three bits each: reused, stored, missed."""

HALF = 26
"""Bits in each of the two words behind the point."""

LOW = (1 << HALF) - 1


class Real(NamedTuple):
    """A number below 2**24 that is not negative: whole, and two words of 26 bits behind the point."""

    whole: Scalar
    high: Scalar
    low: Scalar


def rounded(value: Real, rest: Scalar = 0, of: Scalar = 1) -> Real:
    """The double next to a value and `rest / of` of its last bit; of two as near, the even one."""
    exponent = 31 - lax.clz(jnp.maximum(value.whole, 1))
    unit = jnp.left_shift(jnp.int32(1), exponent)
    cut = value.low & (unit - 1)
    odd = (jnp.right_shift(value.low, exponent) & 1) != 0
    half = unit >> 1
    up = (cut > half) | ((cut == half) & ((rest > 0) | odd))
    up = jnp.where(exponent == 0, (2 * rest > of) | ((2 * rest == of) & odd), up)
    low = value.low - cut + jnp.where(up, unit, 0)
    high = value.high + (low >> HALF)
    return Real(value.whole + (high >> HALF), high & LOW, low & LOW)


def quotient(w: Any, a: Scalar, b: Scalar, enabled: Scalar) -> tuple[Any, Real]:
    """`max(1, a / b)` as a double, where `enabled`; a `b` of 0 is not asked for."""
    enabled, b = enabled & (a > b), jnp.maximum(b, 1)

    def bit(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        at, high, low, rest = carried
        rest = 2 * rest
        one = rest >= b
        first = at < HALF
        high, low = jnp.where(first, 2 * high + one, high), jnp.where(first, low, 2 * low + one)
        return v, (at + 1, high, low, rest - jnp.where(one, b, 0))

    start = (jnp.where(enabled, 0, 2 * HALF), 0, 0, remainder(a, b))
    w, (_, high, low, rest) = loop(lambda c: c[0] < 2 * HALF, bit, w, start)
    exact = rounded(Real(divide(a, b), high, low), rest, b)
    return w, Real(*(jnp.where(enabled, word, least) for word, least in zip(exact, (1, 0, 0), strict=True)))


def added(a: Real, b: Real, most: Scalar) -> Real:
    """`min(a + b, most)`."""
    low = a.low + b.low
    high = a.high + b.high + (low >> HALF)
    total = rounded(Real(a.whole + b.whole + (high >> HALF), high & LOW, low & LOW))
    return Real(*(jnp.where(total.whole >= most, end, word) for word, end in zip(total, (most, 0, 0), strict=True)))


def less(a: Real, b: Real) -> Real:
    """`max(a - b, 0)`."""
    low = a.low - b.low
    high = a.high - b.high + (low >> HALF)
    whole = a.whole - b.whole + (high >> HALF)
    left = rounded(Real(jnp.maximum(whole, 0), high & LOW, low & LOW))
    return Real(*(jnp.where(whole < 0, 0, word) for word in left))


# A request's marks: three bits of each group.


def reused(group: Scalar) -> Scalar:
    """Bit of a chunk that the request found ready, and did not store itself before."""
    return jnp.left_shift(jnp.int32(1), group)


def stored(group: Scalar) -> Scalar:
    """Bit of a chunk that the request stored."""
    return jnp.left_shift(jnp.int32(1), group + MOST_GROUPS)


def missed(group: Scalar) -> Scalar:
    """Bit of a chunk that the request was to store, and that was absent."""
    return jnp.left_shift(jnp.int32(1), group + 2 * MOST_GROUPS)


# Lists.


def unlink(w: Any, enabled: Scalar, node: Scalar) -> Any:
    """Takes a chunk out of its list."""
    return take_out(w, enabled, "nodes", w.node, ChunkNode, node)


def append(w: Any, enabled: Scalar, node: Scalar, often: Scalar) -> Any:
    """Puts a chunk at the end of a list."""
    w = put_last(w, enabled, "nodes", w.node, ChunkNode, node, jnp.where(often, w.ends_often, w.ends))
    return w.write_if(enabled, "nodes", often, w.node(node, ChunkNode.OWNER))


def _ghost_out(w: Any, enabled: Scalar, row: Scalar) -> Any:
    return take_out(w, enabled, "ghosts", w.ghost, GhostWord, row)


def _ghost_to_end(w: Any, enabled: Scalar, row: Scalar, often: Scalar) -> Any:
    return put_last(w, enabled, "ghosts", w.ghost, GhostWord, row, w.ghost_ends + often)


def _forget(w: Any, enabled: Scalar, row: Scalar, often: Scalar) -> Any:
    """A name is remembered no more: its row comes back."""
    w = _ghost_out(w, enabled, row)
    w, (count, free) = w.peek(enabled, "arc", _gone(often), int(ArcWord.FREE))
    w = w.write_if(enabled, "ghosts", free, w.ghost(row, GhostWord.NEXT))
    w = w.write_if(enabled, "arc", row + 1, int(ArcWord.FREE))
    return w.write_if(enabled, "arc", count - 1, _gone(often))


def _gone(often: Scalar) -> Scalar:
    return int(ArcWord.GONE_ONCE) + jnp.asarray(often).astype(jnp.int32)


GHOST_WRITES = ("ghosts", "arc", "where")


def _remember(w: Any, tier: TierView, enabled: Scalar, entry: Scalar, often: Scalar) -> Any:
    """The name of a chunk that left, as the last of its list; the first one goes where there are too many."""
    w, (free, rows, count) = w.peek(enabled, "arc", int(ArcWord.FREE), int(ArcWord.ROWS), _gone(often))
    again = enabled & (free > 0)
    w, (next_free,) = w.peek(again, "ghosts", w.ghost(free - 1, GhostWord.NEXT))
    row = jnp.where(again, free - 1, rows)
    w = w.write_if(again, "arc", next_free, int(ArcWord.FREE))
    w = w.write_if(enabled & ~again, "arc", rows + 1, int(ArcWord.ROWS))
    w = w.write_if(enabled, "arc", count + 1, _gone(often))
    w = w.write_if(enabled, "ghosts", entry, w.ghost(row, GhostWord.ENTRY))
    w = w.write_if(enabled, "ghosts", often, w.ghost(row, GhostWord.OFTEN))
    w = w.write_if(enabled, "where", GHOST - row, entry)
    w = _ghost_to_end(w, enabled, row, often)
    over = enabled & (count + 1 > tier.number(TierNumber.CAPACITY))
    w, (oldest,) = w.peek(over, "ghosts", w.ghost(w.ghost_ends + often, GhostWord.NEXT))
    w, (name,) = w.peek(over, "ghosts", w.ghost(oldest, GhostWord.ENTRY))
    w = w.write_if(over, "where", 0, name)
    return _forget(w, over, oldest, often)


# Stores.


def miss(w: Any, tier: TierView, count: Scalar) -> Any:
    """Takes note of `count` offers that are absent, once a request each, from the last on: the target follows."""
    names = (ArcWord.GONE_ONCE, ArcWord.GONE_OFTEN, ArcWord.WHOLE, ArcWord.HIGH, ArcWord.LOW)
    w, (once, often, *words) = w.peek(count > 0, "arc", *map(int, names))
    w, up = quotient(w, often, once, (count > 0) & (once > 0))
    w, down = quotient(w, once, often, (count > 0) & (often > 0))
    capacity, width = tier.number(TierNumber.CAPACITY), jnp.int32(w.sizes.buckets.groups)

    def body(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        at, target = carried[0], Real(*carried[1:])
        v, (entry, place) = v.peek(at >= 0, "offers", v.offer(at), v.offer(at) + 2)
        v, (bits, value) = v.peek_each(at >= 0, ("marks", place), ("where", entry))
        bit = missed(remainder(entry, width))
        first = bits & bit == 0
        v = v.write("marks", bits | bit, place)
        gone = first & (value <= GHOST)
        row = jnp.where(gone, GHOST - value, v.ghost_spare)
        v, (of,) = v.peek(gone, "ghosts", v.ghost(row, GhostWord.OFTEN))
        moved = zip(target, added(target, up, capacity), less(target, down), strict=True)
        target = [jnp.where(gone, jnp.where(of == 0, more, fewer), old) for old, more, fewer in moved]
        v = _ghost_to_end(_ghost_out(v, gone, row), gone, row, of)
        return v, (at - 1, *target)

    writes = ("offers", "marks", "where", "ghosts")
    w, (_, *words) = loop(lambda c: c[0] >= 0, body, w, (count - 1, *words), writes=writes)
    for name, word in zip(names[2:], words, strict=True):
        w = w.write_if(count > 0, "arc", word, int(name))
    return w


def use(w: Any, ready: Scalar, place: Scalar, group: Scalar, marked: Scalar) -> Any:
    """The request has used a chunk: nothing moves before it ends. `marked`: its marks of that key, at `place`."""
    return w.write_if(ready & (marked & stored(group) == 0), "marks", marked | reused(group), place)


INSERT_WRITES = ("ghosts", "arc", "marks")


def inserted(w: Any, enabled: Scalar, chunk: Scalar, entry: Scalar, value: Scalar, place: Scalar) -> Any:
    """A chunk is new in the list of those that one request used; its name is remembered no more."""
    gone = enabled & (value <= GHOST)
    row = jnp.where(gone, GHOST - value, w.ghost_spare)
    w, (state,) = w.peek(gone, "ghosts", w.ghost(row, GhostWord.OFTEN))
    w = _forget(w, gone, row, state & 1)
    w, (bits,) = w.peek(enabled, "marks", place)
    w = w.write_if(enabled, "marks", bits | stored(remainder(entry, jnp.int32(w.sizes.buckets.groups))), place)
    w, (once,) = w.peek(enabled, "arc", int(ArcWord.ONCE))
    w = w.write_if(enabled, "arc", once + 1, int(ArcWord.ONCE))
    return append(w, enabled, chunk, jnp.int32(0))


def evict(w: Any, tier: TierView, count: Scalar) -> Any:
    """`count` chunks leave that are idle and not just offered: of those that one request used, while they are more
    than the target, else of the others."""
    stamp = w.stamp
    w, (once, often, whole) = w.peek(count > 0, "arc", *map(int, (ArcWord.ONCE, ArcWord.OFTEN, ArcWord.WHOLE)))
    ends = w.ends, w.ends_often
    w, firsts = w.peek(count > 0, "nodes", *(w.node(end, ChunkNode.NEXT) for end in ends))

    def look(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        left, once, often, unused, at_once, at_often = carried
        ours = (once >= whole) & (at_once != ends[0]) | (at_often == ends[1])
        node = jnp.where(ours, at_once, at_often)
        words = (ChunkNode.ENTRY, ChunkNode.READERS, ChunkNode.LINK, ChunkNode.NEXT)
        v, (entry, readers, link, after) = v.peek(left > 0, "nodes", *(v.node(node, word) for word in words))
        leaves = (readers == 0) & (link != stamp)
        v = unlink(v, leaves, node)
        v = v.write_if(leaves, "frees", node, unused)
        v = _remember(v, tier, leaves, entry, (~ours).astype(jnp.int32))
        at_once, at_often = jnp.where(ours, after, at_once), jnp.where(ours, at_often, after)
        return v, (left - leaves, once - (leaves & ours), often - (leaves & ~ours), unused + leaves, at_once, at_often)

    start = (count, once, often, w.unused, *firsts)
    writes = ("nodes", "frees", *GHOST_WRITES)
    w, (_, once, often, unused, _, _) = loop(lambda c: c[0] > 0, look, w, start, writes=writes)
    for name, value in ((ArcWord.ONCE, once), (ArcWord.OFTEN, often)):
        w = w.write_if(count > 0, "arc", value, int(name))
    return w.replace(unused=unused, idle=w.idle - count, evicted=w.evicted + count)


END_WRITES = ("nodes", "where", "marks", "arc")


def end(w: Any, view: Any, prefix: Any, enabled: Scalar) -> Any:
    """A request has ended: what it found goes behind all chunks that several used, what it stored to its list's end."""
    width, groups = w.sizes.buckets.groups, view.num_groups

    def body(v: Any, carried: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
        (turn,) = carried
        unit, group = divide(turn, groups), remainder(turn, groups)
        entry = view.trace_key(prefix.start + unit) * width + group
        v, (bits, value) = v.peek_each(turn >= 0, ("marks", prefix.start + unit), ("where", entry))
        found, mine = bits & reused(group) != 0, bits & stored(group) != 0
        there = (found | mine) & (value > 0)
        node = jnp.where(there, value - 1, v.spare_node)
        v, (before,) = v.peek(there, "nodes", v.node(node, ChunkNode.OWNER))
        turns = there & found & (before == 0)
        v = unlink(v, there, node)
        v = append(v, there, node, jnp.where(turns, 1, before))
        v, (once, often) = v.peek(turns, "arc", int(ArcWord.ONCE), int(ArcWord.OFTEN))
        v = v.write_if(turns, "arc", once - 1, int(ArcWord.ONCE)).write_if(turns, "arc", often + 1, int(ArcWord.OFTEN))
        return v, (turn - 1,)

    start = jnp.where(enabled, prefix.units * groups - 1, -1)
    w, _ = loop(lambda c: c[0] >= 0, body, w, (start,), writes=END_WRITES)
    return w
