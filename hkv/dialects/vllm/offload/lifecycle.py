"""The order in which the operations of a log of the second tier may come."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hkv.dialects.vllm.offload import log as structs
from hkv.errors import OperationError


def lifecycle(header: structs.Header) -> PoolLifecycle | SchedulerLifecycle:
    """Follows the log of a pool by itself, or of a scheduler."""
    return PoolLifecycle() if header.dialect == structs.CHUNKS else SchedulerLifecycle(header)


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
        elif not isinstance(operation, structs.OF_POOL):
            raise OperationError("op", type(operation).__name__, "an operation of a pool")

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


class SchedulerLifecycle:
    """Follows the log of a scheduler and refuses an operation that cannot follow.

    Attributes:
      requests: tokens of each request that has come and not ended.
      jobs: reports of each job that are still to come.
      loading: of each request whose load goes on, or has ended without its being scheduled since, the job.
    """

    def __init__(self, header: structs.Header) -> None:
        self._header = header
        self._names: set[str] = set()
        self.loading: dict[str, int] = {}
        self.requests: dict[str, list[int]] = {}
        self.jobs: dict[int, int] = {}

    def follow(self, operation: structs.Operation) -> None:
        """Checks one operation, and performs it but for what its answer decides.

        Raises:
          OperationError: names the field that does not fit what came before; nothing changed.
        """
        if isinstance(operation, structs.RequestOp):
            self._arrive(operation)
        elif isinstance(operation, structs.StepOp):
            counted = Counter(operation.reports)
            if wrong := [job for job, count in counted.items() if count > self.jobs.get(job, 0)]:
                raise OperationError("reports", wrong[0], "jobs that go on, once for each worker at most")
        elif isinstance(operation, structs.AbortOp):
            if operation.id not in self.requests:
                raise OperationError("id", operation.id, "a request that has come and not ended")
            del self.requests[operation.id]
            self._settle()
        elif isinstance(operation, structs.ResetOp):
            if operation.preempt and self.loading:
                raise OperationError("preempt", True, f"false while {min(self.loading)} is loaded: vLLM gives up")
        elif not isinstance(operation, structs.StateOp):
            raise OperationError("op", type(operation).__name__, "an operation of a scheduler")

    def answered(self, operation: structs.Operation, answer: Any) -> None:
        """Takes note of jobs, of tokens that were generated, and of requests that finished."""
        if not (isinstance(operation, structs.StepOp) and isinstance(answer, structs.Stepped)):
            return
        workers = self._header.workers
        self.jobs.update({transfer.job: workers for transfer in (*answer.loads, *answer.stores)})
        for job in operation.reports:
            self.jobs[job] -= 1
        done = set(answer.flushed)
        done.update(transfer.job for transfer in answer.loads if operation.at_once or transfer.within)
        self.jobs = {job: left for job, left in self.jobs.items() if left and job not in done}
        self.loading.update({load.id: load.job for load in answer.loads if not load.within})
        for id in answer.tokens:
            self.loading.pop(id, None)
        for id in answer.finished:
            self.requests.pop(id, None)
        self._settle()

    def _settle(self) -> None:
        """Blocks of an aborted request are free once its load has ended."""
        self.loading = {id: job for id, job in self.loading.items() if id in self.requests or job in self.jobs}

    def _arrive(self, operation: structs.RequestOp) -> None:
        if operation.id in self._names:
            raise OperationError("id", operation.id, "a name that no request had")
        most = self._header.max_model_len - 1
        if not 1 <= len(operation.tokens) <= most:
            raise OperationError("tokens", len(operation.tokens), f"from 1 to {most} tokens")
        if operation.output < 1:
            raise OperationError("output", operation.output, "at least 1 token")
        self._names.add(operation.id)
        self.requests[operation.id] = operation.tokens


def keys_of(named: list[structs.Named]) -> list[structs.Key]:
    """Chunks that a request names, by themselves."""
    return [(name, group) for name, group, _ in named]
