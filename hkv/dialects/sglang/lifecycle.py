"""The order in which the operations of a log under SGLang's rules may come."""

from __future__ import annotations

import dataclasses

from hkv.dialects.sglang import log as structs
from hkv.errors import OperationError


@dataclasses.dataclass
class RunningRequest:
    """A running request.

    Attributes:
      tokens: tokens that it has.
      computed: tokens that have slots.
      protected: slots that are the tree's.
      branch: tokens that full attention alone found for it when it came.
      ran: whether it has computed a token since then.
    """

    tokens: int
    computed: int
    protected: int
    branch: int
    ran: bool = False

    def least(self, bigrams: bool) -> int:
        """Fewest tokens with which it may end: with fewer, what the tree has of it would not be of its key."""
        return self.protected + bigrams


class SGLangLifecycle:
    """Follows a log operation by operation and refuses one that cannot follow.

    Args:
      header: the log's.

    Attributes:
      requests: those that run, by name.
    """

    def __init__(self, header: structs.Header) -> None:
        self.requests: dict[str, RunningRequest] = {}
        config = structs.to_config(header)
        self._pools, self._window, self._eagle = len(header.num_blocks), config.window or 0, config.bigrams

    def follow(self, operation: structs.Operation) -> None:
        """Checks one operation, and ends a request; `answered` takes note of what its answer decides.

        Raises:
          OperationError: names the field that does not fit what came before; nothing changed.
        """
        self.check(operation)
        if isinstance(operation, structs.FinishOp | structs.AbortOp):
            del self.requests[operation.id]

    def check(self, operation: structs.Operation) -> None:
        """Checks one operation, which may be asked about without being performed.

        Raises:
          OperationError: as of `follow`.
        """
        match operation:
            case structs.MatchOp() | structs.StateOp() | structs.EventsOp() | structs.RoomOp():
                return
            case _ if not isinstance(operation, structs.OPERATIONS):
                raise OperationError("op", type(operation).__name__, "an operation on a cache, its requests included")
            case structs.EvictOp():
                if len(operation.tokens) != self._pools:
                    raise OperationError("tokens", operation.tokens, f"tokens for each of {self._pools} pools")
            case structs.AdmitOp():
                if operation.id in self.requests:
                    raise OperationError("id", operation.id, "a name that no running request has")
                if not operation.tokens:
                    raise OperationError("tokens", operation.tokens, "at least 1 token")
            case _:
                self._of_request(operation, operation.id)  # type: ignore[attr-defined]

    def answered(self, operation: structs.Operation, answer: object) -> None:
        """Takes note of slots that were granted, and of those that are the tree's now."""
        match operation, answer:
            case structs.AdmitOp(), structs.Found(hit=hit, full=full):
                self.requests[operation.id] = RunningRequest(len(operation.tokens), hit, hit, full)
            case structs.ExtendOp(), structs.Slots(slots=list()):
                request = self.requests[operation.id]
                request.computed, request.ran = operation.length, True
            case structs.DecodeOp(), structs.Slots(slots=list()):
                request = self.requests[operation.id]
                request.tokens = request.computed = request.tokens + 1
            case structs.CheckpointOp(), structs.Row(protected=protected):
                self.requests[operation.id].protected = protected

    def _of_request(self, operation: structs.Operation, id: str) -> None:
        if id not in self.requests:
            raise OperationError("id", id, "a request that runs")
        request = self.requests[id]
        whole, least = request.computed == request.tokens, request.least(self._eagle)
        match operation:
            case structs.ExtendOp() if not request.computed < operation.length <= request.tokens:
                expected = f"from {request.computed + 1} to {request.tokens} tokens"
                raise OperationError("length", operation.length, expected)
            case structs.ExtendOp(length=length, track=track) if track and not request.computed < track <= length:
                raise OperationError("track", track, f"0, or from {request.computed + 1} to {length} tokens")
            case structs.DecodeOp() | structs.SlideOp() if not whole:
                raise OperationError("id", id, "a request whose tokens all have slots")
            case structs.ReleaseWindowOp() if request.computed - request.protected < self._window:
                raise OperationError("id", id, f"a request {self._window} tokens beyond what the tree has of it")
            case structs.CheckpointOp() | structs.FinishOp() if not request.ran:
                raise OperationError("id", id, "a request that has computed a token since it came")
            case structs.FinishOp(length=length) if length and not least <= length <= request.computed:
                raise OperationError("length", length, f"from {least} to {request.computed} tokens")
            case _:
                pass


class TreeLifecycle:
    """Follows a log of a tree alone: nodes are named before they are locked, and locks are undone once.

    Args:
      header: the log's.
    """

    def __init__(self, header: structs.Header) -> None:
        structs.to_config(header)
        self._nodes, self._locks = set[int](), set[str]()

    def follow(self, operation: structs.Operation) -> None:
        """Checks one operation, and performs it.

        Raises:
          OperationError: names the field that does not fit what came before; nothing changed.
        """
        match operation:
            case structs.MatchOp(node=int() as node) | structs.InsertOp(node=node):
                self._nodes.add(node)
            case structs.LockOp(id=id, node=node):
                if node not in self._nodes:
                    raise OperationError("node", node, "a node that was named")
                if id in self._locks:
                    raise OperationError("id", id, "a name that no lock has")
                self._locks.add(id)
            case structs.UnlockOp(id=id) | structs.ReleaseWindowOp(id=id) | structs.ReleaseStateOp(id=id):
                if id not in self._locks:
                    raise OperationError("id", id, "a lock that is held")
                if isinstance(operation, structs.UnlockOp):
                    self._locks.remove(id)
            case structs.LeaveOp(kind=kind) if kind not in structs.KINDS:
                raise OperationError("kind", kind, f"one of {', '.join(structs.KINDS)}")
            case structs.ResetOp():
                self._nodes, self._locks = set(), set()
            case _ if not isinstance(operation, structs.OF_TREES):
                raise OperationError("op", type(operation).__name__, "an operation on a tree alone")
            case _:
                pass

    def answered(self, operation: structs.Operation, answer: object) -> None:
        """Nothing is decided by an answer."""
