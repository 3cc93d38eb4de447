"""States that a prefill chunk leaves behind inside itself, so that its prompt can be resumed close to its end.

vLLM 0.33 `MambaManager`'s prefill checkpoints: planned when the chunk is admitted, written by the chunk into the column
before the last, registered with it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hkv.dialects.vllm.kinds.mamba import BEGUN_LOOKED_AT, BEYOND_KEYS, LOOKED_AT, STAYS_PLANNED
from hkv.dialects.vllm.rules.hit import resumable
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, View
from hkv.dialects.vllm.rules.rows import Demand
from hkv.state import key_table
from hkv.state.loops import Scalar, ceil_divide, divide, fori_loop, loop, peek, remainder
from hkv.state.state import Request, Row
from hkv.state.workspace import Workspace

WINDOW = 32
"""Entries from `Row.CACHED` on that `Row.STANDING` tells apart: keys lag behind tokens by fewer."""


def plan(
    work: Workspace, view: View, demand: Demand, group: Scalar, length: Scalar, scratch: Scalar
) -> tuple[Workspace, Scalar]:
    """True if a demanded chunk exports a state. The row notes which, unless only admission asks (`capped`).

    vLLM 0.33 `MambaManager.get_num_blocks_to_allocate`, `is_mamba_prefill_checkpoint_valid`: the chunk starts on a hash
    block, spans at least two column ends, and reaches the state's place after at least one hash block, a multiple of
    the kernel's step from its start. The column must be free, or among the row's last `scratch` entries.
    """
    step = view.group(group, GroupField.EXPORT_STEP)
    start, end, slot = demand.total, demand.main, demand.slot

    def once(w: Workspace, _: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        place, column, fits = _place(view, group, start, end)
        held = (column >= 0) & (column < length - scratch)
        entry = jnp.where(held, column, 0)
        w, (prompt, tokens, first, taken) = peek(
            step > 0,
            lambda v: (
                *v.get(slot, Request.PROMPT, Request.TOKENS),
                *v.get_row(slot, group, Row.FIRST),
                v.read("rows", v.row(slot, group) + entry),
            ),
            w,
            reads=("requests", "rows"),
            default=(0, 0, 0, 0),
        )
        # With retention 0 only the chunk that reaches the prompt's end leaves a state.
        early = (view.group(group, GroupField.EXPORT_LAST) != 0) & (end < jnp.maximum(prompt, tokens - 1))
        # The column must not hold a state that somebody still reads.
        free = ~held | (column < first) | (taken == 0)
        planned = fits & ~early & free
        # The first gate asks about the whole request, not about the chunk: what it finds is not noted.
        noted = jnp.where(demand.capped, w.spare_slot, slot)
        w = w.set_row(noted, group, Row.EXPORT, jnp.where(planned, place, 0))
        block = view.group(group, GroupField.BLOCK)
        inside = planned & (remainder(start, block) != 0)
        inside = inside & (view.group(group, GroupField.EXPORT_FAILS) & BEGUN_LOOKED_AT == 0)
        w = w.set_row(noted, group, Row.BEGUN, jnp.where(inside, divide(start, block) + 1, 0))
        return w.set_row(noted, group, Row.EXPORT_ENTRY, jnp.maximum(column, 0)), (False, planned)

    work, (_, planned) = loop(lambda c: c[0], once, work, (step > 0, False), writes=("requests", "rows"))
    return work, planned


def forget(work: Workspace, view: View, slot: Scalar, enabled: Scalar) -> Workspace:
    """Forgets the states that a refused chunk would have left behind, if `enabled`."""

    def one(group: Scalar, w: Workspace) -> Workspace:
        forgets = view.group(group, GroupField.EXPORT_FAILS) & STAYS_PLANNED == 0
        return w.set_row(jnp.where(forgets, slot, w.spare_slot), group, Row.EXPORT, 0)

    groups = jnp.where(enabled, view.num_groups, 0)
    return fori_loop(0, groups, one, work, writes=("requests",))


def leave(work: Workspace, view: View, slot: Scalar, group: Scalar, enabled: Scalar) -> Workspace:
    """Notes the entries of the last chunk that hold other states, if they are only looked at with later chunks.

    Keys lag behind tokens, and steps on their way retire nothing: a state that it left behind may still stand when its
    entry's end has a key. The plan of the chunk that follows takes its place.
    """
    fields = (Row.EXPORT, Row.EXPORT_ENTRY, Row.BEGUN, Row.CACHED, Row.STANDING)
    work, (tokens, entry, begun, looked_at, standing) = work.peek_row(enabled, slot, group, *fields)
    kept = (tokens > 0) & (view.group(group, GroupField.EXPORT_FAILS) & LOOKED_AT == 0)
    standing = with_entry(with_begun(standing, looked_at, tokens, begun), looked_at, entry, kept)
    return work.set_row(jnp.where(tokens > 0, slot, work.spare_slot), group, Row.STANDING, standing)


def with_begun(standing: Scalar, looked_at: Scalar, exported: Scalar, begun: Scalar) -> Scalar:
    """`Row.STANDING` with the entry inside which a chunk began that exports a state, and so goes on behind it."""
    return with_entry(standing, looked_at, begun - 1, (exported > 0) & (begun > 0))


def with_entry(standing: Scalar, looked_at: Scalar, entry: Scalar, enabled: Scalar) -> Scalar:
    """`Row.STANDING` with one entry more, if `enabled`, unless it is before `looked_at`. Elementwise."""
    # 32 entries in one word, by their numbers modulo 32: entries before `looked_at` are settled, so that a bit can be
    # used again once its entry is passed.
    near = enabled & (entry >= looked_at) & (entry < looked_at + WINDOW)
    return jnp.where(near, standing | _bits(entry, 1), standing)


def stands(standing: Scalar, looked_at: Scalar, entry: Scalar) -> Scalar:
    """True if an entry is not to be registered at its end, by `Row.STANDING`. Elementwise.

    Entries before `looked_at` were looked at.
    """
    # Past the window, the bit is another entry's.
    return ((standing >> (entry & (WINDOW - 1))) & 1 != 0) & (entry < looked_at + WINDOW)


def passed(standing: Scalar, first: Scalar, stop: Scalar) -> Scalar:
    """`Row.STANDING` once the entries from `first` to `stop` are looked at. Elementwise."""
    return standing & ~_bits(first, stop - first)


def _bits(first: Scalar, count: Scalar) -> Scalar:
    """Bits of `count` entries from `first` on, in a word that goes round."""
    place = jnp.int32(first & (WINDOW - 1))
    low = jnp.where(count >= WINDOW, -1, (jnp.int32(1) << jnp.clip(count, 0, WINDOW - 1)) - 1)
    # What the shift to the left pushed out comes in again on the right. A shift by 32 is undefined, so that place 0
    # is asked for like place 1 and masked out behind.
    over = jax.lax.shift_right_logical(low, WINDOW - jnp.maximum(place, 1))
    return (low << place) | jnp.where(place > 0, over, 0)


def _place(view: View, group: Scalar, start: Scalar, end: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """Length at which a chunk from `start` to `end` would export a state, its column, and True if it can."""
    step, unit = view.group(group, GroupField.EXPORT_STEP), view.group(group, GroupField.EXPORT_UNIT)
    block, hash_block = view.group(group, GroupField.BLOCK), view.whole(CacheField.HASH_BLOCK)
    place = resumable(view, end, jnp.maximum(unit, 1))
    # The chunk writes its running state into the last column it reaches, and the exported one into the column before
    # that.
    column = ceil_divide(end, block) - 2
    reached = (start + hash_block <= place) & (place < end)
    reached = reached & (remainder(jnp.maximum(place - start, 0), jnp.maximum(step, 1)) == 0)
    return place, column, reached & (remainder(start, hash_block) == 0) & (column >= ceil_divide(start, block))


class Ends(NamedTuple):
    """Fields of a request and its row by which a key that ends inside a block may be due.

    In tokens, but `keys` in prefix keys, and `first` and `length` in entries of the row.

    `shared_boundary`: length at which others were seen to branch off, if the request comes to compute it now; else -1.
    `shared`: the same length, always. `exported`: length at which the chunk exports a state; 0 if it exports none.
    `standing`: `Row.STANDING`, with the entry inside which that chunk began.
    """

    cacheable: Scalar
    prompt: Scalar
    shared_boundary: Scalar
    shared: Scalar
    keys: Scalar
    first: Scalar
    length: Scalar
    exported: Scalar
    standing: Scalar


class Due(NamedTuple):
    """Change of a block's keys.

    Attributes:
      drops: True if it loses the keys that it has.
      adds: True if it gets a key then.
      block: id of the block.
      part: part of the key that is added; 0 for the key of the whole block.
      entry: the key's place in the table.
      end: tokens up to which the key reaches if it is reported by itself; 0 if not.
    """

    drops: Scalar
    adds: Scalar
    block: Scalar
    part: Scalar
    entry: Scalar
    end: Scalar

    def instead(self, condition: Scalar, other: Due) -> Due:
        """The other where the condition holds, else this one; field by field."""
        return Due(*(jnp.where(condition, b, a) for a, b in zip(self, other, strict=True)))


NOTHING_DUE = (False, False, 0, 0, 0, 0)
"""The values of a `Due` that changes nothing."""


def register(work: Workspace, view: View, slot: Scalar, group: Scalar, ends: Ends) -> tuple[Workspace, Due, Scalar]:
    """The state that a chunk leaves behind, to be registered if somebody could resume there; else not to be found.

    vLLM 0.33 `MambaManager._cache_partial_tail_block`. Returns what is due, and whether the engine fails (defect
    checkpoint-beyond-keys).
    """
    hash_block, block = view.whole(CacheField.HASH_BLOCK), view.group(group, GroupField.BLOCK)
    column, scale = view.group(group, GroupField.COLUMN), view.group(group, GroupField.SCALE)
    groups = work.sizes.buckets.groups
    work, (tokens, entry_at) = work.peek_row(group >= 0, slot, group, Row.EXPORT, Row.EXPORT_ENTRY)
    # Keys are by hash blocks, entries by manager blocks: a state may stand in the middle of its block.
    units = divide(tokens, hash_block)
    keyed = units <= ends.keys
    present = (tokens > 0) & (entry_at >= ends.first) & (entry_at < ends.length)
    places = ("rows", work.row(slot, group) + entry_at), ("chains", work.chain(slot) + jnp.where(keyed, units - 1, 0))
    work, (held, key) = work.peek_each(present, *places)
    present = present & (held != 0)
    period, columns = view.group(group, GroupField.PERIOD), divide(tokens, block)
    retained = (remainder(tokens, block) == 0) & ((period == 0) | (remainder(columns, jnp.maximum(period, 1)) == 0))
    at_end = tokens == resumable(view, ends.prompt, jnp.maximum(view.group(group, GroupField.EXPORT_UNIT), 1))
    wanted = at_end | retained | (tokens == ends.shared)
    entry = key * groups + column
    work, primary = key_table.primary_entry(work, present, held)
    # Under its key already: registering again would change nothing but the order of duplicates.
    fresh = present & wanted & ~(keyed & (primary == entry))
    defects = view.group(group, GroupField.EXPORT_FAILS)
    fails = fresh & ~keyed & (defects & BEYOND_KEYS != 0)
    fails = fails | ((tokens > 0) & (entry_at >= ends.length) & (defects & STAYS_PLANNED != 0))
    fresh = fresh & keyed
    work = work.write_if(fresh, "table", work.steps, work.entry(key * groups + groups - 1))
    return work, Due(fresh | (present & ~wanted), fresh, held, remainder(units, scale), entry, tokens), fails
