"""The order in which the operations of a log of the second tier may come."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.offload import log as structs
from hkv.errors import OperationError


class PoolLifecycle:
    """Follows the log of a pool by itself and refuses an operation that cannot follow.

    Attributes:
      ready: keys of chunks that can be read.
      jobs: those that go on, by number: whether it writes, and its keys.
      requests: names of those that have begun and not ended.
    """

    def __init__(self) -> None:
        self.ready: set[structs.Key] = set()
        self.jobs: dict[int, tuple[bool, list[structs.Key]]] = {}
        self.requests: set[str] = set()

    def follow(self, operation: structs.Operation) -> None:
        """Checks one operation, and performs it but for what its answer decides.

        Raises:
          OperationError: names the field that does not fit what came before; nothing changed.
        """
        if isinstance(operation, structs.BeginOp):
            if operation.id in self.requests:
                raise OperationError("id", operation.id, "a name that no request has")
            self.requests.add(operation.id)
        elif isinstance(operation, structs.StoreOp | structs.LoadOp):
            self._transfer(operation)
        elif isinstance(operation, structs.DoneOp):
            if operation.job not in self.jobs:
                raise OperationError("job", operation.job, "a job that goes on")
            if operation.failed and not self.jobs[operation.job][0]:
                raise OperationError("failed", True, "false: no load fails")
            writes, keys = self.jobs.pop(operation.job)
            self.ready.update(keys if writes and not operation.failed else ())
        elif isinstance(operation, structs.EndOp):
            if operation.id not in self.requests:
                raise OperationError("id", operation.id, "a request that has begun and not ended")
            self.requests.remove(operation.id)
        elif isinstance(operation, structs.ClearOp):
            self.ready.clear()
            self.jobs.clear()

    def answered(self, operation: structs.Operation, answer: Any) -> None:
        """Takes note of the keys that a store writes, and of those that left for them."""
        if isinstance(operation, structs.LoadOp) and isinstance(answer, structs.Loaded):
            self.jobs[operation.job] = (False, keys_of(operation.keys))
        if isinstance(operation, structs.StoreOp) and isinstance(answer, structs.Stored):
            self.ready.difference_update(answer.evicted)
            if answer.keys:
                self.jobs[operation.job] = (True, answer.keys)

    def _transfer(self, operation: structs.StoreOp | structs.LoadOp) -> None:
        if operation.id not in self.requests:
            raise OperationError("id", operation.id, "a request that has begun and not ended")
        if operation.job in self.jobs:
            raise OperationError("job", operation.job, "a number that no job has which goes on")
        keys = keys_of(operation.keys)
        if not keys or len(set(keys)) != len(keys):
            raise OperationError("keys", operation.keys, "at least one key, each once")
        if any(end < 1 for _, _, end in operation.keys):
            raise OperationError("keys", operation.keys, "ends of at least 1 token")
        if isinstance(operation, structs.LoadOp) and not self.ready.issuperset(keys):
            raise OperationError("keys", operation.keys, "keys of chunks that can be read")


def keys_of(named: list[structs.Named]) -> list[structs.Key]:
    """Chunks that a request names, by themselves."""
    return [(name, group) for name, group, _ in named]
