"""Fits an operation to what came before it, after something was taken away."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hkv.dialects.vllm.lifecycle import Lifecycle, RequestState
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Answer, Hit, Operation


def repaired(
    operation: Operation, lifecycle: Lifecycle, performed: Sequence[Operation], answers: Sequence[Answer]
) -> Operation | None:
    """The operation with its numbers cut to what is legal now, or None when it cannot follow at all.

    Args:
      operation: the operation that was to come next.
      lifecycle: state of the requests.
      performed: the operations before it.
      answers: the answers to them.
    """
    match operation:
        case oplog.AllocateOp():
            state = lifecycle.requests.get(operation.id)
            return (
                None if state is None else _allocate(operation, state, _found_before(operation.id, performed, answers))
            )
        case oplog.AdvanceOp():
            state = lifecycle.requests.get(operation.id)
            if state is None or not state.running:
                return None
            tokens = min(operation.tokens, state.granted - state.computed)
            return msgspec.structs.replace(operation, tokens=tokens) if tokens else None
        case oplog.CommitOp():
            state = lifecycle.requests.get(operation.id)
            if state is None or not state.running:
                return None
            return msgspec.structs.replace(operation, tokens=min(operation.tokens, state.computed, state.tokens))
        case oplog.AppendOp():
            return operation if operation.tokens else None
        case oplog.EvictOp():
            blocks = [block for block in operation.blocks if block < lifecycle.num_blocks]
            return msgspec.structs.replace(operation, blocks=blocks) if blocks else None
        case _:
            return operation


def _allocate(operation: oplog.AllocateOp, state: RequestState, found: Hit | None) -> oplog.AllocateOp | None:
    hit, rows = (0, None) if state.running or found is None or not operation.hit else _adopted(operation, found)
    external = 0 if state.running else min(operation.external, max(0, state.tokens - hit))
    start = state.computed + hit + external
    if start > state.tokens and not state.running:
        return None
    # Tokens that a hit no longer brings are computed, so that the request gets as far as it did.
    reach = operation.hit + operation.external + operation.new - hit - external
    new = max(0, min(reach if not state.running else operation.new, max(state.tokens - start, operation.new)))
    if not hit + external + new:
        return None
    in_flight = min(operation.in_flight, state.computed)
    return msgspec.structs.replace(operation, hit=hit, rows=rows, external=external, new=new, in_flight=in_flight)


def _adopted(operation: oplog.AllocateOp, found: Hit) -> tuple[int, oplog.Rows | None]:
    """Tokens of a hit that is adopted, and its rows if they are written out: what was found now, cut as it was before.

    Rows as they were written may name blocks that hold nothing any more.
    """
    if operation.rows is None:
        return found.hit, None
    if operation.hit >= found.hit:
        return found.hit, found.blocks if found.hit else None
    return operation.hit, [row[: len(old)] for row, old in zip(found.blocks, operation.rows, strict=False)]


def _found_before(id: str, performed: Sequence[Operation], answers: Sequence[Answer]) -> Hit | None:
    """Answer to a lookup of this request, or a connector's, right before, whatever was cut of it in between."""
    for operation, answer in zip(reversed(performed), reversed(answers), strict=False):
        if isinstance(operation, oplog.LookupOp | oplog.ConnectorLookupOp) and operation.id == id:
            return answer if isinstance(answer, Hit) else None
        if not isinstance(operation, oplog.TruncateOp | oplog.ComputedOp):
            return None
    return None
