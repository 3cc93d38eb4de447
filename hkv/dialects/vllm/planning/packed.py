"""Groups of mixed pages, packed side by side within each block; for layouts that put blocks outermost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.errors import PlanError
from hkv.layout.orders import Order
from hkv.spec import LayerSpec, is_uniform_type


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Layers of one type.

    Attributes:
      layers: the layers by name.
    """

    layers: dict[str, LayerSpec]

    @property
    def columns(self) -> dict[int, list[str]]:
        """Layer names by page size, sizes in order of first appearance."""
        columns: dict[int, list[str]] = {}
        for name, spec in self.layers.items():
            columns.setdefault(spec.page_size_bytes, []).append(name)
        return columns

    @property
    def balanced(self) -> bool:
        """True if every page size has the same number of layers, so that the bucket is a repeated pattern."""
        return len({len(names) for names in self.columns.values()}) == 1

    @property
    def repeats(self) -> int:
        """Layers of the most frequent page size."""
        return max(len(names) for names in self.columns.values())

    def widest(self, groups: int) -> int:
        """Bytes of the widest of `groups` groups."""
        return sum(-(-len(names) // groups) * page for page, names in self.columns.items())


def packed_groups(layers: Mapping[str, LayerSpec], order: Order, bugs: frozenset[str]) -> list[PlannedGroup] | None:
    """Groups that pack pages of several sizes into blocks, or None where neither layout nor pages call for it.

    vLLM 0.33 `_get_packed_kv_cache_groups`: layers of one type share a bucket; buckets that repeat a pattern
    are cut into groups of about the same number of repeats; states are cut so that they fit a block others need anyway.

    Raises:
      PlanError: only under the defect `packed-split-loses-layers`.
    """
    if not order.block_outermost or len({spec.page_size_bytes for spec in layers.values()}) <= 1:
        return None
    buckets = _buckets(layers)
    repeats = _repeats_per_group(buckets)
    anchor = max(
        bucket.widest(len(bucket.layers) if _is_state(bucket, repeats) else _groups_of(bucket, repeats))
        for bucket in buckets
    )
    groups: list[PlannedGroup] = []
    for bucket in buckets:
        count = _groups_of(bucket, repeats)
        if _is_state(bucket, repeats):
            first = next(iter(bucket.layers.values()))
            count = max(count, -(-len(bucket.layers) // max(anchor // first.page_size_bytes, 1)))
        groups.extend(_split(bucket, count, bugs))
    return groups


def _buckets(layers: Mapping[str, LayerSpec]) -> list[Bucket]:
    buckets: list[Bucket] = []
    for name, spec in layers.items():
        for bucket in buckets:
            if is_uniform_type([*bucket.layers.values(), spec]):
                bucket.layers[name] = spec
                break
        else:
            buckets.append(Bucket({name: spec}))
    return buckets


def _repeats_per_group(buckets: Sequence[Bucket]) -> int | None:
    """Repeats of its pattern that a group of a balanced bucket covers; None when no bucket mixes page sizes evenly."""
    balanced = [bucket for bucket in buckets if bucket.balanced]
    floor = max((bucket.repeats for bucket in balanced if len(bucket.columns) > 1), default=0)
    return approximate_gcd([bucket.repeats for bucket in balanced], floor) if floor else None


def approximate_gcd(values: Sequence[int], at_least: int = 1) -> int:
    """The number that divides `values` with the least rounding up in all; the larger one on a tie.

    Args:
      values: positive integers, at least one.
      at_least: smallest answer; returned itself when all values are smaller.
    """
    candidates = range(max(1, at_least), max(values) + 1)
    return min(candidates, key=lambda d: (sum(-value % d for value in values), -d), default=max(1, at_least))


def _groups_of(bucket: Bucket, repeats: int | None) -> int:
    return -(-bucket.repeats // repeats) if bucket.balanced and repeats is not None else 1


def _is_state(bucket: Bucket, repeats: int | None) -> bool:
    """True if the bucket may be cut down to one layer a group: states, and windows where nothing else sets a size."""
    first = next(iter(bucket.layers.values()))
    return first.snapshot or first.one_block or (repeats is None and first.slides)


def _split(bucket: Bucket, count: int, bugs: frozenset[str]) -> list[PlannedGroup]:
    if count == 1:
        return [PlannedGroup.of_type(bucket.layers)]
    columns = list(bucket.columns.values())
    if bucket.balanced and count <= bucket.repeats:
        dealt = [[name for row in list(zip(*columns, strict=True))[i::count] for name in row] for i in range(count)]
    elif "packed-split-loses-layers" in bugs:
        expected = f"layers of each page size in equal number, {count} of each or more"
        raise PlanError("layers", [len(names) for names in columns], expected)
    else:
        names = [name for column in columns for name in column]
        dealt = [names[i::count] for i in range(count)]
    return [PlannedGroup.of_type({name: bucket.layers[name] for name in names}) for names in dealt]
