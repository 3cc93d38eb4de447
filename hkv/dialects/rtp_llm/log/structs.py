"""Header, operations and answers of logs under RTP-LLM's rules, as typed values; `docs/oplog.md` defines them."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

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
