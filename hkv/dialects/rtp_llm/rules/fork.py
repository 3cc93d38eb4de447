"""Forks: the sequences of a request become copies of one another (RTP-LLM `updateKVBlock`).

The last use of an old sequence keeps its blocks, the earlier ones share them; with copies, each of those gets a last
block of its own. Blocks for copies are found before anything changes, and wait in the targets slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules import evict, lists
from hkv.dialects.rtp_llm.rules.parameters import CacheField, RtpView, shape_of
from hkv.state import role_counts
from hkv.state.loops import Scalar, fori_loop, loop, peek, read
from hkv.state.pooled import Mark, PooledRequest, Role
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("chains", *lists.WRITES)
"""Arrays that a fork writes."""


class Fork(NamedTuple):
    """A fork at work: the request, its sequences before; `count` sources, `numbers[start:]`; whether earlier uses get
    last blocks of their own; keys of whole blocks in each sequence's chain."""

    slot: Scalar
    batch: Scalar
    numbers: jax.Array
    start: Scalar
    count: Scalar
    copy: Scalar
    keys: Scalar

    def source(self, place: Scalar) -> Scalar:
        """The old sequence that a new one goes on from."""
        return read(self.numbers, self.start + place)


def fork(work: PooledWorkspace, view: RtpView, at: Fork) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Forks, unless blocks for copies are missing: whether it was done, and how many copies to make.

    Copies are reported as group, block, copy. A single group gives the blocks of sequences that are not continued
    back first, and they stay given back when the fork is refused. Several groups change nothing then; copies go first
    into the last blocks of such sequences.
    """
    single = view.whole(CacheField.SINGLE) != 0
    work = _count_uses(work, at)

    def prepare(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        first, refused = local[0] == 0, local[1]
        # A single group drops before it looks for targets, several groups after: the two allocators differ in what a
        # refused fork has changed.
        w = _drop(w, view, at, jnp.where(first, single, ~single & ~refused))
        w, missing = _targets(w, view, at, single, first)
        return w, (local[0] + 1, refused | missing)

    trips = jnp.where(at.count > 0, 2, 0)
    work, (_, refused) = loop(lambda c: c[0] < trips, prepare, work, (0, False), writes=WRITES)
    work = _rewind_targets(work, view.num_groups)

    def move(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        # First into the scratch slot, then back: a new sequence may stand where an old one is that others still go on
        # from.
        w, copied = _move(w, view, at, local[0] == 0)
        return w, (local[0] + 1, local[1] + copied)

    trips = jnp.where(refused, 0, trips)
    work, (_, copies) = loop(lambda c: c[0] < trips, move, work, (0, 0), writes=WRITES)
    return work.write_if(trips > 0, "requests", at.count, work.request(at.slot, PooledRequest.BATCH)), ~refused, copies


def _count_uses(work: PooledWorkspace, at: Fork) -> PooledWorkspace:
    slot = work.scratch_slot

    def clear(i: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        for mark in Mark:
            w = w.write("requests", 0, w.mark(slot, i, mark))
        return w

    def count(i: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        source = at.source(i)
        w, (uses,) = w.peek(i >= 0, "requests", w.mark(slot, source, Mark.USES))
        w = w.write("requests", uses + 1, w.mark(slot, source, Mark.USES))
        return w.write("requests", uses + 1, w.mark(slot, source, Mark.LEFT))

    work = fori_loop(0, at.batch, clear, work, writes=("requests",))
    return fori_loop(0, at.count, count, work, writes=("requests",))


def _look(work: PooledWorkspace, at: Fork, sequence: Scalar, group: Scalar) -> tuple[PooledWorkspace, tuple[Any, ...]]:
    """Uses of an old sequence, slots of its list in a group, the last block there, and which groups recycle theirs."""
    slot = work.scratch_slot
    work, (uses, recycled, length) = work.peek(
        sequence >= 0,
        "requests",
        work.mark(slot, sequence, Mark.USES),
        work.mark(slot, sequence, Mark.RECYCLED),
        work.length(at.slot, sequence, group),
    )
    work, (last,) = work.peek(length > 0, "rows", work.row(at.slot, sequence, group) + length - 1)
    return work, (uses, length, last, recycled)


def _targets(
    work: PooledWorkspace, view: RtpView, at: Fork, single: Scalar, enabled: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Finds a block for every copy, group by group: recycled ones, then fresh ones; True when there are too few."""

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, _ = local
        w, wanted = _wanted(w, at, group)
        w, recycled = _recycle(w, at, group, jnp.where(single, 0, wanted))
        w, refused = _fresh(w, view, group, (recycled, wanted), single)
        return w, (group + 1, refused)

    groups = jnp.where(at.copy & enabled, view.num_groups, 0)
    work, (reached, refused) = loop(lambda c: (c[0] < groups) & ~c[1], one, work, (0, False), writes=WRITES)

    def give_back(group: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        w, (first, end) = w.peek(
            group >= 0, "requests", *(w.length(each, 0, group) for each in (w.scratch_slot, w.targets_slot))
        )
        pool = view.pool_of(group)

        def body(i: Scalar, v: PooledWorkspace) -> PooledWorkspace:
            v, (block,) = v.peek(i >= 0, "rows", v.row(v.targets_slot, 0, group) + i)
            return role_counts.release(v, block != 0, pool, block, jnp.int32(Role.REQUEST))

        return fori_loop(first, end, body, w, writes=("rows", *role_counts.WRITES))

    # Only the groups that were reached have targets to give back.
    end = jnp.where(refused, reached, 0)
    work = fori_loop(0, end, give_back, work, writes=lists.LISTS)
    return work, refused


def _wanted(work: PooledWorkspace, at: Fork, group: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """Copies that a group needs."""

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        sequence, count = local
        w, (uses, length, _, _) = _look(w, at, sequence, group)
        return w, (sequence + 1, count + jnp.where(length > 0, jnp.maximum(uses - 1, 0), 0))

    work, (_, count) = loop(lambda c: c[0] < at.batch, body, work, (0, 0), writes=("requests", "rows"))
    return work, count


def _recycle(work: PooledWorkspace, at: Fork, group: Scalar, wanted: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """Notes last blocks of dropped sequences that no other sequence holds as targets; how many."""

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        sequence, found = local
        w, (uses, _, last, recycled) = _look(w, at, sequence, group)
        asked = (uses == 0) & (last != 0)
        # A block that stands in two lists is not the dropped sequence's alone, and cannot be written.
        w, times = _occurrences(w, at, group, last, asked)
        mine = asked & (times == 1)
        # Noted by group: `_drop` leaves these blocks out.
        bit = recycled | jnp.left_shift(jnp.int32(1), group)
        w = w.write_if(mine, "requests", bit, w.mark(w.scratch_slot, sequence, Mark.RECYCLED))
        w = w.write_if(mine, "rows", last, w.row(w.targets_slot, 0, group) + found)
        return w, (sequence + 1, found + mine)

    work, (_, found) = loop(
        lambda c: (c[0] < at.batch) & (c[1] < wanted), body, work, (0, 0), writes=("requests", "rows")
    )
    return work, found


def _occurrences(
    work: PooledWorkspace, at: Fork, group: Scalar, block: Scalar, enabled: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Number of times that a block is in the request's lists of a group."""

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        sequence, count = local
        w, (_, length, _, _) = _look(w, at, sequence, group)
        row = w.row(at.slot, sequence, group)

        def body(v: PooledWorkspace, place: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
            return v, (place[0] + 1, place[1] + (v.read("rows", row + place[0]) == block))

        w, (_, count) = loop(lambda c: c[0] < length, body, w, (0, count), reads=("rows",))
        return w, (sequence + 1, count)

    end = jnp.where(enabled, at.batch, 0)
    work, (_, count) = loop(lambda c: c[0] < end, one, work, (0, 0), writes=("requests", "rows"))
    return work, count


def _fresh(
    work: PooledWorkspace, view: RtpView, group: Scalar, span: tuple[Scalar, Scalar], single: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Takes free blocks as targets: a single group makes room for all of them at once, others for one at a time.

    Where they begin and end is noted in the lengths of the scratch slot and of the targets slot.
    """
    first, end = span
    shape = shape_of(view, group)

    def body(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        place, _ = local
        # All at once or one by one decides which keys are evicted, and thereby ids.
        room = jnp.where(single, end - place, 1)
        w, found = evict.make_room(w, view, shape, room, place >= 0)
        w, block = role_counts.claim(w, found, shape.pool)
        w = w.write_if(found, "rows", block, w.row(w.targets_slot, 0, group) + place)
        return w, (place + found, ~found)

    work, (reached, refused) = loop(lambda c: (c[0] < end) & ~c[1], body, work, (first, False), writes=lists.WRITES)
    work = work.write("requests", first, work.length(work.scratch_slot, 0, group))
    return work.write("requests", reached, work.length(work.targets_slot, 0, group)), refused


def _drop(work: PooledWorkspace, view: RtpView, at: Fork, enabled: Scalar) -> PooledWorkspace:
    """Gives the blocks of sequences back that are not continued, but for recycled ones, and empties their lists.

    The defect KEEPS leaves the lists of a single group as they are, also where the fork is refused then.
    """
    groups, keeps = view.num_groups, view.whole(CacheField.KEEPS) != 0

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        sequence, group = local
        w, (uses, length, _, recycled) = _look(w, at, sequence, group)
        dropped = uses == 0
        # The recycled block goes on as somebody's copy, with the reference that it has.
        last_kept = (jnp.right_shift(recycled, group) & 1) != 0
        pool, row = view.pool_of(group), w.row(at.slot, sequence, group)

        def body(i: Scalar, v: PooledWorkspace) -> PooledWorkspace:
            v, (block,) = v.peek(i >= 0, "rows", row + i)
            return role_counts.release(v, block != 0, pool, block, jnp.int32(Role.REQUEST))

        end = jnp.where(dropped, length - last_kept, 0)
        w = fori_loop(0, end, body, w, writes=("rows", *role_counts.WRITES))
        w = w.write_if(dropped & ~keeps, "requests", 0, w.length(at.slot, sequence, group))
        over = group + 1 == groups
        return w, (sequence + over, jnp.where(over, 0, group + 1))

    end = jnp.where(enabled, at.batch, 0)
    return loop(lambda c: c[0] < end, one, work, (0, 0), writes=lists.LISTS)[0]


def _move(work: PooledWorkspace, view: RtpView, at: Fork, making: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """Makes the new sequences in the scratch slot, if `making`, and moves them to the request's; how many copies they
    need."""
    groups, scratch = view.num_groups, work.scratch_slot
    slots = jnp.where(making, at.slot, scratch), jnp.where(making, scratch, at.slot)
    forgets = view.whole(CacheField.FORGETS) != 0

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        sequence, group, copies = local
        origin = jnp.where(making, at.source(sequence), sequence)
        w, (left,) = peek(
            making, lambda v: (v.read("requests", v.mark(scratch, origin, Mark.LEFT)),), w, ("requests",), (1,)
        )
        source, target = (slots[0], origin), (slots[1], sequence)
        # All uses but the last share the blocks; the last one takes the list over, without references given or taken.
        w = lists.copy_list(w, view, group, source, target, left > 1)
        w, copied = _copy_last(w, view, at, (sequence, group, origin), (left > 1) & at.copy)
        # A defect: that the last key is of a whole block is not copied, and one such sequence decides for all.
        w = w.write_if(forgets & (left > 1), "requests", 0, w.request(at.slot, PooledRequest.ALIGNED))
        over = group + 1 == groups
        w = w.write_if(over & making, "requests", left - 1, w.mark(scratch, origin, Mark.LEFT))
        w = _copy_keys(w, at, source, target, over)
        return w, (sequence + over, jnp.where(over, 0, group + 1), copies + copied)

    work, (_, _, copies) = loop(lambda c: c[0] < at.count, one, work, (0, 0, 0), writes=WRITES)
    return work, copies


def _rewind_targets(work: PooledWorkspace, groups: Scalar) -> PooledWorkspace:
    def body(i: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        return w.write("requests", 0, w.length(w.targets_slot, 0, i))

    return fori_loop(0, groups, body, work, writes=("requests",))


def _copy_last(
    work: PooledWorkspace, view: RtpView, at: Fork, place: tuple[Scalar, Scalar, Scalar], enabled: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Replaces the last block of a new list by the next target of its group; whether there is content to copy."""
    sequence, group, source = place
    work, (_, length, old, _) = _look(work, at, source, group)
    mine = enabled & (length > 0)
    work, (used,) = work.peek(mine, "requests", work.length(work.targets_slot, 0, group))
    work, (new,) = work.peek(mine, "rows", work.row(work.targets_slot, 0, group) + used)
    work = work.write_if(mine, "requests", used + 1, work.length(work.targets_slot, 0, group))
    work = work.write_if(mine, "rows", new, work.row(work.scratch_slot, sequence, group) + length - 1)
    copied = mine & (old != 0)
    work = role_counts.release(work, copied, view.pool_of(group), old, jnp.int32(Role.REQUEST))
    for value in (group, old, new):
        work = work.emit(value, copied)
    return work, copied


def _copy_keys(
    work: PooledWorkspace,
    at: Fork,
    source: tuple[Scalar, Scalar],
    target: tuple[Scalar, Scalar],
    enabled: Scalar,
) -> PooledWorkspace:
    def body(i: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        w, (key,) = w.peek(i >= 0, "chains", w.chain(*source) + i)
        return w.write("chains", key, w.chain(*target) + i)

    end = jnp.where(enabled, at.keys, 0)
    return fori_loop(0, end, body, work, writes=("chains",))
