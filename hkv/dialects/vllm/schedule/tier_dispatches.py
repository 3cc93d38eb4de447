"""A compiled replay with a second tier, from the host: its parameters, its arrays, its dispatches, its figures."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.offload.config import HEAD_AGES, RESET_REVIVES, OffloadConfig
from hkv.dialects.vllm.rules.offload import arc, arrays
from hkv.dialects.vllm.rules.offload.arrays import COUNTS, TierArrays, TierRoom
from hkv.dialects.vllm.rules.offload.parameters import TIER_WORDS, TierField, TierNumber, TierView
from hkv.dialects.vllm.rules.offload.pool import Prefix
from hkv.dialects.vllm.rules.offload.words import (
    ENDED,
    JOB_WORDS,
    ROW_WORDS,
    SLOT_WORDS,
    USER_WORDS,
    ArcWord,
    ChunkNode,
    GhostWord,
    Handed,
    TrackerWord,
    User,
)
from hkv.dialects.vllm.rules.operations import RESULT_FRONT
from hkv.dialects.vllm.rules.parameters import CacheField, View
from hkv.dialects.vllm.schedule import compiled, compiled_links, compiled_reasons, compiled_tier
from hkv.dialects.vllm.schedule.compiled_reasons import DiagnosedTrace, ScheduleWorkspace
from hkv.errors import UnsupportedConfigError
from hkv.machine import native_loops
from hkv.machine.operations import bucket
from hkv.replay import schedule_loop
from hkv.replay.dispatches import STEPS, Dispatches, Incoming, Sizes, programs
from hkv.replay.observed import Sampling
from hkv.replay.schedule import Recorder, Schedule
from hkv.replay.schedule_state import SCHEDULE_ARRAYS, Arriving, Machine, Mode, ScheduleResident, flat, shaped
from hkv.state.loops import Scalar, divide, read
from hkv.state.state import State
from hkv.state.workspace import ARRAYS, COPY_WORDS, COUNTERS, EVENT_WORDS
from hkv.state.workspace import Sizes as CacheSizes

MOST_GROUPS = 30
"""Groups whose bits fit a word of `marks`."""

NEVER = 1 << 29
"""Chunks of a period that never ends."""


def require(config: OffloadConfig) -> None:
    """Refuses what the compiled tier does not have, by name.

    Raises:
      UnsupportedConfigError: naming what, and that the NumPy engine has it.
    """
    numpy, groups = "the NumPy engine for anything else", len(config.chunk_tokens)
    most = arc.MOST_GROUPS if config.policy == "arc" else MOST_GROUPS
    if groups > most:
        raise UnsupportedConfigError("groups", groups, f"{most} groups at most; {numpy}")
    if config.blocks_per_chunk > 1 or config.drafts or config.eagle or config.sync_tokens or config.tails:
        raise UnsupportedConfigError("offload", "chunks of blocks, drafts, tails or loads within a step", numpy)


# Parameters.


def parameters(config: OffloadConfig, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """`TierView.groups` and `TierView.numbers`, without what transfers take."""
    table, cache = np.zeros((groups, TIER_WORDS), np.int32), config.cache
    interval, alignment = cache.retention_interval, config.alignment
    for group in range(len(config.chunk_tokens)):
        size, span = cache.block_size(group), config.span(group)
        row = table[group]
        row[TierField.WINDOW] = config.window(group) or 0
        row[TierField.SPAN] = -1 if span is None else span
        row[TierField.PERIOD] = 1
        row[TierField.STATE] = group in config.aligned
        if span is None or alignment is None or alignment % size:
            continue
        keep, segment = -(-span // size), alignment if interval is None else interval
        if segment and keep >= segment // size:
            continue
        row[TierField.MASKED], row[TierField.KEEP] = 1, keep
        row[TierField.PERIOD] = segment // size if segment else NEVER
        row[TierField.ENDS], row[TierField.HORIZON] = interval is not None, interval is None
    table[: len(config.lookup_order), TierField.ORDER] = config.lookup_order
    numbers = np.zeros(TIER_WORDS, np.int32)
    for number, value in {
        TierNumber.CAPACITY: config.num_chunks,
        TierNumber.WINDOWS: len(config.lookup_order) - len(config.windows),
        TierNumber.PROMPT_ONLY: config.prompt_only,
        TierNumber.ALIGNMENT: alignment or 1,
        TierNumber.WHOLE_HEADS: HEAD_AGES not in config.bugs,
        TierNumber.THRESHOLD: config.threshold,
        TierNumber.TRACKED: config.tracked,
        TierNumber.REVIVES: RESET_REVIVES in config.bugs,
        TierNumber.GRID: config.chunk_tokens[config.aligned[0]] if config.aligned else 1,
    }.items():
        numbers[number] = value
    return table, numbers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TierTrace(DiagnosedTrace):
    """A `DiagnosedTrace`, and what the tier wants of it; the fields are as of `TierView`."""

    tier_groups: jax.Array
    tier_numbers: jax.Array
    moved: jax.Array
    rate: jax.Array
    beaten: jax.Array
    names: jax.Array


@dataclasses.dataclass(frozen=True)
class TierRules(View):
    """A `View`, the tier's parameters with it, and the trace."""

    tier: TierView
    trace: TierTrace

    def trace_key(self, place: Scalar) -> Scalar:
        """A prefix key of the trace."""
        return read(self.trace.keys, place)

    def prefix_of(self, request: Scalar) -> Prefix:
        """A request's prefix keys among the trace's."""
        tokens = self.trace.request(request, Arriving.PROMPT) + self.trace.request(request, Arriving.OUTPUT)
        units = divide(tokens, self.whole(CacheField.HASH_BLOCK))
        return Prefix(request, self.trace.request(request, Arriving.KEY_START), units)


# Arrays.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TierResident(ScheduleResident):
    """A replay between two dispatches; donated. Arrays from `nodes` on are as of `TierArrays`.

    Attributes:
      cache: the cache.
      counts: int32[58], the scalars of `TierArrays`, by `COUNTS`.
      tier: static sizes.
    """

    cache: State
    nodes: jax.Array
    frees: jax.Array
    where: jax.Array
    marks: jax.Array
    told: jax.Array
    tables: jax.Array
    jobs: jax.Array
    lists: jax.Array
    offers: jax.Array
    arc: jax.Array
    ghosts: jax.Array
    tracker: jax.Array
    tracked: jax.Array
    counts: jax.Array
    tier: TierRoom = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierSizes(CacheSizes):
    """Static sizes, the tier's among them."""

    tier: TierRoom


@dataclasses.dataclass(frozen=True)
class TierWorkspace(ScheduleWorkspace, TierArrays):
    """A `ScheduleWorkspace` with the arrays of a tier."""

    CARRIED = (*ScheduleWorkspace.CARRIED, *arrays.ARRAYS)
    EVERYTHING = (*ScheduleWorkspace.EVERYTHING, *arrays.ARRAYS, *COUNTS)


def begin(state: State, sizes: Sizes, room: TierRoom, steps: int) -> TierResident:
    """A replay in which nothing happened, as NumPy arrays."""
    begun, buckets = compiled_reasons.begin(state, sizes.requests, steps), sizes.buckets
    slots, entries = buckets.requests + 1, buckets.groups * buckets.row
    links: Any = ChunkNode if room.arc else User
    nodes = np.zeros(room.user(room.users + 3) * room.node_words, np.int32)
    for ends in map(room.user, (room.users, room.users + 1)):
        nodes[ends * room.node_words + np.array([links.NEXT, links.PREVIOUS])] = ends
    ghosts = np.zeros((2 * room.chunks + 3 if room.arc else 0, len(GhostWord)), np.int32)
    for ends in range(2 * room.chunks, len(ghosts) - 1):
        ghosts[ends, [GhostWord.NEXT, GhostWord.PREVIOUS]] = ends
    tracker = np.zeros((room.tracked + 2 if room.tracked else 0, len(TrackerWord)), np.int32)
    if room.tracked:
        tracker[room.tracked, [TrackerWord.NEXT, TrackerWord.PREVIOUS]] = room.tracked
    shapes = {
        "frees": room.chunks + 1,
        "where": (buckets.keys + 1) * buckets.groups,
        "marks": sizes.keys + 1,
        "told": slots * entries,
        "tables": slots * (SLOT_WORDS + ROW_WORDS * buckets.groups) + 1,
        "jobs": (room.jobs + 1) * JOB_WORDS,
        "lists": slots * (2 if room.states else 1) + 2 * (room.users + 1),
        "offers": (4 if room.arc else 2) * (entries + 1),
        "arc": len(ArcWord) + 1 if room.arc else 1,
        "tracked": (buckets.keys + 1) * buckets.groups if room.tracked else 1,
        "counts": len(COUNTS),
    }
    made: dict[str, Any] = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
    fields = {field.name: getattr(begun, field.name) for field in dataclasses.fields(begun)}
    made |= {"nodes": nodes, "ghosts": _filled(ghosts), "tracker": _filled(tracker)}
    return TierResident(**fields, **made, tier=room)  # type: ignore[arg-type]


def _filled(rows: np.ndarray) -> np.ndarray:
    """Rows as loops carry them; none are an element that is spare."""
    return rows.reshape(-1) if rows.size else np.zeros(1, np.int32)


def _dispatch(parameters: Any, trace: TierTrace, resident: TierResident, *, room: int) -> Any:
    native_loops.warn_if_interpreted()
    state, buckets = resident.cache, resident.cache.buckets
    pending = (buckets.requests + 1) * buckets.groups if buckets.parts else 0
    width = RESULT_FRONT + 2 * buckets.groups
    sizes = TierSizes(buckets, 1, 1, width, room, 0, pending, tier=resident.tier)
    zero = jnp.int32(0)
    outputs = {
        "ids": jnp.zeros(room + 1, jnp.int32),
        "events": jnp.zeros(EVENT_WORDS, jnp.int32),
        "copies": jnp.zeros((pending + 1) * COPY_WORDS, jnp.int32),
        "results": jnp.zeros(2 * sizes.width, jnp.int32),
    }
    carried = {**flat(state, ARRAYS), **flat(resident, SCHEDULE_ARRAYS), **flat(resident, arrays.ARRAYS), **outputs}
    counters = {name: state.counters[int(place)] for name, place in COUNTERS.items()}
    counters |= {name: resident.counts[place] for place, name in enumerate(COUNTS)}
    numbers = dict.fromkeys(("lane", "num_ids", "num_events", "num_copies"), zero)
    work = TierWorkspace(sizes, **carried, **counters, **numbers)
    tier_view = TierView(
        trace.tier_groups.reshape(-1), trace.tier_numbers, trace.moved, trace.rate, trace.beaten, trace.names
    )
    view = TierRules(
        parameters.cache.reshape(-1), parameters.groups.reshape(-1), None, buckets.groups, tier_view, trace
    )
    work, machine = schedule_loop.run(work, trace, resident, lambda w, m: compiled_tier.trip(w, view, trace, m))
    line = state.counters
    for name, place in COUNTERS.items():
        line = line.at[int(place)].set(getattr(work, name))
    left = TierResident(
        cache=State(**shaped(work, state, ARRAYS), counters=line),
        machine=jnp.stack(machine),
        counts=jnp.stack([getattr(work, name).astype(jnp.int32) for name in COUNTS]),
        **shaped(work, resident, SCHEDULE_ARRAYS),
        **shaped(work, resident, arrays.ARRAYS),
        tier=resident.tier,
    )
    return left, work.ids[:-1], work.num_ids


program = programs(_dispatch, "vllm-tier-schedule")


class TierReplay(compiled.CompiledReplay):
    """A trace, a cache with a second tier, and a schedule, replayed in as few dispatches as steps allow.

    Programs have room for `room` chunks at least, so that tiers of several sizes share one.
    """

    def __init__(
        self,
        tier: Any,
        schedule: Schedule,
        trace: Incoming,
        *,
        sizes: Sizes,
        jobs: int,
        room: int = 0,
        diagnose: bool = True,
        steps: int = STEPS,
        sampling: Sampling | None = None,
    ) -> None:
        self.tier, self.config = tier, tier.config.cache
        self._diagnose, self.sampling, self._done = diagnose, sampling, 0
        values, state = cache.init(self.config, sizes.buckets)
        np.asarray(values.cache)[CacheField.SILENT] = not diagnose
        inputs = compiled.inputs_of(self.config, schedule, trace, sizes, values, diagnose)
        most = sizes.buckets.groups * sizes.buckets.row
        moved, rate = compiled_links.tables(most, tier)
        groups, numbers = parameters(tier.config, sizes.buckets.groups)
        told = bool(tier.step_bytes and tier.step_tokens)
        numbers[TierNumber.LIMITED], numbers[TierNumber.SLOWER] = bool(tier.step_bytes), told
        names = np.zeros(sizes.requests + 1, np.int32)
        names[np.array(sorted(range(trace.count), key=str), np.int64)] = np.arange(trace.count)
        fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        beaten = compiled_links.beaten(most, tier)
        inputs = TierTrace(
            **fields,
            tier_groups=groups,  # type: ignore[arg-type]
            tier_numbers=numbers,  # type: ignore[arg-type]
            moved=moved,  # type: ignore[arg-type]
            rate=rate,  # type: ignore[arg-type]
            beaten=beaten,  # type: ignore[arg-type]
            names=names,  # type: ignore[arg-type]
        )
        chunks = bucket(max(room, tier.config.num_chunks), 1024)
        counted = bucket(min(tier.config.tracked, sizes.keys * sizes.buckets.groups), 64)
        tracked = counted if tier.config.threshold >= 2 else 0
        self._chunks = TierRoom(
            chunks,
            sizes.requests + 1,
            jobs,
            tracked,
            arc=tier.config.policy == "arc",
            states=bool(tier.config.aligned),
            again=not tier.config.prompt_only and bool(groups[:, TierField.HORIZON].any()),
        )
        resident = begin(state, sizes, self._chunks, steps)
        Dispatches.__init__(self, program(0), trace, len(self.config.topology.groups), 0, values, inputs, resident)

    @property
    def overflowed(self) -> bool:
        """True if slots or jobs ran out, so that more of them have to be tried."""
        return bool(self.counts["overflow"])

    @property
    def blocked(self) -> int | None:
        """The step in which requests with loaded blocks began to wait for each other's for good; None: none did."""
        machine = Machine(*np.asarray(self._resident.machine))
        failed = machine.mode == Mode.FAILED and machine.status == compiled_tier.BLOCKED
        return int(machine.step) if failed else None

    @property
    def counts(self) -> dict[str, int]:
        """The tier's scalars."""
        return dict(zip(COUNTS, np.asarray(self._resident.counts).tolist(), strict=True))

    def order(self) -> list[int]:
        """Chunks of requests that ended, the next to leave first; of ARC, see `ChunkPool.settled`."""
        room, links, found = self._chunks, self._links, list[int]()
        for ends in map(room.user, (room.users, room.users + 1)):
            at = links[ends]
            while at != ends:
                found += [at] if room.arc else self._chunks_of((at - room.chunks) // room.user_rows)
                at = links[at]
        if room.arc:
            words = np.asarray(self._resident.arc)
            found += words[[ArcWord.ONCE, ArcWord.GONE_ONCE, ArcWord.GONE_OFTEN, ArcWord.WHOLE]].tolist()
        return found

    @property
    def _links(self) -> list[int]:
        """Of each node that stands in a list, the next one."""
        nodes, word = np.asarray(self._resident.nodes), ChunkNode.NEXT if self._chunks.arc else User.NEXT
        return nodes[word :: self._chunks.node_words].tolist()

    @property
    def _users(self) -> np.ndarray:
        """`User` of each request, a row each."""
        room = self._chunks
        return np.asarray(self._resident.nodes)[room.chunks * room.node_words :].reshape(-1, USER_WORDS)

    def _chunks_of(self, request: int) -> list[int]:
        """Chunks that an ended request stands for under LRU, the next to leave first."""
        words, width = self._users[request], self._chunks.node_words
        if not words[User.FLAGS] & ENDED:
            return []
        start, trace = int(self._trace.ends[request]), self._trace
        where = np.asarray(self._resident.where).reshape(-1, self._resident.cache.buckets.groups)
        chunks = where[trace.keys[start : start + words[User.CURSOR]]].reshape(-1)[::-1] - 1
        chunks = chunks[chunks >= 0]
        owners = np.asarray(self._resident.nodes)[ChunkNode.OWNER :: width]
        return chunks[owners[chunks] == request + 1].tolist()

    def left(self) -> dict[str, Any]:
        counts, tier = self.counts, self.tier
        told = tier.step_bytes and tier.step_tokens
        names = {"read": "read_once", **{name: name for name in ("stored", "loaded", "evicted", "refused", "peak")}}
        extra: dict[str, Any] = {f"tier_{name}": counts[source] for name, source in names.items()}
        extra |= {f"tier_{name}": counts[name] for name in ("flushed", "wait_steps", "loads", "load_steps", "waits")}
        size, moved = (
            tier.chunk_bytes * tier.copies,
            [counts[name] for name in ("loaded_tokens", "load_chunks", "loads")],
        )
        extra |= {
            "tier_stored_bytes": counts["stored"] * size,
            "tier_loaded_bytes": counts["loaded"] * size,
            "tier_slower_loads": counts["slower"] if told else None,
            "tier_saved_steps": tier.saved(*moved) if told else None,
        }
        return {**super().left(), "extra": extra}

    def recorder(self) -> Recorder:
        recorder = super().recorder()
        loaded = self._users[:, User.LOADED].tolist()
        for index, record in recorder.requests.items():
            record.loaded = loaded[index]
        return recorder


def sizes_of(config: VllmConfig, schedule: Schedule, trace: Incoming, factor: int) -> Sizes:
    """Sizes that a replay fits, with slots for those that run, those that just ended, and those that are loaded for.

    How many wait for loads at a time is known once they do: where there are more, `factor` is doubled.
    """
    running = min(schedule.max_running, max(1, trace.count))
    sizes = compiled.sizes_of(config, schedule, trace, factor * max(running + running // 2, running + 16))
    return dataclasses.replace(sizes, buckets=dataclasses.replace(sizes.buckets, beside=len(Handed)))


JOBS = 4096
"""Stores that go on at a time, at first."""
