"""Conversion of a log's header to a configuration under RTP-LLM's rules, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from hkv.dialects.rtp_llm.config import HYBRID_POOL, NAMES, RtpConfig
from hkv.dialects.rtp_llm.log.structs import RtpGroup, RtpHeader
from hkv.errors import ConfigError
from hkv.model.group_policy import CpMapping, EvictPolicy, GroupPolicy, GroupType, default_policy
from hkv.model.topology import Group, Topology
from hkv.spec import FullAttention, Mamba

VERSION = 2
"""The log format's version that knows these logs."""


def to_rtp_config(header: RtpHeader) -> RtpConfig:
    """The configuration that a header describes.

    Raises:
      HKVError: unknown version, dialect, type or policy, or a configuration that the dialect forbids.
    """
    if header.oplog != VERSION:
        raise ConfigError("oplog", header.oplog, f"version {VERSION} of the log format")
    if header.dialect not in NAMES:
        raise ConfigError("dialect", header.dialect, f"one of {', '.join(NAMES)}")
    groups = tuple(_group(index, group) for index, group in enumerate(header.groups))
    config = RtpConfig(
        topology=Topology(groups, pools="independent" if header.dialect == HYBRID_POOL else "shared"),
        num_blocks=tuple(header.num_blocks),
        block_size=header.block_size,
        linear_step=header.linear_step,
        reserve_blocks=header.reserve_blocks,
        prefix_tree=header.prefix_tree,
        independent_eviction=header.independent_eviction,
        cp_size=header.cp_size,
        cp_rank=header.cp_rank,
        prefill_cp_size=header.prefill_cp_size,
        bugs=frozenset(header.bugs),
    )
    if config.name != header.dialect:
        raise ConfigError("dialect", header.dialect, f"{config.name}, for {len(groups)} groups over these pools")
    return config


def to_rtp_header(config: RtpConfig, feature: str) -> RtpHeader:
    """The header that describes a configuration; of what its layers cache, only the type of group is written."""
    return RtpHeader(
        oplog=VERSION,
        dialect=config.name,
        feature=feature,
        num_blocks=list(config.num_blocks),
        groups=[_entry(group) for group in config.topology.groups],
        block_size=config.block_size,
        linear_step=config.linear_step,
        reserve_blocks=config.reserve_blocks,
        prefix_tree=config.prefix_tree,
        independent_eviction=config.independent_eviction,
        cp_size=config.cp_size,
        cp_rank=config.cp_rank,
        prefill_cp_size=config.prefill_cp_size,
        bugs=sorted(config.bugs),
    )


def _group(index: int, group: RtpGroup) -> Group:
    name = f"groups[{index}]"
    group_type = _member(f"{name}.type", GroupType, group.type)
    changes: dict[str, Any] = {
        "validate_tail_blocks": group.validate_tail_blocks,
        "explicit_block_num": group.explicit_block_num,
    }
    for field in ("enable_prefix_reuse", "active_tail_blocks"):
        if getattr(group, field) is not None:
            changes[field] = getattr(group, field)
    if group.evict_policy is not None:
        changes["evict_policy"] = _member(f"{name}.evict_policy", EvictPolicy, group.evict_policy)
    if group.cp_mapping is not None:
        changes["cp_mapping"] = _member(f"{name}.cp_mapping", CpMapping, group.cp_mapping)
    policy = dataclasses.replace(default_policy(group_type), **changes)
    size = group.block_size
    if group_type is GroupType.LINEAR:
        spec = Mamba(block_size=size)
    else:
        spec = FullAttention(block_size=size, num_kv_heads=1, head_size=1, dtype="bfloat16")
    return Group(tag=group.tag, spec=spec, policy=policy, kernel_block_size=group.kernel_block_size)


def _member(name: str, kind: Any, value: str) -> Any:
    if value not in kind.__members__:
        raise ConfigError(name, value, f"one of {', '.join(kind.__members__)}")
    return kind[value]


def _entry(group: Group) -> RtpGroup:
    policy: GroupPolicy = group.policy
    whole = group.kernel_block_size == group.spec.block_size
    return RtpGroup(
        tag=group.tag,
        type=policy.group_type.name,
        block_size=group.spec.block_size,
        kernel_block_size=0 if whole else group.kernel_block_size,
        enable_prefix_reuse=policy.enable_prefix_reuse,
        evict_policy=policy.evict_policy.name,
        explicit_block_num=policy.explicit_block_num,
        active_tail_blocks=policy.active_tail_blocks,
        validate_tail_blocks=policy.validate_tail_blocks,
        cp_mapping=policy.cp_mapping.name,
    )
