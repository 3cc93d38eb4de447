"""The scheduler's side of the second tier: what a request may load, what a step stores, and which jobs it waits for.

A request's chunks are offered as its tokens are scheduled, and the transfers read its blocks behind its back: jobs are
told when they are done, however late. A block that a job still reads and that is handed out meanwhile has the job
*flushed*: the worker finishes it before the step. vLLM 0.33 `OffloadingConnectorScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from hkv.dialects.vllm.offload.config import (
    ALL_OR_NOTHING,
    HEAD_AGES,
    OWN_HEAD,
    RESET_REVIVES,
    OffloadConfig,
)
from hkv.dialects.vllm.offload.plain import ChunkPool, PreparedStore
from hkv.dialects.vllm.offload.plain import Name as Key
from hkv.errors import EngineFailure, OperationError
from reference.dialects.vllm.offload.lookup import Prefixes, external_hit, tail_hit
from reference.dialects.vllm.offload.offers import Handed, Progress, handed_states, handed_tail, offered_chunks
from reference.dialects.vllm.offload.offloaded import Job, Offloaded
from reference.dialects.vllm.offload.orders import Orders, Rows, Step, TransferJob
from reference.dialects.vllm.request import Request


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
        state = self.requests[request.id] = Offloaded(self.config, request, load_limit, store_limit)
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
        state.name_chunks()
        state.local = local
        found = external_hit(
            self.config, self.pool.lookup, state.keys, local, state.request.num_tokens, state.load_limit, self.loading
        )
        state.tail = None
        if self.config.tails and found is not None:
            unit, request = self.config.cache.hash_block_size, state.request
            prefixes = Prefixes(state.prefix, request.num_prompt, len(request.keys) * unit)
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
                    keys.append(state.prefix(group, state.tail + self.config.proof(group)))
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
        state.name_chunks()
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
        stores = self._store_handed(step)
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
            state.name_chunks()
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

    def _store_handed(self, step: Step) -> list[TransferJob]:
        """Stores of recurrent states that are handed over, and then of the ends of prompts inside blocks."""
        found = []
        offers = [
            (self.requests[id], step.tokens.get(id, 0), entries)
            for id, entries in step.offers.items()
            if id in self.requests
        ]
        for state, _, entries in offers:
            for handed in handed_states(state, entries):
                found += self._store_blocks(state, handed)
        for state, scheduled, entries in offers if self.config.tails else ():
            if (tail := handed_tail(state, entries, scheduled)) is not None:
                found += self._store_blocks(state, tail)
        return found

    def _store_blocks(self, state: Offloaded, handed: Handed) -> list[TransferJob]:
        """The store of a block of each of some groups, fenced from the beginning; none if nothing is new or fits."""
        stored = self._take(state, handed.keys)
        self.refused += stored is None
        if stored is None or not stored.keys:
            return []
        sizes, starts = ([0] * len(state.keys) for _ in range(2))
        taken = [group for _, group in stored.keys]
        for group in taken:
            sizes[group], starts[group] = 1, handed.column
        read = [handed.blocks[group] for group in taken]
        transfer = TransferJob(self._next(), state.request.id, stored.chunks, read, sizes, starts)
        self._begin_store(state, transfer.job, stored.keys, read, [])
        return [transfer]

    def _begin_store(
        self, state: Offloaded, number: int, keys: list[Key], read: list[int], read_late: list[int]
    ) -> None:
        state.jobs.add(number)
        self._fence(number, read)
        self.jobs[number] = Job(state, keys, True, self.config.workers, read=read, read_late=read_late)

    def _store(self, state: Offloaded, scheduled: int) -> TransferJob | None:
        """The store of one request in one step, all groups together; None if there is nothing to store, or no room."""
        request = state.request
        if state.aborted:
            tokens = request.num_computed
        elif state.finished:
            tokens = max(request.num_prompt, request.num_tokens - 1)
        else:
            tokens = request.num_computed + scheduled
        tokens = state.storable_tokens(tokens)
        prompt = state.storable_tokens(request.num_prompt)
        ranges, offered = [], list[Key]()
        for group in range(len(state.keys)):
            count = state.storable_chunks(group, tokens)
            progress = Progress(state.finished, count, prompt // self.config.chunk_tokens[group], state.cursors[group])
            start, wanted = offered_chunks(self.config, request, group, state.blocks[group], progress)
            ranges.append((start, count))
            offered += [state.keys[group][place] for place in wanted]
        stored = self._take(state, offered) if offered else None
        if stored is None and offered:
            self.refused += 1
            return None
        counts = [state.storable_chunks(group, tokens) for group in range(len(state.keys))]
        state.cursors = [max(pair) for pair in zip(state.cursors, counts, strict=True)]
        if stored is None or not stored.keys:
            return None
        return self._store_job(state, stored.keys, stored.chunks, ranges)

    def _take(self, state: Offloaded, offered: list[Key]) -> PreparedStore | None:
        """Chunks for what a step offers; None where there is no room, and it is to be offered again."""
        bugs, context = self.config.bugs, state.context
        spares = OWN_HEAD not in bugs
        if ALL_OR_NOTHING not in bugs:
            absent = [key for key in offered if self.pool.lookup(key) is None]
            absent.sort(key=lambda key: context.positions[key])
            beyond = set(absent[self.pool.room(offered, context, spares) :])
            offered = [key for key in offered if key not in beyond]
            self.refused += bool(beyond)
        return self.pool.store(offered, context, spares)

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
