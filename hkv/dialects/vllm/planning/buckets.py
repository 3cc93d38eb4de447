"""Groups of equal page size: layers of one spec dealt out into groups of about the same number of layers."""

from __future__ import annotations

from collections.abc import Mapping

from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.spec import LayerSpec, MergeError


def group_by_spec(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> list[PlannedGroup]:
    """Groups of layers whose pages are all of one size (vLLM 0.33 `_get_kv_cache_groups_uniform_page_size`).

    Layers whose specs merge share a bucket. Groups are as large as the smallest bucket, or as the largest where that is
    less than one and a half times the smallest. Layers are dealt out in turn, so that every pipeline stage gets its
    share of every group.

    Args:
      layers: the layers by name, in model order; at least one.
      bugs: names of upstream defects to reproduce.
    """
    buckets = _buckets(layers, bugs)
    sizes = [len(names) for names, _ in buckets]
    smallest, largest = min(sizes), max(sizes)
    group_size = largest if 2 * largest < 3 * smallest else smallest
    groups = []
    for names, _ in buckets:
        count = -(-len(names) // group_size)
        for index in range(count):
            members = names[index::count]
            specs = [layers[name] for name in members]
            groups.append(PlannedGroup.merged(members, type(specs[0]).merge(specs, bugs)))
    return groups


def _buckets(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> list[tuple[list[str], list[LayerSpec]]]:
    """Layer names and distinct specs of each bucket, in order of first appearance."""
    equal: dict[LayerSpec, list[str]] = {}
    for name, spec in layers.items():
        equal.setdefault(spec, []).append(name)
    buckets: list[tuple[list[str], list[LayerSpec]]] = []
    for spec, names in equal.items():
        for bucket_names, bucket_specs in buckets:
            try:
                type(bucket_specs[0]).merge([*bucket_specs, spec], bugs)
            except MergeError:
                continue
            bucket_names.extend(names)
            bucket_specs.append(spec)
            break
        else:
            buckets.append((list(names), [spec]))
    return buckets
