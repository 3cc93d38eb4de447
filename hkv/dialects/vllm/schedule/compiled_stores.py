"""Stores of a compiled schedule with a second tier: what a step stores of requests that run, and of those that ended.

Once every request has its blocks, the cache hands its states over, those that run offer what they compute in the step,
and then those that ended, in the order of their names. Each offer that finds room is one job. The twin of
`reference.dialects.vllm.offload.connector.Connector.step`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm.rules.offload import lru, offers, pool, states
from hkv.dialects.vllm.rules.offload.parameters import TierNumber
from hkv.dialects.vllm.rules.offload.pool import Prefix
from hkv.dialects.vllm.rules.offload.words import Job, SlotWord
from hkv.dialects.vllm.rules.parameters import CacheField
from hkv.dialects.vllm.schedule.compiled_links import transferred
from hkv.dialects.vllm.schedule.compiled_reasons import DiagnosedTrace
from hkv.replay.schedule_state import Arriving, Machine, Mode, Running
from hkv.state.loops import Scalar, divide, loop, read

Pair = tuple[Any, Machine]


def order(w: Any, view: Any, trace: DiagnosedTrace, m: Machine) -> Pair:
    """Running requests offer what they compute in this step, then those offer their last that ended since."""
    enabled = m.at(Mode.RECORD) | m.at(Mode.REST)
    active = jnp.where(m.at(Mode.RECORD), m.active, 0)

    def one(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        at, vacant, name, ending, _, turn, _ = carried
        v, state = _next_state(v, view, turn)
        v, at, slot, runs = _next_running(v, at, jnp.where(state.there, at, active))
        busy: Any = runs | state.there
        # First all of them offer, then their uses are made.
        v, name, request, last, place = _next_ended(v, view, jnp.where(ending, -1, name), ~busy)
        there = name < LAST_NAME
        ends, gone = ~busy & there & ~ending, ~busy & there & ending
        slot = jnp.where(runs, slot, jnp.where(ends, last, jnp.where(state.there, state.slot, v.spare_slot)))
        offering = slot != v.spare_slot
        words = (Running.REQUEST, Running.COMPUTED, Running.SCHEDULED, Running.TOKENS, Running.SHARED_BOUNDARY)
        v, running = v.peek(offering, "running_words", *(v.running_word(slot, each) for each in words))
        request = jnp.where(busy, running[0], request)
        v = _offer(v, view, trace, m.step, slot, request, running, ends, offering, state)
        v = pool.end(v, view, view.prefix_of(request), gone)
        v = _forget(v, gone, place)
        left = gone & (last != v.spare_slot)
        v = v.write("vacant", last, jnp.where(left, vacant, v.spare_slot))
        ending = ending | (~busy & ~there)
        at, name = jnp.where(runs, at + 1, at), jnp.where(busy, -1, name)
        return v, (at, vacant + left, name, ending, v.ended, state.turn, v.handing)

    # The scan comes first: most steps offer nothing.
    w, first, _, due = _next_running(w, jnp.where(enabled, 0, active), active)
    ended, handing = (jnp.where(enabled, count, 0) for count in (w.ended, w.handing))
    start = (jnp.where(due, first, active), m.vacant, -1, False, ended, 0, handing)
    writes = (*ORDER_WRITES, *states.WRITES) if w.room.states else ORDER_WRITES
    w, (_, vacant, *_) = loop(lambda c: (c[0] < active) | (c[4] > 0) | (c[6] > 0), one, w, start, writes=writes)
    return w, m._replace(vacant=vacant)


def _offer(
    w: Any, view: Any, trace: DiagnosedTrace, step: Scalar, slot: Scalar, request: Scalar, running: Any, ends: Scalar,
    enabled: Scalar, state: states.State,
) -> Any:  # fmt: skip
    """A request offers what it will have computed by the end of the step, or had in the end; or a state alone."""
    _, computed, new, tokens, shared_boundary = running
    prompt = trace.request(request, Arriving.PROMPT)
    whole = prompt + trace.request(request, Arriving.OUTPUT)
    named = jnp.where(ends, tokens + (tokens < whole), tokens)
    stop = jnp.minimum(jnp.where(ends, jnp.maximum(prompt, named - 1), computed + new), named)
    limit = jnp.where(view.tier.number(TierNumber.PROMPT_ONLY) != 0, prompt, offers.ENDLESS)
    about = prompt, shared_boundary, ends
    of = view.prefix_of(request)
    return _store(w, view, step, slot, of, jnp.minimum(stop, limit), named, about, limit, enabled, state)


LAST_NAME = 2**31 - 1
"""Place of a name after all others."""


ORDER_WRITES = (
    *("order", "running_words", "tables", "lists", "vacant", "rows", "told", "chains", "ended", "stamp", "next_job"),
    *pool.STORE_WRITES,
    *("store_step", "store_high", "store_low", "overflow"),
)


def _next_state(w: Any, view: Any, turn: Scalar) -> tuple[Any, states.State]:
    """The next state that the cache hands over, before all chunks."""
    if w.room.states:
        return states.find(w, view, turn, w.handing > 0)
    return w, states.State(turn, w.spare_slot, turn, turn, turn, jnp.bool_(False))


def _next_running(w: Any, at: Scalar, active: Scalar) -> tuple[Any, Scalar, Scalar, Scalar]:
    """The next running request that has something to offer: its place, its slot, and whether there is one."""

    def look(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        place, _, _ = carried
        slot = v.read("order", place)
        computed, new = v.get_running(slot, Running.COMPUTED, Running.SCHEDULED)
        due = (new > 0) & (computed + new >= v.read("tables", v.slot_word(slot, SlotWord.OFFERS)))
        return v, (place + ~due, slot, due)

    start = (at, w.spare_slot, False)
    w, (at, slot, due) = loop(
        lambda c: (c[0] < active) & ~c[2], look, w, start, reads=("order", "running_words", "tables")
    )
    return w, at, jnp.where(due, slot, w.spare_slot), due


def _next_ended(w: Any, view: Any, after: Scalar, enabled: Scalar) -> tuple[Any, Scalar, Scalar, Scalar, Scalar]:
    """The ended request whose name comes next: the name's place, `LAST_NAME` for none; the request, its slot, and its
    place in the list."""

    def look(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        place, least, request, slot, found = carried
        mine = v.read("lists", v.ended_place(place))
        theirs = v.read("lists", v.ended_place(place) + 1)
        name = read(view.tier.names, mine)
        first = (name > after) & (name < least)
        chosen = (jnp.where(first, new, old) for new, old in ((name, least), (mine, request), (theirs, slot)))
        return v, (place + 1, *chosen, jnp.where(first, place, found))

    count = jnp.where(enabled, w.ended, 0)
    start = (0, LAST_NAME, w.room.users - 1, w.spare_slot, 0)
    w, (_, name, request, slot, place) = loop(lambda c: c[0] < count, look, w, start, reads=("lists",))
    return w, name, request, slot, place


def _forget(w: Any, enabled: Scalar, place: Scalar) -> Any:
    """Takes an ended request off the list; the last one takes its place."""
    last = w.ended_place(jnp.maximum(w.ended - 1, 0))
    w, values = w.peek(enabled, "lists", last, last + 1)
    for word, value in enumerate(values):
        w = w.write_if(enabled, "lists", value, w.ended_place(place) + word)
    return w.replace(ended=w.ended - enabled)


def end(w: Any, enabled: Scalar, request: Scalar, slot: Scalar) -> Any:
    """A request has ended, which the next step takes into account."""
    w = w.write_if(enabled, "lists", request, w.ended_place(w.ended))
    w = w.write_if(enabled, "lists", slot, w.ended_place(w.ended) + 1)
    return w.replace(ended=w.ended + enabled)


def _store(
    w: Any, view: Any, step: Scalar, slot: Scalar, of: Prefix, tokens: Scalar, named: Scalar, about: Any, limit: Scalar,
    enabled: Scalar, state: states.State,
) -> Any:  # fmt: skip
    """A request offers chunks of its first `tokens` tokens, or a state; those that the tier lacks and has room for are
    stored."""
    tier, finished = view.tier, about[2]
    enabled = enabled & ~state.there
    units = jnp.minimum(of.units, divide(tokens, view.whole(CacheField.HASH_BLOCK)))
    of = of._replace(units=jnp.where(state.there, of.units, units))
    w, count, idle = offers.collect(w, view, slot, of, tokens, named, about, enabled)
    if w.room.states:
        w, one = states.offer(w, view, of, state, limit, state.there)
        count = jnp.where(state.there, one, count)
    lacking, room = pool.has_room(w, tier, count, idle)
    refused = (count > 0) & ~room
    w = w.replace(refused=w.refused + refused)
    if not w.room.arc:  # What found no room is marked as the request's own, and may be stored by others.
        w = lru.part(w, refused, w.user(of.request), of.units)
    taken = jnp.where(room, count, 0)
    w = pool.evict(w, view, tier, view.prefix_of, jnp.where(taken > 0, lacking, 0))
    w, flushes = pool.insert(w, tier, of, taken, finished, step)
    stores = taken > 0
    w, end = transferred(w, tier, "store", step + 1, taken, stores)
    flushes = stores & flushes
    end = jnp.where(flushes, jnp.minimum(end, step), end)
    w = w.write_if(stores, "jobs", end, w.job(w.next_job, Job.END))
    w = w.replace(next_job=w.next_job + stores, flushed=w.flushed + flushes, urgent=w.urgent + flushes)
    w = w.replace(overflow=w.overflow | (w.next_job - w.first_job >= w.room.jobs - 1))
    return offers.passed(w, view, slot, tokens, limit, ~refused, enabled)


def flush_jobs(w: Any, request: Scalar, step: Scalar, enabled: Scalar) -> Any:
    """A request gives its blocks back before it has finished: all its stores are flushed."""

    def one(v: Any, job: Scalar, mine: Scalar) -> Any:
        return pool.flush(v, job & (v.room.jobs - 1), step, mine)

    return pool.each_job(w, request, enabled, one, ("flushed", "urgent"))
