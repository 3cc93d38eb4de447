"""Logs under RTP-LLM's rules: header, operations and answers as typed values, and the configuration a header is.

`docs/oplog.md` defines them. Structs say what fields there are; what a line must hold beyond its types stands at the
end, with the rules that a log may exercise.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeAlias

import msgspec

from hkv.contract.log import LogFormat
from hkv.dialects.rtp_llm.config import HYBRID_POOL, NAMES, RtpConfig
from hkv.errors import ConfigError
from hkv.model.group_policy import CpMapping, EvictPolicy, GroupPolicy, GroupType, default_policy
from hkv.model.topology import Group, Topology
from hkv.spec import FullAttention, Mamba

Lists: TypeAlias = list[list[list[int]]]
"""Block ids of one request: of each sequence, of each group; -1 for holes."""


class RtpGroup(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One group: its tag, its type, and where its policy differs from the type's default (`hkv.model.group_policy`).

    Attributes:
      tag: the group's name.
      type: `FULL`, `LINEAR` or `SWA`.
      block_size: tokens per block.
      kernel_block_size: tokens per kernel block; left out, the whole block.
      enable_prefix_reuse: whether later requests may reuse its blocks.
      evict_policy: `CHAIN`, `INDEPENDENT` or `NONE`.
      explicit_block_num: blocks of a pool of a fixed size; such a pool has no part of the reserve.
      active_tail_blocks: blocks at the end of a sequence that stay.
      validate_tail_blocks: whether a missing one is an error.
      cp_mapping: `NONE`, `BLOCK_ROUND_ROBIN` or `COMPACT_LAST_RANK`.
    """

    tag: str
    type: str
    block_size: int
    kernel_block_size: int = 0
    enable_prefix_reuse: bool | None = None
    evict_policy: str | None = None
    explicit_block_num: int = 0
    active_tail_blocks: int | None = None
    validate_tail_blocks: bool = True
    cp_mapping: str | None = None


class RtpHeader(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The first line, as `hkv.dialects.rtp_llm.config.RtpConfig` explains it; the dialect says whose the pools are."""

    oplog: int
    dialect: str
    feature: str
    num_blocks: list[int]
    groups: list[RtpGroup]
    block_size: int
    linear_step: int = 1
    reserve_blocks: int = 0
    prefix_tree: bool = False
    independent_eviction: bool = False
    cp_size: int = 1
    cp_rank: int = 0
    prefill_cp_size: int = 1
    bugs: list[str] = []


class Malloc(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `malloc`: `granted`, `permanent`, `retryable` or `internal_error`; tokens reused; all lists then."""

    verdict: str
    reused: int
    lists: Lists


class Fork(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `fork`: `[tag, source, target]` of each block to copy, None when refused; all lists after it."""

    copies: list[tuple[str, int, int]] | None
    lists: Lists


class Selected(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `hold` and `export`: keys, and for each group a block a key; None for both when there is nothing."""

    keys: list[int] | None
    blocks: list[list[int]] | None


class Count(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `evict` and `peak`: so many blocks."""

    count: int


class PoolState(msgspec.Struct, forbid_unknown_fields=True):
    """One pool: its free ids, ascending, and by block id how many references of each role there are."""

    free: list[int]
    request: dict[str, int]
    connector: dict[str, int]
    cache: dict[str, int]


class RtpState(msgspec.Struct, forbid_unknown_fields=True):
    """Answer to `state`.

    Attributes:
      pools: one shared, or one a group.
      lists: of each request that has any.
      cached: `[key, block a group]` of each key, least recently used first.
      version: number of changes to the cache, less one: -1 before the first.
    """

    pools: list[PoolState]
    lists: dict[str, Lists]
    cached: list[tuple[int, list[int]]]
    version: int


RtpAnswer: TypeAlias = Malloc | Fork | Selected | Count | RtpState | None
"""An engine's answer; None for operations that answer nothing."""


class RtpOp(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, tag_field="op"):
    """One operation."""


class RequestOp(RtpOp, tag="request"):
    """A request of so many equal sequences arrives; `reserve` tokens beyond the next one's get slots each step."""

    id: str
    tokens: list[int]
    sequences: int = 1
    reserve: int = 0


class MallocOp(RtpOp, tag="malloc"):
    """Blocks for all tokens that a request has: of a new one, or one that grew."""

    id: str
    reuse: bool = True
    device_cache: bool = True
    length: int | None = None
    want: Malloc | None = None


class AppendOp(RtpOp, tag="append"):
    """Each sequence gets more tokens, all equally many."""

    id: str
    tokens: list[list[int]]


class InsertOp(RtpOp, tag="insert"):
    """A request's whole blocks are entered into the cache."""

    id: str
    resident: bool = False


class ForkOp(RtpOp, tag="fork"):
    """The sequences of a request become those that `sources` names."""

    id: str
    sources: list[int]
    copy_last: bool = True
    want: Fork | None = None


class FreeOp(RtpOp, tag="free"):
    """A request gives all its blocks back."""

    id: str


class DropOp(RtpOp, tag="drop"):
    """A request without blocks is forgotten."""

    id: str


class HoldOp(RtpOp, tag="hold"):
    """A connector, or with `connector` false another request, holds the blocks of a sequence, under a name."""

    name: str
    id: str
    sequence: int = 0
    connector: bool = True
    want: Selected | None = None


class ReleaseOp(RtpOp, tag="release"):
    """The blocks held under a name are released."""

    name: str


class ExportOp(RtpOp, tag="export"):
    """At least so many blocks are evicted, for another tier to copy, under a name; they stay referenced."""

    name: str
    least: int
    want: Selected | None = None


class SettleOp(RtpOp, tag="settle"):
    """The blocks exported under a name are copied: their references are given back."""

    name: str


class EvictOp(RtpOp, tag="evict"):
    """At least so many blocks are evicted and given back."""

    least: int
    want: Count | None = None


class PeakOp(RtpOp, tag="peak"):
    """Number of further blocks that a request holds at its peak, `remaining` tokens from now; changes nothing."""

    id: str
    remaining: int
    reuse: bool = False
    sequences: int = 0
    want: Count | None = None


class StateOp(RtpOp, tag="state"):
    """Everything."""

    want: RtpState | None = None


OPERATIONS: tuple[type[RtpOp], ...] = tuple(RtpOp.__subclasses__())
"""The operations."""


VERSION = 2
"""The log format's version that knows these logs."""

_SAME = {field.name for field in dataclasses.fields(RtpConfig)} & set(RtpHeader.__struct_fields__) - {
    "num_blocks",
    "bugs",
}
"""Fields that a header and a configuration have alike."""


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
        bugs=frozenset(header.bugs),
        **{name: getattr(header, name) for name in _SAME},
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
        bugs=sorted(config.bugs),
        **{name: getattr(config, name) for name in _SAME},
    )


_POLICY = (
    *("enable_prefix_reuse", "evict_policy", "explicit_block_num"),
    *("active_tail_blocks", "validate_tail_blocks", "cp_mapping"),
)
"""Fields of a group's policy."""


def _group(index: int, group: RtpGroup) -> Group:
    name = f"groups[{index}]"
    group_type = _member(f"{name}.type", GroupType, group.type)
    given = {field: getattr(group, field) for field in _POLICY if getattr(group, field) is not None}
    enums = {"evict_policy": EvictPolicy, "cp_mapping": CpMapping}
    changes = {
        field: _member(f"{name}.{field}", enums[field], value) if field in enums else value
        for field, value in given.items()
    }
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
    fields: dict[str, Any] = {field: getattr(policy, field) for field in _POLICY}
    fields |= {field: value.name for field, value in fields.items() if isinstance(value, enum.Enum)}
    return RtpGroup(
        tag=group.tag,
        type=policy.group_type.name,
        block_size=group.spec.block_size,
        kernel_block_size=0 if whole else group.kernel_block_size,
        **fields,
    )


SMALLEST_TOKEN = -(2**31)
"""Tokens are hashed as int32, so a log may hold negative ones."""

FORMAT = LogFormat(RtpHeader, OPERATIONS, to_rtp_config, {"tokens": SMALLEST_TOKEN}, "rtp_")
"""Header and operations, by name."""
