"""The protocol by which HKV drives a cache, its own or anybody else's."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, Answer, CacheEvent, CacheState, ExtraKeys, Hit, Operation
from hkv.errors import EngineTimeoutError, HKVError


@dataclasses.dataclass(frozen=True)
class Failure:
    """What stands for an answer when an engine raised an error instead.

    Attributes:
      message: the error, in words.
      timed_out: whether the engine was silent for as long as it may be.
    """

    message: str
    timed_out: bool = False


@runtime_checkable
class Engine(Protocol):
    """A hybrid KV cache. Every method is one operation of the log format and means what `docs/oplog.md` says."""

    def step(self) -> None: ...

    def request(self, id: str, tokens: Sequence[int], extra: ExtraKeys | None) -> None: ...

    def lookup(self, id: str) -> Hit: ...

    def allocate(self, operation: oplog.AllocateOp) -> Allocation: ...

    def advance(self, id: str, tokens: int) -> None: ...

    def append(self, id: str, tokens: Sequence[int]) -> None: ...

    def commit(self, id: str, tokens: int) -> None: ...

    def free(self, id: str) -> None: ...

    def drop(self, id: str) -> None: ...

    def evict(self, blocks: Sequence[int]) -> None: ...

    def copies(self) -> list[tuple[int, int]]: ...

    def reset(self) -> bool: ...

    def events(self) -> list[CacheEvent]: ...

    def state(self) -> CacheState: ...


@runtime_checkable
class BatchEngine(Engine, Protocol):
    """An engine that would rather have many operations at once than one at a time."""

    def run(self, operations: Sequence[Operation]) -> list[Answer]: ...


@runtime_checkable
class KeyedEngine(Engine, Protocol):
    """An engine that also takes requests whose prefix keys are known beforehand, as a request trace gives them."""

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int]) -> None:
        """A request arrives whose prompt has `num_tokens` tokens, unnamed.

        `keys[i]`, a non-negative int, identifies the first `(i + 1) * hash_block_size` tokens of the request, in the
        whole of its life: equal keys mean equal tokens from 0 on. Keys beyond the tokens it has so far are not used.
        """
        ...

    def extend(self, id: str, tokens: int) -> None:
        """`tokens` generated tokens, unnamed, are appended to a keyed request."""
        ...

    def num_free(self) -> int:
        """Blocks in the free queue."""
        ...


EngineFactory = Callable[[Any], Any]
"""Makes an engine, empty, of a header's configuration: an `Engine` of a `Header`, an `RtpEngine`
(`hkv.dialects.rtp_llm.engines.engine`) of an `RtpHeader`. It raises `hkv.errors.ConfigError` for one it cannot represent."""


def apply(engine: Engine, operation: Operation) -> Answer:
    """Performs one operation on an engine and returns its answer (None where the operation has none)."""
    match operation:
        case oplog.StepOp():
            return engine.step()
        case oplog.RequestOp():
            return engine.request(operation.id, operation.tokens, operation.extra)
        case oplog.LookupOp():
            return engine.lookup(operation.id)
        case oplog.AllocateOp():
            return engine.allocate(operation)
        case oplog.AdvanceOp():
            return engine.advance(operation.id, operation.tokens)
        case oplog.AppendOp():
            return engine.append(operation.id, operation.tokens)
        case oplog.CommitOp():
            return engine.commit(operation.id, operation.tokens)
        case oplog.FreeOp():
            return engine.free(operation.id)
        case oplog.DropOp():
            return engine.drop(operation.id)
        case oplog.EvictOp():
            return engine.evict(operation.blocks)
        case oplog.CopiesOp():
            return engine.copies()
        case oplog.ResetOp():
            return oplog.Reset(engine.reset())
        case oplog.EventsOp():
            return engine.events()
        case oplog.StateOp():
            return engine.state()


_ANSWERS: dict[type, type | None] = {
    oplog.LookupOp: Hit,
    oplog.AllocateOp: Allocation,
    oplog.CopiesOp: list,
    oplog.ResetOp: oplog.Reset,
    oplog.EventsOp: list,
    oplog.StateOp: CacheState,
}


def attempt(engine: Engine, operation: Operation) -> Answer | Failure:
    """Performs one operation; an error, or an answer of the wrong type, stands as a Failure in the answer's place."""
    try:
        answer = apply(engine, operation)
    except Exception as error:
        return failure_of(error)
    wanted = _ANSWERS.get(type(operation))
    if (answer is not None) if wanted is None else not isinstance(answer, wanted):
        return Failure(f"answered {answer!r}, where {wanted.__name__ if wanted else None} was to come")
    return answer


def failure_of(error: Exception) -> Failure:
    """What stands for the answer of an engine that raised: an error of HKV's in its words, any other with its place."""
    if isinstance(error, HKVError):
        return Failure(str(error), isinstance(error, EngineTimeoutError))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return Failure(f"{type(error).__name__}: {error}{place}")
