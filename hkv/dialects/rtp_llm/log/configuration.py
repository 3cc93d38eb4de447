"""Conversion of a log's header to a configuration under RTP-LLM's rules, and back."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hkv.contract.log import Log, LogFormat
from hkv.dialects.rtp_llm.config import HYBRID_POOL, NAMES, RtpConfig
from hkv.dialects.rtp_llm.log import structs
from hkv.dialects.rtp_llm.log.structs import OPERATIONS, RtpGroup, RtpHeader
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


# Coverage of RTP-LLM's rules by a log, as far as its operations and the recorded answers show.

RTP_RULES = {
    "hit/none": "a new request finds nothing",
    "hit/joint": "a new request takes blocks over",
    "hit/holes": "what it takes over has holes: of some group only the last block",
    "grant/grown": "a request that grew gets blocks",
    "grant/reserve": "tokens to come get slots",
    "prune/cleanup": "a request that grew gives blocks back",
    "refuse/permanent": "a request never fits",
    "refuse/retryable": "a request fits when others give blocks back",
    "refuse/internal": "what the cache holds could not be evicted",
    "fork/copied": "a sequence is forked, its last block copied",
    "fork/refused": "a fork finds no blocks",
    "insert/entered": "blocks are entered",
    "insert/resident": "blocks are entered for good",
    "evict/asked": "blocks are evicted as asked for",
    "evict/for-room": "cached blocks leave for a request's sake",
    "export/kept": "evicted blocks stay referenced",
    "hold/connector": "a connector holds blocks",
    "hold/request": "a request's blocks are held twice",
    "peak/estimated": "a peak is estimated",
}
"""The rules."""


def exercised_rtp(log: Log) -> dict[str, int]:
    """Rule to how often, of `RTP_RULES`; those that were not are left out."""
    counts: Counter[str] = Counter()
    lists: dict[str, structs.Lists] = {}
    cached, room = 0, False
    for operation in log.operations:
        match operation, getattr(operation, "want", None):
            case structs.MallocOp(), structs.Malloc() as answer:
                counts.update(_of_malloc(lists.get(operation.id, []), answer))
                lists[operation.id] = answer.lists
                room = room or answer.verdict == "granted"
            case structs.ForkOp(), structs.Fork() as answer:
                counts["fork/refused"] += answer.copies is None
                counts["fork/copied"] += bool(answer.copies)
                lists[operation.id] = answer.lists
            case structs.InsertOp(), _:
                counts["insert/resident" if operation.resident else "insert/entered"] += 1
                room = False
            case structs.FreeOp(), _:
                lists.pop(operation.id, None)
            case structs.EvictOp(), structs.Count() as answer:
                counts["evict/asked"] += answer.count > 0
                room = False
            case structs.ExportOp(), structs.Selected() as answer:
                counts["export/kept"] += answer.keys is not None
                room = False
            case structs.HoldOp(), structs.Selected() as answer:
                counts["hold/connector" if operation.connector else "hold/request"] += answer.keys is not None
            case structs.PeakOp(), _:
                counts["peak/estimated"] += 1
            case structs.RequestOp(), _:
                counts["grant/reserve"] += operation.reserve > 0
            case structs.StateOp(), structs.RtpState() as answer:
                counts["evict/for-room"] += room and len(answer.cached) < cached
                cached, room = len(answer.cached), False
    return {rule: counts[rule] for rule in RTP_RULES if counts[rule]}


def _of_malloc(before: structs.Lists, answer: structs.Malloc) -> list[str]:
    refusals = {"permanent": "refuse/permanent", "retryable": "refuse/retryable", "internal_error": "refuse/internal"}
    if answer.verdict in refusals:
        return [refusals[answer.verdict]]
    if not _real(before):
        if not answer.reused:
            return ["hit/none"]
        holes = any(blocks and blocks[0] == -1 for row in answer.lists for blocks in row)
        return ["hit/joint", "hit/holes"] if holes else ["hit/joint"]
    old, new = _real(before), _real(answer.lists)
    return ["grant/grown"] * (len(new - old) > 0) + ["prune/cleanup"] * (len(old - new) > 0)


def _real(lists: Sequence[Sequence[Sequence[int]]]) -> set[tuple[int, int]]:
    return {(group, block) for row in lists for group, blocks in enumerate(row) for block in blocks if block > 0}


# Logs under RTP-LLM's rules: what a line must hold beyond its types.


SMALLEST_TOKEN = -(2**31)
"""Tokens are hashed as int32, so a log may hold negative ones."""

FORMAT = LogFormat(RtpHeader, OPERATIONS, to_rtp_config, {"tokens": SMALLEST_TOKEN}, "rtp_")
"""Header and operations, by name."""
