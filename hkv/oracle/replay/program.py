"""The schedule of a replay as one compiled loop: the twin of `hkv.oracle.replay.schedule`, decision for decision.

A trip of the loop finds the next operation that the cache must perform, performs it, and notes what follows from its
answer. Most decode steps need no operation: a request's blocks have room, nothing is to be registered or given back.
How far that holds is known for each request (`Seat.CALM`), so such requests are passed in a few nanoseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hkv.dialects.vllm import transitions
from hkv.dialects.vllm.parameters import CacheField, Parameters, View
from hkv.dialects.vllm.transitions import EMPTY, Answer, Op
from hkv.operations import RESULT_FRONT, Argument, Code
from hkv.oracle.replay import calm, compiled_reasons
from hkv.oracle.replay.compiled_state import (
    EVERYTHING,
    SAMPLE,
    SCHEDULE_ARRAYS,
    Arriving,
    Ending,
    Fate,
    Machine,
    Mode,
    Number,
    Resident,
    ScheduleWorkspace,
    Seat,
    Trace,
)
from hkv.state import free_queue
from hkv.state.loops import Scalar, divide, loop, peek, remainder
from hkv.state.operation_loop import Payload
from hkv.state.state import Request, State
from hkv.state.status import Status
from hkv.state.workspace import ARRAYS, COUNTERS, Sizes

Pair = tuple[ScheduleWorkspace, Machine]


@functools.cache
def compiled(ids: int = 0) -> Callable[..., tuple[Resident, jax.Array, jax.Array]]:
    """The program: `(parameters, trace, resident) -> (resident, ids, number of ids)`, the resident donated.

    A dispatch ends when the trace does, when `Resident.samples` is full, or when half the ids' room is used.

    Args:
      ids: room for block ids; 0: none are reported, and nothing is compiled for them. What lookups found and what
        allocations took, operation after operation and group after group, null blocks before a hit left out.
    """
    return jax.jit(functools.partial(_dispatch, room=ids), donate_argnums=(2,))


def _dispatch(
    parameters: Parameters, trace: Trace, resident: Resident, *, room: int
) -> tuple[Resident, jax.Array, jax.Array]:
    cache = resident.cache
    buckets = cache.buckets
    sizes = Sizes(buckets, 1, 1, RESULT_FRONT + 2 * buckets.groups, room, 0)
    zero = jnp.int32(0)
    arrays = {name: getattr(cache, name).reshape(-1) for name in ARRAYS}
    own = {name: getattr(resident, name).reshape(-1) for name in SCHEDULE_ARRAYS}
    outputs = {
        "ids": jnp.zeros(room + 1, jnp.int32),
        "events": jnp.zeros(4, jnp.int32),
        "results": jnp.zeros(2 * sizes.width, jnp.int32),
    }
    counters = {name: cache.counters[int(place)] for name, place in COUNTERS.items()}
    work = ScheduleWorkspace(sizes, **arrays, **own, **outputs, **counters, lane=zero, num_ids=zero, num_events=zero)
    view = View(parameters.cache.reshape(-1), parameters.groups.reshape(-1), None, buckets.groups)
    machine = Machine(*resident.machine)._replace(samples=zero)
    steps = resident.samples.shape[0] - 1

    def going(local: tuple[Scalar, ...]) -> Scalar:
        *scalars, num_ids = local
        m = Machine(*scalars)
        full = (m.samples >= steps) | (num_ids > room // 2)
        return (m.mode < int(Mode.DONE)) & ~(m.at(Mode.BEGIN) & full)

    def trip(w: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        w, m = _trip(w, view, trace, Machine(*local[:-1]))
        return w, (*m, w.num_ids)

    work, local = loop(going, trip, work, (*machine, zero), writes=EVERYTHING)
    machine = Machine(*local[:-1])
    line = cache.counters
    for name, place in COUNTERS.items():
        line = line.at[int(place)].set(getattr(work, name))
    new = State(**{name: getattr(work, name).reshape(getattr(cache, name).shape) for name in ARRAYS}, counters=line)
    shaped = {name: getattr(work, name).reshape(getattr(resident, name).shape) for name in SCHEDULE_ARRAYS}
    return Resident(cache=new, machine=jnp.stack(machine), **shaped), work.ids[:-1], work.num_ids


def _trip(w: ScheduleWorkspace, view: View, trace: Trace, m: Machine) -> Pair:
    w, m = _begin(w, trace, m)
    w, m = _grow(w, trace, m)
    w, m = _choose(w, trace, m)
    w, m = _record(w, view, m)
    w, m = _compute(w, trace, m)
    w, m, seat, op = _operation(w, view, trace, m)
    w, answer = _perform(w, view, op, Payload(trace.keys, jnp.int32(0), trace.keys.shape[0]))
    w, m, grown = _after_running(w, m, seat, answer)
    w, m, admitted = _after_waiting(w, view, trace, m, seat, answer)
    main = jnp.where(seat.asking, seat.computed, m.hit) + m.new
    return calm.note(w, view, trace, op.slot, main, grown | admitted), m


def _begin(w: ScheduleWorkspace, trace: Trace, m: Machine) -> Pair:
    """The clock goes on where nothing waits or runs; then arrivals."""
    mine = m.at(Mode.BEGIN)
    idle = (m.active == 0) & (m.waiting == 0)
    left = m.arrived < trace.number(Number.REQUESTS)
    closed = trace.number(Number.CLOSED_LOOP)
    ending = mine & idle & ~left
    arrival = trace.request(m.arrived, Arriving.STEP)
    step = jnp.where(mine & idle & left & (closed == 0), jnp.maximum(m.step, arrival), m.step)
    spare = w.spare_request

    def body(v: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        arrived, waiting, ended, _ = local
        in_time = trace.request(arrived, Arriving.STEP) <= step
        due = jnp.where(closed > 0, m.active + waiting < closed, in_time) & (arrived < trace.number(Number.REQUESTS))
        long = trace.too_long(arrived)
        v = v.set_fate(
            jnp.where(due, arrived, spare),
            admitted=-1,
            ended=jnp.where(long, step, -1),
            outcome=jnp.where(long, int(Ending.TOO_LONG), int(Ending.NONE)),
            tokens=trace.request(arrived, Arriving.PROMPT),
        )
        return v, (arrived + due, waiting + (due & ~long), ended + (due & long), due)

    start = (m.arrived, m.waiting, m.ended, mine & ~ending)
    w, (arrived, waiting, ended, _) = loop(lambda c: c[3], body, w, start, writes=("fates",))
    busy = mine & ((m.active > 0) | (waiting > 0))
    m = m._replace(step=step, arrived=arrived, waiting=waiting, ended=ended)
    m = m.when(ending, mode=int(Mode.DONE))
    m = m.when(busy, mode=int(Mode.GROW), cursor=0, budget=trace.number(Number.STEP_TOKENS), refused=0)
    return w.replace(steps=w.steps + busy), m


def chunk(trace: Trace, request: Scalar, tokens: Scalar, junction: Scalar, start: Scalar, budget: Scalar) -> Scalar:
    """Tokens to compute next: `hkv.oracle.replay.chunking.Chunking.tokens`, without sub-block hits."""
    size, eagle = trace.number(Number.KEPT_BLOCK), trace.number(Number.KEPT_EAGLE) != 0
    block = jnp.maximum(size, 1)
    prefilled = jnp.maximum(trace.request(request, Arriving.PROMPT), tokens - 1)
    whole = jnp.minimum(tokens, start + budget)
    aligned = divide(whole, block) * block
    small = size <= trace.number(Number.STEP_TOKENS)
    end = jnp.where((whole < prefilled) & ((aligned > start) | small), aligned, whole)
    last = jnp.where(eagle, divide(tokens, block) * block - block, divide(tokens - 1, block) * block)
    here = jnp.where(remainder(start, block) != 0, (divide(start, block) + 1) * block, 0)
    known = (start < junction) & (junction < end)
    meeting = jnp.where(known, start + divide(jnp.maximum(junction - start, 0), block) * block, 0)
    stop = end
    for each in (last, here, meeting):
        stop = jnp.where((start < each) & (each < end), jnp.minimum(stop, each), stop)
    end = jnp.where((size > 0) & (start < prefilled), stop, whole)
    return jnp.maximum(end - start, 0)


def _grow(w: ScheduleWorkspace, trace: Trace, m: Machine) -> Pair:
    """Gives running requests their tokens as long as the cache has nothing to do for that."""
    mine = m.at(Mode.GROW)

    def body(v: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        cursor, budget, slot, new, _ = local
        v = v.set_seat(slot, scheduled=new)
        inside = (cursor < m.active) & (budget > 0)
        slot = jnp.where(inside, v.read("order", jnp.where(inside, cursor, 0)), v.spare_slot)
        request, computed, tokens, calm, junction = v.get_seat(
            slot, Seat.REQUEST, Seat.COMPUTED, Seat.TOKENS, Seat.CALM, Seat.JUNCTION
        )
        new = jnp.where(inside, chunk(trace, request, tokens, junction, computed, budget), 0)
        easy = inside & ((new == 0) | (computed + new <= calm))
        return v, (cursor + 1, budget - jnp.where(easy, new, 0), slot, new, easy)

    start = (m.cursor, m.budget, w.spare_slot, 0, mine)
    w, local = loop(lambda c: c[4], body, w, start, reads=("order",), writes=("seats",))
    cursor, budget, slot, new, easy = local
    cursor -= ~easy
    after = jnp.where(m.refused != 0, int(Mode.RECORD), int(Mode.ADMIT))
    mode = jnp.where(new > 0, int(Mode.ASK), after)
    return w, m.when(mine, cursor=cursor, budget=budget, asked=slot, new=new, mode=mode)


def _choose(w: ScheduleWorkspace, trace: Trace, m: Machine) -> Pair:
    """Finds the head of the queue: the request that was preempted last, or the first that was never admitted."""
    mine = m.at(Mode.ADMIT)
    can = mine & (m.waiting > 0) & (m.budget > 0) & (m.active < trace.number(Number.MAX_RUNNING))
    again = m.stacked > 0

    def skip(v: ScheduleWorkspace, local: tuple[Scalar, Scalar]) -> tuple[ScheduleWorkspace, tuple[Scalar, Scalar]]:
        long = (local[0] < m.arrived) & trace.too_long(local[0])
        return v, (local[0] + long, long)

    w, (taken, _) = loop(lambda c: c[1], skip, w, (m.taken, can & ~again))
    w, (top,) = peek(can & again, lambda v: (v.read("stack", m.stacked - 1),), w, reads=("stack",), default=(0,))
    head = jnp.where(again, top, taken)
    ready = jnp.where(head == m.seated, int(Mode.FIND), int(Mode.SEAT))
    return w, m.when(mine, mode=jnp.where(can, ready, int(Mode.RECORD)), head=head, taken=taken)


def _record(w: ScheduleWorkspace, view: View, m: Machine) -> Pair:
    """The step's occupancy, once every request that computes in it has its blocks."""
    mine = m.at(Mode.RECORD)
    row = jnp.where(mine, m.samples, w.samples.shape[0] // SAMPLE - 1)
    in_use = view.whole(CacheField.NUM_BLOCKS) - 1 - w.free
    sums = (m.prompt_tokens, m.hit_tokens, m.put_off, m.preemptions)
    for column, value in enumerate((m.step, in_use, m.active, m.waiting, *sums)):
        w = w.write("samples", value, row * SAMPLE + column)
    m = m.when(mine, prompt_tokens=0, hit_tokens=0, put_off=0, preemptions=0)
    return w, m.when(mine, mode=int(Mode.COMPUTE), samples=m.samples + 1, cursor=0, kept=0)


def _compute(w: ScheduleWorkspace, trace: Trace, m: Machine) -> Pair:
    """The step's computation, up to the next request whose last token is out; those that stay close ranks."""
    mine = m.at(Mode.COMPUTE)
    spare = w.spare_slot

    def body(v: ScheduleWorkspace, local: tuple[Scalar, ...]) -> tuple[ScheduleWorkspace, tuple[Scalar, ...]]:
        cursor, kept, slot, computed, tokens, place, _, _ = local
        v = v.write("order", slot, place).set_seat(slot, computed=computed, tokens=tokens, scheduled=0)
        inside = cursor < m.active
        slot = jnp.where(inside, v.read("order", jnp.where(inside, cursor, 0)), spare)
        request, computed, tokens, new = v.get_seat(slot, Seat.REQUEST, Seat.COMPUTED, Seat.TOKENS, Seat.SCHEDULED)
        computed = computed + new
        caught_up = inside & (new > 0) & (computed >= tokens)
        left = trace.request(request, Arriving.PROMPT) + trace.request(request, Arriving.OUTPUT) - tokens
        more = trace.number(Number.DECODE_TOKENS)
        ends = caught_up & (left <= more)
        stays = inside & ~ends
        tokens = tokens + jnp.where(caught_up, more, 0)
        place = jnp.where(stays, kept, spare)
        return v, (cursor + 1, kept + stays, slot, computed, tokens, place, stays, ends)

    start = (m.cursor, m.kept, spare, 0, 0, spare, mine, False)
    w, local = loop(lambda c: c[6], body, w, start, writes=("order", "seats"))
    cursor, kept, slot, _, _, _, stays, ends = local
    cursor -= ~stays
    m = m.when(mine, cursor=cursor, kept=kept, asked=slot)
    m = m.when(mine & ends, mode=int(Mode.FINISH))
    return w, m.when(mine & ~ends, mode=int(Mode.BEGIN), active=kept, step=m.step + 1)


class _Seated(NamedTuple):
    """The request that the operation is about, as it was before. `asking`: whether it is a running one that grows."""

    slot: Scalar
    request: Scalar
    computed: Scalar
    tokens: Scalar
    junction: Scalar
    preemptions: Scalar
    recomputed: Scalar
    recovered: Scalar
    waiting_tokens: Scalar
    asking: Scalar


def _operation(w: Any, view: View, trace: Trace, m: Machine) -> tuple[Any, Machine, _Seated, Op]:
    """The operation that the mode calls for, and what it is about."""
    codes = {
        Mode.ASK: Code.ALLOCATE,
        Mode.PREEMPT: Code.FREE,
        Mode.SEAT: Code.REQUEST,
        Mode.FIND: Code.LOOKUP,
        Mode.TAKE: Code.ALLOCATE,
        Mode.FINISH: Code.FREE,
    }
    code = jnp.int32(int(Code.END))
    for mode, each in codes.items():
        code = jnp.where(m.at(mode), int(each), code)
    asking, taking, seating = m.at(Mode.ASK), m.at(Mode.TAKE), m.at(Mode.SEAT)
    candidate = seating | m.at(Mode.FIND) | taking
    w, (victim,) = peek(
        m.at(Mode.PREEMPT), lambda v: (v.read("order", m.active - 1),), w, reads=("order",), default=(0,)
    )
    slot = jnp.where(candidate, m.candidate, jnp.where(m.at(Mode.PREEMPT), victim, m.asked))
    busy = code != int(Code.END)
    slot = jnp.where(busy, slot, w.spare_slot)
    columns = (Seat.REQUEST, Seat.COMPUTED, Seat.TOKENS, Seat.JUNCTION)
    w, (request, *fields) = peek(
        busy, lambda v: v.get_seat(slot, *columns), w, reads=("seats",), default=(0,) * len(columns)
    )
    request = jnp.where(candidate, m.head, request)
    past = (Fate.PREEMPTIONS, Fate.RECOMPUTED, Fate.RECOVERED, Fate.TOKENS)
    w, fates = peek(busy, lambda v: v.get_fate(request, *past), w, reads=("fates",), default=(0,) * len(past))
    seat = _Seated(*(slot, request, *fields, *fates, asking))
    w = w.set(jnp.where(seating, slot, w.spare_slot), Request.LIVE, EMPTY)
    grown = jnp.where(asking, slot, w.spare_slot)
    w = w.set(grown, Request.COMPUTED, seat.computed).set(grown, Request.TOKENS, seat.tokens)
    prompt, output = trace.request(request, Arriving.PROMPT), trace.request(request, Arriving.OUTPUT)
    arguments = {
        Argument.CODE: code,
        Argument.SLOT: slot,
        Argument.TOKENS: prompt,
        Argument.KEYS: divide(prompt + output, view.whole(CacheField.HASH_BLOCK)),
        Argument.KEY_START: trace.request(request, Arriving.KEY_START),
        Argument.NEW: m.new,
        Argument.HIT: jnp.where(taking, m.hit, 0),
        Argument.LOOKAHEAD: trace.number(Number.LOOKAHEAD),
        Argument.MUST_FIT: taking.astype(jnp.int32),
        Argument.SHARED_PREFIX: jnp.where(taking, seat.junction, -1),
    }
    row = tuple(arguments.get(argument, jnp.int32(0)) for argument in Argument)
    w, op = transitions.fetch(w, jnp.stack(row), jnp.int32(0), code)
    return w, m, seat, op


def _perform(w: Any, view: View, op: Op, payload: Payload) -> tuple[Any, Answer]:
    """The operation, as `hkv.dialects.vllm.execute` performs it."""
    w = free_queue.make_room(w)
    nothing = dict.fromkeys(Answer._fields, jnp.int32(0))
    answer = Answer(**{**nothing, "status": jnp.int32(int(Status.OK)), "reported": jnp.bool_(False)})
    w, answer = transitions.arrive(w, view, op, answer, payload)
    w, answer = transitions.lookup(w, view, op, answer)
    w, answer, plan = transitions.admit_or_give_back(w, view, op, answer)
    w, answer, certain = transitions.allocate(w, view, op, answer, plan)
    w, answer = transitions.register(w, view, op, answer, certain)
    w, answer = transitions.leave(w, op, answer)
    w = w.replace(clock=w.clock + transitions.may_change_hits(op.code))
    if w.sizes.ids:
        w = transitions.report(w, view, op, answer, jnp.int32(0))
    return w, answer


def _refused(answer: Answer) -> Scalar:
    found = jnp.bool_(False)
    for status in (Status.NO_ROOM, Status.NO_ROOM_FOR_SEQUENCE, Status.NOT_YET_WRITTEN):
        found = found | (answer.status == int(status))
    return found


def _leave_seat(w: ScheduleWorkspace, m: Machine, slot: Scalar, condition: Scalar) -> Pair:
    """The request in a slot is gone from the cache."""
    w = w.set(jnp.where(condition, slot, w.spare_slot), Request.LIVE, EMPTY)
    w = w.write("vacant", slot, jnp.where(condition, m.vacant, w.spare_slot))
    return w, m.when(condition, vacant=m.vacant + 1)


def _after_running(
    w: ScheduleWorkspace, m: Machine, seat: _Seated, answer: Answer
) -> tuple[ScheduleWorkspace, Machine, Scalar]:
    """What follows for running requests: also whether one got its blocks."""
    asking, preempting, finishing = m.at(Mode.ASK), m.at(Mode.PREEMPT), m.at(Mode.FINISH)
    failed = ~answer.ok & (preempting | finishing | (asking & ~_refused(answer)))
    m = m.when(failed, mode=int(Mode.FAILED), status=answer.status)
    granted, denied = asking & answer.ok, asking & ~answer.ok & ~failed
    w = w.write_if(granted, "seats", m.new, w.seat(m.asked, Seat.SCHEDULED))
    m = m.when(granted, cursor=m.cursor + 1, budget=m.budget - m.new, mode=int(Mode.GROW))
    m = m.when(denied, refused=1, mode=int(Mode.PREEMPT))
    preempted, finished = preempting & answer.ok, finishing & answer.ok
    alone = preempted & (m.active == 1)
    again = preempted & ~alone
    w = w.set_fate(
        jnp.where(again, seat.request, w.spare_request), preemptions=seat.preemptions + 1, tokens=seat.tokens
    )
    w = w.write("stack", seat.request, jnp.where(again, m.stacked, w.spare_request))
    gone = alone | finished
    ending = jnp.where(alone, int(Ending.NEVER_FITS), int(Ending.FINISHED))
    w = w.set_fate(jnp.where(gone, seat.request, w.spare_request), ended=m.step, outcome=ending)
    w, m = _leave_seat(w, m, seat.slot, preempted | finished)
    m = m.when(gone, ended=m.ended + 1)
    m = m.when(again, stacked=m.stacked + 1, waiting=m.waiting + 1, preemptions=m.preemptions + 1)
    last = m.active - 1 == m.cursor
    m = m.when(preempted, mode=jnp.where(last, int(Mode.RECORD), int(Mode.GROW)), active=m.active - 1)
    m = m.when(finished, mode=int(Mode.COMPUTE), cursor=m.cursor + 1)
    return w, m, granted


def _after_waiting(
    w: ScheduleWorkspace, view: View, trace: Trace, m: Machine, seat: _Seated, answer: Answer
) -> tuple[ScheduleWorkspace, Machine, Scalar]:
    """What follows for the head of the queue: also whether it was admitted."""
    seating, finding, taking = m.at(Mode.SEAT), m.at(Mode.FIND), m.at(Mode.TAKE)
    failed = ~answer.ok & (seating | finding | (taking & ~_refused(answer)))
    m = m.when(failed, mode=int(Mode.FAILED), status=answer.status)
    spare = w.spare_slot
    seated = jnp.where(seating & answer.ok, m.candidate, spare)
    w = w.set(seated, Request.TOKENS, seat.waiting_tokens)
    w = w.set_seat(seated, request=m.head, computed=0, tokens=seat.waiting_tokens, scheduled=0)
    m = m.when(seating & answer.ok, seated=m.head, mode=int(Mode.ADMIT))
    w, m = _after_lookup(w, view, trace, m, seat, answer)
    granted, denied = taking & answer.ok, taking & ~answer.ok & ~failed
    never = denied & (m.active == 0)
    m = m.when(denied & ~never, put_off=1, mode=int(Mode.RECORD))
    w, m = _admit(w, m, seat, granted)
    w = w.set_fate(jnp.where(never, m.head, w.spare_request), ended=m.step, outcome=int(Ending.NEVER_FITS))
    w = w.set(jnp.where(never, m.candidate, spare), Request.LIVE, EMPTY)
    left = granted | never
    again = m.stacked > 0
    m = m.when(never, ended=m.ended + 1)
    m = m.when(
        left,
        mode=int(Mode.ADMIT),
        waiting=m.waiting - 1,
        seated=-1,
        taken=jnp.where(again, m.taken, m.head + 1),
        stacked=jnp.where(again, m.stacked - 1, 0),
    )
    return w, m, granted


def _after_lookup(w: ScheduleWorkspace, view: View, trace: Trace, m: Machine, seat: _Seated, answer: Answer) -> Pair:
    found = m.at(Mode.FIND) & answer.ok
    new = chunk(trace, m.head, seat.tokens, answer.shared_prefix, answer.value, m.budget)
    w = w.write_if(found, "seats", answer.shared_prefix, w.seat(m.candidate, Seat.JUNCTION))
    asked = (new > 0) & (seat.preemptions == 0) & (trace.number(Number.DIAGNOSE) != 0)
    looking = View(view.cache, trace.diagnosed.reshape(-1), None, view.width)
    w = compiled_reasons.diagnose(w, looking, m.candidate, m.head, seat.tokens, answer.value, found & asked)
    mode = jnp.where(new > 0, int(Mode.TAKE), int(Mode.RECORD))
    return w, m.when(found, mode=mode, new=new, hit=answer.value)


def _admit(w: ScheduleWorkspace, m: Machine, seat: _Seated, granted: Scalar) -> Pair:
    """The candidate runs; another slot takes the next candidate."""
    spare = w.spare_slot
    w = w.write("order", m.candidate, jnp.where(granted, m.active, spare))
    w = w.write_if(granted, "seats", m.hit + m.new, w.seat(m.candidate, Seat.SCHEDULED))
    first = granted & (seat.preemptions == 0)
    back = granted & ~first
    w = w.set_fate(jnp.where(first, m.head, w.spare_request), hit=m.hit, admitted=m.step)
    w = w.set_fate(
        jnp.where(back, m.head, w.spare_request),
        recomputed=seat.recomputed + seat.tokens,
        recovered=seat.recovered + m.hit,
    )
    w, (next_slot,) = peek(granted, lambda v: (v.read("vacant", m.vacant - 1),), w, reads=("vacant",), default=(0,))
    m = m.when(first, prompt_tokens=m.prompt_tokens + seat.tokens, hit_tokens=m.hit_tokens + m.hit)
    m = m.when(granted, active=m.active + 1, budget=m.budget - m.new, candidate=next_slot, vacant=m.vacant - 1)
    return w, m
