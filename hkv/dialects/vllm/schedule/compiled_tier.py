"""The compiled schedule with a second tier: vLLM 0.33's offloading in the same loop as its cache.

A trip is as `compiled` has it, with a few more things in it. Transfers that are done are reported as a step begins.
Requests whose loads go on hold slots, are listed apart, and come before the queue. What a lookup on the GPU finds
is looked up further in the tier, and a request of which a chunk is on its way is put aside. Once every request has its
blocks, those that run offer their chunks, then those that ended, in the order of their names. The twin of
`hkv.dialects.vllm.schedule.tiered`; the rules are in `hkv.dialects.vllm.rules.offload`.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm.rules import admit, transitions
from hkv.dialects.vllm.rules.offload import lookup, offers, pool, states
from hkv.dialects.vllm.rules.offload.arrays import (
    LOADED,
    LOADS,
    SETTLED,
    WAITED,
    Job,
    SlotWord,
    TierNumber,
    User,
)
from hkv.dialects.vllm.rules.offload.pool import Prefix
from hkv.dialects.vllm.rules.operations import Argument, Code, Flag
from hkv.dialects.vllm.rules.parameters import CacheField
from hkv.dialects.vllm.rules.rows import Demand
from hkv.dialects.vllm.rules.transitions import EMPTY, Answer, Op
from hkv.dialects.vllm.schedule import compiled
from hkv.dialects.vllm.schedule.compiled_links import transferred
from hkv.dialects.vllm.schedule.compiled_reasons import DiagnosedTrace
from hkv.replay import schedule_loop
from hkv.replay.schedule_loop import Current
from hkv.replay.schedule_state import Arriving, Ending, Machine, Mode, Number, Running
from hkv.state.loops import Scalar, divide, guarded, loop, read, remainder
from hkv.state.state import Request
from hkv.state.status import Status

Pair = tuple[Any, Machine]


def trip(w: Any, view: Any, trace: DiagnosedTrace, m: Machine) -> Pair:
    """The next operation of the cache, and what follows from its answer, in both tiers."""
    # Requests that ended are told of with the next step: one of its own, unless a request has come for it.
    comes = (trace.number(Number.CLOSED_LOOP) > 0) | (trace.request(m.arrived, Arriving.STEP) <= m.step)
    comes = comes & (m.arrived < trace.number(Number.REQUESTS))
    resting = m.at(Mode.BEGIN) & (m.active == 0) & (m.waiting == 0) & (w.ended > 0) & ~comes
    reports = m.at(Mode.BEGIN) & ((w.first_job < w.next_job) | (w.loading > 0))
    w, _ = guarded(reports, lambda v, _: (_deliver(v, view, trace, m, resting), ()), w, ())
    m = m.when(resting, mode=int(Mode.REST))
    w, m, busy = schedule_loop.begin(w, trace, m)
    w = w.replace(steps=w.steps + busy)
    w, m = schedule_loop.grow(w, trace, m, whole=False)
    w, m = guarded(m.at(Mode.ADMIT), lambda v, n: _choose(v, trace, n), w, m)
    w, m = guarded(m.at(Mode.RECORD) & ((w.held > 0) | (w.aside > 0)), _recall, w, m)
    if w.sizes.copies:
        w = offers.tell_copies(w, m.step, m.at(Mode.RECORD))
        w = compiled.made_copies(w, view, m.at(Mode.RECORD))
    w, m = guarded(m.at(Mode.RECORD) | m.at(Mode.REST), lambda v, n: _order(v, view, trace, n), w, m)
    m = m.when(m.at(Mode.REST), mode=int(Mode.BEGIN))
    w, m = schedule_loop.record(w, m, view.whole(CacheField.NUM_BLOCKS) - 1 - w.free)
    w, m = schedule_loop.compute(w, trace, m)
    w, current, op = _operation(w, view, trace, m)
    w, answer = compiled.perform(w, view, trace, m, current, op, settles=True)
    return _follow(w, view, trace, m, current, answer)


def prefix(view: Any, trace: DiagnosedTrace, request: Scalar) -> Prefix:
    """A request's prefix keys among the trace's."""
    tokens = trace.request(request, Arriving.PROMPT) + trace.request(request, Arriving.OUTPUT)
    units = divide(tokens, view.whole(CacheField.HASH_BLOCK))
    return Prefix(request, trace.request(request, Arriving.KEY_START), units)


# Before a step's blocks are handed out.


def _deliver(w: Any, view: Any, trace: DiagnosedTrace, m: Machine, resting: Scalar) -> Any:
    """Reports of transfers that were done before the step that begins, or the one that the clock goes on to."""
    idle = (m.active == 0) & (m.waiting == 0) & ~resting & (m.arrived < trace.number(Number.REQUESTS))
    idle = idle & (trace.number(Number.CLOSED_LOOP) == 0)
    begins = jnp.where(idle, jnp.maximum(m.step, trace.request(m.arrived, Arriving.STEP)), m.step)
    done = jnp.where(m.at(Mode.BEGIN), begins - 1, -1)
    w = pool.deliver(w, done)

    def request_of(v: Any, slot: Scalar, enabled: Scalar) -> tuple[Any, Scalar]:
        v, (request,) = v.peek(enabled, "running_words", v.running_word(slot, Running.REQUEST))
        return v, request

    return lookup.end_loads(w, view, done, functools.partial(prefix, view, trace), request_of)


def _choose(w: Any, trace: DiagnosedTrace, m: Machine) -> Pair:
    """Finds the request to be admitted next: one whose load has ended, else the head of the queue."""
    mine = m.at(Mode.ADMIT)
    can = mine & (m.budget > 0) & (m.active < trace.number(Number.MAX_RUNNING))
    spare = w.lists.shape[0] - 1

    def visit(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        visited, kept, place, slot, _ = carried
        v = v.write("lists", slot, place)
        slot = v.read("lists", visited)
        waits = v.read("tables", v.slot_word(slot, SlotWord.STATE)) == LOADS
        return v, (visited + waits, kept + waits, jnp.where(waits, kept, spare), slot, ~waits)

    held = jnp.where(can, w.held, w.visited)
    start = (w.visited, w.kept, spare, 0, False)
    w, (visited, kept, place, slot, found) = loop(
        lambda c: (c[0] < held) & ~c[4], visit, w, start, reads=("tables",), writes=("lists",)
    )
    w = w.write("lists", slot, place).replace(visited=visited, kept=kept)
    slot = jnp.where(found, slot, w.spare_slot)
    columns = (Running.REQUEST, Running.COMPUTED, Running.TOKENS, Running.SHARED_BOUNDARY)
    places = [("running_words", w.running_word(slot, column)) for column in columns]
    w, (request, computed, tokens, shared_boundary, state) = w.peek_each(
        found, *places, ("tables", w.slot_word(slot, SlotWord.STATE))
    )
    new = schedule_loop.chunk(trace, request, tokens, shared_boundary, computed, m.budget)
    mode = jnp.where(new > 0, int(Mode.HELD), int(Mode.RECORD))
    mode = jnp.where(state == LOADED, int(Mode.SETTLE), mode)
    queue = m.waiting - (w.kept + w.held - w.visited) - w.aside
    waiting = m._replace(waiting=queue)
    w, chosen = schedule_loop.choose(w, trace, waiting.when(found, mode=int(Mode.BEGIN)), Mode.FIND)
    m = chosen._replace(waiting=m.waiting)
    return w, m.when(found, mode=mode, asked=slot, new=new)


def _recall(w: Any, m: Machine) -> Pair:
    """No more requests are admitted in this step: those put aside are in front of the queue again, loads in order."""
    mine = m.at(Mode.RECORD)
    spare = w.lists.shape[0] - 1

    def move(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        at, place, slot = carried
        v = v.write("lists", slot, place)
        return v, (at + 1, w.kept + at - w.visited, v.read("lists", at))

    start = jnp.where(mine & (w.kept < w.visited), w.visited, w.held)
    w, (_, place, slot) = loop(lambda c: c[0] < w.held, move, w, (start, spare, 0), writes=("lists",))
    w = w.write("lists", slot, place)
    held = w.kept + w.held - w.visited
    w = w.replace(
        held=jnp.where(mine, held, w.held), visited=jnp.where(mine, 0, w.visited), kept=jnp.where(mine, 0, w.kept)
    )
    top = w.spare_request

    def push(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        left, stacked, place, request = carried
        v = v.write("stack", request, place)
        return v, (left - 1, stacked + 1, stacked, v.read("stack", top - left))

    count = jnp.where(mine, w.aside, 0)
    w, (_, stacked, place, request) = loop(lambda c: c[0] > 0, push, w, (count, m.stacked, top, 0), writes=("stack",))
    w = w.write("stack", request, place).replace(aside=w.aside - count)
    return w, m._replace(stacked=stacked)


# What a step orders.


def _order(w: Any, view: Any, trace: DiagnosedTrace, m: Machine) -> Pair:
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
        v = pool.end(v, view, prefix(view, trace, request), gone)
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
    of = prefix(view, trace, request)
    return _store(w, view, step, slot, of, jnp.minimum(stop, limit), named, about, limit, enabled, state)


BLOCKED = int(Status.NO_ROOM)
"""Status of a replay that ends since requests wait for each other's blocks; other refusals for room do not end one."""

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


def _end(w: Any, enabled: Scalar, request: Scalar, slot: Scalar) -> Any:
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
    w = pool.note_refused(w, of, jnp.where(refused, count, 0)).replace(refused=w.refused + refused)
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


# The operation.


def _operation(w: Any, view: Any, trace: DiagnosedTrace, m: Machine) -> tuple[Any, Current, Op]:
    """The operation that the mode calls for, and what it is about."""
    codes = {
        Mode.ASK: Code.ALLOCATE,
        Mode.PREEMPT: Code.FREE,
        Mode.REQUEST: Code.REQUEST,
        Mode.FIND: Code.LOOKUP,
        Mode.TAKE: Code.ALLOCATE,
        Mode.FINISH: Code.FREE,
        Mode.SETTLE: Code.COMMIT,
        Mode.HELD: Code.ALLOCATE,
        Mode.GIVE_UP: Code.FREE,
    }
    code = jnp.int32(int(Code.END))
    for mode, each in codes.items():
        code = jnp.where(m.at(mode), int(each), code)
    # What a request cannot read any more it gives back before the rest: the queue's order depends on it.
    retires = m.at(Mode.FINISH) & (w.retired == 0)
    code = jnp.where(retires, int(Code.RETIRE), code)
    w, current = schedule_loop.at_hand(w, m)
    w, (scheduled,) = w.peek(retires, "running_words", w.running_word(current.slot, Running.SCHEDULED))
    slot, request = current.slot, current.request
    taking: Any = m.at(Mode.TAKE)
    held: Any = m.at(Mode.HELD)
    loads: Any = taking & (w.external > 0)
    w, (reserved,) = guarded(loads, lambda v, _: _reserved(v, view, m, loads), w, (jnp.int32(0),))
    w = w.set(jnp.where(m.at(Mode.REQUEST), slot, w.spare_slot), Request.LIVE, EMPTY)
    grown = jnp.where(current.asking | held, slot, w.spare_slot)
    w = w.set(grown, Request.COMPUTED, current.computed).set(grown, Request.TOKENS, current.tokens)
    tokens = jnp.where(m.at(Mode.REQUEST), trace.request(request, Arriving.PROMPT), 0)
    tokens = jnp.where(m.at(Mode.SETTLE), current.computed, jnp.where(retires, current.computed + scheduled, tokens))
    admits = int(Flag.STATUS | Flag.WAITING | Flag.OTHERS)
    admits = jnp.where(m.active > 0, admits | int(Flag.SCHEDULED), admits)
    if w.sizes.copies:
        # A hit that ended inside a block was cut: its states are those of the row, not of its keys.
        admits = jnp.where(loads, admits | int(Flag.ROWS), admits)
    asks: Any = taking | held
    arguments = {
        Argument.CODE: code,
        Argument.SLOT: slot,
        Argument.TOKENS: tokens,
        Argument.KEYS: prefix(view, trace, request).units,
        Argument.KEY_START: trace.request(request, Arriving.KEY_START),
        Argument.NEW: m.new,
        Argument.HIT: jnp.where(taking, w.local, 0),
        Argument.LOOKAHEAD: jnp.where(loads, 0, trace.number(Number.LOOKAHEAD)),
        Argument.EXTERNAL: jnp.where(loads, w.external, 0),
        Argument.DELAY: loads.astype(jnp.int32),
        Argument.MUST_FIT: asks.astype(jnp.int32),
        Argument.RESERVED: reserved,
        Argument.SHARED_PREFIX: jnp.where(asks, current.shared_boundary, -1),
        Argument.FLAGS: jnp.where(asks, admits, jnp.where(m.at(Mode.SETTLE), int(Flag.LIVE), 0)),
    }
    row = tuple(arguments.get(argument, jnp.int32(0)) for argument in Argument)
    w, op = transitions.fetch(w, jnp.stack(row), jnp.int32(0), code)
    return w, current, op


def _reserved(w: Any, view: Any, m: Machine, enabled: Scalar) -> tuple[Any, tuple[Scalar]]:
    """Blocks that requests on the way to their last token still need, loads among them."""
    count = jnp.where(enabled, m.active + w.kept, 0)
    length = view.whole(CacheField.MAX_MODEL_LEN)

    def one(v: Any, carried: tuple[Scalar, Scalar]) -> tuple[Any, tuple[Scalar, Scalar]]:
        at, total = carried
        runs = at < m.active
        v, (running,) = v.peek(runs, "order", at)
        v, (held,) = v.peek(~runs, "lists", at - m.active)
        slot = jnp.where(runs, running, held)
        words = (Running.COMPUTED, Running.TOKENS, Running.SCHEDULED, Running.CAME)
        v, (computed, tokens, scheduled, came) = v.peek(
            at >= 0, "running_words", *(v.running_word(slot, word) for word in words)
        )
        # Admitted in this very step, it has computed nothing yet.
        prefills = ~runs | (jnp.where(computed > 0, computed, scheduled) < came)
        whole = jnp.minimum(tokens, length)
        zero, no = jnp.int32(0), jnp.bool_(True)
        v, needed = admit.estimate(v, view, Demand(slot, whole, whole, computed, zero, zero, zero, no), prefills)
        return v, (at + 1, total + needed)

    writes = ("order", "lists", "running_words", *admit.WRITES)
    w, (_, total) = loop(lambda c: c[0] < count, one, w, (0, 0), writes=writes)
    return w, (total,)


# What follows.


def _follow(w: Any, view: Any, trace: DiagnosedTrace, m: Machine, current: Current, answer: Answer) -> Pair:
    """Transition of the schedule, and of the tier, by the cache's answer.

    Most trips give a running request blocks: what else may happen is guarded.
    """
    ok, step, slot = answer.ok, m.step, current.slot
    refused = ~ok & schedule_loop.among(answer.status, compiled.REFUSALS)
    m = schedule_loop.fail(m, ok, answer.status, refused)
    retiring = m.at(Mode.FINISH) & (w.retired == 0)
    finished = m.at(Mode.FINISH) & (w.retired != 0) & ok
    preempted, given_up = (m.at(mode) & ok for mode in (Mode.PREEMPT, Mode.GIVE_UP))
    alone = preempted & (m.active == 1) & (w.held == 0)
    took = m.at(Mode.TAKE) & ok
    waiting = functools.reduce(operator.or_, map(m.at, (Mode.TAKE, Mode.HELD, Mode.SETTLE, Mode.GIVE_UP)))
    finds, before = m.at(Mode.FIND) & ok, m
    w = w.replace(retired=jnp.where(m.at(Mode.FINISH), retiring & ok, w.retired != 0).astype(jnp.int32))

    def leave(v: Any, _: tuple[()]) -> tuple[Any, tuple[()]]:
        v = pool.fence(v, current.request, finished | alone | given_up)
        v = _flush_jobs(v, current.request, step, preempted | given_up)
        if v.room.states:
            v = states.withdraw(v, slot, given_up)
        return _end(v, finished | alone | given_up, current.request, jnp.where(finished, slot, v.spare_slot)), ()

    w, _ = guarded(finished | preempted | given_up, leave, w, ())
    w, m, grown, left = schedule_loop.after_running(w, m, current, ok, refused, finishing=finished, others=w.held > 0)
    w, m, accepted = schedule_loop.after_request(w, m, current, ok)
    w = w.set(accepted, Request.TOKENS, current.waiting_tokens)
    held = before.at(Mode.HELD) & ok
    loads = took & (w.external > 0)
    w = offers.tell(w, view, offers.Telling(slot, step, took | held, took, ~loads), grown | took | held)
    if w.room.states:
        registers = grown | took | held | (before.at(Mode.SETTLE) & ok)
        w = states.note(w, view, slot, w.local, loads, took, registers)
    w, m = guarded(finds, lambda v, n: _found(v, view, trace, n, current, answer), w, m)
    w, m = guarded(waiting, lambda v, n: _admitted(v, view, trace, before, n, current, ok, refused), w, m, ("stack",))
    w = w.set(jnp.where(left, slot, w.spare_slot), Request.LIVE, EMPTY)
    w = compiled.note(w, view, trace, slot, grown | (took & ~loads) | held)
    m = m.when((w.overflow != 0) | (m.vacant < 0), mode=int(Mode.FAILED), status=int(Status.NO_SUCH_SLOT))
    return w.replace(overflow=w.overflow | (m.vacant < 0)), m


def _admitted(
    w: Any, view: Any, trace: DiagnosedTrace, before: Machine, m: Machine, current: Current, ok: Scalar, refused: Scalar
) -> Pair:
    """Transition of a request that was not running: blocks that it was given, or refused."""
    slot, step = current.slot, before.step
    given_up, settled = before.at(Mode.GIVE_UP) & ok, before.at(Mode.SETTLE) & ok
    took, held = before.at(Mode.TAKE) & ok, before.at(Mode.HELD) & ok
    denied = (before.at(Mode.TAKE) | before.at(Mode.HELD)) & refused
    loads = took & (w.external > 0)
    runs = took & ~loads
    others = (m.active > 0) | (w.kept > 0) | (before.at(Mode.HELD) & (w.held - w.visited > 1))
    never = denied & ~others
    waits = denied & others
    # Nothing runs that could give blocks back, and no load that goes on stands before this request.
    blocked = waits & before.at(Mode.HELD) & (m.active == 0) & (w.kept == 0)
    hopeless = before.at(Mode.TAKE) & never
    m = m.when(never & before.at(Mode.HELD), mode=int(Mode.GIVE_UP))
    w, m = schedule_loop.after_taking(w, m, current, runs, hopeless, waits)
    w = _end(w, hopeless, m.head, w.spare_slot)
    w, m = _hold(w, m, current, loads)
    w, m = _go_on(w, m, current, held)
    w, m = _settle(w, m, current, settled)
    w, m = _leave(w, m, current, given_up)
    w = w.write_if(took, "running_words", current.tokens, w.running_word(slot, Running.CAME))
    w = w.write_if(runs | held, "tables", 0, w.slot_word(slot, SlotWord.OFFERS))
    w = _begin_load(w, view, trace, step, current, loads)
    asked = trace.request(current.request, Arriving.ASKED)
    start = w.local + w.external
    w = lookup.note_missing(w, view, slot, start, asked, took & (current.preemptions == 0), current.tokens)
    w = w.set(jnp.where(hopeless | given_up, slot, w.spare_slot), Request.LIVE, EMPTY)
    return w, m.when(blocked, mode=int(Mode.FAILED), status=BLOCKED)


def _flush_jobs(w: Any, request: Scalar, step: Scalar, enabled: Scalar) -> Any:
    """A request gives its blocks back before it has finished: all its stores are flushed."""

    def one(v: Any, job: Scalar, mine: Scalar) -> Any:
        return pool.flush(v, job & (v.room.jobs - 1), step, mine)

    return pool.each_job(w, request, enabled, one, ("flushed", "urgent"))


def _found(w: Any, view: Any, trace: DiagnosedTrace, m: Machine, current: Current, answer: Answer) -> Pair:
    """The head of the queue was looked up on the GPU; now it is in the tier."""
    found, local = m.at(Mode.FIND) & answer.ok, answer.value
    w = w.write_if(found, "running_words", answer.shared_prefix, w.running_word(m.candidate, Running.SHARED_BOUNDARY))
    user = w.user(current.request)
    w, (jobs, flags) = w.peek(found, "nodes", w.node(user, User.JOBS), w.node(user, User.FLAGS))
    asks = found & (jobs == 0)
    # The tier is asked for whole blocks; what the GPU has of the next one counts where that is more.
    tail = remainder(local, view.whole(CacheField.SCHEDULER_BLOCK)) if w.sizes.copies else jnp.int32(0)
    w, external, later = lookup.external_hit(w, view, m.candidate, current.tokens, local - tail, asks)
    if w.sizes.copies:
        cut = asks & (tail > 0) & (external > tail)
        w = states.cut_hit(w, view, m.candidate, local - tail, cut)
        local, external = jnp.where(cut, local - tail, local), jnp.where(external > tail, external, 0)
    aside = found & (later | (jobs > 0))
    w = w.write_if(aside, "nodes", flags | WAITED, w.node(user, User.FLAGS))
    w = w.replace(waits=w.waits + (aside & (flags & WAITED == 0)), wait_steps=w.wait_steps + aside)
    place = jnp.where(aside, w.spare_request - 1 - w.aside, w.spare_request)
    w = w.write("stack", m.head, place).replace(aside=w.aside + aside)
    again = m.stacked > 0
    taken, stacked = jnp.where(again, m.taken, m.head + 1), jnp.where(again, m.stacked - 1, 0)
    m = m.when(aside, mode=int(Mode.ADMIT), taken=taken, stacked=stacked)
    goes = found & ~aside
    w = w.replace(local=jnp.where(goes, local, w.local), external=jnp.where(goes, external, w.external))
    start = local + external
    new = schedule_loop.chunk(trace, m.head, current.tokens, answer.shared_prefix, start, m.budget)
    new = jnp.where(external > 0, 0, new)
    mode = jnp.where((external > 0) | (new > 0), int(Mode.TAKE), int(Mode.RECORD))
    return w, m.when(goes, mode=mode, new=new, hit=start)


def _hold(w: Any, m: Machine, current: Current, enabled: Scalar) -> Pair:
    """The candidate waits with blocks for what is loaded into them; another slot takes the next candidate."""
    slot, spare = m.candidate, w.spare_request
    w = w.write_if(enabled, "lists", slot, w.kept)
    w = w.write_if(enabled, "running_words", m.hit, w.running_word(slot, Running.COMPUTED))
    w = w.set(jnp.where(enabled, slot, w.spare_slot), Request.COMPUTED, m.hit)
    first = enabled & (current.preemptions == 0)
    w = w.set_result(jnp.where(first, m.head, spare), hit=m.hit, admitted=m.step)
    w = w.set_result(
        jnp.where(enabled & ~first, m.head, spare),
        recomputed=current.recomputed + current.tokens,
        recovered=current.recovered + m.hit,
    )
    w = w.write_if(first, "nodes", w.external, w.node(w.user(current.request), User.LOADED))
    w, (next_slot,) = w.peek(enabled, "vacant", jnp.maximum(m.vacant - 1, 0))
    again = m.stacked > 0
    m = m.when(first, prompt_tokens=m.prompt_tokens + current.tokens, hit_tokens=m.hit_tokens + m.hit)
    w = w.replace(held=w.held + enabled, visited=w.visited + enabled, kept=w.kept + enabled)
    return w, m.when(
        enabled,
        mode=int(Mode.ADMIT),
        candidate_request=-1,
        taken=jnp.where(again, m.taken, m.head + 1),
        stacked=jnp.where(again, m.stacked - 1, 0),
        candidate=next_slot,
        vacant=m.vacant - 1,
    )


def _go_on(w: Any, m: Machine, current: Current, enabled: Scalar) -> Pair:
    """A request runs whose prefix was loaded."""
    slot = current.slot
    w = w.write("order", slot, jnp.where(enabled, m.active, w.spare_slot))
    w = w.write_if(enabled, "running_words", m.new, w.running_word(slot, Running.SCHEDULED))
    w, (began,) = w.peek(enabled, "tables", w.slot_word(slot, SlotWord.BEGAN))
    w = w.write_if(enabled, "tables", 0, w.slot_word(slot, SlotWord.STATE))
    w = w.replace(load_steps=w.load_steps + jnp.where(enabled, m.step - began, 0), visited=w.visited + enabled)
    return w, m.when(enabled, mode=int(Mode.ADMIT), active=m.active + 1, waiting=m.waiting - 1, budget=m.budget - m.new)


def _settle(w: Any, m: Machine, current: Current, enabled: Scalar) -> Pair:
    """Notes that what was loaded is registered; the last token of a request is computed in any case."""
    w = w.write_if(enabled, "tables", SETTLED, w.slot_word(current.slot, SlotWord.STATE))
    computed = current.computed - (current.computed == current.tokens)
    w = w.write_if(enabled, "running_words", computed, w.running_word(current.slot, Running.COMPUTED))
    w = w.set(jnp.where(enabled, current.slot, w.spare_slot), Request.COMPUTED, computed)
    return w, m.when(enabled, mode=int(Mode.ADMIT))


def _leave(w: Any, m: Machine, current: Current, enabled: Scalar) -> Pair:
    """A request that was loaded for will never fit, and leaves its slot."""
    w = w.set_result(jnp.where(enabled, current.request, w.spare_request), ended=m.step, outcome=int(Ending.NEVER_FITS))
    w = w.write("vacant", current.slot, jnp.where(enabled, m.vacant, w.spare_slot))
    w = w.write_if(enabled, "tables", 0, w.slot_word(current.slot, SlotWord.STATE)).replace(visited=w.visited + enabled)
    return w, m.when(enabled, mode=int(Mode.ADMIT), vacant=m.vacant + 1, waiting=m.waiting - 1, ended=m.ended + 1)


def _begin_load(w: Any, view: Any, trace: DiagnosedTrace, step: Scalar, current: Current, enabled: Scalar) -> Any:
    """The load that a request waits for."""
    tier, slot, external = view.tier, current.slot, w.external
    of = prefix(view, trace, current.request)
    w, count = lookup.load(w, view, slot, of, w.local, w.local + external, enabled)
    w, end = transferred(w, tier, "load", step, count, enabled)
    for word, value in ((SlotWord.END, end), (SlotWord.STATE, LOADS), (SlotWord.BEGAN, step)):
        w = w.write_if(enabled, "tables", value, w.slot_word(slot, word))
    slower = (
        enabled & (tier.number(TierNumber.SLOWER) != 0) & (external <= read(tier.beaten, jnp.where(enabled, count, 0)))
    )
    return w.replace(
        loads=w.loads + enabled,
        slower=w.slower + slower,
        loaded_tokens=w.loaded_tokens + jnp.where(enabled, external, 0),
        load_chunks=w.load_chunks + jnp.where(enabled, count, 0),
    )
