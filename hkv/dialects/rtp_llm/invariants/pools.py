"""Blocks and who holds them: requests, connectors, the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hkv.dialects.rtp_llm.config import NULL
from hkv.dialects.rtp_llm.invariants.moment import RtpMoment, rtp_invariant
from hkv.dialects.rtp_llm.log import structs

ROLES = ("request", "connector", "cache")


@rtp_invariant("rtp conservation", "B-I1", "B-I4")
def conservation(moment: RtpMoment) -> Iterator[str]:
    """Every block but block 0 is either free or held, block 0 is neither, and free ids come in ascending order.

    Holds after every operation, for each pool. No exception.
    """
    for index, pool in enumerate(moment.after.pools):
        held = {int(block) for role in ROLES for block in getattr(pool, role)}
        every = set(range(1, moment.config.num_blocks[index]))
        if sorted(set(pool.free)) != pool.free:
            yield f"pool {index} lists its free blocks as {pool.free}"
        if held | set(pool.free) != every or held & set(pool.free):
            yield f"of pool {index}, {sorted(every - held - set(pool.free))} are nowhere and "
            yield f"{sorted(held & set(pool.free))} both free and held"


@rtp_invariant("rtp references", "B-I2", "B-I32", "B-I38")
def references(moment: RtpMoment) -> Iterator[str]:
    """Every reference is somebody's: a list's, a connector's, the cache's; and the other way round.

    Holds after every operation, role by role. A request that was freed, dropped or refused has none. Blocks that were
    exported keep the cache's references until they are settled. No exception.
    """
    wanted: dict[str, Counter[tuple[int, int]]] = {role: Counter() for role in ROLES}
    for rows in moment.after.lists.values():
        for row in rows:
            for group, blocks in enumerate(row):
                wanted["request"].update((moment.pool_of(group), block) for block in blocks if block != NULL)
    for role, blocks in moment.ledger.held.values():
        wanted[role].update(blocks)
    for (_, group), block in moment.slots(moment.after).items():
        wanted["cache"][moment.pool_of(group), block] += 1
    for blocks in moment.ledger.exported.values():
        wanted["cache"].update(dict.fromkeys(blocks, 1))
    for role in ROLES:
        pools = enumerate(moment.after.pools)
        found = {(index, int(block)): count for index, pool in pools for block, count in getattr(pool, role).items()}
        if found != dict(wanted[role]):
            yield f"{role} references are {found}, not {dict(wanted[role])}"


@rtp_invariant("rtp order of blocks", "B-I33", after=(structs.MallocOp,))
def smallest_first(moment: RtpMoment) -> Iterator[str]:
    """Fresh blocks are the smallest free ids.

    Holds after a granted `malloc`. Exception: one for which something had to be evicted.
    """
    if not moment.granted or moment.left:
        return
    for index, (before, after) in enumerate(zip(moment.before.pools, moment.after.pools, strict=True)):
        kept = set(after.free)
        taken = [block for block in before.free if block not in kept]
        if taken != before.free[: len(taken)]:
            yield f"pool {index} handed out {taken} of {before.free}"


@rtp_invariant("rtp holding", "B-I28", after=(structs.HoldOp,))
def holding(moment: RtpMoment) -> Iterator[str]:
    """The blocks held of a sequence are its own, each under its own key.

    Holds after `hold`. Exception: under context parallelism keys and blocks do not stand side by side.
    """
    operation, answer = moment.operation, moment.answer
    assert isinstance(operation, structs.HoldOp)
    assert isinstance(answer, structs.Selected)
    if answer.keys is None or answer.blocks is None or moment.config.cp_size > 1:
        return
    keys = moment.ledger.keys(operation.id, operation.sequence, partial=True)
    row = moment.before.lists[operation.id][operation.sequence]
    for place, key in enumerate(answer.keys):
        position = keys.index(key) if key in keys else len(keys)
        own = [blocks[position] if position < len(blocks) else NULL for blocks in row]
        held = [blocks[place] for blocks in answer.blocks]
        if held != own:
            yield f"under key {key} are held {held}, where the sequence has {own}"
