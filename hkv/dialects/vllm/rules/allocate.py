"""The allocation rule: adopts a hit's blocks, then gives every group the blocks its next tokens need.

vLLM 0.33 `KVCacheManager.allocate_slots`, steps 3 to 7. All groups adopt their hits before any group takes a fresh
block, so that one group's fresh block cannot evict what another group is about to adopt.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hkv.dialects.vllm.rules import rows
from hkv.dialects.vllm.rules.admit import (
    Demand,
    Spread,
    adopted_blocks,
    arrives,
    ends_inside,
    skipped_blocks,
    spread_row,
    wanted_slots,
)
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, View
from hkv.state import free_queue, key_table, loops
from hkv.state.loops import Scalar, ceil_divide, fori_loop, loop, when
from hkv.state.state import Row
from hkv.state.workspace import Event, Workspace, emit, note_copy, report

ADOPT_WRITES = ("rows", "requests", *free_queue.ADOPT_WRITES)
"""Arrays that `adopt_hit` writes."""

GROW_WRITES = ("queue", "requests", "ids", "num_ids", "copies", "num_copies", *free_queue.TAKE_WRITES)
"""Arrays that `grow` writes."""


def adopt_hit(work: Workspace, view: View, demand: Demand, enabled: Scalar) -> Workspace:
    """Every group's row takes over the blocks that the lookup found and that its next query can still read.

    A row ends with a hit that ends among the sinks: `grow` goes on there.
    """
    slot = demand.slot

    def body(group: Scalar, w: Workspace) -> Workspace:
        w, (hit_first, short) = w.peek_row(group >= 0, slot, group, Row.HIT_FIRST, Row.HIT_SHORT)
        skip = skipped_blocks(view, group, demand.total)
        found = adopted_blocks(view, group, demand.hit, short)
        sinks = view.group(group, GroupField.SINKS)
        # What is skipped becomes null entries: rows are indexed by position, and `remove_skipped_blocks` would null
        # them anyway.
        length = jnp.where(found < sinks, found, jnp.maximum(skip, found))
        length = jnp.where(view.group(group, GroupField.ONE_BLOCK) != 0, 0, length)
        first = jnp.minimum(jnp.maximum(hit_first * (found > 0), skip), length)
        w = rows.null(w, slot, group, sinks, jnp.where(sinks > 0, first, sinks))
        start = rows.start(view, group, first)
        # `BlockPool.touch`: the block leaves the free queue, and cannot be evicted by what a later group takes.
        w = free_queue.adopt(w, w.row(slot, group) + start, found - start)
        split = ends_inside(w, view, group, demand) & (found > first)
        w = w.set_row(slot, group, Row.LENGTH, length)
        w = w.set_row(slot, group, Row.FIRST, first).set_row(slot, group, Row.GROWN, 0)
        w = w.set_row(slot, group, Row.PARTIAL, jnp.where(split, found, 0))
        # What was found is registered already. A block inside which the hit ends is not: its copy will be looked at.
        return w.set_row(slot, group, Row.CACHED, length - split)

    groups = jnp.where(enabled, view.num_groups, 0)
    return fori_loop(0, groups, body, work, writes=ADOPT_WRITES)


def grow(work: Workspace, view: View, demand: Demand, enabled: Scalar) -> tuple[Workspace, Scalar]:
    """Every group's row gets blocks for external tokens first, then every group's for the tokens to come; how many
    copies to make.

    External tokens come in two turns of a group, of which the first is for sinks that the hit lacks. A recurrent group
    gets one block, at the column of its next state, besides those for drafts and for a state that is left behind for
    others; the columns it jumps over are null (`hkv.dialects.vllm.rules.admit.spread_row`). Where a row ends in a block
    that is shared or registered though it is not full, a block more is taken for a copy (`_copy`).
    """
    slot = demand.slot
    groups = view.num_groups
    copying = work.sizes.buckets.parts > 0

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        turn, copies = local
        # Turns in order: external tokens of every group (sinks, then the rest), and only then the new tokens of every
        # group (a copy first, then blocks). vLLM's coordinator calls `allocate_new_computed_blocks` of all managers
        # before any `allocate_new_blocks`, so that ids come in this order.
        arriving = turn < 2 * groups
        later = turn - 2 * groups
        group = jnp.where(arriving, turn >> 1, later >> 1 if copying else later)
        for_sinks = arriving & ((turn & 1) == 0)
        for_copy = ~arriving & ((later & 1) == 0) if copying else jnp.bool_(False)
        w, (have, partial, grown, exported) = w.peek_row(
            turn >= 0, slot, group, Row.LENGTH, Row.PARTIAL, Row.GROWN, Row.EXPORT
        )
        block = view.group(group, GroupField.BLOCK)
        recurrent = view.group(group, GroupField.RECURRENT) != 0
        own = jnp.where(recurrent, demand.main, wanted_slots(view, group, demand))
        target = ceil_divide(jnp.where(arriving, demand.total, own), block)
        skip, sinks = skipped_blocks(view, group, demand.total), view.group(group, GroupField.SINKS)
        target = jnp.where(for_sinks, jnp.where(skip > 0, sinks, 0), target)
        target = jnp.where(arriving & ~arrives(view, group, demand), 0, target)
        scratch = view.group(group, GroupField.SCRATCH)
        target = jnp.where(view.group(group, GroupField.ONE_BLOCK) != 0, 1, target + jnp.where(arriving, 0, scratch))
        spread = spread_row(have, target, scratch, exported > 0, jnp.where(have > 0, grown, 0))
        states = recurrent & ~arriving & ~for_copy
        owed = for_copy & (partial > 0)
        gap_end = jnp.where(arriving & ~for_sinks & (sinks > 0), jnp.maximum(skip, have), have)
        w = rows.null(w, slot, group, have, jnp.where(states, spread.gap_end, gap_end))
        w = when(
            states & (scratch > 0), lambda v: _move_scratch(v, slot, group, spread), w, writes=("rows", "requests")
        )
        filled = jnp.where(states, spread.end, gap_end)
        target = jnp.where(for_copy, have, jnp.maximum(target, filled))
        # The copy's block is taken into a row that belongs to nobody: `_copy` says where it goes.
        place = jnp.where(for_copy, w.row(w.spare_slot, group), w.row(slot, group) + filled)
        w = free_queue.take(w, place, jnp.where(for_copy, owed.astype(jnp.int32), target - filled))
        if copying:
            w = when(owed, lambda v: _copy(v, slot, group, partial - 1, demand.hit > 0), w, writes=GROW_WRITES)
        w = w.set_row(slot, group, Row.LENGTH, target)
        w = w.set_row(jnp.where(gap_end > have, slot, w.spare_slot), group, Row.FIRST, gap_end)
        # The last turn of a group leaves the length before its own blocks: `get_blocks` of new ones begins there.
        return w.set_row(slot, group, Row.NEW_FIRST, have), (turn + 1, copies + owed)

    start = jnp.where(demand.external > 0, 0, 2 * groups)
    end = jnp.where(enabled, (4 if copying else 3) * groups, start)
    work, (_, copies) = loop(lambda c: c[0] < end, body, work, (start, 0), writes=GROW_WRITES)
    return work, copies


def _copy(work: Workspace, slot: Scalar, group: Scalar, column: Scalar, adopted: Scalar) -> Workspace:
    """Places a partly filled block and the copy that was just taken into the spare row.

    A hit's last block stays as it is, and the copy takes its place in the row. A state that the request itself
    registered goes on in place, and the copy takes over its keys. vLLM 0.33 `allocate_new_blocks` of
    `SingleTypeKVCacheManager` and `MambaManager`. Until the caller says that the copy is made, both blocks hold a
    reference more than rows do. It is reported: the group, the block, its copy.
    """
    work, (source, copy) = work.peek(
        group >= 0, "rows", work.row(slot, group) + column, work.row(work.spare_slot, group)
    )
    owed = source != 0
    left = owed & ~adopted
    work = key_table.move_keys(work, left, source, copy)
    work = free_queue.add_reference(work, owed, jnp.where(adopted, copy, source))
    work = work.write_if(owed & adopted, "rows", copy, work.row(slot, group) + column)
    work, entry = key_table.primary_entry(work, left, copy)
    groups = work.sizes.buckets.groups
    # The spare column of the key's line in the table, where the step is noted in which the key was last registered.
    last = work.entry(jnp.where(entry >= 0, entry | (groups - 1), 0))
    work = work.write_if(entry >= 0, "table", work.steps, last)
    work = note_copy(work, owed, group, source, copy)
    return work.set_row(slot, group, Row.PARTIAL, 0)


def _move_scratch(work: Workspace, slot: Scalar, group: Scalar, spread: Spread) -> Workspace:
    """Scratch moves along to the right, past its old places, which become null. What a trip reads, the next writes."""
    row, spare = work.row(slot, group), work.rows.shape[0] - 1
    source, target, count = spread.scratch, spread.gap_end, spread.moved

    def settle(w: Workspace, gone: Scalar, place: Scalar, block: Scalar) -> Workspace:
        return w.write("rows", 0, gone).write("rows", block, place)

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        i, *last = local
        w = settle(w, *last)
        return w, (i + 1, row + source + i, row + target + i, w.read("rows", row + source + i))

    work, (_, *last) = loop(lambda c: c[0] < count, body, work, (0, spare, spare, 0), writes=("rows",))
    # The last trip's read is written behind the loop.
    return settle(work, *last).set_row(slot, group, Row.GROWN, 1)


def report_row(work: Workspace, slot: Scalar, group: Scalar, start: Scalar, first: Scalar, end: Scalar) -> Workspace:
    """Reports entries `[start, end)` of a row; those before `first` are null."""
    if work.sizes.ids == 0:
        return work
    row = work.row(slot, group)

    def body(i: Scalar, w: Workspace) -> Workspace:
        block = jnp.where(i < first, 0, w.read("rows", row + i))
        return report(w, i >= 0, block)

    return fori_loop(start, end, body, work, reads=("rows",), writes=("ids", "num_ids"))


# The eviction rules: takes keys away from blocks that are named, or from all.
#
# vLLM 0.33 `BlockPool.evict_blocks` and `reset_prefix_cache`. References and the queue's order stay as they are.


def evict(
    work: Workspace, view: View, ids: jax.Array, start: Scalar, count: Scalar, enabled: Scalar
) -> tuple[Workspace, Scalar]:
    """`count` named blocks, `ids[start:]`, lose their keys; how many were not blocks of the pool, which are dropped."""
    blocks = view.whole(CacheField.NUM_BLOCKS)

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        i, outside = local
        block = loops.read(ids, i)
        exists = (block >= 0) & (block < blocks)
        w = key_table.drop_keys(w, exists & (block > 0), jnp.where(exists, block, 0))
        return w, (i + 1, outside + ~exists)

    end = jnp.where(enabled, start + count, start)
    work, (_, outside) = loop(lambda c: c[0] < end, body, work, (start, 0), writes=key_table.WRITES)
    return work.replace(dropped=work.dropped + outside), outside


def reset(work: Workspace, view: View, enabled: Scalar) -> tuple[Workspace, Scalar]:
    """All blocks lose their keys, unless some block is in use; whether it was done."""
    # All but the null block are in the queue. vLLM's `reset_prefix_cache` compares the same numbers.
    done = enabled & (work.free == view.whole(CacheField.NUM_BLOCKS) - 1)
    buckets = work.sizes.buckets

    def clear_keys(i: Scalar, w: Workspace) -> Workspace:
        return w.write("keys", 0, w.key(0) + i)

    def clear_table(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        entry, value = local
        # The value of the trip before, one entry back: written before this trip reads.
        w = w.write_if(value > 0, "table", key_table.absent(value), w.entry(entry - 1))
        return w, (entry + 1, w.read("table", w.entry(entry)))

    end = jnp.where(done, buckets.blocks * buckets.key_words, 0)
    work = fori_loop(0, end, clear_keys, work, writes=("keys",))
    end = jnp.where(done, work.spare_entry, -1)
    work, _ = loop(lambda c: c[0] <= end, clear_table, work, (0, 0), writes=("table",))
    return emit(work, done, Event.CLEARED), done
