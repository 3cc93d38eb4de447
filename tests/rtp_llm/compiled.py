"""A compiled cache under RTP-LLM's rules, driven by hand: for conformance vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hkv.dialects.rtp_llm import machine as rtp_cache
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.engines import jax as rtp_jax
from hkv.dialects.rtp_llm.engines.jax_reading import Reader
from hkv.dialects.rtp_llm.rules.operations import RtpBatch, RtpCode, RtpColumn
from hkv.model.topology import Group, Topology
from hkv.state.pooled import (
    COUNTER_WORDS,
    ITEM_WORDS,
    MARK_WORDS,
    POOL_WORDS,
    REQUEST_WORDS,
    Counter,
    Item,
    PoolCounter,
    Role,
    bitmap_of,
    members_of,
)
from hkv.state.status import Status
from tests.rtp_llm.build import FULL, LINEAR, SWA, dsv4_groups, group


class Compiled:
    """One cache, one operation at a time. Keys are small integers.

    Args:
      groups: the groups.
      num_blocks: blocks of the pool, or of each group's pool.
      **fields: further fields of the configuration.
    """

    def __init__(self, groups: Sequence[Group], num_blocks: int | tuple[int, ...], **fields: Any) -> None:
        apart = isinstance(num_blocks, tuple)
        topology = Topology(tuple(groups), pools="independent" if apart else "shared")
        self.config = RtpConfig(topology=topology, num_blocks=num_blocks if apart else (num_blocks,), **fields)
        self.buckets = rtp_cache.buckets_for(self.config, tokens=rtp_jax.BLOCKS * self.config.block_size)
        self.parameters, state = rtp_cache.init(self.config, self.buckets)
        self.state: Any = state
        self.reader = Reader(self.config)

    def do(self, code: RtpCode, slot: int = 0, numbers: Sequence[int] = (), **arguments: int) -> tuple[Any, Any]:
        """Performs an operation; its results and ids."""
        operations = RtpBatch().add(code, slot, numbers, **arguments).build(rtp_jax.OPERATIONS, rtp_jax.PAYLOAD)
        new, results = rtp_cache.run(self.parameters, self.state, operations, ids=rtp_jax.IDS)
        self.state, results = jax.device_get((new, results))
        self.state = jax.tree.map(np.array, self.state)
        return results.table[0], results.ids

    def request(self, seq: int, slot: int = 0, keys: Sequence[int] | None = None, batch: int = 1, reserve: int = 0):
        whole = seq // self.config.block_size
        numbers = range(500, 500 + whole) if keys is None else keys[:whole]
        row, _ = self.do(RtpCode.REQUEST, slot, numbers, tokens=seq, sequences=batch, reserve=reserve)
        assert row[RtpColumn.STATUS] == Status.OK

    def malloc(self, slot: int = 0, *, reuse: bool = True, device_cache: bool = True, keep: bool = False):
        """The status, and the tokens that were reused."""
        row, _ = self.do(RtpCode.MALLOC, slot, reuse=int(reuse), device_cache=int(device_cache), keep=int(keep))
        return Status(int(row[RtpColumn.STATUS])), int(row[RtpColumn.VALUE])

    def begin(
        self,
        seq: int,
        slot: int = 0,
        *,
        keys: Sequence[int] | None = None,
        batch: int = 1,
        reserve: int = 0,
        **flags: bool,
    ):
        """A request arrives and asks for blocks."""
        self.request(seq, slot, keys, batch, reserve)
        return self.malloc(slot, **flags)

    def grow(self, seq: int, slot: int = 0, batch: int = 1, **flags: bool):
        """It has `seq` tokens now, and asks again."""
        before = int(self.state.requests[slot, 1])
        size = self.config.block_size
        numbers = list(range(700 + before // size, 700 + seq // size)) * batch
        row, _ = self.do(RtpCode.APPEND, slot, numbers, tokens=seq - before)
        assert row[RtpColumn.STATUS] == Status.OK
        return self.malloc(slot, **flags)

    def peak(self, remaining: int, slot: int = 0, *, reuse: bool = False, width: int = 0) -> int:
        row, _ = self.do(RtpCode.PEAK, slot, tokens=remaining, reuse=int(reuse), sequences=width)
        return int(row[RtpColumn.VALUE])

    def fork(self, sources: Sequence[int], slot: int = 0, *, copy: bool = True) -> list[list[int]] | None:
        """Copies as group, block, copy; None when refused."""
        row, ids = self.do(RtpCode.FORK, slot, sources, copy=int(copy))
        if row[RtpColumn.STATUS] != Status.OK:
            return None
        return ids[: 3 * int(row[RtpColumn.COUNT])].reshape(-1, 3).tolist()

    def lists(self, slot: int = 0, row: int = 0) -> list[list[int]]:
        return self.reader.lists(self.state, slot)[row]

    def free(self, pool: int = 0) -> int:
        return len(members_of(self.state.bitmap[pool], self.buckets.levels))

    @property
    def version(self) -> int:
        return int(self.state.counters[Counter.VERSION])

    def has(self, key: int, group: int) -> bool:
        return bool(self.state.items[key, ITEM_WORDS + group])

    # By hand.

    def cache(self, entries: dict[int, Sequence[int]], *, resident: bool = False) -> dict[int, dict[int, int]]:
        """Caches fresh blocks that no request holds: group to keys. Answers group to key to block."""
        placed: dict[int, dict[int, int]] = {}
        for index, keys in entries.items():
            for key in keys:
                block = self._take(index, Role.CACHE)
                self._link(key, resident)
                self.state.items[key, ITEM_WORDS + index] = block
                placed.setdefault(index, {})[key] = block
        return placed

    def place(self, lists: Sequence[Sequence[Sequence[bool]]], slot: int = 0) -> None:
        """Gives a waiting request blocks of its own where True is, and holes elsewhere: of each sequence and group."""
        width = self.buckets.groups + MARK_WORDS
        for sequence, groups in enumerate(lists):
            for index, wanted in enumerate(groups):
                self.state.requests[slot, REQUEST_WORDS + sequence * width + index] = len(wanted)
                for position, real in enumerate(wanted):
                    block = self._take(index, Role.REQUEST) if real else 0
                    self.state.rows[slot, sequence, index, position] = block

    def _take(self, index: int, role: Role) -> int:
        pool = self.config.topology.pool_of(self.config.topology.tags[index])
        block, *left = members_of(self.state.bitmap[pool], self.buckets.levels)
        assert left == list(range(block + 1, block + 1 + len(left))), "nothing was given back yet"
        self.state.bitmap[pool, :-1] = bitmap_of(range(block + 1, block + 1 + len(left)), self.buckets.levels)
        self.state.references[pool, block, role] = 1
        place = COUNTER_WORDS + POOL_WORDS * pool
        self.state.counters[place + PoolCounter.FREE] -= 1
        self.state.counters[place + PoolCounter.HELD] += role != Role.CACHE
        return block

    def _link(self, key: int, resident: bool) -> None:
        items, ring = self.state.items, self.buckets.keys
        if items[key, Item.FLAGS]:
            return
        last = items[ring, Item.PREVIOUS]
        items[last, Item.NEXT] = items[ring, Item.PREVIOUS] = key
        items[key, [Item.NEXT, Item.PREVIOUS]] = ring, last
        items[key, Item.FLAGS] = 1 + 2 * resident


def single(
    num_blocks: int = 10, block_size: int = 4, *, policy: dict[str, Any] | None = None, **fields: Any
) -> Compiled:
    """One full group."""
    return Compiled((group("default", FULL, block_size, **(policy or {})),), num_blocks, **fields)


def alone(kind: Any, num_blocks: int = 10, block_size: int = 4, step: int = 2, **policy: Any) -> Compiled:
    """One group of that type over a pool of its own."""
    return Compiled((group("alone", kind, block_size, **policy),), (num_blocks,), linear_step=step)


def tiny_hybrid(num_blocks: int = 10, *, tail: int = 1, **fields: Any) -> Compiled:
    """A linear and a full group over one pool, blocks of 4 tokens, step 2."""
    groups = (group("linear", LINEAR, 4, active_tail_blocks=tail), group("full1", FULL, 4, kernel=2))
    return Compiled(groups, num_blocks, **{"linear_step": 2, **fields})


def tiny_multi(linear: int, full: int, **fields: Any) -> Compiled:
    """A linear and a full group with a pool each, blocks of 4 tokens, step 2."""
    groups = (group("linear", LINEAR, 4), group("full1", FULL, 4))
    return Compiled(groups, (linear, full), **{"linear_step": 2, **fields})


def dsv4(ratios: Sequence[int], num_blocks: int = 100, *, shared: bool = False, **fields: Any) -> Compiled:
    """DeepSeek-V4 with blocks of 4 tokens, with a pool a group or one for all."""
    groups = dsv4_groups(ratios, 4, fields.get("cp_size", 1))
    counts = tuple(each.policy.explicit_block_num or num_blocks for each in groups)
    return Compiled(groups, num_blocks if shared else counts, block_size=4, **fields)


__all__ = ["FULL", "LINEAR", "SWA", "Compiled", "alone", "dsv4", "single", "tiny_hybrid", "tiny_multi"]
