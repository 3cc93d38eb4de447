"""Blocks that a step registers before it writes them: a hit that needs one has to wait for the next step.

Blocks are registered when they are granted, and written when the step runs. A request that shares a block reads it
after it was written, but copies are made before: of a recurrent state, and of a block of tokens that a hit ends inside.
Of states vLLM 0.33 remembers which were registered in the step (`MambaManager.cached_blocks_this_step`). Of blocks of
tokens it does not (defect copied-before-written).
"""

from __future__ import annotations

import jax.numpy as jnp

from hkv.dialects.vllm.rules.admit import adopted_blocks
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, View
from hkv.state import key_table
from hkv.state.loops import Scalar, divide, fori_loop, loop, peek, remainder, when
from hkv.state.state import Request, Row
from hkv.state.workspace import Workspace


def note_grant(work: Workspace, slot: Scalar, local: Scalar, joins: Scalar, enabled: Scalar) -> Workspace:
    """Notes of a request what the step finds written, the first time that the step grants it blocks.

    `local` tokens are computed, or are the hit's by which it `joins`.
    """
    # Without keys inside blocks nothing is copied, so that nothing has to wait: nothing is compiled either.
    if work.sizes.buckets.parts == 0:
        return work
    work, (last,) = work.peek_request(enabled, slot, Request.GRANT_STEP)

    def note(w: Workspace) -> Workspace:
        w = w.set(slot, Request.GRANT_STEP, w.steps).set(slot, Request.WRITTEN, local)
        return w.set(slot, Request.JOINED, joins)

    # Only the first grant of a step: a second one in the same step finds written what the first found.
    return when(enabled & ((last != work.steps) | joins), note, work, writes=("requests",))


def note_row(work: Workspace, view: View, slot: Scalar, group: Scalar, start: Scalar, end: Scalar) -> Workspace:
    """Notes of entries `[start, end)` of a row, which were registered, what this step has yet to write of them."""
    work = _note_states(work, view, slot, group, start, end)
    return note_blocks(work, view, slot, group, start, end)


def _note_states(work: Workspace, view: View, slot: Scalar, group: Scalar, start: Scalar, end: Scalar) -> Workspace:
    """Notes the step at the keys of recurrent states."""
    row, groups = work.row(slot, group), work.sizes.buckets.groups
    recurrent = view.group(group, GroupField.RECURRENT) != 0

    def body(i: Scalar, w: Workspace) -> Workspace:
        w, (block,) = w.peek(recurrent, "rows", row + i)
        w, entry = key_table.primary_entry(w, block != 0, block)
        # The number of columns is a power of two: the last column of a key's line is its entry with all low bits set.
        last = w.entry(jnp.maximum(entry, 0) | (groups - 1))
        return w.write_if(entry >= 0, "table", w.steps, last)

    return fori_loop(jnp.where(recurrent, start, end), end, body, work, writes=("rows", "keys", "table"))


def note_blocks(work: Workspace, view: View, slot: Scalar, group: Scalar, start: Scalar, end: Scalar) -> Workspace:
    """Notes at blocks of tokens the step, and how many of their tokens it found written.

    Blocks that a hit brought are left out. The others are all new where the step admitted the request, the target of a
    copy included.
    """
    if work.sizes.buckets.parts == 0:
        return work
    row, size = work.row(slot, group), view.group(group, GroupField.BLOCK)
    waits = (view.group(group, GroupField.WAITS) != 0) & (start < end)
    fields = (Request.GRANT_STEP, Request.WRITTEN, Request.JOINED)
    work, (step, written, joined) = work.peek_request(waits, slot, *fields)

    def body(column: Scalar, w: Workspace) -> Workspace:
        w, (block,) = w.peek(column >= 0, "rows", row + column)
        found = jnp.where(joined != 0, 0, jnp.maximum(written - column * size, 0))
        w = w.write("keys", w.steps, w.written(block)).write("keys", found, w.written(block) + 1)
        return w

    # Blocks that were full before the step are written; the loop begins at the one that was being filled.
    first = jnp.where(waits & (step == work.steps), jnp.maximum(start, divide(written, size)), end)
    return fori_loop(first, end, body, work, reads=("rows",), writes=("keys",))


def must_wait(
    work: Workspace, view: View, slot: Scalar, hit: Scalar, given: Scalar, enabled: Scalar
) -> tuple[Workspace, Scalar]:
    """True if a hit of a request that was just looked up needs a block that this very step writes, after it would have
    been copied.

    A hit that is `given` is not the lookup's: its states are not those that the request's keys name.
    """
    enabled = enabled & (hit > 0)
    work, state = _state_unwritten(work, view, slot, hit, enabled & ~given)
    work, other = _given_state_unwritten(work, view, slot, hit, enabled & given)
    state = state | other
    if work.sizes.buckets.parts == 0:
        return work, state

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        group, found = local
        size = view.group(group, GroupField.BLOCK)
        inside = remainder(hit, size)

        def noted(v: Workspace) -> tuple[Scalar, Scalar]:
            block = v.read("rows", v.row(slot, group) + divide(hit, size))
            return v.read("keys", v.written(block)), v.read("keys", v.written(block) + 1)

        # Whole blocks that a hit shares are read after the step has written them; only the block that is copied may
        # be early.
        ends = (view.group(group, GroupField.WAITS) != 0) & (inside > 0)
        w, (step, written) = peek(ends, noted, w, reads=("rows", "keys"), default=(0, 0))
        return w, (group + 1, found | (ends & (step == w.steps) & (written < inside)))

    groups = jnp.where(enabled, view.num_groups, 0)
    work, (_, found) = loop(lambda c: c[0] < groups, body, work, (0, state), reads=("rows", "keys"))
    return work, found


def _state_unwritten(
    work: Workspace, view: View, slot: Scalar, hit: Scalar, enabled: Scalar
) -> tuple[Workspace, Scalar]:
    """True if a hit ends in a recurrent state that was registered in this very step."""
    ending = enabled & (view.whole(CacheField.SNAPSHOTS) != 0)

    def noted(w: Workspace) -> tuple[Scalar]:
        last = divide(hit, view.whole(CacheField.HASH_BLOCK)) - 1
        key = w.read("chains", w.chain(slot) + jnp.maximum(last, 0))
        groups = w.sizes.buckets.groups
        return (w.read("table", w.entry(key * groups + groups - 1)),)

    work, (step,) = peek(ending, noted, work, reads=("chains", "table"), default=(0,))
    return work, ending & (step == work.steps)


def _given_state_unwritten(
    work: Workspace, view: View, slot: Scalar, hit: Scalar, enabled: Scalar
) -> tuple[Workspace, Scalar]:
    """True if a group's last block of a hit that was given is a recurrent state of this very step."""
    groups = work.sizes.buckets.groups

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        group, found = local
        recurrent = view.group(group, GroupField.RECURRENT) != 0
        w, (short,) = w.peek_row(recurrent, slot, group, Row.HIT_SHORT)
        last = adopted_blocks(view, group, hit, short) - 1
        there = recurrent & (last >= 0)
        w, (block,) = w.peek(there, "rows", w.row(slot, group) + jnp.maximum(last, 0))
        w, entry = key_table.primary_entry(w, block != 0, block)
        place = jnp.maximum(entry, 0) | (groups - 1)
        w, (step,) = w.peek(entry >= 0, "table", w.entry(place))
        return w, (group + 1, found | ((entry >= 0) & (step == w.steps)))

    end = jnp.where(enabled & (view.whole(CacheField.SNAPSHOTS) != 0), view.num_groups, 0)
    start = (jnp.int32(0), jnp.bool_(False))
    work, (_, found) = loop(lambda c: c[0] < end, body, work, start, reads=("rows", "keys", "requests", "table"))
    return work, found
