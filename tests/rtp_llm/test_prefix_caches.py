"""RTP-LLM's conformance vectors for its caches."""

from __future__ import annotations

import pytest

from reference.dialects.rtp_llm.legacy_cache import BlockCache
from tests.rtp_llm.witness.eviction import Evicted, select, select_for_group
from tests.rtp_llm.witness.pool import BlockPool
from tests.rtp_llm.witness.prefix_tree import GPU_CP_CANONICAL, GPU_LOGICAL
from tests.rtp_llm.witness.resource import ROOT, Dependency
from tests.rtp_llm.witness.shared_cache import SharedBlockCache

N = -1


class Cache:
    """A cache whose blocks nobody else holds."""

    def __init__(self, groups: int = 1, tree: bool = True, independent: frozenset[int] = frozenset()) -> None:
        self.pools = [BlockPool(100) for _ in range(groups)]
        self.shared = SharedBlockCache(self.pools, tree=tree, independent=independent)

    def put(self, key: int, parent: int | None = None, groups: tuple[int, ...] = (0,), **options) -> None:
        blocks = [N] * len(self.pools)
        for group in groups:
            (blocks[group],) = self.pools[group].malloc(1)
        dependency = options.pop("dependency", Dependency(0 if parent is None else 1, parent))
        self.shared.put(key, blocks, dependency=dependency, **options)
        for group in groups:
            self.pools[group].release([blocks[group]])

    def evict(self, least: int) -> list[int]:
        return keys(select(self.shared, least))

    def evict_group(self, group: int, least: int) -> list[int]:
        return keys(select_for_group(self.shared, group, least))


def keys(evicted: list[Evicted]) -> list[int]:
    return [each.key for each in evicted]


def test_version_begins_below_zero() -> None:
    cache = Cache()
    assert cache.shared.version == -1
    cache.put(1)
    assert cache.shared.version == 0


def test_leaves_before_what_they_stand_on() -> None:
    cache = Cache()
    cache.put(2, parent=1)
    cache.put(3, parent=1)
    cache.put(1)
    assert cache.evict(1) == [2]
    assert cache.evict(1) == [1, 3]


def test_looking_counts_as_using() -> None:
    cache = Cache()
    cache.put(1)
    cache.put(2, parent=1)
    cache.put(3)
    cache.shared.match(2)
    assert cache.evict(1) == [3]


def test_residence_stays() -> None:
    cache = Cache()
    cache.put(1)
    cache.put(1, groups=(), resident=True)
    cache.put(1, groups=())
    assert cache.evict(1) == []


def test_the_namespace_comes_along() -> None:
    cache = Cache()
    cache.put(1, namespace=GPU_CP_CANONICAL)
    assert [each.namespace for each in select(cache.shared, 1)] == [2]


@pytest.mark.parametrize("tree", [True, False])
def test_a_canonical_dependency_is_not_replaced(tree: bool) -> None:
    cache = Cache(tree=tree)
    cache.put(8, namespace=GPU_CP_CANONICAL)
    cache.put(8, parent=7, groups=(), namespace=GPU_LOGICAL)
    (evicted,) = select(cache.shared, 1)
    assert (evicted.dependency, evicted.namespace) == (ROOT, 2)


def test_a_canonical_chain_leaves_the_logical_one_behind() -> None:
    cache = Cache()
    cache.put(100, namespace=GPU_LOGICAL)
    for key in (101, 102, 103):
        cache.put(key, parent=key - 1, namespace=GPU_LOGICAL)
    cache.put(101, groups=(), namespace=GPU_CP_CANONICAL)
    cache.put(103, parent=101, groups=(), namespace=GPU_CP_CANONICAL)
    assert cache.evict(1) == [101, 103]
    assert sorted(cache.shared.items) == [100, 102]


def test_chains_without_the_group_stay() -> None:
    cache = Cache(groups=4)
    cache.put(1)
    cache.put(2, parent=1)
    cache.put(10, groups=(3,))
    cache.put(11, parent=10, groups=(3,))
    assert cache.evict_group(3, 1) == [10, 11]


def test_leaves_in_the_way_of_an_ancestor() -> None:
    cache = Cache(groups=2)
    cache.put(1, groups=(1,))
    cache.put(2, parent=1)
    cache.put(3, parent=1)
    assert cache.evict_group(1, 1) == [2, 1, 3]


@pytest.mark.parametrize("below", [False, True])
def test_nothing_leaves_in_vain(below: bool) -> None:
    cache = Cache(groups=2)
    cache.put(1, groups=(1,))
    cache.put(2, parent=1)
    cache.put(3, parent=1, resident=not below)
    if below:
        cache.put(4, parent=3, resident=True)
    assert cache.evict_group(1, 1) == []
    assert len(cache.shared.items) == 3 + below


def test_the_older_cache_pops_the_least_recently_used() -> None:
    cache = BlockCache()
    for key in range(1, 6):
        assert cache.put(key, 0, key)
    assert not cache.put(5, 0, 9)
    assert cache.pop(2) == [1, 2]
    assert cache.pop(3) == [3, 4, 5]


def test_the_older_cache_evicts_whole_keys() -> None:
    cache = BlockCache()
    cache.put(101, 0, 10)
    cache.put(101, 1, 11)
    cache.put(102, 0, 12)
    assert cache.select_and_evict(2) == {101: [10, 11]}
    assert cache.select_and_evict(0) == {102: [12]}


def test_the_older_cache_keeps_residents() -> None:
    cache = BlockCache()
    cache.put(1, 0, 10, resident=True)
    cache.put(1, 1, 11)
    assert cache.select_and_evict(1) == {}
    assert cache.pop(5) == [11]
    assert (cache.match(1, 0), cache.match(1, 1)) == (10, N)


def test_a_filled_slot_keeps_its_block() -> None:
    cache = Cache(groups=2)
    cache.put(1)
    first = cache.shared.match_group(1, 0)
    cache.put(1, groups=(0, 1))
    assert cache.shared.match_group(1, 0) == first
    assert cache.shared.match_group(1, 1) != N
    assert cache.pools[0].busy("cache") == 1


def test_an_independent_group_loses_blocks_before_chains_go() -> None:
    cache = Cache(groups=2, independent=frozenset({1}))
    cache.put(1, groups=(0, 1))
    cache.put(2, parent=1, groups=(0, 1))
    cache.put(3, parent=2, groups=(0, 1))
    assert cache.evict_group(1, 5) == [2]
    assert cache.shared.match_group(2, 1) == N
    assert cache.shared.match_group(2, 0) != N
    assert cache.evict_group(1, 1) == [1]
    assert cache.evict_group(1, 1) == [1, 2, 3]


def test_flat_eviction_is_in_order_of_use() -> None:
    cache = Cache(groups=2, tree=False)
    cache.put(1, groups=(0, 1))
    cache.put(2)
    cache.put(3, resident=True)
    cache.put(4)
    cache.shared.match(1)
    assert cache.evict_group(1, 1) == [1]
    assert cache.evict(1) == [2]
    assert cache.evict(9) == [4]
