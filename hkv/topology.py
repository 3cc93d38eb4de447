"""Layers, the groups that share one block table each, and the pool the groups draw from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.errors import TopologyError
from hkv.spec import LayerSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share one block table.

    Attributes:
      tag: the group's identity; unique within a topology.
      spec: what each of its layers caches.
      layers: names of its layers; empty when only block ids are studied.
      eagle: the group serves a draft (EAGLE or MTP) module, whose last block cannot be trusted after a hit.
    """

    tag: str
    spec: LayerSpec
    layers: tuple[str, ...] = ()
    eagle: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.tag, str) or not self.tag:
            raise TopologyError("tag", self.tag, "a non-empty string")
        if not isinstance(self.spec, LayerSpec):
            raise TopologyError("spec", self.spec, "a LayerSpec")
        if len(set(self.layers)) != len(self.layers):
            raise TopologyError("layers", self.layers, "each layer once")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Groups over one shared pool of blocks, in the order in which the engine visits them.

    Attributes:
      groups: the groups; tags are unique, and a layer belongs to one group at most.
    """

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        tags = [group.tag for group in self.groups]
        if repeated := sorted({tag for tag in tags if tags.count(tag) > 1}):
            raise TopologyError("groups", repeated[0], "a tag that no other group has")
        layers = [layer for group in self.groups for layer in group.layers]
        if repeated := sorted({layer for layer in layers if layers.count(layer) > 1}):
            raise TopologyError("layers", repeated[0], "a layer that no other group has")

    @classmethod
    def of_specs(cls, specs: Sequence[LayerSpec], eagle_groups: Sequence[int] = ()) -> Topology:
        """Anonymous groups, tagged `g0`, `g1`, ..., one for each spec.

        Args:
          specs: one per group, in group order.
          eagle_groups: indices of the groups that serve a draft module.
        """
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
    def eagle_groups(self) -> tuple[int, ...]:
        """Indices of the groups that serve a draft module."""
        return tuple(i for i, group in enumerate(self.groups) if group.eagle)

    def group(self, tag: str) -> Group:
        """The group of that tag.

        Raises:
          TopologyError: there is none.
        """
        for group in self.groups:
            if group.tag == tag:
                return group
        raise TopologyError("tag", tag, f"one of {', '.join(group.tag for group in self.groups)}")
