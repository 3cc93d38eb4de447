"""Rules of reuse: a new request takes over the longest prefix that all groups can go on from, exactly its blocks."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.rtp_llm.config import NULL
from hkv.dialects.rtp_llm.invariants.moment import RtpMoment, Slots, rtp_invariant
from hkv.dialects.rtp_llm.log import structs
from hkv.model.group_policy import CpMapping, GroupType


@rtp_invariant("rtp hit", "B-I8", "B-I9", "B-I10", after=(structs.MallocOp,))
def hit(moment: RtpMoment) -> Iterator[str]:
    """A new request takes over the longest prefix that every group can go on from, and a token is left to compute.

    Holds after a first `malloc` that is granted; every length is tried. A full group needs every block, a linear one
    the state at the end, a window with reuse its last block, a window without reuse nothing. The last key never
    counts, though its block be whole. Exception: ranks without a full group count one block of tokens for a key that
    stands for a round of them.
    """
    operation, answer = moment.operation, moment.answer
    assert isinstance(operation, structs.MallocOp)
    assert isinstance(answer, structs.Malloc)
    if not moment.granted or operation.id in moment.before.lists:
        if answer.reused:
            yield f"{answer.reused} tokens are taken over by a request that is no new one, or was refused"
        return
    wanted = longest(moment, operation) * moment.tokens_of_a_key
    if answer.reused != wanted:
        yield f"{answer.reused} tokens are taken over, {wanted} can be"
    if answer.reused >= len(moment.ledger.requests[operation.id].tokens[0]):
        yield f"{answer.reused} tokens are taken over of as many: none is left to compute"


def longest(moment: RtpMoment, operation: structs.MallocOp) -> int:
    """Keys of the longest prefix from which every group can go on, as the cache stood before."""
    if not operation.device_cache or moment.config.prefill_cp_size > 1:
        return 0
    cached = moment.slots(moment.before)
    keys = moment.ledger.keys(operation.id, 0, partial=True)[:-1]
    groups = range(len(moment.config.policies))
    lengths = [n for n in range(1, len(keys) + 1) if all(_resumes(moment, cached, group, keys[:n]) for group in groups)]
    return max(lengths, default=0)


def _resumes(moment: RtpMoment, cached: Slots, group: int, keys: list[int]) -> bool:
    policy = moment.config.policies[group]
    if policy.group_type is GroupType.FULL:
        return all((key, group) in cached for key in keys)
    if policy.group_type is GroupType.SWA and not policy.enable_prefix_reuse:
        return True
    return (keys[-1], group) in cached


@rtp_invariant("rtp adoption", "B-I7", "B-I10", after=(structs.MallocOp,))
def adoption(moment: RtpMoment) -> Iterator[str]:
    """A request takes over the cached blocks, each at its own place; what it computes itself is in other blocks.

    Holds after a first `malloc` that is granted, for every sequence. Exception: windows and states under context
    parallelism, whose places depend on the rank.
    """
    operation, answer, config = moment.operation, moment.answer, moment.config
    assert isinstance(operation, structs.MallocOp)
    assert isinstance(answer, structs.Malloc)
    if not moment.granted or operation.id in moment.before.lists:
        return
    cached, taken = moment.slots(moment.before), answer.reused // moment.tokens_of_a_key
    keys = moment.ledger.keys(operation.id, 0, partial=True)[:taken]
    for sequence, row in enumerate(answer.lists):
        for group, blocks in enumerate(row):
            policy = config.policies[group]
            if policy.group_type is GroupType.FULL:
                wanted = [cached.get((key, group), NULL) for key in keys]
            elif config.cp_size > 1 and policy.cp_mapping is not CpMapping.BLOCK_ROUND_ROBIN:
                continue
            else:
                silent = policy.group_type is GroupType.SWA and not policy.enable_prefix_reuse
                last = NULL if silent else cached.get((keys[-1], group), NULL) if keys else NULL
                wanted = [*[NULL] * (taken - 1), last][:taken]
            begins = blocks[: len(wanted)]
            exact = policy.group_type is GroupType.FULL
            if any(mine != theirs for mine, theirs in zip(begins, wanted, strict=False) if exact or theirs != NULL):
                yield f"group {group} of sequence {sequence} begins with {begins}, cached is {wanted}"
            known = {block for (_, g), block in cached.items() if moment.pool_of(g) == moment.pool_of(group)}
            evicted = {block for (_, g), block in moment.left.items() if moment.pool_of(g) == moment.pool_of(group)}
            fresh = {block for block in blocks if block != NULL} - {block for block in wanted if block != NULL}
            if strange := fresh & (known - evicted):
                yield f"group {group} of sequence {sequence} computes into {sorted(strange)}, which are cached"
