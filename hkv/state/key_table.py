"""The key table: from a prefix key and a group to the blocks that hold it, in the order in which they came.

Most keys have one block, which the table names itself. Where several blocks have the same key, a flag says so and they
hang in a ring of links, first registered first; only flagged keys ever touch the links. A block may have several keys:
one for its whole span (part 0), and some that end inside it (part p ends p hash blocks into it). Since all of them lie
on one chain, a key's part is known from the key.

A block whose keys can be dropped by one write, for its key is whole, its only one, and its alone, is *plain*: the low
bits of its word in `State.keys` are 0. Handing out plain blocks is what must be fast.
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.state.loops import Scalar, fori_loop, loop, peek, when
from hkv.state.state import EVICTED, NOT_RETAINED
from hkv.state.workspace import Event, Workspace, emit

WRITES = ("keys", "table", "links", "events", "num_events")
"""Arrays that a change of the table may write."""

SHARED = 1
"""Bit in a word of `State.keys`: its entry's value in the table says more than where the block is."""

PARTS = 2
"""Bit in a word of `State.keys`: the block has keys that end inside it."""


def first_block(value: Scalar) -> Scalar:
    """The block that a positive value of the table names."""
    return value >> 3


def absent(value: Scalar, evicted: Scalar | int = EVICTED) -> Scalar:
    """Value that replaces a positive one when the last block it names is gone; `evicted` where nothing else was to be
    said."""
    # Bits 1 and 2 hold what `note_absence` said while the key still had a block. They outlive the eviction: "retired
    # window" or "not retained" is why a later lookup misses, whatever took the last copy away.
    return jnp.where((value & 6) == 0, evicted, -1 - ((value >> 1) & 3))


def evicted_for(work: Workspace, group: Scalar) -> Scalar:
    """Value that says of a key that its last block was handed out now, to a row of this group.

    Steps are counted up to a bound that no replay comes near; later ones are taken for it.
    """
    # One int32 holds step and group, below all other values: the step and the group that took the block, as digits.
    groups = work.sizes.buckets.groups
    return NOT_RETAINED - 1 - (jnp.minimum(work.steps, _LATEST // groups) * groups + group)


_LATEST = 2**31 - 2**16


def eviction_of(value: int, groups: int) -> tuple[int, int]:
    """The step and the group that a value of a key without blocks tells of, on the host; (0, -1) where it tells of
    none."""
    return divmod(NOT_RETAINED - 1 - value, groups) if value < NOT_RETAINED else (0, -1)


def was_evicted(value: Scalar) -> Scalar:
    """True of values that say `EVICTED`, with or without more."""
    return (value == EVICTED) | (value < NOT_RETAINED)


def word_of(entry: Scalar) -> Scalar:
    """The word of a plain block that is registered under an entry."""
    return (entry + 1) * 4


def entry_of(word: Scalar) -> Scalar:
    """The entry of a block's whole key, -1 for none."""
    return (word >> 2) - 1


def remove(
    work: Workspace,
    present: Scalar,
    block: Scalar,
    part: Scalar,
    entry: Scalar,
    moving: bool = False,
    evicted: Scalar | int = EVICTED,
) -> Workspace:
    """Takes one key of a block out of the table, if `present`; `State.keys` of the block is not changed.

    If the block was the key's last, the table says `evicted` from then on. No event if it is `moving`: another block
    gets the key at once.
    """
    ring = (("links", work.link(block, part, side)) for side in (0, 1))
    work, (value, after, before) = work.peek_each(present, ("table", work.entry(entry)), *ring)

    def unlink(w: Workspace) -> Workspace:
        # vLLM's `BlockHashToBlockMap.get_one_block` answers with the block that was inserted first. If that one goes,
        # the next in order of registration takes its place at the head of the ring.
        first = jnp.where(first_block(value) == block, after, first_block(value))
        shared = (value & 1) == 1
        # In a ring of two, next and previous of either are the same block: what is left is one block, and the flag
        # goes.
        remaining = first * 8 + (value & 6) + (after != before)
        w = w.write("table", jnp.where(shared, remaining, absent(value, evicted)), w.entry(entry))
        w = w.write_if(shared, "links", after, w.link(before, part, 0))
        w = w.write_if(shared, "links", before, w.link(after, part, 1))
        return w if moving else emit(w, present, Event.REMOVED, entry)

    return when(present, unlink, work, writes=("table", "links", "events", "num_events"))


def insert(
    work: Workspace, present: Scalar, block: Scalar, part: Scalar, entry: Scalar, moving: bool = False
) -> Workspace:
    """Enters a block under a key, after those that have it already; `State.keys` of the block is not changed.

    If it is `moving`, what is to be said of the key later stays as it was.
    """
    work, (value,) = work.peek(present, "table", work.entry(entry))
    first = first_block(value)
    # A key that moves between blocks (a copy takes over) was never away: its note stays. Any other registration makes
    # a fresh key of which nothing is to be said.
    later = jnp.where(value > 0, value & 6, jnp.maximum(-1 - value, 0) * 2) if moving else 0
    shared = present & (value > 0)
    work, (last, word) = peek(
        shared,
        lambda w: (
            jnp.where((value & 1) == 1, w.read("links", w.link(first, part, 1)), first),
            w.read("keys", w.key(first)),
        ),
        work,
        reads=("links", "keys"),
        default=(0, 0),
    )

    def link(w: Workspace) -> Workspace:
        w = w.write("table", jnp.where(shared, first * 8 + 1, block * 8) + later, w.entry(entry))
        w = w.write_if(shared, "links", block, w.link(last, part, 0))
        w = w.write_if(shared, "links", last, w.link(block, part, 1))
        w = w.write_if(shared, "links", first, w.link(block, part, 0))
        w = w.write_if(shared, "links", block, w.link(first, part, 1))
        # The block that had the key alone was plain until now. From here on, handing it out has to look at the ring.
        return w.write_if(shared, "keys", word | SHARED, w.key(first))

    return when(present, link, work, writes=("table", "links", "keys"))


def drop_keys(work: Workspace, present: Scalar, block: Scalar, evicted: Scalar | int = EVICTED) -> Workspace:
    """Takes all keys of a block out of the table and off the block, if `present`; `evicted` as in `remove`."""
    parts = 1 + work.sizes.buckets.parts

    def body(part: Scalar, w: Workspace) -> Workspace:
        w, (value,) = w.peek(part < parts, "keys", w.key(block, part))
        entry = jnp.where(part == 0, entry_of(value), value - 1)
        # From the whole block's key to those inside it, in the order of parts: events of removal are compared in
        # order.
        w = remove(w, entry >= 0, block, part, jnp.maximum(entry, 0), evicted=evicted)
        return w.write("keys", 0, w.key(block, part))

    return fori_loop(jnp.where(present, 0, parts), parts, body, work, writes=WRITES)


def move_keys(work: Workspace, present: Scalar, source: Scalar, target: Scalar) -> Workspace:
    """Lets a block without keys stand under every key of another instead of it, if `present`. No event: what is cached
    moves."""
    parts = 1 + work.sizes.buckets.parts

    def body(part: Scalar, w: Workspace) -> Workspace:
        w, (value,) = w.peek(part < parts, "keys", w.key(source, part))
        entry = jnp.where(part == 0, entry_of(value), value - 1)
        known = entry >= 0
        w = remove(w, known, source, part, jnp.maximum(entry, 0), moving=True)
        w = insert(w, known, target, part, jnp.maximum(entry, 0), moving=True)
        w = w.write("keys", jnp.where(known & (part == 0), value | SHARED, value), w.key(target, part))
        return w.write("keys", 0, w.key(source, part))

    return fori_loop(jnp.where(present, 0, parts), parts, body, work, writes=WRITES)


def primary_entry(work: Workspace, present: Scalar, block: Scalar) -> tuple[Workspace, Scalar]:
    """The entry of the block's key that covers most tokens, -1 for none."""
    work, part = highest_part(work, present, block)
    found = part >= 0
    work, (value,) = work.peek(found, "keys", work.key(block, jnp.maximum(part, 0)))
    return work, jnp.where(found, jnp.where(part == 0, entry_of(value), value - 1), -1)


def add_key(work: Workspace, present: Scalar, block: Scalar, part: Scalar, entry: Scalar) -> Workspace:
    """Registers a block under a key that it does not have, if `present`; part 0 is the key of the whole block."""
    work = insert(work, present, block, part, entry)
    if work.sizes.buckets.parts == 0:
        # Flagged though no other block may have the key: whether one has is known from the table only. `register`
        # writes plain words itself where it has looked (`hkv.dialects.vllm.rules.register`).
        return work.write_if(present, "keys", word_of(entry) | SHARED, work.key(block))
    work, (word,) = work.peek(present, "keys", work.key(block))
    whole = part == 0
    word = jnp.where(whole, word_of(entry) | SHARED | (word & PARTS), word | PARTS)
    work = work.write_if(present, "keys", word, work.key(block))
    return work.write_if(present & ~whole, "keys", entry + 1, work.key(block, part))


def note_absence(work: Workspace, present: Scalar, entry: Scalar, reason: Scalar) -> Workspace:
    """Notes what to say of a key once its last block is gone, if `present`: `RETIRED` or `NOT_RETAINED`."""
    work, (value,) = work.peek(present, "table", work.entry(entry))
    cached = present & (value > 0)
    first = first_block(value)
    work, (word,) = work.peek(cached, "keys", work.key(first))

    def note(w: Workspace) -> Workspace:
        # `reason` is -2 or -3, so that this adds 2 or 4: bits 1 and 2 of the value.
        later = (value & ~6) - 2 * (reason + 1)
        w = w.write("table", jnp.where(cached, later, reason), w.entry(entry))
        return w.write_if(cached, "keys", word | SHARED, w.key(first))

    return when(present, note, work, writes=("table", "keys"))


def highest_part(work: Workspace, present: Scalar, block: Scalar) -> tuple[Workspace, Scalar]:
    """The part of the block's key that covers most tokens: 0 for the whole block's, p below it, -1 for no key."""
    parts = 1 + work.sizes.buckets.parts
    work, (word,) = work.peek(present, "keys", work.key(block))

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        part, _ = local
        # Keys that end inside a block are asked for from its end backwards: the longest one is what an event names.
        found = w.read("keys", w.key(block, part)) != 0
        return w, (jnp.where(found, part, part - 1), found)

    start = (jnp.where((word != 0) & (entry_of(word) < 0), parts - 1, 0), False)
    work, (part, _) = loop(lambda c: (c[0] > 0) & ~c[1], body, work, start, reads=("keys",))
    return work, jnp.where(word == 0, -1, part)
