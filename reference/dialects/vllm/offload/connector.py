"""The scheduler's side of the second tier: what a request may load, what a step stores, and which jobs it waits for.

A request's chunks are offered as its tokens are scheduled, and the transfers read its blocks behind its back: jobs are
told when they are done, however late. A block that a job still reads and that is handed out meanwhile has the job
*flushed*: the worker finishes it before the step. vLLM 0.33 `OffloadingConnectorScheduler`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from hkv.dialects.vllm.offload.config import (
    ALL_OR_NOTHING,
    HEAD_AGES,
    OWN_HEAD,
    RESET_REVIVES,
    TAIL_PAST_LIMIT,
    OffloadConfig,
)
from hkv.errors import EngineFailure, OperationError
from reference.dialects.vllm.offload.lookup import Prefixes, external_hit, tail_hit
from reference.dialects.vllm.offload.offers import Progress, offered_chunks
from reference.dialects.vllm.offload.orders import Orders, Rows, Step, TransferJob
from reference.dialects.vllm.offload.policies import Key
from reference.dialects.vllm.offload.pool import ChunkPool, Context, PreparedStore
from reference.dialects.vllm.request import Request


@dataclasses.dataclass
class Job:
    """A job that goes on.

    Attributes:
      owner: its request.
      keys: its chunks.
      writes: whether it stores.
      left: reports that are still to come, one a worker.
      within: whether it loads within a step.
      read: blocks that it reads, fenced from the beginning: those of windows, which a request gives up while it runs.
      read_late: those fenced once the request has finished.
    """

    owner: Offloaded
    keys: list[Key]
    writes: bool
    left: int
    within: bool = False
    read: list[int] = dataclasses.field(default_factory=list)
    read_late: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Offloaded:
    """A request as the tier knows it.

    Attributes:
      request: as the cache knows it.
      load_limit: tokens that may be loaded for it; None for all.
      store_limit: tokens of it that may be stored; None for all.
      context: as the pool knows it.
      keys: of each group, keys of its whole chunks so far.
      blocks: of each group, its blocks as the steps told them; 0 for those it has given up.
      cursors: of each group, the chunk from which on it offers.
      local: tokens of its hit on the GPU at the last lookup.
      tail: end of the tail inside a block that the last lookup found, until it is loaded.
      loaded: whether a load of it was ever ordered.
      jobs: numbers of those that go on.
      finished: whether it has finished, aborted ones too.
      aborted: whether it was aborted.
      told: whether a step has told that it finished.
    """

    request: Request
    load_limit: int | None = None
    store_limit: int | None = None
    context: Context = dataclasses.field(default_factory=Context)
    keys: list[list[Key]] = dataclasses.field(default_factory=list)
    blocks: list[list[int]] = dataclasses.field(default_factory=list)
    cursors: list[int] = dataclasses.field(default_factory=list)
    local: int = 0
    tail: int | None = None
    loaded: bool = False
    jobs: set[int] = dataclasses.field(default_factory=set)
    finished: bool = False
    aborted: bool = False
    told: bool = False


class Connector:
    """Requests, their jobs, and the pool of chunks.

    Attributes:
      pool: the chunks.
      requests: those that run, wait, or have jobs.
      jobs: those that go on, by number.
      fences: of each block that a job reads and that may be handed out, the jobs.
      loading: keys that are being loaded while others run.
      refused: stores that found no room.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self.pool = ChunkPool(config.num_chunks, config.policy, config.threshold, config.tracked)
        self.requests: dict[str, Offloaded] = {}
        self.jobs: dict[int, Job] = {}
        self.fences: dict[int, set[int]] = {}
        self.loading: set[Key] = set()
        self.refused = 0
        self._number = 0
        self._fresh: set[int] = set()
        self._loads: list[TransferJob] = []
        self._flushed: set[int] = set()
        self._within: set[str] = set()
        self._budget = config.sync_tokens

    # Requests come, look, and go.

    def arrive(self, request: Request, load_limit: int | None = None, store_limit: int | None = None) -> None:
        """A request comes."""
        state = self.requests[request.id] = Offloaded(request, load_limit, store_limit)
        groups = len(self.config.chunk_tokens)
        state.keys, state.blocks = ([[] for _ in range(groups)] for _ in range(2))
        state.cursors = [0] * groups
        self.pool.begin(state.context)

    def match(self, id: str, local: int) -> tuple[int | None, bool]:
        """Tokens beyond a request's hit on the GPU that can be loaded, None for: ask again later; whether the load
        takes longer than the step. Whatever the answer, all of the request is offered again from now on.

        Args:
          id: a waiting request.
          local: tokens of its hit, whole scheduler blocks.
        """
        state = self.requests[id]
        for blocks in state.blocks:
            blocks.clear()
        state.cursors = [0] * len(state.cursors)
        if state.jobs:
            return None, False
        self.name_chunks(state)
        state.local = local
        found = external_hit(
            self.config, self.pool.lookup, state.keys, local, state.request.num_tokens, state.load_limit, self.loading
        )
        state.tail = None
        if self.config.tails and found is not None:
            unit, request = self.config.cache.hash_block_size, state.request
            prefixes = Prefixes(lambda *tail: self._prefix(state, *tail), request.num_prompt, len(request.keys) * unit)
            look, limit = self.pool.lookup, state.load_limit
            found, state.tail = tail_hit(self.config, look, state.keys, prefixes, local, found, limit, self.loading)
        within = self._fits_the_step(state, found)
        return found, bool(found) and not within

    def _fits_the_step(self, state: Offloaded, found: int | None) -> bool:
        self._within.discard(state.request.id)
        if not found or state.local + found >= state.request.num_tokens or found > self._budget:
            return False
        self._budget -= found
        self._within.add(state.request.id)
        return True

    def _prefix(self, state: Offloaded, group: int, tokens: int) -> Key:
        """The key of a group's part of a prefix."""
        key = (state.request.keys[tokens // self.config.cache.hash_block_size - 1], group)
        state.context.positions[key] = tokens
        return key

    def name_chunks(self, state: Offloaded) -> None:
        """Names the chunks that have become whole."""
        for group, size in enumerate(self.config.chunk_tokens):
            hashes, known = size // self.config.cache.hash_block_size, state.keys[group]
            for last in range((len(known) + 1) * hashes - 1, len(state.request.keys), hashes):
                known.append((state.request.keys[last], group))
                state.context.positions[known[-1]] = len(known) * size

    def allocated(self, id: str, rows: Rows, external: int, is_hashed: Callable[[int], bool]) -> None:
        """A request was given blocks; if tokens are to be loaded into them, the job is made.

        Args:
          id: the request.
          rows: all of its blocks, group by group.
          external: tokens to be loaded, as `match` said.
          is_hashed: whether a block is known by a key, so that its content is there.
        """
        self._fresh.update(block for row in rows for block in row if block)
        if not external:
            return
        state, within = self.requests[id], id in self._within
        end, keys = state.local + external, list[Key]()
        transfer = TransferJob(self._next(), id, [], [], [], [], within)
        for group, row in enumerate(rows):
            size, chunk = self.config.cache.block_size(group), self.config.chunk_tokens[group]
            last = -(-end // size)
            missing = range(-(-state.local // size), last)
            first = next((at for at in missing if row[at] and (within or not is_hashed(row[at]))), last)
            if first < last:
                whole = -(-end // chunk) - (state.tail is not None)
                keys += state.keys[group][first // self.config.blocks_per_chunk : whole]
                if state.tail is not None:
                    keys.append(self._prefix(state, group, state.tail + self.config.proof(group)))
            transfer.blocks += row[first:last]
            transfer.sizes.append(last - first)
            transfer.starts.append(first)
            state.cursors[group] = -(-end // chunk)
        if HEAD_AGES not in self.config.bugs:
            heads = [state.keys[group][: state.local // size] for group, size in enumerate(self.config.chunk_tokens)]
            self.pool.use([key for head in heads for key in head], state.context)
        state.tail, state.loaded = None, True
        transfer.chunks = self.pool.load(keys, state.context)
        self._loads.append(transfer)
        state.jobs.add(transfer.job)
        self.jobs[transfer.job] = Job(state, keys, writes=False, left=self.config.workers, within=within)
        if not within:
            self.loading.update(keys)

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def finish(self, id: str, aborted: bool = False, rows: Rows = ()) -> None:
        """A request has finished, its blocks, `rows`, are about to be given back: jobs that read them are fenced."""
        state = self.requests[id]
        state.finished, state.aborted = True, aborted
        self.name_chunks(state)
        for number in state.jobs:
            self._fence(number, self.jobs[number].read_late)

    def _fence(self, number: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.fences.setdefault(block, set()).add(number)

    # Steps.

    def step(self, step: Step) -> Orders:
        """Orders of a step that has been scheduled."""
        self._note_tables(step)
        for id in step.preempted:
            if id in self.requests:
                self._flushed |= self.requests[id].jobs - {transfer.job for transfer in self._loads}
        for block in self._fresh & self.fences.keys():
            self._flushed |= self.fences[block]
        stores = self._store_states(step.offers)
        stores += self._store_tails(step) if self.config.tails else []
        for id in (*step.tokens, *step.finished):
            if id in self.requests and (transfer := self._store(self.requests[id], step.tokens.get(id, 0))):
                stores.append(transfer)
        orders = Orders(self._loads, stores, self._flushed)
        for id in step.finished:
            if id in self.requests:
                self.requests[id].told = True
                self.pool.end(self.requests[id].context)
                self._forget(self.requests[id])
        self._loads, self._flushed, self._fresh, self._within = [], set(), set(), set()
        self._budget = self.config.sync_tokens
        return orders

    def _note_tables(self, step: Step) -> None:
        """Takes note of blocks that were handed out; what a window held in them before is gone."""
        before: dict[str, list[int]] = {}
        for id, rows, whole in step.tables:
            state = self.requests[id]
            self.name_chunks(state)
            if whole:
                for blocks in state.blocks:
                    blocks.clear()
            if rows is not None:
                before[id] = [len(blocks) for blocks in state.blocks]
                for blocks, row in zip(state.blocks, rows, strict=True):
                    blocks += row
                    self._fresh.update(block for block in row if block)
        self._fresh.update(step.targets)
        for id, state in self.requests.items():
            for group in self.config.windows if self._fresh else ():
                blocks = state.blocks[group]
                end = before[id][group] if id in before else len(blocks)
                revived = RESET_REVIVES in self.config.bugs
                for at in range(state.cursors[group] * self.config.blocks_per_chunk if revived else 0, end):
                    if blocks[at] in self._fresh:
                        blocks[at] = 0

    def _store_states(self, offers: Mapping[str, Sequence[tuple[int, int, int]]]) -> list[TransferJob]:
        """Stores of recurrent states that are handed over, a job each."""
        found = []
        for id, entries in offers.items():
            state = self.requests.get(id)
            for group, block, length in entries if state is not None else ():
                assert state is not None
                size = self.config.chunk_tokens[group]
                if not block or length % size or length > self._storable_tokens(state, state.request.num_tokens):
                    continue
                column = length // self.config.cache.block_size(group) - 1
                found += self._store_blocks(state, [self._prefix(state, group, length)], column, {group: block})
        return found

    def _store_tails(self, step: Step) -> list[TransferJob]:
        """Stores of the ends of prompts inside blocks, of all groups together, as recurrent states are handed over.

        With a draft's layers, only of requests that were loaded for: others leave their tail to the GPU's cache.
        """
        size, groups, found = self.config.chunk_tokens[0], range(len(self.config.chunk_tokens)), list[TransferJob]()
        proof = max(map(self.config.proof, groups))
        for id, entries in step.offers.items():
            handed = {group: block for group, block, length in entries if length % size}
            state = self.requests.get(id)
            if not handed or state is None or (proof and not state.loaded):
                continue
            (end,) = {length for _, _, length in entries if length % size}
            if self._beyond_limit(state, end):
                continue
            computed = min(state.request.num_computed + step.tokens.get(id, 0), state.request.num_prompt)
            rows = [row for group, row in enumerate(state.blocks) if group not in self.config.aligned]
            if (proof and end + proof > computed) or any(end // size >= len(row) for row in rows):
                continue
            keys = [self._prefix(state, group, end + self.config.proof(group)) for group in groups]
            blocks = {
                group: handed[group] if group in self.config.aligned else state.blocks[group][end // size]
                for group in groups
            }
            found += self._store_blocks(state, keys, end // size, blocks)
        return found

    def _beyond_limit(self, state: Offloaded, end: int) -> bool:
        """True if a tail is more than may be stored of its request."""
        beyond = state.store_limit is not None and end > state.store_limit
        if beyond and TAIL_PAST_LIMIT in self.config.bugs:
            if state.store_limit:
                raise EngineFailure("store_limit", state.store_limit, f"at least the {end} tokens up to the tail")
            return False
        return beyond

    def _store_blocks(
        self, state: Offloaded, keys: list[Key], column: int, blocks: Mapping[int, int]
    ) -> list[TransferJob]:
        """The store of a block of each of some groups, fenced from the beginning; none if nothing is new or fits."""
        stored = self._take(state, keys)
        self.refused += stored is None
        if stored is None or not stored.keys:
            return []
        sizes, starts = ([0] * len(state.keys) for _ in range(2))
        taken = [group for _, group in stored.keys]
        for group in taken:
            sizes[group], starts[group] = 1, column
        read = [blocks[group] for group in taken]
        transfer = TransferJob(self._next(), state.request.id, stored.chunks, read, sizes, starts)
        self._begin_store(state, transfer.job, stored.keys, read, [])
        return [transfer]

    def _begin_store(
        self, state: Offloaded, number: int, keys: list[Key], read: list[int], read_late: list[int]
    ) -> None:
        state.jobs.add(number)
        self._fence(number, read)
        self.jobs[number] = Job(state, keys, True, self.config.workers, read=read, read_late=read_late)

    def _storable_tokens(self, state: Offloaded, computed: int) -> int:
        limits = [computed, state.request.num_tokens]
        if state.store_limit is not None:
            limits.append(state.store_limit)
        if self.config.prompt_only:
            limits.append(state.request.num_prompt)
        return min(limits)

    def _storable_chunks(self, state: Offloaded, group: int, tokens: int) -> int:
        """Chunks that may be stored: whole, allocated, named; not a draft's last one while it may be written again."""
        count = tokens // self.config.chunk_tokens[group]
        if group in self.config.eagle and tokens > state.request.num_prompt and not state.finished:
            count = max(0, count - 1)
        return min(count, len(state.blocks[group]) // self.config.blocks_per_chunk, len(state.keys[group]))

    def _store(self, state: Offloaded, scheduled: int) -> TransferJob | None:
        """The store of one request in one step, all groups together; None if there is nothing to store, or no room."""
        request = state.request
        if state.aborted:
            tokens = request.num_computed
        elif state.finished:
            tokens = max(request.num_prompt, request.num_tokens - 1)
        else:
            tokens = request.num_computed + scheduled
        tokens = self._storable_tokens(state, tokens)
        prompt = self._storable_tokens(state, request.num_prompt)
        ranges, offered = [], list[Key]()
        for group in range(len(state.keys)):
            count = self._storable_chunks(state, group, tokens)
            progress = Progress(state.finished, count, prompt // self.config.chunk_tokens[group], state.cursors[group])
            start, wanted = offered_chunks(self.config, request, group, state.blocks[group], progress)
            ranges.append((start, count))
            offered += [state.keys[group][place] for place in wanted]
        stored = self._take(state, offered) if offered else None
        if stored is None and offered:
            self.refused += 1
            return None
        counts = [self._storable_chunks(state, group, tokens) for group in range(len(state.keys))]
        state.cursors = [max(pair) for pair in zip(state.cursors, counts, strict=True)]
        if stored is None or not stored.keys:
            return None
        return self._store_job(state, stored.keys, stored.chunks, ranges)

    def _take(self, state: Offloaded, offered: list[Key]) -> PreparedStore | None:
        """Chunks for what a step offers; None where there is no room, and it is to be offered again."""
        bugs, context = self.config.bugs, state.context
        # A replay's own pool knows no room, and shows vLLM's ways with it, whatever the defects.
        if bugs.issuperset((OWN_HEAD, ALL_OR_NOTHING)) or not hasattr(self.pool, "room"):
            return self.pool.store(offered, context)
        spared = () if OWN_HEAD in bugs else self.pool.begin(context).seen
        if ALL_OR_NOTHING not in bugs:
            absent = [key for key in offered if self.pool.lookup(key) is None]
            absent.sort(key=lambda key: context.positions[key])
            beyond = set(absent[self.pool.room(offered, spared) :])
            offered = [key for key in offered if key not in beyond]
            self.refused += bool(beyond)
        return self.pool.store(offered, context, spared)

    def _store_job(
        self, state: Offloaded, keys: list[Key], chunks: list[int], ranges: Sequence[tuple[int, int]]
    ) -> TransferJob:
        per_chunk, written = self.config.blocks_per_chunk, set(keys)
        transfer, read, read_late = (
            TransferJob(self._next(), state.request.id, chunks, [], [], []),
            list[int](),
            list[int](),
        )
        for group, (start, end) in enumerate(ranges):
            columns = [
                column
                for place in range(start, end)
                if state.keys[group][place] in written
                for column in range(place * per_chunk, (place + 1) * per_chunk)
                if state.blocks[group][column]
            ]
            blocks = [state.blocks[group][column] for column in columns]
            transfer.blocks += blocks
            transfer.sizes.append(len(blocks))
            transfer.starts.append(columns[0] if columns else 0)
            (read_late if self.config.window(group) is None else read).extend(blocks)
        self._begin_store(state, transfer.job, keys, read, read_late)
        if state.finished:
            self._fence(transfer.job, read_late)
            if self._fresh.intersection(read_late):
                self._flushed.add(transfer.job)
        return transfer

    # Reports.

    def take_reports(self, reports: Mapping[int, int], received: Sequence[str]) -> None:
        """Workers have finished their parts of jobs, and with these the loads of requests, which counts for nothing."""
        for number, workers in reports.items():
            self.report(number, workers)

    def report(self, number: int, workers: int = 1) -> None:
        """Workers have finished their parts of a job. Jobs from before the tier was emptied are over."""
        job = self.jobs.get(number)
        if job is None:
            if number >= self._number:
                raise OperationError("job", number, f"below {self._number}, the next one")
            return
        job.left -= workers
        if job.left:
            return
        state = job.owner
        if job.writes:
            self.pool.complete_store(job.keys)
        else:
            self.pool.complete_load(job.keys)
            self.loading.difference_update(job.keys)
        for block in (*job.read, *(job.read_late if state.finished else ())):
            if block not in self.fences:
                raise EngineFailure("block", block, "one that the job reads once: it stands in two of its groups")
            self.fences[block].discard(number)
            if not self.fences[block]:
                del self.fences[block]
        del self.jobs[number]
        state.jobs.remove(number)
        self._forget(state)

    def _forget(self, state: Offloaded) -> None:
        if state.told and not state.jobs and self.requests.get(state.request.id) is state:
            del self.requests[state.request.id]

    def reset(self) -> bool:
        """Empties the tier; jobs that go on are flushed with the next step, and their reports mean nothing."""
        self._flushed |= self.jobs.keys()
        for id, state in list(self.requests.items()):
            if state.finished:
                if not state.told:
                    self.pool.end(state.context)
                del self.requests[id]
        self.pool.clear()
        for state in self.requests.values():
            state.cursors = [0] * len(state.cursors)
            state.tail = None
            state.jobs.clear()
        self.jobs.clear()
        self.fences.clear()
        self.loading.clear()
        return True
