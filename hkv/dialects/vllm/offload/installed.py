"""Drives an installed vLLM's own `CPUOffloadingManager`, so that HKV can be held against the engine it describes."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.engines.installed import require_vllm
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.lifecycle import PoolLifecycle
from hkv.errors import OperationError

RELEASE = "0.33.0"


class InstalledOffloadEngine:
    """vLLM 0.33.0's `CPUOffloadingManager` by itself, as an engine of the tier's logs.

    Args:
      header: the configuration, as a log's first line.
      release: the version that vLLM must have, whatever its rules; None for 0.33.0.

    Raises:
      ConfigError: vLLM is not installed, or another release of it; a tier that it does not have.
    """

    def __init__(self, header: structs.Header, release: str | None = None) -> None:
        require_vllm(release or RELEASE)
        structs.check(header)
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self._manager = CPUOffloadingManager(
            header.num_blocks[-1],
            header.policy,
            enable_events=True,
            store_threshold=header.threshold,
            max_tracker_size=header.tracked,
        )
        self._lifecycle = PoolLifecycle()
        self._contexts: dict[str, Any] = {}
        self._jobs: dict[int, tuple[bool, list[bytes], Any]] = {}

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it cannot come now, or vLLM fails.
        """
        self._lifecycle.follow(operation)
        try:
            answer = self._answer(operation)
        except (AssertionError, KeyError) as error:
            raise OperationError(type(operation).__name__, str(error), "vLLM not to fail") from error
        self._lifecycle.answered(operation, answer)
        return answer

    def _answer(self, operation: structs.Operation) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        manager = self._manager
        match operation:
            case structs.BeginOp():
                context = self._contexts[operation.id] = ReqContext(req_id=operation.id)
                manager.on_new_request(context)
            case structs.StoreOp():
                return self._store(operation)
            case structs.LoadOp():
                context, keys = self._named(operation)
                self._jobs[operation.job] = (False, keys, context)
                return structs.Loaded(manager.prepare_load(keys, context).chunk_ids.tolist())
            case structs.DoneOp():
                writes, keys, context = self._jobs.pop(operation.job)
                if writes:
                    manager.complete_store(keys, context, success=not operation.failed)
                else:
                    manager.complete_load(keys, context)
            case structs.EndOp():
                manager.on_request_finished(self._contexts.pop(operation.id))
            case structs.ClearOp():
                manager.reset_cache()
                self._jobs.clear()
            case structs.EventsOp():
                return [pool_event(event, name_of) for event in manager.take_events()]
            case _:
                return structs.State(pool_state(manager, name_of))
        return None

    def _store(self, operation: structs.StoreOp) -> structs.Stored:
        context, keys = self._named(operation)
        stored = self._manager.prepare_store(keys, context)
        if stored is None:
            return structs.Stored(None, [], [])
        if stored.keys_to_store:
            self._jobs[operation.job] = (True, stored.keys_to_store, context)
        written, evicted = ([name_of(key) for key in each] for each in (stored.keys_to_store, stored.evicted_keys))
        return structs.Stored(written, stored.store_spec.chunk_ids.tolist(), evicted)

    def _named(self, operation: structs.StoreOp | structs.LoadOp) -> tuple[Any, list[bytes]]:
        from vllm.v1.kv_offload.base import make_offload_key

        context = self._contexts[operation.id]
        keys = []
        for name, group, end in operation.keys:
            keys.append(make_offload_key(name.encode(), group))
            context.set_offload_key_position(keys[-1], end)
        return context, keys


def name_of(key: bytes) -> structs.Key:
    """A key of vLLM's as logs of a pool name it."""
    return key[:-4].decode(), int.from_bytes(key[-4:], "big")


def pool_event(event: Any, named: Any) -> structs.PoolEvent:
    """An event of the manager; keys that became ready, or whose store failed, stand in no order."""
    keys = [named(key) for key in event.keys]
    evicted = event.removed and not event.metadata_only
    return structs.PoolEvent(keys if evicted else sorted(keys), event.removed, event.metadata_only)


def pool_state(manager: Any, named: Any) -> structs.PoolState:
    """State of vLLM's manager."""
    policy = manager._policy
    lru = hasattr(policy, "chunks")
    if lru:
        chunks, ranks, gone = policy.chunks, policy._ranks, []
        order = sorted(chunks, key=lambda key: (ranks[key], key))
    else:
        chunks, ranks = {**policy.t1, **policy.t2}, {}
        order, gone = list(chunks), [[named(key) for key in ghosts] for ghosts in (policy.b1, policy.b2)]
    return structs.PoolState(
        [structs.ChunkState(named(key), chunks[key].chunk_id, chunks[key].ref_cnt, ranks.get(key)) for key in order],
        manager._num_allocated_chunks,
        list(manager._free_list),
        0 if lru else len(policy.t2),
        gone,
        0.0 if lru else float(policy.target_t1_size),
        [(named(key), count) for key, count in (manager.counts or {}).items()],
    )
