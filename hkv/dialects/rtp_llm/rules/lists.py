"""A request's lists of blocks: made longer, cut back, cleaned up, shared and copied (RTP-LLM `incrMalloc`).

A list has a slot for each block of positions; 0 is a hole. When one list finds no blocks, all that grew before it go
back to what they were: their old lengths, and which holes were filled, are noted in the scratch slot while an
allocation is at work. What was evicted for it stays evicted.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules import evict
from hkv.dialects.rtp_llm.rules.parameters import RtpView, Shape, effective, has_block, on_grid, shape_of, slots, total
from hkv.state import role_counts
from hkv.state.loops import Scalar, divide, fori_loop, loop, peek, remainder
from hkv.state.pooled import Role
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("rows", "requests", *evict.WRITES)
"""Arrays that these functions write."""

LISTS = ("rows", "requests", *role_counts.WRITES)
"""Arrays that the functions write that evict nothing."""


class Growth(NamedTuple):
    """Lengths to which lists grow. `tokens` and `reserve` are in tokens; `sequences`: the first so many grow."""

    slot: Scalar
    sequences: Scalar
    tokens: Scalar
    reserve: Scalar
    reuse: Scalar


class Extended(NamedTuple):
    """Progress of growing: lists that grew; True if one found no blocks; True if one would end in a hole."""

    done: Scalar
    refused: Scalar
    broken: Scalar


class _List(NamedTuple):
    """One list at work: where it lies, its slots before and after."""

    shape: Shape
    row: Scalar
    notes: Scalar
    start: Scalar
    filled: Scalar
    end: Scalar


def extend(work: PooledWorkspace, view: RtpView, growth: Growth) -> tuple[PooledWorkspace, Extended]:
    """Makes list after list longer, group by group and sequence by sequence, until one cannot grow.

    What each was before is noted in the scratch slot, for `sweep` to undo.
    """
    groups = view.num_groups

    def one(w: PooledWorkspace, local: tuple[Scalar, ...]) -> tuple[PooledWorkspace, tuple[Scalar, ...]]:
        done = local[0]
        sequence, group = divide(done, groups), remainder(done, groups)
        w, grown, broken = _extend_list(w, view, growth, sequence, group)
        # Lists that grew are counted: `sweep` undoes exactly these.
        return w, (done + (grown & ~broken), ~grown, broken)

    end = growth.sequences * groups
    work, local = loop(lambda c: (c[0] < end) & ~c[1] & ~c[2], one, work, (0, False, False), writes=WRITES)
    return work, Extended(*local)


def _extend_list(
    work: PooledWorkspace, view: RtpView, growth: Growth, sequence: Scalar, group: Scalar
) -> tuple[PooledWorkspace, Scalar, Scalar]:
    """Makes one list longer; whether blocks were found, and whether it would end in a hole nevertheless."""
    shape = shape_of(view, group)
    tokens = effective(view, group, growth.tokens)
    work, (start,) = work.peek(group >= 0, "requests", work.length(growth.slot, sequence, group))
    wanted = total(shape, tokens, growth.reserve)
    at = _List(
        shape=shape,
        row=work.row(growth.slot, sequence, group),
        notes=work.row(work.scratch_slot, sequence, group),
        start=start,
        filled=slots(shape, tokens),
        end=jnp.maximum(wanted, start),
    )

    def missing(block: Scalar, position: Scalar) -> Scalar:
        """True if a slot without a block gets one."""
        # A LINEAR list has holes where a state is due only now: growing fills them, too.
        hole = (position >= start) | (block == 0)
        return hole & (position < wanted) & has_block(shape, position, at.filled, growth.reserve, growth.reuse)

    def count(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        position, most = local
        return w, (position + 1, most + missing(w.read("rows", at.row + position), position))

    first = jnp.where(shape.linear, 0, start)
    work, (_, fresh) = loop(lambda c: c[0] < at.end, count, work, (first, 0), reads=("rows",))
    # For the whole list at once, before any block of it is taken: a refused list has taken nothing.
    work, found = evict.make_room(work, view, shape, fresh, fresh > 0)
    grown = found | (fresh == 0)
    work, broken = _ends_in_hole(work, at, growth, grown)

    def fill(position: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        w, (old, *seen) = peek(
            position >= 0,
            lambda v: [v.read("rows", at.row + position), *role_counts.look_free(v, shape.pool)],
            w,
            ("rows", "counters", "bitmap"),
            (0,) * (1 + role_counts.looked_free(w)),
        )
        new = missing(old, position)
        w = role_counts.claim_found(w, new, shape.pool, seen)
        block = jnp.where(new, seen[2], 0)
        w = w.write_if(new | (position >= start), "rows", block, at.row + position)
        # A hole that was filled is noted, so that undoing makes it a hole again.
        w = w.write_if(position < start, "rows", new, at.notes + position)
        return w

    done = grown & ~broken
    begin = jnp.where(done, first, at.end)
    work = fori_loop(begin, at.end, fill, work, writes=("rows", *role_counts.WRITES))
    work = work.write_if(done, "requests", start, work.length(work.scratch_slot, sequence, group))
    work = work.write_if(done, "requests", at.end, work.length(growth.slot, sequence, group))
    return work, grown, grown & broken


def _ends_in_hole(work: PooledWorkspace, at: _List, growth: Growth, enabled: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """True if one of the slots at the end that a window needs would be empty (RTP-LLM `validateTailBlocks`)."""
    places = [jnp.maximum(at.end - back, 0) for back in (1, 2)]
    work, blocks = work.peek(
        enabled & (at.shape.checked > 0) & (at.end > 0), "rows", *(at.row + place for place in places)
    )
    broken = jnp.bool_(False)
    for back, place, block in zip((1, 2), places, blocks, strict=True):
        brought = has_block(at.shape, place, at.filled, growth.reserve, growth.reuse)
        there = jnp.where(place >= at.start, brought, block != 0)
        broken = broken | ((at.shape.checked >= back) & (at.end >= back) & ~there)
    return work, enabled & broken


class Sweep(enum.IntEnum):
    """Part of a list that `sweep` gives back."""

    UNDO = 0
    """Blocks that the last `extend` brought."""
    CLEAN = 1
    """Blocks that further decoding does not need (RTP-LLM `removeSkippedBlocks`)."""
    CLEAR = 2
    """Everything."""


def sweep(
    work: PooledWorkspace, view: RtpView, growth: Growth, lists: Scalar, mode: Scalar, leaky: Scalar
) -> PooledWorkspace:
    """Gives blocks of the first `lists` lists back, group by group and sequence by sequence.

    `growth` has, for UNDO and CLEAN, the lengths for which the lists grew. Of the first `leaky` lists, holes that the
    last `extend` filled are emptied without giving their references back (a defect, `CacheField.LEAKS`).
    """
    groups = view.num_groups
    undo, clean, clear = (mode == int(each) for each in Sweep)

    def one(done: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        sequence, group = divide(done, groups), remainder(done, groups)
        shape = shape_of(view, group)
        row, notes = w.row(growth.slot, sequence, group), w.row(w.scratch_slot, sequence, group)
        w, (length, start) = w.peek(
            done >= 0, "requests", *(w.length(slot, sequence, group) for slot in (growth.slot, w.scratch_slot))
        )

        def give(position: Scalar, v: PooledWorkspace) -> PooledWorkspace:

            def look(u: PooledWorkspace) -> list[Scalar]:
                block = u.read("rows", row + position)
                return [block, u.read("rows", notes + position), *role_counts.look(u, shape.pool, block)]

            names, nothing = ("rows", *role_counts.WRITES), (0,) * (2 + role_counts.looked(v))
            v, (block, noted, *seen) = peek(position >= 0, look, v, names, nothing)
            brought = (position >= start) | (noted != 0)
            # One loop for three ways to give back: giving back is what takes long to compile.
            goes = clear | (undo & brought) | (clean & ~on_grid(shape, position, growth.reuse))
            goes = goes & (block != 0)
            leaks = (done < leaky) & shape.linear & (position < start) & (noted != 0)
            v = role_counts.let_go(v, goes & ~leaks, shape.pool, block, jnp.int32(Role.REQUEST), seen)
            return v.write_if(goes, "rows", 0, row + position)

        first = jnp.where(undo & ~shape.linear, start, 0)
        end = jnp.where(clean, jnp.maximum(length - shape.kept - growth.reserve, 0), length)
        w = fori_loop(first, end, give, w, writes=("rows", *role_counts.WRITES))
        # A cleaned list keeps its length: slots are positions, and those given back are holes.
        left = jnp.where(clear, 0, jnp.where(undo, start, length))
        return w.write("requests", left, w.length(growth.slot, sequence, group))

    return fori_loop(0, lists, one, work, writes=LISTS)


def copy_list(
    work: PooledWorkspace,
    view: RtpView,
    group: Scalar,
    source: tuple[Scalar, Scalar],
    target: tuple[Scalar, Scalar],
    shared: Scalar,
) -> PooledWorkspace:
    """Makes the list at `target`, a slot and a sequence, whose blocks are forgotten, what the one at `source` is.

    If `shared`, the blocks get a reference more.
    """
    pool = view.pool_of(group)
    work, (length,) = work.peek(group >= 0, "requests", work.length(*source, group))

    def body(position: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        w, (block,) = w.peek(position >= 0, "rows", w.row(*source, group) + position)
        w = role_counts.reference(w, shared & (block != 0), pool, block, jnp.int32(Role.REQUEST))
        return w.write("rows", block, w.row(*target, group) + position)

    work = fori_loop(0, length, body, work, writes=("rows", *role_counts.WRITES))
    return work.write("requests", length, work.length(*target, group))


def share(work: PooledWorkspace, view: RtpView, slot: Scalar, batch: Scalar) -> PooledWorkspace:
    """Lets every sequence after the first hold the first one's blocks too."""
    groups = view.num_groups

    def body(place: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        sequence, group = divide(place, groups), remainder(place, groups)
        first = (slot, jnp.int32(0))
        return copy_list(w, view, group, first, (slot, sequence), jnp.bool_(True))

    # From the second sequence on: the first `groups` places are the first sequence's own.
    end = batch * groups
    return fori_loop(groups, end, body, work, writes=LISTS)
