"""States that a connector is offered are there."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm.invariants.moment import Moment, invariant
from hkv.dialects.vllm.log import structs as oplog


@invariant("offers", "B-I15", "B-I17", after=(oplog.OffloadsOp, oplog.FinalizeOp))
def offers(moment: Moment) -> Iterator[str]:
    """A state that is offered lies in a block that is in use, under the key of exactly the tokens that are said.

    Holds after `offloads` and `finalize`. Exceptions: none, but for what `offer-outlives-state` is named for.
    """
    for id, group, block, tokens in _offered(moment):
        if moment.config.offers(group):
            yield from _judged(moment, id, group, block, tokens)
        else:
            yield f"{id} is offered block {block} of group {group}, which has no states"


def _offered(moment: Moment) -> list[tuple[str, int, int, int]]:
    operation, answer = moment.operation, moment.answer
    if isinstance(operation, oplog.FinalizeOp):
        assert isinstance(answer, list)
        return [(operation.id, *offer) for offer in answer]  # type: ignore[misc]
    assert isinstance(answer, dict)
    return [(id, *offer) for id, offers in answer.items() for offer in offers]


def _judged(moment: Moment, id: str, group: int, block: int, tokens: int) -> Iterator[str]:
    stale, state = "offer-outlives-state" in moment.config.bugs, moment.after
    record = moment.ledger.requests.get(id)
    if record is None or not record.running:
        yield f"{id} is offered block {block}, and has ended"
        return
    if stale:
        return
    known = state.cached.get(block)
    if block not in state.refs:
        yield f"{id} is offered block {block} of group {group}, which is free"
    elif known is None or known[:2] != (group, tokens):
        yield f"{id} is offered block {block} as the state of {tokens} tokens, and it is cached as {known}"
    else:
        prefix = moment.ledger.prefix(id, tokens)
        if prefix is None or known[2] not in moment.book.keys.get(prefix, ()):
            yield f"{id} is offered block {block} of group {group}, which others' {tokens} tokens are cached as"
