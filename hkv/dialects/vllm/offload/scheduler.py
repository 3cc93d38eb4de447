"""The text of vLLM's scheduler with a second tier, run plainly: requests by their names, steps and their orders."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hkv.dialects.vllm.engines.keyed import FAILURES
from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.dialects.vllm.offload.connector import Connector
from hkv.dialects.vllm.offload.orders import Orders, TransferJob
from hkv.dialects.vllm.offload.plain import LAYOUT as TIER
from hkv.dialects.vllm.offload.plain import least
from hkv.dialects.vllm.plain import LAYOUT as CACHE
from hkv.dialects.vllm.plain import columns, columns_of, empty, endless, take_rows
from hkv.errors import EngineFailure, OperationError
from hkv.keys.chained import KeyChain, digest_by_name
from reference.dialects.vllm.offload.lives import Ask, Failed, Live
from reference.dialects.vllm.offload.offloading import Offloading
from reference.dialects.vllm.offload.serving import perform_one
from reference.dialects.vllm.records import Cache, Failure
from reference.language import NOTHING, Layout

VOCABULARY = 5
"""Tokens are drawn from these, and a request's next one is its length modulo their number: no model runs."""

LAYOUT = Layout(Offloading)
"""Names and places of the state of a scheduler with vLLM's own offloading."""

QUEUES = 3
"""Records of requests that begin queues."""


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


@dataclasses.dataclass(eq=False)
class Served:
    """A request: its name, the scheduler's record, all tokens that it will have, and their keys."""

    id: str
    live: Live
    all_keys: Sequence[bytes]
    row: Any = None

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return self.live.request.prompt

    @property
    def num_computed(self) -> int:
        """Tokens that are computed, loaded or about to be; of one that ended, when it did."""
        return self.live.request.computed

    @property
    def keys(self) -> Sequence[bytes]:
        """Keys of its tokens so far."""
        return self.all_keys[: self.live.request.keys]


class Scheduler(abc.ABC):
    """Requests, the GPU's cache, and a tier behind it, which a subclass has.

    Args:
      config: the configuration.
      layout: of the text's state.
      sizes: of what there is to be more than one.

    Attributes:
      serving: the state of the text.
      requests: those that have not finished, or whose blocks a load still writes, by name.
    """

    def __init__(self, config: OffloadConfig, layout: Layout, **sizes: int) -> None:
        self.config, self._layout = config, layout
        made = self.serving = layout.make(least(layout) | sizes)
        made.cache = endless(empty(config.cache, keys=16, requests=1, tokens=64, events=False, explains=False))
        numbers = made.numbers
        numbers.step_tokens, numbers.most_running = config.step_tokens, config.most_running
        numbers.drafts = config.drafts
        cache, ahead = config.cache, 1 + 2 * config.drafts if config.drafts else 0
        specs = zip(cache.topology.specs, cache.block_sizes, strict=True)
        numbers.drafted = sum(-(-ahead // size) for spec, size in specs if not spec.snapshot)
        numbers.state = cache.block_size(config.aligned[0]) if config.aligned else 0
        layout.grow(made, "lives", QUEUES)
        made.running, made.waiting, made.holding = made.lives[1 : QUEUES + 1]
        for ends in made.lives[1 : QUEUES + 1]:
            made.queues.newer[ends] = made.queues.older[ends] = ends
        for number, block in enumerate(made.cache.blocks[1:], 1):
            made.numbers_of[block] = number
        self.requests: dict[str, Served] = {}
        self._served: dict[Live, Served] = {}
        self._spare: list[Live] = []
        self._tokens = 64
        self._digest = digest_by_name(cache.hash)

    # Requests.

    def request(
        self, id: str, tokens: Sequence[int], output: int, load_limit: int | None = None, store_limit: int | None = None
    ) -> None:
        """A request comes."""
        if id in self.requests or self._knows(id):
            raise OperationError("id", id, "a name that no request has")
        config = self.config.cache
        every = list(tokens)
        while len(every) < min(len(tokens) + output, config.max_model_len):
            every.append(len(every) % VOCABULARY)
        chain = KeyChain(self._digest, config.hash_block_size, config.hash_lookahead, seed=config.hash_seed)
        chain.extend(every)
        live = self._spare_live()
        self._hold(len(every) + 2 * self.config.drafts + 1)
        served = self.requests[id] = self._served[live] = Served(id, live, chain.keys)
        live.prompt, live.output = len(tokens), output
        numbers = self._take(served, len(every) + 2 * self.config.drafts)
        live.request.chain[: len(numbers)] = numbers
        for rank, name in enumerate(sorted(each.id for each in self._served.values())):
            next(each for each in self._served.values() if each.id == name).live.rank = rank
        limits = [NOTHING if limit is None else limit for limit in (load_limit, store_limit)]
        self._ask(Ask.REQUEST, live, *limits)

    def abort(self, id: str) -> None:
        """A request is aborted; blocks that a load writes stay until it has ended."""
        served = self.requests.get(id)
        if served is None or served.live.finished:
            raise OperationError("id", id, "a request that has not finished")
        self._ask(Ask.ABORT, served.live)
        self._clear()

    def reset(self, preempt: bool, tier: bool) -> bool:
        """Empties the GPU's prefix cache, unless blocks are in use; and the tier, in any case, if asked to.

        Args:
          preempt: running requests are preempted before.
          tier: the tier is emptied, too.
        """
        done = self._ask(Ask.RESET, None, int(preempt), int(tier))
        if tier:
            self._emptied()
            self._clear()
        return bool(done)

    # A step.

    def schedule(self) -> Scheduled:
        """Schedules a step."""
        lives = [served.live for served in self._served.values()]
        self._make_room(lives)
        self._ask(Ask.SCHEDULE, None)
        tokens = {self._name(live): live.scheduled for live in self._queue(self.serving.running) if live.scheduled}
        looked = sorted((live for live in lives if live.looked), key=lambda live: live.looked)
        matches = [
            Match(self._name(live), live.local, None if live.external == NOTHING else live.external, bool(live.later))
            for live in looked
        ]
        gone = sorted(served.id for served in self._served.values() if served.live.gone)
        orders = self._orders(looked)
        self._clear()
        return Scheduled(matches, tokens, gone, orders)

    def output(self, scheduled: Scheduled, reports: Mapping[int, int], received: Sequence[str]) -> list[str]:
        """Takes a step's output, and returns the requests that finish with it.

        Args:
          scheduled: the step.
          reports: of each job that workers report, how many do.
          received: requests whose loads have ended on all workers, but for those within a step.
        """
        ran = [self.requests[id] for id in scheduled.tokens]
        self._ask(Ask.SAMPLE, None)
        finished = [served.id for served in ran if served.live.finished]
        self._take_reports(reports, received)
        for id in received:
            self._ask(Ask.RECEIVED, self.requests[id].live)
        self._clear()
        return finished

    # What can be seen.

    def queues(self) -> list[list[str]]:
        """Requests that run, that wait without blocks, and that wait with blocks, in order."""
        serving = self.serving
        ends = (serving.running, serving.waiting, serving.holding)
        return [[self._served[live].id for live in self._queue(each)] for each in ends]

    def free(self) -> list[int]:
        """The GPU's free queue."""
        cache, found = self.serving.cache, list[int]()
        block = cache.free.oldest()
        while block is not cache.free.ends:
            found.append(self.serving.numbers_of[block])
            block = cache.free.newer[block]
        return found

    def rows(self, id: str) -> list[list[int]]:
        """Blocks of a request in each group; empty lists mean that it has none."""
        served, cache = self.requests.get(id), self.serving.cache
        if served is None:
            return [[] for _ in self.config.chunk_tokens]
        groups = cache.groups[1 : cache.config.width + 1]
        rows = [columns(group, served.live.request.rows[group.place]) for group in groups]
        return [[self.serving.numbers_of[block] for block in row] for row in rows]

    # Records.

    def _ask(self, code: Ask, live: Live | None, first: int = 0, second: int = 0) -> int:
        serving = self.serving
        asked = serving.asked[1]
        asked.live, asked.first, asked.second = live, first, second
        perform_one(serving, asked, code)
        if serving.cache.failed:
            argument, expected = FAILURES[Failure(serving.cache.failed)]
            raise EngineFailure(argument, None, expected)
        if serving.failed == Failed.TAIL:
            raise EngineFailure("store_limit", "a request's", "at least as many tokens as there are up to its tail")
        return asked.answer

    def _queue(self, ends: Live) -> Iterator[Live]:
        live = self.serving.queues.newer[ends]
        while live is not ends:
            yield live
            live = self.serving.queues.newer[live]

    def _name(self, live: Live) -> str:
        return self._served[live].id

    def _clear(self) -> None:
        """Forgets requests that the cache and the tier have."""
        for live, served in list(self._served.items()):
            if not live.present:
                self.requests.pop(served.id, None)
                if not self._knows(served.id):
                    del self._served[live]
                    self._spare.append(live)

    def _spare_live(self) -> Live:
        if not self._spare:
            cache = self.serving.cache
            CACHE.grow(cache, "rows", cache.slots * cache.config.width)
            CACHE.grow(cache, "requests", cache.slots)
            take_rows(cache)
            self._take_slots()
        return self._spare.pop()

    def _take_slots(self) -> None:
        """A record for each request that the cache has room for."""
        serving, known = self.serving, len(self.serving.lives) - 1 - QUEUES - 1
        count = serving.cache.slots - known
        self._layout.grow(serving, "lives", count)
        for slot, live in enumerate(serving.lives[-count:], known):
            live.slot, live.request = slot, serving.cache.requests[slot + 1]
            serving.lives_of[live.request] = live
            self._spare.append(live)
        serving.last = len(serving.lives) - 1

    def _hold(self, tokens: int) -> None:
        """Makes sure that the cache's rows hold so many tokens."""
        if tokens > self._tokens:
            self._tokens = 2 * tokens
        self._widen(self.serving.cache)

    def _widen(self, cache: Cache) -> None:
        """Makes sure that a cache's rows hold as many tokens as the longest request has."""
        wide = columns_of(self.config.cache, self._tokens)
        for records, field, length in (
            (cache.rows, "blocks", wide),
            (cache.rows, "stands", wide),
            (cache.requests, "chain", self._tokens // self.config.cache.hash_block_size + 2),
        ):
            for record in records[1:]:
                line = getattr(record, field)
                line += [None if field == "blocks" else 0] * (length - len(line))
        for array in (cache.ids, cache.payload):
            array += [None] * (wide * cache.config.width - len(array))  # type: ignore[list-item]

    def _make_mail(self, lives: Sequence[Live], grow: Callable[[str, int], Any]) -> None:
        """Room for what a step tells the tier of; `grow` gives a table of the mail more records."""
        mail, width = self.serving.mail(), self.serving.cache.config.width
        for table, wanted in (("rows", 3 * len(lives) + 1), ("handing", 2 * width * len(lives) + 1)):
            count = wanted - len(getattr(mail, table))
            if count > 0:
                grow(table, count)
        wanted = (columns_of(self.config.cache, self._tokens) + 2) * width * (len(lives) + 1)
        for array in (mail.given, mail.hashed):
            array += [0] * (wanted - len(array))

    # The tier.

    @abc.abstractmethod
    def _knows(self, id: str) -> bool:
        """True of a request that the tier knows."""

    @abc.abstractmethod
    def _take(self, served: Served, tokens: int) -> list[int]:
        """A request comes that has so many tokens at most; numbers of its prefixes, for which there is room."""

    @abc.abstractmethod
    def _make_room(self, lives: Sequence[Live]) -> None:
        """Records and places for what a step may do."""

    @abc.abstractmethod
    def _orders(self, looked: Sequence[Live]) -> Orders:
        """Orders of the step that was scheduled, which has looked these up."""

    @abc.abstractmethod
    def _take_reports(self, reports: Mapping[int, int], received: Sequence[str]) -> None:
        """Workers have finished their parts of jobs."""

    @abc.abstractmethod
    def _emptied(self) -> None:
        """The tier was emptied."""


class OffloadScheduler(Scheduler):
    """A scheduler with vLLM's own offloading.

    Attributes:
      connector: the tier.
    """

    def __init__(self, config: OffloadConfig) -> None:
        super().__init__(config, LAYOUT)
        self.connector = Connector(config)
        self.serving.tier = self.connector.tier
        self._take_slots()

    def _knows(self, id: str) -> bool:
        return id in self.connector.requests

    def _take(self, served: Served, tokens: int) -> list[int]:
        cache, connector = self.serving.cache, self.connector
        connector.take(served, served.live.slot, len(served.all_keys), tokens)
        served.row = connector.requests[served.id].row
        numbers = [connector.prefix(key) for key in served.all_keys]
        wanted = len(connector.pool.keys) + 1 - len(cache.entries)
        if wanted > 0:
            CACHE.grow(cache, "entries", max(wanted, len(cache.entries)))
        return numbers

    def _make_room(self, lives: Sequence[Live]) -> None:
        states = [self.connector.requests[self._name(live)] for live in lives]
        self.connector.make_room(states, self.config.cache.offloads * len(lives))
        self._make_mail(lives, lambda table, count: TIER.grow(self.connector.tier, f"mail.{table}", count))

    def _orders(self, looked: Sequence[Live]) -> Orders:
        loads = [self._load(live) for live in looked if self._is_loaded(live)]
        return self.connector.orders(sorted(loads, key=lambda load: load.job))

    def _take_reports(self, reports: Mapping[int, int], received: Sequence[str]) -> None:
        self.connector.take_reports(reports, received)

    def _emptied(self) -> None:
        self.connector.emptied()

    def _is_loaded(self, live: Live) -> bool:
        job = self._served[live].row.first if live.external > 0 else None
        while job is not None and (job.writes or job.number in self.connector.jobs):
            job = job.after
        return job is not None

    def _load(self, live: Live) -> TransferJob:
        state = self.connector.requests[self._name(live)]
        within = state.row.within == self.connector.tier.step - 1
        return self.connector.ordered(state, self.rows(self._name(live)), within=within)
