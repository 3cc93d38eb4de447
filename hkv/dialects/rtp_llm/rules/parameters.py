"""A configuration as data: two small arrays that every compiled rule reads, so that configurations share
executables.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.rtp_llm.bugs import FORGETS_ALIGNMENT, KEEPS_FREED_LISTS, LEAKS_STATES
from hkv.dialects.rtp_llm.config import HYBRID_POOL, SINGLE, RtpConfig
from hkv.errors import ConfigError
from hkv.model.group_policy import CpMapping, GroupType
from hkv.state.flat_arrays import ParameterView
from hkv.state.loops import Scalar, ceil_divide, remainder

CacheField = enum.IntEnum(
    "CacheField",
    (
        "GROUPS",
        "POOLS",
        "BLOCK",
        "STEP",
        "RESERVE",
        "RANKS",
        "SINGLE",
        "APART",
        "REUSED",
        "TOTAL",
        "SHARING",
        "ALONE",
        "ADOPTS",
        "LEAKS",
        "KEEPS",
        "FORGETS",
    ),
    start=0,
)
"""Columns of `RtpParameters.cache`: what belongs to no group.

BLOCK: tokens between two keys. STEP: blocks between two states kept for reuse. RESERVE: blocks that a first allocation
leaves free. RANKS: ranks that share the sequence, as far as the allocator minds them. SINGLE: one full group. APART: a
pool for each group. REUSED: tokens that a reused key stands for. TOTAL: blocks of all pools that can be handed out.
SHARING: those of pools that have a part of the reserve. ALONE: a bit for each group that may lose blocks alone, under
the prefix tree. ADOPTS: whether a new request may take over cached blocks. LEAKS, KEEPS, FORGETS: whether a defect of
RTP-LLM is reproduced (`hkv.dialects.rtp_llm.bugs`).
"""

GroupField = enum.IntEnum(
    "GroupField",
    (
        "POOL",
        "BLOCK",
        "FULL",
        "LINEAR",
        "TAIL",
        "KEPT",
        "GRID",
        "CHECKED",
        "REUSE",
        "VOTES",
        "DEALT",
        "CANONICAL",
        "COMPACT",
        "LOGICAL",
        "EXPLICIT",
        "TOTAL",
    ),
    start=0,
)
"""Columns of `RtpParameters.groups`.

POOL: where its blocks come from. BLOCK: tokens in one. FULL, LINEAR: its type; neither: SWA. TAIL: blocks at the end
that an allocation brings. KEPT: those that decoding keeps. GRID: whether blocks on the grid may stay. CHECKED: blocks
at the end that must be there. REUSE: whether its policy allows reuse. VOTES: whether a hit needs its block under the
last key. DEALT: whether its blocks are dealt out to ranks one by one. CANONICAL: whether they are cached under the
keys of virtual blocks. COMPACT: whether a hit takes one slot for all ranks' tokens. LOGICAL: tokens of a slot.
EXPLICIT: whether its pool has a size of its own. TOTAL does not belong to the group of that row, but to the pool of
that number: blocks that can be handed out.
"""

FIELDS = 16
"""Columns of both arrays."""

ALL_BLOCKS = 1 << 28
"""More than any list has."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RtpParameters:
    """A configuration as traced data.

    Attributes:
      cache: int32[16], one value for each `CacheField`.
      groups: int32[groups, 16], one row a group, one column for each `GroupField`; rows beyond the groups are 0.
    """

    cache: jax.Array
    groups: jax.Array


class RtpView(ParameterView):
    """A lane of `RtpParameters`, read field by field."""

    FIELDS = FIELDS

    def flag(self, group: Any, field: GroupField) -> Scalar:
        """A field of a group that says yes or no."""
        return self.group(group, field) != 0

    def pool_of(self, group: Any) -> Scalar:
        """The pool of a group."""
        return self.group(group, GroupField.POOL)

    @property
    def num_groups(self) -> Scalar:
        """Number of groups."""
        return self.whole(CacheField.GROUPS)


def of_config(config: RtpConfig, groups: int) -> RtpParameters:
    """A configuration as NumPy arrays, with room for so many groups.

    Raises ConfigError for more groups than the bucket.
    """
    if len(config.policies) > groups:
        raise ConfigError("groups", len(config.policies), f"at most the bucket's {groups}")
    table = np.zeros((groups, FIELDS), np.int32)
    for group in range(len(config.policies)):
        for name, value in _group(config, group).items():
            table[group, GroupField[name]] = value
    totals = [count - 1 for count in config.num_blocks]
    table[: len(totals), GroupField.TOTAL] = totals
    apart = config.name == HYBRID_POOL
    sharing = [0 if apart and table[pool, GroupField.EXPLICIT] else total for pool, total in enumerate(totals)]
    full, cache = config.full_groups, np.zeros(FIELDS, np.int32)
    for name, value in {
        "GROUPS": len(config.policies),
        "POOLS": len(totals),
        "BLOCK": config.block_size,
        "STEP": max(1, config.linear_step),
        "RESERVE": config.reserve_blocks,
        "RANKS": 1 if config.name == SINGLE else config.cp_size,
        "SINGLE": config.name == SINGLE,
        "APART": apart,
        "REUSED": table[full[0], GroupField.LOGICAL] if full else config.block_size,
        "TOTAL": sum(totals),
        "SHARING": sum(sharing),
        "ALONE": np.uint32(sum(1 << group for group in config.independent_groups)).view(np.int32),
        "ADOPTS": config.prefill_cp_size == 1,
        "LEAKS": LEAKS_STATES in config.bugs,
        "KEEPS": KEEPS_FREED_LISTS in config.bugs,
        "FORGETS": FORGETS_ALIGNMENT in config.bugs,
    }.items():
        cache[CacheField[name]] = value
    return RtpParameters(cache=cache, groups=table)  # type: ignore[arg-type]


def _group(config: RtpConfig, group: int) -> dict[str, int]:
    policy, spec = config.policies[group], config.topology.groups[group].spec
    full, linear = policy.group_type is GroupType.FULL, policy.group_type is GroupType.LINEAR
    single = config.name == SINGLE
    mapping = CpMapping.NONE if single else config.mapper.mapping(policy)
    tail = ALL_BLOCKS if full else max(1, policy.active_tail_blocks)
    swa = not full and not linear
    return {
        "POOL": config.topology.pool_of(config.topology.groups[group].tag),
        "BLOCK": spec.block_size,
        "FULL": full,
        "LINEAR": linear,
        "TAIL": tail,
        # Two states at least: the one that is read and the one that is written.
        "KEPT": max(2, tail) if linear else tail,
        "GRID": linear or (swa and policy.enable_prefix_reuse),
        "CHECKED": min(tail, 2) if swa and policy.validate_tail_blocks else 0,
        "REUSE": policy.enable_prefix_reuse,
        "VOTES": linear or (swa and policy.enable_prefix_reuse),
        "DEALT": mapping is CpMapping.BLOCK_ROUND_ROBIN,
        "CANONICAL": mapping is not CpMapping.NONE,
        "COMPACT": swa and mapping is CpMapping.COMPACT_LAST_RANK,
        "LOGICAL": config.mapper.logical_block_size(mapping, spec.block_size),
        "EXPLICIT": policy.explicit_block_num != 0,
    }


# Shape of a group's lists: all slots of a full group have blocks, of others the last ones and those on a grid.


class Shape(NamedTuple):
    """Parameters of a group's lists; see `GroupField`. `step` is in blocks."""

    group: Scalar
    pool: Scalar
    block: Scalar
    step: Scalar
    tail: Scalar
    kept: Scalar
    grid: Scalar
    full: Scalar
    linear: Scalar
    checked: Scalar


def shape_of(view: RtpView, group: Scalar) -> Shape:
    """Parameters of a group's lists."""
    return Shape(
        group=group,
        pool=view.pool_of(group),
        block=view.group(group, GroupField.BLOCK),
        step=view.whole(CacheField.STEP),
        tail=view.group(group, GroupField.TAIL),
        kept=view.group(group, GroupField.KEPT),
        grid=view.flag(group, GroupField.GRID),
        full=view.flag(group, GroupField.FULL),
        linear=view.flag(group, GroupField.LINEAR),
        checked=view.group(group, GroupField.CHECKED),
    )


def slots(shape: Shape, tokens: Scalar) -> Scalar:
    """Slots that `tokens` tokens fill, the last maybe in part."""
    return ceil_divide(tokens, shape.block)


def total(shape: Shape, tokens: Scalar, reserve: Scalar) -> Scalar:
    """Slots for `tokens` tokens and a reserve: in tokens, but for linear groups, where it is one more than slots."""
    # A state a draft token, the first of which stands in the last slot already.
    states = slots(shape, tokens) + jnp.maximum(reserve - 1, 0)
    return jnp.where(shape.linear, states, slots(shape, tokens + reserve))


def effective(view: RtpView, group: Scalar, tokens: Scalar) -> Scalar:
    """The length for which a group allocates on this rank (RTP-LLM `effectiveSeqLenForAlloc`)."""
    dealt = view.flag(group, GroupField.DEALT)
    return effective_tokens(tokens, view.whole(CacheField.BLOCK), view.whole(CacheField.RANKS), dealt)


def on_grid(shape: Shape, position: Scalar, reuse: Scalar) -> Scalar:
    """True if the block at a position is kept for requests that reuse it."""
    return shape.grid & reuse & (remainder(position + 1, shape.step) == 0)


def has_block(shape: Shape, position: Scalar, filled: Scalar, reserve: Scalar, reuse: Scalar) -> Scalar:
    """True if an allocation brings a block to a slot; slots from `filled` on are the reserve's."""
    reserved = (reserve > 0) & (position >= filled)
    last = (position >= filled - shape.tail) & (position < filled)
    return reserved | last | on_grid(shape, position, reuse)


# Ranks and slots of blocks, on arrays: `hkv.dialects.rtp_llm.config.CpSlotMapper` inside `jit`.
#
# Every argument may be an array or a scalar, int32; they broadcast. Lengths are in tokens, blocks are logical ones.


def effective_tokens(tokens: Any, block_size: Any, ranks: Any, dealt: Any) -> jax.Array:
    """The length for which a group allocates on one of `ranks` ranks that share the sequence.

    `dealt`: its blocks are dealt out one by one (`CpMapping.BLOCK_ROUND_ROBIN`). Each rank has as many slots, so that
    the last may stay unused on some.
    """
    local_blocks = ceil_divide(ceil_divide(jnp.maximum(tokens, 0), block_size), ranks)
    return jnp.where(dealt, local_blocks * block_size, tokens)


def canonical_place(virtual_block: Any, ranks: Any) -> jax.Array:
    """Index, among a sequence's keys, of a whole virtual block's key: the last rank's in it, which covers them all."""
    return (jnp.asarray(virtual_block) + 1) * ranks - 1
