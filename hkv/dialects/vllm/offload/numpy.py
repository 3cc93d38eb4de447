"""The reference as an engine: `reference.dialects.vllm.offload` behind the operations of the tier's logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.lifecycle import PoolLifecycle, keys_of
from hkv.version import check_reference

if TYPE_CHECKING:
    from reference.dialects.vllm.offload.pool import ChunkPool, Context


class OffloadNumpyEngine:
    """The reference of a pool by itself.

    Args:
      header: the configuration, as a log's first line.

    Attributes:
      pool: the reference's own object, for those who want to look inside.

    Raises:
      ConfigError: a tier that vLLM does not have.
    """

    pool: ChunkPool

    def __init__(self, header: structs.Header) -> None:
        check_reference()
        from reference.dialects.vllm.offload.pool import ChunkPool

        structs.check(header)
        self.pool = ChunkPool(header.num_blocks[-1], header.policy, header.threshold, header.tracked)
        self._lifecycle = PoolLifecycle()
        self._contexts: dict[str, Context] = {}

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it cannot come now; nothing changed.
        """
        jobs = dict(self._lifecycle.jobs)
        self._lifecycle.follow(operation)
        answer = self._answer(operation, jobs)
        self._lifecycle.answered(operation, answer)
        return answer

    def _answer(self, operation: structs.Operation, jobs: dict[int, tuple[bool, list[structs.Key]]]) -> Any:
        from reference.dialects.vllm.offload.pool import Context

        pool = self.pool
        match operation:
            case structs.BeginOp():
                context = self._contexts[operation.id] = Context()
                pool.begin(context)
            case structs.StoreOp():
                stored = pool.store(keys_of(operation.keys), self._context(operation))
                return structs.Stored(None, [], []) if stored is None else structs.Stored(*stored)
            case structs.LoadOp():
                return structs.Loaded(pool.load(keys_of(operation.keys), self._context(operation)))
            case structs.DoneOp():
                writes, keys = jobs[operation.job]
                if writes:
                    pool.complete_store(keys, ok=not operation.failed)
                else:
                    pool.complete_load(keys)
            case structs.EndOp():
                pool.end(self._contexts.pop(operation.id))
            case structs.ClearOp():
                pool.clear()
            case structs.EventsOp():
                return [structs.PoolEvent(*event) for event in pool.take_events()]
            case _:
                return structs.State(pool_state(pool))
        return None

    def _context(self, operation: structs.StoreOp | structs.LoadOp) -> Context:
        context = self._contexts[operation.id]
        context.positions.update({(name, group): end for name, group, end in operation.keys})
        return context


def pool_state(pool: ChunkPool) -> structs.PoolState:
    """State of the reference's pool."""
    from reference.dialects.vllm.offload.policies import Lru

    policy = pool.policy
    if isinstance(policy, Lru):
        order = sorted(policy.chunks, key=lambda key: (policy.ranks[key], key))
        chunks, often, gone, target, ranks = policy.chunks, 0, [], 0.0, policy.ranks
    else:
        chunks, often, target, ranks = {**policy.once, **policy.often}, len(policy.often), policy.target, {}
        order, gone = list(chunks), [list(policy.gone_once), list(policy.gone_often)]
    return structs.PoolState(
        [structs.ChunkState(key, chunks[key].id, chunks[key].readers, ranks.get(key)) for key in order],
        pool.handed_out,
        list(pool.free),
        often,
        gone,
        target,
        list(pool.offers.items()),
    )
