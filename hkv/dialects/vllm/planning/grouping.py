"""Grouping of layers: the order in which vLLM 0.33 tries its ways of grouping."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hkv.dialects.vllm.planning.buckets import group_by_spec
from hkv.dialects.vllm.planning.hidden import add_hidden_states
from hkv.dialects.vllm.planning.options import PlanOptions
from hkv.dialects.vllm.planning.pages import PagesDiffer, packed_groups, unify_pages
from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.dialects.vllm.planning.promotion import full_allocation, merge_all, promote_everything
from hkv.errors import PlanError
from hkv.layout.orders import Order
from hkv.spec import LayerSpec, is_uniform_type


def group_layers(layers: Mapping[str, LayerSpec], order: Order, options: PlanOptions) -> list[PlannedGroup]:
    """The groups of a whole model (vLLM 0.33 `get_global_kv_cache_groups` with the default builder).

    Args:
      layers: every layer that caches something, by name, in model order; empty for a model without a cache.
      order: physical order of the axes.
      options: options that the plan is made with.

    Raises:
      PlanError: the layers cannot be grouped.
    """
    if not layers:
        return []
    extra = max(0, options.prefill_lookahead - 1)
    stamped = {name: spec.keeping(extra) for name, spec in layers.items()}
    groups = _default_groups(stamped, order, options)
    _check_partition(groups, stamped)
    if options.eagle:
        drafts = {name for name, spec in layers.items() if spec.is_draft}
        groups = [dataclasses.replace(group, eagle=not drafts.isdisjoint(group.names)) for group in groups]
    return groups


def _default_groups(layers: dict[str, LayerSpec], order: Order, options: PlanOptions) -> list[PlannedGroup]:
    bugs = options.bugs
    if not options.hybrid:
        layers = promote_everything(layers, bugs)
    merged = merge_all(layers, bugs)
    if merged is not None:
        return [PlannedGroup.merged(list(layers), merged)]
    if is_uniform_type(list(layers.values())):
        return [PlannedGroup.of_type(layers)]
    hidden = {name: spec for name, spec in layers.items() if spec.stands_alone}
    rest = {name: spec for name, spec in layers.items() if name not in hidden}
    if not rest:
        raise PlanError("layers", sorted(hidden), "attention or state layers beside hidden states")
    if packed := packed_groups(rest, order, bugs):
        return [*packed, *(PlannedGroup.merged([name], spec) for name, spec in hidden.items())]
    try:
        unified = unify_pages(rest, bugs)
    except PagesDiffer:
        fallback = full_allocation(layers, bugs)
        if fallback is None:
            raise
        return [fallback]
    return add_hidden_states(group_by_spec(unified, bugs), hidden, bugs)


def _check_partition(groups: Sequence[PlannedGroup], layers: Mapping[str, LayerSpec]) -> None:
    grouped = [name for group in groups for name in group.names]
    if sorted(grouped) != sorted(layers):
        odd = sorted(set(layers).symmetric_difference(grouped)) or sorted({n for n in grouped if grouped.count(n) > 1})
        raise PlanError("layers", odd, "each in exactly one group")
