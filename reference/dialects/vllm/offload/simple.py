"""The simpler second tier: a second pool of blocks with the GPU's own rules, behind vLLM's `SimpleCPUOffloadConnector`.

The tier is a cache of the same groups. A lookup asks it for what follows the GPU's hit, by the rules of hits, and pins
what it finds until the request has blocks. A step stores blocks that earlier steps computed and that have a key, as
many as the tier has free; the rest of a request is stored when it ends. Both sides of a transfer are referenced while
it goes on, so that nothing has to be flushed. Where it is lazy, a step stores what the GPU is about to hand out
instead, whosever it was. vLLM 0.33 `SimpleCPUOffloadScheduler`, in host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from hkv.dialects.vllm.offload.config import LAZY_RENEWS, LAZY_WALK, OffloadConfig
from hkv.dialects.vllm.offload.orders import Orders, Rows, Step, TransferJob
from hkv.errors import OperationError
from reference.dialects.vllm.coordinator import Coordinator, cacheable_tokens
from reference.dialects.vllm.dialect import VLLM
from reference.dialects.vllm.hits import find_alone, find_together
from reference.dialects.vllm.request import Request
from reference.keys.views import Chain, block_keys
from reference.state.pool import NULL, Pool


@dataclasses.dataclass
class Copies:
    """A job that goes on: blocks of the GPU and of the tier, in pairs.

    Attributes:
      left: reports that are still to come, one a worker.
      owners: requests that wait for it.
      writes: whether it stores.
      abandoned: whether the tier was emptied since, so that what it stores is not kept.
    """

    gpu: list[int]
    tier: list[int]
    left: int
    owners: list[str]
    writes: bool
    abandoned: bool = False


@dataclasses.dataclass
class Saved:
    """A request that was given blocks, as far as stores go.

    Attributes:
      request: as the cache knows it.
      blocks: of each group, its blocks as the steps told them.
      cursors: of each group, the block from which on it stores.
      jobs: its stores that go on.
      finished: whether it has finished.
    """

    request: Request
    blocks: list[list[int]]
    cursors: list[int]
    jobs: set[int] = dataclasses.field(default_factory=set)
    finished: bool = False


class SimpleConnector:
    """The tier, its transfers, and what the scheduler asks of it.

    Attributes:
      pool: the tier's blocks.
      requests: those that were given blocks and have not finished, or have stores that go on; none if it is lazy.
      jobs: those that go on, by number.
      reading: blocks of the GPU that stores read.
    """

    def __init__(self, config: OffloadConfig, gpu: Pool) -> None:
        self.config, self._gpu = config, gpu
        partial = config.cache.partial_hits and not config.lazy
        tier = dataclasses.replace(config.cache, num_blocks=config.num_chunks, partial_hits=partial)
        self._cache = Coordinator(tier, VLLM.kind)
        self.pool = self._cache.pool
        self.requests: dict[str, Saved] = {}
        self.jobs: dict[int, Copies] = {}
        self.reading: set[int] = set()
        self._waiting: dict[str, Request] = {}
        self._found: dict[str, tuple[list[list[int]], int]] = {}
        self._ordered: dict[str, Copies] = {}
        self._loading: dict[str, int] = {}
        self._ended: list[Copies] = []
        self._number = 0
        self._looked_at = NULL

    # Requests come, look, and go.

    def arrive(self, request: Request, load_limit: int | None = None, store_limit: int | None = None) -> None:
        """A request comes; limits do not count here."""
        self._waiting[request.id] = request

    def match(self, id: str, local: int) -> tuple[int | None, bool]:
        """Tokens beyond a request's hit on the GPU that can be loaded; a load takes longer than the step, always.

        Args:
          id: a waiting request.
          local: tokens of its hit, whole scheduler blocks.
        """
        self._unpin(id)
        request, cache = self._waiting[id], self.config.cache
        keys: Sequence[Chain] = request.keys[local // cache.hash_block_size :]
        most = request.num_tokens - 1 - local
        alone = any(spec.most_read and not spec.slides and local % spec.most_read for spec in cache.topology.specs)
        if not keys or most <= 0 or alone:
            return 0, False
        members = self._cache.members
        if self._cache.alone:
            found = find_alone(self._cache.kinds[0], keys, most, members[0].eagle)
        else:
            found = find_together(members, keys, most, len(self._cache.kinds), self._cache.config.partial_hits)
        if not found.hit:
            return 0, False
        self.pool.touch(block for row in found.blocks for block in row)
        self._found[id] = ([list(row) for row in found.blocks], local)
        return found.hit, True

    def _unpin(self, id: str) -> None:
        rows, _ = self._found.pop(id, ([], 0))
        self.pool.release(block for row in rows for block in row)

    def allocated(self, id: str, rows: Rows, external: int, is_hashed: Callable[[int], bool]) -> None:
        """A request was given blocks; if tokens are to be loaded into them, the load waits for the step's end."""
        if id not in self.requests and not self.config.lazy:
            groups = len(rows)
            self.requests[id] = Saved(self._waiting[id], [[] for _ in range(groups)], [0] * groups)
        found, local = self._found.get(id, ([], 0))
        if external:
            copies = Copies([], [], self.config.workers, [id], writes=False)
            for group, row in enumerate(found):
                size = self.config.cache.block_size(group)
                for at, block in enumerate(row[: -(-external // size)]):
                    if block != NULL:
                        copies.gpu.append(rows[group][local // size + at])
                        copies.tier.append(block)
            self.pool.touch(copies.tier)
            self._gpu.touch(copies.gpu)
            self._ordered[id] = copies
        self._unpin(id)

    def finish(self, id: str, aborted: bool = False, rows: Rows = ()) -> None:
        """A request has finished: what it computed and has not stored is stored with the next step.

        Args:
          id: the request.
          aborted: whether it was aborted.
          rows: its blocks up to its computed tokens.
        """
        del self._waiting[id]
        state = self.requests.get(id)
        if state is not None:
            blocks, _ = self._select(state, rows)
            tail = self._tail(state.request, rows)
            if tail not in (NULL, *blocks) and len(blocks) < len(self.pool.free):
                blocks.append(tail)
            if blocks:
                self._ended.append(self._take(blocks))
        self._unpin(id)
        if id in self._ordered:
            self._give_back(self._ordered.pop(id))
        if state is not None:
            state.finished = True
            self._forget(id)

    def _forget(self, id: str) -> None:
        state = self.requests.get(id)
        if state is not None and state.finished and not state.jobs:
            del self.requests[id]

    # Steps.

    def step(self, step: Step) -> Orders:
        """Orders of a step that has been scheduled: one store of all that is new, and the loads."""
        flushed = {number for number, job in self.jobs.items()} if step.preempted else set[int]()
        stored, owners = (self._walk(), []) if self.config.lazy else self._copies_of(step)
        for copies in self._ended:
            stored.gpu += copies.gpu
            stored.tier += copies.tier
        self._ended = []
        loads, stores = list[TransferJob](), list[TransferJob]()
        if stored.gpu:
            number = self._next()
            self.jobs[number] = dataclasses.replace(stored, owners=owners)
            for id in owners:
                self.requests[id].jobs.add(number)
            stores.append(TransferJob(number, "", stored.tier, stored.gpu, [], []))
        for id, copies in self._ordered.items():
            number = self._loading[id] = self._next()
            self.jobs[number] = copies
            loads.append(TransferJob(number, id, copies.tier, copies.gpu, [], []))
        self._ordered = {}
        return Orders(loads, stores, flushed)

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _walk(self) -> Copies:
        """Blocks that a step stores lazily: those at the front of the GPU's free ones that the tier lacks, as many as
        it has room for."""
        queue, target, found, room = list(self._gpu.free), self.config.near_eviction, list[int](), len(self.pool.free)
        if LAZY_WALK not in self.config.bugs:
            target = min(target, self.pool.num_blocks - 1)  # what is stored is not to push itself out
        elif self._looked_at in self._gpu.free:
            queue = queue[queue.index(self._looked_at) + 1 :]
        else:
            self._looked_at = NULL
        for block in queue[:target]:
            if len(found) >= room:
                break
            self._looked_at = block
            if self._is_new(block):
                found.append(block)
        return self._take(found)

    def _copies_of(self, step: Step) -> tuple[Copies, list[str]]:
        """Blocks that a step stores, states that are handed over first; and the requests whose they are."""
        stored, owners = Copies([], [], self.config.workers, [], writes=True), list[str]()
        for id, entries in step.offers.items():
            state = self.requests.get(id)
            if state is None or state.finished or id in step.preempted or id in step.finished:
                continue
            for _, block, _ in entries:
                if self._is_new(block) and len(self.pool.free):
                    self._add(stored, self._take([block]))
                    owners.append(id)
        for id in step.preempted:
            if id in self.requests:
                state = self.requests[id]
                state.blocks, state.cursors = [[] for _ in state.blocks], [0] * len(state.cursors)
        for id, rows, whole in step.tables:
            state = self.requests.get(id)
            if state is None or state.finished:
                continue
            if whole:
                state.blocks = [[] for _ in state.blocks]
            for blocks, row in zip(state.blocks, rows or [[] for _ in state.blocks], strict=True):
                blocks += row
            if step.tokens.get(id, 0):
                blocks, passed = self._select(state, state.blocks)
                if blocks:
                    self._add(stored, self._take(blocks))
                    owners.append(id)
                state.cursors = [sum(pair) for pair in zip(state.cursors, passed, strict=True)]
        return stored, list(dict.fromkeys(owners))

    def _add(self, stored: Copies, copies: Copies) -> None:
        stored.gpu += copies.gpu
        stored.tier += copies.tier

    def _take(self, blocks: list[int]) -> Copies:
        """Blocks of the tier for some of the GPU's, both held from now on."""
        self.reading.update(blocks)
        tier = self.pool.take(len(blocks))
        self._gpu.touch(blocks)
        return Copies(list(blocks), tier, self.config.workers, [], writes=True)

    def _select(self, state: Saved, rows: Rows) -> tuple[list[int], list[int]]:
        """Blocks of a request that are computed and not in the tier, as many as it has free; and of each group how far
        that goes. Of a window's blocks that were given up, those that the GPU still knows by their key."""
        found, passed, free = list[int](), [0] * len(rows), len(self.pool.free)
        request, cache = state.request, self.config.cache
        for kind, row in zip(self._cache.kinds, rows, strict=True):
            if len(found) >= free:
                break
            group, size = kind.group, cache.block_size(kind.group)
            if group in self.config.aligned:
                continue
            keys = block_keys(request.keys, cache.hash_block_size, size)
            ready = min(len(row), cacheable_tokens(self._cache, request.num_computed, kind) // size)
            for at in range(state.cursors[group], ready):
                block = row[at]
                if block == NULL and at < len(keys):
                    (block,) = self._gpu.find(keys[at], [group]) or [NULL]
                if self._is_new(block):
                    if len(found) >= free:
                        break
                    found.append(block)
                passed[group] += 1
        return found, passed

    def _tail(self, request: Request, rows: Rows) -> int:
        """Block of full attention that a prompt's last whole key ends inside, if it has that key and the tier has not;
        NULL for none. Of several groups, the first one's alone."""
        cache, unit = self.config.cache, self.config.cache.hash_block_size
        group = next(group for group, spec in enumerate(cache.topology.specs) if spec.reads_all)
        end, size = request.num_prompt // unit * unit, cache.block_size(group)
        if not self._cache.config.partial_hits or not end % size or end > request.num_computed:
            return NULL
        block, key = rows[group][end // size], (group, request.keys[end // unit - 1])
        there = block in self.reading or self.pool.table.first(key) is not None
        return NULL if there or key not in self._gpu.keys_of(block) else block

    def _is_new(self, block: int) -> bool:
        """True if a block has a key, which the tier does not know, and is not on its way."""
        key = self._gpu.primary[block]
        return key is not None and block not in self.reading and self.pool.table.first(key) is None

    # Reports.

    def take_reports(self, reports: Mapping[int, int], received: Sequence[str]) -> None:
        """Workers have finished their parts of jobs; loads that ended count before stores, by names."""
        for number in reports:
            if number >= self._number:
                raise OperationError("job", number, f"below {self._number}, the next one")
        for id in sorted(received):
            self._give_back(self.jobs.pop(self._loading.pop(id)))
        for number, workers in reports.items():
            job = self.jobs.get(number)
            if job is None or not job.writes:
                continue
            job.left -= workers
            if not job.left:
                del self.jobs[number]
                self._stored(number, job)

    def _stored(self, number: int, job: Copies) -> None:
        if not job.abandoned:
            self.reading.difference_update(job.gpu)
            for source, target in zip(job.gpu, job.tier, strict=True):
                for key in self._gpu.keys_of(source):
                    self.pool.insert(key, target, self._gpu.covered[source])
        self._give_back(job)
        if self.config.lazy and LAZY_RENEWS not in self.config.bugs:
            freed = [block for block in job.gpu if not self._gpu.refs[block]]
            for block in freed:
                self._gpu.free.remove(block)
            self._gpu.free.prepend(freed)
        for id in job.owners:
            if id in self.requests:
                self.requests[id].jobs.discard(number)
                self._forget(id)

    def _give_back(self, copies: Copies) -> None:
        self.pool.release(copies.tier)
        self._gpu.release(copies.gpu)

    def reset(self) -> bool:
        """Empties the tier if no transfer goes on, which then keeps nothing; requests that run store no more."""
        for id in list(self._found):
            self._unpin(id)
        for copies in (*self._ended, *self._ordered.values()):
            self._give_back(copies)
        self._ended, self._ordered = [], {}
        for job in self.jobs.values():
            job.abandoned = True
            job.owners = []
        self.reading.clear()
        self._looked_at = NULL
        self.requests.clear()
        return not self.jobs and self.pool.reset()
