"""A replay with LMCache 0.5.6 behind vLLM 0.33's cache in place of vLLM's own offloading (`LMCacheMPConnector`).

A server next to the engine keeps objects: for each chunk of a prefix, 256 tokens, one of full attention, one of each
length of window in chunks, one of recurrent states (`--separate-object-groups`, without which states are stored that
nobody computed). A request is looked up once; it has the longest prefix of whole chunks that every kind of object
serves. What a step completes of a prompt is stored. The server evicts by the clock: each second, if it is fuller than a
share, a share of its objects, least recently used first. Objects are counted in blocks, as vLLM's chunks are.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.dialects.vllm.offload.orders import Job, Orders, Step, TransferJob
from hkv.dialects.vllm.schedule.schedule import Diagnosis
from hkv.dialects.vllm.schedule.tier import Tier
from hkv.dialects.vllm.schedule.tiered import TieredCache
from hkv.dialects.vllm.schedule.tiered_replay import TieredReplay
from hkv.errors import ConfigError
from hkv.replay.run import COMPILED, REFERENCE, Progress
from hkv.replay.schedule import Arrival, Recorder, Schedule
from reference.dialects.vllm.request import Request

CHUNK = 256
"""Tokens of a chunk (`chunk_size`)."""

WATERMARK, RATIO = 0.8, 0.2
"""Share of the memory from which on objects are evicted (`trigger_watermark`), and of objects (`eviction_ratio`)."""

Key: TypeAlias = tuple[int, int]
"""Name of an object: the interned prefix that ends with its chunk, and the kind of object."""


@dataclasses.dataclass(frozen=True)
class ObjectKind:
    """Objects of one kind, one for each chunk.

    Attributes:
      window: chunks before a length that resuming there takes; None for all.
      kept: of each group that lies in them, the group and how many of a chunk's last blocks do.
    """

    window: int | None
    kept: tuple[tuple[int, int], ...]

    @property
    def blocks(self) -> int:
        """Blocks of an object."""
        return sum(count for _, count in self.kept)

    def wanted(self, length: int) -> range:
        """Chunks that a prefix of so many is resumed from."""
        return range(0 if self.window is None else max(0, length - self.window), length)


def object_kinds(config: OffloadConfig, chunk: int) -> tuple[ObjectKind, ...]:
    """The kinds of objects of a cache (LMCache 0.5.6 `KVLayerGroupsManager`, object groups apart).

    Raises:
      ConfigError: a chunk that is not whole blocks, or ends inside the blocks of a shorter window.
    """
    kinds: dict[tuple[bool, int | None], list[tuple[int, int]]] = {}
    for group, (spec, size) in enumerate(zip(config.cache.topology.specs, config.cache.block_sizes, strict=True)):
        if chunk % size:
            raise ConfigError("offload_chunk_tokens", chunk, f"a multiple of group {group}'s block of {size}")
        window = size if spec.snapshot else spec.most_read if spec.slides else None
        if window is not None and window < chunk and window % size:
            expected = f"whole blocks of {size} in a window below the chunk of {chunk} tokens: LMCache refuses others"
            raise ConfigError(f"groups[{group}].window", window, expected)
        kept = chunk if window is None else min(window, chunk)
        key = (spec.snapshot, None if window is None else -(-window // chunk))
        kinds.setdefault(key, []).append((group, kept // size))
    return tuple(ObjectKind(window, tuple(kept)) for (_, window), kept in kinds.items())


def longest_hit(kinds: Sequence[ObjectKind], present: Callable[[int, int], bool], chunks: int) -> int:
    """Chunks of the longest prefix that every kind of object serves, by whether a kind's object of a chunk is there.

    It may be served where a shorter one is not (LMCache 0.5.6 `fold_unfold_grouped`).
    """
    for kind, each in enumerate(kinds):
        if each.window is None:
            chunks = next((chunk for chunk in range(chunks) if not present(kind, chunk)), chunks)
    windows = [(kind, each) for kind, each in enumerate(kinds) if each.window is not None]
    while chunks:
        # The last chunk that is lacking bounds what may be served: nothing that is resumed from it.
        lacking = [
            next((chunk for chunk in reversed(each.wanted(chunks)) if not present(kind, chunk)), None)
            for kind, each in windows
        ]
        if not any(chunk is not None for chunk in lacking):
            return chunks
        chunks -= 1
    return 0


@dataclasses.dataclass
class Counts:
    """Figures in blocks but for `refused`, as of vLLM's own tier (`reference.dialects.vllm.offload.records.Counts`)."""

    stored: int = 0
    read: int = 0
    loaded: int = 0
    evicted: int = 0
    refused: int = 0
    peak: int = 0


class Objects:
    """The server's memory: objects by name, in order of use; `capacity` in blocks. Its `counts` are in blocks, too."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used, self.counts = capacity, 0, Counts()
        self._objects: OrderedDict[Key, _Object] = OrderedDict()

    def ready(self, key: Key) -> bool:
        """True for an object that can be read."""
        found = self._objects.get(key)
        return found is not None and found.ready

    def blocks(self, key: Key) -> int:
        """Blocks of an object that is there."""
        return self._objects[key].blocks

    def reserve(self, keys: Sequence[Key], blocks: int) -> list[Key]:
        """Makes room for those of some objects, so many blocks each, that are neither there nor being written.

        All of them, or none where there is not room for all.
        """
        new = [key for key in keys if key not in self._objects]
        if self.used + len(new) * blocks > self.capacity:
            self.counts.refused += 1
            return []
        for key in reversed(new):
            self._objects[key] = _Object(blocks)
        self.used += len(new) * blocks
        self.counts.stored += len(new) * blocks
        self.counts.peak = max(self.counts.peak, self.used)
        return new

    def written(self, keys: Sequence[Key]) -> None:
        """Objects can be read from now on."""
        for key in keys:
            self._objects[key].ready = True
        self.touch(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Those objects that are there have been used, the last of them first."""
        for key in reversed(keys):
            if key in self._objects:
                self._objects.move_to_end(key)

    def pin(self, keys: Iterable[Key]) -> None:
        """Objects stay until they are unpinned as often."""
        for key in keys:
            self._objects[key].pins += 1

    def unpin(self, keys: Iterable[Key]) -> None:
        """Takes a pin of each object back."""
        for key in keys:
            self._objects[key].pins -= 1

    def read(self, keys: Iterable[Key]) -> None:
        """Counts loads of objects."""
        for found in (self._objects[key] for key in keys):
            self.counts.loaded += found.blocks
            self.counts.read += found.blocks * (not found.read)
            found.read = True

    def tick(self) -> bool:
        """A second has passed; whether anything left (`L1EvictionController`, LRU)."""
        if self.used < WATERMARK * self.capacity or not self._objects:
            return False
        idle = (key for key, found in self._objects.items() if found.ready and not found.pins)
        leaving = list(itertools.islice(idle, max(1, int(len(self._objects) * RATIO))))
        for key in leaving:
            self.used -= (blocks := self._objects.pop(key).blocks)
            self.counts.evicted += blocks
        return bool(leaving)


@dataclasses.dataclass(slots=True)
class _Object:
    blocks: int
    ready: bool = False
    pins: int = 0
    read: bool = False


@dataclasses.dataclass
class Tracked:
    """A request as the connector knows it.

    Attributes:
      request: as the cache knows it.
      found: chunks that its lookup found; None before it.
      pinned: objects that stay for it.
      blocks: of each group, its blocks as they were told; those that a window gives up stay named.
      local: tokens of its hit on the GPU.
      scheduled: tokens that steps computed.
      stored: tokens that are stored, or were offered.
      over: whether it was preempted, after which nothing is looked up or stored for it.
    """

    request: Request
    found: int | None = None
    pinned: list[Key] = dataclasses.field(default_factory=list)
    blocks: list[list[int]] = dataclasses.field(default_factory=list)
    jobs: set[int] = dataclasses.field(default_factory=set)
    local: int = 0
    scheduled: int = 0
    stored: int = 0
    over: bool = False
    finished: bool = False


class LmcacheConnector:
    """The scheduler's side, with the server's memory: what `hkv.dialects.vllm.offload.connector` is of vLLM's."""

    def __init__(self, config: OffloadConfig, chunk: int) -> None:
        self.config, self.chunk, self.kinds = config, chunk, object_kinds(config, chunk)
        self.objects = Objects(config.num_chunks)
        self.requests: dict[str, Tracked] = {}
        self.jobs: dict[int, Job] = {}
        self._number = itertools.count()
        self._loads: list[TransferJob] = []

    def arrive(self, request: Request) -> None:
        """A request comes."""
        self.requests[request.id] = Tracked(request, blocks=[[] for _ in self.config.cache.block_sizes])

    def match(self, id: str, local: int) -> tuple[int, bool]:
        """Tokens beyond a request's hit on the GPU that are loaded, and whether any are."""
        state = self.requests[id]
        if state.over:
            return 0, False
        state.local = local
        if state.found is None:
            tokens = state.request.num_tokens - any(spec.snapshot for spec in self.config.cache.topology.specs)
            state.found = longest_hit(
                self.kinds,
                lambda kind, chunk: self.objects.ready(self.key(state, kind, chunk)),
                tokens // self.chunk,
            )
            state.pinned = self._range(state, 0, state.found)
            self.objects.pin(state.pinned)
        found = state.found * self.chunk
        loaded = max(0, found - local)
        loaded -= bool(loaded) and found == state.request.num_tokens  # the last token is computed again
        return loaded, loaded > 0

    def key(self, state: Tracked, kind: int, chunk: int) -> Key:
        """Name of a kind's object of a chunk."""
        return state.request.keys[(chunk + 1) * self.chunk // self.config.cache.hash_block_size - 1], kind  # type: ignore[return-value]

    def _range(self, state: Tracked, start: int, end: int) -> list[Key]:
        """Objects from which a request resumes after `end` chunks, those before `start` left out."""
        return [
            self.key(state, number, chunk)
            for number, kind in enumerate(self.kinds)
            for chunk in kind.wanted(end)
            if chunk >= start
        ]

    def allocated(
        self, id: str, rows: Sequence[Sequence[int]], external: int, is_hashed: Callable[[int], bool]
    ) -> None:
        """A request was given blocks, and the job is made if tokens are to be loaded into them."""
        del is_hashed
        state = self.requests[id]
        self._note_blocks(state, [row[len(known) :] for row, known in zip(rows, state.blocks, strict=True)])
        if state.over:
            return
        state.stored = max(state.stored, (state.found or 0) * self.chunk)
        if external:
            keys = self._range(state, state.local // self.chunk, state.found or 0)
            self.objects.pin(keys)
            self.objects.read(keys)
            self._loads.append(self._job(state, keys, writes=False))
        self.objects.unpin(state.pinned)
        state.pinned = []

    def _note_blocks(self, state: Tracked, rows: Sequence[Sequence[int]]) -> None:
        for known, row in zip(state.blocks, rows, strict=True):
            known += row

    def _job(self, state: Tracked, keys: list[Key], *, writes: bool) -> TransferJob:
        """A job for some objects, which counts each as often as it has blocks."""
        number, moved = next(self._number), [key for key in keys for _ in range(self.objects.blocks(key))]
        state.jobs.add(number)
        self.jobs[number] = Job(state, moved, writes, self.config.workers)
        return TransferJob(number, state.request.id, list(range(len(moved))), [], [], [])

    def finish(self, id: str, aborted: bool = False) -> None:
        """A request has finished, and has used all of its objects that are there."""
        del aborted
        state = self.requests[id]
        state.finished = True
        self.objects.unpin(state.pinned)
        chunks = len(state.request.keys) * self.config.cache.hash_block_size // self.chunk
        self.objects.touch([self.key(state, kind, at) for kind in range(len(self.kinds)) for at in range(chunks)])

    def step(self, step: Step) -> Orders:
        """Orders of a step that has been scheduled."""
        for id, rows, whole in step.tables:
            if rows is not None and not whole:  # of others, `allocated` was told
                self._note_blocks(self.requests[id], rows)
        for id in step.preempted:
            if id in self.requests:
                self.requests[id].over = True
        stores = [
            transfer
            for id, tokens in step.tokens.items()
            if id in self.requests and (transfer := self._store(self.requests[id], tokens)) is not None
        ]
        loads, self._loads = self._loads, []
        for id in step.finished:
            self.requests.pop(id, None)
        return Orders(loads, stores, set())

    def _store(self, state: Tracked, tokens: int) -> TransferJob | None:
        """The store of the whole chunks that a step completes of a request's prompt."""
        state.scheduled += tokens
        if state.over:
            return None
        request, sizes = state.request, self.config.cache.block_sizes
        ends = [state.scheduled + max(state.local, (state.found or 0) * self.chunk), request.num_tokens]
        ends += [len(row) * size for row, size in zip(state.blocks, sizes, strict=True)]
        ends += [request.num_prompt] * self.config.prompt_only
        first, end = state.stored // self.chunk, min(ends) // self.chunk
        if end <= first:
            return None
        state.stored, reserved = end * self.chunk, list[Key]()
        for number, kind in enumerate(self.kinds):
            keys = [self.key(state, number, chunk) for chunk in range(first, end) if self._has(state, kind, chunk)]
            reserved += self.objects.reserve(keys, kind.blocks)
        return self._job(state, reserved, writes=True) if reserved else None

    def _has(self, state: Tracked, kind: ObjectKind, chunk: int) -> bool:
        """True if a request has any block of a chunk's object: of others, nothing was computed."""
        for group, count in kind.kept:
            end = (chunk + 1) * self.chunk // self.config.cache.block_size(group)
            if any(state.blocks[group][end - count : end]):
                return True
        return False

    def report(self, number: int, workers: int = 1) -> None:
        """Workers have finished their parts of a job."""
        job = self.jobs[number]
        job.left -= workers
        if job.left:
            return
        keys: list[Any] = list(dict.fromkeys(job.keys))
        if job.writes:
            self.objects.written(keys)
        else:
            self.objects.unpin(keys)
        job.owner.jobs.discard(number)
        del self.jobs[number]


class LmcacheCache(TieredCache):
    """A cache with LMCache behind it, for a replay to study; `chunk`: tokens of a chunk, `seconds`: steps in one."""

    def __init__(self, tier: Tier, chunk: int, second: int) -> None:
        super().__init__(tier.config.cache, tier)
        self.chunk, self.second = chunk, max(1, second)
        object_kinds(tier.config, chunk)

    def with_tier(self, config: OffloadConfig) -> LmcacheCache:
        return LmcacheCache(dataclasses.replace(self.tier, config=config), self.chunk, self.second)

    def warnings(self, longest: int) -> Sequence[str]:
        del longest
        return ()

    def require_compiled(self) -> None:
        raise ConfigError("engine", COMPILED, f"{REFERENCE}: LMCache's rules have no compiled schedule")

    def loop(
        self, schedule: Schedule, coming: Iterable[Arrival], driven: Any, oracle: Any, progress: Progress
    ) -> LmcacheReplay:
        if not isinstance(driven, NumpyEngine):
            raise ConfigError("engine", type(driven).__name__, f"{REFERENCE}: with a second tier")
        recorder = Recorder(self.config.num_blocks, Diagnosis(self.config, driven.manager), progress)
        return LmcacheReplay(self, driven, schedule, coming, recorder)


class LmcacheReplay(TieredReplay):
    """Drives the reference through a trace as vLLM 0.33's scheduler would with LMCache's connector."""

    def __init__(
        self,
        cache: LmcacheCache,
        engine: NumpyEngine,
        schedule: Schedule,
        arrivals: Iterable[Arrival],
        observer: Recorder,
    ) -> None:
        super().__init__(cache.tier, engine, schedule, arrivals, observer, cache._samples(), len(cache.groups))
        self._cache, self._server = cache, LmcacheConnector(cache.tier.config, cache.chunk)
        self._connector, self._chunks = self._server, self._server.objects  # type: ignore[assignment]

    def _step(self, step: int) -> None:
        for _ in range(step // self._cache.second - (self._now // self._cache.second if self._now else 0)):
            if not self._server.objects.tick():
                break
        super()._step(step)
