"""Logs of vLLM's second tier: header, operations and answers as typed values.

They are a dialect beside vLLM's own, not operations of it: under `vllm-0.33` a log tells each call of the block
manager, and its caller decides; here the caller is vLLM's scheduler itself, whose decisions are what the tier changes.
One operation is one step of it, and its answer everything that a worker is told. `vllm-0.33/chunks` is the tier's pool
of chunks by itself, as its scheduler calls it, where transfers may fail, too, which that one's never do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from hkv.contract.log import Log, LogFormat, PlainOperation, PooledHeader
from hkv.dialects.vllm.config import NAME as VLLM
from hkv.errors import ConfigError

CHUNKS, OFFLOAD = NAMES = (f"{VLLM}/chunks", f"{VLLM}/offload")
"""The dialect's names in headers."""

POLICIES = ("lru", "arc")
"""`eviction_policy`."""

Key: TypeAlias = tuple[str, int]
"""A chunk: its name, and its group. Of a pool alone, names are free; else they are 8 bytes of the prefix's hash."""


class Header(PooledHeader, kw_only=True):
    """The first line.

    Attributes:
      num_blocks: chunks of the tier; before them, under a scheduler, blocks of the GPU's pool.
      policy: `eviction_policy`.
      threshold: `store_threshold`, offers of a chunk from which on it is stored; below 2 at once.
      tracked: `max_tracker_size`, chunks whose offers are counted at most.
    """

    policy: str = "lru"
    threshold: int = 0
    tracked: int = 64_000


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


class State(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `state`."""

    pool: PoolState


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


OF_POOL = (BeginOp, StoreOp, LoadOp, DoneOp, EndOp, ClearOp, EventsOp, StateOp)
"""Operations of a pool by itself."""


def check(header: Header) -> None:
    """Refuses what vLLM does not have.

    Raises:
      ConfigError: names it.
    """
    if header.oplog != 2:
        raise ConfigError("oplog", header.oplog, "version 2 of the log format")
    pools = 1 if header.dialect == CHUNKS else 2
    if len(header.num_blocks) != pools or min(header.num_blocks) < 1:
        expected = "chunks of the tier" if pools == 1 else "blocks of the GPU, and chunks of the tier"
        raise ConfigError("num_blocks", header.num_blocks, f"{expected}, one at least")
    if header.policy not in POLICIES:
        raise ConfigError("policy", header.policy, f"one of {', '.join(POLICIES)}")
    if header.tracked < 1:
        raise ConfigError("tracked", header.tracked, "at least 1")
    if header.bugs:
        raise ConfigError("bugs", header.bugs, "none: no defect of the tier is known by name")


FORMAT = LogFormat(Header, OF_POOL, check, {"rank": -(2**31)}, "offload_")
"""Header and operations, by name."""

RULES: Mapping[str, str] = MappingProxyType(
    {
        "store/new": "chunks are taken for what was absent",
        "store/nothing": "nothing of an offer is taken: it is there, or being written, or not worth it",
        "store/evicted": "others leave for what is stored",
        "store/no-room": "an offer finds no room",
        "store/failed": "a store fails, and its chunks leave again",
        "load": "chunks are read",
        "clear": "the tier is emptied",
        "threshold": "offers are counted",
    }
)
"""Rules that a log may exercise, as far as its operations and the recorded answers show."""


def exercised(log: Log) -> dict[str, int]:
    """Times that a log exercised each of `RULES`; those that it did not are left out."""
    counts = dict.fromkeys(RULES, 0)
    for operation in log.operations:
        for rule in _shown(operation):
            counts[rule] += 1
    return {rule: count for rule, count in counts.items() if count}


def _shown(operation: Operation) -> list[str]:
    match operation:
        case StoreOp(want=Stored(keys=None)):
            return ["store/no-room"]
        case StoreOp(want=Stored(keys=keys, evicted=evicted)):
            return ["store/new" if keys else "store/nothing"] + ["store/evicted"] * bool(evicted)
        case LoadOp():
            return ["load"]
        case DoneOp(failed=True):
            return ["store/failed"]
        case ClearOp():
            return ["clear"]
        case StateOp(want=State(pool=PoolState(offers=[_, *_]))):
            return ["threshold"]
    return []
