"""RTP-LLM's pools: one shared by all groups, or one a group; how many blocks each gets, and requests that fit."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from hkv.contract.option_fields import option
from hkv.dialects.rtp_llm.config import RESERVE_RATIO, reserve_for_ratio
from hkv.dialects.rtp_llm.planning.options import RtpOptions
from hkv.dialects.rtp_llm.planning.sizes import BlockBytes
from hkv.errors import PlanError
from hkv.model.group_policy import CpMapping, GroupPolicy, GroupType

if TYPE_CHECKING:
    from hkv.contract.plan_command import Capacity


@dataclasses.dataclass(frozen=True)
class PoolGroup:
    """One group: its layers' indices, the block of one of them, and its share of the memory.

    `kernel_blocks` is how many one block holds, in groups of type FULL; `stride` and `scale_stride` are bytes from one
    block of a layer to the next in the pool of `num_blocks`.
    """

    tag: str
    block: BlockBytes
    policy: GroupPolicy
    layers: tuple[int, ...]
    kernel_blocks: int
    stride: int
    scale_stride: int
    num_blocks: int = 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers of the group."""
        return len(self.layers) * (self.stride + self.scale_stride)

    @property
    def padding_bytes(self) -> int:
        """Bytes of a layer's block that never carry data; of several slices of a block, those of the last one."""
        pieces = self.kernel_blocks if self.block.kind.startswith("opaque") else 1
        before = (self.block.slices - 1) * self.stride
        return self.stride - max(0, self.block.payload * pieces - before)

    @property
    def kept_blocks(self) -> int:
        """Blocks that a decoding sequence keeps without reuse; 0 in a full group, which keeps all.

        A LINEAR group keeps two states at least when it is pruned (RTP-LLM `removeSkippedBlocks`).
        """
        if self.policy.group_type is GroupType.FULL:
            return 0
        least = 2 if self.policy.group_type is GroupType.LINEAR else 1
        return max(least, self.policy.active_tail_blocks)


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """RTP-LLM's memory plan.

    Attributes:
      num_blocks: blocks of the paged pools, block 0 included.
      bytes_per_block: bytes one more block costs.
      tail_bytes_per_block: bytes one more block of the SWA pools costs; 0 in a shared pool.
      reserve_bytes: bytes of pools of a fixed size that are paid from `memory`.
      modules: the groups of each draft module, tags as in `groups`; their layers lie in regions of their own behind the
        target's, and their bytes are counted above.
      ranks: ranks among which a sequence's blocks are dealt out; `prefill_ranks` those of a decode server's prefill.
      unindexed: layers without room for their sparse indexer's keys (RTP-LLM's defect `indexer-without-room`): of draft
        modules, and of models of several groups or pools.
    """

    groups: tuple[PoolGroup, ...]
    shared: bool
    num_blocks: int
    bytes_per_block: int
    tail_bytes_per_block: int
    reserve_bytes: int
    memory: int
    modules: tuple[tuple[PoolGroup, ...], ...] = ()
    ranks: int = 1
    prefill_ranks: int = 1
    unindexed: tuple[int, ...] = ()

    def tokens_per_slot(self, group: PoolGroup) -> int:
        """Tokens of a sequence that one slot of a group stands for: those of all ranks where blocks are dealt out."""
        dealt = self.ranks > 1 and group.policy.cp_mapping is CpMapping.BLOCK_ROUND_ROBIN
        return group.block.seq_size * (self.ranks if dealt else 1)

    @property
    def token_bytes(self) -> Fraction:
        """Bytes that one more token of a sequence costs for good on a rank: of full groups, scales and padding too."""
        full = (group for group in self.groups if group.policy.group_type is GroupType.FULL)
        return sum((Fraction(group.bytes_per_block, self.tokens_per_slot(group)) for group in full), Fraction(0))

    @property
    def sequence_bytes(self) -> int:
        """Bytes of windows and states that a decoding sequence keeps besides its tokens, on a rank."""
        return sum(group.kept_blocks * group.bytes_per_block for group in self.groups)

    @property
    def token_capacity(self) -> int:
        """Tokens for which every full group has room, over all ranks; every group, if none is full."""
        full = [group for group in self.groups if group.policy.group_type is GroupType.FULL]
        return min((group.num_blocks - 1) * self.tokens_per_slot(group) for group in full or self.groups)


def kernel_blocks(block_size: int, kernel_block_size: int) -> int:
    """Kernel blocks in one block; 1 when no kernel size is set."""
    if kernel_block_size == 0:
        return 1
    if kernel_block_size > block_size or block_size % kernel_block_size:
        raise PlanError("kernel_block_size", kernel_block_size, f"a divisor of the block's {block_size} tokens")
    return block_size // kernel_block_size


def group_layer_count(linear: int, full: int) -> int:
    """Layers of one group of a shared pool: the common divisor, but at least as many as there are full layers."""
    if linear and full:
        return max(math.gcd(linear, full), full)
    return max(linear, full, 1)


def hybrid_tags(kinds: Sequence[GroupType]) -> tuple[str, ...]:
    """The tag of each layer in a shared pool: `full`, and `linear0`, `linear1`, ... for as many linear layers each."""
    linear = sum(kind is GroupType.LINEAR for kind in kinds)
    full = sum(kind is GroupType.FULL for kind in kinds)
    if linear + full != len(kinds):
        raise PlanError("pools", "shared", "independent, as layers other than full and linear are among them")
    size, seen, tags = group_layer_count(linear, full), 0, []
    for kind in kinds:
        if kind is GroupType.FULL:
            tags.append("full")
        else:
            tags.append(f"linear{seen // size}" if full else "linear")
            seen += 1
    return tuple(tags)


def shared_pool(
    tags: Sequence[str], blocks: Mapping[str, BlockBytes], policies: Mapping[str, GroupPolicy], *, kernel: int = 0
) -> tuple[PoolGroup, ...]:
    """The groups of one shared pool, full ones first, all with the stride of the largest block."""
    order = sorted(dict.fromkeys(tags), key=lambda tag: policies[tag].group_type is not GroupType.FULL)
    full = [tag for tag in order if policies[tag].group_type is GroupType.FULL]
    states = [tag for tag in order if policies[tag].group_type is GroupType.LINEAR]
    if len(full) != 1:
        raise PlanError("pools", full, "exactly one group of full attention in a shared pool")
    if len({dataclasses.astuple(blocks[tag]) for tag in states}) > 1:
        raise PlanError("pools", states, "linear groups of one layout in a shared pool")
    stride = max(blocks[tag].bytes for tag in order)
    if blocks[full[0]].bytes < stride:
        expected = f"at least the {stride} bytes of a state: full attention is not padded"
        raise PlanError("full block bytes", blocks[full[0]].bytes, expected)
    scale = blocks[full[0]].scale
    groups = []
    for tag in order:
        layers = tuple(index for index, own in enumerate(tags) if own == tag)
        pieces = kernel_blocks(blocks[tag].seq_size, kernel) if tag in full else 1
        groups.append(PoolGroup(tag, blocks[tag], policies[tag], layers, pieces, stride, scale))
    return tuple(groups)


def independent_pools(
    layer_tags: Sequence[Sequence[str]],
    blocks: Mapping[str, BlockBytes],
    policies: Mapping[str, GroupPolicy],
    *,
    kernel: int = 0,
) -> tuple[PoolGroup, ...]:
    """One group a pool, in the order in which layers first name them. A block's bytes count for each kernel block."""
    for index, tags in enumerate(layer_tags):
        if len(set(tags)) != len(tags):
            raise PlanError(f"tags of layer {index}", tuple(tags), "each group once")
    groups = []
    for tag in dict.fromkeys(tag for tags in layer_tags for tag in tags):
        block = blocks[tag]
        pieces = kernel_blocks(block.seq_size, kernel) if policies[tag].group_type is GroupType.FULL else 1
        if pieces > 1 and block.kind in ("mha", "mla"):
            raise PlanError("kernel_block_size", kernel, f"{block.seq_size}: {block.kind} blocks are sized whole")
        layers = tuple(i for i, tags in enumerate(layer_tags) if tag in tags)
        stride, scale = block.bytes * pieces, block.scale * pieces
        groups.append(PoolGroup(tag, block, policies[tag], layers, pieces, stride, scale))
    return tuple(groups)


def finalize(groups: Sequence[PoolGroup], num_blocks: int, *, shared: bool, step: int = 1) -> tuple[PoolGroup, ...]:
    """The groups with their number of blocks (RTP-LLM `finalizeBlockNums`); SWA pools shrink by `step`."""

    def count(group: PoolGroup) -> int:
        if shared:
            return num_blocks
        if group.policy.explicit_block_num:
            return group.policy.explicit_block_num
        return -(-num_blocks // max(1, step)) if group.policy.group_type is GroupType.SWA else num_blocks

    return tuple(dataclasses.replace(group, num_blocks=count(group)) for group in groups)


def budget_shares(groups: Sequence[PoolGroup], *, shared: bool, draft: bool = False) -> tuple[int, int, int]:
    """`(reserve, paged, swa)`: bytes of fixed pools, of one more paged block, of one more SWA block.

    Pools apart need a paged block, of FULL or LINEAR, unless a draft has opaque groups (`setupIndependentPoolSizes`).
    """
    if shared:
        layers = max(len(group.layers) for group in groups)
        return 0, layers * max(group.stride + group.scale_stride for group in groups), 0
    fixed = [group for group in groups if group.policy.explicit_block_num]
    reserve = sum(
        group.policy.explicit_block_num * group.bytes_per_block
        for group in fixed
        if group.policy.charge_to_paged_budget
    )
    free = [group for group in groups if not group.policy.explicit_block_num]
    swa = sum(group.bytes_per_block for group in free if group.policy.group_type is GroupType.SWA)
    paged = sum(group.bytes_per_block for group in free) - swa
    if not paged and not (draft and any(group.block.entries for group in groups)):
        expected = "a FULL or LINEAR group without a fixed number of blocks: RTP-LLM has no pools of windows alone"
        raise PlanError("groups", [group.tag for group in groups], expected)
    return reserve, paged, swa


# Requests that fit into a plan's pools at once, and the row of the plan in a capacity table.


DECODED = 2
"""Blocks behind the prompt, and as many more as tokens are held ahead, that a request has decoded here: it then has all
the states that it ever holds."""


class _Held(NamedTuple):
    """Blocks of one group that one request holds: with its prompt alone, at most while it grows, and in the end."""

    first: int
    most: int
    last: int


class _Pool(NamedTuple):
    """Blocks of a pool besides block 0, whether their number was chosen, and what one request holds of them."""

    usable: int
    fixed: bool
    held: _Held


def reserve_option(name: str = "") -> Any:
    """A field for `--reserve-ratio`, with the dialect's name before its help where a command has several."""
    said = f"{name}Percent of the blocks that a first allocation leaves free.  [default: {RESERVE_RATIO}]"
    return option(type=range(101), help=said)


def reserve_ratio(options: dict[str, Any]) -> int:
    """Value of `--reserve-ratio`."""
    return RESERVE_RATIO if options["reserve_ratio"] is None else options["reserve_ratio"]


def capacity_of(plan: PoolPlan, options: RtpOptions, tokens: int, ratio: int) -> Capacity:
    """Requests of one length that fit into the pools at once, without reuse of prefixes.

    Each comes alone, with all but its last blocks (`DECODED`) as its prompt, gets its blocks above the reserve, and
    decodes to its end; windows and states are pruned as it does (RTP-LLM `removeSkippedBlocks`).
    """
    from hkv.contract.plan_command import Capacity  # a row of `hkv plan`'s table; pools do without its packages

    held = [_held(plan, group, tokens, options.drafts + 1 if options.drafts else 0) for group in plan.groups]
    every = range(len(plan.groups))
    members = [list(every)] if plan.shared else [[group] for group in every]
    pools = [_pool(plan, [(plan.groups[group], held[group]) for group in pool]) for pool in members]
    # Later requests find fewer free blocks, so the first count that does not fit is found by bisection.
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
    """Blocks of a group that a request of so many tokens holds, `ahead` tokens to come besides them."""
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
    """True if that many requests fit: the last one is admitted with the reserve left free, and decodes to its end.

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
    return True


def _waste(plan: PoolPlan, held: Sequence[_Held]) -> float:
    """Share of the bytes of a request's blocks that holds no layer's: padding, and room up to the widest group."""
    data, taken = 0, 0
    for group, blocks in zip(plan.groups, held, strict=True):
        layer = group.stride + group.scale_stride
        data += blocks.last * len(group.layers) * (layer - group.padding_bytes)
        taken += blocks.last * (plan.bytes_per_block if plan.shared else len(group.layers) * layer)
    return 1 - data / taken
