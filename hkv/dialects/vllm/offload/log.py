"""Logs of vLLM's second tier: header, operations and answers as typed values.

They are a dialect beside vLLM's own, not operations of it: under `vllm-0.33` a log tells each call of the block
manager, and its caller decides; here the caller is vLLM's scheduler itself, whose decisions are what the tier changes.
One operation is one step of it, and its answer everything that a worker is told. `vllm-0.33/chunks` is the tier's pool
of chunks by itself, as its scheduler calls it, where transfers may fail, too, which that one's never do.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from hkv.contract.log import LogFormat, PlainOperation, PooledHeader
from hkv.dialects.vllm.config import NAME as VLLM
from hkv.dialects.vllm.config import VllmConfig, default_block_sizes, default_partial_hits
from hkv.dialects.vllm.offload.config import OF_THE_CACHE, OffloadConfig
from hkv.errors import ConfigError
from hkv.model.topology import Topology
from hkv.spec import spec_from_log

CHUNKS, OFFLOAD = NAMES = (f"{VLLM}/chunks", f"{VLLM}/offload")
"""The dialect's names in headers."""

Key: TypeAlias = tuple[str, int]
"""A chunk: its name, and its group. Of a pool alone, names are free; else they are 8 bytes of the prefix's hash."""


class Header(PooledHeader, kw_only=True):
    """The first line.

    Attributes:
      num_blocks: chunks of the tier; before them, under a scheduler, blocks of the GPU's pool.
      connector: `native`, or `simple`, whose chunks are blocks, the first one for none; `lazy`: of `simple`, what is
        about to be handed out is stored.
      policy: `eviction_policy`.
      threshold: `store_threshold`, offers of a chunk from which on it is stored; below 2 at once.
      tracked: `max_tracker_size`, chunks whose offers are counted at most.
      blocks_per_chunk, prompt_only, workers, sync_tokens, step_tokens, most_running, eagle, drafts: as
        `hkv.dialects.vllm.offload.config.OffloadConfig` explains them; of a scheduler.
      hash_block_size: tokens of a prefix's hash (`prefix_match_unit`); None for what the groups have in common.
      max_model_len: tokens of the longest request.
      retention_interval: as `hkv.dialects.vllm.config.VllmConfig`.
    """

    connector: str = "native"
    lazy: bool = False
    policy: str = "lru"
    threshold: int = 0
    tracked: int = 64_000
    blocks_per_chunk: int = 1
    prompt_only: bool = True
    workers: int = 1
    sync_tokens: int = 0
    step_tokens: int = 64
    most_running: int = 8
    eagle: list[int] = msgspec.field(default_factory=list)
    drafts: int = 0
    hash_block_size: int | None = None
    max_model_len: int = 512
    retention_interval: int | None = 0


# The pool by itself.


class Stored(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `store`: keys that are to be written, their chunks, and the keys that left; None without room."""

    keys: list[Key] | None
    chunks: list[int]
    evicted: list[Key]


class Loaded(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `load`: the chunks."""

    chunks: list[int]


class PoolEvent(msgspec.Struct, forbid_unknown_fields=True):
    """Keys that left, or can be read from now on; `failed`: they left because their store failed."""

    keys: list[Key]
    removed: bool
    failed: bool


class ChunkState(msgspec.Struct, forbid_unknown_fields=True):
    """A chunk: its key and id, transfers that read it (-1 while it is written), and its rank under LRU."""

    key: Key
    id: int
    readers: int
    rank: tuple[int, int] | None


class PoolState(msgspec.Struct, forbid_unknown_fields=True):
    """A pool of chunks.

    Attributes:
      chunks: in the order in which they leave; under ARC those used once, then those used often.
      handed_out: ids below this have been handed out.
      free: ids that came back, the next to be handed out last.
      often: under ARC, how many of the last chunks were used often.
      gone: under ARC, keys that left those used once, and those used often.
      target: under ARC, chunks that those used once should have.
      offers: keys that are tracked and how often they were offered, the one offered longest ago first.
    """

    chunks: list[ChunkState]
    handed_out: int
    free: list[int]
    often: int
    gone: list[list[Key]]
    target: float
    offers: list[tuple[Key, int]]


# A scheduler with it.


class Match(msgspec.Struct, forbid_unknown_fields=True):
    """A lookup of a waiting request: tokens of its hit on the GPU, tokens beyond them in the tier, None for: later; and
    whether the load takes longer than the step."""

    id: str
    local: int
    external: int | None
    later: bool


class Transfer(msgspec.Struct, forbid_unknown_fields=True):
    """A job: its number and request, chunks, blocks, and of each group the number of blocks and the first's column.

    `within`: the step waits for it, of a load.
    """

    job: int
    id: str
    chunks: list[int]
    blocks: list[int]
    sizes: list[int]
    starts: list[int]
    within: bool


class Stepped(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `step`.

    Attributes:
      matches: lookups of waiting requests, in order.
      tokens: tokens of each request that was scheduled.
      preempted: requests that were preempted since the last step.
      loads: jobs that the step orders to read chunks.
      stores: jobs that it orders to write them.
      flushed: jobs that are finished before it.
      finished: requests that finished with it.
      events: of the tier's pool.
      refused: stores so far that found no room.
    """

    matches: list[Match]
    tokens: dict[str, int]
    preempted: list[str]
    loads: list[Transfer]
    stores: list[Transfer]
    flushed: list[int]
    finished: list[str]
    events: list[PoolEvent]
    refused: int


class Reset(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `reset`: whether the GPU's cache is empty."""

    ok: bool


class Held(msgspec.Struct, forbid_unknown_fields=True):
    """A request of the tier: its blocks in the GPU's tables; those that it would store from, of the chunk on from which
    on it offers, and that chunk, of each group; and its jobs."""

    computed: int
    rows: list[list[int]]
    blocks: list[list[int]]
    cursors: list[int]
    jobs: list[int]


class SchedulerState(msgspec.Struct, forbid_unknown_fields=True):
    """A scheduler: its queues, the GPU's free blocks, requests, and the jobs that fence blocks."""

    running: list[str]
    waiting: list[str]
    holding: list[str]
    free: list[int]
    requests: dict[str, Held]
    fences: dict[str, list[int]]


class State(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `state`; `scheduler` is None of a pool by itself."""

    pool: PoolState
    scheduler: SchedulerState | None = None


class Operation(PlainOperation, omit_defaults=True):
    """One operation."""


Named: TypeAlias = tuple[str, int, int]
"""A chunk as a request names it: name, group, and tokens up to its end."""


class BeginOp(Operation, tag="begin"):
    """A request comes."""

    id: str


class StoreOp(Operation, tag="store"):
    """A request offers chunks; what is taken is written by a job of that number."""

    id: str
    job: int
    keys: list[Named]
    want: Stored | None = None


class LoadOp(Operation, tag="load"):
    """A request reads chunks by a job of that number."""

    id: str
    job: int
    keys: list[Named]
    want: Loaded | None = None


class DoneOp(Operation, tag="done"):
    """A job is finished, or, of a store, has failed."""

    job: int
    failed: bool = False


class EndOp(Operation, tag="end"):
    """A request ends; its jobs may go on."""

    id: str


class ClearOp(Operation, tag="clear"):
    """The pool is emptied; jobs are forgotten."""


class EventsOp(Operation, tag="events"):
    """Drains events."""

    want: list[PoolEvent] | None = None


class StateOp(Operation, tag="state"):
    """Everything."""

    want: State | None = None


class RequestOp(Operation, tag="request"):
    """A request comes, which generates `output` tokens; tokens that may be loaded for it, and stored, where limited."""

    id: str
    tokens: list[int]
    output: int
    load_limit: int | None = None
    store_limit: int | None = None


class StepOp(Operation, tag="step"):
    """A step is scheduled, and its output taken: workers report jobs, `at_once` the loads that it ordered, too."""

    reports: list[int] = msgspec.field(default_factory=list)
    at_once: bool = False
    want: Stepped | None = None


class AbortOp(Operation, tag="abort"):
    """A request is aborted."""

    id: str


class ResetOp(Operation, tag="reset"):
    """The GPU's prefix cache is emptied (`reset_prefix_cache`); with `preempt` running requests are preempted before,
    with `tier` the tier is emptied as well."""

    preempt: bool = False
    tier: bool = False
    want: Reset | None = None


OF_SCHEDULER = (RequestOp, StepOp, AbortOp, ResetOp, StateOp)
"""Operations of a scheduler."""

OF_POOL = (BeginOp, StoreOp, LoadOp, DoneOp, EndOp, ClearOp, EventsOp, StateOp)
"""Operations of a pool by itself."""


def to_config(header: Header) -> OffloadConfig:
    """The configuration that a header describes; of a pool by itself, behind a cache that nothing is asked of.

    Raises:
      HKVError: names what vLLM does not have, or what is not ruled.
    """
    if header.oplog != 2:
        raise ConfigError("oplog", header.oplog, "version 2 of the log format")
    pools = 1 if header.dialect == CHUNKS else 2
    if len(header.num_blocks) != pools:
        expected = "chunks of the tier" if pools == 1 else "blocks of the GPU, and chunks of the tier"
        raise ConfigError("num_blocks", header.num_blocks, expected)
    topology = Topology.of_specs([spec_from_log(group) for group in header.groups], _flagged(header))
    scheduler_block, hash_block = default_block_sizes(topology)
    hash_block = header.hash_block_size or hash_block
    cache = VllmConfig(
        topology=topology,
        num_blocks=header.num_blocks[0] if pools == 2 else 1,
        hash_block_size=hash_block,
        scheduler_block_size=scheduler_block,
        retention_interval=header.retention_interval,
        partial_hits=default_partial_hits(topology.specs, hash_block),
        max_model_len=header.max_model_len,
        max_in_flight_tokens=header.step_tokens,
        eagle=header.drafts > 0,
        bugs=frozenset(OF_THE_CACHE).intersection(header.bugs),
        prefill_lookahead=int(header.drafts > 0),
        offloads=any(spec.keeps_states for spec in topology.specs),
    )
    return OffloadConfig(
        cache=cache,
        num_chunks=header.num_blocks[-1],
        eagle=tuple(header.eagle),
        bugs=frozenset(header.bugs),
        **{name: getattr(header, name) for name in _SAME},
    )


def _flagged(header: Header) -> list[int]:
    """Groups of a draft's layers that there are; of others the configuration complains."""
    return [group for group in header.eagle if 0 <= group < len(header.groups)]


_SAME = (
    *("connector", "lazy", "policy", "threshold", "tracked", "blocks_per_chunk", "prompt_only"),
    *("workers", "sync_tokens", "step_tokens", "most_running", "drafts"),
)
"""Fields that a header and a configuration have alike."""

OPERATIONS = tuple(dict.fromkeys((*OF_POOL, *OF_SCHEDULER)))

FORMAT = LogFormat(Header, OPERATIONS, to_config, prefix="offload_")
"""Header and operations, by name."""
