"""Policy of a group of layers: type, reuse, eviction, capacity, placement, active tail, context-parallel sharding.

These are the eleven fields of RTP-LLM's `CacheGroupPolicy`, with its numbers and its defaults for each type of group.
vLLM derives the same decisions from the spec's class and reads none of them.
"""

from __future__ import annotations

import dataclasses
import enum

from hkv.errors import TopologyError
from hkv.spec import LayerSpec


class GroupType(enum.IntEnum):
    """Type of a group: the blocks of a sequence that it keeps (RTP-LLM `CacheGroupType`)."""

    LINEAR = 0
    """The last state, and states on a grid."""
    FULL = 1
    """Every block."""
    SWA = 2
    """A tail of blocks."""


class EvictPolicy(enum.IntEnum):
    """Extent of an eviction (RTP-LLM `CacheEvictPolicy`)."""

    CHAIN = 0
    """A whole chain of the prefix tree."""
    INDEPENDENT = 1
    """This group's block alone."""
    NONE = 2


class MemoryPlacement(enum.IntEnum):
    """Memory in which a group's pool lies (RTP-LLM `CacheMemoryPlacement`)."""

    DEVICE = 0
    HOST = 1
    HOST_PINNED = 2


class CpMapping(enum.IntEnum):
    """Mapping of blocks to ranks under context parallelism (RTP-LLM `CpBlockMappingMode`)."""

    NONE = 0
    """Every rank holds every block."""
    BLOCK_ROUND_ROBIN = 1
    """Logical block b is on rank `b % ranks`."""
    COMPACT_LAST_RANK = 2
    """One block stands for `ranks` blocks of tokens, under the key of the last."""


class CpSlice(enum.IntEnum):
    """Part of a block that a rank holds under context parallelism (RTP-LLM `CpBlockSliceMode`)."""

    NONE = 0
    EQUAL_BYTES = 1
    PAYLOAD_BYTES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """Policy of a group (RTP-LLM `CacheGroupPolicy`, all eleven fields with the struct's own defaults).

    Attributes:
      reservable: whether the pool's reserve counts this group's blocks.
      explicit_block_num: blocks of the group's own pool, 0 to derive them from the memory budget.
      charge_to_paged_budget: whether an explicit pool is paid from the memory budget.
      active_tail_blocks: blocks at the end of a sequence that must stay.
      validate_tail_blocks: whether a missing tail block is an error.
    """

    group_type: GroupType = GroupType.FULL
    enable_prefix_reuse: bool = True
    evict_policy: EvictPolicy = EvictPolicy.CHAIN
    reservable: bool = True
    explicit_block_num: int = 0
    charge_to_paged_budget: bool = False
    memory_placement: MemoryPlacement = MemoryPlacement.DEVICE
    active_tail_blocks: int = 0
    validate_tail_blocks: bool = True
    cp_mapping: CpMapping = CpMapping.NONE
    cp_slice: CpSlice = CpSlice.NONE

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_field(field.name, getattr(self, field.name), type(field.default))
        if self.memory_placement is MemoryPlacement.HOST and self.charge_to_paged_budget:
            raise TopologyError("charge_to_paged_budget", True, "False for a pool in host memory")


def _check_field(name: str, value: object, wanted: type) -> None:
    if type(value) is not wanted:
        members = f": {', '.join(wanted.__members__)}" if issubclass(wanted, enum.Enum) else ""
        raise TopologyError(name, value, f"{wanted.__name__}{members}")
    if wanted is int and isinstance(value, int) and value < 0:
        raise TopologyError(name, value, "0 or more")


def default_policy(group_type: GroupType) -> GroupPolicy:
    """The policy of a group of which only the type is known (RTP-LLM `defaultCacheGroupPolicy`)."""
    if group_type is GroupType.FULL:
        return GroupPolicy(cp_mapping=CpMapping.BLOCK_ROUND_ROBIN)
    if group_type is GroupType.LINEAR:
        return GroupPolicy(group_type=group_type, active_tail_blocks=1)
    return GroupPolicy(
        group_type=GroupType.SWA,
        enable_prefix_reuse=False,
        active_tail_blocks=2,
        cp_mapping=CpMapping.COMPACT_LAST_RANK,
    )


_FAR = 1 << 40
"""A position far beyond any window, in tokens."""


def group_type_of(spec: LayerSpec) -> GroupType:
    """The type of group that a layer's cache belongs to when nobody says otherwise.

    A snapshot is LINEAR, a layer that no longer reads a sequence's beginning is SWA, everything else is FULL. RTP-LLM
    has no spec of a sliding window: there a window layer is SWA because its description says so.
    """
    if spec.snapshot:
        return GroupType.LINEAR
    return GroupType.SWA if spec.readable(_FAR).start > 0 else GroupType.FULL


def check_policy(policy: GroupPolicy, spec: LayerSpec) -> None:
    """Raise TopologyError unless a group of that policy can hold that spec.

    A snapshot wants a LINEAR group. The reverse is not asked: an attention layer may be kept as LINEAR or SWA
    (RTP-LLM `CacheConfig::setTopology`).
    """
    if not isinstance(policy, GroupPolicy):
        raise TopologyError("policy", policy, "a GroupPolicy")
    if spec.snapshot and policy.group_type is not GroupType.LINEAR:
        raise TopologyError("group_type", policy.group_type.name, f"LINEAR, as {spec.kind} keeps snapshots")


# Descriptions of layers, one for each cache, from which the policies of their groups follow.

DEFAULT_TAG = "default"
"""The tag of a model whose layers all cache alike; a draft's group of this tag looks for one that fits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheDescription:
    """One cache of one layer: its tag, its bytes, and what differs from the default policy (RTP-LLM `KVCacheSpecDesc`).

    A `state_cache` is one of which single blocks can be reused and evicted: prefix reuse on, eviction INDEPENDENT. The
    type of group, where it is given, overrides the one that follows from the spec; and so do fields of the policy.
    """

    tag: str
    spec: LayerSpec
    group_type: GroupType | None = None
    state_cache: bool = False
    enable_prefix_reuse: bool | None = None
    evict_policy: EvictPolicy | None = None
    reservable: bool | None = None
    explicit_block_num: int | None = None
    charge_to_paged_budget: bool | None = None
    memory_placement: MemoryPlacement | None = None
    active_tail_blocks: int | None = None
    validate_tail_blocks: bool | None = None
    cp_mapping: CpMapping | None = None
    cp_slice: CpSlice | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tag, str) or not self.tag:
            raise TopologyError("tag", self.tag, "a non-empty string")
        if not isinstance(self.spec, LayerSpec):
            raise TopologyError("spec", self.spec, "a LayerSpec")
        if not isinstance(self.group_type, GroupType | None):
            raise TopologyError("group_type", self.group_type, f"one of {', '.join(GroupType.__members__)}, or None")
        check_policy(self.policy, self.spec)

    @property
    def policy(self) -> GroupPolicy:
        """The policy: the default of the type, then what a state cache changes, then the overrides (RTP-LLM)."""
        policy = default_policy(group_type_of(self.spec) if self.group_type is None else self.group_type)
        if self.state_cache:
            policy = dataclasses.replace(policy, enable_prefix_reuse=True, evict_policy=EvictPolicy.INDEPENDENT)
        names = [field.name for field in dataclasses.fields(policy) if field.name != "group_type"]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return dataclasses.replace(policy, **given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerDescription:
    """One layer: its caches, one a group, in the order in which it uses them."""

    caches: tuple[CacheDescription, ...] = ()
