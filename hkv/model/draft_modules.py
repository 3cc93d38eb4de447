"""Draft modules (MTP, EAGLE): their layers join the target model's groups, so that one block table serves both.

The rules are RTP-LLM's `CacheConfig::mergeMTPModule`; where a silent loss is possible there, it is an error here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.errors import TopologyError
from hkv.model.group_policy import GroupType
from hkv.model.topology import Group, Layer, Topology

DEFAULT_TAG = "default"
"""The tag of a model whose layers all cache alike; a draft's group of this tag looks for one that fits."""


@dataclasses.dataclass(frozen=True)
class MergedTopology:
    """A target model and its draft modules over the same groups.

    Attributes:
      topology: all layers, the target's first, then each module's, named `draft0.NAME`, `draft1.NAME`, ...; a layer's
        global id is its position.
      target: the target alone.
      modules: each module alone, under its own layer names, with the target's groups in the target's order; a group it
        has nothing in is a placeholder without layers.
    """

    topology: Topology
    target: Topology
    modules: tuple[Topology, ...]

    def global_id(self, module: int, layer: int) -> int:
        """Position among all layers of a module's layer (RTP-LLM `mtpGlobalLayerId`)."""
        if not 0 <= module < len(self.modules):
            raise TopologyError("module", module, f"an index below {len(self.modules)}")
        return draft_layer_id(len(self.target.layers), module, len(self.modules[module].layers), layer)


def draft_layer_id(target_layers: int, module: int, layers_per_module: int, layer: int) -> int:
    """Global id of a draft module's layer: modules follow the target, each as long as the others.

    An argument out of range is refused, where RTP-LLM answers UINT32_MAX.
    """
    if target_layers < 0:
        raise TopologyError("target_layers", target_layers, "0 or more")
    if module < 0:
        raise TopologyError("module", module, "0 or more")
    if layers_per_module < 1:
        raise TopologyError("layers_per_module", layers_per_module, "1 or more")
    if not 0 <= layer < layers_per_module:
        raise TopologyError("layer", layer, f"an index below {layers_per_module}")
    return target_layers + module * layers_per_module + layer


def merge_draft_modules(target: Topology, modules: Sequence[Topology]) -> MergedTopology:
    """Give each module's layers to the target's groups, module after module.

    A draft's group joins the target's group of the same tag. A draft with one FULL attention group, tagged `default`,
    joins the only target group of the same policy, kind, element type, bytes and block size.

    Args:
      target: groups with layers.
      modules: one topology per module, in order, all with as many layers.

    Raises:
      TopologyError: modules of different length; a draft group that lists other than all its layers in order, or that
        no target group takes; several target groups that could; a target group whose layers would not line up with
        the pool's; layer names that collide.
    """
    if not target.layers:
        raise TopologyError("target", target.tags, "groups with layers")
    depth = max(len(group.layers) for group in target.groups)
    merged, views = target, []
    for index, module in enumerate(modules):
        _check_module(module, modules[0], index)
        takers = _takers(target, module, index)
        for tag in takers.values():
            _check_alignment(merged.group(tag), depth + index * len(module.layers), index)
        merged = _with_module(merged, module, takers, index)
        views.append(_view(target, module, takers))
    return MergedTopology(merged, target, tuple(views))


def _check_module(module: Topology, first: Topology, index: int) -> None:
    names = tuple(layer.name for layer in module.layers)
    if not names or len(names) != len(first.layers):
        expected = f"{len(first.layers) or 'at least one'}, as many as in every module"
        raise TopologyError(f"layers of module {index}", names, expected)
    for layer in module.layers:
        if layer.cache_of is not None:
            raise TopologyError(f"cache_of of module {index}", layer.cache_of, "draft layers with caches of their own")
    for group in module.groups:
        if group.layers and group.layers != names:
            raise TopologyError(f"layers of draft group {group.tag}", group.layers, f"all in order: {', '.join(names)}")


def _takers(target: Topology, module: Topology, index: int) -> dict[str, str]:
    """The target's tag for each tag of the module that has layers."""
    takers: dict[str, str] = {}
    sole_default = module.tags == (DEFAULT_TAG,)
    for group in module.groups:
        if not group.layers:
            continue
        if group.tag in target.tags:
            _check_exact(target.group(group.tag), group, index)
            takers[group.tag] = group.tag
        elif sole_default and _is_attention(group):
            takers[group.tag] = _alias(target, group)
        else:
            layer = group.layers[0]
            expected = f"a tag of the target's ({', '.join(target.tags)}), to map layer {layer}"
            raise TopologyError(f"groups of module {index}", group.tag, expected)
    return takers


def _is_attention(group: Group) -> bool:
    return group.policy.group_type is GroupType.FULL and group.spec.attends


def _check_exact(target: Group, draft: Group, index: int) -> None:
    """One block table serves both, so blocks must stand for the same tokens and be kept alike."""
    for name, wanted, value in (
        ("block_size", target.spec.block_size, draft.spec.block_size),
        ("kernel_block_size", target.kernel_block_size, draft.kernel_block_size),
        ("group_type", target.policy.group_type, draft.policy.group_type),
    ):
        if value != wanted:
            expected = f"{wanted!r} as in the target's group of that tag"
            raise TopologyError(f"{name} of module {index}'s group {draft.tag}", value, expected)


def _alias(target: Topology, draft: Group) -> str:
    """The tag of the only target group that the draft's `default` group can stand for."""
    fits = [group.tag for group in target.groups if _shape(group) == _shape(draft)]
    if not fits:
        expected = f"a compatible target group among {', '.join(target.tags)}, got none"
        raise TopologyError("groups", DEFAULT_TAG, expected)
    if len(fits) > 1:
        raise TopologyError("groups", DEFAULT_TAG, f"one compatible target group, not several: {', '.join(fits)}")
    return fits[0]


def _shape(group: Group) -> tuple[object, ...]:
    """Properties that must be equal for one group to stand for another; names, windows and draft flags are left out."""
    spec = group.spec
    bytes_of = (spec.unpadded_page_size_bytes, spec.page_size_bytes)
    return group.policy, type(spec), spec.element, bytes_of, spec.block_size, group.kernel_block_size


def _check_alignment(group: Group, wanted: int, index: int) -> None:
    """A layer's place in its group is its place in the pool, so groups must be full before a module is appended."""
    if len(group.layers) != wanted:
        expected = f"{wanted} before module {index} joins, so that places in the group are places in the pool"
        raise TopologyError(f"layers of group {group.tag}", len(group.layers), expected)


def _with_module(merged: Topology, module: Topology, takers: dict[str, str], index: int) -> Topology:
    drafts = {taker: module.group(tag) for tag, taker in takers.items()}
    groups = []
    for group in merged.groups:
        draft = drafts.get(group.tag)
        if draft is not None:
            layers = (*group.layers, *(f"draft{index}.{name}" for name in draft.layers))
            group = dataclasses.replace(group, layers=layers, eagle=group.eagle or draft.eagle)
        groups.append(group)
    layers = tuple(
        Layer(name=f"draft{index}.{layer.name}", tags=tuple(takers[tag] for tag in layer.tags))
        for layer in module.layers
    )
    return Topology(tuple(groups), layers=(*merged.layers, *layers), pools=merged.pools)


def _view(target: Topology, module: Topology, takers: dict[str, str]) -> Topology:
    drafts = {taker: module.group(tag) for tag, taker in takers.items()}
    groups = tuple(
        dataclasses.replace(drafts[group.tag], tag=group.tag)
        if group.tag in drafts
        else dataclasses.replace(group, layers=(), eagle=False)
        for group in target.groups
    )
    layers = tuple(dataclasses.replace(layer, tags=tuple(takers[tag] for tag in layer.tags)) for layer in module.layers)
    return Topology(groups, layers=layers, pools=target.pools)
