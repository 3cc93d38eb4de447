"""The order in which the operations of a log under RTP-LLM's rules may come."""

from __future__ import annotations

import dataclasses
from typing import Any

from hkv.errors import OperationError
from hkv.oracle.rtp_llm import structs


@dataclasses.dataclass
class _Request:
    sequences: int
    running: bool = False


class RtpLifecycle:
    """Follows a log operation by operation and refuses one that cannot follow."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._names: dict[type, set[str]] = {structs.HoldOp: set(), structs.ExportOp: set()}

    def follow(self, operation: structs.RtpOp) -> None:
        """Checks one operation and performs it, as far as its recorded answer tells what became of it.

        Raises:
          OperationError: names the field that does not fit what came before.
        """
        match operation:
            case structs.RequestOp():
                self._arrive(operation)
            case structs.MallocOp():
                request = self._known(operation.id)
                request.running |= operation.want is not None and operation.want.verdict == "granted"
            case structs.AppendOp():
                self._append(self._known(operation.id), operation.tokens)
            case structs.InsertOp():
                self._running(operation.id)
            case structs.ForkOp():
                self._fork(self._running(operation.id), operation)
            case structs.FreeOp():
                self._known(operation.id).running = False
            case structs.DropOp():
                if self._known(operation.id).running:
                    raise OperationError("id", operation.id, "a request without blocks")
                del self._requests[operation.id]
            case structs.PeakOp():
                self._known(operation.id)
            case structs.HoldOp():
                self._index("sequence", operation.sequence, self._running(operation.id))
                self._name(structs.HoldOp, operation.name, operation.want)
            case structs.ExportOp():
                self._name(structs.ExportOp, operation.name, operation.want)
            case structs.ReleaseOp():
                self._end(structs.HoldOp, operation.name)
            case structs.SettleOp():
                self._end(structs.ExportOp, operation.name)

    def _arrive(self, operation: structs.RequestOp) -> None:
        if operation.id in self._requests:
            raise OperationError("id", operation.id, "a name that no request has")
        if not operation.tokens:
            raise OperationError("tokens", operation.tokens, "at least one token")
        if operation.sequences < 1:
            raise OperationError("sequences", operation.sequences, "at least 1")
        self._requests[operation.id] = _Request(operation.sequences)

    def _append(self, request: _Request, tokens: list[list[int]]) -> None:
        if len(tokens) != request.sequences or len({len(more) for more in tokens}) != 1:
            raise OperationError("tokens", tokens, f"equally many for each of {request.sequences} sequences")

    def _fork(self, request: _Request, operation: structs.ForkOp) -> None:
        for source in operation.sources:
            self._index("sources", source, request)
        if operation.sources and operation.want is not None and operation.want.copies is not None:
            request.sequences = len(operation.sources)

    def _known(self, id: str) -> _Request:
        if id not in self._requests:
            raise OperationError("id", id, "a request that arrived and was not dropped")
        return self._requests[id]

    def _running(self, id: str) -> _Request:
        request = self._known(id)
        if not request.running:
            raise OperationError("id", id, "a request with blocks")
        return request

    def _index(self, field: str, sequence: int, request: _Request) -> None:
        if not 0 <= sequence < request.sequences:
            raise OperationError(field, sequence, f"a sequence from 0 to {request.sequences - 1}")

    def _name(self, kind: type, name: str, want: Any) -> None:
        if name in self._names[kind]:
            raise OperationError("name", name, "a name under which nothing is kept")
        if want is not None and want.keys is not None:
            self._names[kind].add(name)

    def _end(self, kind: type, name: str) -> None:
        if name not in self._names[kind]:
            raise OperationError("name", name, "a name under which something is kept")
        self._names[kind].remove(name)
