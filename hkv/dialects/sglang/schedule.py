"""SGLang's part of the compiled schedule: a trace replayed on the device, decision for decision as `SGLangLoop` does.

`hkv.replay.schedule_loop` has the parts of a trip that every cache shares. A request's keys are copied once, when it is
the queue's head; then it takes what is cached and gets pages for its first chunk, or gives up what it took. Each chunk
is entered at the end of the step that computes it (`Mode.ENTER`). A decoded token needs nothing of the cache as long as
its page has room, no window is due to slide, and both pools have a page: most steps pass over it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang import machine
from hkv.dialects.sglang.config import SLIDE_EVERY, STATE_CHUNK, SGLangConfig
from hkv.dialects.sglang.engines.jax_reading import SGLangReader
from hkv.dialects.sglang.engines.pages import Pages
from hkv.dialects.sglang.rules import entering, states, transitions
from hkv.dialects.sglang.rules.evict import Wanted, evict
from hkv.dialects.sglang.rules.operations import COLUMNS, SGLangArgument, SGLangCode
from hkv.dialects.sglang.rules.parameters import Field, SGLangParameters, SGLangView
from hkv.dialects.sglang.rules.transitions import FETCHED, Own, SGLangAnswer, SGLangOp
from hkv.dialects.sglang.scheduler import bounded
from hkv.machine import native_loops
from hkv.replay import schedule_loop
from hkv.replay.dispatches import STEPS, Dispatches, Incoming, Sizes, programs, rounded, trace_arrays
from hkv.replay.schedule import Recorder, Schedule
from hkv.replay.schedule_loop import Current
from hkv.replay.schedule_state import (
    SCHEDULE_ARRAYS,
    Arriving,
    Machine,
    Mode,
    Running,
    ScheduleArrays,
    ScheduleResident,
    Trace,
    empty_arrays,
    flat,
    shaped,
)
from hkv.state.loops import Scalar, ceil_divide, divide, loop, read, remainder, when
from hkv.state.radix import FULL, POOLS, WINDOW, Count, PoolCount, RadixBuckets, RadixRequest, RadixState
from hkv.state.radix_workspace import ARRAYS, RadixSizes, RadixWorkspace

UNLIMITED = 1 << 29
"""More tokens than any request has."""

Work: TypeAlias = Any
"""A `ScheduleWorkspace`, which the rules return as what they know of it."""


def sizes_of(config: SGLangConfig, schedule: Schedule, trace: Incoming, room: int = 0) -> Sizes:
    """Sizes that a replay fits, rounded up so that few executables serve many; with room for so many pages at least,
    over all pools."""
    longest = trace.longest(schedule.max_model_len)
    buckets = RadixBuckets(
        pages=rounded(max(*machine.pages_of_pools(config), room // len(config.num_slots)) + 1, 1024),
        keys=rounded(max(1, trace.num_keys), 1024),
        requests=rounded(trace.slots(schedule.max_running), 4),
        row=rounded(-(-longest // config.page_size) + 2, 64),
    )
    return Sizes(buckets, rounded(trace.count, 64), rounded(len(trace.keys), 4096))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SGLangResident(ScheduleResident):
    """A replay between two dispatches; donated.

    Attributes:
      cache: the cache.
    """

    cache: RadixState


@dataclasses.dataclass(frozen=True)
class ScheduleWorkspace(RadixWorkspace, ScheduleArrays):
    """A `RadixWorkspace` with the arrays of a schedule; `num_ids` is 0, for nothing is reported but what remains."""

    CARRIED = (*RadixWorkspace.CARRIED, *SCHEDULE_ARRAYS)
    EVERYTHING = CARRIED
    """Arrays that one trip of a replay may write."""

    num_ids: Scalar


class SGLangCompiledReplay(Dispatches):
    """A trace, a cache and a schedule, replayed in as few dispatches as steps allow."""

    def __init__(
        self,
        config: SGLangConfig,
        schedule: Schedule,
        trace: Incoming,
        *,
        sizes: Sizes | None = None,
    ) -> None:
        self.config, self._blocks = config, sum(machine.pages_of_pools(config))
        schedule = bounded(config, schedule)
        sizes = sizes or sizes_of(config, schedule, trace)
        parameters, state = machine.init(config, sizes.buckets)
        inputs = Trace(*trace_arrays(schedule, trace, sizes.requests, sizes.keys))  # type: ignore[arg-type]
        buckets = sizes.buckets
        arrays = empty_arrays(buckets.requests, buckets.requests + 1, buckets.groups, sizes.requests, STEPS)
        resident = SGLangResident(cache=state, **arrays)
        super().__init__(program(), trace, len(config.components), 0, parameters, inputs, resident)

    def left(self) -> dict[str, Any]:
        """Fields of the outcome, once it has run."""
        counters = np.asarray(self._resident.cache.counters)
        return {"recorder": self.recorder(), "evictions": int(counters[Count.EVICTIONS])}

    def recorder(self) -> Recorder:
        """Everything that happened, as the plain schedule's observer would have recorded it."""
        recorder = Recorder(self._blocks + 1, None, lambda: None)
        self._record(recorder, ())
        return recorder

    def state(self) -> structs.State:
        """The whole state of the cache, in which no request is left."""
        reader = SGLangReader(self.config, TracePages(self.config.page_size, bigrams=False))
        return reader.state(jax.device_get(self._resident.cache), {})


class TracePages(Pages):
    """Pages of a trace, which says which prefixes are equal, not what they consist of: its tokens are its number."""

    def tokens(self, numbers: Sequence[int]) -> list[int]:
        """Tokens of pages that follow each other."""
        return [number for number in numbers for _ in range(self._size)]

    def namespace(self, number: int) -> tuple[str | None, str | None]:
        """All pages have the same."""
        return None, None


# The program.


def _dispatch(
    parameters: SGLangParameters, trace: Trace, resident: SGLangResident, *, room: int
) -> tuple[SGLangResident, jax.Array, jax.Array]:
    native_loops.warn_if_interpreted()
    cache, zero = resident.cache, jnp.int32(0)
    sizes = RadixSizes(cache.buckets, 1, 1, COLUMNS, room)
    arrays = {**flat(cache, ARRAYS), **flat(resident, SCHEDULE_ARRAYS), "results": jnp.zeros(2 * COLUMNS, jnp.int32)}
    work = ScheduleWorkspace(sizes, **arrays, lane=zero, num_ids=zero)
    view = SGLangView(parameters.cache.reshape(-1), None)
    work, m, _ = schedule_loop.run(work, trace, resident, (), functools.partial(_trip, view, trace))
    new = RadixState(**shaped(work, cache, ARRAYS))
    left = SGLangResident(cache=new, machine=jnp.stack(m), **shaped(work, resident, SCHEDULE_ARRAYS))
    return left, jnp.zeros(0, jnp.int32), zero


program = programs(_dispatch, "sglang-schedule")


def _trip(view: SGLangView, trace: Trace, w: Work, m: Machine, more: tuple[Scalar, ...]) -> tuple[Work, Machine, Any]:
    w, m, _ = schedule_loop.begin(w, trace, m)
    w, (full, window) = w.peek(
        m.at(Mode.GROW), "counters", *(w.pool_count(pool, PoolCount.FREE) for pool in (FULL, WINDOW))
    )
    eased = (full > 0) & ((window > 0) | ~view.windowed)
    w, m = schedule_loop.grow(w, trace, m, whole=False, eased=eased)
    w, m = schedule_loop.choose(w, trace, m, Mode.TAKE)
    w, m = _record(w, view, m)
    w, m = schedule_loop.compute(w, trace, m, chunks=True)
    w, current = schedule_loop.at_hand(w, m)
    w = _note_keys(w, view, trace, m, current)
    w, hit, branch = _take_in(w, view, m, current)
    new = jnp.minimum(current.tokens - hit, m.budget)
    target = jnp.where(m.at(Mode.TAKE), hit + new, current.computed + m.new)
    w, granted = _lengthen(w, view, m, current._replace(shared_boundary=branch), target)
    w = _enter(w, view, m, current)
    w = _leave(w, view, m, current, granted)
    return *_follow(w, view, m.when(m.at(Mode.TAKE) & granted, hit=hit, new=new), current, granted), more


def _record(w: Work, view: SGLangView, m: Machine) -> tuple[Work, Machine]:
    """The step's occupancy: pages, and states, that are neither free nor the tree's alone."""
    mine = m.at(Mode.RECORD)
    places = (w.pool_count(pool, field) for pool in POOLS for field in (PoolCount.FREE, PoolCount.UNHELD))
    w, counts = w.peek(mine, "counters", *places)
    w, m = schedule_loop.record(w, m, view.whole(Field.TOTAL) - sum(counts))
    # What was asked last in this step has nothing to do with what is entered in it.
    return w, m.when(mine, asked=w.spare_slot)


def _note_keys(w: Work, view: SGLangView, trace: Trace, m: Machine, current: Current) -> Work:
    """REQUEST: the keys of all whole pages that a request will ever have stand in its chain."""
    tokens = trace.request(current.request, Arriving.PROMPT) + trace.request(current.request, Arriving.OUTPUT)
    first = trace.request(current.request, Arriving.KEY_START)

    def one(v: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
        (page,) = local
        return v.write("chains", read(trace.keys, first + page), v.chain(current.slot, page)), (page + 1,)

    end = jnp.where(m.at(Mode.REQUEST), divide(tokens, view.page), 0)
    return loop(lambda c: c[0] < end, one, w, (0,), writes=("chains",))[0]


def _take_in(w: Work, view: SGLangView, m: Machine, current: Current) -> tuple[Work, Scalar, Scalar]:
    """TAKE: the request holds what is cached of it; tokens of that, and up to where more is cached without a state."""
    taking = m.at(Mode.TAKE)

    def once(v: Work, _: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        yes = jnp.bool_(True)
        v, found = transitions.take_in(v, view, yes, current.slot, yes, (current.tokens, jnp.int32(0)))
        return v, (False, found.length * view.page, found.full * view.page)

    w, (_, hit, full) = loop(lambda c: c[0], once, w, (taking, 0, 0), writes=w.CARRIED)
    grid = view.whole(Field.GRID)
    branch = jnp.where(taking, divide(full, grid) * grid, current.shared_boundary)
    return (
        w.write_if(taking, "running_words", branch, w.running_word(current.slot, Running.SHARED_BOUNDARY)),
        hit,
        branch,
    )


def _lengthen(w: Work, view: SGLangView, m: Machine, current: Current, target: Scalar) -> tuple[Work, Scalar]:
    """TAKE and ASK: a chunk gets pages at once, decoded tokens one by one, while the window slides; whether all did.

    Before that, TAKE and ENTER: states are there for a request that comes, and for the one that the tree takes.
    """
    taking, entering = m.at(Mode.TAKE), m.at(Mode.ENTER)
    mine = taking | m.at(Mode.ASK)
    w, (length, tracked, came) = w.peek_each(
        mine | entering,
        ("requests", w.request(current.slot, RadixRequest.LENGTH)),
        ("requests", w.request(current.slot, RadixRequest.TRACKED)),
        ("running_words", w.running_word(current.slot, Running.CAME)),
    )
    decodes = m.at(Mode.ASK) & (current.computed >= came)
    tracks = view.flag(Field.TRACKED)

    def one(v: Work, local: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        at, _, lacks = local
        pages = lacks == 0
        v, words = v.peek_request(
            True, current.slot, RadixRequest.SLID, RadixRequest.PROTECTED, RadixRequest.TRACKED, RadixRequest.TURN
        )
        slid, protected, before, turn = words
        slides = decodes & pages
        own = Own(slid, protected, before)
        v, slid = transitions.slide(v, view, current.slot, slides, at, own, jnp.int32(SLIDE_EVERY))
        v = v.write_if(slides, "requests", slid, v.request(current.slot, RadixRequest.SLID))
        end = jnp.where(decodes, at + 1, target)
        room = jnp.where(pages, transitions.room_for(view, at, end, decodes), 0)
        v, _ = evict(v, view, jnp.bool_(True), Wanted(room, room, lacks, jnp.bool_(True)))
        v = states.take_missing(v, current.slot, jnp.where(taking, lacks, 0))
        v, granted = transitions.lengthen(v, view, pages, current.slot, (at, end), decodes)
        v = v.write_if(granted, "requests", end, v.request(current.slot, RadixRequest.LENGTH))
        v = v.write_if(granted, "requests", 1, v.request(current.slot, RadixRequest.RAN))
        kept = jnp.where(decodes, _kept_of_decoded(view, end), _kept_of_prompt(view, at, end, current.shared_boundary))
        kept, before = jnp.where(tracks, kept, 0), jnp.where(decodes, before, 0)
        v = transitions.keep_state(v, granted, (current.slot, turn), kept, before)
        return v, (jnp.where(granted, end, at), granted | ~pages, 0)

    # Tokens that needed nothing of the cache have not been noted in the request's own words.
    begin = jnp.where(mine, jnp.where(decodes, jnp.maximum(length, current.computed), length), target)
    lacks = jnp.where(taking, jnp.where(tracks, 3, 1), jnp.where(entering & (~tracks | (tracked > 0)), 1, 0))
    lacks = jnp.where(view.stateful, lacks, 0)
    local = (begin, mine, lacks)
    w, (_, granted, _) = loop(lambda c: (c[2] > 0) | ((c[0] < target) & c[1]), one, w, local, writes=w.CARRIED)
    return w, granted


def _kept_of_prompt(view: SGLangView, start: Scalar, end: Scalar, branch: Scalar) -> Scalar:
    """`SGLangConfig.kept_state`, of tracked states."""
    grid, passed = view.whole(Field.GRID), end - start
    whole = divide(passed, grid) * grid
    asked = jnp.where(divide(passed, STATE_CHUNK) * STATE_CHUNK == whole, end, start + whole + 1)
    # The remainder is of a number that may be negative, but then it does not count.
    inside = (start < branch) & (branch < asked) & (remainder(jnp.maximum(branch - start, 0), grid) == 0)
    return jnp.where(whole > 0, jnp.where(inside, branch, start + whole), 0)


def _kept_of_decoded(view: SGLangView, length: Scalar) -> Scalar:
    """Length of the state that is kept with a decoded token, the last of so many; 0 for none."""
    return jnp.where(remainder(length, view.whole(Field.EVERY)) == 0, length, 0)


def _op(w: Work, code: SGLangCode, current: Current) -> tuple[Work, SGLangOp]:
    """An operation on the request at hand, and what the cache knows of that."""
    w, fields = w.peek_request(True, current.slot, *FETCHED)
    row = (jnp.int32(0),) * len(SGLangArgument)
    return w, SGLangOp(jnp.int32(code), current.slot, jnp.bool_(True), row, *fields)


_NOTHING = SGLangAnswer(*(np.int32(0),) * COLUMNS)


def _enter(w: Work, view: SGLangView, m: Machine, current: Current) -> Work:
    """ENTER: what the step computes of a request is entered; FINISH: everything."""
    ends = m.at(Mode.FINISH)

    def once(v: Work) -> Work:
        v, op = _op(v, SGLangCode.CHECKPOINT, current)
        code = jnp.where(ends, int(SGLangCode.FINISH), op.code)
        return entering.enter(
            v, view, op._replace(code=code, length=jnp.where(ends, current.tokens, op.length)), _NOTHING
        )[0]

    return when(ends | m.at(Mode.ENTER), once, w, writes=w.CARRIED)


def _leave(w: Work, view: SGLangView, m: Machine, current: Current, granted: Scalar) -> Work:
    """FINISH and PREEMPT: a request gives back what it has; TAKE: what it found, if it gets no pages beyond that."""
    ends = m.at(Mode.FINISH)

    def once(v: Work) -> Work:
        v, op = _op(v, SGLangCode.ABORT, current)
        return entering.leave(v, view, op._replace(length=jnp.where(ends, current.tokens, op.length)), _NOTHING)[0]

    return when(ends | m.at(Mode.PREEMPT) | (m.at(Mode.TAKE) & ~granted), once, w, writes=w.CARRIED)


def _follow(w: Work, view: SGLangView, m: Machine, current: Current, granted: Scalar) -> tuple[Work, Machine]:
    """Transition of the schedule by the cache's answer."""
    asking, taking, entering = m.at(Mode.ASK), m.at(Mode.TAKE), m.at(Mode.ENTER)
    refused = (asking | taking) & ~granted
    never = taking & refused & (m.active == 0)
    w = _note_needs(w, view, m, current, granted)
    w, m, _, _ = schedule_loop.after_running(w, m, current, ~refused, refused)
    w, m, _ = schedule_loop.after_request(w, m, current, jnp.bool_(True))
    w, m = schedule_loop.after_taking(w, m, current, taking & granted, never, taking & refused & ~never)
    return w, m.when(entering, mode=int(Mode.COMPUTE))


def _note_needs(w: Work, view: SGLangView, m: Machine, current: Current, granted: Scalar) -> Work:
    """Tokens up to which a request needs nothing of the cache: none before it decodes; then up to its page's end, to
    where its window slides next, and to before where a state of it is kept next."""
    taking = m.at(Mode.TAKE) & granted
    mine = taking | (m.at(Mode.ASK) & granted)
    w, (length, slid, came) = w.peek_each(
        mine,
        ("requests", w.request(current.slot, RadixRequest.LENGTH)),
        ("requests", w.request(current.slot, RadixRequest.SLID)),
        ("running_words", w.running_word(current.slot, Running.CAME)),
    )
    came = jnp.where(taking, current.tokens, came)
    until = jnp.where(view.windowed, view.whole(Field.WINDOW) + slid * view.page + SLIDE_EVERY, UNLIMITED)
    until = jnp.minimum(until, ceil_divide(length, view.page) * view.page)
    every = view.whole(Field.EVERY)
    before = (divide(length, every) + 1) * every - 1
    until = jnp.minimum(until, jnp.where(view.flag(Field.TRACKED), before, UNLIMITED))
    w = w.write_if(
        mine, "running_words", jnp.where(length >= came, until, 0), w.running_word(current.slot, Running.NOOP_UNTIL)
    )
    return w.write_if(taking, "running_words", came, w.running_word(current.slot, Running.CAME))
