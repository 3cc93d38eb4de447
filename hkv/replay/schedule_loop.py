"""The one compiled schedule, whatever cache it drives: arrivals, the queue, growth, a step's tokens.

A trip of the loop finds the next operation that the cache must perform, performs it, and notes what follows from its
answer. Most decode steps need no operation: a request's blocks have room, nothing is to be registered or given back.
How far that holds is known for each request (`Running.NOOP_UNTIL`), so such requests are passed in a few nanoseconds.

`hkv.replay.schedule.StepLoop` is the same in plain Python; `hkv.replay.schedule_state` names what these
functions read and write. A workspace has `ScheduleArrays`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp

from hkv.replay.schedule_state import (
    SAMPLE,
    Arriving,
    Ending,
    Machine,
    Mode,
    Number,
    RequestResult,
    Running,
    ScheduleResident,
    Trace,
)
from hkv.state.loops import Scalar, divide, loop, peek, remainder
from hkv.state.status import Status

Pair = tuple[Any, Machine]


def run(
    w: Any,
    trace: Trace,
    resident: ScheduleResident,
    trip: Callable[[Any, Machine], Pair],
) -> Pair:
    """Trips of the one loop of a compiled replay.

    A dispatch ends when the trace does, after `Number.STEPS` steps, before `Number.UNTIL`, when `samples` is full, or
    when half the ids' room is used.

    Args:
      w: the workspace, all of whose arrays a trip may write.
      trace: the trace.
      resident: gives the schedule where the last dispatch left it.
      trip: one trip under the dialect's rules: the next operation of the cache, and what follows from its answer.
    """
    zero, size, room = jnp.int32(0), len(Machine._fields), w.sizes.ids
    steps, fewer = resident.samples.shape[0] - 1, trace.number(Number.STEPS)
    steps = jnp.where(fewer > 0, jnp.minimum(fewer, steps), steps)

    def going(local: tuple[Scalar, ...]) -> Scalar:
        m = Machine(*local[:size])
        full = (m.samples >= steps) | (m.step >= trace.until) | (local[-1] > room // 2)
        return (m.mode < int(Mode.DONE)) & ~(m.at(Mode.BEGIN) & full)

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        v, m = trip(v, Machine(*local[:size]))
        return v, (*m, v.num_ids)

    begun = (*Machine(*resident.machine)._replace(samples=zero), zero)
    w, local = loop(going, body, w, begun, writes=w.EVERYTHING)
    return w, Machine(*local[:size])


def among(status: Scalar, statuses: Iterable[Status]) -> Scalar:
    """True if a status is one of these."""
    return functools.reduce(operator.or_, (status == int(each) for each in statuses), jnp.bool_(False))


def begin(w: Any, trace: Trace, m: Machine) -> tuple[Any, Machine, Scalar]:
    """The clock goes on where nothing waits or runs; then arrivals. Also returns whether a step with work begins."""
    mine = m.at(Mode.BEGIN)
    idle = (m.active == 0) & (m.waiting == 0)
    left = m.arrived < trace.number(Number.REQUESTS)
    closed = trace.number(Number.CLOSED_LOOP)
    ending = mine & idle & ~left
    arrival = trace.request(m.arrived, Arriving.STEP)
    later = jnp.maximum(m.step, jnp.minimum(arrival, trace.until))  # as far as this dispatch may go
    step = jnp.where(mine & idle & left & (closed == 0), later, m.step)
    spare = w.spare_request

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        arrived, waiting, ended, _ = local
        in_time = trace.request(arrived, Arriving.STEP) <= step
        due = jnp.where(closed > 0, m.active + waiting < closed, in_time) & (arrived < trace.number(Number.REQUESTS))
        long = trace.too_long(arrived)
        v = v.set_result(
            jnp.where(due, arrived, spare),
            admitted=-1,
            ended=jnp.where(long, step, -1),
            outcome=jnp.where(long, int(Ending.TOO_LONG), int(Ending.NONE)),
            tokens=trace.request(arrived, Arriving.PROMPT),
        )
        return v, (arrived + due, waiting + (due & ~long), ended + (due & long), due)

    start = (m.arrived, m.waiting, m.ended, mine & ~ending & (step < trace.until))
    w, (arrived, waiting, ended, _) = loop(lambda c: c[3], body, w, start, writes=("request_results",))
    busy = mine & ((m.active > 0) | (waiting > 0))
    m = m._replace(step=step, arrived=arrived, waiting=waiting, ended=ended)
    m = m.when(ending, mode=int(Mode.DONE))
    m = m.when(busy, mode=int(Mode.GROW), cursor=0, budget=trace.number(Number.STEP_TOKENS), refused=0)
    return w, m, busy


def chunk(
    trace: Trace, request: Scalar, tokens: Scalar, shared_boundary: Scalar, start: Scalar, budget: Scalar
) -> Scalar:
    """Tokens to compute next: `hkv.dialects.vllm.schedule.schedule.Chunking.tokens`."""
    size, eagle = trace.number(Number.KEPT_BLOCK), trace.number(Number.KEPT_EAGLE) != 0
    block, fine = jnp.maximum(size, 1), trace.number(Number.KEPT_HASH)
    prompt = trace.request(request, Arriving.PROMPT)
    prefilled = jnp.maximum(prompt, tokens - 1)
    whole = jnp.minimum(tokens, start + budget)
    aligned = divide(whole, block) * block
    small = size <= trace.number(Number.STEP_TOKENS)
    end = jnp.where((whole < prefilled) & ((aligned > start) | small), aligned, whole)
    last = _last_kept(tokens, block, eagle)
    tail = _last_kept(prompt, jnp.maximum(fine, 1), eagle)
    tail = jnp.where((fine > 0) & (last < tail) & (tail < prompt), tail, 0)
    here = jnp.where(remainder(start, block) != 0, (divide(start, block) + 1) * block, 0)
    known = (start < shared_boundary) & (shared_boundary < end)
    meeting = jnp.where(known, start + divide(jnp.maximum(shared_boundary - start, 0), block) * block, 0)
    stop = end
    for each in (last, here, meeting, tail):
        stop = jnp.where((start < each) & (each < end), jnp.minimum(stop, each), stop)
    end = jnp.where((size > 0) & (start < prefilled), stop, whole)
    return jnp.maximum(end - start, 0)


def _last_kept(tokens: Scalar, size: Scalar, eagle: Scalar) -> Scalar:
    """The last multiple of `size` whose state a later request with these tokens can resume from."""
    whole = divide(tokens, size) * size - size
    return jnp.maximum(jnp.where(eagle, whole, divide(jnp.maximum(tokens - 1, 0), size) * size), 0)


def grow(w: Any, trace: Trace, m: Machine) -> Pair:
    """Gives running requests their tokens as long as the cache has nothing to do for that."""
    mine = m.at(Mode.GROW)

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        cursor, budget, slot, new, _ = local
        v = v.set_running(slot, scheduled=new)
        inside = (cursor < m.active) & (budget > 0)
        slot = jnp.where(inside, v.read("order", jnp.where(inside, cursor, 0)), v.spare_slot)
        request, computed, tokens, noop_until, shared_boundary = v.get_running(
            slot, Running.REQUEST, Running.COMPUTED, Running.TOKENS, Running.NOOP_UNTIL, Running.SHARED_BOUNDARY
        )
        new = jnp.where(inside, chunk(trace, request, tokens, shared_boundary, computed, budget), 0)
        easy = inside & ((new == 0) | (computed + new <= noop_until))
        return v, (cursor + 1, budget - jnp.where(easy, new, 0), slot, new, easy)

    start = (m.cursor, m.budget, w.spare_slot, 0, mine)
    w, local = loop(lambda c: c[4], body, w, start, reads=("order",), writes=("running_words",))
    cursor, budget, slot, new, easy = local
    cursor -= ~easy
    after = jnp.where(m.refused != 0, int(Mode.RECORD), int(Mode.ADMIT))
    mode = jnp.where(new > 0, int(Mode.ASK), after)
    return w, m.when(mine, cursor=cursor, budget=budget, asked=slot, new=new, mode=mode)


def choose(w: Any, trace: Trace, m: Machine) -> Pair:
    """Finds the head of the queue: the request that was preempted last, or the first that was never admitted."""
    mine = m.at(Mode.ADMIT)
    can = mine & (m.waiting > 0) & (m.budget > 0) & (m.active < trace.number(Number.MAX_RUNNING))
    again = m.stacked > 0

    def skip(v: Any, local: tuple[Scalar, Scalar]) -> tuple[Any, tuple[Scalar, Scalar]]:
        long = (local[0] < m.arrived) & trace.too_long(local[0])
        return v, (local[0] + long, long)

    w, (taken, _) = loop(lambda c: c[1], skip, w, (m.taken, can & ~again))
    w, (top,) = peek(can & again, lambda v: (v.read("stack", m.stacked - 1),), w, reads=("stack",), default=(0,))
    head = jnp.where(again, top, taken)
    ready = jnp.where(head == m.candidate_request, int(Mode.FIND), int(Mode.REQUEST))
    return w, m.when(mine, mode=jnp.where(can, ready, int(Mode.RECORD)), head=head, taken=taken)


def record(w: Any, m: Machine, in_use: Scalar) -> Pair:
    """The step's occupancy, once every request that computes in it has its blocks; `in_use`: blocks that they hold."""
    mine = m.at(Mode.RECORD)
    row = jnp.where(mine, m.samples, w.samples.shape[0] // SAMPLE - 1)
    sums = (m.prompt_tokens, m.hit_tokens, m.put_off, m.preemptions)
    for column, value in enumerate((m.step, in_use, m.active, m.waiting, *sums)):
        w = w.write("samples", value, row * SAMPLE + column)
    m = m.when(mine, prompt_tokens=0, hit_tokens=0, put_off=0, preemptions=0)
    return w, m.when(mine, mode=int(Mode.COMPUTE), samples=m.samples + 1, cursor=0, kept=0)


def compute(w: Any, trace: Trace, m: Machine) -> Pair:
    """The step's computation, up to the next request whose last token is out; those that stay close ranks."""
    mine = m.at(Mode.COMPUTE)
    spare = w.spare_slot

    def body(v: Any, local: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        cursor, kept, slot, computed, tokens, place, *_ = local
        v = v.write("order", slot, place).set_running(slot, computed=computed, tokens=tokens, scheduled=0)
        inside = cursor < m.active
        slot = jnp.where(inside, v.read("order", jnp.where(inside, cursor, 0)), spare)
        request, computed, tokens, new = v.get_running(
            slot, Running.REQUEST, Running.COMPUTED, Running.TOKENS, Running.SCHEDULED
        )
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
    w, local = loop(lambda c: c[6], body, w, start, writes=("order", "running_words"))
    cursor, kept, slot, _, _, _, stays, ends = local
    cursor -= ~stays
    m = m.when(mine, cursor=cursor, kept=kept, asked=slot)
    m = m.when(mine & ends, mode=int(Mode.FINISH))
    return w, m.when(mine & ~ends, mode=int(Mode.BEGIN), active=kept, step=m.step + 1)


class Current(NamedTuple):
    """The request that the operation is about, as it was before. `asking`: whether it is a running one that grows."""

    slot: Scalar
    request: Scalar
    computed: Scalar
    tokens: Scalar
    shared_boundary: Scalar
    preemptions: Scalar
    recomputed: Scalar
    recovered: Scalar
    waiting_tokens: Scalar
    asking: Scalar


def at_hand(w: Any, m: Machine) -> tuple[Any, Current]:
    """The request that the mode is about; the spare slot's where it is about none."""
    asking, preempting, requesting = m.at(Mode.ASK), m.at(Mode.PREEMPT), m.at(Mode.REQUEST)
    candidate = requesting | m.at(Mode.FIND) | m.at(Mode.TAKE)
    busy = asking | preempting | candidate | m.at(Mode.FINISH)
    busy = busy | m.at(Mode.SETTLE) | m.at(Mode.HELD) | m.at(Mode.GIVE_UP)
    w, (victim,) = peek(preempting, lambda v: (v.read("order", m.active - 1),), w, reads=("order",), default=(0,))
    slot = jnp.where(candidate, m.candidate, jnp.where(preempting, victim, m.asked))
    slot = jnp.where(busy, slot, w.spare_slot)
    columns = (Running.REQUEST, Running.COMPUTED, Running.TOKENS, Running.SHARED_BOUNDARY)
    w, (request, *fields) = peek(
        busy, lambda v: v.get_running(slot, *columns), w, reads=("running_words",), default=(0,) * len(columns)
    )
    request = jnp.where(candidate, m.head, request)
    past = (RequestResult.PREEMPTIONS, RequestResult.RECOMPUTED, RequestResult.RECOVERED, RequestResult.TOKENS)
    w, results = peek(
        busy, lambda v: v.get_result(request, *past), w, reads=("request_results",), default=(0,) * len(past)
    )
    return w, Current(slot, request, *fields, *results, asking=asking)


def fail(m: Machine, ok: Scalar, status: Scalar, refused: Scalar) -> Machine:
    """The schedule stands still where the cache did not do what was asked; allocations may be `refused` blocks."""
    asks = m.at(Mode.ASK) | m.at(Mode.TAKE) | m.at(Mode.HELD)
    others = m.at(Mode.REQUEST) | m.at(Mode.FIND) | m.at(Mode.PREEMPT) | m.at(Mode.FINISH)
    others = others | m.at(Mode.SETTLE) | m.at(Mode.GIVE_UP)
    return m.when(~ok & ((asks & ~refused) | others), mode=int(Mode.FAILED), status=status)


def after_running(
    w: Any,
    m: Machine,
    current: Current,
    granted: Scalar,
    refused: Scalar,
    *,
    finishing: Scalar | None = None,
    others: Scalar = False,
) -> tuple[Any, Machine, Scalar, Scalar]:
    """Transition of running requests by the cache's answer.

    Args:
      w: the workspace.
      m: the schedule.
      current: the request that the operation was about.
      granted: whether it was performed.
      refused: whether an allocation was refused blocks.
      finishing: whether it was the last of a request that finished, which keeps its slot; None: of one that leaves it.
      others: whether requests that do not run hold blocks.

    Returns:
      The workspace, the schedule, whether a running request got its blocks, and whether one left its slot.
    """
    asking, preempting, keeps = m.at(Mode.ASK), m.at(Mode.PREEMPT), finishing is not None
    finishing = m.at(Mode.FINISH) if finishing is None else finishing
    got, denied = asking & granted, asking & refused
    w = w.write_if(got, "running_words", m.new, w.running_word(m.asked, Running.SCHEDULED))
    m = m.when(got, cursor=m.cursor + 1, budget=m.budget - m.new, mode=int(Mode.GROW))
    m = m.when(denied, refused=1, mode=int(Mode.PREEMPT))
    preempted, finished = preempting & granted, finishing & granted
    alone = preempted & (m.active == 1) & ~jnp.asarray(others)
    again = preempted & ~alone
    w = w.set_result(
        jnp.where(again, current.request, w.spare_request), preemptions=current.preemptions + 1, tokens=current.tokens
    )
    w = w.write("stack", current.request, jnp.where(again, m.stacked, w.spare_request))
    gone = alone | finished
    ending = jnp.where(alone, int(Ending.NEVER_FITS), int(Ending.FINISHED))
    w = w.set_result(jnp.where(gone, current.request, w.spare_request), ended=m.step, outcome=ending)
    left = preempted | finished
    vacated = preempted if keeps else left
    w = w.write("vacant", current.slot, jnp.where(vacated, m.vacant, w.spare_slot))
    m = m.when(vacated, vacant=m.vacant + 1)
    m = m.when(gone, ended=m.ended + 1)
    m = m.when(again, stacked=m.stacked + 1, waiting=m.waiting + 1, preemptions=m.preemptions + 1)
    last = m.active - 1 == m.cursor
    m = m.when(preempted, mode=jnp.where(last, int(Mode.RECORD), int(Mode.GROW)), active=m.active - 1)
    m = m.when(finished, mode=int(Mode.COMPUTE), cursor=m.cursor + 1)
    return w, m, got, left


def after_request(w: Any, m: Machine, current: Current, granted: Scalar) -> tuple[Any, Machine, Scalar]:
    """The head of the queue gets its slot if the cache accepted it; also returns the slot, the spare one if not."""
    accepted = m.at(Mode.REQUEST) & granted
    slot = jnp.where(accepted, m.candidate, w.spare_slot)
    w = w.set_running(slot, request=m.head, computed=0, tokens=current.waiting_tokens, scheduled=0)
    return w, m.when(accepted, candidate_request=m.head, mode=int(Mode.ADMIT)), slot


def after_taking(w: Any, m: Machine, current: Current, granted: Scalar, never: Scalar, not_now: Scalar) -> Pair:
    """Transition of the head of the queue, which asked for blocks for `Machine.new` tokens after `Machine.hit`."""
    m = m.when(not_now, put_off=1, mode=int(Mode.RECORD))
    w, m = _admit(w, m, current, granted)
    w = w.set_result(jnp.where(never, m.head, w.spare_request), ended=m.step, outcome=int(Ending.NEVER_FITS))
    again = m.stacked > 0
    m = m.when(never, ended=m.ended + 1)
    return w, m.when(
        granted | never,
        mode=int(Mode.ADMIT),
        waiting=m.waiting - 1,
        candidate_request=-1,
        taken=jnp.where(again, m.taken, m.head + 1),
        stacked=jnp.where(again, m.stacked - 1, 0),
    )


def _admit(w: Any, m: Machine, current: Current, granted: Scalar) -> Pair:
    """The candidate runs; another slot takes the next candidate."""
    spare = w.spare_slot
    w = w.write("order", m.candidate, jnp.where(granted, m.active, spare))
    w = w.write_if(granted, "running_words", m.hit + m.new, w.running_word(m.candidate, Running.SCHEDULED))
    first = granted & (current.preemptions == 0)
    back = granted & ~first
    w = w.set_result(jnp.where(first, m.head, w.spare_request), hit=m.hit, admitted=m.step)
    w = w.set_result(
        jnp.where(back, m.head, w.spare_request),
        recomputed=current.recomputed + current.tokens,
        recovered=current.recovered + m.hit,
    )
    w, (next_slot,) = peek(granted, lambda v: (v.read("vacant", m.vacant - 1),), w, reads=("vacant",), default=(0,))
    m = m.when(first, prompt_tokens=m.prompt_tokens + current.tokens, hit_tokens=m.hit_tokens + m.hit)
    m = m.when(granted, active=m.active + 1, budget=m.budget - m.new, candidate=next_slot, vacant=m.vacant - 1)
    return w, m
