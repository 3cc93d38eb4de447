"""Descriptions of a model's layers, one for each cache, and the topology that follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.errors import TopologyError
from hkv.model.group_policy import (
    CpMapping,
    CpSlice,
    EvictPolicy,
    GroupPolicy,
    GroupType,
    MemoryPlacement,
    check_policy,
    default_policy,
    group_type_of,
)
from hkv.model.topology import Group, Layer, Topology
from hkv.spec import LayerSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheDescription:
    """One cache of one layer: its tag, its bytes, and what differs from the default policy (RTP-LLM `KVCacheSpecDesc`).

    Attributes:
      tag: the group it joins.
      spec: description of what the layer caches in it.
      group_type: overrides the type that follows from the spec.
      state_cache: a state of which single blocks can be reused and evicted: prefix reuse on, eviction INDEPENDENT.
      enable_prefix_reuse, evict_policy, reservable, explicit_block_num, charge_to_paged_budget, memory_placement,
        active_tail_blocks, validate_tail_blocks, cp_mapping, cp_slice: override that field of the policy; None keeps
        the default.
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
    """One layer: its caches, or the layer whose caches it reads.

    Attributes:
      caches: the layer's own caches, one a group, in the order in which it uses them.
      name: the layer's name; left out, `layers.` and its position.
      cache_of: name of an earlier layer whose cache this one reads; `caches` is then empty, or equal to the owner's to
        have it checked that both layers are of one kind.
    """

    caches: tuple[CacheDescription, ...] = ()
    name: str = ""
    cache_of: str | None = None


def describe_topology(
    layers: Sequence[LayerDescription], *, pools: str = "shared", kernel_block_size: int = 0
) -> Topology:
    """The topology that layer descriptions make, as RTP-LLM's hybrid and independent-pool creators make it.

    Groups come in the order in which their tags are first seen; in a shared pool FULL groups come first. Caches of one
    tag must agree in spec and policy. A shared pool takes one cache a layer, exactly one FULL group, and LINEAR
    groups with states of one size.

    Args:
      layers: at least one, in model order.
      pools: `shared` or `independent`.
      kernel_block_size: tokens per kernel block; FULL groups of smaller blocks keep their own size, groups of other
        types are never split. 0 for whole blocks.

    Raises:
      TopologyError: descriptions that do not fit together.
    """
    if not layers:
        raise TopologyError("layers", layers, "at least one layer")
    names = [layer.name or f"layers.{index}" for index, layer in enumerate(layers)]
    described = dict(zip(names, layers, strict=True))
    members: dict[str, list[str]] = {}
    caches: dict[str, CacheDescription] = {}
    for name, layer in described.items():
        _check_layer(name, layer, described, pools)
        for cache in layer.caches if layer.cache_of is None else ():
            first = caches.setdefault(cache.tag, cache)
            _check_same(name, cache, first)
            members.setdefault(cache.tag, []).append(name)
    groups = [_group(cache, members[tag], kernel_block_size) for tag, cache in caches.items()]
    if pools == "shared":
        groups.sort(key=lambda group: group.policy.group_type is not GroupType.FULL)
        _check_shared_pool(groups)
    placed = tuple(_layer(name, layer) for name, layer in zip(names, layers, strict=True))
    return Topology(tuple(groups), layers=placed, pools=pools)


def _group(cache: CacheDescription, layers: Sequence[str], kernel_block_size: int) -> Group:
    policy, block_size = cache.policy, cache.spec.block_size
    split = kernel_block_size and policy.group_type is GroupType.FULL
    kernel = min(kernel_block_size, block_size) if split else block_size
    return Group(tag=cache.tag, spec=cache.spec, layers=tuple(layers), policy=policy, kernel_block_size=kernel)


def _layer(name: str, layer: LayerDescription) -> Layer:
    tags = tuple(cache.tag for cache in layer.caches) if layer.cache_of is None else ()
    return Layer(name=name, tags=tags, cache_of=layer.cache_of)


def _check_layer(name: str, layer: LayerDescription, described: dict[str, LayerDescription], pools: str) -> None:
    tags = [cache.tag for cache in layer.caches]
    if len(set(tags)) != len(tags):
        raise TopologyError(f"caches of layer {name}", tags, "each tag once")
    if pools == "shared" and len(tags) > 1:
        raise TopologyError(f"caches of layer {name}", tags, "one cache a layer in a shared pool")
    if layer.cache_of is None or not layer.caches:
        return
    owner = described.get(layer.cache_of)
    if owner is not None and owner.caches != layer.caches:
        raise TopologyError(f"caches of layer {name}", layer.caches, f"none, or the same as layer {layer.cache_of}'s")


def _check_same(name: str, cache: CacheDescription, first: CacheDescription) -> None:
    if cache.spec != first.spec:
        expected = f"what the other layers of group {cache.tag} cache: {first.spec!r}"
        raise TopologyError(f"spec of layer {name}", cache.spec, expected)
    if cache.policy != first.policy:
        expected = f"the policy of the other layers of group {cache.tag}"
        raise TopologyError(f"policy of layer {name}", cache.policy, expected)


def _check_shared_pool(groups: Sequence[Group]) -> None:
    full = [group.tag for group in groups if group.policy.group_type is GroupType.FULL]
    if len(full) != 1:
        raise TopologyError("layers", full, "exactly one group of type FULL in a shared pool")
    sizes = {group.spec.page_size_bytes for group in groups if group.spec.snapshot}
    if len(sizes) > 1:
        raise TopologyError("layers", sorted(sizes), "LINEAR groups with states of one size in a shared pool")
