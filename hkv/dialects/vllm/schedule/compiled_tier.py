"""The compiled schedule with a second tier: vLLM 0.33's offloading in the same loop as its cache.

A trip is as `compiled` has it, with a few more things in it. Transfers that are done are reported as a step begins.
Requests whose loads go on hold slots, are listed apart, and come before the queue. What a lookup on the GPU finds
is looked up further in the tier, and a request of which a chunk is on its way is put aside. Once every request has its
blocks, chunks are offered. The twin of `hkv.dialects.vllm.schedule.tiered_replay`; `compiled_loads` has requests that
wait for loads, `compiled_stores` what a step stores, `hkv.dialects.vllm.rules.offload` the rules.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm.rules import transitions
from hkv.dialects.vllm.rules.offload import lookup, offers, pool, states
from hkv.dialects.vllm.rules.offload.words import WAITED, SlotWord, User
from hkv.dialects.vllm.rules.operations import Argument, Code, Flag
from hkv.dialects.vllm.rules.parameters import CacheField
from hkv.dialects.vllm.rules.transitions import EMPTY, Answer, Op
from hkv.dialects.vllm.schedule import compiled, compiled_loads, compiled_stores
from hkv.dialects.vllm.schedule.compiled_reasons import DiagnosedTrace
from hkv.replay import schedule_loop
from hkv.replay.schedule_loop import Current
from hkv.replay.schedule_state import Arriving, Machine, Mode, Number, Running
from hkv.state.loops import Scalar, guarded, remainder
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
    w, m = schedule_loop.grow(w, trace, m)
    w, m = guarded(m.at(Mode.ADMIT), lambda v, n: compiled_loads.choose(v, trace, n), w, m)
    w, m = guarded(m.at(Mode.RECORD) & ((w.held > 0) | (w.aside > 0)), compiled_loads.recall, w, m)
    if w.sizes.copies:
        w = offers.tell_copies(w, m.step, m.at(Mode.RECORD))
        w = compiled.made_copies(w, view, m.at(Mode.RECORD))
    w, m = guarded(m.at(Mode.RECORD) | m.at(Mode.REST), lambda v, n: compiled_stores.order(v, view, trace, n), w, m)
    m = m.when(m.at(Mode.REST), mode=int(Mode.BEGIN))
    w, m = schedule_loop.record(w, m, view.whole(CacheField.NUM_BLOCKS) - 1 - w.free)
    w, m = schedule_loop.compute(w, trace, m)
    w, current, op = _operation(w, view, trace, m)
    w, answer = compiled.perform(w, view, trace, m, current, op, settles=True)
    return _follow(w, view, trace, m, current, answer)


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

    return lookup.end_loads(w, view, done, view.prefix_of, request_of)


BLOCKED = int(Status.NO_ROOM)
"""Status of a replay that ends since requests wait for each other's blocks; other refusals for room do not end one."""

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
    w, (reserved,) = guarded(loads, lambda v, _: compiled_loads.reserved(v, view, m, loads), w, (jnp.int32(0),))
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
        Argument.KEYS: view.prefix_of(request).units,
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
        v = compiled_stores.flush_jobs(v, current.request, step, preempted | given_up)
        if v.room.states:
            v = states.withdraw(v, slot, given_up)
        return compiled_stores.end(
            v, finished | alone | given_up, current.request, jnp.where(finished, slot, v.spare_slot)
        ), ()

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
    w = compiled_stores.end(w, hopeless, m.head, w.spare_slot)
    w, m = compiled_loads.hold(w, m, current, loads)
    w, m = compiled_loads.go_on(w, m, current, held)
    w, m = compiled_loads.settle(w, m, current, settled)
    w, m = compiled_loads.leave(w, m, current, given_up)
    w = w.write_if(took, "running_words", current.tokens, w.running_word(slot, Running.CAME))
    w = w.write_if(runs | held, "tables", 0, w.slot_word(slot, SlotWord.OFFERS))
    w = compiled_loads.begin(w, view, trace, step, current, loads)
    w = w.set(jnp.where(hopeless | given_up, slot, w.spare_slot), Request.LIVE, EMPTY)
    return w, m.when(blocked, mode=int(Mode.FAILED), status=BLOCKED)


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
