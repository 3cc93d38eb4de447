"""Effect of each operation on a cache: its checks, its rules in order, its answer.

A refused operation takes nothing and says why. The one exception is vLLM 0.33's: an allocation that is refused for
want of room has already given back what the request cannot read any more (`admit_or_give_back`).
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hkv.dialects.vllm.rules import admit, hit, rows, unwritten
from hkv.dialects.vllm.rules import allocate as allocation
from hkv.dialects.vllm.rules import allocate as eviction
from hkv.dialects.vllm.rules import register as registration
from hkv.dialects.vllm.rules import retire as retirement
from hkv.dialects.vllm.rules.operations import RESULT_FRONT, Argument, Code, Flag
from hkv.dialects.vllm.rules.parameters import CacheField, View
from hkv.dialects.vllm.rules.rows import Demand
from hkv.machine.operations import Payload
from hkv.state.loops import Scalar, ceil_divide, fori_loop, loop, read, when
from hkv.state.state import Request, Row
from hkv.state.status import Status
from hkv.state.workspace import Workspace

EMPTY, WAITING, RUNNING = 0, 1, 2
"""Values of `Request.LIVE`."""


class Op(NamedTuple):
    """The operation at hand, and what its request knew of itself before. Fields beyond `row` are as in `Request`."""

    code: Scalar
    slot: Scalar
    exists: Scalar
    row: tuple[Scalar, ...]
    live: Scalar
    computed: Scalar
    tokens: Scalar
    in_flight: Scalar
    keys: Scalar
    hit: Scalar
    hit_clock: Scalar
    granted: Scalar
    noop_until: Scalar

    def argument(self, argument: Argument) -> Scalar:
        """One of its arguments."""
        return self.row[argument]

    def flag(self, flag: Flag) -> Scalar:
        """True if a flag is up."""
        return (self.row[Argument.FLAGS] & int(flag)) != 0

    def either(self, said: Flag, flag: Flag, known: Scalar) -> Scalar:
        """The value of `flag` where the flag `said` is up, else `known`."""
        return jnp.where(self.flag(said), self.flag(flag), known)


class Answer(NamedTuple):
    """Columns of the result; `reported`: True if rows are to be reported too."""

    status: Scalar
    value: Scalar
    shared_prefix: Scalar
    reported: Scalar
    copies: Scalar

    def refuse(self, condition: Scalar, status: Status) -> Answer:
        """The answer with another status where the condition holds and nothing was refused before."""
        return self._replace(status=jnp.where(condition & (self.status == int(Status.OK)), int(status), self.status))

    @property
    def ok(self) -> Scalar:
        """True if nothing was refused so far."""
        return self.status == int(Status.OK)


_FETCHED = (
    Request.LIVE,
    Request.COMPUTED,
    Request.TOKENS,
    Request.IN_FLIGHT,
    Request.KEYS,
    Request.HIT,
    Request.HIT_CLOCK,
    Request.GRANTED,
    Request.NOOP_UNTIL,
)


def fetch(work: Workspace, table: jax.Array, base: Scalar, code: Scalar) -> tuple[Workspace, Op]:
    """Reads an operation and its request. A slot that does not exist becomes the spare one."""
    row = tuple(read(table, base + column) for column in range(len(Argument)))
    asked = row[Argument.SLOT]
    # Checked, never clamped: a wrong slot must not become a neighbour's.
    exists = (asked >= 0) & (asked < work.spare_slot)
    slot = jnp.where(exists, asked, work.spare_slot)
    work, fields = work.peek_request(code != int(Code.END), slot, *_FETCHED)
    return work, Op(code, slot, exists, row, *fields)


_HARMLESS = {
    Code.END,
    Code.REQUEST,
    Code.APPEND,
    Code.LOOKUP,
    Code.ADVANCE,
    Code.RETIRE,
    Code.STEP,
    Code.COMPUTED,
    Code.FOUND,
}


def needs_slot(code: Scalar) -> Scalar:
    """True if an operation is about one request."""
    return (code != int(Code.EVICT)) & (code != int(Code.RESET)) & (code != int(Code.STEP)) & (code != int(Code.COPIES))


def may_change_hits(code: Scalar) -> Scalar:
    """True if a lookup before the operation may find something else after it."""
    # A hit is adopted only if nothing may have changed since its lookup: the blocks found could have been evicted.
    return functools.reduce(operator.or_, (code == int(other) for other in set(Code) - _HARMLESS))


def arrive(work: Workspace, view: View, op: Op, answer: Answer, payload: Payload) -> tuple[Workspace, Answer]:
    """REQUEST and APPEND: a request's tokens and prefix keys."""
    new = op.code == int(Code.REQUEST)
    mine = answer.ok & (new | (op.code == int(Code.APPEND)))
    answer = answer.refuse(mine & new & (op.live != EMPTY), Status.NOT_WAITING)
    answer = answer.refuse(mine & ~new & (op.live == EMPTY), Status.NO_SUCH_SLOT)
    count, start = op.argument(Argument.KEYS), op.argument(Argument.KEY_START)
    before = jnp.where(new, 0, op.keys)
    outside = (count < 0) | (start < 0) | (start + count > payload.size) | (op.argument(Argument.TOKENS) < 0)
    answer = answer.refuse(mine & outside, Status.OUT_OF_RANGE)
    answer = answer.refuse(mine & (before + count > work.sizes.buckets.chain), Status.KEYS_FULL)
    mine = mine & answer.ok
    limit = work.sizes.buckets.keys

    def copy(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        i, unknown = local
        key = read(payload.numbers, payload.base + start + i)
        w = w.write("chains", key, w.chain(op.slot) + before + i)
        return w, (i + 1, unknown + ((key < 0) | (key >= limit)))

    end = jnp.where(mine, count, 0)
    work, (_, unknown) = loop(lambda c: c[0] < end, copy, work, (0, 0), writes=("chains",))
    answer = answer.refuse(mine & (unknown > 0), Status.KEYS_FULL)
    done = mine & (unknown == 0)

    def note(w: Workspace) -> Workspace:
        for field in Request:
            fresh = {Request.LIVE: WAITING, Request.HIT: -1}.get(field, 0)
            if field == Request.TOKENS:
                value = jnp.where(new, 0, op.tokens) + op.argument(Argument.TOKENS)
            elif field == Request.KEYS:
                value = before + count
            elif field == Request.PROMPT:
                value = op.argument(Argument.TOKENS)
            else:
                value = jnp.int32(fresh)
            # APPEND changes tokens and keys alone; all other fields are a new request's.
            place = op.slot if field in (Request.TOKENS, Request.KEYS) else jnp.where(new, op.slot, spare)
            w = w.set(place, field, value)
        return _clear_rows(w, view, op.slot, new)

    spare = work.spare_slot
    return when(done, note, work, writes=("requests",)), answer


def _clear_rows(work: Workspace, view: View, slot: Scalar, enabled: Scalar) -> Workspace:
    def body(i: Scalar, w: Workspace) -> Workspace:
        return retirement.clear_row(w, slot, i)

    groups = jnp.where(enabled, view.num_groups, 0)
    return fori_loop(0, groups, body, work, writes=("requests",))


def lookup(work: Workspace, view: View, op: Op, answer: Answer) -> tuple[Workspace, Answer]:
    """LOOKUP: the hit rule."""
    mine = answer.ok & (op.code == int(Code.LOOKUP))
    answer = answer.refuse(mine & (op.live == EMPTY), Status.NO_SUCH_SLOT)
    answer = answer.refuse(mine & (op.live == RUNNING), Status.NOT_WAITING)
    mine = mine & answer.ok

    def search(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        w, found = hit.longest_hit(w, view, op.slot, local[0], op.argument(Argument.TOKENS))
        w = w.set(op.slot, Request.HIT, jnp.where(found.fails, -1, found.tokens))
        w = w.set(op.slot, Request.HIT_CLOCK, w.clock)
        return w, (False, found.tokens, found.shared_prefix, found.fails)

    work, (_, tokens, shared, fails) = loop(lambda c: c[0], search, work, (mine, 0, 0, False), writes=hit.WRITES)
    return work, answer.refuse(fails, Status.ENGINE_FAILURE)._replace(
        value=jnp.where(mine, tokens, answer.value),
        shared_prefix=jnp.where(mine, shared, answer.shared_prefix),
        reported=answer.reported | (mine & (tokens > 0)),
    )


class AllocationPlan(NamedTuple):
    """An ALLOCATE that is known to be legal. Lengths are in tokens."""

    adopted: Scalar
    external: Scalar
    new: Scalar
    arrived: Scalar
    total: Scalar
    main: Scalar
    slots: Scalar
    granted: Scalar
    grows: Scalar
    is_noop: Scalar


def _plan(w: Workspace, view: View, op: Op, mine: Scalar, answer: Answer) -> tuple[Workspace, Answer, AllocationPlan]:
    waiting = op.live == WAITING
    fresh = waiting & (op.hit_clock == w.clock)
    asked, external = op.argument(Argument.HIT), op.argument(Argument.EXTERNAL)
    adopted = jnp.where(asked < 0, jnp.where(fresh, jnp.maximum(op.hit, 0), 0), asked)
    arrived = op.computed + adopted + external
    new = op.argument(Argument.NEW)
    # -1: all that is left, as a scheduler without a budget asks.
    new = jnp.where(new < 0, jnp.maximum(op.tokens - arrived, 0), new)
    longest = view.whole(CacheField.MAX_MODEL_LEN)
    total = jnp.minimum(arrived, longest)
    main = total + new
    slots = jnp.minimum(main + op.argument(Argument.LOOKAHEAD), longest)
    answer = answer.refuse(mine & (op.live == EMPTY), Status.NO_SUCH_SLOT)
    answer = answer.refuse(mine & (adopted == 0) & (external == 0) & (new == 0), Status.NOTHING_TO_ALLOCATE)
    answer = answer.refuse(mine & (adopted > 0) & ~(fresh & (adopted == op.hit)), Status.STALE_HIT)
    answer = answer.refuse(mine & (external > 0) & ~waiting, Status.NOT_WAITING)
    longest_row = jnp.maximum(jnp.maximum(slots, main), jnp.maximum(arrived, op.argument(Argument.TOKENS)))
    # By the smallest block of all groups, so that one comparison serves: a row's room is the same in each group.
    blocks = ceil_divide(longest_row, view.whole(CacheField.LEAST_BLOCK))
    blocks += view.whole(CacheField.MOST_SCRATCH)
    answer = answer.refuse(mine & (blocks > w.sizes.buckets.row), Status.ROW_FULL)
    w, waits = unwritten.must_wait(w, view, op.slot, adopted, op.flag(Flag.ROWS), mine & answer.ok)
    answer = answer.refuse(waits, Status.NOT_YET_WRITTEN)
    plan = AllocationPlan(
        adopted,
        external,
        new,
        arrived,
        total,
        main,
        slots,
        mine & answer.ok,
        jnp.bool_(False),
        _is_noop(w, op, slots, adopted + external),
    )
    return w, answer, plan


def admit_or_give_back(
    work: Workspace, view: View, op: Op, answer: Answer, admits: bool = True
) -> tuple[Workspace, Answer, AllocationPlan]:
    """ALLOCATE: the admission rule, twice; a running request retires in between. RETIRE and FREE: only that middle.

    vLLM 0.33 `KVCacheManager.allocate_slots` frees the skipped blocks before it knows whether the next tokens fit; if
    the allocation is refused then, they stay freed. First it asks, where the whole request must fit, whether it does.

    Without `admits` nothing is compiled for ALLOCATE.
    """
    allocating, freeing, retiring = (op.code == int(code) for code in (Code.ALLOCATE, Code.FREE, Code.RETIRE))
    mine = answer.ok & allocating
    ending = answer.ok & (freeing | retiring)
    answer = answer.refuse(ending & ~_holds(op, retiring), Status.NOT_RUNNING)
    ending = ending & answer.ok
    work, answer, plan = _plan(work, view, op, mine, answer)
    work = _note_arguments(work, op, mine)
    waiting = op.live == WAITING
    longest = view.whole(CacheField.MAX_MODEL_LEN)
    kept_free = op.either(Flag.STATUS, Flag.WAITING, waiting) & op.either(Flag.OTHERS, Flag.SCHEDULED, work.running > 0)
    # vLLM leaves the watermark free only for requests that are not running yet, and only if something else runs: else
    # it would never start.
    watermark = jnp.where(kept_free, view.whole(CacheField.WATERMARK), 0)
    whole = jnp.minimum(op.tokens, longest)
    processed = jnp.where(retiring, op.argument(Argument.TOKENS), plan.total - op.argument(Argument.IN_FLIGHT))
    processed = jnp.maximum(processed, 0)
    # A running request retires before it asks, `remove_skipped_blocks` in step 3 of `allocate_slots`: what it gives
    # back may be what it gets.
    given_back = ending | (plan.granted & ~waiting)

    def gate(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        first = local[0] == 0
        w = retirement.give_back(w, view, op.slot, processed, freeing, allocating, given_back & ~first)
        demand = Demand(
            slot=op.slot,
            slots=jnp.where(first, whole, plan.slots),
            main=jnp.where(first, whole, plan.main),
            total=jnp.where(first, plan.total, plan.arrived),
            hit=plan.adopted,
            external=plan.external,
            encoder=op.argument(Argument.TOKENS),
            capped=first,
        )
        limit = w.free - watermark - jnp.where(first, 0, op.argument(Argument.RESERVED))
        if not admits:
            return w, (local[0] + 1, True, False, False)
        w, verdict = admit.fits(w, view, demand, limit, plan.granted)
        return w, (local[0] + 1, verdict.fits, verdict.fails, verdict.grows)

    busy = ending | (plan.granted & ~plan.is_noop)
    # Gate 0 asks whether the whole request fits, gate 1 whether its next tokens do. Without `must_fit` it begins at
    # 1; an allocation that needs nothing passes both by.
    start = jnp.where(busy, jnp.where(plan.granted & _must_fit(op), 0, 1), 2)
    work, (gates, ok, fails, grows) = loop(
        lambda c: (c[0] < 2) & c[1], gate, work, (start, True, False, False), writes=retirement.WRITES
    )
    # `gates` counts the gates passed through: 1 says that the first one refused.
    answer = answer.refuse(~ok & (gates == 1), Status.NO_ROOM_FOR_SEQUENCE).refuse(~ok, Status.NO_ROOM)
    answer = answer.refuse(fails, Status.ENGINE_FAILURE)
    granted = plan.granted & answer.ok
    return work, answer, plan._replace(granted=granted, grows=granted & grows)


def _holds(op: Op, retiring: Scalar) -> Scalar:
    """True if a request has blocks to give back; a live scheduler retires those of a request that waits, too."""
    return (op.live == RUNNING) | (retiring & op.flag(Flag.LIVE) & (op.live == WAITING))


def _is_noop(work: Workspace, op: Op, slots: Scalar, arriving: Scalar) -> Scalar:
    """True if an ALLOCATE needs nothing but to be granted, as was noted before (`hkv.dialects.vllm.rules.noop`)."""
    quiet = (op.live == RUNNING) & (arriving == 0) & (slots <= op.noop_until) & ~_must_fit(op) & ~op.flag(Flag.WAITING)
    quiet = quiet & (op.argument(Argument.TOKENS) == 0)
    return quiet & (op.argument(Argument.RESERVED) <= work.free)


def _must_fit(op: Op) -> Scalar:
    return op.argument(Argument.MUST_FIT) != 0


def _note_arguments(work: Workspace, op: Op, mine: Scalar) -> Workspace:
    """Notes the arguments of an ALLOCATE that hold for its request whether it is granted or not."""
    live = mine & (op.live != EMPTY)
    # Also of a refused allocation: a scheduler sets them on the request before it asks.
    shared, spare = op.argument(Argument.SHARED_PREFIX), work.spare_slot
    work = work.set(jnp.where(live, op.slot, spare), Request.IN_FLIGHT, op.argument(Argument.IN_FLIGHT))
    return work.set(jnp.where(live & (shared >= 0), op.slot, spare), Request.SHARED_PREFIX, shared)


ALLOCATE_WRITES = tuple(dict.fromkeys((*allocation.ADOPT_WRITES, *allocation.GROW_WRITES)))
"""Arrays that taking the blocks writes."""


def allocate(
    work: Workspace, view: View, op: Op, answer: Answer, plan: AllocationPlan
) -> tuple[Workspace, Answer, Scalar]:
    """ALLOCATE once it is granted, without its registration; and the number of tokens to register, -1 for no
    registration."""
    demand = Demand(
        slot=op.slot,
        slots=plan.slots,
        main=plan.main,
        total=plan.arrived,
        hit=plan.adopted,
        external=plan.external,
        encoder=op.argument(Argument.TOKENS),
        capped=jnp.bool_(False),
    )
    adopting = plan.granted & ((plan.adopted > 0) | (plan.external > 0))

    def take(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, ...]]:
        w = allocation.adopt_hit(w, view, demand, adopting)
        w, copies = allocation.grow(w, view, demand, plan.grows)
        return w, (False, copies)

    work, (_, copies) = loop(lambda c: c[0], take, work, (adopting | plan.grows, 0), writes=ALLOCATE_WRITES)
    spare = work.spare_slot
    done = jnp.where(plan.granted, op.slot, spare)
    ahead = plan.granted & (op.argument(Argument.ADVANCE) != 0)
    for place, field, value in (
        (jnp.where(adopting, op.slot, spare), Request.KNOWN, 1),
        (done, Request.LIVE, RUNNING),
        (done, Request.HIT, -1),
        (done, Request.GRANTED, plan.main),
        (jnp.where(ahead, op.slot, spare), Request.COMPUTED, plan.main),
    ):
        work = work.set(place, field, value)
    waiting = op.live == WAITING
    work = unwritten.note_grant(work, op.slot, op.computed + plan.adopted, waiting, plan.granted)
    work = work.replace(running=work.running + (plan.granted & waiting))
    # Drafts and lookahead are not certain: `min(num_computed + num_new, request.num_tokens)`.
    certain = jnp.where(op.argument(Argument.DELAY) != 0, -1, jnp.minimum(plan.main, op.tokens))
    answer = answer._replace(
        value=jnp.where(plan.granted, plan.adopted, answer.value), reported=answer.reported | plan.grows, copies=copies
    )
    return work, answer, jnp.where(plan.granted & ~plan.is_noop, certain, -1)


def register(work: Workspace, view: View, op: Op, answer: Answer, certain: Scalar) -> tuple[Workspace, Answer]:
    """Registers blocks after an ALLOCATE or a COMMIT: those of the first `certain` tokens; nothing if below 0."""

    def once(w: Workspace, _: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        w, fails = registration.register(w, view, op.slot, certain, op.computed, certain >= 0)
        return w, (False, fails)

    work, (_, fails) = loop(lambda c: c[0], once, work, (certain >= 0, False), writes=registration.WRITES)
    return work, answer.refuse(fails, Status.ENGINE_FAILURE)


def step(work: Workspace, op: Op, answer: Answer) -> Workspace:
    """STEP: a new scheduling step begins."""
    return work.replace(steps=work.steps + (answer.ok & (op.code == int(Code.STEP))))


def commit(op: Op, answer: Answer, certain: Scalar) -> tuple[Answer, Scalar]:
    """COMMIT: how many tokens to register; -1 for no registration."""
    mine = answer.ok & (op.code == int(Code.COMMIT))
    answer = answer.refuse(mine & (op.live != RUNNING), Status.NOT_RUNNING)
    tokens = op.argument(Argument.TOKENS)
    beyond = (tokens > jnp.minimum(op.tokens, op.computed)) & ~op.flag(Flag.LIVE)
    answer = answer.refuse(mine & ((tokens < 0) | beyond), Status.NOT_COMPUTED)
    return answer, jnp.where(mine & answer.ok, tokens, certain)


def advance(work: Workspace, op: Op, answer: Answer) -> tuple[Workspace, Answer]:
    """ADVANCE: more tokens are computed."""
    mine = answer.ok & (op.code == int(Code.ADVANCE))
    answer = answer.refuse(mine & (op.live != RUNNING), Status.NOT_RUNNING)
    tokens = op.argument(Argument.TOKENS)
    answer = answer.refuse(mine & ((tokens < 0) | (op.computed + tokens > op.granted)), Status.NOT_COMPUTED)
    place = jnp.where(mine & answer.ok, op.slot, work.spare_slot)
    return work.set(place, Request.COMPUTED, op.computed + tokens), answer


def leave(work: Workspace, op: Op, answer: Answer) -> tuple[Workspace, Answer]:
    """FREE and POP, once its rows are empty: the request waits again. DROP: its slot is empty."""
    freeing = (op.code == int(Code.FREE)) | (op.code == int(Code.POP))
    dropping = op.code == int(Code.DROP)
    mine = answer.ok & (freeing | dropping)
    answer = answer.refuse(mine & (op.live == EMPTY), Status.NO_SUCH_SLOT)
    answer = answer.refuse(mine & dropping & (op.live != WAITING), Status.NOT_WAITING)
    mine = mine & answer.ok

    def gone(w: Workspace) -> Workspace:
        for field in (Request.COMPUTED, Request.IN_FLIGHT, Request.KNOWN, Request.GRANTED, Request.NOOP_UNTIL):
            w = w.set(op.slot, field, 0)
        w = w.set(op.slot, Request.HIT, -1)
        w = w.replace(running=w.running - freeing)
        return w.set(op.slot, Request.LIVE, jnp.where(freeing, WAITING, EMPTY))

    return when(mine, gone, work, writes=("requests", "running")), answer


def evict(work: Workspace, view: View, op: Op, answer: Answer, payload: Payload) -> tuple[Workspace, Answer]:
    """EVICT: the eviction rule."""
    mine = answer.ok & (op.code == int(Code.EVICT))
    start, count = op.argument(Argument.KEY_START), op.argument(Argument.KEYS)
    outside = (count < 0) | (start < 0) | (start + count > payload.size)
    inside = mine & ~outside
    work, unknown = eviction.evict(
        work, view, payload.numbers, payload.base + start, jnp.where(inside, count, 0), inside
    )
    answer = answer.refuse(mine & (outside | (unknown > 0)), Status.OUT_OF_RANGE)
    return work, answer._replace(value=jnp.where(mine, unknown, answer.value))


def reset(work: Workspace, view: View, op: Op, answer: Answer) -> tuple[Workspace, Answer]:
    """RESET: the prefix cache forgets everything, unless a block is in use."""
    mine = answer.ok & (op.code == int(Code.RESET))
    work, done = eviction.reset(work, view, mine)
    answer = answer.refuse(mine & ~done, Status.IN_USE)
    return work, answer._replace(value=jnp.where(mine, done.astype(jnp.int32), answer.value))


def report(work: Workspace, view: View, op: Op, answer: Answer, place: Scalar) -> Workspace:
    """Writes which entries of its rows an operation was about to the results, and their ids where there is room."""
    looked_up = op.code == int(Code.LOOKUP)

    def body(group: Scalar, w: Workspace) -> Workspace:
        w, (length, first, hit_first, new_first) = w.peek_row(
            group >= 0, op.slot, group, Row.LENGTH, Row.FIRST, Row.HIT_FIRST, Row.NEW_FIRST
        )
        found = admit.hit_blocks(view, group, answer.value)
        # Of a lookup, the entries found; of an allocation, those that are new.
        start = jnp.where(looked_up, jnp.minimum(hit_first, found), jnp.minimum(new_first, length))
        end = jnp.where(looked_up, found, length)
        column = RESULT_FRONT + 2 * group
        w = w.write("results", start, w.result(place, column))
        w = w.write("results", end, w.result(place, column + 1))
        first = jnp.where(looked_up, start, rows.start(view, group, first))
        w = allocation.report_row(w, op.slot, group, start, first, end)
        return w

    groups = jnp.where(answer.reported, view.num_groups, 0)
    return fori_loop(0, groups, body, work, writes=("rows", "requests", "results", "ids", "num_ids"))
