"""Recurrent states that the cache hands over to the second tier, compiled: each is stored by itself.

A state stands in its block only until its request goes on, so that it is no chunk that a request may offer again: what
an operation has registered goes to the tier with the very step, before any chunks, and what finds no room is lost. The
twin of `reference.dialects.vllm.live.offloads` and of the connector's `_store_states`. A program for layouts without
recurrent groups has nothing of it (`TierRoom.states`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from hkv.dialects.vllm.rules.offload import arc, lru, pool, tracker
from hkv.dialects.vllm.rules.offload.parameters import TierField, TierNumber
from hkv.dialects.vllm.rules.offload.pool import Prefix
from hkv.dialects.vllm.rules.offload.words import ToldRow, TrackerWord
from hkv.dialects.vllm.rules.parameters import GroupField
from hkv.state import key_table
from hkv.state.loops import Scalar, divide, loop, remainder
from hkv.state.state import Request, Row

WRITES = ("lists", "requests", "tables", "rows", "chains", "keys", "handing")
"""Arrays and scalars that `find` writes."""


def is_state(view: Any, group: Scalar) -> Scalar:
    """True if a group's chunks are states that are handed over."""
    return view.tier.group(group, TierField.STATE) != 0


def note(w: Any, view: Any, slot: Scalar, local: Scalar, loads: Scalar, adopts: Scalar, enabled: Scalar) -> Any:
    """Lists a request of which an operation has registered states.

    Args:
      w: the workspace.
      view: the parameters.
      slot: its slot.
      local: tokens of the hit that it adopted; whose state is others', and is not handed over.
      loads: whether it has to wait for a load, and has registered nothing yet.
      adopts: whether it was admitted by the operation.
      enabled: whether there was one.
    """

    def of_group(v: Any, carried: tuple[Scalar, Scalar]) -> tuple[Any, tuple[Scalar, Scalar]]:
        group, found = carried
        state, place = is_state(view, group), v.told_word(slot, group, ToldRow.HANDED_OVER)
        v, (done,) = v.peek_row(state, slot, group, Row.CACHED)
        v, (before,) = v.peek(state, "tables", place)
        adopted = jnp.where(loads, done, divide(local, view.group(group, GroupField.BLOCK)))
        v = v.write_if(state & adopts, "tables", adopted, place)
        return v, (group + 1, found | (state & (done > jnp.where(adopts, adopted, before))))

    groups = jnp.where(enabled, view.num_groups, 0)
    w, (_, found) = loop(lambda c: c[0] < groups, of_group, w, (0, False), writes=("requests", "tables"))
    # One that goes on in the step in which its load was registered stands in the list already, as the last one.
    w, last = _last(w, enabled)
    new = found & (last != slot)
    return w.write_if(new, "lists", slot, w.handing_place(w.handing)).replace(handing=w.handing + new)


def withdraw(w: Any, slot: Scalar, enabled: Scalar) -> Any:
    """Nothing is handed over of a request that gives its blocks back; in this step it can only be listed last."""
    w, last = _last(w, enabled)
    return w.replace(handing=w.handing - (enabled & (last == slot)))


def _last(w: Any, enabled: Scalar) -> tuple[Any, Scalar]:
    some = enabled & (w.handing > 0)
    w, (last,) = w.peek(some, "lists", w.handing_place(jnp.maximum(w.handing - 1, 0)))
    return w, jnp.where(some, last, -1)


def cut_hit(w: Any, view: Any, slot: Scalar, tokens: Scalar, enabled: Scalar) -> Any:
    """The hit of a request that was just looked up ends after so many tokens, whole blocks: no state stands there.

    The twin of `reference.dialects.vllm.connector.truncate`.
    """

    def of_group(v: Any, carried: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
        group = carried[0]
        last = divide(tokens, view.group(group, GroupField.BLOCK)) - 1
        return v.write_if(is_state(view, group) & (last >= 0), "rows", 0, v.row(slot, group) + last), (group + 1,)

    groups = jnp.where(enabled, view.num_groups, 0)
    w, _ = loop(lambda c: c[0] < groups, of_group, w, (0,), writes=("rows",))
    return w.set(jnp.where(enabled, slot, w.spare_slot), Request.HIT, tokens)


class State(NamedTuple):
    """A state that is to be handed over: of which request, and where.

    Attributes:
      turn: its place in the list of requests, and its group.
      slot: its request's slot.
      column: its place in the row.
      block: its block.
      key: its prefix key.
      there: whether there is one; else all have been handed over.
    """

    turn: Scalar
    slot: Scalar
    column: Scalar
    block: Scalar
    key: Scalar
    there: Scalar


def find(w: Any, view: Any, turn: Scalar, enabled: Scalar) -> tuple[Any, State]:
    """The next state that is to be handed over: of the requests in their order, group by group."""
    groups, width = view.num_groups, w.sizes.buckets.groups

    def of_turn(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        turn, group = carried[0], remainder(carried[0], groups)
        v, (slot,) = v.peek(turn >= 0, "lists", v.handing_place(divide(turn, groups)))
        v, (done, null) = v.peek_row(is_state(view, group), slot, group, Row.CACHED, Row.FIRST)
        place = v.told_word(slot, group, ToldRow.HANDED_OVER)
        v, (before,) = v.peek(turn >= 0, "tables", place)
        scale, own = view.group(group, GroupField.SCALE), view.group(group, GroupField.COLUMN)
        row, chain = v.row(slot, group), v.chain(slot) + (scale - 1)

        def look(u: Any, at: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
            column = at[0]
            block, key = u.read("rows", row + column), u.read("chains", chain + column * scale)
            # Most columns are null: states stand where chunks of tokens ended. One that is not retained has no key.
            kept = key_table.entry_of(u.read("keys", u.key(block))) == key * width + own
            return u, (column + 1, block, key, (block != 0) & kept)

        start = (jnp.maximum(before, null), 0, 0, False)
        v, (column, block, key, there) = loop(
            lambda c: (c[0] < done) & ~c[3], look, v, start, reads=("rows", "chains", "keys")
        )
        v = v.write_if(is_state(view, group), "tables", jnp.where(there, column, done), place)
        return v, (turn + ~there, slot, column - 1, block, key, there)

    end = jnp.where(enabled, w.handing * groups, 0)
    start = (turn, w.spare_slot, 0, 0, 0, False)
    w, found = loop(lambda c: (c[0] < end) & ~c[5], of_turn, w, start, writes=WRITES[:-1])
    state = State(*found)
    return w.replace(handing=jnp.where(state.there, w.handing, 0)), state._replace(
        turn=jnp.where(state.there, state.turn, 0)
    )


def offer(w: Any, view: Any, of: Prefix, state: State, limit: Scalar, enabled: Scalar) -> tuple[Any, Scalar]:
    """A request offers a state, up to `limit` tokens, and counts it as used if the tier has it.

    Returns how many chunks are lacked, none or one.
    """
    width, group = w.sizes.buckets.groups, remainder(state.turn, view.num_groups)
    size, scale = view.group(group, GroupField.BLOCK), view.group(group, GroupField.SCALE)
    enabled = enabled & ((state.column + 1) * size <= limit)
    unit, entry = (state.column + 1) * scale - 1, state.key * width + group
    w = w.replace(stamp=w.stamp + enabled)
    w, (value, marked) = w.peek_each(enabled, ("where", entry), ("marks", of.start + unit))
    lacked = enabled & (value <= 0)
    w = w.write_if(enabled, "offers", entry, w.offer(0))
    if w.room.tracked:
        w = tracker.count(w, view, enabled.astype(jnp.int32))
        w, (row,) = w.peek(enabled, "tracked", entry)
        w, (times,) = w.peek(row > 0, "tracker", w.tracker_word(row - 1, TrackerWord.OFFERS))
        worth = times >= view.tier.number(TierNumber.THRESHOLD)
        lacked = lacked & worth
    w, _, _ = pool.use(w, enabled & (value > 0), value - 1, of, unit, group, jnp.int32(0))
    w = w.write_if(lacked, "offers", state.block, w.offer(0) + 1)
    count = lacked.astype(jnp.int32)
    if w.room.arc:
        w = w.write_if(lacked, "offers", of.start + unit, w.offer(0) + 2)
        w = arc.miss(w, view.tier, count)
    else:
        w = w.write_if(lacked, "marks", marked | jnp.left_shift(jnp.int32(1), group), of.start + unit)
        w = lru.enlist(w, enabled, of, lacked)
    return w, count
