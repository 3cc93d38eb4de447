"""The reference as an engine: `reference.dialects.rtp_llm` behind the operations of its logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.engines.engine import check_unused, taken
from hkv.dialects.rtp_llm.engines.numpy import KeyHistory
from hkv.dialects.rtp_llm.log import to_rtp_config

VERDICTS = ("granted", "permanent", "retryable", "internal_error")
"""Names of the verdicts in logs, by their number."""


class WitnessEngine:
    """The reference under RTP-LLM's rules. Implements `hkv.dialects.rtp_llm.engines.engine.KeyedRtpEngine`.

    Args:
      header: the configuration, as a log's first line.

    Attributes:
      manager: the reference's object, for inspection.

    Raises:
      HKVError: a configuration the dialect forbids.
    """

    def __init__(self, header: structs.RtpHeader) -> None:
        from tests.rtp_llm.witness.manager import RtpManager

        self.manager = RtpManager(to_rtp_config(header))
        self._history = KeyHistory(len(header.groups))
        self._held: dict[str, Any] = {}
        self._exported: dict[str, Any] = {}

    def perform(self, operation: structs.RtpOp) -> structs.RtpAnswer:
        from tests.rtp_llm.witness.export import free_cached

        manager = self.manager
        match operation:
            case structs.RequestOp():
                manager.request(operation.id, operation.tokens, operation.sequences, operation.reserve)
            case structs.MallocOp():
                return self._malloc(operation)
            case structs.AppendOp():
                manager.append(operation.id, operation.tokens)
            case structs.InsertOp():
                self._insert(operation)
            case structs.ForkOp():
                return self._fork(operation)
            case structs.FreeOp():
                self._free(operation.id)
            case structs.DropOp():
                manager.drop(operation.id)
            case structs.HoldOp():
                return self._hold(operation)
            case structs.ReleaseOp():
                taken(self._held, operation.name).release()
            case structs.ExportOp():
                return self._export(operation)
            case structs.SettleOp():
                free_cached(manager.allocator, taken(self._exported, operation.name))
            case structs.EvictOp():
                return structs.Count(manager.evict(operation.least))
            case structs.PeakOp():
                flags = {"reuse": operation.reuse, "target": operation.sequences}
                return structs.Count(manager.peak(operation.id, operation.remaining, **flags))
            case structs.StateOp():
                return self.state()
        return None

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int], reserve: int = 0) -> None:
        self.manager.request_keyed(id, num_tokens, keys, reserve)

    def extend(self, id: str, tokens: int) -> None:
        self.manager.extend(id, tokens)

    def num_available(self) -> int:
        return self.manager.allocator.available

    def num_cached(self) -> int:
        """Blocks that the cache holds, over all pools."""
        return self.manager.allocator.cache_refs

    @property
    def evictions(self) -> int:
        """Blocks that were evicted so far."""
        return self.manager.allocator.cache.evictions

    @property
    def duplicates(self) -> int:
        """Blocks of keyed requests that were not cached because another one was there."""
        return self._history.duplicates

    def absence(self, group: int, key: int) -> str:
        """State of a group's block under a key of keyed requests (`KeyHistory`)."""
        item = self.manager.allocator.cache.peek(key)
        return self._history.absence(group, key, cached=item is not None and item.has(group) and item.matchable[group])

    def state(self) -> structs.RtpState:
        """State of the cache, as far as engines are compared."""
        allocator = self.manager.allocator
        lists = {id: self.manager.rows(id) for id in self.manager.requests}
        return structs.RtpState(
            pools=[_pool_state(pool) for pool in allocator.pools],
            lists={id: rows for id, rows in lists.items() if any(blocks for row in rows for blocks in row)},
            cached=[(key, list(item.blocks)) for key in allocator.cache.items if (item := allocator.cache.peek(key))],
            version=allocator.cache.version,
        )

    def _malloc(self, operation: structs.MallocOp) -> structs.Malloc:
        request = self.manager.requests.get(operation.id)
        new = request is not None and request.given is not None and not request.resource.current_blocks
        flags = {"reuse": operation.reuse, "device_cache": operation.device_cache}
        result = self.manager.malloc(operation.id, length=operation.length, **flags)
        if new and result.success:
            self._history.begin(self._prompt_keys(operation.id))
        return structs.Malloc(VERDICTS[result.verdict], result.reused, self.manager.rows(operation.id))

    def _insert(self, operation: structs.InsertOp) -> None:
        self.manager.insert(operation.id, resident=operation.resident)
        request = self.manager.requests[operation.id]
        if request.given is not None:
            cache, row = self.manager.allocator.cache, request.resource.rows[0]
            items = [cache.peek(key) for key in row.keys]
            absent = [-1] * len(row.groups)
            cached = [absent if item is None else item.blocks for item in items]
            self._history.inserted(row.keys, [blocks.blocks for blocks in row.groups], cached)

    def _free(self, id: str) -> None:
        request = self.manager.requests.get(id)
        if request is not None and request.given is not None and request.resource.current_blocks:
            self._history.end(self._prompt_keys(id))
        self.manager.free(id)

    def _prompt_keys(self, id: str) -> Sequence[int]:
        given = self.manager.requests[id].given
        return () if given is None else given

    def _fork(self, operation: structs.ForkOp) -> structs.Fork:
        pairs = self.manager.fork(operation.id, operation.sources, copy_last=operation.copy_last)
        copies = None if pairs is None else [(pair.tag, pair.source, pair.target) for pair in pairs]
        return structs.Fork(copies, self.manager.rows(operation.id))

    def _hold(self, operation: structs.HoldOp) -> structs.Selected:
        from tests.rtp_llm.witness.export import hold

        check_unused(self._held, operation.name)
        row = self.manager.sequence(operation.id, operation.sequence)
        held = hold(self.manager.allocator, row, row.keys, connector=operation.connector)
        if held is None:
            return structs.Selected(None, None)
        self._held[operation.name] = held
        return _selected(held.resource)

    def _export(self, operation: structs.ExportOp) -> structs.Selected:
        from tests.rtp_llm.witness.export import pop_from_cache

        check_unused(self._exported, operation.name)
        exported = pop_from_cache(self.manager.allocator, operation.least)
        if exported is None:
            return structs.Selected(None, None)
        self._exported[operation.name] = exported
        return _selected(exported.rows[0])


def _selected(row: Any) -> structs.Selected:
    return structs.Selected(list(row.keys), [list(blocks.blocks) for blocks in row.groups])


def _pool_state(pool: Any) -> structs.PoolState:
    counts = {
        role: {str(block): count for block, count in enumerate(numbers) if count}
        for role, numbers in pool.refs.counts.items()
    }
    return structs.PoolState(free=list(pool.unheld), **counts)
