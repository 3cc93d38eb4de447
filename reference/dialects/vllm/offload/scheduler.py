"""vLLM's scheduler with a second tier, step by step: running requests, loads that requests wait for, stores.

Each step gives running requests their next tokens, preempting the last one where blocks run out, and then admits
waiting ones, first those that hold blocks. A waiting request is looked up on the GPU, and then in the tier; it is put
aside while a load of it goes on, or while the tier says: later. The step's output follows at once, so that no step is
in flight when the next is scheduled. First come, first served. A draft proposes tokens after each step that samples;
those that are rejected were computed in vain. vLLM 0.33 `Scheduler.schedule`, `update_from_output`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from hkv.dialects.vllm.offload.config import SIMPLE, OffloadConfig
from hkv.dialects.vllm.offload.connector import Connector
from hkv.dialects.vllm.offload.orders import Orders, Step
from hkv.errors import OperationError
from reference.dialects.vllm import live
from reference.dialects.vllm.connector import truncate
from reference.dialects.vllm.kinds.checkpoints import checkpoint_position
from reference.dialects.vllm.kinds.kind import Demand
from reference.dialects.vllm.manager import Manager
from reference.dialects.vllm.offload.simple import SimpleConnector
from reference.dialects.vllm.request import TokenRequest

VOCABULARY = 5
"""Tokens are drawn from these, and a request's next one is its length modulo their number: no model runs."""


def accepted(num_tokens: int, drafts: int) -> int:
    """Tokens that a step accepts of a request's drafts, from its length before: no model runs."""
    return num_tokens // 2 % (drafts + 1)


@dataclasses.dataclass(eq=False)
class Live:
    """A request in the scheduler.

    Attributes:
      request: as the cache knows it.
      output: tokens that it generates.
      loading: whether a load of it goes on, or has ended and not been looked at.
      loaded: whether that load has ended.
      preempted: whether it was preempted ever.
      prefilling: whether it is on the way to its last token, so that loads leave room for it.
      partway: whether its last step stopped before its last token.
      proposed: tokens that a draft proposed for its next step; `checked`: those that its step checks.
      padded: whether these stand for none, and only keep the step's shape.
      finished: whether it has finished.
    """

    request: TokenRequest
    output: int
    loading: bool = False
    loaded: bool = False
    preempted: bool = False
    prefilling: bool = False
    partway: bool = False
    proposed: int = 0
    checked: int = 0
    padded: bool = False
    finished: bool = False

    @property
    def id(self) -> str:
        """Its name."""
        return self.request.id

    @property
    def computed(self) -> int:
        """Tokens that are computed, loaded or about to be."""
        return self.request.num_computed

    @property
    def holds(self) -> bool:
        """True if it has blocks while it waits."""
        return self.computed > 0 or self.loading


Table: TypeAlias = tuple[str, "list[list[int]] | None", bool]
"""Blocks of a request: all, or those that are new, None for none."""


class Match(NamedTuple):
    """A lookup of a waiting request: its hit on the GPU in whole scheduler blocks, and the tier's answer."""

    id: str
    local: int
    external: int | None
    later: bool


@dataclasses.dataclass
class Scheduled:
    """A step that was scheduled: lookups in order, tokens of each request that runs, preempted ones, and orders."""

    matches: list[Match]
    tokens: dict[str, int]
    preempted: list[str]
    orders: Orders


class OffloadScheduler:
    """Requests, the GPU's cache, and the tier behind it.

    Attributes:
      manager: the GPU's cache.
      connector: the tier.
      requests: those that have not finished, or whose blocks a load still writes.
      running: in the order in which they were admitted.
      waiting: requests without blocks; `holding`: with blocks, which come first.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self.manager = Manager(config.cache)
        simple = config.connector == SIMPLE
        self.connector = SimpleConnector(config, self.manager.pool) if simple else Connector(config)
        self.requests: dict[str, Live] = {}
        self.running: list[Live] = []
        self.waiting: deque[Live] = deque()
        self.holding: deque[Live] = deque()
        self._ended: list[str] = []
        self._preempted: set[str] = set()
        self._preempted_now = self._prefills = False
        self._matches: list[Match] = []

    # Requests.

    def request(
        self, id: str, tokens: Sequence[int], output: int, load_limit: int | None = None, store_limit: int | None = None
    ) -> None:
        """A request comes."""
        if id in self.requests or id in self.connector.requests:
            raise OperationError("id", id, "a name that no request has")
        self.manager.request(id, tokens)
        request = self.manager.requests[id]
        assert isinstance(request, TokenRequest)
        entry = self.requests[id] = Live(request, output)
        self.waiting.append(entry)
        self.connector.arrive(request, load_limit, store_limit)

    def abort(self, id: str) -> None:
        """A request is aborted; blocks that a load writes stay until it has ended."""
        entry = self.requests.get(id)
        if entry is None or entry.finished:
            raise OperationError("id", id, "a request that has not finished")
        for queue in (self.running, self.waiting, self.holding):
            if entry in queue:
                queue.remove(entry)
        self._end(entry, aborted=True, keep=entry.loading and not entry.loaded)

    def _end(self, entry: Live, aborted: bool = False, keep: bool = False) -> None:
        entry.finished, entry.prefilling = True, False
        if self.config.cache.offloads and entry.request.running:
            live.finalize(self.manager, entry.id, 0)
        live.retire(self.manager, entry.id, entry.computed)
        self.connector.finish(entry.id, aborted, self._computed_rows(entry))
        self._ended.append(entry.id)
        if not keep:
            self._give_back(entry)

    def _computed_rows(self, entry: Live) -> list[list[int]]:
        """Blocks of a request up to its computed tokens; all of recurrent states."""
        cache, rows = self.config.cache, self.manager.rows(entry.id)
        return [
            row if cache.topology.specs[group].snapshot else row[: -(-entry.computed // cache.block_size(group))]
            for group, row in enumerate(rows)
        ]

    def _give_back(self, entry: Live) -> None:
        if entry.request.running:
            computed = entry.computed
            self.manager.free(entry.id)
            entry.request.num_computed = computed
        self.manager.drop(entry.id)
        del self.requests[entry.id]

    def reset(self, preempt: bool, tier: bool) -> bool:
        """Empties the GPU's prefix cache, unless blocks are in use; and the tier, in any case, if asked to.

        Args:
          preempt: running requests are preempted before.
          tier: the tier is emptied, too.
        """
        while preempt and self.running:
            self._preempt(self.running.pop())
        done = self.manager.reset()
        return self.connector.reset() and done if tier else done

    def _preempt(self, entry: Live) -> None:
        self.manager.free(entry.id)
        entry.preempted, entry.prefilling, entry.proposed = True, False, 0
        self.waiting.appendleft(entry)
        self._preempted.add(entry.id)

    # A step.

    def schedule(self) -> Scheduled:
        """Schedules a step."""
        self.manager.step()
        self._matches, tokens, running = [], dict[str, int](), list[Table]()
        budget = self._go_on(self.config.step_tokens, tokens, running)
        new, resumed = ([], []) if self._preempted_now else self._admit_all(budget, tokens)
        offers = live.offloads(self.manager) if self.config.cache.offloads else {}
        targets = [target for _, target in self.manager.copies()]
        preempted, tables = sorted(self._preempted), [*new, *running, *resumed]
        orders = self.connector.step(Step(tokens, tables, sorted(self._ended), preempted, targets, offers))
        self._ended, self._preempted = [], set()
        for id, count in tokens.items():
            entry = self.requests[id]
            self.manager.advance(id, count)
            entry.partway = entry.computed < entry.request.num_tokens
            entry.prefilling = entry.prefilling and entry.partway
        return Scheduled(self._matches, tokens, preempted, orders)

    def output(self, scheduled: Scheduled, reports: Mapping[int, int], received: Sequence[str]) -> list[str]:
        """Takes a step's output, and returns the requests that finish with it.

        Args:
          scheduled: the step.
          reports: of each job that workers report, how many do.
          received: requests whose loads have ended on all workers, but for those within a step.
        """
        finished = self._sample(scheduled.tokens)
        self.connector.take_reports(reports, received)
        for id in received:
            entry = self.requests[id]
            if entry.finished:
                self._give_back(entry)
            else:
                entry.loaded = True
        return finished

    def _go_on(self, budget: int, tokens: dict[str, int], tables: list[Table]) -> int:
        """Running requests get their next tokens; the last ones are preempted where blocks run out."""
        self._preempted_now = self._prefills = False
        at = 0
        while at < len(self.running) and budget > 0:
            entry = self.running[at]
            count = min(entry.request.num_tokens + entry.proposed - entry.computed, budget)
            count = min(count, self.config.cache.max_model_len - entry.computed - 1)
            count = self._chunk(entry, entry.computed, count)
            if count == 0:
                at += 1
                continue
            ahead = self.config.drafts
            blocks = self.manager.allocate(entry.id, count, lookahead=ahead, waiting=False)
            while blocks is None:
                last = self.running.pop()
                self._preempt(last)
                self._preempted_now = True
                if last is entry:
                    return budget
                blocks = self.manager.allocate(entry.id, count, lookahead=ahead, waiting=False)
            checked = max(0, count + entry.computed - entry.request.num_tokens)
            entry.checked, entry.padded, entry.proposed = min(checked, entry.proposed), False, 0
            self._prefills |= entry.partway
            tokens[entry.id] = count
            tables.append((entry.id, blocks if any(blocks) else None, False))
            budget -= count
            at += 1
        return budget

    def _admit_all(self, budget: int, tokens: dict[str, int]) -> tuple[list[Table], list[Table]]:
        """Waiting requests are admitted until one has no room; those that cannot be looked at yet are put aside.

        Returns the blocks of those that run for the first time, and of the others.
        """
        aside: tuple[list[Live], list[Live]] = ([], [])
        tables: tuple[list[Table], list[Table]] = ([], [])
        decoding = bool(tokens)
        while budget > 0 and len(self.running) < self.config.most_running:
            queue = self.holding or self.waiting
            if not queue:
                break
            entry = queue[0]
            count = self._admit(entry, budget, decoding)
            if count is None:
                break
            queue.popleft()
            if count == 0:
                aside[entry.holds].append(entry)
                continue
            self.running.append(entry)
            tokens[entry.id] = count
            tables[entry.preempted].append((entry.id, self.manager.rows(entry.id), True))
            budget -= count
            entry.prefilling = entry.prefilling or entry.computed + count < entry.request.num_tokens
        self.waiting.extendleft(reversed(aside[0]))
        self.holding.extendleft(reversed(aside[1]))
        return tables

    def _admit(self, entry: Live, budget: int, decoding: bool) -> int | None:
        """Tokens that a waiting request gets now; 0 if it is put aside, None if it has no room."""
        if entry.loading and not entry.loaded:
            return 0
        if entry.loading:
            entry.loading = entry.loaded = False
            self.manager.commit(entry.id, entry.computed, checked=False)
            if entry.computed == entry.request.num_tokens:
                live.computed(self.manager, entry.id, entry.computed - 1)
        rows, local, external, later = None, 0, 0, False
        if entry.computed == 0:
            found = self.manager.lookup(entry.id)
            entry.request.shared_prefix = found.shared_prefix
            rows, local, unit = found.blocks, found.hit, self.config.cache.scheduler_block_size
            matched, later = self.connector.match(entry.id, local - local % unit)
            self._matches.append(Match(entry.id, local - local % unit, matched, later))
            if matched is None:
                return 0
            if matched > local % unit:
                if local % unit:
                    local -= local % unit
                    rows = truncate(self.manager, rows, local)
                external = matched
            later = later and external > 0
        start, count, ahead = entry.computed + local + external, 0, self.config.drafts
        padded = False
        if not later:
            left = entry.request.num_tokens - start
            padded = self._pads(left, start, decoding)
            if padded and 1 + ahead > budget:
                return None
            count = self._chunk(entry, start, 1 + ahead if padded else min(left, budget))
            if padded and count != 1 + ahead:
                count, padded = min(count, 1), False
            if count == 0:
                return None
        reserved = self._reserved() + self._drafted_blocks() if later else 0
        given = self.manager.allocate(
            entry.id,
            count,
            lookahead=0 if later else ahead,
            hit=local,
            rows=rows if local else None,
            external=external,
            delay=later,
            must_fit=True,
            reserved=reserved,
            waiting=True,
            scheduled=bool(self.running),
        )
        if given is None:
            return None
        blocks, pool = self.manager.rows(entry.id), self.manager.pool
        self.connector.allocated(entry.id, blocks, external, lambda block: pool.primary[block] is not None)
        live.computed(self.manager, entry.id, start)
        entry.checked, entry.padded = ahead if padded else 0, padded
        if later:
            entry.loading = entry.prefilling = True
        return count

    def _pads(self, left: int, start: int, decoding: bool) -> bool:
        """True if a request with one token left gets room for drafts that there are not: a step of one shape."""
        drafts = self.config.drafts
        alike = left == 1 and not self._prefills and (decoding or start > 0)
        return drafts > 0 and alike and start + 2 + drafts <= self.config.cache.max_model_len

    def _drafted_blocks(self) -> int:
        """Blocks that a step with drafts may take of a request, its recurrent states aside."""
        cache, tokens = self.config.cache, 1 + 2 * self.config.drafts if self.config.drafts else 0
        return sum(
            -(-tokens // cache.block_size(group))
            for group in range(len(cache.block_sizes))
            if not cache.topology.specs[group].snapshot
        )

    def _reserved(self) -> int:
        """Blocks that requests on the way to their last token still need, loads among them."""
        cache, total = self.manager.cache, 0
        for entry in self.requests.values():
            if not entry.prefilling:
                continue
            length = min(entry.request.num_tokens, cache.config.max_model_len)
            end = entry.request.prefill_end if cache.config.retention_interval == 0 else 0
            slots = length + (1 + 2 * self.config.drafts if self.config.drafts else 0)
            demand = Demand(slots, length, entry.computed, entry.computed, end, whole=True)
            total += sum(kind.estimate(entry.id, [], kind.concerning(demand)) for kind in cache.kinds)
        return total

    def _chunk(self, entry: Live, start: int, count: int) -> int:
        """Tokens to compute from `start` on: beside recurrent groups a prefill stops where states are kept."""
        request, config = entry.request, self.config
        end, goal = start + count, request.prefill_end
        if not config.aligned or start >= goal:
            return count
        size = config.cache.block_size(config.aligned[0])
        if end < goal:
            whole = end // size * size
            if whole > start or size <= config.step_tokens:
                end = whole
        shared_boundary, drop = request.shared_prefix, config.cache.uses_eagle
        last = checkpoint_position(request.num_tokens, size, drop, 0)
        stops = [last]
        if config.cache.partial_hits:
            tail = checkpoint_position(request.num_prompt, config.cache.hash_block_size, drop, 0)
            stops += [tail] if last < tail < request.num_prompt else []
        if start % size:
            stops.append((start // size + 1) * size)
        if start < shared_boundary < end:
            stops.append(start + (shared_boundary - start) // size * size)
        return max(0, min((stop for stop in stops if start < stop < end), default=end) - start)

    # Its output.

    def _sample(self, tokens: dict[str, int]) -> list[str]:
        """Requests whose tokens are all computed get another, and those that have all of theirs finish."""
        finished = []
        for id in tokens:
            entry = self.requests[id]
            request = entry.request
            if entry.computed < request.num_tokens:
                continue
            right = 0 if entry.padded else accepted(request.num_tokens, entry.checked)
            room = min(entry.output + request.num_prompt, self.config.cache.max_model_len) - request.num_tokens
            told = min(1 + right, room)
            live.computed(self.manager, id, entry.computed - entry.checked + told - 1)
            self.manager.append(id, [(request.num_tokens + more) % VOCABULARY for more in range(told)])
            done = told == room
            if self.config.drafts:
                self.manager.commit(id, entry.computed, checked=False)
            entry.proposed = self.config.drafts
            if done:
                self.running.remove(entry)
                self._end(entry)
                finished.append(id)
        return finished
