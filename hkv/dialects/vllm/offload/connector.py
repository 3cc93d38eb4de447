"""The text of the second tier behind a scheduler in Python: requests by their names, blocks in lists, keys of any kind.

vLLM 0.33 `OffloadingConnectorScheduler`, as a scheduler calls it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.dialects.vllm.offload.orders import Job, Orders, Rows, Step, TransferJob
from hkv.dialects.vllm.offload.plain import LAYOUT, ChunkPool
from hkv.errors import EngineFailure, OperationError
from reference.dialects.vllm.offload.connector import perform_any
from reference.dialects.vllm.offload.records import TAIL_FAILED, Code, Offloaded, Tier
from reference.dialects.vllm.offload.records import Job as JobRecord
from reference.language import NOTHING

if TYPE_CHECKING:
    from reference.dialects.vllm.request import Request


def settings(config: OffloadConfig) -> dict[str, int]:
    """The configuration of the text, by names of its scalars."""
    cache, groups = config.cache, len(config.chunk_tokens)
    interval = cache.retention_interval
    found = {
        "config.chunks": config.num_chunks,
        "config.arc": config.policy == "arc",
        "config.threshold": config.threshold,
        "config.tracked": config.tracked,
        "config.groups": groups,
        "config.full": groups - len(config.windows),
        "config.unit": cache.hash_block_size,
        "config.per_chunk": config.blocks_per_chunk,
        "config.prompt_only": config.prompt_only,
        "config.workers": config.workers,
        "config.sync_tokens": config.sync_tokens,
        "config.tails": config.tails,
        "config.proof": max(map(config.proof, range(groups))),
        "config.states": config.chunk_tokens[config.aligned[0]] if config.aligned else 0,
        "config.alignment": config.alignment or 0,
        "config.interval": NOTHING if interval is None else interval,
    }
    defects = (name for name in LAYOUT.settings if name.startswith("defects."))
    found |= {name: name.removeprefix("defects.").replace("_", "-") in config.bugs for name in defects}
    return {name: int(value) for name, value in found.items()}


def sizes_of(config: OffloadConfig) -> dict[str, int]:
    """Sizes of an empty tier of a configuration, as of `empty`; those that requests decide grow."""
    groups, blocks = len(config.chunk_tokens), config.cache.num_blocks + 1
    each = ("groups", "order", "jobs.sizes", "jobs.starts", "mail.rows.counts")
    each += tuple(f"requests.{name}" for name in ("held", "before", "cursors", "reach", "uses", "blocks"))
    sizes = dict.fromkeys(("handed", "fences", "fresh"), blocks) | dict.fromkeys(each, groups)
    return {**sizes, "named.blocks": config.blocks_per_chunk}


def configured(tier: Tier, config: OffloadConfig) -> Tier:
    """Gives an empty tier a configuration."""
    for name, value in settings(config).items():
        part, _, field = name.partition(".")
        setattr(getattr(tier, part), field, value)
    for index, group in enumerate(tier.groups[1 : len(config.chunk_tokens) + 1]):
        span = config.span(index)
        group.index, group.size, group.chunk = index, config.cache.block_size(index), config.chunk_tokens[index]
        group.window, group.span = config.window(index) or 0, -1 if span is None else span
        group.eagle, group.aligned = int(index in config.eagle), int(index in config.aligned)
        group.proof = config.proof(index)
    for at, index in enumerate(config.lookup_order):
        tier.order[at] = tier.groups[index + 1]
    tier.budget = config.sync_tokens
    return tier


@dataclasses.dataclass(eq=False)
class Offloading:
    """A request of the tier.

    Attributes:
      request: as the cache knows it.
      row: as the text does. groups: how many there are.
      jobs: numbers of those that go on.
    """

    request: Request
    row: Offloaded
    groups: int
    jobs: set[int] = dataclasses.field(default_factory=set)

    @property
    def finished(self) -> bool:
        """True once it has finished, or was aborted."""
        return bool(self.row.finished)

    @property
    def blocks(self) -> list[list[int]]:
        """Of each group, its blocks as steps told them; 0 for those that it has given up."""
        row, groups = self.row, self.groups
        return [[row.blocks[at * groups + group] for at in range(row.held[group])] for group in range(groups)]

    @property
    def cursors(self) -> list[int]:
        """Of each group, the chunk from which on it offers."""
        return self.row.cursors[: self.groups]


class Connector:
    """Requests, their jobs, and the pool of chunks.

    Attributes:
      pool: the chunks.
      requests: those that run, wait, or have jobs, by name.
      jobs: those that go on, by number.
      states: requests by the text's records.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config, self._groups = config, len(config.chunk_tokens)
        self.pool = ChunkPool(config.num_chunks, config.policy, config.threshold, config.tracked, **sizes_of(config))
        self.tier = configured(self.pool.tier, config)
        self.requests: dict[str, Offloading] = {}
        self.jobs: dict[int, Job] = {}
        self._records: dict[int, JobRecord] = {}
        self._places: dict[Offloaded, int] = {}
        self._prefixes: dict[Any, int] = {}
        self.states: dict[Offloaded, Offloading] = {}
        self._loads: list[TransferJob] = []

    @property
    def refused(self) -> int:
        """Stores of steps that found no room."""
        return self.tier.refused

    @property
    def fences(self) -> dict[int, set[int]]:
        """Of each block that a job reads and that may be handed out, the jobs."""
        found: dict[int, set[int]] = {}
        for block, fence in enumerate(self.tier.fences):
            while fence is not None:
                found.setdefault(block, set()).add(fence.job.number)
                fence = fence.next
        return found

    # Requests come, look, and go.

    def arrive(self, request: Request, load_limit: int | None = None, store_limit: int | None = None) -> None:
        """A request comes."""
        state = self._come(request, self.pool.record("requests"))
        limits = {"load_limit": load_limit, "store_limit": store_limit}
        given = {name: NOTHING if limit is None else limit for name, limit in limits.items()}
        self._do(Code.ARRIVE, state, **self._known(state), **given)

    def take(self, request: Any, slot: int, hashes: int, tokens: int) -> None:
        """A request that a scheduler's text drives comes, with room for so many prefixes and tokens."""
        lacking = slot + 2 - len(self.tier.requests)
        if lacking > 0:
            LAYOUT.grow(self.tier, "requests", max(lacking, len(self.tier.requests)))
        state = self._come(request, self.tier.requests[slot + 1])
        columns = max(-(-tokens // size) for size in self.config.cache.block_sizes) + 2 + self.config.drafts
        self._lengthen(state.row, max(hashes, columns))

    def _come(self, request: Any, row: Offloaded) -> Offloading:
        if row.ends is None:
            row.ends = self.pool.record("named")
        state = self.requests[request.id] = self.states[row] = Offloading(request, row, self._groups)
        for place in range(self.tier.last + 1, len(self.tier.requests)):
            self._places[self.tier.requests[place]] = place
        self.tier.last = len(self.tier.requests) - 1
        return state

    def _lengthen(self, row: Offloaded, places: int) -> None:
        """Makes sure that requests have room for so many prefixes, or columns."""
        least = min(len(row.chain), len(row.uses) // self._groups, len(row.blocks) // self._groups)
        if least < places:
            LAYOUT.lengthen(self.tier, "requests", max(least, places) * self._groups)

    def match(self, id: str, local: int) -> tuple[int | None, bool]:
        """Tokens beyond a request's hit on the GPU that can be loaded, None for: ask again later; whether the load
        takes longer than the step. Whatever the answer, all of the request is offered again from now on.

        Args:
          id: a waiting request.
          local: tokens of its hit, whole scheduler blocks.
        """
        state = self.requests[id]
        self._do(Code.KNOW, state, **self._known(state))
        found = self._do(Code.MATCH, state, tokens=local)
        return None if found == NOTHING else found, bool(self.tier.results[1].beside)

    def allocated(self, id: str, rows: Rows, external: int, is_hashed: Callable[[int], bool]) -> None:
        """A request was given blocks; if tokens are to be loaded into them, the job is made.

        Args:
          id: the request.
          rows: all of its blocks, group by group.
          external: tokens to be loaded, as `match` said.
          is_hashed: whether a block is known by a key, so that its content is there.
        """
        state, tier = self.requests[id], self.tier
        blocks = self._tell([(state, rows, True, {})])
        if external:
            tier.mail.hashed[: len(blocks)] = [int(is_hashed(block)) for block in blocks]
            self.make_room([state], 0)
        self._do(Code.ALLOCATED, state, start=1, tokens=external)
        if external:
            self._loads.append(self.ordered(state, rows, within=state.row.within == tier.step))

    def finish(self, id: str, aborted: bool = False, rows: Rows = ()) -> None:
        """A request has finished, its blocks are about to be given back: jobs that read them are fenced."""
        del rows
        state = self.requests[id]
        self._do(Code.KNOW, state, **self._known(state))
        self._do(Code.FINISH, state, aborted=int(aborted))

    # Steps.

    def step(self, step: Step) -> Orders:
        """Orders of a step that has been scheduled.

        Raises:
          EngineFailure: vLLM's engine ends: a tail beyond a request's limit, under a defect.
        """
        requests = self.requests
        tables = {id: (rows, whole) for id, rows, whole in step.tables}
        told: list[tuple[Offloading, Rows | None, bool, dict[str, int]]] = []
        for id, tokens in step.tokens.items():
            rows, whole = tables.pop(id, (None, False))
            told.append((requests[id], rows, whole, {"tokens": tokens}))
        told += [(requests[id], rows, whole, {}) for id, (rows, whole) in tables.items()]
        told += [(requests[id], None, False, {"finished": 1}) for id in step.finished if id in requests]
        told += [(requests[id], None, False, {"preempted": 1}) for id in step.preempted if id in requests]
        handed = [(requests[id], *entry) for id, entries in step.offers.items() if id in requests for entry in entries]
        states = list({state: None for state, *_ in (*told, *handed)})
        for state in states:
            self._do(Code.KNOW, state, **self._known(state))
        self.make_room(states, len(handed))
        blocks = self._tell(told, step.targets)
        self._hand(handed)
        given = {"start": 1, "count": len(told), "handed_start": 1, "handed": len(handed)}
        targets = {"targets_start": len(blocks) - len(step.targets), "targets": len(step.targets)}
        if self._do(Code.STEP, None, **given, **targets) == TAIL_FAILED:
            beyond = ((state.row.store_limit, end) for state, _, _, end in handed if end % self.config.chunk_tokens[0])
            limit, end = next((limit, end) for limit, end in beyond if 0 < limit < end)
            raise EngineFailure("store_limit", limit, f"at least the {end} tokens up to the tail")
        loads, self._loads = self._loads, []
        return self.orders(loads)

    def orders(self, loads: list[TransferJob]) -> Orders:
        """Orders of the step that the text has performed, beside these loads."""
        tier = self.tier
        self.pool.drain()
        stores = [self._transfer(job, _read_by(job)) for job in tier.stores[: tier.ordered]]
        flushed, tier.flushes = set(tier.flushed[: tier.flushes]), 0
        self._forget_all()
        return Orders(loads, stores, flushed)

    def ordered(self, state: Offloading, rows: Rows, *, within: bool) -> TransferJob:
        """The load that was ordered for a request which has these blocks."""
        job = state.row.first
        while job.writes or job.number in self.jobs:
            job = job.after
        parts = zip(rows, job.starts, job.sizes, strict=False)
        moved = [block for row, first, size in parts for block in row[first : first + size]]
        return self._transfer(job, moved, within=within)

    # Reports.

    def take_reports(self, reports: Mapping[int, int], received: Sequence[str]) -> None:
        """Workers have finished their parts of jobs, and with these the loads of requests, which counts for nothing."""
        for number, workers in reports.items():
            self.report(number, workers)

    def report(self, number: int, workers: int = 1) -> None:
        """Workers have finished their parts of a job. Jobs from before the tier was emptied are over."""
        job = self.jobs.get(number)
        if job is None:
            if number >= self.tier.number:
                raise OperationError("job", number, f"below {self.tier.number}, the next one")
            return
        if self._do(Code.REPORT, job.owner, job=self._records[number], workers=workers):
            raise EngineFailure(
                "block", self.tier.results[1].count, "one that the job reads once: it stands in two of its groups"
            )
        job.left -= workers
        if not job.left:
            del self.jobs[number], self._records[number]
            job.owner.jobs.remove(number)
            self._forget(job.owner.request.id)

    def reset(self) -> bool:
        """Empties the tier; jobs that go on are flushed with the next step, and their reports mean nothing."""
        self._do(Code.RESET, None)
        self.emptied()
        return True

    def emptied(self) -> None:
        """The text has emptied the tier."""
        self.jobs.clear()
        self._records.clear()
        for state in self.requests.values():
            state.jobs.clear()
        self._forget_all()

    # Records.

    def _do(self, code: Code, state: Offloading | None, **given: Any) -> int:
        """Performs an operation; its answer."""
        op, result = self.tier.operations[1], self.tier.results[1]
        for name, value in given.items():
            setattr(op, name, value)
        row: Any = None if state is None else state.row
        perform_any(self.tier, op, row, result, code)
        self.pool.drain()
        return result.count

    def _known(self, state: Offloading) -> dict[str, int]:
        """The cache's numbers of a request, of which its chain follows the prefixes' numbers."""
        request, row = state.request, state.row
        hashes = len(request.keys)
        self._lengthen(row, hashes)
        for at in range(row.hashes if row.known else 0, hashes):
            row.chain[at] = self.prefix(request.keys[at])
        return {
            "prompt": request.num_prompt,
            "tokens": request.num_tokens,
            "computed": request.num_computed,
            "shared": request.shared_prefix,
            "hashes": hashes,
        }

    def prefix(self, chain: Any) -> int:
        """The number of a prefix, which has a key in each group."""
        number = self._prefixes.setdefault(chain, len(self._prefixes))
        if number * self._groups == len(self.pool.keys):
            for group in range(self._groups):
                self.pool.key((chain, group))
        return number

    def make_room(self, states: Sequence[Offloading], handed: int) -> None:
        """Records and places for what requests may store or load at once, and for states that are handed over."""
        tier, unit = self.tier, self.config.cache.hash_block_size
        count = handed + sum(
            len(state.request.keys) * unit // size + 2 for state in states for size in self.config.chunk_tokens
        )
        jobs = len(self.jobs) + 2 * len(states) + 2 * handed  # each may load and store
        fences = count * self.config.blocks_per_chunk + tier.fenced
        self.pool.make_room(2 * count)
        for array in (tier.stores, tier.flushed):
            self._widen(array, jobs + tier.flushes)
        for table, first, link, wanted in (
            ("named", "vacant", "next", count - tier.unnamed),
            ("jobs", "idle_job", "after", jobs + 2 - len(tier.jobs)),
            ("fence_records", "idle_fence", "next", fences + 2 - len(tier.fence_records)),
        ):
            if wanted > 0:
                LAYOUT.grow(tier, table, wanted)
                for record in getattr(tier, table)[-wanted:]:
                    setattr(record, link, getattr(tier, first))
                    setattr(tier, first, record)
                tier.unnamed += wanted * (table == "named")

    def _tell(
        self, told: Sequence[tuple[Offloading, Rows | None, bool, dict[str, int]]], targets: Sequence[int] = ()
    ) -> list[int]:
        """Notes rows, and blocks behind them; all of the blocks."""
        tier, blocks = self.tier, list[int]()
        if len(tier.mail.rows) <= len(told):
            LAYOUT.grow(tier, "mail.rows", len(told))
        for row, (state, rows, whole, given) in zip(tier.mail.rows[1:], told, strict=False):
            row.request, row.start, row.told, row.whole = (
                self._places[state.row],
                len(blocks),
                int(rows is not None),
                int(whole),
            )
            for name in ("tokens", "finished", "preempted"):
                setattr(row, name, given.get(name, 0))
            for group in range(self._groups):
                row.counts[group] = len(rows[group]) if rows is not None else 0
            blocks += [block for each in rows or () for block in each]
            columns = max(state.row.held[: self._groups]) + max((len(each) for each in rows or ()), default=0)
            self._lengthen(state.row, columns)
        blocks += targets
        for array in (tier.mail.given, tier.mail.hashed):
            self._widen(array, len(blocks))
        tier.mail.given[: len(blocks)] = blocks
        return blocks

    def _hand(self, handed: Sequence[tuple[Offloading, int, int, int]]) -> None:
        tier = self.tier
        if len(tier.mail.handing) <= len(handed):
            LAYOUT.grow(tier, "mail.handing", len(handed))
        for row, (state, group, block, tokens) in zip(tier.mail.handing[1:], handed, strict=False):
            row.request, row.index, row.block, row.tokens = self._places[state.row], group, block, tokens

    def _transfer(self, job: JobRecord, blocks: list[int], *, within: bool = False) -> TransferJob:
        """A job as a worker gets it, which goes on from now on."""
        owner = self.states[job.owner]
        names, chunks, use = [], [], job.first
        while use is not None:
            names.append(self.pool.name(use.key))
            chunks.append(use.key.chunk - 1)
            use = use.next
        self.jobs[job.number] = Job(owner, names, bool(job.writes), job.left)
        self._records[job.number] = job
        owner.jobs.add(job.number)
        sizes, starts = list(job.sizes), list(job.starts)
        return TransferJob(job.number, owner.request.id, chunks, blocks, sizes, starts, within)

    def _forget_all(self) -> None:
        for id in list(self.requests):
            self._forget(id)

    def _forget(self, id: str) -> None:
        state = self.requests.get(id)
        if state is not None and not state.row.known:
            del self.requests[id]
            del self.states[state.row]
            self.pool.spare(state.row)

    def _widen(self, array: list[Any], wanted: int) -> None:
        array += [0] * (wanted - len(array))


def _read_by(job: JobRecord) -> list[int]:
    """Blocks that a store reads, in order."""
    found, use = list[int](), job.first
    while use is not None:
        found += [block for block in use.blocks if block]
        use = use.next
    return found
