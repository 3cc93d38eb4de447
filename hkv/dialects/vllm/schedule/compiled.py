"""vLLM 0.33's part of the compiled schedule: a trace replayed on the device, decision for decision as `schedule` does.

`hkv.replay.schedule_loop` has the parts of a trip that every cache shares.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules import live, noop, transitions
from hkv.dialects.vllm.rules.operations import RESULT_FRONT, Argument, Code
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, Parameters, View
from hkv.dialects.vllm.rules.transitions import EMPTY, RUNNING, Answer, Op
from hkv.dialects.vllm.schedule import compiled_reasons
from hkv.dialects.vllm.schedule.compiled_reasons import DiagnosedTrace, Resident, ScheduleWorkspace
from hkv.dialects.vllm.schedule.schedule import REASONS, Chunking, proof
from hkv.machine import native_loops
from hkv.machine.operations import Payload, bucket
from hkv.replay import schedule_loop
from hkv.replay.dispatches import STEPS, Dispatches, Incoming, Sizes, programs, rounded, trace_arrays
from hkv.replay.observed import OccupancyKind, Sampling
from hkv.replay.schedule import Recorder, Schedule
from hkv.replay.schedule_loop import Current
from hkv.replay.schedule_state import SCHEDULE_ARRAYS, Arriving, Machine, Mode, Number, Running, Trace, flat, shaped
from hkv.state import free_queue
from hkv.state.loops import Scalar, divide, loop, peek, remainder
from hkv.state.state import GROUP_WORDS, REQUEST_WORDS, Counter, Request, Row, State
from hkv.state.status import Status
from hkv.state.workspace import ARRAYS, COPY_WORDS, COUNTERS, EVENT_WORDS
from hkv.state.workspace import Sizes as CacheSizes

Pair = tuple[ScheduleWorkspace, Machine]


def sizes_of(config: VllmConfig, schedule: Schedule, trace: Incoming, slots: int = 0) -> Sizes:
    """Sizes that a replay fits, rounded up so that few executables serve many; `slots`, 0: as many as may run."""
    buckets = cache.buckets_for(
        config,
        requests=slots or trace.slots(schedule.max_running),
        keys=max(1, trace.num_keys),
        tokens=trace.longest(schedule.max_model_len) + schedule.lookahead,
    )
    return Sizes(buckets, rounded(trace.count, 64), bucket(len(trace.keys), 4096))


def ids_of_a_step(sizes: Sizes, groups: int) -> int:
    """Most block ids that one step reports: every slot's hit, every slot's new blocks and copies."""
    copies = COPY_WORDS if sizes.buckets.parts else 0
    return (sizes.buckets.requests + 1) * (2 * sizes.buckets.row + copies) * groups


class CompiledReplay(Dispatches):
    """A trace, a cache and a schedule, replayed in as few dispatches as steps allow.

    What it reports: blocks that lookups found and allocations took, operation after operation and group after group,
    null blocks before a hit left out.
    """

    def __init__(
        self,
        config: VllmConfig,
        schedule: Schedule,
        trace: Incoming,
        *,
        sizes: Sizes | None = None,
        diagnose: bool = True,
        ids: int = 0,
        steps: int = STEPS,
        sampling: Sampling | None = None,
    ) -> None:
        self.config = config
        self._diagnose, self.sampling, self._done = diagnose, sampling, 0
        sizes = sizes or sizes_of(config, schedule, trace)
        parameters, state = cache.init(config, sizes.buckets)
        np.asarray(parameters.cache)[CacheField.SILENT] = not diagnose
        inputs = inputs_of(config, schedule, trace, sizes, parameters, diagnose)
        resident = compiled_reasons.begin(state, sizes.requests, steps)
        super().__init__(program(ids), trace, len(config.topology.groups), ids, parameters, inputs, resident)

    def dispatch(self) -> Machine:
        sampling = self.sampling
        if sampling is None:
            return super().dispatch()
        self._change(STEPS=sampling.every - self._done % sampling.every)
        machine = super().dispatch()
        self._done += int(machine.samples)
        if machine.samples and sampling.due(self._done):
            step = int(self._samples[-1][-1, 0])
            cache = jax.tree.map(np.asarray, self._resident.cache)
            table = np.asarray(self._parameters.groups)
            sampling.add(step, of_arrays(cache, table, len(self.config.topology.groups)))
        return machine

    @property
    def evictions(self) -> int:
        """Cached blocks handed out to another use."""
        return int(np.asarray(self._resident.cache.counters)[Counter.EVICTIONS])

    def free_queue(self) -> list[int]:
        """Block ids in the free queue, the next to be handed out first."""
        return queue_of(jax.device_get(self._resident.cache))

    def left(self) -> dict[str, Any]:
        """Fields of the outcome, once it has run."""
        occupancy = None if self.sampling is None else self.sampling.taken()
        return {"recorder": self.recorder(), "evictions": self.evictions, "occupancy": occupancy}

    def recorder(self) -> Recorder:
        """Everything that happened, as the plain schedule's observer would have recorded it; reasons if asked for."""
        recorder = Recorder(self.config.num_blocks, None, lambda: None)
        self._record(recorder, REASONS if self._diagnose else ())
        return recorder


def inputs_of(
    config: VllmConfig, schedule: Schedule, trace: Incoming, sizes: Sizes, parameters: Parameters, diagnose: bool
) -> DiagnosedTrace:
    """Inputs of a program."""
    chunking = Chunking.of(config, schedule.step_tokens)
    arrays = trace_arrays(
        schedule,
        trace,
        sizes.requests,
        sizes.keys,
        kept_block=chunking.block_size,
        kept_eagle=chunking.eagle,
        kept_hash=chunking.hash_block_size,
        diagnose=diagnose,
    )
    return DiagnosedTrace(*arrays, diagnosed(config, parameters))  # type: ignore[arg-type]


def diagnosed(config: VllmConfig, parameters: Parameters) -> np.ndarray:
    """`Parameters.groups` with a draft's proof, in tokens, for `EAGLE`, and for `LOOKBACK` what queries read."""
    groups = np.array(parameters.groups)
    for group, spec in enumerate(config.topology.specs):
        groups[group, GroupField.EAGLE] = proof(config, group)
        groups[group, GroupField.LOOKBACK] -= kinds.layer(spec).kept_beyond
    return groups


def queue_of(state: State) -> list[int]:
    """Block ids in the free queue of a state on the host, the next to be handed out first."""
    head, tail = int(state.counters[Counter.HEAD]), int(state.counters[Counter.TAIL])
    ring = len(state.queue) - 1
    places = np.arange(head, tail, dtype=np.int64) % ring
    blocks = np.asarray(state.queue)[places]
    return blocks[blocks != 0].tolist()


def of_arrays(state: State, table: np.ndarray, groups: int) -> np.ndarray:
    """Blocks by `OccupancyKind` and group, int64[3, groups], in the arrays of a compiled cache between two steps."""
    sinks, members = table[:, GroupField.SINKS] > 0, table[:, GroupField.MEMBER]
    pool = slice(1, state.blocks.shape[0] - 1)
    references, keys = state.blocks[pool], state.keys[pool, : 1 + state.buckets.parts]
    group_of = np.full(state.blocks.shape[0], groups)
    for slot in np.flatnonzero(state.requests[:, Request.LIVE] == RUNNING):
        for group in range(groups):
            base = REQUEST_WORDS + GROUP_WORDS * group
            length, first = (int(state.requests[slot, base + field]) for field in (Row.LENGTH, Row.FIRST))
            group_of[state.rows[slot, group, 0 if sinks[group] else first : length]] = group
    group_of = group_of[pool]
    entries = (keys[:, 0] >> 2) - 1
    for part in range(1, keys.shape[1]):
        entries = np.where(entries < 0, keys[:, part] - 1, entries)
    cached = entries >= 0
    group_of[cached] = members[entries[cached] % state.table.shape[1]]
    held = references < 0
    chosen = {OccupancyKind.HELD: held, OccupancyKind.CACHED: cached, OccupancyKind.EVICTABLE: cached & ~held}
    return np.stack([np.bincount(group_of[chosen[kind]], minlength=groups + 1)[:groups] for kind in OccupancyKind])


# The program.


def _dispatch(
    parameters: Parameters, trace: DiagnosedTrace, resident: Resident, *, room: int
) -> tuple[Resident, jax.Array, jax.Array]:
    native_loops.warn_if_interpreted()
    cache = resident.cache
    buckets = cache.buckets
    pending = (buckets.requests + 1) * buckets.groups if buckets.parts else 0
    sizes = CacheSizes(buckets, 1, 1, RESULT_FRONT + 2 * buckets.groups, room, 0, pending)
    zero = jnp.int32(0)
    arrays, own = flat(cache, ARRAYS), flat(resident, SCHEDULE_ARRAYS)
    outputs = {
        "ids": jnp.zeros(room + 1, jnp.int32),
        "events": jnp.zeros(EVENT_WORDS, jnp.int32),
        "copies": jnp.zeros((pending + 1) * COPY_WORDS, jnp.int32),
        "results": jnp.zeros(2 * sizes.width, jnp.int32),
    }
    counters = {name: cache.counters[int(place)] for name, place in COUNTERS.items()}
    numbers = dict.fromkeys(("lane", "num_ids", "num_events", "num_copies"), zero)
    work = ScheduleWorkspace(sizes, **arrays, **own, **outputs, **counters, **numbers)
    view = View(parameters.cache.reshape(-1), parameters.groups.reshape(-1), None, buckets.groups)
    work, machine = schedule_loop.run(work, trace, resident, lambda w, m: _trip(w, view, trace, m))
    line = cache.counters
    for name, place in COUNTERS.items():
        line = line.at[int(place)].set(getattr(work, name))
    new = State(**shaped(work, cache, ARRAYS), counters=line)
    left = Resident(cache=new, machine=jnp.stack(machine), **shaped(work, resident, SCHEDULE_ARRAYS))
    return left, work.ids[:-1], work.num_ids


program = programs(_dispatch, "vllm-schedule")


def _trip(w: ScheduleWorkspace, view: View, trace: DiagnosedTrace, m: Machine) -> Pair:
    w, m, busy = schedule_loop.begin(w, trace, m)
    w = w.replace(steps=w.steps + busy)
    w, m = schedule_loop.grow(w, trace, m)
    w, m = schedule_loop.choose(w, trace, m)
    w = made_copies(w, view, m.at(Mode.RECORD))
    w, m = schedule_loop.record(w, m, view.whole(CacheField.NUM_BLOCKS) - 1 - w.free)
    w, m = schedule_loop.compute(w, trace, m)
    w, current, op = _operation(w, view, trace, m)
    w, answer = perform(w, view, trace, m, current, op)
    w, m, given = _follow(w, trace, m, current, answer)
    return note(w, view, trace, op.slot, given), m


def made_copies(w: Any, view: View, enabled: Scalar) -> Any:
    """The step's copies are made, group by group: both blocks of each give back what they held for that.

    The twin of `Replay._planned`, and of the rules' `made_copies` without an operation.
    """
    if not w.sizes.copies:
        return w
    row = w.row(w.spare_slot, jnp.int32(0))
    count = jnp.where(enabled, 2 * w.num_copies, 0)
    every = view.num_groups * count

    def give(v: Any, local: tuple[Scalar]) -> tuple[Any, tuple[Scalar]]:
        (turn,) = local
        index, keyed = live.in_turn(turn, every)
        group, number = divide(index, jnp.maximum(count, 1)), remainder(index, jnp.maximum(count, 1))
        place = v.output("copies", divide(number, jnp.int32(2)))

        def look(u: Any) -> tuple[Scalar, ...]:
            return u.read("copies", place), *live.describe(u, u.read("copies", place + 1 + (number & 1)))

        v = free_queue.make_room(v)
        v, (mine, block, known, _) = peek(turn >= 0, look, v, ("copies", "keys", "blocks"), (0, 0, False, False))
        v = v.write("rows", block, row)
        given = (mine == group) & (known == keyed) & (block != 0)
        return free_queue.release(v, row, given.astype(jnp.int32)), (turn + 1,)

    w, _ = loop(lambda c: c[0] < 2 * every, give, w, (0,), writes=("copies", *live.WRITES))
    return w.replace(num_copies=jnp.where(enabled, 0, w.num_copies))


def _operation(w: Any, view: View, trace: Trace, m: Machine) -> tuple[Any, Current, Op]:
    """The operation that the mode calls for, and what it is about."""
    codes = {
        Mode.ASK: Code.ALLOCATE,
        Mode.PREEMPT: Code.FREE,
        Mode.REQUEST: Code.REQUEST,
        Mode.FIND: Code.LOOKUP,
        Mode.TAKE: Code.ALLOCATE,
        Mode.FINISH: Code.FREE,
    }
    code = jnp.int32(int(Code.END))
    for mode, each in codes.items():
        code = jnp.where(m.at(mode), int(each), code)
    w, current = schedule_loop.at_hand(w, m)
    slot, request, taking = current.slot, current.request, m.at(Mode.TAKE)
    w = w.set(jnp.where(m.at(Mode.REQUEST), slot, w.spare_slot), Request.LIVE, EMPTY)
    grown = jnp.where(current.asking, slot, w.spare_slot)
    w = w.set(grown, Request.COMPUTED, current.computed).set(grown, Request.TOKENS, current.tokens)
    arguments = {
        Argument.CODE: code,
        Argument.SLOT: slot,
        Argument.TOKENS: jnp.where(m.at(Mode.REQUEST), trace.request(request, Arriving.PROMPT), 0),
        Argument.KEYS: _num_keys(view, trace, request),
        Argument.KEY_START: trace.request(request, Arriving.KEY_START),
        Argument.NEW: m.new,
        Argument.HIT: jnp.where(taking, m.hit, 0),
        Argument.LOOKAHEAD: trace.number(Number.LOOKAHEAD),
        Argument.MUST_FIT: taking.astype(jnp.int32),
        Argument.SHARED_PREFIX: jnp.where(taking, current.shared_boundary, -1),
    }
    row = tuple(arguments.get(argument, jnp.int32(0)) for argument in Argument)
    w, op = transitions.fetch(w, jnp.stack(row), jnp.int32(0), code)
    return w, current, op


def _num_keys(view: View, trace: Trace, request: Scalar) -> Scalar:
    """Prefix keys of a request, output included."""
    tokens = trace.request(request, Arriving.PROMPT) + trace.request(request, Arriving.OUTPUT)
    return divide(tokens, view.whole(CacheField.HASH_BLOCK))


def perform(
    w: Any, view: View, trace: DiagnosedTrace, m: Machine, current: Current, op: Op, settles: bool = False
) -> tuple[Any, Answer]:
    """The operation, as `hkv.dialects.vllm.rules.execute` performs it; an admission's reasons just before its blocks.

    A request that is put off is looked up in every step until it gets its blocks. Only the last of these lookups is
    kept, and finding the reasons of all of them would take most of the time in tight pools. Without `settles` nothing
    is compiled for COMMIT.
    """
    payload = Payload(trace.keys, jnp.int32(0), trace.keys.shape[0])
    w = free_queue.make_room(w)
    nothing = dict.fromkeys(Answer._fields, jnp.int32(0))
    answer = Answer(**{**nothing, "status": jnp.int32(int(Status.OK)), "reported": jnp.bool_(False)})
    w, answer = transitions.arrive(w, view, op, answer, payload)
    w, answer = transitions.lookup(w, view, op, answer)
    w, answer, plan = transitions.admit_or_give_back(w, view, op, answer)
    w = _diagnosed(w, view, trace, m, current, answer.ok & m.at(Mode.TAKE))
    w, answer, certain = transitions.allocate(w, view, op, answer, plan)
    if settles:
        answer, certain = transitions.commit(op, answer, certain)
    w, answer = transitions.register(w, view, op, answer, certain)
    w, answer = transitions.leave(w, op, answer)
    w = w.replace(clock=w.clock + transitions.may_change_hits(op.code))
    if w.sizes.ids:
        w = transitions.report(w, view, op, answer, jnp.int32(0))
    return w, answer


def _diagnosed(w: Any, view: View, trace: DiagnosedTrace, m: Machine, current: Current, admitted: Scalar) -> Any:
    """Reasons why the hit of the candidate ended, where it is admitted for the first time; nothing was taken yet."""
    asked = admitted & (current.preemptions == 0) & (trace.number(Number.DIAGNOSE) != 0)
    looking = View(view.cache, trace.diagnosed.reshape(-1), None, view.width)
    keys, boundary = _num_keys(view, trace, m.head), trace.request(m.head, Arriving.ASKED)
    lookup = compiled_reasons.Lookup(m.candidate, m.head, m.hit, boundary, keys)
    return compiled_reasons.diagnose(w, looking, lookup, asked)


REFUSALS = (Status.NO_ROOM, Status.NO_ROOM_FOR_SEQUENCE, Status.NOT_YET_WRITTEN)
"""Statuses with which an allocation may end in a replay, besides success."""


def _follow(w: Any, trace: Trace, m: Machine, current: Current, answer: Answer) -> tuple[Any, Machine, Scalar]:
    """Transition of the schedule by the cache's answer: also True if a request got its blocks."""
    refused = ~answer.ok & schedule_loop.among(answer.status, REFUSALS)
    m = schedule_loop.fail(m, answer.ok, answer.status, refused)
    found, granted, denied = m.at(Mode.FIND) & answer.ok, m.at(Mode.TAKE) & answer.ok, m.at(Mode.TAKE) & ~answer.ok
    never = denied & (m.active == 0)
    w, m, grown, left = schedule_loop.after_running(w, m, current, answer.ok, refused)
    w, m, accepted = schedule_loop.after_request(w, m, current, answer.ok)
    w = w.set(accepted, Request.TOKENS, current.waiting_tokens)
    new = schedule_loop.chunk(trace, m.head, current.tokens, answer.shared_prefix, answer.value, m.budget)
    w = w.write_if(found, "running_words", answer.shared_prefix, w.running_word(m.candidate, Running.SHARED_BOUNDARY))
    mode = jnp.where(new > 0, int(Mode.TAKE), int(Mode.RECORD))
    m = m.when(found, mode=mode, new=new, hit=answer.value)
    w, m = schedule_loop.after_taking(w, m, current, granted, never, denied & ~never)
    w = w.set(jnp.where(left | never, current.slot, w.spare_slot), Request.LIVE, EMPTY)
    return w, m, grown | granted


# Tokens that a running request can grow by before the cache has anything to do for it.


def note(work: Any, view: View, trace: Trace, slot: Scalar, enabled: Scalar) -> Any:
    """Notes up to how many tokens an allocation for a request would take, register and give back nothing.

    What is noted may be too little, never too much: an allocation that changes nothing is no mistake.
    """
    work = noop.note(work, view, slot, enabled)
    work, (quiet,) = work.peek_request(enabled, slot, Request.NOOP_UNTIL)
    quiet = quiet - trace.number(Number.LOOKAHEAD)
    return work.write_if(enabled, "running_words", quiet, work.running_word(slot, Running.NOOP_UNTIL))
