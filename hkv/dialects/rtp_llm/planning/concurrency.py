"""Requests that fit into a plan's pools at once, and the row of the plan in a capacity table. Host-only."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from hkv.contract.options import option
from hkv.contract.plan_command import Capacity
from hkv.dialects.rtp_llm.config import RESERVE_RATIO, reserve_for_ratio
from hkv.dialects.rtp_llm.planning.options import RtpOptions
from hkv.dialects.rtp_llm.planning.pools import PoolGroup, PoolPlan
from hkv.model.group_policy import GroupType

DECODED = 2
"""Blocks behind the prompt, and as many more as tokens are held ahead, that a request has decoded here: it then has all
the states that it ever holds."""


class _Held(NamedTuple):
    """Blocks of one group that one request holds: with its prompt alone, at most while it grows, and in the end."""

    first: int
    most: int
    last: int


class _Pool(NamedTuple):
    """Blocks of a pool beside block 0, whether their number was chosen, and what one request holds of them."""

    usable: int
    fixed: bool
    held: _Held


def reserve_option(name: str = "") -> Any:
    """A field for `--reserve-ratio`, with the dialect's name before its help where a command has several."""
    said = f"{name}Percent of the blocks that a first allocation leaves free.  [default: {RESERVE_RATIO}]"
    return option(type=click.IntRange(0, 100), help=said)


def reserve_ratio(options: dict[str, Any]) -> int:
    """Value of `--reserve-ratio`."""
    return RESERVE_RATIO if options["reserve_ratio"] is None else options["reserve_ratio"]


def capacity_of(plan: PoolPlan, options: RtpOptions, tokens: int, ratio: int) -> Capacity:
    """Requests of one length that fit into the pools at once, without reuse of prefixes.

    Each comes alone, with all but its last blocks (`DECODED`) as its prompt, finds its blocks beside the reserve, and
    decodes to its end; windows and states are pruned as it does (RTP-LLM `removeSkippedBlocks`).
    """
    held = [_held(plan, group, tokens, options.drafts + 1 if options.drafts else 0) for group in plan.groups]
    every = range(len(plan.groups))
    members = [list(every)] if plan.shared else [[group] for group in every]
    pools = [_pool(plan, [(plan.groups[group], held[group]) for group in pool]) for pool in members]
    # Who comes later finds less: the first count that does not fit, found by halving.
    most = max(pool.usable for pool in pools) + 1
    requests = bisect.bisect_left(range(1, most + 1), True, key=lambda count: not _fits(pools, count, ratio))
    tightest = min(range(len(pools)), key=lambda pool: pools[pool].usable / pools[pool].held.last)
    pool, widest = pools[tightest], max(members[tightest], key=lambda group: held[group].last)
    return Capacity(
        max_model_len=tokens,
        token_bytes=float(plan.token_bytes),
        sequence_bytes=plan.sequence_bytes,
        num_blocks=plan.num_blocks,
        tokens=plan.token_capacity,
        concurrency=pool.usable / pool.held.last,
        requests=requests,
        limiting=plan.groups[widest].tag,
        limiting_share=held[widest].last / pool.held.last,
        limited_by="the blocks of the pool" if plan.shared else f"the blocks of group {plan.groups[widest].tag}",
        waste=_waste(plan, held),
    )


def _held(plan: PoolPlan, group: PoolGroup, tokens: int, ahead: int) -> _Held:
    """Blocks of a group that a request of so many tokens holds, `ahead` tokens to come beside them."""
    size, block = plan.tokens_per_slot(group), max(plan.tokens_per_slot(each) for each in plan.groups)
    prompt = max(1, tokens - (DECODED + ahead) * block)
    linear = group.policy.group_type is GroupType.LINEAR

    def slots(count: int) -> int:
        """Entries of the request's list; tokens to come are slots in linear groups, but for one."""
        return -(-count // size) + max(ahead - 1, 0) if linear else -(-(count + ahead) // size)

    if group.policy.group_type is GroupType.FULL:
        return _Held(slots(prompt), slots(tokens), slots(tokens))
    # A first allocation leaves holes before its tail; from then on so many entries are kept at the list's end.
    whole = -(-prompt // size)
    holes, kept = max(0, whole - max(1, group.policy.active_tail_blocks)), group.kept_blocks + ahead
    first = slots(prompt) - holes
    # An entry is taken before the one that is not kept any more is given back.
    most = slots(tokens) - max(holes, slots(tokens) - 1 - kept)
    return _Held(
        first,
        max(first, most) if slots(tokens) > slots(prompt) else first,
        slots(tokens) - max(holes, slots(tokens) - kept),
    )


def _pool(plan: PoolPlan, groups: Sequence[tuple[PoolGroup, _Held]]) -> _Pool:
    """A pool of some groups: what one request holds of it, all of them together."""
    first, most, last = (sum(numbers) for numbers in zip(*(held for _, held in groups), strict=True))
    fixed = not plan.shared and groups[0][0].policy.explicit_block_num > 0
    return _Pool(groups[0][0].num_blocks - 1, fixed, _Held(first, most, last))


def _fits(pools: Sequence[_Pool], count: int, ratio: int) -> bool:
    """True if that many requests fit: the last one is admitted beside the reserve, and decodes to its end.

    Of several pools each has its part of the reserve, by its blocks and by those that are free; fixed ones have none.
    """
    free = [pool.usable - (count - 1) * pool.held.last for pool in pools]
    if any(blocks < max(pool.held) for pool, blocks in zip(pools, free, strict=True)):
        return False
    sharing = [index for index, pool in enumerate(pools) if not pool.fixed]
    sizes = {index: (pools[index].usable, free[index]) for index in sharing}
    whole, left = (sum(each) for each in zip(*sizes.values(), strict=True)) if sizes else (0, 0)
    reserve = reserve_for_ratio(ratio, whole)
    for index, pool in enumerate(pools):
        size, now = sizes.get(index, (0, 0))
        parts = (reserve * size // whole if whole else 0, reserve * now // left if left else 0)
        if pool.held.first + parts[0] > pool.usable or pool.held.first + parts[1] > free[index]:
            return False
    return not reserve or sum(pool.held.first for pool in pools) + reserve <= sum(free)


def _waste(plan: PoolPlan, held: Sequence[_Held]) -> float:
    """Share of the bytes of a request's blocks that holds no layer's: padding, and room up to the widest group."""
    data, taken = 0, 0
    for group, blocks in zip(plan.groups, held, strict=True):
        layer = group.stride + group.scale_stride
        data += blocks.last * len(group.layers) * (layer - group.padding_bytes)
        taken += blocks.last * (plan.bytes_per_block if plan.shared else len(group.layers) * layer)
    return 1 - data / taken
