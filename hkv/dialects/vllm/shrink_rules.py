"""Shrinking of logs under vLLM's rules: what is smaller than a configuration or an operation, and what repairs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from hkv.contract.case import Best, Candidates, Case, LifecycleRepair, ShrinkRules
from hkv.dialects.vllm.lifecycle import Lifecycle, RequestState
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Answer, Header, Hit, Operation


class LogRepair(LifecycleRepair):
    """Fits operations to what came before: an allocation is owed the hit of the lookup just made.

    Args:
      header: the log's configuration.
    """

    def __init__(self, header: Header) -> None:
        self._performed: list[Operation] = []
        self._answers: list[Answer] = []
        lifecycle = Lifecycle(header)
        super().__init__(lifecycle, lambda operation: repaired(operation, lifecycle, self._performed, self._answers))

    def answered(self, operation: Operation, answer: Answer) -> None:
        """Takes note of the answer to the operation that was fitted last."""
        super().answered(operation, answer)
        self._performed.append(operation)
        self._answers.append(answer)


_PLAIN: dict[str, Any] = {
    "lookahead": 0,
    "external": 0,
    "delay": False,
    "must_fit": False,
    "reserved": 0,
    "in_flight": 0,
    "shared_prefix": None,
    "encoder": None,
    "extra": None,
}


def _simpler_operations(operation: Operation) -> Iterator[Operation]:
    """A shorter token list, one field at its plainest value, or one number smaller."""
    change = msgspec.structs.replace
    tokens = _tokens(operation)
    least = 1 if isinstance(operation, oplog.RequestOp) else 0
    for length in sorted({least, len(tokens) // 2, len(tokens) - 4, len(tokens) - 1}):
        if least <= length < len(tokens):
            yield change(operation, tokens=tokens[:length])
    if len(set(tokens)) > 1:
        yield change(operation, tokens=[min(tokens)] * len(tokens))
    for name, plain in _PLAIN.items():
        if getattr(operation, name, plain) != plain:
            yield change(operation, **{name: plain})
    for name in ("new", "lookahead", "reserved", "tokens", "encoder"):
        value = getattr(operation, name, None)
        if type(value) is int and value > 0:
            for smaller in sorted({0, value // 2, value - 1}):
                yield change(operation, **{name: smaller})
    if isinstance(operation, oplog.EvictOp):
        for block in operation.blocks:
            yield change(operation, blocks=[other for other in operation.blocks if other != block])


def _smaller_pools(header: Header, operation: Operation) -> Iterator[tuple[Header, Operation]]:
    """Fewer blocks, and an allocation that asks for as many fewer."""
    if not isinstance(operation, oplog.AllocateOp):
        return
    size = max(group["block_size"] for group in header.groups)
    for blocks in (header.num_blocks // 2, 4, 1):
        left, new = header.num_blocks - blocks, operation.new - blocks * size
        if blocks and left >= 2 and new > 0:
            change = msgspec.structs.replace
            yield change(header, num_blocks=left), change(operation, new=new)


def _with_renumbered_tokens(best: Best) -> Candidates:
    """Tokens called 1, 2, 3 and so on."""
    operations = best.case.operations
    known = sorted({token for operation in operations for token in _tokens(operation)})
    names = {token: name for name, token in enumerate(known, 1)}
    yield (
        best.case.header,
        [
            msgspec.structs.replace(operation, tokens=[names[token] for token in _tokens(operation)])
            if _tokens(operation)
            else operation
            for operation in operations
        ],
    )


def _with_longer_prompts(best: Best) -> Candidates:
    """An append less, its tokens part of the prompt."""
    place = 0
    while place < len(best.case.operations):
        operations, append = list(best.case.operations), best.case.operations[place]
        place += 1
        if not isinstance(append, oplog.AppendOp):
            continue
        arrival = _last(operations[: place - 1], oplog.RequestOp, append.id)
        if arrival is not None:
            tokens = [*operations[arrival].tokens, *append.tokens]
            operations[arrival] = msgspec.structs.replace(operations[arrival], tokens=tokens)
            yield best.case.header, operations[: place - 1] + operations[place:]


def _with_longer_steps(best: Best) -> Candidates:
    """An allocation and its advance less, their tokens part of the request's allocation before."""
    place = 0
    while place < len(best.case.operations):
        operations, later = list(best.case.operations), best.case.operations[place]
        place += 1
        if not isinstance(later, oplog.AllocateOp) or later.hit or later.external:
            continue
        before, after = operations[: place - 1], operations[place:]
        earlier, advance = _last(before, oplog.AllocateOp, later.id), _last(before, oplog.AdvanceOp, later.id)
        if earlier is None or advance is None or _last(before[earlier:], oplog.FreeOp, later.id) is not None:
            continue
        more = next((index for index, other in enumerate(after) if isinstance(other, oplog.AdvanceOp)), None)
        if more is not None and after[more].id == later.id:
            computed = before[advance].tokens + after.pop(more).tokens
            before[advance] = msgspec.structs.replace(before[advance], tokens=computed)
        before[earlier] = msgspec.structs.replace(before[earlier], new=before[earlier].new + later.new)
        yield best.case.header, before + after


def _without_holders(best: Best) -> Candidates:
    """A request less, which only keeps blocks from others, and as many blocks less."""
    for id in dict.fromkeys(op.id for op in best.case.operations if isinstance(op, oplog.RequestOp)):
        case = best.case
        held = _held(case, id)
        others = [operation for operation in case.operations if getattr(operation, "id", None) != id]
        for count in range(held, max(0, held - 8), -1):
            if count < case.header.num_blocks - 1:
                yield msgspec.structs.replace(case.header, num_blocks=case.header.num_blocks - count), others


def _with_blocks_set_aside(best: Best) -> Candidates:
    """A request less, which only keeps blocks from others, and as many set aside at the allocation that differs."""
    for id in dict.fromkeys(op.id for op in best.case.operations if isinstance(op, oplog.RequestOp)):
        case, held = best.case, _held(best.case, id)
        others = [operation for operation in case.operations if getattr(operation, "id", None) != id]
        place = next((at for at in reversed(range(len(others))) if isinstance(others[at], oplog.AllocateOp)), None)
        if place is None:
            continue
        for count in range(held, max(-1, held - 8), -1):
            aside = msgspec.structs.replace(others[place], reserved=others[place].reserved + count)
            yield case.header, [*others[:place], aside, *others[place + 1 :]]


def _held(case: Case, id: str) -> int:
    """Number of blocks that a request was ever handed."""
    pairs = zip(case.operations, case.answers, strict=False)
    mine = (answer for operation, answer in pairs if getattr(operation, "id", None) == id)
    rows = (row for answer in mine if isinstance(answer, oplog.Allocation) for row in answer.blocks or ())
    return len({block for row in rows for block in row if block})


def _last(operations: list[Any], kind: type, id: str) -> int | None:
    """Place of the last operation of a kind that names a request."""
    for place in reversed(range(len(operations))):
        if isinstance(operations[place], kind) and operations[place].id == id:
            return place
    return None


def _smaller_headers(header: Header) -> Iterator[Header]:
    """A group or feature less, fewer blocks."""
    for index in range(len(header.groups) if len(header.groups) > 1 else 0):
        groups = header.groups[:index] + header.groups[index + 1 :]
        eagle = [group - (group > index) for group in header.eagle_groups if group != index]
        plain = header.partial_hits and len(groups) > 1
        yield msgspec.structs.replace(header, groups=groups, eagle_groups=eagle, partial_hits=plain)
        yield msgspec.structs.replace(
            header,
            groups=groups,
            eagle_groups=eagle,
            partial_hits=False,
            hash_block_size=groups[0]["block_size"],
            scheduler_block_size=groups[0]["block_size"],
        )
    for size in sorted({2, header.num_blocks // 2, header.num_blocks - 4, header.num_blocks - 1}):
        if 2 <= size < header.num_blocks:
            yield msgspec.structs.replace(header, num_blocks=size)
    plainer = {"watermark": 0.0, "shared_prefix_checkpoint": False, "retention_interval": None, "bugs": []}
    for name, value in {**plainer, "prefill_lookahead": 0, "max_in_flight_tokens": None}.items():
        if getattr(header, name) != value:
            yield msgspec.structs.replace(header, **{name: value})


def _tokens(operation: Operation) -> list[int]:
    tokens = getattr(operation, "tokens", None)
    return tokens if isinstance(tokens, list) else []


def _questions(operation: Operation) -> Iterator[Operation]:
    """The state, before a hit or an allocation that follows from it."""
    if isinstance(operation, oplog.LookupOp | oplog.AllocateOp):
        yield oplog.StateOp()


SHRINK_RULES = ShrinkRules(
    LogRepair,
    headers=_smaller_headers,
    check=to_config,
    operations=_simpler_operations,
    pairs=_smaller_pools,
    rewrites=(
        _without_holders,
        _with_blocks_set_aside,
        _with_longer_prompts,
        _with_longer_steps,
        _with_renumbered_tokens,
    ),
    questions=_questions,
)
"""Rules by which cases under vLLM's rules are made smaller."""


# Fits an operation to what came before it, after something was taken away.


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
    needed = operation.hit + operation.external + operation.new - hit - external
    new = max(0, min(needed if not state.running else operation.new, max(state.tokens - start, operation.new)))
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
