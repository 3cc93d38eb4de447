"""Batches of operations under vLLM's rules, noted while the text performed them: `benchmarks.vllm_text` measures them.

Each case loads what others leave out: prompts one at a time with half hits (stress), prompts nobody had, a schedule of
chunks with decoding and preemption, sparse retention, recurrent states, hits that end inside blocks and are copied,
drafts under the EAGLE drop. All are drawn, but for the mixed schedule where a trace is given.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from benchmarks.replay import GROUPS, stress_arrivals, trace_arrivals
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.schedule.run import cache_config, header, with_match_unit
from hkv.dialects.vllm.schedule.schedule import Chunking, Replay
from hkv.replay.schedule import Arrival, Recorder, Schedule
from hkv.spec import spec_from_text
from reference.dialects.vllm.records import Code
from tests.vllm_text.batches import Noted

Arrivals = list[Arrival]


class Batch(Noted):
    """The text, with a note of each operation; of copies, the blocks, which other forms want to be told."""

    def copies(self, hold: bool = False) -> list[tuple[int, int]]:
        if not self.cache.pending:
            return []
        copies = [pair for pairs in self.pending_copies() for pair in pairs]
        self._do(Code.COPIES, None, [block for pair in copies for block in pair], live=hold)
        return copies


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests over a cache.

    Attributes:
      groups: as the command line writes them. num_blocks: in the pool. arrivals: the requests.
      schedule: its numbers; None for prompts one at a time. unit: tokens in a hash block, 0 for the default.
      eagle: whether hits give up a block. retention: the interval; None for dense.
    """

    groups: str
    num_blocks: int
    arrivals: Arrivals
    schedule: Schedule | None = None
    unit: int = 0
    eagle: bool = False
    retention: int | None = None

    @functools.cached_property
    def config(self) -> VllmConfig:
        """The cache."""
        specs = [spec_from_text(part) for part in self.groups.split(",")]
        eagle = range(len(specs)) if self.eagle else None
        config = cache_config(specs, self.num_blocks, self.limits, eagle=eagle, retention_interval=self.retention)
        return with_match_unit(config, self.unit) if self.unit else config

    @property
    def limits(self) -> Schedule:
        """The schedule's numbers, the longest request among them."""
        longest = max(each.prompt + each.output for each in self.arrivals) + 16
        return dataclasses.replace(self.schedule or Schedule(), max_model_len=longest)

    @property
    def work(self) -> int:
        """Block operations: ceil(tokens / block size) of each group, over all requests."""
        lengths = [each.prompt + each.output for each in self.arrivals]
        return sum(-(-tokens // size) for tokens in lengths for size in self.config.block_sizes)

    def noted(self) -> Batch:
        """The operations, as the text answers them."""
        engine = Batch(header(self.config))
        if self.schedule is None:
            for index, each in enumerate(self.arrivals):
                engine.request_keyed(id := str(index), each.prompt, self._keys(each))
                engine.lookup(id)
                engine._do(Code.ALLOCATE, id, new=-1, hit=-1, boundary=-1, advances=1)
                engine.free(id)
                engine.drop(id)
            return engine
        arrivals = [dataclasses.replace(each, keys=functools.partial(self._keys, each)) for each in self.arrivals]
        recorder = Recorder(self.num_blocks, None, lambda: None)
        chunking = Chunking.of(self.config, self.schedule.step_tokens)
        Replay(engine, self.limits, chunking, arrivals, recorder).run()
        return engine

    def _keys(self, arrival: Arrival) -> Sequence[int]:
        """Keys of whole hash blocks, of which a block of 16 tokens may have several."""
        parts = 16 // self.config.hash_block_size
        return [key * parts + part for key in [*arrival.keys()] for part in range(parts)]


def cases(requests: int, trace: str | None) -> dict[str, Case]:
    """Every case by name; of the cheapest so many requests."""
    stress, few = stress_arrivals(requests), stress_arrivals(requests // 4)
    chunks = Schedule(step_tokens=1024, decode_tokens=1, max_running=4)
    mixed = Schedule(step_tokens=2048, decode_tokens=1, max_running=24)
    some = turns(requests // 10) if trace is None else traced(trace, requests // 10, mixed)
    inside = [longer(each, each.index % 16) for each in few]
    return {
        "stress": Case(GROUPS, 4000, stress),
        "stress, retention 0": Case(GROUPS, 4000, stress, retention=0),
        "stress, retention 512": Case(GROUPS, 4000, stress, retention=512),
        "cold prompts": Case(GROUPS, 4000, cold(requests // 10), chunks),
        "mixed schedule": Case(GROUPS, 6000, some, mixed),
        "mixed schedule, retention 0": Case(GROUPS, 6000, some, mixed, retention=0),
        "states": Case("full:16,swa:16:1024,mamba:16", 4000, few, chunks),
        "hits inside blocks of 16": Case("full:16,swa:8:128,mamba:16", 6000, inside, chunks),
        "hits inside blocks of 32": Case("full:32,swa:16:1024,mamba:64", 3000, inside, chunks),
        "hits inside blocks of 64": Case("full:64,swa:16:128,mamba:64", 3000, inside, chunks),
        "drafts": Case(GROUPS, 6000, some, dataclasses.replace(mixed, decode_tokens=2, lookahead=3), eagle=True),
        "drafts, in chunks": Case(GROUPS, 4000, few, chunks, eagle=True),
    }


def longer(arrival: Arrival, tokens: int) -> Arrival:
    """The same prompt with a few tokens of its own behind it."""
    keys = [*arrival.keys(), (1 << 20) + arrival.index]
    return dataclasses.replace(arrival, prompt=arrival.prompt + tokens, keys=functools.partial(list, keys))


def cold(requests: int) -> Arrivals:
    """Prompts of up to 12,000 tokens that nobody had before."""
    source, fresh, made = np.random.default_rng(0), 0, list[Arrival]()
    for index in range(requests):
        count = int(source.integers(20, 750))
        made.append(Arrival(index, index, 16 * count, 1, functools.partial(range, fresh, fresh + count + 1)))
        fresh += count + 1
    return made


def turns(requests: int) -> Arrivals:
    """Turns of conversations: what was said before, something new, and an answer of up to 100 tokens."""
    source, fresh, made, said = np.random.default_rng(0), 0, list[Arrival](), dict[int, list[int]]()
    for index in range(requests):
        before = said.setdefault(int(source.integers(0, max(1, requests // 4))), [])
        more = int(source.integers(10, 400)) if len(before) < 500 else 0
        if not more:
            before.clear()
            more = 200
        prompt, output = 16 * (len(before) + more), int(source.integers(10, 100))
        keys = [*before, *range(fresh, fresh + more + output // 16 + 1)]
        fresh += more + output // 16 + 1
        before[:] = keys[:-1]
        made.append(Arrival(index, index // 2, prompt, output, functools.partial(list, keys)))
    return made


def traced(trace: str, requests: int, schedule: Schedule) -> Arrivals:
    """The first requests of a trace that have less than 12,000 tokens, with outputs of at most 100."""
    found = trace_arrivals(trace, 3 * requests, GROUPS, schedule, True)
    found = [each for each in found if each.prompt < 12_000][:requests]
    return [dataclasses.replace(each, output=min(each.output, 100)) for each in found]
