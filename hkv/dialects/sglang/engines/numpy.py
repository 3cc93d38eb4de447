"""The text as an engine: `reference.dialects.sglang`, run as it stands, behind the operations of SGLang's logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import WINDOW_UNTOLD
from hkv.dialects.sglang.engines import of_components
from hkv.dialects.sglang.engines.keyed import Keyed
from hkv.dialects.sglang.engines.pages import HostRequest
from hkv.dialects.sglang.plain import LAYOUT, pools_of
from hkv.errors import OperationError
from reference.dialects.sglang import operations
from reference.dialects.sglang.pools import available
from reference.dialects.sglang.records import Code, Operation, Request, Result, Status

ARGUMENTS = ("tokens", "priority", "length", "track", "every", "full", "window", "states")
"""Fields of an operation that its caller names."""


class SGLangNumpyEngine(Keyed):
    """The text under SGLang's rules.

    Args:
      header: the configuration, as a log's first line.

    Attributes:
      requests: those that run, by name.

    Raises:
      ConfigError: a cache that SGLang does not have.
    """

    def __init__(self, header: structs.Header) -> None:
        super().__init__(header)
        self.requests: dict[str, HostRequest] = {}
        self._free = list(range(self.cache.slots))

    @property
    def evictions(self) -> int:
        """Times that a node left, or lost what a component had of it, to make room."""
        return self.cache.evictions

    def request(self, id: str) -> Request:
        """A request that runs."""
        return self.cache.requests[self._host(id).slot + 2]

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it cannot come now; nothing changed.
        """
        match operation:
            case structs.MatchOp():
                keys = self.keys(operation.tokens, operation.namespace)
                result = self._do(Code.MATCH, None, keys, tokens=len(operation.tokens))
                return self._found(result, [self.cache.keys[key].page for key in keys[: result.hit]])
            case structs.AdmitOp():
                return self._admit(operation)
            case structs.ExtendOp() | structs.DecodeOp():
                return self._grow(operation)
            case structs.SlideOp():
                self._do(Code.SLIDE, operation.id, every=operation.every)
            case structs.CheckpointOp():
                self._do(Code.CHECKPOINT, operation.id)
                request = self.request(operation.id)
                return structs.Row(self.reader.row(request), request.protected * self.config.page_size)
            case structs.ReleaseWindowOp():
                self._do(Code.RELEASE_WINDOW, operation.id)
            case structs.FinishOp():
                self._end(Code.FINISH, operation.id, operation.length)
            case structs.AbortOp():
                self._end(Code.ABORT, operation.id)
            case structs.EvictOp():
                names = of_components(self.config, "full", "window", "states")
                wanted: dict[str, Any] = dict(zip(names, operation.tokens, strict=True))
                self._do(Code.EVICT, None, **wanted)
                return structs.Freed([pool.freed * size for pool, size in pools_of(self.config, self.cache)])
            case structs.RoomOp():
                self._do(Code.ROOM, None, full=operation.tokens)
                pools = pools_of(self.config, self.cache)
                free = [available(pool) * size for pool, size in pools]
                return structs.Room(free, [pool.idle * size for pool, size in pools])
            case structs.EventsOp():
                return self._events()
            case _:
                return self.reader.state(self.cache, {id: self.request(id) for id in self.requests})
        return None

    def num_available(self) -> int:
        """Pages of all pools, and states, that are free or that nobody holds."""
        return sum(available(pool) + pool.idle for pool, _ in pools_of(self.config, self.cache))

    def _admit(self, operation: structs.AdmitOp) -> structs.Found:
        if operation.id in self.requests:
            raise OperationError("id", operation.id, "a name that no running request has")
        if not operation.tokens:
            raise OperationError("tokens", [], "at least 1 token")
        if not self._free:
            LAYOUT.grow(self.cache, "requests", self.cache.slots)
            self._free += range(self.cache.slots, 2 * self.cache.slots)
            self.cache.slots *= 2
        request = HostRequest(self._free[0], list(operation.tokens), operation.namespace)
        keys = self.keys(operation.tokens, operation.namespace)
        self.requests[operation.id] = request
        given: dict[str, Any] = {"tokens": len(request.tokens), "priority": operation.priority}
        try:
            result = self._do(Code.ADMIT, operation.id, keys, **given)
        except OperationError:
            del self.requests[operation.id]
            raise
        self._free.pop(0)
        return self._found(result, self.request(operation.id).row[: result.hit])

    def _grow(self, operation: structs.ExtendOp | structs.DecodeOp) -> structs.Slots:
        host, request = self._host(operation.id), self.request(operation.id)
        before, keys, given = request.length, list[int](), dict[str, Any]()
        if isinstance(operation, structs.ExtendOp):
            given = {"length": operation.length, "track": operation.track}
            self._check_length(request, operation)
        else:
            given = {"track": int(operation.track)}
            if before != len(host.tokens):
                raise OperationError("id", operation.id, "a request whose tokens all have slots")
            known = max(0, len(host.tokens) - self.config.bigrams) // self.config.page_size
            keys = self.keys([*host.tokens, operation.token], host.namespace)[known:]
        code = Code.EXTEND if isinstance(operation, structs.ExtendOp) else Code.DECODE
        if self._do(code, operation.id, keys, refused=Status.NO_ROOM, **given).status != Status.OK:
            return structs.Slots(None)
        if isinstance(operation, structs.DecodeOp):
            host.tokens.append(operation.token)
        return structs.Slots(self.reader.row(request)[before:])

    def _check_length(self, request: Request, operation: structs.ExtendOp) -> None:
        if not request.length < operation.length <= request.tokens:
            raise OperationError("length", operation.length, f"from {request.length + 1} to {request.tokens} tokens")
        if operation.track and not request.length < operation.track <= operation.length:
            expected = f"0, or from {request.length + 1} to {operation.length} tokens"
            raise OperationError("track", operation.track, expected)

    def _end(self, code: Code, id: str, length: int = 0) -> None:
        request = self.request(id)
        least = request.protected * self.config.page_size + self.config.bigrams
        if length and not least <= length <= request.length:
            raise OperationError("length", length, f"from {least} to {request.length} tokens")
        self._do(code, id, length=length)
        self._free.insert(0, self.requests.pop(id).slot)

    def _events(self) -> structs.Told:
        pools = [pool for pool, _ in pools_of(self.config, self.cache)]
        # SGLang's events tell of full attention alone.
        tells = [pool is self.cache.full or WINDOW_UNTOLD not in self.config.bugs for pool in pools]
        told = structs.Told(
            [pool.came * told for pool, told in zip(pools, tells, strict=True)],
            [pool.left * told for pool, told in zip(pools, tells, strict=True)],
        )
        for pool in pools:
            pool.came = pool.left = 0
        return told

    def _do(
        self, code: Code, id: str | None, keys: Sequence[int] = (), refused: Status = Status.OK, **given: int
    ) -> Result:
        """Performs one operation; raises what refuses it, but for one reason that is an answer."""
        op: Operation = self.cache.operations[1]
        op.code, op.slot, op.count, op.start = code, 0 if id is None else self._host(id).slot, len(keys), 0
        for name in ARGUMENTS:
            setattr(op, name, given.get(name, 0))
        self.cache.payload[: len(keys)] = [self.cache.keys[key] for key in keys]
        self._perform(code)
        result: Result = self.cache.results[1]
        if result.status not in (Status.OK, refused):
            status = Status(result.status).name
            raise OperationError(code.name.lower(), status, "one that applies to the request's state")
        return result

    def _perform(self, code: Code) -> None:
        operations.perform_at(self.cache, 1, code)

    def _host(self, id: str) -> HostRequest:
        try:
            return self.requests[id]
        except KeyError:
            raise OperationError("id", id, "a request that runs") from None

    def _found(self, result: Result, pages: Sequence[int]) -> structs.Found:
        size = self.config.page_size
        return structs.Found(result.hit * size, result.full_hit * size, self.reader.slots(pages))


def engine(header: structs.Header) -> Any:
    """The text under a header: the whole cache, or its tree alone."""
    from hkv.dialects.sglang.engines.tree import SGLangNumpyTree

    return SGLangNumpyTree(header) if header.tree else SGLangNumpyEngine(header)
