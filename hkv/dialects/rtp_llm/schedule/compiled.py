"""RTP-LLM's part of the compiled schedule: a trace replayed on the device, decision for decision as `RtpReplay` does.

`hkv.replay.schedule_loop` has the parts of a trip that every cache shares.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.rtp_llm import machine as rtp_cache
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines.jax_reading import RtpReader
from hkv.dialects.rtp_llm.log import RtpState
from hkv.dialects.rtp_llm.rules import transitions
from hkv.dialects.rtp_llm.rules.operations import COLUMNS, RtpArgument, RtpCode
from hkv.dialects.rtp_llm.rules.parameters import CacheField, RtpParameters, RtpView
from hkv.dialects.rtp_llm.rules.transitions import RtpAnswer, RtpOp
from hkv.dialects.rtp_llm.schedule import compiled_history
from hkv.dialects.rtp_llm.schedule.agreement import REASONS, RtpRecorder
from hkv.dialects.rtp_llm.schedule.compiled_history import (
    OWN_ARRAYS,
    VERDICTS,
    RtpResident,
    RtpScheduleWorkspace,
    RunTotals,
)
from hkv.machine import native_loops
from hkv.machine.operations import Payload
from hkv.replay import schedule_loop
from hkv.replay.dispatches import STEPS, Dispatches, Incoming, Sizes, programs, rounded, trace_arrays
from hkv.replay.schedule import Schedule
from hkv.replay.schedule_loop import Current
from hkv.replay.schedule_state import Arriving, Machine, Mode, Number, Running, Trace, flat, shaped
from hkv.state.loops import Scalar, ceil_divide, divide, loop, peek
from hkv.state.pooled import Counter, PoolCounter, PooledBuckets, PooledRequest, PooledState
from hkv.state.pooled_workspace import ARRAYS, PooledSizes
from hkv.state.status import Status

NAMES = ("granted", "permanent", "retryable", "internal_error")
"""Names of `VERDICTS` in logs."""

REPORTED = {int(status): name for status, name in zip(VERDICTS, NAMES, strict=True)}
"""The same by what a replay reports."""


Work: TypeAlias = Any
"""An `RtpScheduleWorkspace`, which the rules return as what they know of it."""

ALLOCATIONS = (RtpCode.MALLOC, RtpCode.FREE)


def sizes_of(config: RtpConfig, schedule: Schedule, trace: Incoming) -> Sizes:
    """Sizes that a replay fits, rounded up so that few executables serve many."""
    longest = trace.longest(schedule.max_model_len)
    groups = rounded(len(config.policies), 1)
    row = rounded(-(-longest // config.block_size) + schedule.lookahead + 3, 64)
    buckets = PooledBuckets(
        blocks=rounded(max(config.num_blocks), 1024),
        groups=groups,
        pools=groups,
        requests=rounded(trace.slots(schedule.max_running), 4),
        sequences=1,
        row=row,
        chain=row,
        keys=rounded(max(1, trace.num_keys), 1024),
        names=rtp_cache.names_of(config),
    )
    return Sizes(buckets, rounded(trace.count, 64), rounded(len(trace.keys), 4096))


def ids_of_a_step(sizes: Sizes) -> int:
    """Most integers that one step reports: lists of all running requests twice, and of the queue's head."""
    buckets = sizes.buckets
    lists = buckets.groups * (1 + buckets.row)
    return 2 * (buckets.requests + 1) * (2 + lists) + sizes.requests * (2 + buckets.groups)


class RtpCompiledReplay(Dispatches):
    """A trace, a cache and a schedule, replayed in as few dispatches as steps allow.

    Reported of each allocation: its status, the tokens reused, and for each group the length of the request's list and
    its blocks, 0 for holes.
    """

    def __init__(
        self,
        config: RtpConfig,
        schedule: Schedule,
        trace: Incoming,
        *,
        caching: bool = True,
        sizes: Sizes | None = None,
        diagnose: bool = True,
        ids: int = 0,
        steps: int = STEPS,
    ) -> None:
        self.config = config
        self._num_keys, self._diagnose = trace.num_keys, diagnose
        sizes = sizes or sizes_of(config, schedule, trace)
        parameters, state = rtp_cache.init(config, sizes.buckets)
        reserve = schedule.lookahead + 1 if schedule.lookahead else 0
        more = {"lookahead": reserve, "caching": int(caching), "diagnose": int(diagnose)}
        arrays = trace_arrays(schedule, trace, sizes.requests, sizes.keys, **more)
        inputs = Trace(*arrays)  # type: ignore[arg-type]
        resident = compiled_history.begin(state, sizes.requests, steps)
        super().__init__(program(ids), trace, len(config.policies), ids, parameters, inputs, resident)

    @property
    def totals(self) -> RunTotals:
        """Counts of the replay so far, as NumPy integers."""
        return RunTotals(*np.asarray(self._resident.totals))

    @property
    def evictions(self) -> int:
        """Blocks that were evicted."""
        return int(np.asarray(self._resident.cache.counters)[Counter.EVICTIONS])

    @property
    def duplicates(self) -> int:
        """Blocks that were not cached because another one was there."""
        return int(self.totals.duplicates)

    def left(self) -> dict[str, Any]:
        """Fields of the outcome, once it has run."""
        return {**self.recorder().left(), "state": self.state}

    def state(self) -> RtpState:
        """Everything of the cache that can be compared; keys are the trace's numbers, requests are not listed."""
        return RtpReader(self.config).state(jax.device_get(self._resident.cache), {}, range(self._num_keys))

    def recorder(self) -> RtpRecorder:
        """Everything that happened, as the plain schedule's observer would have recorded it."""
        recorder, totals = RtpRecorder(self.config, None, self, lambda: None), self.totals
        self._record(recorder, REASONS if self._diagnose else ())
        recorder.cached_peak = int(totals.cached_peak)
        for place, kind in ((0, "admission"), (len(VERDICTS), "growth")):
            counts = zip(NAMES, totals[place : place + len(VERDICTS)], strict=True)
            recorder.verdicts[kind] = collections.Counter({name: int(count) for name, count in counts if count})
        return recorder


# The program.


def _dispatch(
    parameters: RtpParameters, trace: Trace, resident: RtpResident, *, room: int
) -> tuple[RtpResident, jax.Array, jax.Array]:
    native_loops.warn_if_interpreted()
    cache, zero = resident.cache, jnp.int32(0)
    buckets = cache.buckets
    arrays, own = flat(cache, ARRAYS), flat(resident, OWN_ARRAYS)
    outputs = {"ids": jnp.zeros(room + 1, jnp.int32), "results": jnp.zeros(2 * COLUMNS, jnp.int32)}
    sizes = PooledSizes(buckets, 1, 1, COLUMNS, room)
    work = RtpScheduleWorkspace(sizes, **arrays, **own, **outputs, lane=zero, num_ids=zero)
    view = RtpView(parameters.cache.reshape(-1), parameters.groups.reshape(-1), None, buckets.groups)
    trip = functools.partial(_trip, view, trace)
    work, m, totals = schedule_loop.run(work, trace, resident, tuple(resident.totals), trip)
    new, own = PooledState(**shaped(work, cache, ARRAYS)), shaped(work, resident, OWN_ARRAYS)
    left = RtpResident(cache=new, machine=jnp.stack(m), totals=jnp.stack(totals), **own)
    return left, work.ids[:-1], work.num_ids


program = programs(_dispatch, "rtp_llm-schedule")


def _trip(
    view: RtpView, trace: Trace, w: Work, m: Machine, counts: tuple[Scalar, ...]
) -> tuple[Work, Machine, tuple[Scalar, ...]]:
    totals = RunTotals(*counts)
    w, m, _ = schedule_loop.begin(w, trace, m)
    w, m = schedule_loop.grow(w, trace, m, whole=True)
    w, m = schedule_loop.choose(w, trace, m, Mode.TAKE)
    w, m, totals = _record(w, view, m, totals)
    w, m = schedule_loop.compute(w, trace, m)
    w, current = schedule_loop.at_hand(w, m)
    diagnosed = m.at(Mode.TAKE) & (current.preemptions == 0) & (trace.number(Number.DIAGNOSE) != 0)
    w = compiled_history.diagnose(w, view, trace, current.request, diagnosed)
    w, answer = _arrive(w, view, trace, m, current)
    w, answer, totals = _enter(w, view, trace, m, current, answer, totals)
    w, answer = _allocate(w, view, trace, m, current, answer)
    w = _report(w, view, m, current, answer)
    totals = totals.answered(answer.status, m.at(Mode.TAKE), m.at(Mode.ASK))
    w, m = _follow(w, view, trace, m, current, answer)
    return w, m, totals


def _record(w: Work, view: RtpView, m: Machine, totals: RunTotals) -> tuple[Work, Machine, RunTotals]:
    """The step's occupancy, over all pools."""
    mine = m.at(Mode.RECORD)

    def add(v: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        pool, held = local
        return v, (pool + 1, held + v.read("counters", v.pool_counter(pool, PoolCounter.HELD)))

    end = jnp.where(mine, view.whole(CacheField.POOLS), 0)
    w, (_, held) = loop(lambda c: c[0] < end, add, w, (0, 0), reads=("counters",))
    w, (evictions,) = peek(mine, lambda v: (v.read("counters", v.counter(Counter.EVICTIONS)),), w, ("counters",), (0,))
    peak = jnp.maximum(totals.cached_peak, totals.entered - evictions)
    w, m = schedule_loop.record(w, m, held)
    return w, m, totals._replace(cached_peak=jnp.where(mine, peak, totals.cached_peak))


def _fetch(w: Work, view: RtpView, code: Scalar, current: Current, **arguments: Any) -> tuple[Work, RtpOp]:
    """An operation on the request at hand, and what the cache knows of that."""
    known = {RtpArgument.CODE: code, RtpArgument.SLOT: current.slot}
    known |= {RtpArgument[name.upper()]: value for name, value in arguments.items()}
    row = jnp.stack([jnp.asarray(known.get(argument, 0), jnp.int32) for argument in RtpArgument])
    return transitions.fetch(w, view, row, jnp.int32(0), code)


def _when(
    mine: Scalar, phase: Callable[[Work, RtpAnswer], tuple[Work, RtpAnswer]], w: Work, answer: RtpAnswer
) -> tuple[Work, RtpAnswer]:
    """Runs a phase if it is called for."""

    def once(v: Work, local: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        v, got = phase(v, RtpAnswer(*local[1:]))
        return v, (False, *got)

    w, local = loop(lambda c: c[0], once, w, (mine, *answer), writes=w.EVERYTHING)
    return w, RtpAnswer(*local[1:])


def _arrive(w: Work, view: RtpView, trace: Trace, m: Machine, current: Current) -> tuple[Work, RtpAnswer]:
    """The cache gets to know tokens of a request.

    REQUEST: it arrives with all tokens it has, in place of one that waits and is no longer the queue's head. ASK: those
    that were generated since it last asked follow.
    """
    requesting, asking = m.at(Mode.REQUEST), m.at(Mode.ASK)
    w = w.set(jnp.where(requesting, current.slot, w.spare_slot), PooledRequest.LIVE, 0)
    code = jnp.where(requesting, int(RtpCode.REQUEST), jnp.where(asking, int(RtpCode.APPEND), int(RtpCode.END)))
    first = trace.request(current.request, Arriving.KEY_START)
    payload = Payload(trace.keys, jnp.int32(0), trace.keys.shape[0])

    def phase(v: Work, answer: RtpAnswer) -> tuple[Work, RtpAnswer]:
        v, op = _fetch(v, view, code, current)
        known, before = jnp.where(requesting, 0, op.whole), jnp.where(requesting, 0, op.tokens)
        tokens = jnp.where(requesting, current.waiting_tokens, current.tokens)
        row = list(op.row)
        for argument, value in (
            (RtpArgument.TOKENS, tokens - before),
            (RtpArgument.NUMBERS, divide(tokens, view.whole(CacheField.BLOCK)) - known),
            (RtpArgument.START, first + known),
            (RtpArgument.SEQUENCES, jnp.int32(1)),
            (RtpArgument.RESERVE, trace.number(Number.LOOKAHEAD)),
        ):
            row[argument] = value
        return transitions.arrive(v, view, op._replace(row=tuple(row)), answer, payload)

    answer = RtpAnswer(jnp.int32(Status.OK), jnp.int32(0), jnp.int32(0))
    return _when(requesting | asking, phase, w, answer)


def _enter(
    w: Work, view: RtpView, trace: Trace, m: Machine, current: Current, answer: RtpAnswer, totals: RunTotals
) -> tuple[Work, RtpAnswer, RunTotals]:
    """FINISH: the request's whole blocks are entered into the cache."""
    mine = m.at(Mode.FINISH) & (trace.number(Number.CACHING) != 0)
    w, op = _fetch(w, view, jnp.where(mine, int(RtpCode.INSERT), int(RtpCode.END)), current)
    keys = op.keys - (op.aligned == 0)
    w, (taken, twice) = compiled_history.enter(w, view, current.slot, keys, mine)
    w, answer = _when(mine, lambda v, got: transitions.enter(v, view, op, got), w, answer)
    return w, answer, totals._replace(entered=totals.entered + taken, duplicates=totals.duplicates + twice)


def _allocate(
    w: Work, view: RtpView, trace: Trace, m: Machine, current: Current, answer: RtpAnswer
) -> tuple[Work, RtpAnswer]:
    """ASK and TAKE: blocks. PREEMPT and FINISH: they are given back, and the request is forgotten."""
    asks, leaves = m.at(Mode.ASK) | m.at(Mode.TAKE), m.at(Mode.PREEMPT) | m.at(Mode.FINISH)
    code = jnp.where(asks, int(RtpCode.MALLOC), jnp.where(leaves, int(RtpCode.FREE), int(RtpCode.END)))
    caching = trace.number(Number.CACHING)

    def phase(v: Work, got: RtpAnswer) -> tuple[Work, RtpAnswer]:
        v, op = _fetch(v, view, code, current, reuse=caching, device_cache=caching)
        return transitions.allocate(v, view, op, got, ALLOCATIONS)

    w, answer = _when((asks | leaves) & answer.ok, phase, w, answer)
    begins = m.at(Mode.TAKE) & answer.ok
    change = begins.astype(jnp.int32) - (leaves & answer.ok)
    w = compiled_history.use(w, view, trace, current.request, change)
    return w, answer


def _report(w: Work, view: RtpView, m: Machine, current: Current, answer: RtpAnswer) -> Work:
    """Reports an allocation's status and value, and the request's lists then."""
    if w.sizes.ids == 0:
        return w
    mine = m.at(Mode.ASK) | m.at(Mode.TAKE)
    w = w.emit(answer.status, mine).emit(answer.value, mine)

    def one(v: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
        (group,) = local
        v, (length,) = peek(
            group >= 0, lambda u: (u.read("requests", u.length(current.slot, 0, group)),), v, ("requests",), (0,)
        )
        v = v.emit(length)
        row = v.row(current.slot, 0, group)

        def block(u: Work, at: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
            return u.emit(u.read("rows", row + at[0])), (at[0] + 1,)

        v, _ = loop(lambda c: c[0] < length, block, v, (0,), reads=("rows",), writes=("ids", "num_ids"))
        return v, (group + 1,)

    end = jnp.where(mine, view.num_groups, 0)
    return loop(lambda c: c[0] < end, one, w, (0,), reads=("rows", "requests"), writes=("ids", "num_ids"))[0]


def _follow(
    w: Work, view: RtpView, trace: Trace, m: Machine, current: Current, answer: RtpAnswer
) -> tuple[Work, Machine]:
    """Transition of the schedule by the cache's answer."""
    refused = schedule_loop.among(answer.status, VERDICTS[1:])
    m = schedule_loop.fail(m, answer.ok, answer.status, refused)
    granted, denied = m.at(Mode.TAKE) & answer.ok, m.at(Mode.TAKE) & refused
    never = denied & ((m.active == 0) | (answer.status == int(Status.NO_ROOM_FOR_SEQUENCE)))
    new = jnp.minimum(current.tokens - answer.value, m.budget)
    m = m.when(granted, hit=answer.value, new=new)
    w, m, grown, left = schedule_loop.after_running(w, m, current, answer.ok, refused)
    w, m, _ = schedule_loop.after_request(w, m, current, answer.ok)
    w, m = schedule_loop.after_taking(w, m, current, granted, never, denied & ~never)
    w = w.set(jnp.where(left | never, current.slot, w.spare_slot), PooledRequest.LIVE, 0)
    noop_until = jnp.where(granted, current.tokens, _same_slots(view, trace, current.tokens))
    return w.write_if(granted | grown, "running_words", noop_until, w.running_word(current.slot, Running.NOOP_UNTIL)), m


def _same_slots(view: RtpView, trace: Trace, tokens: Scalar) -> Scalar:
    """Tokens up to which a request has the slots, those of its reserve too, and the whole blocks that it has now."""
    block, reserve = view.whole(CacheField.BLOCK), trace.number(Number.LOOKAHEAD)
    most = (divide(tokens, block) + 1) * block - 1
    most = jnp.minimum(most, ceil_divide(tokens, block) * block)
    return jnp.minimum(most, ceil_divide(tokens + reserve, block) * block - reserve)
