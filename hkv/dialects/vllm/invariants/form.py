"""A state says something: what it names exists, and rows are those of requests that run."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm.invariants.moment import Moment, invariant


@invariant("form", "B-I16", "B-I32")
def form(moment: Moment) -> Iterator[str]:
    """Blocks, groups and requests that a state names exist; who runs has a row in every group, and nobody else has any.

    Holds after every operation. No exception; a row may be empty in some group, `opaque` or not, but not in all. The
    null block has no key.
    """
    after, config = moment.after, moment.config
    groups = len(config.topology.groups)
    named = {*after.free, *after.refs, *after.cached, *after.owners}
    if strange := sorted(block for block in named if not 0 <= block < config.num_blocks):
        yield f"there are no blocks {strange}"
    for block, (group, tokens, _) in after.cached.items():
        if not block:
            yield f"the null block is cached as {tokens} tokens of group {group}, though it holds none"
        if not 0 <= group < groups or tokens < 1:
            yield f"block {block} is cached as {tokens} tokens of group {group}, of {groups} groups"
    running = {id for id, record in moment.ledger.requests.items() if record.running}
    for id in sorted(running ^ after.rows.keys()):
        yield (
            f"{id} was granted blocks, and holds none"
            if id in running
            else f"{id} does not run, and holds {after.rows[id]}"
        )
    for id, rows in after.rows.items():
        if len(rows) != groups:
            yield f"{id} has {len(rows)} rows in {groups} groups"
