"""The order in which the operations of a log under RTP-LLM's rules may come."""

from __future__ import annotations

import dataclasses

from hkv.dialects.rtp_llm import log as structs
from hkv.errors import OperationError


@dataclasses.dataclass
class _Request:
    sequences: int
    running: bool = False


class RtpLifecycle:
    """Follows a log operation by operation and refuses one that cannot follow."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._names: dict[type, set[str]] = {structs.HoldOp: set(), structs.ExportOp: set()}

    @property
    def requests(self) -> dict[str, int]:
        """Number of sequences of each request that arrived and was not dropped."""
        return {id: request.sequences for id, request in self._requests.items()}

    def follow(self, operation: structs.RtpOp) -> None:
        """Checks one operation and performs it, but for what its answer decides: `answered` takes note of that.

        Raises:
          OperationError: names the field that does not fit what came before; nothing changed.
        """
        match operation:
            case structs.RequestOp():
                self._arrive(operation)
            case structs.MallocOp():
                self._known(operation.id)
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
                self._unused(structs.HoldOp, operation.name)
            case structs.ExportOp():
                self._unused(structs.ExportOp, operation.name)
            case structs.ReleaseOp():
                self._end(structs.HoldOp, operation.name)
            case structs.SettleOp():
                self._end(structs.ExportOp, operation.name)

    def answered(self, operation: structs.RtpOp, answer: object) -> None:
        """Takes note of a grant, of new sequences and of what is kept under a name."""
        match operation, answer:
            case structs.MallocOp(), structs.Malloc(verdict="granted"):
                self._requests[operation.id].running = True
            case structs.ForkOp(), structs.Fork(copies=list()) if operation.sources:
                self._requests[operation.id].sequences = len(operation.sources)
            case ((structs.HoldOp() | structs.ExportOp()), structs.Selected(keys=list())):
                self._names[type(operation)].add(operation.name)

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

    def _unused(self, kind: type, name: str) -> None:
        if name in self._names[kind]:
            raise OperationError("name", name, "a name under which nothing is kept")

    def _end(self, kind: type, name: str) -> None:
        if name not in self._names[kind]:
            raise OperationError("name", name, "a name under which something is kept")
        self._names[kind].remove(name)
