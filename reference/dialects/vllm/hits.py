"""The longest prefix that all groups can resume from: one group alone, or several until they agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from reference.dialects.vllm.kinds.kind import Kind, ceil_div
from reference.keys.views import Chain


class Found(NamedTuple):
    """Result of a lookup.

    Attributes:
      hit: tokens that need not be computed.
      blocks: for each group, the row that the request would begin with; empty lists for groups without a hit.
      shared_prefix: the longest prefix that the search came to, in tokens, each group asked within what those before it
        found, when that is longer than `hit`; else 0.
    """

    hit: int
    blocks: list[list[int]]
    shared_prefix: int


@dataclasses.dataclass(frozen=True)
class SpecGroup:
    """Groups of equal spec, which are looked up together. vLLM 0.33 `SpecGroup`.

    Attributes:
      kinds: the groups, in order; a block counts only if all of them have it.
      eagle: whether the EAGLE drop applies, which it does to all when it does to one.
    """

    kinds: tuple[Kind, ...]
    eagle: bool

    @property
    def groups(self) -> tuple[int, ...]:
        """Indices of the groups."""
        return tuple(kind.group for kind in self.kinds)

    @property
    def first(self) -> Kind:
        """The first group, whose rules stand for all."""
        return self.kinds[0]


def spec_groups(kinds: Sequence[Kind], eagle_groups: Sequence[int]) -> list[SpecGroup]:
    """Groups that can be cached, joined by equal spec, in order of appearance but full attention first."""
    joined: list[list[Kind]] = []
    for kind in kinds:
        if kind.spec.prefix_cacheable:
            for members in joined:
                if type(members[0]) is type(kind) and members[0].spec == kind.spec:
                    members.append(kind)
                    break
            else:
                joined.append([kind])
    joined.sort(key=lambda members: not members[0].spec.reads_all)
    return [SpecGroup(tuple(members), any(kind.group in eagle_groups for kind in members)) for members in joined]


def find_alone(kind: Kind, keys: Sequence[Chain], max_length: int, drop: bool) -> Found:
    """The hit of the only group (vLLM 0.33 `UnitaryKVCacheCoordinator.find_longest_cache_hit`)."""
    lists, hit = kind.find(keys, max_length, (kind.group,), drop, kind.block_size)
    return Found(hit, lists, 0)


def find_together(
    members: Sequence[SpecGroup], keys: Sequence[Chain], max_length: int, num_groups: int, partial_hits: bool
) -> Found:
    """The hit on which all groups agree (vLLM 0.33 `HybridKVCacheCoordinator.find_longest_cache_hit`).

    Each spec group in turn shortens the candidate; the round is repeated until none does. Full attention is looked up
    once, for a prefix of its hit is a hit too. A group under the EAGLE drop looks one margin beyond the candidate, and
    drops at most once for each candidate: a group without the drop that shortens it makes the others drop anew. Full
    attention with one other spec needs a single round.

    Args:
      members: from `spec_groups`.
      keys: the request's keys.
      max_length: tokens; the hit is not longer.
      num_groups: groups of the cache, those that cannot be cached included.
      partial_hits: whether hits may end inside a block.
    """
    found: dict[int, tuple[list[list[int]], int]] = {}
    dropped: set[int] = set()
    hit, longest = max_length, 0
    one_round = len(members) == 2 and members[0].first.spec.reads_all
    while True:
        candidate = hit
        for index, group in enumerate(members):
            kind = group.first
            if index in found and kind.spec.reads_all:
                candidate = min(candidate, found[index][1])
                continue
            drop = group.eagle and index not in dropped
            length = search_limit(kind, candidate, keys, partial_hits) if drop else candidate
            found[index] = kind.find(keys, length, group.groups, drop, kind.alignment)
            length = found[index][1]
            if drop:
                dropped.add(index)
            elif length < candidate:
                dropped.clear()
            candidate = length
            longest = max(longest, candidate)
        if candidate >= hit:
            break
        hit = candidate
        if one_round:
            break
    return Found(hit, _rows(members, found, hit, num_groups), longest if longest > hit else 0)


def search_limit(kind: Kind, candidate: int, keys: Sequence[Chain], partial_hits: bool) -> int:
    """Length up to which a group that will drop looks: a margin beyond the candidate proves what it would give up."""
    if kind.spec.snapshot:
        return candidate
    inside = partial_hits and kind.fine_grained and kind.block_size > kind.hash_block_size
    margin = kind.hash_block_size if inside else kind.block_size
    return min(candidate + margin, len(keys) * kind.hash_block_size)


def _rows(
    members: Sequence[SpecGroup], found: dict[int, tuple[list[list[int]], int]], hit: int, num_groups: int
) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(num_groups)]
    for index, group in enumerate(members):
        for kind, blocks in zip(group.kinds, found[index][0], strict=True):
            if kind.spec.reads_all:
                del blocks[ceil_div(hit, kind.block_size) :]
            rows[kind.group] = blocks
    return rows
