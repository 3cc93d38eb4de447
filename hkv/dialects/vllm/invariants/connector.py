"""Hits that a connector is told: no group's is over-reported, and a cut one keeps its beginning."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm.invariants.moment import Moment, invariant
from hkv.dialects.vllm.log.structs import ConnectorHit, ConnectorLookupOp, Truncated, TruncateOp


@invariant("connector hits", "B-I8", after=(ConnectorLookupOp,))
def connector_hits(moment: Moment) -> Iterator[str]:
    """Of a hit that a connector is told, every block holds the request's own prefix up to its column, in its group.

    Holds after `connector_lookup`. Rows reach no further than the hit or the group's own, and the hit is `diverged`
    only where some group's own is shorter. Exception: with hits inside blocks, keys besides a block's primary one are
    not seen, so that a block may be cached as another part of itself; its group still has to be the one.
    """
    config, answer, operation = moment.config, moment.answer, moment.operation
    assert isinstance(answer, ConnectorHit)
    assert isinstance(operation, ConnectorLookupOp)
    if answer.diverged and min(answer.hits) >= answer.hit:
        yield f"a hit of {answer.hit} tokens, which groups find by themselves, too, is said to diverge: {answer.hits}"
    for group, row in enumerate(answer.blocks):
        size = config.block_size(group)
        if len(row) > -(-max(answer.hits[group], answer.hit) // size):
            yield f"group {group} is told {len(row)} blocks, and finds {answer.hits[group]} tokens by itself"
        for column, block in enumerate(row):
            if block and (problem := _wrong(moment, operation.id, group, block, (column + 1) * size)):
                yield f"block {block} is told as column {column} of group {group}, and {problem}"


def _wrong(moment: Moment, id: str, group: int, block: int, end: int) -> str:
    entry = moment.after.cached.get(block)
    if entry is None:
        return "is not cached"
    holder, tokens, key = entry
    if holder != group:
        return f"is cached as {tokens} tokens of group {holder}"
    if moment.config.partial_hits:
        return ""
    if tokens != end:
        return f"is cached as {tokens} tokens"
    prefix = moment.ledger.prefix(id, end)
    return "" if prefix is not None and key in moment.book.keys.get(prefix, ()) else "holds another prefix"


@invariant("truncation", "B-I10", after=(TruncateOp,))
def truncation(moment: Moment) -> Iterator[str]:
    """A hit that is cut keeps the first blocks of each group, as many as cover its tokens, or all of a shorter row.

    Holds after `truncate`. Exceptions: none.
    """
    operation, answer = moment.operation, moment.answer
    assert isinstance(operation, TruncateOp)
    assert isinstance(answer, Truncated)
    for group, row in enumerate(operation.rows):
        left = row[: operation.tokens // moment.config.block_size(group)]
        if answer.blocks[group] != left:
            yield f"group {group} keeps {answer.blocks[group]}, not {left}, of {operation.tokens} tokens"
