"""Layers, the groups that share one block table each, and the pools the groups draw from."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

from hkv.errors import TopologyError
from hkv.model.group_policy import GroupPolicy, GroupType, check_policy, default_policy, group_type_of
from hkv.spec import LayerSpec

POOLS = ("shared", "independent")
"""`shared`: all groups draw their ids from one pool; `independent`: each group has a pool of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share one block table.

    Attributes:
      tag: the group's identity; unique within a topology. Its position means nothing by itself.
      spec: cache description of each of its layers.
      layers: names of its layers; empty when only block ids are studied, and for placeholders.
      eagle: the group serves a draft (EAGLE or MTP) module, whose last block cannot be trusted after a hit.
      policy: policy of the group; left out, the default of the spec's type of group.
      kernel_block_size: tokens per block of the kernels' tables, a divisor of `spec.block_size`; left out (or 0), the
        whole block.
    """

    tag: str
    spec: LayerSpec
    layers: tuple[str, ...] = ()
    eagle: bool = False
    policy: GroupPolicy = dataclasses.field(default=cast("GroupPolicy", None))
    kernel_block_size: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.tag, str) or not self.tag:
            raise TopologyError("tag", self.tag, "a non-empty string")
        if not isinstance(self.spec, LayerSpec):
            raise TopologyError("spec", self.spec, "a LayerSpec")
        if len(set(self.layers)) != len(self.layers):
            raise TopologyError("layers", self.layers, "each layer once")
        if self.policy is None:
            object.__setattr__(self, "policy", default_policy(group_type_of(self.spec)))
        check_policy(self.policy, self.spec)
        if self.kernel_block_size == 0:
            object.__setattr__(self, "kernel_block_size", self.spec.block_size)
        size = self.kernel_block_size
        if type(size) is not int or size < 1 or self.spec.block_size % size:
            raise TopologyError("kernel_block_size", size, f"a divisor of the block's {self.spec.block_size} tokens")

    @property
    def kernel_blocks_per_block(self) -> int:
        """Entries of a kernel's table for one block; 1 unless the group is FULL (RTP-LLM `initGroups`)."""
        if self.policy.group_type is not GroupType.FULL:
            return 1
        return self.spec.block_size // self.kernel_block_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's place among the groups.

    Attributes:
      name: the layer's identity; its id is its position in `Topology.layers`.
      tags: the groups it belongs to, in the order in which it uses them.
      cache_of: name of the layer whose cache this one reads instead of its own, or None (Gemma 3n; vLLM
        `kv_sharing_target_layer_name`). Such a layer owns no cache and appears in no group.
    """

    name: str
    tags: tuple[str, ...] = ()
    cache_of: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TopologyError("layer", self.name, "a non-empty string")
        if len(set(self.tags)) != len(self.tags):
            raise TopologyError(f"tags of layer {self.name}", self.tags, "each group once")
        if self.cache_of is None and not self.tags:
            raise TopologyError(f"tags of layer {self.name}", self.tags, "at least one group, or a layer to share with")
        if self.cache_of is not None and self.tags:
            raise TopologyError(f"tags of layer {self.name}", self.tags, f"none, as it reads {self.cache_of}'s cache")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Groups, in the order in which the engine visits them, their layers, and the pools they draw from.

    Attributes:
      groups: at least one; tags are unique.
      layers: every layer, in model order. Left out, the groups' layers in order of appearance; when given, a layer's
        tags and the groups' lists must agree in both directions. Only block ids are studied when no group has layers.
      pools: one of `POOLS`. From a shared pool a layer may use one group only, from independent pools several.
    """

    groups: tuple[Group, ...]
    layers: tuple[Layer, ...] = dataclasses.field(default=cast("tuple[Layer, ...]", None), kw_only=True)
    pools: str = dataclasses.field(default="shared", kw_only=True)

    def __post_init__(self) -> None:
        if not self.groups:
            raise TopologyError("groups", self.groups, "at least one group")
        if repeated := _repeated(group.tag for group in self.groups):
            raise TopologyError("groups", repeated, "a tag that no other group has")
        if self.pools not in POOLS:
            raise TopologyError("pools", self.pools, f"one of {', '.join(POOLS)}")
        if self.layers is None:
            object.__setattr__(self, "layers", _layers_of(self.groups))
        elif len(self.layers) == 0:
            raise TopologyError("layers", self.layers, "at least one layer")
        _check_membership(self.groups, self.layers)
        _check_sharing(self.layers)
        for layer in self.layers:
            if self.pools == "shared" and len(layer.tags) > 1:
                expected = f"one group only in a shared pool, got {', '.join(layer.tags)}"
                raise TopologyError("layers", layer.name, expected)

    @classmethod
    def of_specs(cls, specs: Sequence[LayerSpec], eagle_groups: Sequence[int] = ()) -> Topology:
        """Anonymous groups, tagged `g0`, `g1`, ..., one for each spec; those of these indices serve a draft module."""
        for index in eagle_groups:
            if not 0 <= index < len(specs):
                raise TopologyError("eagle_groups", index, f"an index below {len(specs)}")
        groups = (Group(tag=f"g{i}", spec=spec, eagle=i in eagle_groups) for i, spec in enumerate(specs))
        return cls(tuple(groups))

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """The groups' specs, in group order."""
        return tuple(group.spec for group in self.groups)

    @property
    def tags(self) -> tuple[str, ...]:
        """The groups' tags, in group order."""
        return tuple(group.tag for group in self.groups)

    @property
    def eagle_groups(self) -> tuple[int, ...]:
        """Indices of the groups that serve a draft module."""
        return tuple(i for i, group in enumerate(self.groups) if group.eagle)

    @property
    def num_pools(self) -> int:
        """Pools of blocks."""
        return 1 if self.pools == "shared" else len(self.groups)

    def pool_of(self, tag: str) -> int:
        """Index of the pool that the group of that tag draws from."""
        index = self.group_index(tag)
        return 0 if self.pools == "shared" else index

    def group(self, tag: str) -> Group:
        """The group of that tag."""
        return self.groups[self.group_index(tag)]

    def group_index(self, tag: str) -> int:
        """Position of the group of that tag."""
        if tag not in self.tags:
            raise TopologyError("tag", tag, f"one of {', '.join(self.tags)}")
        return self.tags.index(tag)

    def layer(self, name: str) -> Layer:
        """The layer of that name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise TopologyError("layer", name, f"one of this topology's {len(self.layers)} layers")

    def owner(self, name: str) -> str:
        """Name of the layer that owns the cache which the layer of that name reads: mostly itself."""
        return self.layer(name).cache_of or name

    def groups_of(self, name: str) -> tuple[Group, ...]:
        """The groups whose blocks the layer of that name reads, in the layer's own order."""
        return tuple(self.group(tag) for tag in self.layer(self.owner(name)).tags)

    def group_of(self, name: str, tag: str | None = None) -> Group:
        """The one group of a layer, or its group of that tag.

        Raises:
          TopologyError: no such layer; the layer is not in that group; no tag given and it has several groups.
        """
        groups = self.groups_of(name)
        if tag is None:
            if len(groups) != 1:
                raise TopologyError("tag", None, f"one of layer {name}'s: {', '.join(group.tag for group in groups)}")
            return groups[0]
        for group in groups:
            if group.tag == tag:
                return group
        raise TopologyError("tag", tag, f"one of layer {name}'s: {', '.join(group.tag for group in groups)}")


def _layers_of(groups: Sequence[Group]) -> tuple[Layer, ...]:
    tags: dict[str, list[str]] = {}
    for group in groups:
        for name in group.layers:
            tags.setdefault(name, []).append(group.tag)
    return tuple(Layer(name=name, tags=tuple(of_layer)) for name, of_layer in tags.items())


def _check_membership(groups: Sequence[Group], layers: Sequence[Layer]) -> None:
    """Groups know their layers and layers their groups, and both agree."""
    if repeated := _repeated(layer.name for layer in layers):
        raise TopologyError("layers", repeated, "a name that no other layer has")
    listed = {group.tag: group.layers for group in groups}
    tags = {layer.name: layer.tags for layer in layers}
    for layer in layers:
        for tag in layer.tags:
            if tag not in listed:
                raise TopologyError(f"tags of layer {layer.name}", tag, f"one of {', '.join(listed)}")
            if layer.name not in listed[tag]:
                raise TopologyError(f"layers of group {tag}", listed[tag], f"{layer.name} too, as that layer says")
    for group in groups:
        for name in group.layers:
            if name not in tags:
                raise TopologyError(f"layers of group {group.tag}", name, f"one of the {len(layers)} layers")
            if group.tag not in tags[name]:
                raise TopologyError(f"tags of layer {name}", tags[name], f"{group.tag} too, as that group says")


def _check_sharing(layers: Sequence[Layer]) -> None:
    """A layer that reads another's cache reads one that stands before it and owns it."""
    owners: set[str] = set()
    for layer in layers:
        if layer.cache_of is None:
            owners.add(layer.name)
        elif layer.cache_of not in owners:
            expected = f"a layer before {layer.name} with a cache of its own"
            raise TopologyError(f"cache_of of layer {layer.name}", layer.cache_of, expected)


def _repeated(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
