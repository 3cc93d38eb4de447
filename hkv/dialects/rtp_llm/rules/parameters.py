"""A configuration as data: two small arrays that every compiled rule reads, so that configurations share
executables."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from hkv.dialects.rtp_llm.config import HYBRID_POOL, SINGLE, RtpConfig
from hkv.errors import ConfigError
from hkv.model.group_policy import CpMapping, GroupType
from hkv.state.loops import Scalar
from hkv.state.parameter_view import ParameterView

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
    ),
    start=0,
)
"""Columns of `RtpParameters.cache`: what belongs to no group.

BLOCK: tokens between two keys. STEP: blocks between two states kept for reuse. RESERVE: blocks that a first allocation
leaves free. RANKS: ranks that share the sequence, as far as the allocator minds them. SINGLE: one full group. APART: a
pool for each group. REUSED: tokens that a reused key stands for. TOTAL: blocks of all pools that can be handed out.
SHARING: those of pools that have a part of the reserve. ALONE: a bit for each
group that may lose blocks alone, under the prefix tree. ADOPTS: whether a new request may take over cached blocks.
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
keys of virtual blocks. COMPACT: whether a slot stands for all ranks' tokens. LOGICAL: tokens that a slot stands for.
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


class View(ParameterView):
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
    """A configuration as NumPy arrays.

    Args:
      config: the configuration.
      groups: bucket for the number of groups.

    Raises:
      ConfigError: more groups than the bucket.
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
        "KEPT": max(2, tail) if linear else tail,
        "GRID": linear or (swa and policy.enable_prefix_reuse),
        "CHECKED": min(tail, 2) if swa and policy.validate_tail_blocks else 0,
        "REUSE": policy.enable_prefix_reuse,
        "VOTES": linear or (swa and policy.enable_prefix_reuse),
        "DEALT": mapping is CpMapping.BLOCK_ROUND_ROBIN,
        "CANONICAL": mapping is not CpMapping.NONE,
        "COMPACT": mapping is CpMapping.COMPACT_LAST_RANK,
        "LOGICAL": config.mapper.logical_block_size(mapping, spec.block_size),
        "EXPLICIT": policy.explicit_block_num != 0,
    }
