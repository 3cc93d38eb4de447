"""An engine under vLLM 0.33's rules in a process of its own: `docs/oplog.md`, "The process protocol"."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hkv.contract.dialect import Process
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, CacheEvent, CacheState, Digest, ExtraKeys, Hit, Rows


class ProcessEngine:
    """A process that performs the operations of vLLM's logs.

    Implements `hkv.dialects.vllm.engines.engine.KeyedEngine`.
    """

    def __init__(self, process: Process) -> None:
        self.perform_as, self.exchange, self.close = process.perform_as, process.exchange, process.close
        self.lacks = process.lacks

    def step(self) -> None:
        """A new scheduling step begins."""
        self.perform_as(oplog.StepOp(), None)

    def request(
        self,
        id: str,
        tokens: Sequence[int],
        extra: ExtraKeys | None,
        keys: Sequence[str] | None = None,
        session: str | None = None,
        report: str | None = None,
    ) -> None:
        """A request arrives with this prompt."""
        fields: dict[str, Any] = {"keys": None if keys is None else list(keys), "session": session, "report": report}
        self.perform_as(oplog.RequestOp(id=id, tokens=list(tokens), extra=extra, **fields), None)

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int]) -> None:
        """A request arrives of which only length and prefix keys are known."""
        fields = {"op": "request_keyed", "id": id, "num_tokens": num_tokens, "keys": list(keys)}
        self.exchange(fields, "request_keyed", None)

    def extend(self, id: str, tokens: int) -> None:
        """`tokens` generated tokens are appended to a keyed request."""
        self.exchange({"op": "extend", "id": id, "tokens": tokens}, "extend", None)

    def num_free(self) -> int:
        """Blocks in the free queue."""
        return self.exchange({"op": "num_free"}, "num_free", int)

    def lookup(self, id: str, limit: int | None = None) -> Hit:
        """The longest common cache hit of a waiting request, of at most `limit` tokens."""
        return self.perform_as(oplog.LookupOp(id=id, limit=limit), Hit)

    def connector_lookup(self, id: str, limit: int | None = None) -> oplog.ConnectorHit:
        """The hit of a waiting request whose groups a connector may complete."""
        return self.perform_as(oplog.ConnectorLookupOp(id=id, limit=limit), oplog.ConnectorHit)

    def truncate(self, rows: oplog.Rows, tokens: int) -> oplog.Rows:
        """The rows of a hit up to its first `tokens` tokens."""
        return self.perform_as(oplog.TruncateOp(rows=rows, tokens=tokens), oplog.Truncated).blocks

    def allocate(self, operation: AllocateOp) -> Allocation:
        """A request gets blocks for its next tokens, or is refused."""
        return self.perform_as(operation, Allocation)

    def advance(self, id: str, tokens: int) -> None:
        """`tokens` more tokens are computed."""
        self.perform_as(oplog.AdvanceOp(id=id, tokens=tokens), None)

    def computed(self, id: str, tokens: int) -> None:
        """`tokens` tokens are computed in all."""
        self.perform_as(oplog.ComputedOp(id=id, tokens=tokens), None)

    def append(self, id: str, tokens: Sequence[int], keys: Sequence[str] | None = None) -> None:
        """Generated tokens are appended."""
        given = None if keys is None else list(keys)
        self.perform_as(oplog.AppendOp(id=id, tokens=list(tokens), keys=given), None)

    def commit(self, id: str, tokens: int) -> None:
        """The first `tokens` tokens may be registered in the prefix cache."""
        self.perform_as(oplog.CommitOp(id=id, tokens=tokens), None)

    def free(self, id: str) -> None:
        """The request finished or is preempted."""
        self.perform_as(oplog.FreeOp(id=id), None)

    def retire(self, id: str, tokens: int) -> None:
        """Blocks that no token from `tokens` on reads are given back."""
        self.perform_as(oplog.RetireOp(id=id, tokens=tokens), None)

    def pop(self, id: str) -> None:
        """The request's rows end; their blocks stay referenced."""
        self.perform_as(oplog.PopOp(id=id), None)

    def release(self, blocks: Sequence[int]) -> None:
        """These blocks lose a reference each."""
        self.perform_as(oplog.ReleaseOp(blocks=list(blocks)), None)

    def hold(self, blocks: Sequence[int]) -> None:
        """These blocks gain a reference each."""
        self.perform_as(oplog.HoldOp(blocks=list(blocks)), None)

    def resume(self, operation: oplog.ResumeOp) -> None:
        """A streaming session goes on."""
        self.perform_as(operation, None)

    def zeros(self) -> list[int]:
        """Drains the blocks that are to be zeroed."""
        return self.perform_as(oplog.ZerosOp(), list[int])

    def unwritten(self, id: str, tokens: int) -> None:
        """The request's blocks from `tokens` on are to be zeroed after all."""
        self.perform_as(oplog.UnwrittenOp(id=id, tokens=tokens), None)

    def offloads(self) -> oplog.Offers:
        """Drains the states that a connector is offered."""
        return self.perform_as(oplog.OffloadsOp(), oplog.Offers)

    def finalize(self, id: str, in_flight: int) -> list[oplog.Offer]:
        """The request is about to end: the ends of its prompt inside blocks are offered."""
        return self.perform_as(oplog.FinalizeOp(id=id, in_flight=in_flight), list[oplog.Offer])

    def drop(self, id: str) -> None:
        """A waiting request is forgotten."""
        self.perform_as(oplog.DropOp(id=id), None)

    def evict(self, blocks: Sequence[int]) -> None:
        """Drops the keys of these blocks."""
        self.perform_as(oplog.EvictOp(blocks=list(blocks)), None)

    def copies(self, hold: bool = False) -> list[tuple[int, int]]:
        """Drains pending copies and gives back the references they held, unless these are to stay."""
        return self.perform_as(oplog.CopiesOp(hold=hold), list[tuple[int, int]])

    def reset(self) -> bool:
        """Resets the prefix cache."""
        return self.perform_as(oplog.ResetOp(), oplog.Reset).ok

    def events(self) -> list[CacheEvent]:
        """Drains KV events."""
        return self.perform_as(oplog.EventsOp(), list[CacheEvent])

    def state(self) -> CacheState:
        """State of the cache, as far as engines are compared."""
        return self.perform_as(oplog.StateOp(), CacheState)


# Parts of vLLM 0.33's answers that another engine may lack, and answers without them.

CAPABILITIES: Mapping[str, str] = types.MappingProxyType(
    {
        "events": "KV events",
        "keys": "keys that are vLLM's chained hashes: events and states are compared but for keys",
        "order": "the order in which free blocks are handed out: blocks are counted, not named",
        "references": "reference counts in states",
        "state": "states",
    }
)
"""Capabilities that an engine may lack, with their meanings."""


def without(answer: Any, lacks: frozenset[str]) -> Any:
    """An answer but for what belongs to these capabilities."""
    if isinstance(answer, list) and answer and isinstance(answer[0], CacheEvent):
        return [] if "events" in lacks else [_event(event, lacks) for event in answer]
    if isinstance(answer, list) and answer and "order" in lacks:
        return [(0, 0)] * len(answer)
    if isinstance(answer, dict) and "order" in lacks:
        return {id: [(group, 0, tokens) for group, _, tokens in offers] for id, offers in answer.items()}
    if isinstance(answer, Hit) and "order" in lacks:
        return msgspec.structs.replace(answer, blocks=_counted(answer.blocks))
    if isinstance(answer, Allocation) and answer.blocks is not None and "order" in lacks:
        return Allocation(_counted(answer.blocks))
    if isinstance(answer, CacheState | Digest) and "state" in lacks:
        return None
    if isinstance(answer, Digest) and lacks & {"keys", "order", "references"}:
        return Digest("")
    return _state(answer, lacks) if isinstance(answer, CacheState) else answer


def _event(event: CacheEvent, lacks: frozenset[str]) -> CacheEvent:
    return msgspec.structs.replace(event, keys=None, parent=None) if "keys" in lacks else event


def _state(state: CacheState, lacks: frozenset[str]) -> CacheState:
    free, refs, rows, cached = state.free, state.refs, state.rows, state.cached
    if "references" in lacks:
        refs = {}
    if "keys" in lacks:
        cached = {block: (group, tokens, "") for block, (group, tokens, _) in cached.items()}
    if "order" in lacks:
        free = [0] * len(free)
        refs = {str(index): count for index, count in enumerate(sorted(refs.values()))}
        rows = {id: _counted(row) for id, row in rows.items()}
        cached = {str(index): entry for index, entry in enumerate(sorted(cached.values()))}
    return CacheState(free, refs, rows, cached)


def _counted(rows: Rows) -> Rows:
    """Every block a 1, every column without one still a 0."""
    return [[int(block != 0) for block in row] for row in rows]
