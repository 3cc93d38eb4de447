"""Live second tiers under observation: every `CPUOffloadingManager` of vLLM 0.33 that a process makes.

A pool of chunks by itself is what logs of `vllm-0.33/chunks` tell: what requests offer and read, which chunks that
takes, what leaves for them, and which transfers are done. Hooks are set on the manager, nothing in vLLM is edited. A
key is named by the first 8 bytes of its prefix's hash, as in logs of a scheduler.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from hkv.contract import registry
from hkv.contract.attach import Session, Sink, observe_share
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.installed import hash_name_of, pool_event, pool_state
from hkv.errors import ConfigError

POLICIES = {"LRUCachePolicy": "lru", "ARCCachePolicy": "arc"}
"""Names of policies by vLLM's classes."""


def attach_all(session: Session) -> Callable[[], None]:
    """Observes every `CPUOffloadingManager` that this process makes, until the function is called that it returns."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    made = CPUOffloadingManager.__init__

    @functools.wraps(made)
    def observed(manager: Any, *arguments: Any, **named: Any) -> None:
        made(manager, *arguments, **named)
        if type(manager) is not CPUOffloadingManager:
            session.refuse(type(manager).__name__, "a subclass of CPUOffloadingManager")
        else:
            observe_share(session, type(manager).__name__, lambda: attach(manager, session))

    CPUOffloadingManager.__init__ = observed  # type: ignore[method-assign]
    return functools.partial(setattr, CPUOffloadingManager, "__init__", made)


def attach(manager: Any, session: Session) -> ObservedPool:
    """Observes one `CPUOffloadingManager`, which has done nothing yet, from now on.

    Raises:
      HKVError: a log has no words for its policy, or for what it has done already.
    """
    policy = POLICIES.get(type(manager._policy).__name__)
    if policy is None:
        raise ConfigError("eviction_policy", type(manager._policy).__name__, f"one of {', '.join(POLICIES)}")
    if manager._num_allocated_chunks or manager.counts:
        raise ConfigError("manager", "a manager in use", "one that has stored nothing yet")
    header = structs.Header(
        dialect=structs.CHUNKS,
        feature="live",
        num_blocks=[manager._num_chunks],
        groups=[{"kind": "full_attention", "block_size": 1}],
        policy=policy,
        threshold=manager.store_threshold,
        tracked=manager.max_tracker_size,
    )
    dialect = registry.dialect_of(structs.CHUNKS)
    dialect.log.check(header)
    observed = ObservedPool(manager, header, session.sink(dialect), session)
    session.observe(observed)
    return observed


class ObservedPool:
    """Notes what a manager is asked and answers, as operations, in its own thread; the sink takes them to the log.

    Attributes:
      stopped: reason why the log ended before the manager did; "" while it has not.
    """

    def __init__(self, manager: Any, header: structs.Header, sink: Sink, session: Session) -> None:
        self._manager, self._sink, self._session = manager, sink, session
        self.stopped, self._closed, self._begun = "", False, False
        self._header = header
        self._names: dict[str, str] = {}
        self._requests = self._jobs = 0
        # Jobs that go on, by what they do and their keys: vLLM keeps these in a set, which has an order of its own.
        self._open: dict[tuple[bool, frozenset[bytes]], list[int]] = {}
        self._capture = sink.calls_to(self._perform)
        self._hooked = {
            "on_new_request": self._begins,
            "prepare_store": self._offers,
            "prepare_load": self._loads,
            "complete_store": functools.partial(self._done, True),
            "complete_load": functools.partial(self._done, False),
            "on_request_finished": self._ends,
            "reset_cache": self._clears,
            "take_events": self._drains,
            "touch": self._touches,
        }
        for name, look in self._hooked.items():
            setattr(manager, name, self._hook(name, getattr(manager, name), look))

    def close(self) -> None:
        """Says the last state and ends the observation; the manager goes on."""
        if not self._closed:
            if self._session.states != "none":
                self._tell(structs.StateOp(), self._state())
            self._leave()

    def _leave(self) -> None:
        self._closed = True
        for name in self._hooked:
            delattr(self._manager, name)
        self._sink.close()

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        self._session.refuse(type(self._manager).__name__, f"its log ends early: {reason}")
        self._leave()

    def _hook(self, name: str, method: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(method)
        def hooked(*arguments: Any, **named: Any) -> Any:
            if arguments and name != "on_new_request" and isinstance(arguments[0], Collection):
                arguments = (list(arguments[0]), *arguments[1:])  # it may be a view of what the call changes
            try:
                answer = method(*arguments, **named)
            except Exception as error:
                self._stop(f"{name} raised {type(error).__name__}")
                raise
            answer = list(answer) if name == "take_events" else answer
            if not self._closed:
                look(answer, *arguments, **named)
                self._sink.step_ends()
            return answer

        return hooked

    # Operations of calls.

    def _begins(self, _: Any, req_context: Any) -> None:
        self._requests += 1
        id = req_context.req_id
        # An id may come again before its first request has ended.
        name = self._names[id] = id if id not in self._names else f"{id}#{self._requests}"
        self._tell(structs.BeginOp(id=name))

    def _offers(self, answer: Any, keys: list[bytes], req_context: Any) -> None:
        if not keys or self._without_ends(keys, req_context):
            return
        job = self._job()
        operation = structs.StoreOp(id=self._name(req_context), job=job, keys=self._named(keys, req_context))
        stored = structs.Stored(None, [], [])
        if answer is not None:
            written = tuple(answer.keys_to_store)
            if written:
                self._open.setdefault((True, frozenset(written)), []).append(job)
            gone = [hash_name_of(key) for key in answer.evicted_keys]
            stored = structs.Stored([hash_name_of(key) for key in written], answer.store_spec.chunk_ids.tolist(), gone)
        self._tell(operation, stored)

    def _loads(self, answer: Any, keys: list[bytes], req_context: Any) -> None:
        if self._without_ends(keys, req_context):
            return
        job = self._job()
        self._open.setdefault((False, frozenset(keys)), []).append(job)
        operation = structs.LoadOp(id=self._name(req_context), job=job, keys=self._named(keys, req_context))
        self._tell(operation, structs.Loaded(answer.chunk_ids.tolist()))

    def _done(self, writes: bool, _: Any, keys: list[bytes], req_context: Any, success: bool = True) -> None:
        jobs = self._open.get((writes, frozenset(keys)))
        if not jobs:
            self._stop(f"a transfer of {len(keys)} chunks is done that none began")
            return
        self._tell(structs.DoneOp(job=jobs.pop(0), failed=not success))
        if not jobs:
            del self._open[writes, frozenset(keys)]

    def _ends(self, _: Any, req_context: Any) -> None:
        if req_context.req_id in self._names:
            self._tell(structs.EndOp(id=self._names.pop(req_context.req_id)))

    def _clears(self, _: Any) -> None:
        self._open.clear()
        self._tell(structs.ClearOp())

    def _drains(self, answer: list[Any]) -> None:
        if self._manager.events is not None:
            self._tell(structs.EventsOp(), [pool_event(event, hash_name_of) for event in answer])

    def _touches(self, _: Any, keys: list[bytes], req_context: Any) -> None:
        self._stop("touch, which vLLM's connector does not call")

    # What they are made of.

    def _job(self) -> int:
        self._jobs += 1
        return self._jobs

    def _name(self, context: Any) -> str:
        return self._names[context.req_id]

    def _named(self, keys: list[bytes], context: Any) -> list[structs.Named]:
        return [(*hash_name_of(key), context.get_offload_key_position(key)) for key in keys]

    def _without_ends(self, keys: list[bytes], context: Any) -> bool:
        """True if the log ends here: it tells of each key at which token it ends, and vLLM has not said so of all."""
        told = all(context.get_offload_key_position(key) for key in keys)
        if not told:
            self._stop("keys of which nobody said at which token they end")
        return not told

    def _state(self) -> structs.State:
        return structs.State(pool_state(self._manager, hash_name_of))

    def _tell(self, operation: structs.Operation, answer: Any = None) -> None:
        self._capture((operation, answer))
        if self._session.states == "all" and not isinstance(operation, structs.StateOp):
            self._capture((structs.StateOp(), self._state()))

    # In the sink's thread.

    def _perform(self, call: tuple[structs.Operation, Any]) -> None:
        if not self._begun:
            self._begun = True
            self._sink.begin(self._header)
        self._sink.operation(*call)
